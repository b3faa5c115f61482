//! `_core.Region`, the base of the Python class: the state, the buffer protocol, and the steps open,
//! pin and close.

#![allow(unsafe_code)] // the buffer protocol's slots are unsafe functions

use std::ffi::c_int;
use std::num::NonZeroUsize;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::Instant;

use pyo3::exceptions::{PyBufferError, PyException, PyRuntimeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::buffer::{self, PyMapping, Shape};
use super::torch_cudart::{Interrupted, TorchCudart};
use super::{Callables, detached, errors, run_detached};
use crate::check::Name;
use crate::counters::{self, COUNTING};
use crate::file::Extent;
use crate::fork::Process;
use crate::huge;
use crate::mapping::Mapping;
use crate::pin::{HostRegistrar, MAX_PIECE_BYTES, PinRefused, PinReport, Refusal};
use crate::prefault::{Method, Tier};
use crate::region::{PinError, Region, Role};
use crate::spec::{EngineId, Geometry, Spec};
use crate::turn::Turn;
use crate::wait::Waiter;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What `Region._open` did. Times in seconds, sizes in bytes.
#[pyclass(frozen, get_all, name = "OpenReport", module = "ec_shared_region._core")]
pub(super) struct PyOpenReport {
    path: String,
    is_creator: bool,
    fd: i32,
    inode: u64,
    address: usize,
    elapsed_seconds: f64,
    /// Until the file was made or attached to.
    waited_seconds: f64,
    is_ready: bool,
    /// "mount", "collapse", "base" or "none".
    tier: &'static str,
    /// "none", "populate_write", "touch_write", "populate_read" or "touch_read".
    method: &'static str,
    huge_bytes: u64,
    base_bytes: u64,
    threads: usize,
    prefault_seconds: f64,
    /// Why a lower tier was taken than there is.
    fallback: Option<String>,
    /// Dead files that were removed on the way: (file name, bytes).
    reclaimed: Vec<(String, u64)>,
    /// Files with a region's name that were left: (file name, why).
    passed_over: Vec<(String, String)>,
}

/// What `Region._check` found.
#[pyclass(frozen, get_all, name = "CheckReport", module = "ec_shared_region._core")]
pub(super) struct PyCheckReport {
    /// "ours", "lost" or "replaced".
    name: &'static str,
    size_bytes: u64,
    expected_bytes: u64,
    allocated_bytes: u64,
    links: u64,
    mode: u32,
    uid: u32,
    is_being_prepared: bool,
    foreign_block_size: Option<u64>,
    holders: Vec<u32>,
    unseen_holders: usize,
}

/// What `Region._pin` came to.
#[pyclass(frozen, get_all, name = "PinOutcome", module = "ec_shared_region._core")]
#[derive(Default)]
pub(super) struct PyPinOutcome {
    is_pinned: bool,
    /// "cudart" (through cudarc), "torch" (`torch.cuda.cudart()`), or None where there was nobody to ask.
    backend: Option<&'static str>,
    /// The library that answered.
    library_path: Option<String>,
    /// Registrations that were made.
    pieces: usize,
    /// Pieces that somebody else had registered before.
    foreign_pieces: usize,
    /// The size of the piece that was refused.
    refused_bytes: Option<usize>,
    elapsed_seconds: f64,
    /// The runtime's function that refused, its answer, the symbolic name and the text.
    call: &'static str,
    code: Option<i32>,
    name: String,
    text: String,
    /// That registrations could not be undone, as text; the mapping is kept for good.
    not_undone: Option<String>,
}

impl PyPinOutcome {
    fn pinned(report: Option<PinReport>) -> Self {
        let Some(report) = report else {
            return Self {
                is_pinned: true,
                ..Self::default()
            };
        };
        Self {
            is_pinned: true,
            backend: Some(report.backend),
            library_path: report.library_path.map(text),
            pieces: report.pieces,
            foreign_pieces: report.foreign_pieces,
            elapsed_seconds: report.elapsed.as_secs_f64(),
            ..Self::default()
        }
    }

    fn refused(refused: PinRefused, not_undone: &[Refusal]) -> Self {
        Self {
            backend: Some(refused.backend),
            library_path: refused.library_path.map(text),
            refused_bytes: Some(refused.piece_bytes),
            elapsed_seconds: refused.elapsed.as_secs_f64(),
            call: refused.refusal.call,
            code: Some(refused.refusal.code),
            name: refused.refusal.name,
            text: refused.refusal.text,
            not_undone: kept(not_undone),
            ..Self::default()
        }
    }

    /// An earlier pin left registrations that the driver still does not take back.
    fn not_taken_back(refusals: &[Refusal]) -> Self {
        let first = refusals.first();
        Self {
            backend: Some("cudart"),
            call: "cudaHostUnregister",
            code: first.map(|refusal| refusal.code),
            name: first.map(|refusal| refusal.name.clone()).unwrap_or_default(),
            text: String::from("the driver did not take back an earlier registration of this memory"),
            ..Self::default()
        }
    }

    /// Nobody to register with.
    fn nobody(backend: Option<&'static str>, nobody: Nobody) -> Self {
        counters::count(&COUNTING.pins_skipped);
        let mut outcome = Self {
            backend,
            ..Self::default()
        };
        match nobody {
            Nobody::NoLibrary(text) => outcome.text = text,
            Nobody::NoDevice { refusal, library_path } => {
                outcome.call = refusal.call;
                outcome.code = Some(refusal.code);
                outcome.name = refusal.name;
                outcome.text = refusal.text;
                outcome.library_path = library_path.map(text);
            }
        }
        outcome
    }
}

/// A path as text: a `pathlib.Path` would have to be imported, and Python code that runs below a function of
/// ours is where the end of the interpreter catches a daemon thread.
fn text(path: PathBuf) -> String {
    path.to_string_lossy().into_owned()
}

/// One line for all registrations that the driver would not take back.
fn kept(refusals: &[Refusal]) -> Option<String> {
    let count = refusals.len();
    refusals.first().map(|first| {
        format!(
            "cudaHostUnregister failed {count} times: {first}; the mapping is kept, since the driver may use its pages"
        )
    })
}

/// Why the CUDA runtime cannot register anything.
enum Nobody {
    /// What was tried, as text.
    NoLibrary(String),
    NoDevice {
        refusal: Refusal,
        library_path: Option<PathBuf>,
    },
}

/// What buffers are exported from; apart from the region's state, which is locked for as long as a
/// registration takes.
struct Exporter {
    mapping: Option<Arc<Mapping>>,
    shape: Shape,
    is_open: bool,
    /// A thread is in the constructor.
    is_opening: bool,
    /// Somebody took a simple buffer: it may keep only this object, as `torch.frombuffer` does, so the
    /// mapping must live as long as the object.
    is_lent: bool,
    /// What was exported before the region was closed.
    closed: Option<Weak<Mapping>>,
    /// Lent mappings of regions that this object had open before.
    lent_before: Vec<Arc<Mapping>>,
}

struct NotOpenYet;

/// The state of an `ECSharedRegion`. Made empty, so that a subclass may take other arguments.
///
/// `state` is locked without the GIL, for as long as a registration takes. `exporter` is locked only by threads that
/// are attached to the interpreter, which a fork from Python waits for also where there is no GIL, so no forked
/// child finds it locked; and no Python code runs while it is, or its thread could be made to wait there and
/// others that want it would hold the interpreter up.
#[pyclass(subclass, frozen, name = "Region", module = "ec_shared_region._core")]
pub(super) struct PyRegion {
    state: Mutex<Option<Region>>,
    exporter: Mutex<Exporter>,
    /// The process that opened the region, [`Process::to_bits`].
    owner: AtomicU64,
    /// Changed under the state's lock, read without it.
    is_registered: AtomicBool,
    /// Every byte is known to be backed; until then none may be shown.
    is_ready: AtomicBool,
    /// The thread that holds the state for a slow step: a signal handler that runs in it must not wait for it, and
    /// what it asks for, to close, is done when the step has ended.
    turn: Turn,
}

/// A number for the calling thread, never 0.
fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local!(static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed));
    NUMBER.with(|number| *number)
}

impl PyRegion {
    fn is_owned_here(&self) -> bool {
        self.owner.load(Ordering::Relaxed) == Process::current().to_bits()
    }

    /// The state. `None` in a forked child where another thread of the parent held it at the fork: it
    /// will never be unlocked there.
    fn state(&self) -> Option<MutexGuard<'_, Option<Region>>> {
        if self.is_owned_here() {
            return Some(lock(&self.state));
        }
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn is_busy_here(&self) -> bool {
        self.turn.is_of(this_thread())
    }

    /// A slow step on the region, without the GIL. `None` where it is closed, was closed by a handler during
    /// the step, or is not owned here.
    fn on_region<T: Send>(&self, py: Python<'_>, step: impl Send + FnOnce(&mut Region) -> T) -> Option<T> {
        let (result, is_close_wanted) = detached(py, || {
            let mut state = self.state()?;
            let region = state.as_mut().filter(|region| region.is_owned_here())?;
            let turn = self.turn.begin(this_thread());
            let result = step(region);
            self.is_registered.store(region.is_pinned(), Ordering::Relaxed);
            Some((result, turn.end()))
        })?;
        if is_close_wanted {
            self._close(py);
            return None;
        }
        Some(result)
    }

    /// A question to the open region, which also a forked child may ask.
    fn look<T: Send>(&self, py: Python<'_>, question: impl Send + FnOnce(&Region) -> crate::Result<T>) -> PyResult<T> {
        if self.is_busy_here() {
            return Err(PyRuntimeError::new_err(
                "a signal handler cannot ask a region that its own thread is just pinning",
            ));
        }
        detached(py, || match self.state().as_deref() {
            Some(Some(region)) => question(region),
            Some(None) | None => Err(crate::Error::Closed),
        })
        .map_err(|error| errors::to_python(py, &error))
    }

    /// Waits until every byte is backed, without the state's lock while there is nothing to do: others may close
    /// the region meanwhile.
    fn wait_until_ready(&self, py: Python<'_>) -> PyResult<()> {
        if self.is_ready.load(Ordering::Relaxed) {
            return Ok(());
        }
        if self.is_busy_here() {
            return Err(PyRuntimeError::new_err(
                "a signal handler cannot use a region that its own thread is just preparing",
            ));
        }
        let mut is_close_wanted = false;
        let waited = run_detached(py, Callables::default(), |checkpoint| {
            let since = Instant::now();
            let limit = match self.state().as_deref() {
                Some(Some(region)) => region.timeout(),
                Some(None) | None => return Err(crate::Error::Closed),
            };
            let mut waiter = Waiter::new(limit, checkpoint);
            loop {
                let is_ready = match self.state().as_deref_mut() {
                    Some(Some(region)) => {
                        let turn = self.turn.begin(this_thread());
                        let looked = region.look_whether_ready(&mut waiter);
                        is_close_wanted = turn.end();
                        looked?
                    }
                    Some(None) | None => return Err(crate::Error::Closed),
                };
                if is_ready {
                    self.is_ready.store(true, Ordering::Relaxed);
                    return Ok(());
                }
                if is_close_wanted {
                    return Err(crate::Error::Closed);
                }
                waiter.pause(since)?;
            }
        });
        if is_close_wanted {
            self._close(py);
            waited?;
            return Err(errors::to_python(py, &crate::Error::Closed));
        }
        waited
    }

    /// The open mapping and its shape. Whoever holds it works on, also where a `cleanup` in another thread comes between.
    pub(super) fn open_mapping(&self) -> crate::Result<(Arc<Mapping>, Geometry)> {
        let exporter = lock(&self.exporter);
        match (&exporter.mapping, exporter.shape) {
            (
                Some(mapping),
                Shape::Blocks {
                    num_blocks,
                    block_size_bytes,
                },
            ) if exporter.is_open => Ok((
                Arc::clone(mapping),
                Geometry::new(num_blocks as u64, block_size_bytes as u64)?,
            )),
            _ => Err(crate::Error::Closed),
        }
    }

    /// The address behind the last byte; 0 where the region is closed.
    fn end_address(&self) -> usize {
        lock(&self.exporter)
            .mapping
            .as_ref()
            .map_or(0, |mapping| mapping.as_ptr() as usize + mapping.len_bytes())
    }

    /// What is to be let go of; an error where there is nothing to close yet, since a thread is in the constructor.
    fn stop_exporting(&self) -> Result<Option<Arc<Mapping>>, NotOpenYet> {
        let mut exporter = lock(&self.exporter);
        if exporter.is_opening {
            return Err(NotOpenYet);
        }
        exporter.is_open = false;
        exporter.closed = exporter.mapping.as_ref().map(Arc::downgrade);
        Ok(if exporter.is_lent {
            None
        } else {
            exporter.mapping.take()
        })
    }
}

#[pymethods]
impl PyRegion {
    #[new]
    #[pyo3(signature = (*_args, **_kwargs))]
    fn new(_args: &Bound<'_, PyTuple>, _kwargs: Option<&Bound<'_, PyDict>>) -> Self {
        Self {
            state: Mutex::new(None),
            exporter: Mutex::new(Exporter {
                mapping: None,
                shape: Shape::Bytes,
                is_open: false,
                is_opening: false,
                is_lent: false,
                closed: None,
                lent_before: Vec::new(),
            }),
            owner: AtomicU64::new(Process::current().to_bits()),
            is_registered: AtomicBool::new(false),
            is_ready: AtomicBool::new(false),
            turn: Turn::new(AtomicU64::new(0), AtomicBool::new(false)),
        }
    }

    /// Creates or joins the region. Raises the exceptions of `ec_shared_region.errors`.
    #[expect(
        clippy::too_many_arguments,
        reason = "the arguments of the Python constructor, one to one"
    )]
    fn _open(
        &self,
        py: Python<'_>,
        engine_id: &str,
        num_blocks: u64,
        block_size_bytes: u64,
        timeout: f64,
        mode: &str,
        populate: &str,
        huge_pages: &str,
        numa: &str,
        threads: Option<NonZeroUsize>,
        warn: Option<Py<PyAny>>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<PyOpenReport> {
        let wrong = |error| errors::to_python(py, &error);
        let geometry = Geometry::new(num_blocks, block_size_bytes).map_err(wrong)?;
        let spec = Spec {
            id: EngineId::new(engine_id).map_err(wrong)?,
            geometry,
            timeout: errors::seconds(py, timeout)?,
            mode: mode.parse().map_err(wrong)?,
            populate: populate.parse().map_err(wrong)?,
            huge_pages: huge_pages.parse().map_err(wrong)?,
            numa: numa.parse().map_err(wrong)?,
            threads,
        };
        {
            let mut exporter = lock(&self.exporter);
            if exporter.is_open || exporter.is_opening {
                return Err(PyRuntimeError::new_err(
                    "this region is open already: make another object for another region",
                ));
            }
            exporter.is_opening = true;
        }
        let opened = run_detached(py, Callables { warn, progress }, |checkpoint| {
            Region::open(&spec, checkpoint)
        });
        let (region, report) = opened.inspect_err(|_| lock(&self.exporter).is_opening = false)?;
        let (Some(mapping), Some(file)) = (region.mapping().cloned(), region.file()) else {
            lock(&self.exporter).is_opening = false;
            return Err(errors::to_python(py, &crate::Error::Closed));
        };
        let opened = PyOpenReport {
            path: region.path().to_string_lossy().into_owned(),
            is_creator: region.role() == Role::Creator,
            fd: file.as_raw_fd(),
            inode: file.metadata().map_or(0, |meta| meta.ino()),
            address: mapping.as_ptr() as usize,
            elapsed_seconds: report.elapsed.as_secs_f64(),
            waited_seconds: report.waited.as_secs_f64(),
            is_ready: region.is_ready(),
            tier: match report.prefault.tier {
                Tier::None => "none",
                Tier::Base => "base",
                Tier::Collapse => "collapse",
                Tier::Mount => "mount",
            },
            huge_bytes: report.prefault.huge_bytes,
            base_bytes: report.prefault.base_bytes,
            threads: report.prefault.threads,
            prefault_seconds: report.prefault.elapsed.as_secs_f64(),
            fallback: report.prefault.fallback.map(|fallback| fallback.to_string()),
            method: match report.prefault.method {
                Method::None => "none",
                Method::PopulateWrite => "populate_write",
                Method::TouchWrite => "touch_write",
                Method::PopulateRead => "populate_read",
                Method::TouchRead => "touch_read",
            },
            reclaimed: report
                .reclaimed
                .into_iter()
                .map(|reclaimed| (reclaimed.file_name, reclaimed.bytes))
                .collect(),
            passed_over: report
                .passed_over
                .into_iter()
                .map(|passed_over| (passed_over.file_name, passed_over.reason))
                .collect(),
        };
        self.owner.store(Process::current().to_bits(), Ordering::Relaxed);
        self.is_ready.store(opened.is_ready, Ordering::Relaxed);
        *lock(&self.state) = Some(region);
        // Last and in one step: until then other threads find the object not open, and close nothing.
        let mut exporter = lock(&self.exporter);
        // A closed exporter still has its mapping only if it was lent.
        let lent = exporter.mapping.replace(mapping);
        exporter.lent_before.extend(lent);
        exporter.shape = Shape::Blocks {
            num_blocks: geometry.num_blocks(),
            block_size_bytes: geometry.block_size_bytes(),
        };
        exporter.is_open = true;
        exporter.is_opening = false;
        exporter.is_lent = false;
        exporter.closed = None;
        drop(exporter);
        Ok(opened)
    }

    /// Is every byte known to be backed?
    fn _ready(&self) -> bool {
        self.is_ready.load(Ordering::Relaxed)
    }

    /// Waits until every byte is backed: by the creator, or, where it is gone, by this process.
    fn _wait_until_ready(&self, py: Python<'_>) -> PyResult<()> {
        self.wait_until_ready(py)
    }

    /// An object that exports the whole mapping and keeps it while it, or a view of it, lives.
    fn _mapping(&self, py: Python<'_>) -> PyResult<PyMapping> {
        let mapping = lock(&self.exporter).mapping.clone();
        match mapping {
            Some(mapping) => Ok(PyMapping::new(mapping)),
            None => Err(errors::to_python(py, &crate::Error::Closed)),
        }
    }

    /// Registers the whole mapping with CUDA: through the runtime library where it has a device, else
    /// through what the callable `torch_cudart` returns, where one is given. `package_roots` are folders
    /// that may hold pip's `nvidia` packages; `device` is made current for the calls.
    #[pyo3(signature = (package_roots, max_piece_bytes = None, device = None, torch_cudart = None))]
    fn _pin(
        &self,
        py: Python<'_>,
        package_roots: Vec<PathBuf>,
        max_piece_bytes: Option<usize>,
        device: Option<i32>,
        torch_cudart: Option<Bound<'_, PyAny>>,
    ) -> PyResult<PyPinOutcome> {
        if self.is_busy_here() {
            return Err(PyRuntimeError::new_err(
                "a signal handler cannot pin a region that its own thread is just pinning",
            ));
        }
        if !self.is_owned_here() {
            return Ok(PyPinOutcome::nobody(
                None,
                Nobody::NoLibrary(String::from(
                    "this process was forked from the one that opened the region: open it here to pin it",
                )),
            ));
        }
        let interrupted = Interrupted::default();
        let registrar: Box<dyn HostRegistrar> = match detached(py, || cuda_registrar(&package_roots, device)) {
            Ok(registrar) => registrar,
            Err(nobody) => match torch_cudart.map(|torch_cudart| torch_cudart.call0()) {
                Some(Ok(cudart)) => Box::new(TorchCudart::new(
                    cudart.unbind(),
                    interrupted.clone(),
                    self.end_address(),
                )),
                // What torch raises where it has no driver is an answer; Ctrl-C is not.
                Some(Err(raised)) if raised.is_instance_of::<PyException>(py) => {
                    let mut outcome = PyPinOutcome::nobody(Some("torch"), nobody);
                    outcome.text = raised.value(py).to_string();
                    return Ok(outcome);
                }
                Some(Err(raised)) => return Err(raised),
                None => return Ok(PyPinOutcome::nobody(None, nobody)),
            },
        };
        let max_piece_bytes = max_piece_bytes.unwrap_or(MAX_PIECE_BYTES);
        let pinned = self.on_region(py, |region| region.pin(registrar, max_piece_bytes));
        if let Some(raised) = interrupted.take() {
            return Err(raised);
        }
        match pinned.unwrap_or(Err(PinError::Closed)) {
            Ok(report) => Ok(PyPinOutcome::pinned(report)),
            Err(PinError::Refused(refused, not_undone)) => Ok(PyPinOutcome::refused(*refused, &not_undone)),
            Err(PinError::NotTakenBack(refusals)) => Ok(PyPinOutcome::not_taken_back(&refusals)),
            // The wait for it came before.
            Err(PinError::Closed | PinError::NotReady) => Err(errors::to_python(py, &crate::Error::Closed)),
        }
    }

    /// Is the whole mapping registered, by this process?
    fn _registered(&self) -> bool {
        self.is_registered.load(Ordering::Relaxed) && self.is_owned_here()
    }

    /// Takes the registration back. Returns what the driver refused, as text.
    fn _unpin(&self, py: Python<'_>) -> Option<String> {
        self.on_region(py, Region::unpin)?
            .err()
            .and_then(|refusals| kept(&refusals))
    }

    /// What the file and its name look like now, without touching the memory.
    fn _check(&self, py: Python<'_>) -> PyResult<PyCheckReport> {
        let report = self.look(py, Region::check)?;
        Ok(PyCheckReport {
            name: match report.name {
                Name::Ours => "ours",
                Name::Lost => "lost",
                Name::Replaced => "replaced",
            },
            size_bytes: report.size_bytes,
            expected_bytes: report.expected_bytes,
            allocated_bytes: report.allocated_bytes,
            links: report.links,
            mode: report.mode,
            uid: report.uid,
            is_being_prepared: report.is_being_prepared,
            foreign_block_size: report.foreign_block_size,
            holders: report.holders,
            unseen_holders: report.unseen_holders,
        })
    }

    /// (device, inode, nonce) of this creation of the region.
    fn _identity(&self, py: Python<'_>) -> PyResult<(u64, u64, u64)> {
        let identity = self.look(py, Region::identity)?;
        Ok((identity.device, identity.inode, identity.nonce))
    }

    /// Takes the name away and keeps the region; False where this process is not its creator, or the name is not
    /// its any more.
    fn _release_name(&self, py: Python<'_>) -> PyResult<bool> {
        self.look(py, Region::release_name)
    }

    /// (bytes that the filesystem holds for the file, bytes that huge pages map in this process, if the kernel tells).
    fn _usage(&self, py: Python<'_>) -> PyResult<(u64, Option<u64>)> {
        self.look(py, |region| {
            let (Some(file), Some(mapping)) = (region.file(), region.mapping()) else {
                return Err(crate::Error::Closed);
            };
            let extent = Extent::of(file).map_err(|source| crate::Error::os("fstat", region.path(), source))?;
            Ok((extent.allocated_bytes, huge::mapped_huge_bytes(mapping)))
        })
    }

    /// How many views keep the memory of a closed region: a tensor of `blocks` and all its slices are one.
    fn _views_left(&self, py: Python<'_>) -> usize {
        let exporter = lock(&self.exporter);
        let Some(mapping) = exporter.closed.as_ref().and_then(Weak::upgrade) else {
            return 0;
        };
        let lent = usize::from(exporter.is_lent);
        drop(exporter);
        let views = mapping.views.load(Ordering::Relaxed);
        // The last view may have gone meanwhile.
        detached(py, || drop(mapping));
        views + lent
    }

    /// Lets go of everything, see `cleanup`; waits for a registration in progress. Returns what could
    /// not be done, as text. Closing again does nothing.
    fn _close(&self, py: Python<'_>) -> Vec<String> {
        if self.is_busy_here() {
            self.turn.want_close();
            return Vec::new();
        }
        let Ok(mapping) = self.stop_exporting() else {
            return Vec::new();
        };
        detached(py, || {
            let region = self.state().and_then(|mut state| {
                self.is_registered.store(false, Ordering::Relaxed);
                state.take()
            });
            drop(mapping); // before the region, whose share of the mapping should be the last
            let Some(mut region) = region else {
                return Vec::new();
            };
            let report = region.close();
            let lost = report.is_descriptor_lost.then(|| {
                "somebody else had closed its descriptor, whose number was left alone: open regions after \
                 all descriptors are closed, as daemons do"
                    .to_owned()
            });
            let name = report.name_problem.map(|error| {
                format!("the name was not removed, the next constructor of this user will do it: {error}")
            });
            lost.into_iter()
                .chain(name)
                .chain(kept(&report.unregister_problems))
                .collect()
        })
    }

    /// # Safety
    /// Called by the interpreter with a `Py_buffer` to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let is_open = lock(&slf.get().exporter).is_open;
        if is_open {
            slf.get().wait_until_ready(slf.py())?;
        }
        let mut exporter = lock(&slf.get().exporter);
        let Some(mapping) = exporter.mapping.clone().filter(|_| exporter.is_open) else {
            // numpy and torch look for this very class.
            let closed = crate::Error::Closed;
            let hint = closed.hint().unwrap_or_default();
            return Err(PyBufferError::new_err(format!("{closed}\nhint: {hint}")));
        };
        exporter.is_lent |= flags & ffi::PyBUF_ND != ffi::PyBUF_ND;
        let shape = exporter.shape;
        drop(exporter);
        // SAFETY: as the interpreter promises.
        unsafe { buffer::fill(view, flags, slf.clone().into_any(), &mapping, shape) }
    }

    /// # Safety
    /// Called by the interpreter, once for each filled `Py_buffer`.
    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: as the interpreter promises.
        unsafe { buffer::release(view) };
    }
}

impl Drop for PyRegion {
    fn drop(&mut self) {
        // Without cleanup(): the same steps, with nobody to tell what could not be done.
        let region = self.state().and_then(|mut state| state.take());
        let (mapping, lent_before) = {
            let mut exporter = lock(&self.exporter);
            (exporter.mapping.take(), std::mem::take(&mut exporter.lent_before))
        };
        super::drop_detached((mapping, lent_before, region));
    }
}

/// The CUDA runtime's registrar, or why there is none.
#[cfg(feature = "cuda")]
fn cuda_registrar(package_roots: &[PathBuf], device: Option<i32>) -> Result<Box<dyn HostRegistrar>, Nobody> {
    use crate::cuda::CudaRuntime;

    let runtime = CudaRuntime::find(package_roots).map_err(|not_found| {
        let tried: Vec<_> = not_found
            .tried
            .iter()
            .map(|(path, why)| format!("{}: {why}", path.display()))
            .collect();
        Nobody::NoLibrary(format!("no CUDA runtime library; tried {}", tried.join("; ")))
    })?;
    match runtime.require_device() {
        Ok(()) => Ok(Box::new(runtime.on_device(device))),
        Err(refusal) => Err(Nobody::NoDevice {
            refusal,
            library_path: runtime.library_path(),
        }),
    }
}

#[cfg(not(feature = "cuda"))]
fn cuda_registrar(_: &[PathBuf], _: Option<i32>) -> Result<Box<dyn HostRegistrar>, Nobody> {
    Err(Nobody::NoLibrary(String::from("this build has no CUDA in it")))
}
