//! What the kernel knows: files, names, open files and the signs of life on them.
//!
//! Time stands still, inode numbers mean nothing: states that differ only in how inodes, or processes that
//! are alike, are numbered are one state ([`State::normalise`]).

use ec_shared_region::step::Step;

use super::protocol::Setting;

/// A region's bytes are reserved in this many pieces, so that a kill can leave it half done.
pub const PIECES: u8 = 2;
const NAMES: usize = 5;
/// The names behind those of the two regions are for files without a name, where `O_TMPFILE` is refused.
pub const FIRST_TEMPORARY: usize = 2;
const INODES: usize = 10;
pub const PROCESSES: usize = 5;
/// The process that comes when all is over, to see whether all is well.
pub const GUEST: usize = PROCESSES - 1;

pub type Ino = u8;

/// What is in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Bytes {
    #[default]
    Zero,
    /// Written by the generation whose creator made the file.
    Written,
    /// Written before the present creator took it.
    Stale,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Inode {
    pub exists: bool,
    pub id: u8,
    /// Has it its full size?
    pub is_sized: bool,
    pub reserved: u8,
    pub bytes: Bytes,
    /// Its name was taken away by its own creator, or by hand: a successor is no twin.
    pub given_up: bool,
    /// The original opened it when nobody alive held it.
    pub adopted: bool,
    /// Who left it last could not clean up: it was killed, or is of the original class.
    pub excused: bool,
}

/// An open file with write access, and what is locked through it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Open {
    pub ino: Ino,
    pub life: bool,
    pub preparing: bool,
    pub geometry: bool,
}

impl Open {
    pub fn bare(ino: Ino) -> Self {
        Self {
            ino,
            life: false,
            preparing: false,
            geometry: false,
        }
    }
}

/// Where a process is: steps of `src/step.rs`, cut where others can come between.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pc {
    Lock,
    ProbeOpen,
    ProbeFlock,
    ProbeLease,
    /// Closed; does another of ours announce itself?
    LastOutLook,
    ReclaimCompare,
    ReclaimUnlink,
    ReclaimClose,
    CheckRoom,
    AskFreeing,
    LookAtRoomAgain,
    PublishUnnamed,
    Link,
    LinkedOpen,
    LinkedShowLife,
    PublishTemporary,
    TemporaryShowLife,
    TemporaryRename,
    Map,
    Reserve,
    MapAhead,
    EndPreparing,
    AssessGeometry,
    AskWhetherTheyAreDying,
    AssessPreparing,
    AttachOpen,
    AttachFlock,
    AttachedLook,
    JoinLook,
    JoinReserve,
    JoinMap,
    JoinMapAhead,
    /// It has a region, and no byte of it is its user's yet.
    AwaitBacking,
    Opened,
    Abandon,
    /// After a reservation was refused and given back.
    TryAgainAskFreeing,
    TryAgainLookAtRoom,
    DropNameLock,
    DropNameCompare,
    DropNameUnlink,
    CloseFile,
    Unmap,
    /// Its locks are dropped, its write access is not: the end of one system call.
    Released,
    /// Closed, but for a view that keeps the mapping.
    ViewLeft,
    // The original class.
    OriginalCreate,
    OriginalOpen,
    OriginalResize,
    OriginalPoll,
    OriginalMap,
    OriginalPopulate,
    OriginalOpened,
    OriginalUnlink,
    OriginalClose,
    /// Forked from a holder: has its mapping, and with it the open file.
    Child,
    /// Killed, and still unmapping: it has all of its locks.
    Killed,
    /// The kernel has dropped the locks, and closes the file.
    Dying,
    Gone,
}

/// Why a process looks at a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Why {
    Look,
    Sweep,
    LastOut,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Process {
    pub pc: Pc,
    pub why: Why,
    /// The name that is looked at, and the temporary name of its own.
    pub target: u8,
    pub temporary: u8,
    pub file: Option<Open>,
    /// The open file that was made and published: it carries "being prepared", and is never mapped.
    pub published: Option<Open>,
    /// A file that was looked at, open for reading: no sign of life.
    pub found: Option<Ino>,
    pub found_was_sized: bool,
    pub found_is_locked: bool,
    /// What was announced on it.
    pub found_geometry: Option<u8>,
    pub has_directory_lock: bool,
    pub is_freeing: bool,
    pub is_creator: bool,
    pub is_mapped: bool,
    pub has_views: bool,
    /// Does it know that every byte is backed?
    pub is_ready: bool,
    pub has_failed: bool,
    /// There was too little room for what it reserved, and it has not given up yet.
    pub was_refused: bool,
    /// How often it may yet be refused and try again.
    pub tries_left: u8,
    pub has_swept: bool,
    /// A mutation: it saw another before it let go.
    pub saw_another: bool,
    /// Of a child: its parent's.
    pub geometry: Option<u8>,
}

impl Process {
    pub const GONE: Self = Self {
        pc: Pc::Gone,
        why: Why::Look,
        target: 0,
        temporary: 0,
        file: None,
        published: None,
        found: None,
        found_was_sized: false,
        found_is_locked: false,
        found_geometry: None,
        has_directory_lock: false,
        is_freeing: false,
        is_creator: false,
        is_mapped: false,
        has_views: false,
        is_ready: false,
        has_failed: false,
        was_refused: false,
        tries_left: 0,
        has_swept: false,
        saw_another: false,
        geometry: None,
    };

    pub fn at(pc: Pc, target: u8) -> Self {
        Self {
            pc,
            target,
            ..Self::GONE
        }
    }

    pub fn is_alive(&self) -> bool {
        !matches!(self.pc, Pc::Killed | Pc::Dying | Pc::Gone)
    }

    /// Has it handed a region to its user?
    pub fn is_open(&self) -> bool {
        self.has_bytes() || self.pc == Pc::AwaitBacking
    }

    /// Are the bytes its user's, to touch?
    pub fn has_bytes(&self) -> bool {
        matches!(self.pc, Pc::Opened | Pc::OriginalOpened | Pc::ViewLeft)
    }

    /// Alive, with the file open, and not just closing it.
    pub fn holds(&self, ino: Ino) -> bool {
        self.is_alive() && self.pc != Pc::Released && self.writes(ino)
    }

    /// Write access: what a read lease meets.
    pub fn writes(&self, ino: Ino) -> bool {
        self.opens().any(|open| open.ino == ino)
    }

    pub fn opens(&self) -> impl Iterator<Item = &Open> {
        self.file.iter().chain(&self.published)
    }

    /// The step's name in the documentation. `None` for the original, which is not in it.
    pub fn step(&self) -> Option<Step> {
        Some(match self.pc {
            Pc::LastOutLook => Step::LastOut,
            Pc::Lock => Step::Lock,
            Pc::ProbeOpen | Pc::ProbeFlock | Pc::ProbeLease => Step::Probe,
            Pc::ReclaimCompare | Pc::ReclaimUnlink => Step::Reclaim,
            Pc::ReclaimClose => Step::Reclaimed,
            Pc::CheckRoom | Pc::AskFreeing | Pc::LookAtRoomAgain => Step::CheckRoom,
            Pc::PublishUnnamed | Pc::PublishTemporary | Pc::TemporaryShowLife | Pc::TemporaryRename => Step::Publish,
            Pc::Link => Step::Link,
            Pc::LinkedOpen | Pc::LinkedShowLife => Step::Linked,
            Pc::Map => Step::Map,
            Pc::Reserve => Step::Reserve,
            Pc::MapAhead => Step::MapAhead,
            Pc::EndPreparing => Step::EndPreparing,
            Pc::AssessGeometry | Pc::AskWhetherTheyAreDying | Pc::AssessPreparing => Step::Assess,
            Pc::AttachOpen | Pc::AttachFlock => Step::Attach,
            Pc::AttachedLook => Step::Attached,
            Pc::JoinLook | Pc::JoinReserve => Step::JoinReserve,
            Pc::JoinMap => Step::JoinMap,
            Pc::JoinMapAhead => Step::JoinMapAhead,
            Pc::AwaitBacking => Step::AwaitBacking,
            // From here a region is in its user's hands; what it does next is to close it.
            Pc::Opened => Step::Close,
            Pc::Abandon => Step::Abandon,
            Pc::TryAgainAskFreeing | Pc::TryAgainLookAtRoom => Step::CheckRoom,
            Pc::DropNameLock | Pc::DropNameCompare | Pc::DropNameUnlink => Step::DropName,
            Pc::Unmap | Pc::ViewLeft | Pc::Released => Step::Unmap,
            Pc::CloseFile => Step::CloseFile,
            _ => return None,
        })
    }
}

/// What must never happen and is seen only in the moment in which it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Seen {
    pub robbery: bool,
    pub stale_bytes: bool,
    pub false_no_space: bool,
    pub refused_for_the_dying: bool,
    pub original_unreserved: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    pub names: [Option<Ino>; NAMES],
    pub inodes: [Inode; INODES],
    pub processes: [Process; PROCESSES],
    pub lives_left: [u8; PROCESSES],
    pub removals_left: u8,
    pub seen: Seen,
}

impl State {
    pub fn make_inode(&mut self, id: u8) -> Ino {
        let free = self.inodes.iter().position(|inode| !inode.exists);
        let ino = free.expect("more inodes at a time than the model has room for");
        self.inodes[ino] = Inode {
            exists: true,
            id,
            ..Inode::default()
        };
        ino as Ino
    }

    pub fn inode(&mut self, ino: Ino) -> &mut Inode {
        &mut self.inodes[usize::from(ino)]
    }

    fn others(&self, me: usize) -> impl Iterator<Item = &Process> {
        self.processes
            .iter()
            .enumerate()
            .filter(move |(at, _)| *at != me)
            .map(|(_, process)| process)
    }

    pub fn is_directory_locked(&self) -> bool {
        self.processes.iter().any(|process| process.has_directory_lock)
    }

    /// Would `flock(LOCK_EX)` be refused?
    pub fn is_flocked(&self, ino: Ino, me: usize) -> bool {
        self.is_flocked_exclusively(ino, me)
            || self
                .processes
                .iter()
                .any(|process| process.opens().any(|open| open.ino == ino && open.life))
    }

    /// Would `flock(LOCK_SH)` be refused?
    pub fn is_flocked_exclusively(&self, ino: Ino, me: usize) -> bool {
        self.others(me)
            .any(|process| process.found == Some(ino) && process.found_is_locked)
    }

    pub fn has_writer(&self, ino: Ino) -> bool {
        self.processes.iter().any(|process| process.writes(ino))
    }

    pub fn is_preparing(&self, ino: Ino) -> bool {
        self.processes
            .iter()
            .any(|process| process.opens().any(|open| open.ino == ino && open.preparing))
    }

    pub fn announces_geometry(&self, ino: Ino, process: usize) -> bool {
        self.processes[process]
            .opens()
            .any(|open| open.ino == ino && open.geometry)
    }

    pub fn is_freeing(&self, me: usize) -> bool {
        self.others(me).any(|process| process.is_freeing)
    }

    /// Is there a process, not yet killed, that has it open for writing? One inside `close` holds nothing any more.
    pub fn has_living_holder(&self, ino: Ino, except: Option<usize>) -> bool {
        self.processes
            .iter()
            .enumerate()
            .any(|(at, process)| Some(at) != except && process.holds(ino))
    }

    pub fn has_room(&self, setting: &Setting, pieces: u8) -> bool {
        let used: u8 = self.inodes.iter().map(|inode| inode.reserved).sum();
        setting.room.is_none_or(|room| used + pieces <= room)
    }

    pub fn is_over(&self) -> bool {
        self.processes.iter().all(|process| process.pc == Pc::Gone)
    }

    /// A file without name and without open file is no more; its pages are free again.
    pub fn collect(&mut self) {
        let mut used = [false; INODES];
        for ino in self.names.iter().flatten() {
            used[usize::from(*ino)] = true;
        }
        for process in &self.processes {
            for ino in process.opens().map(|open| open.ino).chain(process.found) {
                used[usize::from(ino)] = true;
            }
        }
        for (inode, used) in self.inodes.iter_mut().zip(used) {
            if !used {
                *inode = Inode::default();
            }
        }
    }

    /// One representative of the states that differ only in numbering.
    pub fn normalise(&mut self, setting: &Setting) {
        self.renumber();
        if setting.tells_apart {
            return;
        }
        // Processes that are alike are interchangeable. Insertion sort among equals; two rounds of
        // numbering need not find the least of all representatives: any will do.
        for i in 1..setting.actors.len() {
            let mut j = i;
            let key = |state: &Self, at: usize| (state.processes[at], state.lives_left[at]);
            while j > 0 && setting.actors[j - 1] == setting.actors[j] && key(self, j - 1) > key(self, j) {
                self.processes.swap(j - 1, j);
                self.lives_left.swap(j - 1, j);
                j -= 1;
            }
        }
        self.renumber();
    }

    fn renumber(&mut self) {
        let mut order: [Option<Ino>; INODES] = [None; INODES];
        let mut inodes = [Inode::default(); INODES];
        let mut next: Ino = 0;
        let old = self.inodes;
        let mut renumbered = |ino: &mut Ino| {
            let at = usize::from(*ino);
            let new = *order[at].get_or_insert_with(|| {
                inodes[usize::from(next)] = old[at];
                next += 1;
                next - 1
            });
            *ino = new;
        };
        self.names.iter_mut().flatten().for_each(&mut renumbered);
        for process in &mut self.processes {
            for open in process.file.iter_mut().chain(&mut process.published) {
                renumbered(&mut open.ino);
            }
            process.found.iter_mut().for_each(&mut renumbered);
        }
        self.inodes = inodes;
    }
}
