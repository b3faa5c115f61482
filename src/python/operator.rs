//! The operator's side: what is in `/dev/shm`, as plain values.

use std::ffi::{CStr, OsString};
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::time::Duration;

use pyo3::prelude::*;

use super::{Callables, errors, run_detached};
use crate::counters::{COUNTING, count};
use crate::directory::Directory;
use crate::error::{Error, Resource};
use crate::list::{self, Entry};
use crate::preflight::Preflight;
use crate::reap::Decision;
use crate::region::DEV_SHM;
use crate::spec::{EngineId, Geometry};
use crate::wait::Waiter;

/// How long a question waits for the directory's lock, which the living hold for microseconds.
const PATIENCE: Duration = Duration::from_secs(5);

/// A process that has a file open for writing or mapped: (pid, uid, command, has it open, mapped bytes, is dying).
type HolderFields = (u32, u32, String, bool, u64, bool);

/// A region's file. Sizes in bytes, the age in seconds.
#[pyclass(frozen, get_all, name = "Entry", module = "ec_shared_region._core")]
pub(super) struct PyEntry {
    /// None where the name holds no id.
    id: Option<String>,
    file_name: OsString,
    /// "live", "being_made", "original", "orphan", "foreign", "damaged" or "unclear".
    state: &'static str,
    reason: String,
    device: u64,
    inode: u64,
    nonce: Option<u64>,
    num_blocks: Option<u64>,
    block_size_bytes: Option<u64>,
    size_bytes: u64,
    allocated_bytes: u64,
    age_seconds: f64,
    uid: u32,
    mode: u32,
    holders: Vec<HolderFields>,
    unseen_holders: usize,
}

/// What `reap` decided about a file.
#[pyclass(frozen, get_all, name = "Decision", module = "ec_shared_region._core")]
pub(super) struct PyDecision {
    id: Option<String>,
    file_name: OsString,
    /// As of `Entry`; None where there is no such file.
    state: Option<&'static str>,
    is_removed: bool,
    bytes: u64,
    reason: String,
}

/// What stands for and against a region. Sizes in bytes.
#[pyclass(frozen, get_all, name = "Preflight", module = "ec_shared_region._core")]
pub(super) struct PyPreflight {
    wanted_bytes: u64,
    /// 0 is a filesystem without a limit.
    filesystem_bytes: u64,
    free_bytes: u64,
    inodes: u64,
    free_inodes: u64,
    reclaimable_bytes: u64,
    memory_bytes: u64,
    /// None is no limit.
    file_size_limit_bytes: Option<u64>,
    control_group_limit_bytes: Option<u64>,
    control_group_used_bytes: Option<u64>,
    /// (what, text, hint, would a constructor raise it?)
    problems: Vec<(&'static str, String, String, bool)>,
}

fn file_name(name: &CStr) -> OsString {
    OsString::from_vec(name.to_bytes().to_vec())
}

fn id_of(name: &CStr) -> Option<String> {
    EngineId::from_file_name(name).map(|id| id.as_str().to_owned())
}

fn entry(entry: Entry) -> PyEntry {
    PyEntry {
        id: id_of(&entry.file_name),
        file_name: file_name(&entry.file_name),
        state: entry.state.name(),
        num_blocks: entry.num_blocks(),
        reason: entry.reason,
        device: entry.identity.device,
        inode: entry.identity.inode,
        nonce: entry.nonce,
        block_size_bytes: entry.block_size_bytes,
        size_bytes: entry.size_bytes,
        allocated_bytes: entry.allocated_bytes,
        age_seconds: entry.age.as_secs_f64(),
        uid: entry.uid,
        mode: entry.mode,
        holders: entry
            .holders
            .into_iter()
            .map(|holder| {
                (
                    holder.pid,
                    holder.uid,
                    holder.command,
                    holder.has_open,
                    holder.mapped_bytes,
                    holder.is_dying,
                )
            })
            .collect(),
        unseen_holders: entry.unseen_holders,
    }
}

fn decision(decision: Decision) -> PyDecision {
    PyDecision {
        id: id_of(&decision.file_name),
        file_name: file_name(&decision.file_name),
        state: decision.state.map(list::State::name),
        is_removed: decision.is_removed,
        bytes: decision.bytes,
        reason: decision.reason,
    }
}

fn shortage(error: &Error) -> (&'static str, String, String, bool) {
    let what = match error {
        Error::NoSpace { resource, .. } => match resource {
            Resource::Space => "space",
            Resource::Quota => "quota",
            Resource::Inodes => "inodes",
            Resource::Memory => "memory",
            Resource::FileSizeLimit => "file_size_limit",
        },
        _ => "space",
    };
    (what, error.to_string(), error.hint().unwrap_or_default(), true)
}

/// A question about `/dev/shm`, without the GIL.
fn ask<T: Send>(
    py: Python<'_>,
    question: impl Send + FnOnce(&Directory, &mut Waiter<'_, '_>) -> crate::Result<T>,
) -> PyResult<T> {
    run_detached(py, Callables::default(), |checkpoint| {
        let directory = Directory::open(Path::new(DEV_SHM))?;
        question(&directory, &mut Waiter::new(PATIENCE, checkpoint))
    })
}

fn engine_id(py: Python<'_>, id: &str) -> PyResult<EngineId> {
    EngineId::new(id).map_err(|error| errors::to_python(py, &error))
}

/// Every region file, by name.
#[pyfunction]
pub(super) fn list_regions(py: Python<'_>) -> PyResult<Vec<PyEntry>> {
    let entries = ask(py, list::list)?;
    Ok(entries.into_iter().map(entry).collect())
}

/// One region; None where there is none.
#[pyfunction]
pub(super) fn inspect(py: Python<'_>, id: &str) -> PyResult<Option<PyEntry>> {
    let id = engine_id(py, id)?;
    Ok(ask(py, |directory, waiter| list::inspect(directory, &id, waiter))?.map(entry))
}

/// Removes what is proven dead, of the named or (None) of all; a dry run only decides.
#[pyfunction]
#[pyo3(signature = (ids, dry_run))]
pub(super) fn reap(py: Python<'_>, ids: Option<Vec<String>>, dry_run: bool) -> PyResult<Vec<PyDecision>> {
    let ids = match &ids {
        Some(ids) => Some(ids.iter().map(|id| engine_id(py, id)).collect::<PyResult<Vec<_>>>()?),
        None => None,
    };
    let decisions = ask(py, |directory, waiter| {
        crate::reap::reap(directory, ids.as_deref(), dry_run, waiter)
    })?;
    Ok(decisions.into_iter().map(decision).collect())
}

/// Would a region of this geometry fit?
#[pyfunction]
pub(super) fn preflight(py: Python<'_>, num_blocks: u64, block_size_bytes: u64) -> PyResult<PyPreflight> {
    let geometry = Geometry::new(num_blocks, block_size_bytes).map_err(|error| errors::to_python(py, &error))?;
    let Preflight {
        wanted_bytes,
        limits,
        reclaimable_bytes,
        reclaimable_files: _,
        control_group,
        shortages,
        warning,
    } = ask(py, |directory, waiter| {
        crate::preflight::preflight(directory, geometry, waiter)
    })?;
    let mut problems: Vec<_> = shortages.iter().map(shortage).collect();
    problems.extend(warning.map(|warning| ("control_group", warning.to_string(), warning.hint().to_owned(), false)));
    Ok(PyPreflight {
        wanted_bytes,
        filesystem_bytes: limits.room.total_bytes,
        free_bytes: limits.room.free_bytes,
        inodes: limits.room.total_inodes,
        free_inodes: limits.room.free_inodes,
        reclaimable_bytes,
        memory_bytes: limits.memory_bytes,
        file_size_limit_bytes: Some(limits.file_size_limit_bytes).filter(|&limit| limit != u64::MAX),
        control_group_limit_bytes: control_group.map(|limit| limit.limit_bytes),
        control_group_used_bytes: control_group.map(|limit| limit.current_bytes),
        problems,
    })
}

/// What this process did so far, by name.
#[pyfunction]
pub(super) fn counters() -> Vec<(&'static str, u64)> {
    crate::counters::now().named()
}

/// A region stays unpinned, and the core was not asked.
#[pyfunction]
pub(super) fn count_pin_skipped() {
    count(&COUNTING.pins_skipped);
}
