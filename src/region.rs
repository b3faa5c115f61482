//! The life of a region in one process: open (create or join), pin, close.
//!
//! `docs/protocol.md` is the specification; the steps here have its names.

use std::ffi::CString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::check::{self, CheckReport, Identity};
use crate::counters::{self, COUNTING};
use crate::directory::Directory;
use crate::error::{Error, Result, WaitState};
use crate::fork::Process;
use crate::held::Held;
use crate::lock;
use crate::mapping::{Mapping, page_bytes};
use crate::opening::{self, Opening};
use crate::pin::{HostRegistrar, Leftover, PinRefused, PinReport, Pinned, Plan, Refusal};
use crate::prefault::PrefaultReport;
use crate::reap::{self, PassedOver, Reclaimed};
use crate::spec::{Geometry, Spec};
use crate::step::{Step, reached};
use crate::wait::{Checkpoint, Waiter};

/// Where regions live.
pub const DEV_SHM: &str = "/dev/shm";
/// What this process is to the region's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Made the file, and takes its name away when it closes.
    Creator,
    Joiner,
}

/// What opening a region did.
#[derive(Debug, Clone)]
pub struct OpenReport {
    /// From the call to the finished region.
    pub elapsed: Duration,
    /// Until the file was made or attached to.
    pub waited: Duration,
    pub prefault: PrefaultReport,
    /// Dead files that were removed on the way.
    pub reclaimed: Vec<Reclaimed>,
    /// Files that bear a region's name, and were not looked at, or not removed.
    pub passed_over: Vec<PassedOver>,
}

/// What closing a region could not do; none of it is the caller's fault.
#[derive(Debug, Default)]
pub struct CloseReport {
    /// The name could not be taken away: the next constructor will.
    pub name_problem: Option<Error>,
    /// Somebody else had closed a descriptor of the region; its number was left alone.
    pub is_descriptor_lost: bool,
    /// The device still has the pages, so the mapping is kept for good.
    pub unregister_problems: Vec<Refusal>,
}

/// A region that is open in this process.
#[derive(Debug)]
pub struct Region {
    role: Role,
    geometry: Geometry,
    path: PathBuf,
    name: CString,
    directory: Directory,
    /// A forked child has a copy of this value and owns nothing (G11).
    owner: Process,
    // In the order in which `close` lets go of them.
    pinned: Option<Pinned>,
    /// Registrations that the driver would not take back; tried again before the next pin, and at the end.
    leftover: Option<Pinned>,
    /// The mapping is kept for good.
    is_kept: bool,
    mapping: Option<Arc<Mapping>>,
    file: Option<Held<File>>,
    /// Every byte is known to be backed.
    is_ready: bool,
    /// The end of every wait.
    timeout: Duration,
}

impl Region {
    /// Opens the region in `/dev/shm`.
    ///
    /// # Errors
    /// See [`Error`]. Whatever fails, nothing is left behind: no file, descriptor or mapping.
    pub fn open(spec: &Spec, checkpoint: &mut Checkpoint<'_>) -> Result<(Self, OpenReport)> {
        Self::open_in(Path::new(DEV_SHM), spec, checkpoint)
    }

    /// [`Region::open`] in another directory, which must be a tmpfs for the guarantees to hold.
    ///
    /// # Errors
    /// As [`Region::open`].
    pub fn open_in(directory: &Path, spec: &Spec, checkpoint: &mut Checkpoint<'_>) -> Result<(Self, OpenReport)> {
        let mut waiter = Waiter::new(spec.timeout, checkpoint);
        let opened = Opening::new(directory, spec).and_then(|opening| opening.open(&mut waiter));
        let opened = opened.inspect_err(|_| counters::count(&COUNTING.failed))?;
        counters::count(match opened.role {
            Role::Creator => &COUNTING.created,
            Role::Joiner => &COUNTING.joined,
        });
        if opened.report.prefault.fallback.is_some() {
            counters::count(&COUNTING.fallbacks);
        }
        let region = Self {
            role: opened.role,
            geometry: spec.geometry,
            path: opened.path,
            name: opened.name,
            directory: opened.directory,
            owner: Process::current(),
            pinned: None,
            leftover: None,
            is_kept: false,
            mapping: Some(Arc::new(opened.mapping)),
            file: Some(opened.file),
            is_ready: opened.is_ready,
            timeout: spec.timeout,
        };
        Ok((region, opened.report))
    }

    #[must_use]
    pub fn role(&self) -> Role {
        self.role
    }

    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Is every byte backed? A joiner comes in while the creator still prepares the region; until this is true a
    /// touch may be a bus error.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// Waits until every byte is backed: by the creator, or, where it is gone, by this process.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::NoSpace`], [`Error::Interrupted`], [`Error::Closed`], [`Error::Os`].
    pub fn wait_until_ready(&mut self, checkpoint: &mut Checkpoint<'_>) -> Result<()> {
        let mut waiter = Waiter::new(self.timeout, checkpoint);
        let since = Instant::now();
        while !self.look_whether_ready(&mut waiter)? {
            waiter.pause(since)?;
        }
        Ok(())
    }

    /// One look of [`Region::wait_until_ready`], for callers that must not hold the region while they wait.
    pub(crate) fn look_whether_ready(&mut self, waiter: &mut Waiter<'_, '_>) -> Result<bool> {
        let file = self.file.as_ref().ok_or(Error::Closed)?;
        let wanted_bytes = self.geometry.total_bytes();
        if !self.is_ready {
            reached(Step::AwaitBacking);
            self.own_file()?;
            if !lock::is_being_prepared(file) {
                opening::back(file, wanted_bytes, &self.directory, &self.path, waiter)?;
                self.is_ready = true;
            } else if waiter.is_over() {
                return Err(self.not_ready(waiter.elapsed()));
            }
        }
        Ok(self.is_ready)
    }

    fn not_ready(&self, waited: Duration) -> Error {
        Error::Timeout {
            path: self.path.clone(),
            waited,
            state: WaitState::BeingPrepared {
                wanted_bytes: self.geometry.total_bytes() as u64,
            },
            similar: Vec::new(),
        }
    }

    /// The mapping, where every byte is backed.
    pub(crate) fn ready_mapping(&self) -> Result<&Arc<Mapping>> {
        let mapping = self.mapping.as_ref().ok_or(Error::Closed)?;
        if self.is_ready {
            Ok(mapping)
        } else {
            Err(self.not_ready(Duration::ZERO))
        }
    }

    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The mapping, for views that may outlive the region. `None` once closed. See [`Region::is_ready`].
    #[must_use]
    pub fn mapping(&self) -> Option<&Arc<Mapping>> {
        self.mapping.as_ref()
    }

    /// The region's file. `None` once closed.
    #[must_use]
    pub fn file(&self) -> Option<&File> {
        self.file.as_deref()
    }

    /// The file, if its descriptor is still ours to use.
    fn own_file(&self) -> Result<&File> {
        let file = self.file.as_ref().ok_or(Error::Closed)?;
        let lost = |source| Error::os("fstat", &self.path, source);
        file.must_be_ours().map_err(lost)?;
        self.directory.fd.must_be_ours().map_err(lost)?;
        Ok(file)
    }

    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.pinned.is_some()
    }

    /// Looks at the file and its name, without touching the memory.
    ///
    /// # Errors
    /// [`Error::Closed`], [`Error::Os`].
    pub fn check(&self) -> Result<CheckReport> {
        check::check(self.own_file()?, &self.directory, &self.name, self.geometry)
            .map_err(|source| Error::os("fstat", &self.path, source))
    }

    /// Which creation of the region this is.
    ///
    /// # Errors
    /// [`Error::Closed`], [`Error::Os`].
    pub fn identity(&self) -> Result<Identity> {
        Identity::of(self.own_file()?, &self.path).map_err(|source| Error::os("open", &self.path, source))
    }

    /// Takes the name away before the region is closed, for callers who know that everybody is in: the memory then
    /// comes back however the processes end. Those who have it go on, a late constructor makes another region, and
    /// closing leaves that one alone. Only the creator can do it. False where nothing was changed: a joiner, a forked
    /// child, a name that is gone or stands for another file.
    ///
    /// # Errors
    /// [`Error::Closed`], [`Error::Os`].
    pub fn release_name(&self) -> Result<bool> {
        self.own_file()?;
        let Some(file) = &self.file else {
            return Err(Error::Closed);
        };
        if self.role != Role::Creator || !self.is_owned_here() {
            return Ok(false);
        }
        reached(Step::DropName);
        self.directory.drop_own_name(&self.name, file)
    }

    /// False in a child that was forked after the region was opened.
    #[must_use]
    pub fn is_owned_here(&self) -> bool {
        self.owner.is_current()
    }

    /// Registers the whole mapping with a device, in pieces of at most `max_piece_bytes`, or nothing.
    /// `None` where it is registered already.
    ///
    /// # Errors
    /// [`PinError`].
    pub fn pin(
        &mut self,
        registrar: Box<dyn HostRegistrar>,
        max_piece_bytes: usize,
    ) -> std::result::Result<Option<PinReport>, PinError> {
        let mapping = self.mapping.as_ref().ok_or(PinError::Closed)?;
        if !self.is_ready {
            return Err(PinError::NotReady); // a driver that touches a page without backing dies of it
        }
        if self.pinned.is_some() {
            return Ok(None);
        }
        let plan = Plan::new(mapping.len_bytes(), page_bytes(), self.geometry.block_size_bytes());
        let base = mapping.as_ptr() as usize;
        // Else the driver answers "registered already" for what is left of ours.
        let settled = self.settle_leftover().map_err(PinError::NotTakenBack);
        settled.inspect_err(|_| counters::count(&COUNTING.pins_refused))?;
        match Pinned::register(registrar, base, plan, max_piece_bytes) {
            Ok((pinned, report)) => {
                self.pinned = Some(pinned);
                counters::count(&COUNTING.pinned);
                Ok(Some(report))
            }
            Err(mut refused) => {
                counters::count(&COUNTING.pins_refused);
                let not_taken_back = refused.not_undone.take().map(|leftover| self.keep(leftover));
                Err(PinError::Refused(refused, not_taken_back.unwrap_or_default()))
            }
        }
    }

    /// Takes the registration back; the region stays open and can be pinned again. False where there was none.
    ///
    /// # Errors
    /// The refusals of the driver; the mapping is then kept for good.
    pub fn unpin(&mut self) -> std::result::Result<bool, Vec<Refusal>> {
        let Some(pinned) = self.pinned.take() else {
            return Ok(false);
        };
        reached(Step::Unpin);
        if !self.is_owned_here() {
            std::mem::forget(pinned);
            return Ok(false);
        }
        match pinned.release() {
            Ok(()) => Ok(true),
            Err(leftover) => Err(self.keep(leftover)),
        }
    }

    /// A driver that still has pages registered may use them: they must never be unmapped.
    fn keep(&mut self, leftover: Leftover) -> Vec<Refusal> {
        self.leftover = Some(leftover.pinned);
        if let (Some(mapping), false) = (&self.mapping, self.is_kept) {
            self.is_kept = true;
            KEPT_MAPPINGS.fetch_add(1, Ordering::Relaxed);
            std::mem::forget(Arc::clone(mapping));
        }
        leftover.refusals
    }

    fn settle_leftover(&mut self) -> std::result::Result<(), Vec<Refusal>> {
        match self.leftover.take().map(Pinned::release) {
            Some(Err(leftover)) => Err(self.keep(leftover)),
            Some(Ok(())) | None => Ok(()),
        }
    }

    /// Lets go of everything, in this order: the name (so that it is gone even if the process is
    /// killed in the slow part), the registration, the mapping, the descriptor. Views keep the
    /// mapping until the last of them is gone. Closing again does nothing. In a forked child only
    /// the child's own mapping and descriptor go.
    pub fn close(&mut self) -> CloseReport {
        let mut report = CloseReport::default();
        let Some(file) = self.file.take() else {
            return report;
        };
        if !self.is_owned_here() {
            // The parent's registration is the parent's; its bookkeeping here must not run.
            std::mem::forget((self.pinned.take(), self.leftover.take()));
            self.mapping = None;
            return report;
        }
        reached(Step::Close);
        report.is_descriptor_lost = file.is_lost() || self.directory.fd.is_lost();
        // The mapping keeps the inode, so the name can still be told from a successor's.
        let reopened = report
            .is_descriptor_lost
            .then(|| Directory::open(self.directory.path()));
        let directory = reopened.and_then(Result::ok);
        let directory = directory.as_ref().unwrap_or(&self.directory);
        let freeing = directory.begin_freeing();
        if self.role == Role::Creator {
            reached(Step::DropName);
            report.name_problem = directory.drop_own_name(&self.name, &file).err();
        }
        reached(Step::Unregister);
        for result in [self.settle_leftover(), self.unpin().map(|_| ())] {
            report.unregister_problems.extend(result.err().unwrap_or_default());
        }
        std::mem::forget(self.leftover.take()); // tried once, and its mapping is kept
        if let (Role::Joiner, Some(mapping)) = (self.role, &self.mapping) {
            self.remove_name_if_last_out(mapping);
        }
        reached(Step::CloseFile);
        drop(file);
        reached(Step::Unmap);
        self.mapping = None;
        drop(freeing);
        report
    }

    /// The creator died and nobody else is left: without this the name would stay until the next
    /// constructor comes. A view may be the last to go, long after the region was closed.
    fn remove_name_if_last_out(&self, mapping: &Mapping) {
        let (path, name, owner) = (self.directory.path().to_owned(), self.name.clone(), self.owner);
        mapping.after_unmap(move || {
            if owner.is_current()
                && let Ok(directory) = Directory::open(&path)
            {
                reap::remove_if_last(&directory, &name);
            }
        });
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.close();
    }
}

/// Why a region was not pinned.
#[derive(Debug, thiserror::Error)]
pub enum PinError {
    #[error("the region is closed")]
    Closed,
    /// See [`Region::wait_until_ready`].
    #[error("the region is still being prepared by its creator")]
    NotReady,
    /// And what the driver would not take back of the pieces before.
    #[error("the runtime refused: {}", .0.refusal)]
    Refused(Box<PinRefused>, Vec<Refusal>),
    /// Registrations of an earlier pin are still there.
    #[error("the driver did not take back an earlier registration")]
    NotTakenBack(Vec<Refusal>),
}

/// Mappings of this process that are kept for good because a driver would not let go of them.
#[must_use]
pub fn kept_mappings() -> usize {
    KEPT_MAPPINGS.load(Ordering::Relaxed)
}

static KEPT_MAPPINGS: AtomicUsize = AtomicUsize::new(0);
