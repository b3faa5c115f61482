//! A process is killed, or stopped, at every named step of the protocol, in every role in which it can be there.
//!
//! Each role has a directory of its own in /dev/shm, with a neighbour of another id that must notice nothing.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)] // a test fails by panicking

mod common;
#[path = "kill_points/roles.rs"]
mod roles;
#[path = "kill_points/world.rs"]
mod world;

use std::collections::HashSet;

use ec_shared_region::step::Step;
use roles::ROLES;
use world::World;

#[test]
fn worker() {
    common::worker::run(|_, _| None);
}

#[test]
fn the_roles_together_reach_every_step() {
    let reached: HashSet<Step> = ROLES
        .iter()
        .flat_map(|role| role.steps.iter().map(|(step, _)| *step))
        .collect();
    let missed: Vec<_> = Step::ALL.iter().filter(|step| !reached.contains(step)).collect();
    assert!(missed.is_empty(), "no role dies at {missed:?}");
}

/// Runs a test of a role where this machine has it.
fn with(name: &str, test: impl Fn(&World<'_>)) {
    let role = roles::named(name);
    if let Some(reason) = role.is_impossible() {
        eprintln!("skipped: {name}: {reason}");
        return;
    }
    let world = World::new(role);
    test(&world);
    world.is_left_empty();
}

/// The table of a role is complete: at no other step, and at none of its steps once more, does anything happen.
fn reaches_no_other_step(world: &World<'_>) {
    for (step, nth) in world.role.not_reached() {
        world.runs_unharmed(step, nth);
    }
}

fn survives_a_kill(world: &World<'_>) {
    for (step, nth) in world.role.places() {
        for blocks in world.role.next_blocks() {
            world.killed_then_next(step, nth, blocks);
        }
        for populate in ["create", "join"] {
            world.killed_while_another_waits(step, nth, populate);
        }
    }
}

fn survives_a_stop(world: &World<'_>) {
    for (step, nth) in world.role.places() {
        world.stopped_and_continued(step, nth);
    }
}

#[test]
fn a_creator_closes_while_a_joiner_is_stopped() {
    with("joiner", |world| {
        for step in [
            Step::Lock,
            Step::Probe,
            Step::Assess,
            Step::Attach,
            Step::Attached,
            Step::JoinReserve,
            Step::JoinMap,
            Step::Opened,
            Step::CloseFile,
        ] {
            world.stopped_while_the_holder_closes(step, 1);
        }
    });
}

#[test]
fn an_original_takes_the_name_while_another_is_stopped() {
    let joins: [(&str, &[Step]); 3] = [
        ("creator", &[Step::CheckRoom, Step::Publish, Step::Link, Step::Linked]),
        (
            "reclaimer_of_a_larger_file",
            &[Step::Reclaim, Step::Reclaimed, Step::Link, Step::Linked],
        ),
        ("joiner", &[Step::Assess, Step::Attach, Step::Attached]),
    ];
    // These have their own region by then, and another has its name.
    let keeps: [(&str, &[Step]); 3] = [
        (
            "creator",
            &[
                Step::Map,
                Step::MapAhead,
                Step::EndPreparing,
                Step::Opened,
                Step::Close,
                Step::DropName,
            ],
        ),
        ("joiner", &[Step::JoinReserve, Step::Close, Step::LastOut]),
        ("abandoner_with_everything_mapped", &[Step::Abandon, Step::LastOut]),
    ];
    for (cases, then_joins) in [(joins, true), (keeps, false)] {
        for (name, steps) in cases {
            with(name, |world| {
                for &step in steps {
                    world.stopped_while_an_original_takes_the_name(step, 1, then_joins);
                }
            });
        }
    }
}

macro_rules! roles {
    ($($name:ident)*) => {
        $(mod $name {
            #[test]
            fn killed() {
                super::with(stringify!($name), super::survives_a_kill);
            }
            #[test]
            fn stopped() {
                super::with(stringify!($name), super::survives_a_stop);
            }
            #[test]
            fn the_table_is_complete() {
                super::with(stringify!($name), super::reaches_no_other_step);
            }
        })*

        #[test]
        fn every_role_has_its_tests() {
            let tested = [$(stringify!($name)),*];
            let known: Vec<_> = ROLES.iter().map(|role| role.name).collect();
            assert_eq!(tested.as_slice(), known);
        }
    };
}

roles! {
    creator
    creator_that_only_reserves
    creator_with_huge_pages
    creator_of_a_large_region
    creator_of_several_threads
    joiner
    joiner_that_maps_ahead
    joiner_of_a_large_region
    joiner_that_waits
    joiner_that_comes_in_early
    joiner_that_takes_over_a_half_made_region
    closer_before_every_byte_is_backed
    joiner_of_an_original
    joiner_of_a_large_original
    joiner_that_waits_for_an_original
    reclaimer_of_a_smaller_file
    reclaimer_of_a_larger_file
    sweeper
    closer_as_creator_with_a_joiner
    closer_as_last_one_out
    unpinner
    abandoner_before_a_byte_is_reserved
    abandoner_with_everything_mapped
    abandoner_with_a_joiner_inside
    creator_whose_pages_are_refused
    joiner_whose_pages_are_refused
}
