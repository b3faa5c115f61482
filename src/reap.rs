//! Reclaims what the dead left behind: region files of this user that no process holds.

use std::ffi::CStr;
use std::time::Duration;

use crate::directory::{Directory, Locked};
use crate::error::Result;
use crate::file::{Found, Probe};
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
    Ok(was_removed.then(|| Reclaimed {
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
