//! Would a region fit here? The constructor's own checks, without a constructor.

use crate::cgroup::MemoryLimit;
use crate::directory::Directory;
use crate::error::{Error, Result, Warning};
use crate::reap;
use crate::reserve::{self, Limits};
use crate::spec::Geometry;
use crate::wait::Waiter;

/// What stands for and against a region of some size, at this moment.
#[derive(Debug)]
pub struct Preflight {
    pub wanted_bytes: u64,
    /// As a constructor would find them, with the room of the dead, whom it removes first.
    pub limits: Limits,
    /// Bytes of that room that dead regions of this user still take, and how many they are.
    pub reclaimable_bytes: u64,
    pub reclaimable_files: u64,
    /// The tightest control group above this process.
    pub control_group: Option<MemoryLimit>,
    /// What a constructor would raise, the first of them.
    pub shortages: Vec<Error>,
    /// What a constructor would warn of, and go on.
    pub warning: Option<Warning>,
}

/// # Errors
/// [`Error::Os`], and what ends the wait for the directory's lock.
pub fn preflight(directory: &Directory, geometry: Geometry, waiter: &mut Waiter<'_, '_>) -> Result<Preflight> {
    let total_bytes = geometry.total_bytes();
    let dead = reap::reap(directory, None, true, waiter)?;
    let dead = dead.iter().filter(|decision| decision.is_removed);
    let (reclaimable_files, reclaimable_bytes) =
        dead.fold((0, 0), |(files, bytes), decision| (files + 1, bytes + decision.bytes));
    let mut limits = Limits::of(directory)?;
    limits.room.free_bytes = limits.room.free_bytes.saturating_add(reclaimable_bytes);
    limits.room.free_inodes = limits.room.free_inodes.saturating_add(reclaimable_files);
    let control_group = reserve::control_group();
    Ok(Preflight {
        wanted_bytes: total_bytes as u64,
        limits,
        reclaimable_bytes,
        reclaimable_files,
        control_group,
        shortages: limits.shortages(total_bytes, directory.path()),
        warning: reserve::control_group_warning(control_group, total_bytes, directory.path()),
    })
}
