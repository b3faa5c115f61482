//! The roles, and the steps that each reaches: an explicit table, which the tests prove complete.

use ec_shared_region::huge;
use ec_shared_region::mapping::page_bytes;
use ec_shared_region::step::Step::{self, *};

/// What is there before the victim comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Before {
    Nothing,
    /// A creator of ours, which holds the region.
    Creator,
    /// A creator of ours that is stopped at a step.
    StoppedCreator(Step, usize),
    /// A process of the original class, whose file has its size and no pages.
    Original,
    /// One that has not sized its file yet.
    UnsizedOriginal,
    /// A dead file of the same id with this part of the size, in percent.
    Dead(usize),
    /// Dead files of two other ids.
    DeadOthers,
}

/// What happens between the victim's opening and its use of the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Between {
    Nothing,
    AnotherJoins,
    TheHolderIsKilled,
    /// In the midst of the opening, at the checkpoint at which the victim is then interrupted.
    AnotherComesInEarly,
}

/// Which steps are tried, of those in the table and, to see that it is complete, of those that are not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Complete {
    All,
    /// The others, and all but the last time of these, are those of another role.
    LastOfTheTable,
    /// How often these are reached is not determined, but at least so often: the last time is tried.
    LastOnly,
    /// The same, and every time is tried.
    TheseOnly,
}

#[derive(Debug)]
pub struct Role {
    pub name: &'static str,
    pub before: Before,
    pub between: Between,
    /// Blocks and the size of one, in pages.
    pub blocks: usize,
    pub block_pages: usize,
    /// What the victim asks for: `populate`, and options of the worker.
    pub populate: &'static str,
    pub options: &'static str,
    /// The checkpoint at which the victim is asked to stop opening, which makes it undo all.
    pub interrupted_at: usize,
    /// The registration that the device refuses.
    pub refused_at: usize,
    /// Does it wait until every byte is backed, and pin?
    pub uses_the_bytes: bool,
    /// Does it take the registration back, and register again?
    pub pins_twice: bool,
    pub complete: Complete,
    /// How often each is reached by a victim that opens, pins and closes.
    pub steps: &'static [(Step, usize)],
}

const USUAL: Role = Role {
    name: "",
    before: Before::Nothing,
    between: Between::Nothing,
    blocks: 8,
    block_pages: 1,
    populate: "create",
    options: "",
    interrupted_at: 0,
    refused_at: 0,
    uses_the_bytes: true,
    pins_twice: false,
    complete: Complete::All,
    steps: &[],
};

/// 66 MiB where a page has 4 KiB: five pieces at least, of 16 MiB at most; two where it is only reserved.
const LARGE: Role = Role {
    blocks: 66,
    block_pages: 256,
    options: "threads=1 huge=off",
    complete: Complete::LastOnly,
    ..USUAL
};

/// 3 MiB: a huge page and a tail, each a piece.
const HUGE: Role = Role {
    blocks: 3,
    block_pages: 256,
    options: "threads=1",
    ..USUAL
};

// Who sweeps passes over the neighbour, who lives, and who goes over those that are left, by a look without the lock.
pub const ROLES: &[Role] = &[
    Role {
        name: "creator",
        steps: &[
            (Lock, 3),
            (Probe, 2),
            (CheckRoom, 1),
            (Publish, 1),
            (Link, 1),
            (Linked, 1),
            (Map, 1),
            (MapAhead, 1),
            (EndPreparing, 1),
            (Opened, 1),
            (Register, 3),
            (Close, 1),
            (DropName, 1),
            (Unregister, 1),
            (Unpin, 1),
            (CloseFile, 1),
            (Unmap, 1),
        ],
        ..USUAL
    },
    Role {
        name: "creator_that_only_reserves",
        populate: "never",
        complete: Complete::LastOfTheTable,
        steps: &[(Map, 1), (Reserve, 1), (EndPreparing, 1), (Opened, 1)],
        ..USUAL
    },
    Role {
        name: "creator_with_huge_pages",
        steps: &[
            (Lock, 3),
            (Probe, 2),
            (CheckRoom, 1),
            (Publish, 1),
            (Link, 1),
            (Linked, 1),
            (Map, 1),
            (Reserve, 2),
            (Collapse, 1),
            (MapAhead, 2),
            (EndPreparing, 1),
            (Opened, 1),
            (Close, 1),
            (DropName, 1),
            (Unregister, 1),
            (Unpin, 1),
            (CloseFile, 1),
            (Unmap, 1),
        ],
        complete: Complete::LastOfTheTable,
        ..HUGE
    },
    Role {
        name: "creator_of_a_large_region",
        steps: &[(Reserve, 5), (MapAhead, 5)],
        ..LARGE
    },
    // Which thread is at it is anybody's guess.
    Role {
        name: "creator_of_several_threads",
        options: "threads=4 huge=off",
        complete: Complete::TheseOnly,
        steps: &[(Reserve, 4), (MapAhead, 4)],
        ..LARGE
    },
    Role {
        name: "joiner",
        before: Before::Creator,
        steps: &[
            (Lock, 1),
            (Probe, 1),
            (Assess, 1),
            (Attach, 1),
            (Attached, 1),
            (JoinReserve, 1),
            (JoinMap, 1),
            (Opened, 1),
            (Register, 3),
            (Close, 1),
            (Unregister, 1),
            (Unpin, 1),
            (CloseFile, 1),
            (Unmap, 1),
            (LastOut, 1),
        ],
        ..USUAL
    },
    Role {
        name: "joiner_that_maps_ahead",
        before: Before::Creator,
        populate: "join",
        complete: Complete::LastOfTheTable,
        steps: &[
            (Assess, 1),
            (JoinReserve, 1),
            (JoinMap, 1),
            (JoinMapAhead, 1),
            (Opened, 1),
        ],
        ..USUAL
    },
    Role {
        name: "joiner_of_a_large_region",
        before: Before::Creator,
        populate: "join",
        steps: &[(JoinMapAhead, 5)],
        ..LARGE
    },
    Role {
        name: "joiner_that_waits",
        before: Before::StoppedCreator(MapAhead, 1),
        populate: "join",
        complete: Complete::LastOnly,
        steps: &[(Lock, 3), (Probe, 3), (Assess, 3)],
        ..USUAL
    },
    Role {
        name: "joiner_that_comes_in_early",
        before: Before::StoppedCreator(MapAhead, 1),
        complete: Complete::TheseOnly,
        steps: &[
            (Lock, 1),
            (Probe, 1),
            (Assess, 1),
            (Attach, 1),
            (Attached, 1),
            (JoinReserve, 1),
            (JoinMap, 1),
            (Opened, 1),
            (AwaitBacking, 3),
        ],
        ..USUAL
    },
    Role {
        name: "joiner_that_takes_over_a_half_made_region",
        before: Before::StoppedCreator(Reserve, 2),
        between: Between::TheHolderIsKilled,
        complete: Complete::LastOfTheTable,
        steps: &[
            (AwaitBacking, 1),
            (Reserve, 1),
            (Close, 1),
            (Unregister, 1),
            (CloseFile, 1),
            (Unmap, 1),
            (LastOut, 1),
            (Lock, 2),
            (Probe, 2),
            (Reclaim, 1),
            (Reclaimed, 1),
        ],
        ..HUGE
    },
    Role {
        name: "closer_before_every_byte_is_backed",
        before: Before::StoppedCreator(MapAhead, 1),
        uses_the_bytes: false,
        steps: &[
            (Lock, 1),
            (Probe, 1),
            (Assess, 1),
            (Attach, 1),
            (Attached, 1),
            (JoinReserve, 1),
            (JoinMap, 1),
            (Opened, 1),
            (Close, 1),
            (Unregister, 1),
            (CloseFile, 1),
            (Unmap, 1),
            (LastOut, 1),
        ],
        ..USUAL
    },
    Role {
        name: "joiner_of_an_original",
        before: Before::Original,
        steps: &[
            (Lock, 2),
            (Probe, 2),
            (Assess, 1),
            (Attach, 1),
            (Attached, 1),
            (JoinReserve, 1),
            (Reserve, 1),
            (JoinMap, 1),
            (Opened, 1),
            (Register, 3),
            (Close, 1),
            (Unregister, 1),
            (Unpin, 1),
            (CloseFile, 1),
            (Unmap, 1),
            (LastOut, 1),
        ],
        ..USUAL
    },
    Role {
        name: "joiner_of_a_large_original",
        before: Before::Original,
        populate: "join",
        steps: &[(Reserve, 2), (JoinMapAhead, 5)],
        ..LARGE
    },
    Role {
        name: "joiner_that_waits_for_an_original",
        before: Before::UnsizedOriginal,
        complete: Complete::LastOnly,
        steps: &[(Lock, 3), (Probe, 3), (Assess, 3)],
        ..USUAL
    },
    Role {
        name: "reclaimer_of_a_smaller_file",
        before: Before::Dead(30),
        steps: RECLAIMER,
        ..USUAL
    },
    Role {
        name: "reclaimer_of_a_larger_file",
        before: Before::Dead(250),
        steps: RECLAIMER,
        ..USUAL
    },
    Role {
        name: "sweeper",
        before: Before::DeadOthers,
        steps: &[
            (Lock, 5),
            (Probe, 4),
            (Reclaim, 2),
            (Reclaimed, 2),
            (CheckRoom, 1),
            (Publish, 1),
            (Link, 1),
            (Linked, 1),
            (Map, 1),
            (MapAhead, 1),
            (EndPreparing, 1),
            (Opened, 1),
            (Register, 3),
            (Close, 1),
            (DropName, 1),
            (Unregister, 1),
            (Unpin, 1),
            (CloseFile, 1),
            (Unmap, 1),
        ],
        ..USUAL
    },
    Role {
        name: "closer_as_creator_with_a_joiner",
        between: Between::AnotherJoins,
        complete: Complete::LastOfTheTable,
        steps: &[
            (Lock, 3),
            (Close, 1),
            (DropName, 1),
            (Unregister, 1),
            (Unpin, 1),
            (CloseFile, 1),
            (Unmap, 1),
        ],
        ..USUAL
    },
    Role {
        name: "closer_as_last_one_out",
        before: Before::Creator,
        between: Between::TheHolderIsKilled,
        complete: Complete::LastOfTheTable,
        steps: &[
            (Register, 3),
            (Close, 1),
            (Unregister, 1),
            (Unpin, 1),
            (CloseFile, 1),
            (Unmap, 1),
            (LastOut, 1),
            (Lock, 2),
            (Probe, 2),
            (Reclaim, 1),
            (Reclaimed, 1),
        ],
        ..USUAL
    },
    Role {
        name: "unpinner",
        pins_twice: true,
        complete: Complete::LastOfTheTable,
        steps: &[(Register, 6), (Unpin, 2), (Close, 1)],
        ..USUAL
    },
    Role {
        name: "abandoner_before_a_byte_is_reserved",
        interrupted_at: 4,
        steps: &[
            (Lock, 3),
            (Probe, 3),
            (CheckRoom, 1),
            (Publish, 1),
            (Link, 1),
            (Linked, 1),
            (Map, 1),
            (Abandon, 1),
            (LastOut, 1),
            (Reclaim, 1),
            (Reclaimed, 1),
        ],
        ..USUAL
    },
    Role {
        name: "abandoner_with_everything_mapped",
        interrupted_at: 5,
        steps: &[
            (Lock, 3),
            (Probe, 3),
            (CheckRoom, 1),
            (Publish, 1),
            (Link, 1),
            (Linked, 1),
            (Map, 1),
            (MapAhead, 1),
            (Abandon, 1),
            (LastOut, 1),
            (Reclaim, 1),
            (Reclaimed, 1),
        ],
        ..USUAL
    },
    Role {
        name: "abandoner_with_a_joiner_inside",
        between: Between::AnotherComesInEarly,
        options: "pause",
        interrupted_at: 4,
        complete: Complete::LastOfTheTable,
        steps: &[(Abandon, 1), (LastOut, 1)],
        ..USUAL
    },
    Role {
        name: "creator_whose_pages_are_refused",
        refused_at: 3,
        complete: Complete::LastOfTheTable,
        steps: &[(Register, 3), (Rollback, 1), (Close, 1), (Unregister, 1)],
        ..USUAL
    },
    Role {
        name: "joiner_whose_pages_are_refused",
        before: Before::Creator,
        refused_at: 3,
        complete: Complete::LastOfTheTable,
        steps: &[(Register, 3), (Rollback, 1), (Close, 1), (Unregister, 1)],
        ..USUAL
    },
];

const RECLAIMER: &[(Step, usize)] = &[
    (Lock, 4),
    (Probe, 3),
    (Reclaim, 1),
    (Reclaimed, 1),
    (CheckRoom, 1),
    (Publish, 1),
    (Link, 1),
    (Linked, 1),
    (Map, 1),
    (MapAhead, 1),
    (EndPreparing, 1),
    (Opened, 1),
    (Register, 3),
    (Close, 1),
    (DropName, 1),
    (Unregister, 1),
    (Unpin, 1),
    (CloseFile, 1),
    (Unmap, 1),
];

pub fn named(name: &str) -> &'static Role {
    ROLES.iter().find(|role| role.name == name).unwrap()
}

impl Role {
    /// Every step and occurrence at which a victim in this role dies.
    pub fn places(&self) -> Vec<(Step, usize)> {
        let is_last_only = matches!(self.complete, Complete::LastOfTheTable | Complete::LastOnly);
        self.steps
            .iter()
            .flat_map(|&(step, times)| (if is_last_only { times } else { 1 }..=times).map(move |nth| (step, nth)))
            .collect()
    }

    /// What a victim in this role must get past.
    pub fn not_reached(&self) -> Vec<(Step, usize)> {
        let once_more = |step: Step| {
            let listed = self.steps.iter().find(|(listed, _)| *listed == step);
            listed.map_or(1, |(_, times)| times + 1)
        };
        match self.complete {
            Complete::All => Step::ALL.iter().map(|&step| (step, once_more(step))).collect(),
            Complete::LastOfTheTable => self.steps.iter().map(|&(step, times)| (step, times + 1)).collect(),
            Complete::LastOnly | Complete::TheseOnly => Vec::new(),
        }
    }

    /// The shapes that the next constructor asks for: while somebody lives there is only one that it gets.
    pub fn next_blocks(&self) -> Vec<usize> {
        match (self.before, self.between) {
            (Before::Nothing | Before::Dead(_) | Before::DeadOthers, Between::Nothing)
            | (_, Between::TheHolderIsKilled)
                if !self.is_large() =>
            {
                vec![self.blocks, self.blocks / 2, self.blocks * 2]
            }
            _ => vec![self.blocks],
        }
    }

    pub fn is_large(&self) -> bool {
        self.block_pages > 1
    }

    pub fn block_size_bytes(&self) -> usize {
        self.block_pages * page_bytes()
    }

    pub fn total_bytes(&self) -> usize {
        self.blocks * self.block_size_bytes()
    }

    /// Does the victim, killed there, leave a live region whose name it has taken away?
    pub fn has_dropped_the_name(&self, step: Step) -> bool {
        self.between == Between::AnotherJoins && matches!(step, Unregister | Unpin | Unmap | CloseFile)
    }

    /// Why this machine has no such role.
    pub fn is_impossible(&self) -> Option<String> {
        if self.options.contains("huge=off") || self.total_bytes() < 2 << 20 {
            return None;
        }
        let device = std::os::unix::fs::MetadataExt::dev(&std::fs::metadata("/dev/shm").unwrap());
        match huge::huge_page_bytes() {
            // One of them and a tail: two pieces.
            Some(bytes) if bytes != self.total_bytes() / 3 * 2 => Some(format!("a huge page has {bytes} bytes here")),
            Some(_) if huge::mount_gives_huge_pages(device) => Some("/dev/shm has huge pages of its own".into()),
            Some(_) => None,
            None => Some("this kernel has no huge pages".into()),
        }
    }
}
