//! Every call of the core fails in turn, with each errno that its manual page names, once and for ever, in every role.
//!
//! A library that is preloaded into a worker stands between it and the C library (`faults_shim.c`). Whatever
//! fails, the outcome is a region or a documented error: never a signal, a panic or a hang; nothing leaks, and
//! nothing stays that a later constructor does not remove.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)] // a test fails by panicking

mod common;
#[path = "faults/inject.rs"]
mod inject;
#[path = "faults/stage.rs"]
mod stage;
#[path = "faults/table.rs"]
mod table;

use stage::{ROLES, Stage};
use table::{DEPENDS_ON_THE_KERNEL, Outcome, ROWS, Row, Times};

#[test]
fn worker() {
    inject::serve();
}

/// Every row of the table in one role: at each call of the function, once and from there on for ever.
fn fails_in_every_way(name: &str) {
    let Some(shim) = inject::shim() else { return };
    let role = ROLES.iter().find(|role| role.name == name).unwrap();
    let mut stage = Stage::new(role, &shim);
    let calls = stage.calls();
    for call in calls.keys() {
        assert!(
            ROWS.iter().any(|row| row.call == call),
            "`{call}` is called and not in the table"
        );
    }
    let mut wrong = Vec::new();
    let is_tried = |row: &&Row| role.only.is_empty() || role.only.contains(&row.call);
    for row in ROWS
        .iter()
        .filter(is_tried)
        .filter(|row| role.base.split('/').next() != Some(row.call))
    {
        let Some(&called) = calls.get(row.call) else { continue };
        for times in [Times::Once, Times::ForEver] {
            for &errno in row.errnos {
                for nth in role.which(called) {
                    if nth > *role.which(called).start()
                        && times == Times::ForEver
                        && row.is_the_same_wherever_it_begins(errno)
                    {
                        continue;
                    }
                    wrong.extend(stage.fault(row, errno, nth, times).err());
                }
            }
        }
    }
    stage.is_left_empty();
    assert!(
        wrong.is_empty(),
        "{} outcomes are wrong:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

/// The process is killed instead, before each of its calls: also where the protocol has no name for the place.
fn is_killed_before_every_call(name: &str) {
    let Some(shim) = inject::shim() else { return };
    let role = ROLES.iter().find(|role| role.name == name).unwrap();
    let mut stage = Stage::new(role, &shim);
    let is_tried = |call: &str| role.only.is_empty() || role.only.contains(&call);
    let calls = stage.calls().into_iter().filter(|(call, _)| is_tried(call));
    for (call, times) in calls.filter(|(_, times)| role.calls_as_often_again(*times)) {
        for nth in role.which(times) {
            stage.kill(&call, nth);
        }
    }
    stage.is_left_empty();
}

/// A row that no role reaches says nothing.
#[test]
fn every_row_is_called_in_some_role() {
    let Some(shim) = inject::shim() else { return };
    let mut unused: Vec<_> = ROWS.iter().map(|row| row.call).collect();
    unused.retain(|call| !DEPENDS_ON_THE_KERNEL.contains(call));
    for role in ROLES {
        let calls = Stage::new(role, &shim).calls();
        unused.retain(|call| !calls.contains_key(*call));
    }
    assert!(unused.is_empty(), "{unused:?}");
}

/// What the outcomes are for: an error says which call failed and with what.
#[test]
fn an_outcome_is_read_from_an_answer() {
    assert_eq!(Outcome::of("ok creator 5", 5), Ok(Outcome::Works));
    assert_eq!(Outcome::of("err Os 5 fstat failed", 5), Ok(Outcome::Os));
    assert!(Outcome::of("err Os 6 fstat failed", 5).is_err());
    assert_eq!(Outcome::of("err NoSpace 28 x", 28), Ok(Outcome::NoSpace));
    assert_eq!(Outcome::of("err NoSpace 28 x", 14), Ok(Outcome::NoSpace));
    assert!(Outcome::of("err NoSpace 14 x", 14).is_err());
    assert!(Outcome::of("err Foreign 1 x", 1).is_err());
}

macro_rules! roles {
    ($($name:ident)*) => {
        $(mod $name {
            #[test]
            fn fails() {
                super::fails_in_every_way(stringify!($name));
            }
            #[test]
            fn killed() {
                super::is_killed_before_every_call(stringify!($name));
            }
        })*

        #[test]
        fn every_role_has_its_tests() {
            let known: Vec<_> = ROLES.iter().map(|role| role.name).collect();
            assert_eq!([$(stringify!($name)),*].as_slice(), known);
        }
    };
}

roles! {
    create
    create_where_unnamed_files_are_refused
    create_where_links_are_refused
    create_where_fallocate_is_unknown
    create_where_populate_is_unknown
    create_with_huge_pages
    create_with_huge_pages_where_they_cannot_be_counted
    create_where_the_mount_has_huge_pages
    create_in_threads
    create_on_all_nodes
    reclaim
    reclaim_where_leases_are_refused
    sweep
    join
    join_an_original
    take_over
    close_as_creator
    close_as_joiner
    close_as_last_one_out
}
