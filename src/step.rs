//! The named steps of the protocol: the same names in `docs/protocol.md`, here, and in the model.
//!
//! With the feature `kill-points`, which is for tests, a process can be made to die or to stop as it
//! reaches a step: `EC_SHARED_REGION_KILL_AT=reserve` (SIGKILL) or `EC_SHARED_REGION_STOP_AT=reserve` (SIGSTOP);
//! `reserve:3` is the third time. Without the feature a step is nothing at all.

macro_rules! steps {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// Where a process is. A process that dies "at" a step has done everything before it.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Step { $($(#[$doc])* $variant,)* }

        impl Step {
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The name in the documentation.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }
    };
}

steps! {
    /// L1: about to take the directory's lock.
    Lock = "lock",
    /// L2: holds the lock, about to look at the name.
    Probe = "probe",
    /// R1: about to take a dead file's name away.
    Reclaim = "reclaim",
    /// R2: the name is gone, the lock is given back, the pages are not.
    Reclaimed = "reclaimed",
    /// C1: the name is free, about to look for room.
    CheckRoom = "check_room",
    /// C2: about to make the file.
    Publish = "publish",
    /// C2: sized, alive, and without a name.
    Link = "link",
    /// C2: named, and not opened by its name yet.
    Linked = "linked",
    /// C3: published; about to map.
    Map = "map",
    /// C4: about to reserve a piece.
    Reserve = "reserve",
    /// C4: about to put huge pages behind a piece.
    Collapse = "collapse",
    /// C4: about to map a piece ahead.
    MapAhead = "map_ahead",
    /// C5: every byte is backed; who waits for that still waits.
    EndPreparing = "end_preparing",
    /// The region is ready, and nobody has got it yet.
    Opened = "opened",
    /// C7: about to take back what was published.
    Abandon = "abandon",
    /// J1: found a live file.
    Assess = "assess",
    /// J2: about to open it.
    Attach = "attach",
    /// J2: holds our signs of life.
    Attached = "attached",
    /// J3: about to reserve what a creator that is gone, or an original, left unbacked.
    JoinReserve = "join_reserve",
    /// J4: about to map.
    JoinMap = "join_map",
    /// J5: about to map a piece ahead.
    JoinMapAhead = "join_map_ahead",
    /// J6: came in early; about to see whether every byte is backed by now.
    AwaitBacking = "await_backing",
    /// P1: about to register a piece with a device.
    Register = "register",
    /// P2: a piece was refused for good, about to undo those before it.
    Rollback = "rollback",
    /// P3: about to take a registration back.
    Unpin = "unpin",
    /// X1: about to close.
    Close = "close",
    /// X2: about to take the own name away.
    DropName = "drop_name",
    /// X3: the name is gone; about to unregister.
    Unregister = "unregister",
    /// X4: about to close the descriptor.
    CloseFile = "close_file",
    /// X5: about to unmap.
    Unmap = "unmap",
    /// X6: closed; about to see whether we were the last.
    LastOut = "last_out",
}

#[cfg(not(feature = "kill-points"))]
#[inline]
pub(crate) fn reached(_: Step) {}

#[cfg(feature = "kill-points")]
pub(crate) fn reached(step: Step) {
    use std::sync::atomic::{AtomicUsize, Ordering};

    static TIMES: [AtomicUsize; Step::ALL.len()] = [const { AtomicUsize::new(0) }; Step::ALL.len()];

    let times = TIMES
        .get(step as usize)
        .map_or(0, |times| times.fetch_add(1, Ordering::Relaxed) + 1);
    for (variable, signal) in [
        ("EC_SHARED_REGION_KILL_AT", nix::sys::signal::Signal::SIGKILL),
        ("EC_SHARED_REGION_STOP_AT", nix::sys::signal::Signal::SIGSTOP),
    ] {
        let Ok(wanted) = std::env::var(variable) else { continue };
        let (name, nth) = wanted.split_once(':').unwrap_or((&wanted, "1"));
        if name == step.name() && nth.parse() == Ok(times) {
            let _ = nix::sys::signal::raise(signal);
        }
    }
}
