//! What must hold in every state: the guarantees of `docs/protocol.md`.

use stateright::Property;

use super::machine::{go, start};
use super::original;
use super::process::{actor, can_go};
use super::protocol::{Actor, Mode, Setting};
use super::state::{GUEST, Ino, PIECES, PROCESSES, Pc, Process, State, Why};

pub const NO_TWINS: &str = "one region per name";
pub const NO_ROBBERY: &str = "nobody is robbed";
pub const ZERO: &str = "fresh means zero";
pub const NOT_HALF_MADE: &str = "never half-made";
pub const SAME_GEOMETRY: &str = "same geometry";
pub const ONE_PAYER: &str = "one payer";
pub const HEALS: &str = "death heals";
pub const NOTHING_LEFT: &str = "the last one out leaves nothing";
pub const DYING: &str = "nobody is refused for the dying";
pub const SECOND_TRY: &str = "who was refused room gets it at the second try";
pub const TAKES_OVER: &str = "who came in early finishes what its creator left";
pub const SPACE: &str = "space that came back is not refused";
pub const ORIGINAL_RESERVED: &str = "an original's pages are reserved";

/// In a fair run everybody is through after so many rounds, or will never be.
const ROUNDS: usize = 300;
/// After so many rounds without a creator, who only joins waits no longer.
const PATIENCE_OF_JOINERS: usize = 40;
/// A constructor that finds nobody in its way needs fewer steps: two looks, a sweep of every name, the way to the end.
const STEPS_AT_ONCE: usize = 80;

pub fn all(setting: &Setting) -> Vec<Property<Setting>> {
    let mut all = vec![
        Property::always(NO_TWINS, one_region_per_name),
        Property::always(NO_ROBBERY, |_, state: &State| !state.seen.robbery),
        Property::always(ZERO, |_, state: &State| !state.seen.stale_bytes),
        Property::always(NOT_HALF_MADE, never_half_made),
        Property::always(SAME_GEOMETRY, same_geometry),
        Property::always(ONE_PAYER, one_payer),
        Property::always(HEALS, death_heals),
        Property::always(NOTHING_LEFT, nothing_left),
        Property::always(DYING, |_, state: &State| !state.seen.refused_for_the_dying),
        Property::always(SPACE, |_, state: &State| !state.seen.false_no_space),
    ];
    if !setting.limits.original_joins_unreserved {
        all.push(Property::always(ORIGINAL_RESERVED, |_, state: &State| {
            !state.seen.original_unreserved
        }));
    }
    // That the model goes where it should: a property of a state that is never reached proves nothing.
    let ours = |actor: &&Actor| matches!(actor, Actor::Ours { id: 0, geometry: 0, .. });
    let comes_in_early = |actor: &&Actor| {
        matches!(
            actor,
            Actor::Ours {
                id: 0,
                geometry: 0,
                maps_ahead: false,
                mode: Mode::Either | Mode::Join
            }
        )
    };
    if setting.ofd_locks
        && setting.actors.iter().filter(ours).count() > 1
        && setting.actors.iter().any(|actor| comes_in_early(&actor))
    {
        all.push(Property::sometimes(TAKES_OVER, |_, state: &State| {
            state.processes.iter().any(|process| {
                let is_left = |ino: Ino| !state.is_preparing(ino) && state.inodes[usize::from(ino)].reserved < PIECES;
                process.pc == Pc::AwaitBacking && process.file.is_some_and(|open| is_left(open.ino))
            })
        }));
    }
    if setting.room.is_some()
        && setting
            .actors
            .iter()
            .any(|actor| matches!(actor, Actor::Ours { id: 1, .. }))
    {
        all.push(Property::sometimes(SECOND_TRY, |setting, state: &State| {
            let creators = |at: usize| matches!(actor(setting, at), Actor::Ours { .. });
            let is_second = |process: &Process| process.pc == Pc::MapAhead && process.tries_left == 0;
            state
                .processes
                .iter()
                .enumerate()
                .any(|(at, process)| creators(at) && is_second(process))
        }));
    }
    if setting.actors.iter().filter(ours).count() > 1 {
        all.push(Property::sometimes("two share", |_, state: &State| {
            let ours = |process: &&Process| process.pc == Pc::Opened;
            state.processes.iter().filter(ours).count() > 1
        }));
        if setting.kills && setting.leases {
            all.push(Property::sometimes("a last one out cleans up", |_, state: &State| {
                let cleans = |process: &Process| process.why == Why::LastOut && process.pc == Pc::ReclaimUnlink;
                state.processes.iter().any(cleans)
            }));
        }
    }
    if setting.actors.contains(&Actor::Original) {
        all.push(Property::sometimes("shared with the original", |_, state: &State| {
            let holds = |pc| state.processes.iter().find(|process| process.pc == pc)?.file;
            match (holds(Pc::Opened), holds(Pc::OriginalOpened)) {
                (Some(ours), Some(theirs)) => ours.ino == theirs.ino,
                _ => false,
            }
        }));
    }
    all
}

/// Those that have handed a region to their user: who, and which file.
fn opened<'a>(setting: &'a Setting, state: &'a State) -> impl Iterator<Item = (Actor, Ino, &'a Process)> {
    state
        .processes
        .iter()
        .enumerate()
        .filter(|(_, process)| process.is_open())
        .filter_map(|(at, process)| Some((actor(setting, at), process.file?.ino, process)))
}

/// G1. A region whose name its creator, or a person, took away may have a successor: that is the contract.
fn one_region_per_name(setting: &Setting, state: &State) -> bool {
    let is_excused = |ino: Ino, with_an_original: bool| {
        let inode = &state.inodes[usize::from(ino)];
        inode.given_up || (with_an_original && inode.adopted && setting.limits.original_adopts_the_dead)
    };
    opened(setting, state).all(|(actor, ino, _)| {
        opened(setting, state).all(|(other_actor, other, _)| {
            let id = |ino: Ino| state.inodes[usize::from(ino)].id;
            let with_an_original = actor == Actor::Original || other_actor == Actor::Original;
            ino == other
                || id(ino) != id(other)
                || is_excused(ino, with_an_original)
                || is_excused(other, with_an_original)
        })
    })
}

/// G2, for ours: an original looks at nothing but the size. Who came in early has a region and no byte of it yet.
fn never_half_made(setting: &Setting, state: &State) -> bool {
    opened(setting, state)
        .filter(|(actor, _, process)| *actor != Actor::Original && process.has_bytes())
        .all(|(_, ino, _)| {
            let inode = &state.inodes[usize::from(ino)];
            inode.is_sized && inode.reserved == PIECES && !state.is_preparing(ino)
        })
}

/// G9.
fn same_geometry(setting: &Setting, state: &State) -> bool {
    let geometry = |actor| match actor {
        Actor::Ours { geometry, .. } => Some(geometry),
        Actor::Original | Actor::Child => None, // the one announces none, the other uses none
    };
    opened(setting, state).all(|(actor, ino, _)| {
        opened(setting, state).all(|(other_actor, other, _)| {
            ino != other
                || match (geometry(actor), geometry(other_actor)) {
                    (Some(one), Some(two)) => one == two,
                    _ => true,
                }
        })
    })
}

/// G3. What its creator gave up, and what a dead file's finder is giving back, is not paid twice.
fn one_payer(setting: &Setting, state: &State) -> bool {
    let pays = |id: u8| {
        state
            .inodes
            .iter()
            .enumerate()
            .filter(|(ino, inode)| {
                let ino = *ino as Ino;
                let adopted = inode.adopted && setting.limits.original_adopts_the_dead;
                let stands = state.names.contains(&Some(ino)) || state.has_living_holder(ino, None);
                inode.exists && inode.id == id && inode.reserved > 0 && stands && !inode.given_up && !adopted
            })
            .count()
    };
    pays(0) <= 1 && pays(1) <= 1
}

/// Nobody lives and a name stands: then the last who held the file was killed, or is of the original class.
fn nothing_left(setting: &Setting, state: &State) -> bool {
    !setting.leases // where nothing is proven dead, only the next constructor cleans up
        || !state.is_over()
        || state
            .names
            .iter()
            .flatten()
            .all(|ino| state.inodes[usize::from(*ino)].excused)
}

/// G5 and G6. From here on nobody is killed any more. Everybody who constructs comes to an end though those
/// who have a region keep it; one more constructor succeeds at once; all close; and then one more
/// succeeds, as creator, and leaves an empty directory.
fn death_heals(setting: &Setting, state: &State) -> bool {
    if state.is_over() {
        return heals_from_the_end(setting, state.clone());
    }
    let mut state = state.clone();
    settle(setting, &mut state, true) && {
        let guest = guest_comes(setting, &mut state);
        let is_answered = guest || !state.has_room(setting, PIECES) || has_other_geometry(setting, &state);
        is_answered
            && settle(setting, &mut state, false)
            && nothing_left(setting, &state)
            && heals_from_the_end(setting, state)
    }
}

fn heals_from_the_end(setting: &Setting, mut state: State) -> bool {
    guest_comes(setting, &mut state)
        && state.processes[GUEST].is_creator
        && one_region_per_name(setting, &state)
        && never_half_made(setting, &state)
        && !state.seen.stale_bytes
        && settle(setting, &mut state, false)
        && state.names.iter().all(Option::is_none)
}

/// One more constructor, alone, without a wait.
fn guest_comes(setting: &Setting, state: &mut State) -> bool {
    state.processes[GUEST] = start(setting, actor(setting, GUEST));
    for _ in 0..STEPS_AT_ONCE {
        match state.processes[GUEST].pc {
            Pc::Opened => return true,
            Pc::Gone => return false,
            _ if can_go(setting, state, GUEST) => go(setting, state, GUEST),
            _ => return false,
        }
    }
    false
}

fn has_other_geometry(setting: &Setting, state: &State) -> bool {
    let other = |actor| matches!(actor, Actor::Ours { id: 0, geometry, .. } if geometry != 0);
    opened(setting, state).any(|(actor, ..)| other(actor))
}

/// Everybody in turn, a step each, until all have a region (`keep`) or are gone.
fn settle(setting: &Setting, state: &mut State, keep: bool) -> bool {
    let only_joins = |me| matches!(actor(setting, me), Actor::Ours { mode: Mode::Join, .. });
    let mut rounds_of_joiners = 0;
    for _ in 0..ROUNDS {
        let mut is_settled = true;
        let mut only_joiners = true;
        for me in 0..PROCESSES {
            // A child keeps what it has for as long as anybody.
            let has_what_it_wants = state.processes[me].has_bytes() || state.processes[me].pc == Pc::Child;
            if state.processes[me].pc == Pc::Gone || (keep && has_what_it_wants) {
                continue;
            }
            if setting.limits.original_waits_on_a_stub && original::waits_in_vain(state, me) {
                original::fail(state, me);
                continue;
            }
            if rounds_of_joiners > PATIENCE_OF_JOINERS && only_joins(me) && state.processes[me].pc == Pc::Lock {
                state.processes[me] = Process::GONE;
                continue;
            }
            is_settled = false;
            only_joiners &= only_joins(me);
            if can_go(setting, state, me) {
                go(setting, state, me);
            }
        }
        if is_settled {
            return true;
        }
        rounds_of_joiners += usize::from(only_joiners);
    }
    false
}
