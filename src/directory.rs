//! The directory of the regions: its lock, its room, its names.
//!
//! Everything that looks at a name or changes one happens under the lock of the directory
//! ([`Directory::lock`]): without it a prober that holds a file for a moment passes for a living
//! holder, and two probers can each take the other for one. The lock is a `flock` on the directory
//! itself, so there is no lock file to leave behind; it is held for microseconds, never while
//! bytes are reserved or given back.

use std::ffi::{CStr, CString, OsStr};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::libc;
use nix::sys::stat::{Mode as Permissions, fstat, fstatat};
use nix::sys::statfs::{FsType, TMPFS_MAGIC};
use nix::unistd::{UnlinkatFlags, unlinkat};

use crate::error::{Error, Result, WaitState};
use crate::file::identity;
use crate::fork::{Unshared, above_standard};
use crate::held::Held;
use crate::holders::FileIdentity;
use crate::lock::{self, Exclusive, Freeing};
use crate::publish::UNNAMED_PREFIX;
use crate::retry::uninterrupted;
use crate::spec::{EngineId, NAME_PREFIX, NAME_SUFFIX};
use crate::step::{Step, reached};
use crate::wait::Waiter;

/// Of `statfs(2)`; a tmpfs without a limit, and without swap.
const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);

/// The living hold the directory's lock for microseconds: even a wait that is over waits this long for it.
const LOCK_GRACE: Duration = Duration::from_millis(100);

/// The directory that holds the regions: `/dev/shm`, or a stand-in for tests.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    pub(crate) fd: Held<OwnedFd>,
    pub(crate) device: u64,
}

impl Directory {
    /// # Errors
    /// [`Error::Os`] where it is missing, no directory, or not readable.
    pub fn open(path: &Path) -> Result<Self> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let fd = uninterrupted(|| nix::fcntl::open(path, flags, Permissions::empty()))
            .map_err(|errno| Error::os("open", path, errno))?;
        let fd = above_standard(fd);
        let identity = identity(&fstat(&fd).map_err(|errno| Error::os("fstat", path, errno))?);
        Ok(Self {
            path: path.to_owned(),
            fd: Held::known(fd, Some(identity)),
            device: identity.device,
        })
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    #[must_use]
    pub fn join(&self, name: &CStr) -> PathBuf {
        self.path.join(OsStr::from_bytes(name.to_bytes()))
    }

    /// The same directory as an open file of its own: locks of one open file do not exclude each other.
    fn reopen(&self) -> io::Result<OwnedFd> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        Ok(uninterrupted(|| openat(&self.fd, c".", flags, Permissions::empty()))?)
    }

    /// Waits for the lock under which names are looked at and changed.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Interrupted`], [`Error::Os`].
    pub fn lock(&self, waiter: &mut Waiter<'_, '_>) -> Result<Locked<'_>> {
        let since = Instant::now();
        reached(Step::Lock);
        let os = |source| Error::os("flock", &self.path, source);
        let mut own = Unshared::from(self.reopen().map_err(os)?);
        loop {
            own = match Exclusive::try_hold(own).map_err(os)? {
                Ok(held) => {
                    return Ok(Locked {
                        directory: self,
                        _held: held,
                    });
                }
                Err(own) => own,
            };
            if waiter.is_over() && since.elapsed() >= LOCK_GRACE {
                return Err(Error::Timeout {
                    path: self.path.clone(),
                    waited: waiter.elapsed(),
                    state: WaitState::DirectoryLocked,
                    similar: Vec::new(),
                });
            }
            waiter.pause(since)?;
        }
    }

    /// Does a holder of ours announce itself on the file at `name`? Without the lock: an answer that may be old.
    #[must_use]
    pub fn is_held_by_ours(&self, name: &CStr) -> bool {
        // Opening what is no file, a device for example, may do something.
        let is_file = fstatat(&self.fd, name, AtFlags::AT_SYMLINK_NOFOLLOW)
            .is_ok_and(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFREG);
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
        is_file
            && openat(&self.fd, name, flags, Permissions::empty())
                .is_ok_and(|file| lock::announced_block_size(&Unshared::from(file)).is_some())
    }

    /// Tells constructors that find too little space that some is about to come back.
    /// `None` where the kernel refuses the lock: then they only fail sooner.
    #[must_use]
    pub fn begin_freeing(&self) -> Option<Freeing> {
        self.reopen().map(|directory| Freeing::begin(directory.into())).ok()
    }

    #[must_use]
    pub fn is_freeing(&self) -> bool {
        lock::is_freeing(&self.fd)
    }

    /// The filesystem's type, if its files are kept on a disk. `None` where they are in memory, and where nobody says.
    #[must_use]
    pub fn type_on_disk(&self) -> Option<i64> {
        let found = nix::sys::statfs::fstatfs(&self.fd).ok()?.filesystem_type();
        (found != TMPFS_MAGIC && found != RAMFS_MAGIC).then_some(found.0)
    }

    /// Room in the filesystem.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn room(&self) -> Result<Room> {
        let stat = uninterrupted(|| nix::sys::statvfs::fstatvfs(&self.fd))
            .map_err(|errno| Error::os("fstatvfs", &self.path, errno))?;
        let unit = stat.fragment_size();
        Ok(Room {
            total_bytes: stat.blocks().saturating_mul(unit),
            free_bytes: stat.blocks_available().saturating_mul(unit),
            total_inodes: stat.files(),
            free_inodes: stat.files_free(),
        })
    }

    /// Names that this package, or the original class, could have made.
    #[must_use]
    pub fn names(&self) -> Vec<CString> {
        let Ok(entries) = std::fs::read_dir(&self.path) else {
            return Vec::new();
        };
        entries
            .flatten()
            .filter_map(|entry| CString::new(entry.file_name().as_bytes()).ok())
            // By bytes: the original class also makes names that are no valid text.
            .filter(|name| {
                let name = name.to_bytes();
                name.starts_with(NAME_PREFIX.as_bytes()) && name.ends_with(NAME_SUFFIX.as_bytes())
                    || name.starts_with(UNNAMED_PREFIX.as_bytes())
            })
            .collect()
    }

    /// Ids of the regions present, for messages: sorted, a handful.
    #[must_use]
    pub fn ids_present(&self) -> Vec<String> {
        let mut ids: Vec<_> = self
            .names()
            .iter()
            .filter_map(|name| Some(EngineId::from_file_name(name)?.as_str().to_owned()))
            .collect();
        ids.sort();
        ids.truncate(5);
        ids
    }

    /// Takes the name away if it still stands for this very file (G7), and says whether it did.
    pub(crate) fn drop_name(&self, name: &CStr, file: &impl AsFd) -> Result<bool> {
        self.drop_name_unless(name, file, || false)
    }

    /// [`Directory::drop_name`], but for a last look right before the name goes.
    pub(crate) fn drop_name_unless(
        &self,
        name: &CStr,
        file: &impl AsFd,
        must_stay: impl FnOnce() -> bool,
    ) -> Result<bool> {
        let ours = fstat(file).map_err(|errno| Error::os("fstat", self.join(name), errno))?;
        self.drop_name_of(name, identity(&ours), must_stay)
    }

    /// The caller keeps the file open or mapped: else its identity is no proof.
    fn drop_name_of(&self, name: &CStr, ours: FileIdentity, must_stay: impl FnOnce() -> bool) -> Result<bool> {
        let os = |call| move |errno: Errno| Error::os(call, self.join(name), errno);
        match fstatat(&self.fd, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Ok(stat) if identity(&stat) == ours => {}
            Ok(_) | Err(Errno::ENOENT) => return Ok(false),
            Err(errno) => return Err(os("fstatat")(errno)),
        }
        if must_stay() {
            return Ok(false);
        }
        match unlinkat(&self.fd, name, UnlinkatFlags::NoRemoveDir) {
            Ok(()) => Ok(true),
            Err(Errno::ENOENT) => Ok(false),
            Err(errno) => Err(os("unlink")(errno)),
        }
    }

    /// Takes the name of a file that this process holds. Waits at most a second for the lock: while
    /// we hold the file nobody of ours gives its name to another, so the lock only shuts out people.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub(crate) fn drop_own_name(&self, name: &CStr, file: &Held<impl AsFd>) -> Result<bool> {
        let mut go_on = crate::wait::never_stop();
        let _locked = self.lock(&mut Waiter::new(Duration::from_secs(1), &mut go_on)).ok();
        match file.identity() {
            Some(ours) => self.drop_name_of(name, ours, || false),
            None => self.drop_name(name, file),
        }
    }
}

/// What `statvfs(3)` says. A tmpfs without a limit (`size=0`) reports a total of 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    pub total_bytes: u64,
    pub free_bytes: u64,
    pub total_inodes: u64,
    pub free_inodes: u64,
}

impl Room {
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.total_bytes != 0
    }
}

/// The lock of the directory, held. Dropping it gives it back.
#[derive(Debug)]
pub struct Locked<'d> {
    pub(crate) directory: &'d Directory,
    _held: Exclusive<Unshared>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait::never_stop;

    #[test]
    fn the_directory_lock_shuts_out_other_threads() {
        let temp = tempfile::tempdir_in("/dev/shm").unwrap();
        let directory = Directory::open(temp.path()).unwrap();
        let mut go_on = never_stop();
        let held = directory.lock(&mut Waiter::new(Duration::ZERO, &mut go_on)).unwrap();
        std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    let mut go_on = never_stop();
                    let refused = directory.lock(&mut Waiter::new(Duration::ZERO, &mut go_on));
                    assert!(matches!(
                        refused,
                        Err(Error::Timeout {
                            state: WaitState::DirectoryLocked,
                            ..
                        })
                    ));
                })
                .join()
                .unwrap();
        });
        drop(held);
        directory.lock(&mut Waiter::new(Duration::ZERO, &mut go_on)).unwrap();
    }
}
