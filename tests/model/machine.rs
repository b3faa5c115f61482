//! The state machine that the checker explores: who can do what, and who can be killed.

use std::fmt;

use ec_shared_region::step::Step;
use stateright::{Model, Property};

use super::original;
use super::process::{self, Ours, actor};
use super::properties;
use super::protocol::{Actor, Setting};
use super::state::{Bytes, GUEST, Inode, Open, PIECES, Pc, Process, State, Why};

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// A step of `docs/protocol.md`, and which part of it.
    Go(usize, Step, Pc),
    Original(usize, Pc),
    Fail(usize, Pc),
    /// Closes while views live on.
    KeepViews(usize),
    /// Goes on without the directory's lock.
    LosePatience(usize, Pc),
    Kill(usize, Pc),
    /// A child appears that has the mapping of that process.
    Fork(usize, Pc),
    /// It ends, or calls `exec`.
    ChildEnds(usize),
    /// The kernel drops a killed process's locks, and then closes a killed process's file.
    Exit(usize),
    /// Somebody takes the name away by hand.
    RemoveName,
    /// A new process in the place of one that is gone.
    Start(usize),
}

impl fmt::Debug for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Go(who, step, pc) => write!(f, "{who}: {} ({pc:?})", step.name()),
            Self::Original(who, pc) => write!(f, "{who}: {pc:?}"),
            Self::Fail(who, pc) => write!(f, "{who}: fails at {pc:?}"),
            Self::KeepViews(who) => write!(f, "{who}: closes, its views live on"),
            Self::LosePatience(who, pc) => write!(f, "{who}: waits no longer at {pc:?}"),
            Self::Fork(who, pc) => write!(f, "{who}: forks at {pc:?}"),
            Self::ChildEnds(who) => write!(f, "{who}: ends, a child"),
            Self::Kill(who, pc) => write!(f, "{who}: killed at {pc:?}"),
            Self::Exit(who) => write!(f, "{who}: the kernel takes down more of it"),
            Self::RemoveName => write!(f, "rm"),
            Self::Start(who) => write!(f, "{who}: starts anew"),
        }
    }
}

impl Model for Setting {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let mut state = State {
            names: [None; _],
            inodes: [Inode::default(); _],
            processes: [Process::GONE; _],
            lives_left: [0; _],
            removals_left: self.removals,
            seen: Default::default(),
        };
        for (id, is_full) in &self.dead {
            let ino = state.make_inode(*id);
            state.names[usize::from(*id)] = Some(ino);
            *state.inode(ino) = Inode {
                is_sized: *is_full,
                reserved: if *is_full { PIECES } else { 0 },
                bytes: Bytes::Written,
                excused: true,
                ..*state.inode(ino)
            };
        }
        for (me, actor) in self.actors.iter().enumerate() {
            assert!(me < GUEST, "too many processes");
            state.processes[me] = start(self, *actor);
            state.lives_left[me] = if *actor == Actor::Child { 0 } else { self.more_lives };
        }
        vec![state]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for me in 0..self.actors.len() {
            let pc = state.processes[me].pc;
            match pc {
                Pc::Gone => {
                    if state.lives_left[me] > 0 {
                        actions.push(Action::Start(me));
                    }
                    continue;
                }
                Pc::Killed | Pc::Dying => {
                    actions.push(Action::Exit(me));
                    continue;
                }
                Pc::Child => {
                    actions.push(Action::ChildEnds(me));
                    continue;
                }
                _ => {}
            }
            match state.processes[me].step() {
                Some(step) => {
                    if process::can_go(self, state, me) {
                        actions.push(Action::Go(me, step, pc));
                    }
                    if self.failures && process::can_fail(self, state, me) {
                        actions.push(Action::Fail(me, pc));
                    }
                    if self.views && pc == Pc::Unmap && !state.processes[me].is_creator && state.processes[me].is_ready
                    {
                        actions.push(Action::KeepViews(me));
                    }
                    if process::can_lose_patience(self, state, me) {
                        actions.push(Action::LosePatience(me, pc));
                    }
                }
                None => {
                    actions.push(Action::Original(me, pc));
                    if self.failures && original::can_fail(state, me) {
                        actions.push(Action::Fail(me, pc));
                    }
                }
            }
            if self.kills {
                actions.push(Action::Kill(me, pc));
            }
            if child_of(self, state, me).is_some() {
                actions.push(Action::Fork(me, pc));
            }
        }
        if state.removals_left > 0 && state.names[0].is_some() {
            actions.push(Action::RemoveName);
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Go(me, ..) | Action::Original(me, _) => go(self, &mut state, me),
            Action::Fail(me, _) if actor(self, me) == Actor::Original => original::fail(&mut state, me),
            Action::Fail(me, _) => Ours::new(self, &mut state, me).fail(),
            Action::LosePatience(me, _) => Ours::new(self, &mut state, me).lose_patience(),
            Action::KeepViews(me) => Ours::new(self, &mut state, me).keep_views(),
            Action::Kill(me, _) => kill(&mut state, me),
            Action::ChildEnds(me) => kill(&mut state, me),
            Action::Fork(me, _) => {
                let (at, child) = child_of(self, &state, me)?;
                state.processes[at] = child;
                state.lives_left[at] = 0;
            }
            Action::Exit(me) => exit(&mut state, me),
            Action::Start(me) => {
                state.processes[me] = start(self, actor(self, me));
                state.lives_left[me] -= 1;
            }
            Action::RemoveName => {
                if let Some(ino) = state.names[0].take() {
                    state.inode(ino).given_up = true;
                }
                state.removals_left -= 1;
                state.collect();
            }
        }
        state.normalise(self);
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties::all(self)
    }
}

pub fn start(setting: &Setting, actor: Actor) -> Process {
    match actor {
        Actor::Ours { id, .. } => Process {
            tries_left: if setting.room.is_some() { MOST_TRIES } else { 0 },
            ..Process::at(Pc::Lock, id)
        },
        Actor::Original => Process::at(Pc::OriginalCreate, 0),
        Actor::Child => Process::GONE,
    }
}

/// Where a child of this process would be, and what it would have: the mapping, with the open file that is mapped
/// and its locks. The other descriptors of a constructor are kept from it, `src/fork.rs`.
fn child_of(setting: &Setting, state: &State, parent: usize) -> Option<(usize, Process)> {
    let Actor::Ours { geometry, .. } = actor(setting, parent) else {
        return None;
    };
    let process = &state.processes[parent];
    let is_free = |at: &usize| setting.actors[*at] == Actor::Child && state.processes[*at].pc == Pc::Gone;
    let at = (0..setting.actors.len()).find(is_free)?;
    process.is_mapped.then_some(())?;
    let inherits_preparing = !setting.protocol.preparing_is_not_inherited;
    let child = Process {
        pc: Pc::Child,
        file: process.file,
        published: process.published.filter(|_| inherits_preparing),
        is_mapped: true,
        geometry: Some(geometry),
        ..Process::GONE
    };
    Some((at, child))
}

pub fn go(setting: &Setting, state: &mut State, me: usize) {
    match (state.processes[me].pc, actor(setting, me)) {
        (Pc::Killed | Pc::Dying, _) => exit(state, me),
        (Pc::Child, _) => kill(state, me),
        (_, Actor::Child) => unreachable!("a child does nothing else"),
        (_, Actor::Original) => original::go(setting, state, me),
        (_, Actor::Ours { .. }) => Ours::new(setting, state, me).go(),
    }
}

/// How often a constructor that was refused tries again: more would show nothing new.
const MOST_TRIES: u8 = 1;

/// SIGKILL. The memory goes first, which takes long: until then it has all of its locks but the directory's, which
/// nobody can see. Then go the locks, and the write access last; between the two the file is without a sign of
/// ours and yet has a writer.
fn kill(state: &mut State, me: usize) {
    let process = state.processes[me];
    if process.why == Why::LastOut
        && let Some(ino) = state.names[usize::from(process.target)]
    {
        state.inode(ino).excused = true;
    }
    excuse(state, &process);
    state.processes[me] = Process {
        pc: Pc::Killed,
        file: process.file,
        published: process.published,
        found: process.found.filter(|_| process.found_is_locked),
        found_is_locked: process.found_is_locked,
        geometry: process.geometry,
        ..Process::GONE
    };
    let has_locks = process.found_is_locked || process.opens().any(|open| open.life || open.preparing || open.geometry);
    if !has_locks {
        exit(state, me);
    }
    state.collect();
}

/// Who goes next may find a lock of its, and leave the file to the next constructor.
fn excuse(state: &mut State, killed: &Process) {
    let locked = killed.found.filter(|_| killed.found_is_locked);
    for ino in killed.opens().map(|open| open.ino).chain(locked) {
        state.inode(ino).excused = true;
    }
}

fn exit(state: &mut State, me: usize) {
    let process = state.processes[me];
    let open = process.file.or(process.published);
    excuse(state, &process);
    state.processes[me] = Process::GONE;
    if let (Pc::Killed, Some(open)) = (process.pc, open) {
        state.processes[me].pc = Pc::Dying;
        state.processes[me].file = Some(Open::bare(open.ino));
    }
    state.collect();
}
