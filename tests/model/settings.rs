//! The configurations that are checked: few and small in every test run, all of them by `make model`.

use super::protocol::{Actor, Mode, OURS, Setting};

const fn ours(id: u8, geometry: u8, mode: Mode) -> Actor {
    Actor::Ours {
        id,
        geometry,
        mode,
        maps_ahead: false,
    }
}

pub const OTHER_ID: Actor = ours(1, 0, Mode::Either);
pub const OTHER_GEOMETRY: Actor = ours(0, 1, Mode::Either);
pub const CREATOR: Actor = ours(0, 0, Mode::Create);
pub const JOINER: Actor = ours(0, 0, Mode::Join);
pub const MAPS_AHEAD: Actor = Actor::Ours {
    id: 0,
    geometry: 0,
    mode: Mode::Either,
    maps_ahead: true,
};

pub type Named = (&'static str, Setting);

/// In every test run.
pub fn bounded() -> Vec<Named> {
    let two = [OURS, OURS];
    vec![
        ("three of ours, nobody is killed", unkilled(&[OURS, OURS, OURS])),
        ("one of ours and an original", Setting::new(&[OURS, Actor::Original])),
        (
            "two of ours and an original, nobody is killed",
            unkilled(&[OURS, OURS, Actor::Original]),
        ),
        ("after a dead file", dead(&two, &[(0, true)])),
        ("after a dead stub", dead(&two, &[(0, false)])),
        ("an orphan of another id", dead(&two, &[(1, true)])),
        ("two ids", Setting::new(&[OURS, OTHER_ID])),
        ("two geometries", Setting::new(&[OURS, OTHER_GEOMETRY])),
        ("create and join", Setting::new(&[CREATOR, JOINER])),
        ("one that maps ahead", Setting::new(&[OURS, MAPS_AHEAD])),
        ("two and a child", Setting::new(&[OURS, OURS, Actor::Child])),
        ("room for one", crowded(&two)),
        ("two ids, room for one", crowded(&[OURS, OTHER_ID])),
        ("a name taken away by hand", removals(&two)),
        ("views that live on", views(&two)),
        ("no leases", no_leases(&two)),
        ("no OFD locks", no_ofd_locks(&two)),
        ("neither leases nor OFD locks", no_locks_but_life(&two)),
        ("no O_TMPFILE", no_tmpfile(&two)),
        ("stopped with the directory's lock", impatient(&two)),
        ("flock fails once the name is given", linked_may_fail(&two)),
    ]
}

/// By `make model`, from small to large.
pub fn exhaustive() -> Vec<Named> {
    let three = [OURS, OURS, OURS];
    let with_original = [OURS, OURS, Actor::Original];
    let mut all = bounded();
    all.extend([
        ("three of ours", Setting::new(&three)),
        ("two of ours and an original", Setting::new(&with_original)),
        ("3, after a dead file", dead(&three, &[(0, true)])),
        ("3, after a dead stub", dead(&three, &[(0, false)])),
        ("3, an orphan of another id", dead(&three, &[(1, true)])),
        ("3, two dead files", dead(&three, &[(0, true), (1, true)])),
        ("3, create and join", Setting::new(&[CREATOR, JOINER, OURS])),
        ("3, two ids", Setting::new(&[OURS, OURS, OTHER_ID])),
        ("3, two geometries", Setting::new(&[OURS, OURS, OTHER_GEOMETRY])),
        ("3, one maps ahead", Setting::new(&[OURS, OURS, MAPS_AHEAD])),
        ("3, two map ahead", Setting::new(&[OURS, MAPS_AHEAD, MAPS_AHEAD])),
        ("3 and a child", Setting::new(&[OURS, OURS, OURS, Actor::Child])),
        ("3, room for one", crowded(&three)),
        ("3, two ids, room for one", crowded(&[OURS, OURS, OTHER_ID])),
        ("3, a name taken away by hand", removals(&three)),
        ("3, views that live on", views(&three)),
        ("3, no leases", no_leases(&three)),
        ("3, no OFD locks", no_ofd_locks(&three)),
        ("3, neither leases nor OFD locks", no_locks_but_life(&three)),
        ("2 and an original, no OFD locks", no_ofd_locks(&with_original)),
        ("3, no O_TMPFILE", no_tmpfile(&three)),
        ("3, stopped with the directory's lock", impatient(&three)),
        ("3, flock fails once the name is given", linked_may_fail(&three)),
        ("2, each twice", twice(&[OURS, OURS])),
        ("2, each twice, room for one", {
            Setting {
                more_lives: 1,
                ..crowded(&[OURS, OURS])
            }
        }),
        (
            "2 and an original, after a dead file",
            dead(&with_original, &[(0, true)]),
        ),
        (
            "2 and an original, after a dead stub",
            dead(&with_original, &[(0, false)]),
        ),
        ("2 and an original, room for one", crowded(&with_original)),
        ("2 and an original, no O_TMPFILE", no_tmpfile(&with_original)),
        ("2 and an original, a name taken away by hand", removals(&with_original)),
        (
            "2 geometries and an original",
            Setting::new(&[OURS, OTHER_GEOMETRY, Actor::Original]),
        ),
        (
            "1 and two originals",
            Setting::new(&[OURS, Actor::Original, Actor::Original]),
        ),
        ("3, each twice", twice(&three)),
        ("3 and an original", Setting::new(&[OURS, OURS, OURS, Actor::Original])),
        (
            "3 and an original, after a dead file",
            dead(&[OURS, OURS, OURS, Actor::Original], &[(0, true)]),
        ),
    ]);
    all
}

pub fn dead(actors: &[Actor], dead: &[(u8, bool)]) -> Setting {
    Setting {
        dead: dead.to_vec(),
        ..Setting::new(actors)
    }
}

pub fn unkilled(actors: &[Actor]) -> Setting {
    Setting {
        kills: false,
        ..Setting::new(actors)
    }
}

pub fn crowded(actors: &[Actor]) -> Setting {
    Setting {
        room: Some(super::state::PIECES),
        ..Setting::new(actors)
    }
}

pub fn removals(actors: &[Actor]) -> Setting {
    Setting {
        removals: 1,
        lock_timeouts: true,
        ..Setting::new(actors)
    }
}

pub fn no_leases(actors: &[Actor]) -> Setting {
    Setting {
        leases: false,
        ..Setting::new(actors)
    }
}

pub fn no_ofd_locks(actors: &[Actor]) -> Setting {
    Setting {
        ofd_locks: false,
        ..Setting::new(actors)
    }
}

pub fn no_locks_but_life(actors: &[Actor]) -> Setting {
    Setting {
        leases: false,
        ..no_ofd_locks(actors)
    }
}

pub fn no_tmpfile(actors: &[Actor]) -> Setting {
    Setting {
        tmpfile: false,
        ..Setting::new(actors)
    }
}

pub fn impatient(actors: &[Actor]) -> Setting {
    Setting {
        lock_timeouts: true,
        ..Setting::new(actors)
    }
}

pub fn views(actors: &[Actor]) -> Setting {
    Setting {
        views: true,
        ..Setting::new(actors)
    }
}

pub fn linked_may_fail(actors: &[Actor]) -> Setting {
    Setting {
        linked_may_fail: true,
        ..Setting::new(actors)
    }
}

pub fn twice(actors: &[Actor]) -> Setting {
    Setting {
        more_lives: 1,
        ..Setting::new(actors)
    }
}
