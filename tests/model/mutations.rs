//! Mutations of the protocol: the model must notice each, or it has no teeth. What they show is also what
//! each part of the protocol is there for.

use super::must_violate;
use super::properties::*;
use super::protocol::{Actor, OURS, Protocol, Setting};
use super::settings::*;

fn mutated(mut setting: Setting, mutate: impl FnOnce(&mut Protocol)) -> Setting {
    mutate(&mut setting.protocol);
    setting.tells_apart = true; // for the trace
    setting
}

#[test]
fn mutation_no_directory_lock_is_caught() {
    // Nobody dies or fails: with those a file that nobody removes is found first. And no person takes a name away.
    let mut setting = Setting {
        kills: false,
        failures: false,
        ..dead(&[OURS, OURS], &[(0, true)])
    };
    setting.limits.name_taken_between_compare_and_unlink = false;
    must_violate(
        &mutated(setting, |protocol| protocol.directory_lock = false),
        &[NO_TWINS, NO_ROBBERY],
    );
}

#[test]
fn mutation_probe_ignores_writers_is_caught() {
    let setting = Setting::new(&[OURS, Actor::Original]);
    must_violate(
        &mutated(setting, |protocol| protocol.asks_for_writers = false),
        &[NO_ROBBERY],
    );
}

/// The writer alone shows that somebody lives where there are leases, and the geometry where there are OFD locks.
#[test]
fn mutation_publish_without_life_lock_is_caught() {
    let setting = no_locks_but_life(&[OURS, OURS]);
    must_violate(
        &mutated(setting, |protocol| protocol.publishes_alive = false),
        &[NO_TWINS, NO_ROBBERY],
    );
}

#[test]
fn mutation_geometry_is_not_announced_is_caught() {
    let setting = Setting::new(&[OURS, OTHER_GEOMETRY]);
    must_violate(
        &mutated(setting, |protocol| protocol.announces_geometry = false),
        &[SAME_GEOMETRY],
    );
}

/// Two that wait for a dead original's stub would keep each other waiting for ever.
#[test]
fn mutation_waiter_holds_the_file_open_is_caught() {
    let setting = Setting::new(&[OURS, OURS, Actor::Original]);
    must_violate(
        &mutated(setting, |protocol| protocol.waits_with_nothing = false),
        &[HEALS],
    );
}

#[test]
fn mutation_unlink_without_identity_check_is_caught() {
    let setting = removals(&[OURS, OURS]);
    must_violate(
        &mutated(setting, |protocol| protocol.compares_before_unlink = false),
        &[NO_ROBBERY],
    );
}

/// It would pay for what its creator is at.
#[test]
fn mutation_map_ahead_before_end_preparing_is_caught() {
    let setting = Setting::new(&[OURS, MAPS_AHEAD]);
    must_violate(
        &mutated(setting, |protocol| protocol.waits_for_preparing = false),
        &[NOT_HALF_MADE],
    );
}

#[test]
fn mutation_joiner_hands_out_without_waiting_is_caught() {
    let setting = Setting::new(&[OURS, OURS]);
    must_violate(
        &mutated(setting, |protocol| protocol.awaits_backing = false),
        &[NOT_HALF_MADE],
    );
}

/// The creator died, or gave up: that nobody prepares any more does not mean that anybody has.
#[test]
fn mutation_nobody_takes_over_is_caught() {
    let setting = Setting::new(&[OURS, OURS]);
    must_violate(
        &mutated(setting, |protocol| protocol.takes_over = false),
        &[NOT_HALF_MADE],
    );
}

/// A child of a creator that was killed would keep everybody waiting for as long as it lives.
#[test]
fn mutation_preparing_is_inherited_is_caught() {
    let setting = Setting::new(&[OURS, OURS, Actor::Child]);
    must_violate(
        &mutated(setting, |protocol| protocol.preparing_is_not_inherited = false),
        &[HEALS],
    );
}

#[test]
fn mutation_giving_back_robs_who_is_inside_is_caught() {
    let setting = Setting::new(&[OURS, OURS]);
    must_violate(
        &mutated(setting, |protocol| protocol.gives_back_only_if_last = false),
        &[NO_ROBBERY],
    );
}

/// Two regions that fill the room between them refuse each other, and both have it afterwards.
#[test]
fn mutation_no_second_try_is_caught() {
    let setting = crowded(&[OURS, OTHER_ID]);
    must_violate(
        &mutated(setting, |protocol| protocol.tries_again = false),
        &[SECOND_TRY],
    );
}

#[test]
fn mutation_the_dying_are_in_the_way_is_caught() {
    let setting = Setting::new(&[OURS, OTHER_GEOMETRY]);
    must_violate(
        &mutated(setting, |protocol| protocol.waits_for_the_dying = false),
        &[DYING],
    );
}

#[test]
fn mutation_joiner_reserves_nothing_is_caught() {
    let setting = Setting::new(&[OURS, Actor::Original]);
    must_violate(
        &mutated(setting, |protocol| protocol.joiner_reserves = false),
        &[NOT_HALF_MADE],
    );
}

#[test]
fn mutation_dead_file_is_taken_over_is_caught() {
    let setting = dead(&[OURS], &[(0, true)]);
    must_violate(
        &mutated(setting, |protocol| protocol.dead_bytes_are_unlinked = false),
        &[ZERO],
    );
}

/// Under the directory's lock only an original can take the name first.
#[test]
fn mutation_publish_over_another_is_caught() {
    let setting = Setting::new(&[OURS, Actor::Original]);
    must_violate(
        &mutated(setting, |protocol| protocol.publishes_without_replacing = false),
        &[NO_ROBBERY],
    );
}

#[test]
fn mutation_nobody_is_last_out_is_caught() {
    let setting = Setting::new(&[OURS, OURS]);
    must_violate(
        &mutated(setting, |protocol| protocol.last_one_out_cleans = false),
        &[NOTHING_LEFT, HEALS],
    );
}

/// Two that go at the same moment would each leave the name to the other.
#[test]
fn mutation_looks_before_it_lets_go_is_caught() {
    let setting = Setting::new(&[OURS, OURS, Actor::Original]);
    must_violate(
        &mutated(setting, |protocol| protocol.lets_go_before_it_looks = false),
        &[NOTHING_LEFT, HEALS],
    );
}

/// A creator that fails; and a joiner whose creator was killed: it was the last one out.
#[test]
fn mutation_failed_constructor_does_not_look_back_is_caught() {
    for setting in [Setting::new(&[OURS]), Setting::new(&[JOINER, Actor::Original])] {
        must_violate(
            &mutated(setting, |protocol| protocol.abandons = false),
            &[NOTHING_LEFT, HEALS],
        );
    }
}

/// A joiner that closes while a view lives finds itself alive, and nobody looks when the view goes.
#[test]
fn mutation_last_view_does_not_look_back_is_caught() {
    let setting = views(&[OURS, OURS]);
    must_violate(
        &mutated(setting, |protocol| protocol.last_view_looks_back = false),
        &[NOTHING_LEFT, HEALS],
    );
}

/// The room is looked at while it is taken, and the question who frees some comes when it is free.
#[test]
fn mutation_room_is_looked_at_once_is_caught() {
    let setting = crowded(&[OURS, OURS]);
    must_violate(
        &mutated(setting, |protocol| protocol.looks_at_room_twice = false),
        &[SPACE],
    );
}

#[test]
fn mutation_failure_at_linked_leaves_the_name_is_caught() {
    let setting = linked_may_fail(&[OURS]);
    must_violate(
        &mutated(setting, |protocol| protocol.abandons_at_linked = false),
        &[NOTHING_LEFT, HEALS],
    );
}
