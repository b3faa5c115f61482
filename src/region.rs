//! The life of a region in one process: open (create or join), pin, close.
//!
//! `docs/protocol.md` is the specification; the steps here have its names.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::error::{Available, Error, FoundGeometry, Result, WaitState};
use crate::file::{Attach, Directory, Found, Probe, is_backed};
use crate::lock;
use crate::mapping::{Mapping, page_bytes};
use crate::pin::{HostRegistrar, PinRefused, PinReport, Pinned, Plan, Refusal};
use crate::prefault::{self, Access, Method, PrefaultReport};
use crate::reap::{self, Reclaimed};
use crate::spec::{Geometry, Mode, Populate, Spec};
use crate::wait::{Checkpoint, Waiter, never_stop};

/// Where regions live.
pub const DEV_SHM: &str = "/dev/shm";
/// `close` waits this long for the directory's lock, then leaves the file to the next constructor.
const CLOSE_PATIENCE: Duration = Duration::from_secs(1);

/// A region is found or made within four looks, unless names keep changing hands.
const MAX_LOOKS_PAST_THE_END: u32 = 16;

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
}

/// What closing a region could not do; none of it is the caller's fault.
#[derive(Debug, Default)]
pub struct CloseReport {
    /// The name could not be taken away: the next constructor will.
    pub name_problem: Option<Error>,
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
    owner_pid: u32,
    // In the order in which `close` lets go of them.
    pinned: Option<Pinned>,
    mapping: Option<Arc<Mapping>>,
    file: Option<File>,
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
        let began = Instant::now();
        let mut waiter = Waiter::new(spec.timeout, checkpoint);
        let mut opening = Opening {
            spec,
            directory: Directory::open(directory)?,
            name: spec.id.file_name_c(),
            path: directory.join(spec.id.file_name()),
            has_swept: false,
            reclaimed: Vec::new(),
        };
        let (role, file) = opening.find_or_make(&mut waiter)?;
        let waited = began.elapsed();
        let prepared = match role {
            Role::Creator => opening.prepare(&file, &mut waiter),
            Role::Joiner => opening.join(&file, &mut waiter),
        };
        let (mapping, prefault) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                if role == Role::Creator {
                    opening.abandon(file);
                }
                return Err(error);
            }
        };
        let region = Self {
            role,
            geometry: spec.geometry,
            path: opening.path,
            name: opening.name,
            directory: opening.directory,
            owner_pid: std::process::id(),
            pinned: None,
            mapping: Some(Arc::new(mapping)),
            file: Some(file),
        };
        let report = OpenReport {
            elapsed: began.elapsed(),
            waited,
            prefault,
            reclaimed: opening.reclaimed,
        };
        Ok((region, report))
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

    /// The mapping, for views that may outlive the region. `None` once closed.
    #[must_use]
    pub fn mapping(&self) -> Option<&Arc<Mapping>> {
        self.mapping.as_ref()
    }

    /// The region's file. `None` once closed.
    #[must_use]
    pub fn file(&self) -> Option<&File> {
        self.file.as_ref()
    }

    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.pinned.is_some()
    }

    /// False in a child that was forked after the region was opened.
    #[must_use]
    pub fn is_owned_here(&self) -> bool {
        self.owner_pid == std::process::id()
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
        if self.pinned.is_some() {
            return Ok(None);
        }
        let plan = Plan::new(mapping.len_bytes(), page_bytes(), self.geometry.block_size_bytes());
        let base = mapping.as_ptr() as usize;
        match Pinned::register(registrar, base, plan, max_piece_bytes) {
            Ok((pinned, report)) => {
                self.pinned = Some(pinned);
                Ok(Some(report))
            }
            Err(refused) => {
                if !refused.not_undone.is_empty() {
                    keep_for_good(mapping);
                }
                Err(PinError::Refused(refused))
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
        if !self.is_owned_here() {
            std::mem::forget(pinned);
            return Ok(false);
        }
        pinned.release().map(|()| true).inspect_err(|_| {
            self.mapping.as_ref().map(keep_for_good);
        })
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
        let mapping = self.mapping.take();
        let pinned = self.pinned.take();
        if !self.is_owned_here() {
            // The parent's registration is the parent's; its bookkeeping here must not run.
            std::mem::forget(pinned);
            return report;
        }
        let freeing = self.directory.begin_freeing();
        if self.role == Role::Creator {
            report.name_problem = self.directory.drop_own_name(&self.name, &file).err();
        }
        if let Some(Err(refusals)) = pinned.map(Pinned::release) {
            mapping.as_ref().map(keep_for_good);
            report.unregister_problems = refusals;
        }
        drop(mapping);
        drop(file);
        drop(freeing);
        if self.role == Role::Joiner {
            self.remove_name_if_last_out();
        }
        report
    }

    /// The creator died and nobody else is left: without this the name would stay until the next
    /// constructor comes.
    fn remove_name_if_last_out(&self) {
        let mut go_on = never_stop();
        let mut waiter = Waiter::new(CLOSE_PATIENCE, &mut go_on);
        // A failure leaves the file to the next constructor, which can say what is wrong with it.
        let _ = reap::reclaim_if_dead(&self.directory, &self.name, &mut waiter);
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
    #[error("the runtime refused: {}", .0.refusal)]
    Refused(Box<PinRefused>),
}

/// A driver that still has pages registered may use them: they must never be unmapped.
fn keep_for_good(mapping: &Arc<Mapping>) {
    KEPT_MAPPINGS.fetch_add(1, Ordering::Relaxed);
    std::mem::forget(Arc::clone(mapping));
}

/// Mappings of this process that are kept for good because a driver would not let go of them.
#[must_use]
pub fn kept_mappings() -> usize {
    KEPT_MAPPINGS.load(Ordering::Relaxed)
}

static KEPT_MAPPINGS: AtomicUsize = AtomicUsize::new(0);

/// A constructor at work.
struct Opening<'s> {
    spec: &'s Spec,
    directory: Directory,
    name: CString,
    path: PathBuf,
    has_swept: bool,
    reclaimed: Vec<Reclaimed>,
}

/// What one look at the name led to.
enum Look {
    Done(Role, File),
    /// Something was changed, or changed under us: look again at once.
    Again,
    Wait(WaitState),
    /// Too little space, but somebody is giving some back: the error if it stays so.
    WaitForSpace(Error),
}

impl Opening<'_> {
    /// Looks until there is a file to use, of our own making or a live one.
    ///
    /// While it waits it holds nothing: no descriptor and no lock, so that it never passes for a holder
    /// and a creator that dies is replaced by the first who looks.
    fn find_or_make(&mut self, waiter: &mut Waiter<'_, '_>) -> Result<(Role, File)> {
        let since = Instant::now();
        let mut looks_past_the_end = 0;
        loop {
            waiter.checkpoint()?;
            looks_past_the_end += u32::from(waiter.is_over());
            let give_up = match self.look(waiter)? {
                Look::Done(role, file) => return Ok((role, file)),
                // Looks that follow each other take no time, so even a timeout of 0 may make progress.
                Look::Again if looks_past_the_end < MAX_LOOKS_PAST_THE_END => continue,
                Look::Again => self.timeout(waiter, WaitState::Unsettled),
                Look::Wait(state) => self.timeout(waiter, state),
                Look::WaitForSpace(error) => error,
            };
            if waiter.is_over() {
                return Err(give_up);
            }
            waiter.pause(since)?;
        }
    }

    fn timeout(&self, waiter: &Waiter<'_, '_>, state: WaitState) -> Error {
        Error::Timeout {
            path: self.path.clone(),
            waited: waiter.elapsed(),
            state,
            similar: if waiter.is_over() {
                self.directory.ids_present()
            } else {
                Vec::new()
            },
        }
    }

    /// One look under the directory's lock, and what follows from it.
    fn look(&mut self, waiter: &mut Waiter<'_, '_>) -> Result<Look> {
        let locked = self.directory.lock(waiter)?;
        let wanted_bytes = self.spec.geometry.total_bytes() as u64;
        match locked.probe(&self.name)? {
            Probe::Absent if self.spec.mode == Mode::Join => Ok(Look::Wait(WaitState::NoFile { wanted_bytes })),
            Probe::Dead { found, .. } if self.spec.mode == Mode::Join => Ok(Look::Wait(WaitState::DeadFile {
                wanted_bytes,
                seen_bytes: found.size_bytes,
            })),
            Probe::Dead { found, .. } => {
                self.reclaimed
                    .extend(reap::reclaim(&self.directory, locked, &self.name, found));
                Ok(Look::Again)
            }
            Probe::Absent if !self.has_swept => {
                // The dead of other ids may hold the space that this region needs.
                drop(locked);
                self.reclaimed
                    .extend(reap::reclaim_dead(&self.directory, &self.name, waiter)?);
                self.has_swept = true;
                Ok(Look::Again)
            }
            Probe::Absent => {
                if let Err(error) = prefault::check_room(&self.directory, self.spec.geometry.total_bytes(), &self.path)
                {
                    drop(locked);
                    return if may_pass(&error) && self.directory.is_freeing() {
                        Ok(Look::WaitForSpace(error))
                    } else {
                        Err(error)
                    };
                }
                Ok(match locked.publish(&self.name, self.spec.geometry)? {
                    Some(file) => Look::Done(Role::Creator, file),
                    None => Look::Again,
                })
            }
            Probe::Live(found) if self.spec.mode == Mode::Create => Err(Error::Exists {
                path: self.path.clone(),
                size_bytes: found.size_bytes,
            }),
            Probe::Live(found) => match self.assess(&found)? {
                Some(state) => Ok(Look::Wait(state)),
                None => Ok(match locked.attach(&self.name, &found, self.spec.geometry)? {
                    Attach::Attached(file) => Look::Done(Role::Joiner, file),
                    Attach::NameChanged => Look::Again,
                    Attach::Locked => Look::Wait(WaitState::FileLocked),
                }),
            },
        }
    }

    /// Can a live file be joined now (`None`), later, or never (an error)?
    fn assess(&self, found: &Found) -> Result<Option<WaitState>> {
        let wanted = self.spec.geometry;
        let wanted_bytes = wanted.total_bytes() as u64;
        let mismatch = |found| {
            Err(Error::GeometryMismatch {
                path: self.path.clone(),
                wanted,
                found,
            })
        };
        let size_bytes = found.size_bytes;
        match found.announced_block_size() {
            Some(block_size_bytes)
                if size_bytes != wanted_bytes || block_size_bytes != wanted.block_size_bytes() as u64 =>
            {
                mismatch(FoundGeometry::Announced {
                    size_bytes,
                    block_size_bytes,
                })
            }
            None if size_bytes > wanted_bytes => mismatch(FoundGeometry::SizeOnly { size_bytes }),
            None if size_bytes < wanted_bytes => Ok(Some(WaitState::NotSized {
                wanted_bytes,
                seen_bytes: size_bytes,
            })),
            _ if found.is_being_prepared() => Ok(Some(WaitState::BeingPrepared { wanted_bytes })),
            _ => Ok(None),
        }
    }

    /// The creator's part: reserve every page, then let joiners in, then map the pages ahead.
    fn prepare(&self, file: &File, waiter: &mut Waiter<'_, '_>) -> Result<(Mapping, PrefaultReport)> {
        let total = self.spec.geometry.total_bytes();
        let ((), reserve) = prefault::timed(|| prefault::reserve(file, total, &self.directory, &self.path, waiter))?;
        let mapping = self.map(file)?;
        lock::end_preparing(file);
        let (method, prefault) = match self.spec.populate {
            Populate::Never => (Method::None, Duration::ZERO),
            Populate::Create | Populate::Join => {
                prefault::timed(|| prefault::map_ahead(&mapping, Access::Write, &self.path, waiter))?
            }
        };
        let report = PrefaultReport {
            method,
            reserve,
            prefault,
        };
        Ok((mapping, report))
    }

    /// The joiner's part. A file of the original class may have pages that nobody has touched: they are
    /// reserved, so that the filesystem filling up cannot turn a later touch into SIGBUS.
    fn join(&self, file: &File, waiter: &mut Waiter<'_, '_>) -> Result<(Mapping, PrefaultReport)> {
        let total = self.spec.geometry.total_bytes();
        let ((), reserve) = prefault::timed(|| {
            if is_backed(file, total).map_err(|source| Error::os("fstat", &self.path, source))? {
                return Ok(());
            }
            prefault::reserve(file, total, &self.directory, &self.path, waiter)
        })?;
        let mapping = self.map(file)?;
        let (method, prefault) = match self.spec.populate {
            Populate::Create | Populate::Never => (Method::None, Duration::ZERO),
            Populate::Join => prefault::timed(|| prefault::map_ahead(&mapping, Access::Read, &self.path, waiter))?,
        };
        let report = PrefaultReport {
            method,
            reserve,
            prefault,
        };
        Ok((mapping, report))
    }

    fn map(&self, file: &File) -> Result<Mapping> {
        let total = self.spec.geometry.total_bytes();
        // The size was seen before the open: a file that shrank since then must not be mapped.
        let size = file
            .metadata()
            .map_err(|source| Error::os("fstat", &self.path, source))?
            .len();
        if size < total as u64 {
            return Err(Error::GeometryMismatch {
                path: self.path.clone(),
                wanted: self.spec.geometry,
                found: FoundGeometry::SizeOnly { size_bytes: size },
            });
        }
        Mapping::new(file, total).map_err(|source| Error::os("mmap", &self.path, source))
    }

    /// A creator that fails takes its file back: those who wait see it gone and make their own.
    fn abandon(&self, file: File) {
        let _freeing = self.directory.begin_freeing();
        let _ = self.directory.drop_own_name(&self.name, &file.as_fd());
        drop(file);
    }
}

/// Could this lack of space end by itself, when files that are being removed are gone?
fn may_pass(error: &Error) -> bool {
    matches!(
        *error,
        Error::NoSpace {
            available: Available::Filesystem { total_bytes, .. },
            wanted_bytes,
            ..
        } if wanted_bytes <= total_bytes
    )
}
