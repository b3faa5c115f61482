//! What a run of the model looks at: who takes part, on what kind of machine, and which protocol they keep.

/// The protocol as a set of switches. All on is the protocol of `docs/protocol.md`; a mutation turns one of
/// them off, to show that the properties would notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Protocol {
    /// Names are looked at and changed under the directory's lock.
    pub directory_lock: bool,
    /// A probe asks for a read lease, not only for the life lock.
    pub asks_for_writers: bool,
    /// A published file carries its creator's life lock.
    pub publishes_alive: bool,
    /// Who has the file open announces its block size.
    pub announces_geometry: bool,
    /// A process that waits keeps no descriptor.
    pub waits_with_nothing: bool,
    /// Before a name is unlinked its inode is compared with the file that is meant.
    pub compares_before_unlink: bool,
    /// A joiner that maps ahead stays out while the creator is preparing.
    pub waits_for_preparing: bool,
    /// A joiner that comes in while the creator is preparing gives nothing to its user until that has ended.
    pub awaits_backing: bool,
    /// It then reserves what a creator that is gone did not.
    pub takes_over: bool,
    /// The sign "being prepared" is not on the open file that is mapped, which a forked child has too.
    pub preparing_is_not_inherited: bool,
    /// A joiner reserves what is missing.
    pub joiner_reserves: bool,
    /// A dead file is unlinked, never taken over.
    pub dead_bytes_are_unlinked: bool,
    /// A name is published where none is, never over another.
    pub publishes_without_replacing: bool,
    /// The last joiner out takes a dead creator's name away (X6).
    pub last_one_out_cleans: bool,
    /// It lets go of the file before it looks whether another is left, not after.
    pub lets_go_before_it_looks: bool,
    /// A constructor that fails takes its name away only if nobody lives on the file.
    pub gives_back_only_if_last: bool,
    /// A constructor that is refused the room which it has seen tries again.
    pub tries_again: bool,
    /// A region in the way whose holders are all dying is waited for.
    pub waits_for_the_dying: bool,
    // Holes that the model found in `src/`, closed since.
    /// A constructor that fails looks whether it was the last one out, as one that closes does (C7).
    pub abandons: bool,
    /// The last view of a closed region does the same when it goes.
    pub last_view_looks_back: bool,
    /// Who found too little room and then nobody who gives some back looks at the room once more.
    pub looks_at_room_twice: bool,
    /// A creator that fails between naming its file and opening it by its name takes back its name.
    pub abandons_at_linked: bool,
}

impl Protocol {
    pub const WHOLE: Self = Self {
        directory_lock: true,
        asks_for_writers: true,
        publishes_alive: true,
        announces_geometry: true,
        waits_with_nothing: true,
        compares_before_unlink: true,
        waits_for_preparing: true,
        awaits_backing: true,
        takes_over: true,
        preparing_is_not_inherited: true,
        joiner_reserves: true,
        dead_bytes_are_unlinked: true,
        publishes_without_replacing: true,
        last_one_out_cleans: true,
        lets_go_before_it_looks: true,
        gives_back_only_if_last: true,
        tries_again: true,
        waits_for_the_dying: true,
        abandons: true,
        last_view_looks_back: true,
        looks_at_room_twice: true,
        abandons_at_linked: true,
    };
}

/// What the documentation allows (`docs/protocol.md`, "Limits"). Each of them is real: a test turns it off
/// and the model finds a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// "The original class that starts next to a dead file adopts its bytes": it then holds a file that
    /// one of ours may just have found dead, and loses its name.
    pub original_adopts_the_dead: bool,
    /// "A process of the original class that joins while our creator is still at C4 maps pages that are not reserved yet".
    pub original_joins_unreserved: bool,
    /// An original that waits for the size of a dead original's stub has it open for writing, so it lives
    /// for us too: we wait until the original gives up, after 30 s.
    pub original_waits_on_a_stub: bool,
    /// "Somebody of the same user, or root, who takes its name away": also in the instant between the
    /// comparison of an inode and the unlink, which Linux cannot join.
    pub name_taken_between_compare_and_unlink: bool,
    /// The original unlinks by path: after somebody took its name away, it takes its successor's.
    pub original_unlinks_by_path: bool,
}

impl Limits {
    pub const DOCUMENTED: Self = Self {
        original_adopts_the_dead: true,
        original_joins_unreserved: true,
        original_waits_on_a_stub: true,
        name_taken_between_compare_and_unlink: true,
        original_unlinks_by_path: true,
    };
}

/// How a constructor of ours opens, as `Mode` in `src/spec.rs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Either,
    Create,
    Join,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Actor {
    /// One of ours: region 0 or 1 (two ids), geometry 0 or 1 (the same total, another block size).
    Ours {
        id: u8,
        geometry: u8,
        mode: Mode,
        /// As a joiner too: `Populate::Join`.
        maps_ahead: bool,
    },
    /// The original class, always with region 0.
    Original,
    /// Whoever is forked from one of the others while that has a mapping.
    Child,
}

pub const OURS: Actor = Actor::Ours {
    id: 0,
    geometry: 0,
    mode: Mode::Either,
    maps_ahead: false,
};

/// One configuration: who, where, what may go wrong.
#[derive(Debug, Clone)]
pub struct Setting {
    pub actors: Vec<Actor>,
    /// How often each of them starts anew after it has closed, failed or died.
    pub more_lives: u8,
    pub protocol: Protocol,
    pub limits: Limits,
    /// Any process may be killed at any step.
    pub kills: bool,
    /// A constructor may fail at any step that can: no space, Ctrl-C, a timeout.
    pub failures: bool,
    /// A wait for the directory's lock may end without it (it is held by a process that was stopped).
    pub lock_timeouts: bool,
    /// A joiner may close its region while views of it live on.
    pub views: bool,
    /// `flock` may fail just after the name was given.
    pub linked_may_fail: bool,
    /// How often somebody may take the name away by hand.
    pub removals: u8,
    /// Read leases work. Without them, and in a PID namespace of one's own, the life lock is all there is.
    pub leases: bool,
    /// OFD locks work. Without them nothing is announced.
    pub ofd_locks: bool,
    /// `O_TMPFILE` works. Without it files are made under a temporary name.
    pub tmpfile: bool,
    /// Room of the filesystem in pieces, [`super::state::PIECES`] for each region. `None`: more than enough.
    pub room: Option<u8>,
    /// A dead file stands at the start: under id 0 or 1, of full or no size.
    pub dead: Vec<(u8, bool)>,
    /// Processes that are alike are told apart: more states, and traces in which everybody keeps their number.
    pub tells_apart: bool,
}

impl Setting {
    pub fn new(actors: &[Actor]) -> Self {
        Self {
            actors: actors.to_vec(),
            more_lives: 0,
            protocol: Protocol::WHOLE,
            limits: Limits::DOCUMENTED,
            kills: true,
            failures: true,
            lock_timeouts: false,
            views: false,
            linked_may_fail: false,
            removals: 0,
            leases: true,
            ofd_locks: true,
            tmpfile: true,
            room: None,
            dead: Vec::new(),
            tells_apart: false,
        }
    }
}
