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
    /// The kernel closes a killed process's file.
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
            Self::Kill(who, pc) => write!(f, "{who}: killed at {pc:?}"),
            Self::Exit(who) => write!(f, "{who}: its file is closed by the kernel"),
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
            state.processes[me] = start(*actor);
            state.lives_left[me] = self.more_lives;
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
                Pc::Dying => {
                    actions.push(Action::Exit(me));
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
                    if self.views && pc == Pc::Unmap && !state.processes[me].is_creator {
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
            Action::Exit(me) => exit(&mut state, me),
            Action::Start(me) => {
                state.processes[me] = start(actor(self, me));
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

fn start(actor: Actor) -> Process {
    match actor {
        Actor::Ours { id, .. } => Process::at(Pc::Lock, id),
        Actor::Original => Process::at(Pc::OriginalCreate, 0),
    }
}

pub fn go(setting: &Setting, state: &mut State, me: usize) {
    match (state.processes[me].pc, actor(setting, me)) {
        (Pc::Dying, _) => exit(state, me),
        (_, Actor::Original) => original::go(setting, state, me),
        (_, Actor::Ours { .. }) => Ours::new(setting, state, me).go(),
    }
}

/// SIGKILL. The kernel drops the locks first, of the directory and of the file, and the write access last;
/// between the two the file is without a sign of ours and yet has a writer.
fn kill(state: &mut State, me: usize) {
    let process = state.processes[me];
    if process.why == Why::LastOut
        && let Some(ino) = state.names[usize::from(process.target)]
    {
        state.inode(ino).excused = true;
    }
    state.processes[me] = Process::GONE;
    if let Some(open) = process.opens().next() {
        state.inode(open.ino).excused = true;
        state.processes[me].pc = Pc::Dying;
        state.processes[me].file = Some(Open::bare(open.ino));
    }
    state.collect();
}

fn exit(state: &mut State, me: usize) {
    if let Some(open) = state.processes[me].file {
        state.inode(open.ino).excused = true;
    }
    state.processes[me] = Process::GONE;
    state.collect();
}
