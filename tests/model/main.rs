//! A model of the region protocol (`docs/protocol.md`), checked in every state that it can reach: three
//! processes of ours and one of the original class, each of which can be killed at each step.
//!
//! `cargo test --test model` checks the small configurations, that mutations of the protocol are noticed, and
//! that the documented limits are real. `make model` checks all configurations.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // a test fails by panicking

mod limits;
mod machine;
mod mutations;
mod original;
mod process;
mod properties;
mod protocol;
mod settings;
mod state;

use std::collections::HashSet;
use std::fmt::Write as _;
use std::time::Instant;

use ec_shared_region::step::Step;
use machine::Action;
use protocol::Setting;
use state::State;
use stateright::{Checker, DiscoveryClassification, HasDiscoveries, Model, Path};

/// What a run came to: one line of figures, and a trace for each property that does not hold.
struct Outcome {
    states: usize,
    transitions: usize,
    depth: usize,
    seconds: f64,
    properties: usize,
    violations: Vec<(&'static str, String)>,
}

/// Explores every state, or stops at the first violation.
fn run(setting: &Setting, stop_early: bool) -> Outcome {
    let began = Instant::now();
    // One thread finds a shortest trace; two see everything sooner.
    let (finish, threads) = if stop_early {
        (HasDiscoveries::AnyFailures, 1)
    } else {
        (HasDiscoveries::All, 2)
    };
    let checker = setting
        .clone()
        .checker()
        .threads(threads)
        .finish_when(finish)
        .spawn_bfs()
        .join();
    let mut violations: Vec<_> = checker
        .discoveries()
        .into_iter()
        .filter(|(name, _)| {
            matches!(
                checker.discovery_classification(name),
                DiscoveryClassification::Counterexample
            )
        })
        .map(|(name, path)| (name, format!("{name} does not hold:\n{}", trace(setting, name, path))))
        .collect();
    // What is to be reached at least once, and was not, when every state was seen.
    if !stop_early || violations.is_empty() {
        for property in checker.model().properties() {
            if property.expectation == stateright::Expectation::Sometimes && checker.discovery(property.name).is_none()
            {
                violations.push((property.name, format!("{} never happens\n", property.name)));
            }
        }
    }
    Outcome {
        states: checker.unique_state_count(),
        transitions: checker.state_count(),
        depth: checker.max_depth(),
        seconds: began.elapsed().as_secs_f64(),
        properties: checker.model().properties().len(),
        violations,
    }
}

/// The steps up to the first state in which the property does not hold: the checker may have gone on from there.
fn trace(setting: &Setting, property: &str, path: Path<State, Action>) -> String {
    let properties = setting.properties();
    let property = properties
        .iter()
        .find(|one| one.name == property)
        .expect("found by its name");
    let mut steps = String::new();
    for (at, (state, action)) in path.into_vec().into_iter().enumerate() {
        if !(property.condition)(setting, &state) {
            break;
        }
        if let Some(action) = action {
            let _ = writeln!(steps, "  {:>3}  {action:?}", at + 1);
        }
    }
    steps
}

/// Checks configurations, prints a line for each, and fails with the traces.
fn check(settings: &[settings::Named]) {
    let mut traces = String::new();
    println!(
        "{:<45} {:>10} {:>12} {:>6} {:>8}  properties",
        "configuration", "states", "transitions", "depth", "seconds"
    );
    for (name, setting) in settings {
        let outcome = run(setting, false);
        let verdict = if outcome.violations.is_empty() {
            "hold"
        } else {
            "DO NOT HOLD"
        };
        println!(
            "{name:<45} {:>10} {:>12} {:>6} {:>8.2}  {} {verdict}",
            outcome.states, outcome.transitions, outcome.depth, outcome.seconds, outcome.properties
        );
        if !outcome.violations.is_empty() {
            // Once more, for a short trace in which everybody keeps their number.
            let told_apart = Setting {
                tells_apart: true,
                ..setting.clone()
            };
            for (_, trace) in run(&told_apart, true).violations.iter().chain(&outcome.violations) {
                let _ = write!(traces, "\n{name}: {trace}");
            }
        }
    }
    assert!(traces.is_empty(), "{traces}");
}

#[test]
fn the_protocol_holds_in_small_configurations() {
    check(&settings::bounded());
}

#[test]
#[ignore = "minutes: `make model`"]
fn exhaustive() {
    let only = std::env::var("MODEL_ONLY").unwrap_or_default();
    let chosen: Vec<_> = settings::exhaustive()
        .into_iter()
        .filter(|(name, _)| name.contains(&only))
        .collect();
    check(&chosen);
}

/// A new step must be modelled, or be named here with the reason why not.
#[test]
fn every_step_is_taken() {
    // Between the first and the next step nothing happens that others could see; what is behind a page nobody sees;
    // the rest is between a process and its device.
    let not_modelled = [
        Step::Opened,
        Step::Collapse,
        Step::Register,
        Step::Rollback,
        Step::Unpin,
        Step::Unregister,
    ];
    let mut setting = settings::dead(&[protocol::OURS, settings::MAPS_AHEAD], &[(0, true)]);
    setting.failures = true;
    let mut taken = HashSet::new();
    let mut seen = HashSet::new();
    let mut pending = setting.init_states();
    while let Some(state) = pending.pop() {
        let mut actions = Vec::new();
        setting.actions(&state, &mut actions);
        for action in actions {
            if let Action::Go(_, step, _) = action {
                taken.insert(step);
            }
            pending.extend(
                setting
                    .next_state(&state, action)
                    .filter(|next| seen.insert(next.clone())),
            );
        }
    }
    for step in Step::ALL {
        assert_ne!(taken.contains(step), not_modelled.contains(step), "{}", step.name());
    }
}

/// The model must find a state in which one of `expected` does not hold; the trace is printed.
fn must_violate(setting: &Setting, expected: &[&str]) {
    let outcome = run(setting, true);
    for (_, trace) in &outcome.violations {
        println!("{trace}");
    }
    assert!(
        outcome.violations.iter().any(|(name, _)| expected.contains(name)),
        "{} states, and none of {expected:?} is violated",
        outcome.states
    );
}
