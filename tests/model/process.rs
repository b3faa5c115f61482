//! A process of ours: what it can do, what becomes of it when something fails, and what a look leads to.
//! The steps themselves are in `process/steps.rs`.

mod steps;

use super::protocol::{Actor, Mode, Setting};
use super::state::{Bytes, Ino, Open, PIECES, Pc, Process, State, Why};

/// One process of ours at work on a state.
pub struct Ours<'a> {
    setting: &'a Setting,
    state: &'a mut State,
    me: usize,
    id: u8,
    geometry: u8,
    mode: Mode,
    maps_ahead: bool,
}

/// Who the process in this place is; the guest is a plain constructor.
pub fn actor(setting: &Setting, me: usize) -> Actor {
    setting.actors.get(me).copied().unwrap_or(super::protocol::OURS)
}

/// Can it do its next step now? Only the directory's lock makes anybody wait.
pub fn can_go(setting: &Setting, state: &State, me: usize) -> bool {
    let waits_for_the_lock = matches!(state.processes[me].pc, Pc::Lock | Pc::DropNameLock);
    !(waits_for_the_lock && setting.protocol.directory_lock && state.is_directory_locked())
}

/// Can it fail here, by an error of the kernel, Ctrl-C or the end of its patience?
pub fn can_fail(setting: &Setting, state: &State, me: usize) -> bool {
    let process = &state.processes[me];
    match process.pc {
        // A timeout or Ctrl-C; a process that closes does not look for Ctrl-C.
        Pc::Lock => process.why != Why::LastOut,
        Pc::Map | Pc::Reserve | Pc::MapAhead | Pc::JoinLook | Pc::JoinReserve | Pc::JoinMap | Pc::JoinMapAhead => true,
        Pc::TryAgainAskFreeing => true,
        // Its user waits no longer, or has never waited.
        Pc::AwaitBacking => true,
        // It has waited for them for long enough.
        Pc::AskWhetherTheyAreDying => true,
        Pc::LinkedShowLife => setting.linked_may_fail,
        _ => false,
    }
}

/// Can its patience with the directory's lock end, though it goes on?
pub fn can_lose_patience(setting: &Setting, state: &State, me: usize) -> bool {
    let process = &state.processes[me];
    setting.lock_timeouts
        && state.is_directory_locked()
        && (process.pc == Pc::DropNameLock || (process.pc == Pc::Lock && process.why == Why::LastOut))
}

impl<'a> Ours<'a> {
    pub fn new(setting: &'a Setting, state: &'a mut State, me: usize) -> Self {
        let Actor::Ours {
            id,
            geometry,
            mode,
            maps_ahead,
        } = actor(setting, me)
        else {
            unreachable!("the original has a file of its own");
        };
        Self {
            setting,
            state,
            me,
            id,
            geometry,
            mode,
            maps_ahead,
        }
    }

    fn process(&mut self) -> &mut Process {
        &mut self.state.processes[self.me]
    }

    fn now(&self) -> Process {
        self.state.processes[self.me]
    }

    fn to(&mut self, pc: Pc) {
        self.process().pc = pc;
    }

    fn name(&self) -> Option<Ino> {
        self.state.names[usize::from(self.now().target)]
    }

    fn found(&self) -> Ino {
        self.now().found.expect("a probe comes first")
    }

    fn file(&mut self) -> &mut Open {
        self.process().file.as_mut().expect("the file was opened")
    }

    fn unlock(&mut self) {
        self.process().has_directory_lock = false;
    }

    fn announces_geometry(&self) -> bool {
        self.setting.ofd_locks && self.setting.protocol.announces_geometry
    }

    fn is_freeing(&self) -> bool {
        self.setting.ofd_locks && self.state.is_freeing(self.me)
    }

    /// A creator's signs of life, without the one of its work.
    fn creators_signs(&self, ino: Ino) -> Open {
        Open {
            ino,
            life: self.setting.protocol.publishes_alive,
            preparing: false,
            geometry: self.announces_geometry(),
        }
    }

    /// On the open file that is published.
    fn published_signs(&self, ino: Ino) -> Open {
        Open {
            preparing: self.setting.ofd_locks,
            ..self.creators_signs(ino)
        }
    }

    /// The creator's open file of that kind is closed, and its lock taken back, also from a child that has it.
    fn end_preparing(&mut self) {
        let Some(published) = self.process().published.take() else {
            return;
        };
        for process in &mut self.state.processes {
            let inherited = process.published.as_mut().filter(|open| open.ino == published.ino);
            if let Some(open) = inherited {
                open.preparing = false;
            }
        }
    }

    pub fn fail(&mut self) {
        match self.now().pc {
            // Others may have the file by now: it is left as by one that closes.
            Pc::Map | Pc::Reserve | Pc::MapAhead | Pc::JoinLook | Pc::JoinReserve | Pc::JoinMap | Pc::JoinMapAhead => {
                self.end_preparing();
                let process = self.process();
                process.is_creator = false;
                process.is_mapped = false;
                process.is_ready = false;
                process.has_failed = true;
                process.pc = Pc::Abandon;
            }
            Pc::AwaitBacking => self.close(),
            Pc::LinkedShowLife if self.setting.protocol.abandons_at_linked => {
                // Still under the lock, so the name can go at once.
                let (target, ino) = (self.now().target, self.file().ino);
                unlink(self.setting, self.state, self.me, target, Some(ino));
                self.gone();
            }
            _ => self.gone(),
        }
        self.state.collect();
    }

    /// No room for what it reserves: it may try again when it has given back what it has got.
    fn refuse(&mut self) {
        let may_try_again = self.setting.protocol.tries_again;
        let process = self.process();
        process.was_refused = may_try_again && process.tries_left > 0;
        self.fail();
    }

    /// X1.
    fn close(&mut self) {
        self.process().is_freeing = true;
        self.to(if self.now().is_creator {
            Pc::DropNameLock
        } else {
            Pc::CloseFile
        });
    }

    /// It closes its region while views live on: the mapping keeps the open file and its locks.
    pub fn keep_views(&mut self) {
        let process = self.process();
        process.has_views = true;
        process.is_freeing = false;
        process.pc = Pc::ViewLeft;
    }

    /// A process that closes goes on without the directory's lock after a second.
    pub fn lose_patience(&mut self) {
        if self.now().pc == Pc::DropNameLock {
            self.to(Pc::DropNameCompare);
        } else {
            // X6 is left to the next constructor.
            if let Some(ino) = self.name() {
                self.state.inode(ino).excused = true;
            }
            self.is_out();
        }
        self.state.collect();
    }

    fn absent(&mut self) {
        match self.now().why {
            Why::Look if self.mode == Mode::Join => self.wait(),
            Why::Look if !self.now().has_swept => {
                self.process().target = 0;
                self.unlock();
                self.sweep_from(0);
            }
            Why::Look => self.to(Pc::CheckRoom),
            Why::Sweep => self.sweep_next(),
            Why::LastOut => self.is_out(),
        }
    }

    fn dead(&mut self) {
        match self.now().why {
            Why::Look if self.mode == Mode::Join => self.wait(),
            Why::Look if !self.setting.protocol.dead_bytes_are_unlinked => self.take_over(),
            Why::Look => self.to(Pc::ReclaimCompare),
            // What is not proven dead is nobody else's business.
            Why::Sweep | Why::LastOut if !self.setting.leases => self.pass_over(),
            Why::Sweep | Why::LastOut => self.to(Pc::ReclaimCompare),
        }
    }

    fn live(&mut self) {
        match self.now().why {
            Why::Look if self.mode == Mode::Create => self.is_in_the_way(), // Exists
            Why::Look => self.to(Pc::AssessGeometry),
            Why::Sweep | Why::LastOut => self.pass_over(),
        }
    }

    /// Nobody writes, and somebody holds the lock: a prober that was killed.
    fn locked(&mut self) {
        if self.now().why == Why::Look {
            self.wait();
        } else {
            self.pass_over();
        }
    }

    fn pass_over(&mut self) {
        self.process().found = None;
        self.process().found_geometry = None;
        if self.now().why == Why::Sweep {
            self.sweep_next();
        } else {
            self.is_out();
        }
    }

    /// S1, `reap::reclaim_dead`: one hold of the lock for each name that is not our own.
    fn sweep_next(&mut self) {
        self.unlock();
        let next = usize::from(self.process().target) + 1;
        self.sweep_from(next);
    }

    fn sweep_from(&mut self, first: usize) {
        let own = usize::from(self.id);
        let next = (first..self.state.names.len()).find(|at| *at != own && self.state.names[*at].is_some());
        let id = self.id;
        let process = self.process();
        process.pc = Pc::Lock;
        if let Some(next) = next {
            process.why = Why::Sweep;
            process.target = next as u8;
        } else {
            process.why = Why::Look;
            process.target = id;
            process.has_swept = true;
        }
    }

    /// For the next look, which may be a wait: nothing is held meanwhile.
    fn look_again(&mut self) {
        self.to(Pc::Lock);
    }

    fn wait(&mut self) {
        let found = self.process().found.take();
        self.process().found_was_sized = false;
        self.process().found_geometry = None;
        if !self.setting.protocol.waits_with_nothing {
            self.process().file = found.map(Open::bare);
        }
        self.unlock();
        self.look_again();
    }

    fn name_changed(&mut self) {
        self.process().file = None;
        self.process().found = None;
        self.process().found_geometry = None;
        self.unlock();
        self.look_again();
    }

    /// An error, unless all who hold what was found are dying. The look at them is without the lock.
    fn is_in_the_way(&mut self) {
        self.unlock();
        self.to(Pc::AskWhetherTheyAreDying);
    }

    fn gone(&mut self) {
        *self.process() = Process::GONE;
    }

    /// After the look whether it was the last: a constructor that was refused may try again.
    fn is_out(&mut self) {
        if !self.now().was_refused {
            return self.gone();
        }
        let id = self.id;
        *self.process() = Process {
            tries_left: self.now().tries_left - 1,
            has_swept: true,
            ..Process::at(Pc::TryAgainAskFreeing, id)
        };
    }

    fn last_out(&mut self) {
        let id = self.id;
        let before = self.now();
        *self.process() = Process {
            why: Why::LastOut,
            was_refused: before.was_refused,
            tries_left: before.tries_left,
            // Until all of it is over, but for a view, which goes whenever it goes.
            is_freeing: before.is_freeing,
            ..Process::at(Pc::LastOutLook, id)
        };
    }

    fn fail_for_space(&mut self) {
        if self.state.has_room(self.setting, PIECES) {
            self.state.seen.false_no_space = true;
        }
        self.gone();
    }

    fn make_inode(&mut self) -> Ino {
        let id = self.id;
        self.state.make_inode(id)
    }

    /// `Some(true)` with the last piece; `None` if there is no room for one more.
    fn reserve_piece(&mut self) -> Option<bool> {
        if !self.state.has_room(self.setting, 1) {
            return None;
        }
        let ino = self.file().ino;
        let inode = self.state.inode(ino);
        inode.reserved = (inode.reserved + 1).min(PIECES);
        Some(inode.reserved == PIECES)
    }

    /// The query answers with the first lock, and so with the smallest block size.
    fn announced_geometry(&self, ino: Ino) -> Option<u8> {
        (0..self.state.processes.len())
            .filter(|other| *other != self.me && self.state.announces_geometry(ino, *other))
            .filter_map(|other| match actor(self.setting, other) {
                Actor::Ours { geometry, .. } => Some(geometry),
                // A child's is that of its parent.
                Actor::Child => self.state.processes[other].geometry,
                Actor::Original => None,
            })
            .min()
    }

    /// The region is its user's; the bytes are if they are backed.
    fn opened(&mut self) {
        let is_ready = self.now().is_ready;
        let process = self.process();
        process.is_mapped = true;
        process.has_swept = false;
        process.tries_left = 0;
        process.found_was_sized = false;
        process.pc = Pc::AwaitBacking;
        if is_ready {
            self.has_bytes();
        }
    }

    fn has_bytes(&mut self) {
        let ino = self.file().ino;
        let is_creator = self.process().is_creator;
        if is_creator && self.state.inode(ino).bytes == Bytes::Stale {
            self.state.seen.stale_bytes = true;
        }
        // Its user writes at once: the worst that can happen to whoever takes the file for new.
        if self.state.inode(ino).bytes == Bytes::Zero {
            self.state.inode(ino).bytes = Bytes::Written;
        }
        let process = self.process();
        process.is_ready = true;
        process.pc = Pc::Opened;
    }

    /// A mutation: the dead file is used as it is.
    fn take_over(&mut self) {
        let ino = self.found();
        let inode = self.state.inode(ino);
        inode.is_sized = true;
        if inode.bytes == Bytes::Written {
            inode.bytes = Bytes::Stale;
        }
        let (signs, published) = (self.creators_signs(ino), self.published_signs(ino));
        let process = self.process();
        process.found = None;
        process.file = Some(signs);
        process.published = Some(published);
        process.is_creator = true;
        process.pc = Pc::Map;
        self.unlock();
    }
}

/// Takes whatever stands at a name away. `meant` is the file that the caller compared with.
pub fn unlink(setting: &Setting, state: &mut State, me: usize, name: u8, meant: Option<Ino>) {
    let Some(ino) = state.names[usize::from(name)].take() else {
        return;
    };
    let by_its_creator = state.processes[me].is_creator && state.processes[me].writes(ino);
    if by_its_creator {
        state.inode(ino).given_up = true;
    }
    let by_the_original = actor(setting, me) == Actor::Original;
    let limits = setting.limits;
    let is_excused = (limits.name_taken_between_compare_and_unlink
        && !by_the_original
        && setting.protocol.compares_before_unlink
        && meant.is_some_and(|meant| meant != ino))
        || (limits.original_unlinks_by_path && by_the_original);
    let adopters_only = |state: &State| {
        limits.original_adopts_the_dead
            && state.inodes[usize::from(ino)].adopted
            && !(0..setting.actors.len()).any(|other| {
                other != me && actor(setting, other) != Actor::Original && state.processes[other].holds(ino)
            })
    };
    if is_excused {
        // As if it had been taken away by hand: whoever holds it lives on without a name.
        state.inode(ino).given_up = true;
    }
    if !by_its_creator && !is_excused && state.has_living_holder(ino, Some(me)) && !adopters_only(state) {
        state.seen.robbery = true;
    }
}
