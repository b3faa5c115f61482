//! The limits that `docs/protocol.md` names are real: without the exclusion the model finds each of them.

use super::must_violate;
use super::properties::*;
use super::protocol::{Actor, Limits, OURS, Setting};
use super::settings::*;

fn without(mut setting: Setting, limit: impl FnOnce(&mut Limits)) -> Setting {
    limit(&mut setting.limits);
    setting.tells_apart = true;
    setting
}

#[test]
fn limit_original_adopts_a_dead_file_is_real() {
    let setting = dead(&[OURS, Actor::Original], &[(0, true)]);
    must_violate(
        &without(setting, |limits| limits.original_adopts_the_dead = false),
        &[NO_ROBBERY, NO_TWINS],
    );
}

#[test]
fn limit_original_joins_during_reserve_is_real() {
    let setting = Setting::new(&[OURS, Actor::Original]);
    must_violate(
        &without(setting, |limits| limits.original_joins_unreserved = false),
        &[ORIGINAL_RESERVED],
    );
}

#[test]
fn limit_original_waits_on_a_stub_is_real() {
    let setting = Setting::new(&[OURS, Actor::Original, Actor::Original]);
    must_violate(
        &without(setting, |limits| limits.original_waits_on_a_stub = false),
        &[HEALS],
    );
}

#[test]
fn limit_name_taken_between_compare_and_unlink_is_real() {
    let setting = removals(&[OURS, Actor::Original]);
    must_violate(
        &without(setting, |limits| {
            limits.name_taken_between_compare_and_unlink = false;
        }),
        &[NO_ROBBERY],
    );
}

#[test]
fn limit_original_unlinks_by_path_is_real() {
    let setting = removals(&[OURS, Actor::Original]);
    must_violate(
        &without(setting, |limits| limits.original_unlinks_by_path = false),
        &[NO_ROBBERY],
    );
}
