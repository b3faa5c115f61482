//! A constructor at work: looks until there is a file to use, then prepares or joins it.
//!
//! `docs/protocol.md` is the specification; the steps have its names.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::libc;

use crate::directory::Directory;
use crate::error::{Available, Error, FoundGeometry, Result, WaitState, Warning};
use crate::file::{Attach, Extent, Found, Probe};
use crate::fork::Unshared;
use crate::held::Held;
use crate::holders::FileIdentity;
use crate::huge;
use crate::lock::{self, Preparing};
use crate::mapping::{Mapping, page_bytes};
use crate::numa;
use crate::prefault::{self, PrefaultReport, Site};
use crate::publish::Publication;
use crate::reap::{self, PassedOver, Reclaimed};
use crate::region::{OpenReport, Role};
use crate::reserve::{self, Fault};
use crate::spec::{Mode, Numa, Populate, Spec};
use crate::step::{Step, reached};
use crate::wait::Waiter;

/// A region is found or made within four looks, unless names keep changing hands.
const MAX_LOOKS_PAST_THE_END: u32 = 16;
/// After this many it sleeps: whatever keeps changing the name must not be chased at full speed.
const MAX_LOOKS_IN_A_ROW: u32 = 8;
/// How long a region in the way is watched whose holders are all dying.
const DYING_GRACE: Duration = Duration::from_secs(5);

pub(crate) struct Opening<'s> {
    spec: &'s Spec,
    directory: Directory,
    name: CString,
    path: PathBuf,
    has_swept: bool,
    reclaimed: Vec<Reclaimed>,
    passed_over: Vec<PassedOver>,
}

/// What one look at the name led to.
enum Look {
    Made(Publication),
    Joined(Unshared),
    /// A live file that is in the way, held only by processes that are dying: the error if it stays so.
    AnotherLives(Error),
    /// Something was changed, or changed under us: look again at once.
    Again,
    Wait(WaitState),
    /// Too little space, but somebody is giving some back: the error if it stays so.
    WaitForSpace(Error),
}

/// What looking ended with.
enum FoundOrMade {
    Made(Publication),
    Joined(Unshared),
}

/// A file that is mapped.
struct Prepared {
    identity: FileIdentity,
    mapping: Mapping,
    prefault: PrefaultReport,
    is_ready: bool,
}

/// What a constructor came to.
pub(crate) struct Opened {
    pub(crate) role: Role,
    /// Every byte is known to be backed.
    pub(crate) is_ready: bool,
    pub(crate) file: Held<File>,
    pub(crate) mapping: Mapping,
    pub(crate) directory: Directory,
    pub(crate) name: CString,
    pub(crate) path: PathBuf,
    pub(crate) report: OpenReport,
}

impl<'s> Opening<'s> {
    pub(crate) fn new(directory: &Path, spec: &'s Spec) -> Result<Self> {
        Ok(Self {
            spec,
            directory: Directory::open(directory)?,
            name: spec.id.file_name_c(),
            path: directory.join(spec.id.file_name()),
            has_swept: false,
            reclaimed: Vec::new(),
            passed_over: Vec::new(),
        })
    }

    /// From nothing to a mapping; whatever fails, nothing is left behind.
    pub(crate) fn open(mut self, waiter: &mut Waiter<'_, '_>) -> Result<Opened> {
        let mut attempts = 0;
        loop {
            let found = self.find_or_make(waiter)?;
            let waited = waiter.elapsed();
            let (role, unshared, prepared) = match found {
                FoundOrMade::Made(Publication { file, preparing }) => {
                    let prepared = self.prepare(&file, preparing, waiter);
                    (Role::Creator, file, prepared)
                }
                FoundOrMade::Joined(file) => {
                    let joined = self.join(&file, waiter);
                    (Role::Joiner, file, joined)
                }
            };
            match prepared {
                Ok(Prepared {
                    identity,
                    mapping,
                    prefault,
                    is_ready,
                }) => {
                    reached(Step::Opened);
                    return Ok(Opened {
                        role,
                        is_ready,
                        // From here on a forked child shares the file, as it shares the mapping.
                        file: Held::known(unshared.share(), Some(identity)),
                        mapping,
                        directory: self.directory,
                        name: self.name,
                        path: self.path,
                        report: OpenReport {
                            elapsed: waiter.elapsed(),
                            waited,
                            prefault,
                            reclaimed: self.reclaimed,
                            passed_over: self.passed_over,
                        },
                    });
                }
                Err(error) => {
                    if !matches!(error, Error::Forked) {
                        self.give_back(unshared);
                    }
                    attempts += 1;
                    if !self.may_try_again(&error, attempts, waiter)? {
                        return Err(error);
                    }
                }
            }
        }
    }

    /// There was room when this constructor looked, and none when it reserved: another region took it at the
    /// same moment. If that one was refused as well, there is room again for one of the two. The pauses differ
    /// between processes, so that they do not refuse each other for ever.
    fn may_try_again(&self, error: &Error, attempts: u32, waiter: &mut Waiter<'_, '_>) -> Result<bool> {
        const MOST_ATTEMPTS: u32 = 6;

        if !may_pass(error) || attempts >= MOST_ATTEMPTS || waiter.is_over() {
            return Ok(false);
        }
        let slots = u64::from(std::process::id() % 8) + 1;
        let until = waiter.elapsed() + Duration::from_millis(5 * slots * u64::from(attempts));
        while waiter.elapsed() < until {
            waiter.pause(Instant::now())?;
        }
        let total = self.spec.geometry.total_bytes();
        Ok(self.directory.is_freeing() || reserve::check_room(&self.directory, total, &self.path).is_ok())
    }

    /// Looks until there is a file to use, of our own making or a live one.
    ///
    /// While it waits it holds nothing: no descriptor and no lock, so that it never passes for a holder
    /// and a creator that dies is replaced by the first who looks.
    fn find_or_make(&mut self, waiter: &mut Waiter<'_, '_>) -> Result<FoundOrMade> {
        let since = Instant::now();
        let mut looks_past_the_end = 0;
        let mut looks_in_a_row = 0;
        loop {
            waiter.checkpoint()?;
            looks_in_a_row += 1;
            looks_past_the_end += u32::from(waiter.is_over());
            let give_up = match self.look(waiter)? {
                Look::Made(publication) => return Ok(FoundOrMade::Made(publication)),
                Look::Joined(file) => return Ok(FoundOrMade::Joined(file)),
                Look::AnotherLives(error) if since.elapsed() >= DYING_GRACE => return Err(error),
                Look::AnotherLives(error) => error,
                // Looks that follow each other take no time, so even a timeout of 0 may make progress.
                Look::Again if looks_in_a_row < MAX_LOOKS_IN_A_ROW && looks_past_the_end < MAX_LOOKS_PAST_THE_END => {
                    continue;
                }
                Look::Again => self.timeout(waiter, WaitState::Unsettled),
                Look::Wait(state) => self.timeout(waiter, state),
                Look::WaitForSpace(error) => error,
            };
            if waiter.is_over() {
                return Err(give_up);
            }
            looks_in_a_row = 0;
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
                    .extend(reap::reclaim(&self.directory, locked, &self.name, found)?);
                Ok(Look::Again)
            }
            Probe::Absent if !self.has_swept && self.is_beside_others() => {
                // The dead of other ids may hold the space that this region needs.
                drop(locked);
                let swept = reap::reclaim_dead(&self.directory, &self.name, waiter)?;
                self.reclaimed.extend(swept.reclaimed);
                self.passed_over = swept.passed_over;
                self.has_swept = true;
                Ok(Look::Again)
            }
            Probe::Absent => {
                reached(Step::CheckRoom);
                if let Err(error) = reserve::check_room(&self.directory, self.spec.geometry.total_bytes(), &self.path) {
                    drop(locked);
                    if !may_pass(&error) {
                        return Err(error);
                    }
                    // Between the look at the room and this question the pages may have come back.
                    let total = self.spec.geometry.total_bytes();
                    return if self.directory.is_freeing()
                        || reserve::check_room(&self.directory, total, &self.path).is_ok()
                    {
                        Ok(Look::WaitForSpace(error))
                    } else {
                        Err(error)
                    };
                }
                Ok(match locked.publish(&self.name, self.spec.geometry)? {
                    Some(publication) => Look::Made(publication),
                    None => Look::Again,
                })
            }
            Probe::Changed => Ok(Look::Again),
            Probe::Locked => Ok(Look::Wait(WaitState::FileLocked)),
            Probe::Live(found) => match self.assess(&found) {
                Err(error) => {
                    // The look through /proc takes milliseconds: not under the lock. `found` keeps the inode.
                    drop(locked);
                    // A process that was killed is not gone at once: unmapping a large region takes its time.
                    if found.is_held_by_the_dying_only() {
                        Ok(Look::AnotherLives(error))
                    } else {
                        Err(error)
                    }
                }
                Ok(Some(state)) => Ok(Look::Wait(state)),
                Ok(None) => Ok(match locked.attach(&self.name, &found, self.spec.geometry)? {
                    Attach::Attached(file) => Look::Joined(file),
                    Attach::NameChanged => Look::Again,
                    Attach::Locked => Look::Wait(WaitState::FileLocked),
                }),
            },
        }
    }

    /// Is there anything to sweep? Mostly not: then those who race for one id take the lock once each.
    fn is_beside_others(&self) -> bool {
        self.directory.names().iter().any(|name| *name != self.name)
    }

    /// Can a live file be joined now (`None`), later, or never (an error)?
    fn assess(&self, found: &Found) -> Result<Option<WaitState>> {
        reached(Step::Assess);
        let wanted = self.spec.geometry;
        let wanted_bytes = wanted.total_bytes() as u64;
        if self.spec.mode == Mode::Create {
            return Err(Error::Exists {
                path: self.path.clone(),
                size_bytes: found.size_bytes,
            });
        }
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
            // Who maps ahead needs the pages; who does not is let in, and waits when it uses them.
            _ if self.spec.populate == Populate::Join && found.is_being_prepared() => {
                Ok(Some(WaitState::BeingPrepared { wanted_bytes }))
            }
            _ => Ok(None),
        }
    }

    /// The creator's part: map the file, put a page behind every byte, and say so. Joiners that map the file
    /// meanwhile wait for `preparing` to end before they use a byte.
    fn prepare(&self, file: &Unshared, preparing: Preparing, waiter: &mut Waiter<'_, '_>) -> Result<Prepared> {
        let total = self.spec.geometry.total_bytes();
        if let Some(filesystem_type) = self.directory.type_on_disk() {
            let path = self.path.clone();
            waiter.warn(&Warning::NotInMemory { path, filesystem_type })?;
        }
        // Said before a byte is charged: afterwards there may be nobody left to say it.
        if let Some(warning) = reserve::control_group_warning(reserve::control_group(), total, &self.path) {
            waiter.warn(&warning)?;
        }
        reached(Step::Map);
        let extent = self.extent(file)?;
        let mapping = self.map(file, extent)?;
        // Reserving places pages: where they go must be known before.
        self.place_on_nodes(&mapping, waiter)?;
        let prefault = match self.spec.populate {
            Populate::Never => prefault::set_aside(self.site(&mapping, file), waiter)?,
            Populate::Create | Populate::Join => prefault::place(self.site(&mapping, file), self.spec, waiter)?,
        };
        reached(Step::EndPreparing);
        drop(preparing);
        Ok(Prepared {
            identity: extent.identity,
            mapping,
            prefault,
            is_ready: true,
        })
    }

    fn place_on_nodes(&self, mapping: &Mapping, waiter: &mut Waiter<'_, '_>) -> Result<()> {
        let Err(source) = numa::apply(self.spec.numa, mapping) else {
            return Ok(());
        };
        let errno = source.raw_os_error().unwrap_or(0);
        match self.spec.numa {
            Numa::Node(node) if errno == libc::EINVAL => Err(Error::InvalidNumber {
                what: "numa",
                value: node.to_string(),
                reason: "there is no such node, or this process may not use it",
            }),
            // What a sandbox refuses is no reason to go without a region.
            Numa::Default | Numa::Interleave | Numa::Node(_) => {
                let path = self.path.clone();
                waiter.warn(&Warning::Numa { path, errno })
            }
        }
    }

    /// The joiner's part. While a creator is at work it only maps. Else a file may have pages that nobody has
    /// touched (the original class makes such, and a creator that died): they are reserved, so that the filesystem
    /// filling up cannot turn a later touch into SIGBUS.
    fn join(&self, file: &Unshared, waiter: &mut Waiter<'_, '_>) -> Result<Prepared> {
        let total = self.spec.geometry.total_bytes();
        let began = Instant::now();
        reached(Step::JoinReserve);
        let is_ready = self.spec.populate == Populate::Join || !lock::is_being_prepared(file);
        let extent = self.extent(file)?;
        if is_ready && extent.allocated_bytes < total as u64 {
            set_aside(file, total, &self.directory, &self.path, waiter)?;
        }
        reached(Step::JoinMap);
        let mapping = self.map(file, extent)?;
        let prefault = match self.spec.populate {
            Populate::Create | Populate::Never => PrefaultReport::reserved(began.elapsed()),
            Populate::Join => prefault::map_existing(self.site(&mapping, file), self.spec, waiter)?,
        };
        Ok(Prepared {
            identity: extent.identity,
            mapping,
            prefault,
            is_ready,
        })
    }

    fn site<'a>(&'a self, mapping: &'a Mapping, file: &'a Unshared) -> Site<'a> {
        Site {
            mapping,
            file,
            directory: &self.directory,
            path: &self.path,
        }
    }

    fn extent(&self, file: &Unshared) -> Result<Extent> {
        Extent::of(file).map_err(|source| Error::os("fstat", &self.path, source))
    }

    fn map(&self, file: &Unshared, extent: Extent) -> Result<Mapping> {
        let total = self.spec.geometry.total_bytes();
        // The size was seen before the open: a file that shrank since then must not be mapped.
        if extent.size_bytes < total as u64 {
            return Err(Error::GeometryMismatch {
                path: self.path.clone(),
                wanted: self.spec.geometry,
                found: FoundGeometry::SizeOnly {
                    size_bytes: extent.size_bytes,
                },
            });
        }
        let align_bytes = huge::huge_page_bytes().unwrap_or_else(page_bytes);
        Mapping::new(file.file(), total, align_bytes).map_err(|source| Error::os("mmap", &self.path, source))
    }

    /// What a constructor that fails does with its file: leaves it as a process does that closes it, and removes it
    /// if nobody lives on it. Those who joined meanwhile go on with it.
    fn give_back(&self, file: Unshared) {
        reached(Step::Abandon);
        let _freeing = self.directory.begin_freeing();
        drop(file);
        reap::remove_if_last(&self.directory, &self.name);
    }
}

/// Reserves what is not backed.
///
/// # Errors
/// [`Error::NoSpace`], [`Error::Interrupted`], [`Error::Os`].
pub(crate) fn back(
    file: &impl AsFd,
    total_bytes: usize,
    directory: &Directory,
    path: &Path,
    waiter: &mut Waiter<'_, '_>,
) -> Result<()> {
    let extent = Extent::of(file).map_err(|source| Error::os("fstat", path, source))?;
    if extent.allocated_bytes >= total_bytes as u64 {
        return Ok(());
    }
    set_aside(file, total_bytes, directory, path, waiter)
}

/// Reserves the whole file.
fn set_aside(
    file: &impl AsFd,
    total_bytes: usize,
    directory: &Directory,
    path: &Path,
    waiter: &mut Waiter<'_, '_>,
) -> Result<()> {
    reserve::reserve(file, 0..total_bytes, &mut |done_bytes| {
        waiter.checkpoint().map_err(Fault::Stop)?;
        waiter.progress(done_bytes, total_bytes).map_err(Fault::Stop)
    })
    .map_err(|fault| fault.into_error(total_bytes, directory, path))?;
    waiter.progress(total_bytes, total_bytes)
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
