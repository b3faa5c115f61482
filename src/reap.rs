//! Reclaims what the dead left behind: region files of this user that no process holds.

use std::ffi::{CStr, CString};
use std::time::Duration;

use crate::counters::{self, COUNTING};
use crate::directory::{Directory, Locked};
use crate::error::Result;
use crate::file::{Found, Probe};
use crate::list::{self, State, Verdict};
use crate::spec::EngineId;
use crate::step::{Step, reached};
use crate::wait::{Waiter, never_stop};

/// A file that was removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reclaimed {
    pub file_name: String,
    /// Bytes that came back to the filesystem.
    pub bytes: u64,
}

/// A file that bears a region's name and was left where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PassedOver {
    pub file_name: String,
    pub reason: String,
}

/// What a look at all names came to.
#[derive(Debug, Default)]
pub struct Swept {
    pub reclaimed: Vec<Reclaimed>,
    /// Not the living, of which there is nothing to say; a handful.
    pub passed_over: Vec<PassedOver>,
}

impl Swept {
    fn pass_over(&mut self, name: &CStr, reason: impl ToString) {
        const MOST: usize = 32;

        if self.passed_over.len() < MOST {
            self.passed_over.push(PassedOver {
                file_name: name.to_string_lossy().into_owned(),
                reason: reason.to_string(),
            });
        }
    }
}

/// Removes every dead region of this user but `except`. What is not ours, not proven dead, or cannot
/// be removed is passed over: nobody's constructor fails because of it.
///
/// # Errors
/// Only what ends the wait for the directory's lock.
pub fn reclaim_dead(directory: &Directory, except: &CStr, waiter: &mut Waiter<'_, '_>) -> Result<Swept> {
    let mut swept = Swept::default();
    for name in directory.names() {
        if name.as_c_str() == except {
            continue;
        }
        waiter.checkpoint()?;
        // A look without the lock, of which there may be a thousand.
        if directory.is_held_by_ours(&name) {
            continue;
        }
        // One hold of the lock for each file: a long list must not keep other constructors waiting.
        let locked = directory.lock(waiter)?;
        match locked.probe(&name) {
            Ok(Probe::Dead { found, is_proven: true }) => match reclaim(directory, locked, &name, found) {
                Ok(reclaimed) => swept.reclaimed.extend(reclaimed),
                Err(error) => swept.pass_over(&name, error),
            },
            Ok(Probe::Dead { .. }) => swept.pass_over(&name, "whether somebody holds it cannot be seen from here"),
            Ok(Probe::Live(_) | Probe::Absent | Probe::Changed | Probe::Locked) => {}
            Err(error) => swept.pass_over(&name, error),
        }
    }
    Ok(swept)
}

/// Takes a dead file's name away and gives its pages back, the slow part of it without the lock. `None` where
/// the name stands for another file by now.
///
/// # Errors
/// [`Error::Os`](crate::Error::Os): the name cannot be taken away.
pub fn reclaim(directory: &Directory, locked: Locked<'_>, name: &CStr, found: Found) -> Result<Option<Reclaimed>> {
    reached(Step::Reclaim);
    let _freeing = directory.begin_freeing();
    let was_removed = locked.drop_dead_name(name, &found)?;
    drop(locked);
    reached(Step::Reclaimed);
    let bytes = found.allocated_bytes;
    drop(found);
    if !was_removed {
        return Ok(None);
    }
    counters::count(&COUNTING.reclaimed_files);
    counters::add(&COUNTING.reclaimed_bytes, bytes);
    Ok(Some(Reclaimed {
        file_name: name.to_string_lossy().into_owned(),
        bytes,
    }))
}

/// How long a process that goes waits for the directory's lock; then it leaves the file to the next constructor.
const PATIENCE: Duration = Duration::from_secs(1);

/// [`reclaim_if_dead`] for a process that goes: whatever fails is left to the next constructor, which can say
/// what is wrong with the file.
pub fn remove_if_last(directory: &Directory, name: &CStr) {
    reached(Step::LastOut);
    // Mostly somebody of ours is left. Who goes at the same moment has let go before it looks, so one of the two sees
    // nobody.
    if directory.is_held_by_ours(name) {
        return;
    }
    let mut go_on = never_stop();
    let _ = reclaim_if_dead(directory, name, &mut Waiter::new(PATIENCE, &mut go_on));
}

/// Removes the file at `name` if nobody holds it any more.
///
/// # Errors
/// As [`reclaim_dead`].
pub fn reclaim_if_dead(directory: &Directory, name: &CStr, waiter: &mut Waiter<'_, '_>) -> Result<Option<Reclaimed>> {
    let locked = directory.lock(waiter)?;
    Ok(match locked.probe(name)? {
        Probe::Dead { found, is_proven: true } => reclaim(directory, locked, name, found)?,
        Probe::Dead { .. } | Probe::Live(_) | Probe::Absent | Probe::Changed | Probe::Locked => None,
    })
}

/// What was decided about one file, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    pub file_name: CString,
    /// `None` where nothing stands at the name.
    pub state: Option<State>,
    /// It was removed; in a dry run: it would be.
    pub is_removed: bool,
    /// What came back to the filesystem, or would.
    pub bytes: u64,
    pub reason: String,
}

/// Removes what is proven dead among the named regions, or among all, and says for each what it did and why. Never a
/// live region, nothing of another user, and nothing that cannot be judged. A dry run decides and does not remove.
///
/// # Errors
/// What ends the wait for the directory's lock; a file that cannot be removed is a decision with that reason.
pub fn reap(
    directory: &Directory,
    ids: Option<&[EngineId]>,
    dry_run: bool,
    waiter: &mut Waiter<'_, '_>,
) -> Result<Vec<Decision>> {
    let names = match ids {
        Some(ids) => ids.iter().map(EngineId::file_name_c).collect(),
        None => {
            let mut names = directory.names();
            names.sort();
            names
        }
    };
    let mut decisions = Vec::new();
    for name in names {
        waiter.checkpoint()?;
        let locked = directory.lock(waiter)?;
        match list::judge(&locked, &name) {
            Some(verdict) => decisions.push(decide(directory, locked, name, verdict, dry_run)),
            None if ids.is_some() => decisions.push(Decision {
                file_name: name,
                state: None,
                is_removed: false,
                bytes: 0,
                reason: String::from("there is no such region"),
            }),
            None => {}
        }
    }
    Ok(decisions)
}

fn decide(directory: &Directory, locked: Locked<'_>, name: CString, verdict: Verdict, dry_run: bool) -> Decision {
    let state = verdict.state;
    let decision = |name, is_removed, bytes, reason: String| Decision {
        file_name: name,
        state: Some(state),
        is_removed,
        bytes,
        reason,
    };
    match (state, verdict.found) {
        (State::Orphan, Some(found)) => {
            let reason = String::from("nobody has it open");
            if dry_run {
                return decision(name, true, found.allocated_bytes, reason);
            }
            match reclaim(directory, locked, &name, found) {
                Ok(Some(reclaimed)) => decision(name, true, reclaimed.bytes, reason),
                Ok(None) => decision(name, false, 0, String::from("the name stands for another file by now")),
                Err(error) => decision(name, false, 0, error.to_string()),
            }
        }
        _ => decision(name, false, 0, verdict.reason),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait::never_stop;
    use std::fs::{File, Permissions};
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    fn make(directory: &Path, name: &str) -> File {
        let path = directory.join(name);
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
            .unwrap();
        file.set_permissions(Permissions::from_mode(0o600)).unwrap();
        std::io::Write::write_all(&mut &file, &[1; 4096]).unwrap();
        file
    }

    #[test]
    fn only_the_proven_dead_go_and_a_dry_run_decides_the_same() {
        let temp = tempfile::tempdir_in("/dev/shm").unwrap();
        let directory = Directory::open(temp.path()).unwrap();
        let at = |name: &str| temp.path().join(name);
        drop(make(temp.path(), "vllm_ec_dead.mmap"));
        let original = make(temp.path(), "vllm_ec_original.mmap");
        drop(make(temp.path(), "vllm_ec_read.mmap"));
        let reader = File::open(at("vllm_ec_read.mmap")).unwrap();
        crate::lock::hold_shared(&reader).unwrap();
        std::os::unix::fs::symlink(at("victim"), at("vllm_ec_link.mmap")).unwrap();
        drop(make(temp.path(), "victim"));
        let mut go_on = never_stop();
        let mut waiter = Waiter::new(Duration::from_secs(5), &mut go_on);
        let names = [
            ("vllm_ec_dead.mmap", State::Orphan),
            ("vllm_ec_link.mmap", State::Foreign),
            ("vllm_ec_original.mmap", State::Original),
            ("vllm_ec_read.mmap", State::Unclear),
        ];
        let dry = reap(&directory, None, true, &mut waiter).unwrap();
        assert!(names.iter().all(|(name, _)| at(name).symlink_metadata().is_ok()));
        let page = crate::mapping::page_bytes() as u64;
        let wet = reap(&directory, None, false, &mut waiter).unwrap();
        assert_eq!(dry, wet);
        assert_eq!(wet.len(), names.len());
        for (decision, (name, state)) in wet.iter().zip(names) {
            assert_eq!((decision.file_name.to_str(), decision.state), (Ok(name), Some(state)));
            assert_eq!(decision.is_removed, state == State::Orphan);
            assert_eq!(decision.bytes, if state == State::Orphan { page } else { 0 });
            assert_eq!(at(name).symlink_metadata().is_err(), state == State::Orphan);
        }
        assert!(at("victim").exists());
        let ids = ["dead", "original"].map(|id| EngineId::new(id).unwrap());
        let named = reap(&directory, Some(&ids), false, &mut waiter).unwrap();
        assert_eq!(
            named.iter().map(|d| d.state).collect::<Vec<_>>(),
            [None, Some(State::Original)]
        );
        drop(original);
        let named = reap(&directory, Some(&ids), false, &mut waiter).unwrap();
        assert_eq!(named.iter().map(|d| d.is_removed).collect::<Vec<_>>(), [false, true]);
    }
}
