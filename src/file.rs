//! The file and its name: look at it, publish it, attach to it, take the name away.
//!
//! Everything that looks at a name or changes one happens under the lock of the directory
//! ([`Directory::lock`]): without it a prober that holds a file for a moment passes for a living
//! holder, and two probers can each take the other for one. The lock is a `flock` on the directory
//! itself, so there is no lock file to leave behind; it is held for microseconds, never while
//! bytes are reserved or given back.

#![allow(unsafe_code)] // `fstat` of a caller's number, in one place

use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, RenameFlags, openat, renameat2};
use nix::libc;
use nix::sys::stat::{FileStat, Mode as Permissions, fchmod, fstat, fstatat};
use nix::unistd::{UnlinkatFlags, geteuid, linkat, unlinkat};

use crate::error::{Available, Error, Resource, Result, WaitState};
use crate::holders::{self, FileIdentity};
use crate::lock::{self, Exclusive, Freeing};
use crate::spec::{EngineId, Geometry};
use crate::wait::{Checkpoint, Waiter};

/// Files that a killed process left between making and naming, where `O_TMPFILE` is refused.
const UNNAMED_PREFIX: &str = ".vllm_ec_unnamed_";
/// The living hold the directory's lock for microseconds: even a wait that is over waits this long for it.
const LOCK_GRACE: Duration = Duration::from_millis(100);
/// Readable and writable by the owner, by nobody else.
const PERMISSIONS: Permissions = Permissions::from_bits_truncate(0o600);

/// The directory that holds the regions: `/dev/shm`, or a stand-in for tests.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    fd: OwnedFd,
    device: u64,
}

impl Directory {
    /// # Errors
    /// [`Error::Os`] where it is missing, no directory, or not readable.
    pub fn open(path: &Path) -> Result<Self> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let fd = nix::fcntl::open(path, flags, Permissions::empty()).map_err(|errno| Error::os("open", path, errno))?;
        let device = fstat(&fd).map_err(|errno| Error::os("fstat", path, errno))?.st_dev;
        Ok(Self {
            path: path.to_owned(),
            fd,
            device,
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
        Ok(openat(&self.fd, c".", flags, Permissions::empty())?)
    }

    /// Waits for the lock under which names are looked at and changed.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Interrupted`], [`Error::Os`].
    pub fn lock(&self, waiter: &mut Waiter<'_, '_>) -> Result<Locked<'_>> {
        let since = Instant::now();
        loop {
            if let Some(locked) = self.try_lock()? {
                return Ok(locked);
            }
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

    fn try_lock(&self) -> Result<Option<Locked<'_>>> {
        let os = |source| Error::os("flock", &self.path, source);
        let held = Exclusive::try_hold(self.reopen().map_err(os)?).map_err(os)?;
        Ok(held.map(|held| Locked {
            directory: self,
            _held: held,
        }))
    }

    /// Tells constructors that find too little space that some is about to come back.
    /// `None` where the kernel refuses the lock: then they only fail sooner.
    #[must_use]
    pub fn begin_freeing(&self) -> Option<Freeing> {
        self.reopen().map(Freeing::begin).ok()
    }

    #[must_use]
    pub fn is_freeing(&self) -> bool {
        lock::is_freeing(&self.fd)
    }

    /// Room in the filesystem.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn room(&self) -> Result<Room> {
        let stat = nix::sys::statvfs::fstatvfs(&self.fd).map_err(|errno| Error::os("fstatvfs", &self.path, errno))?;
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
            .filter(|name| {
                EngineId::from_file_name(name).is_some() || name.to_bytes().starts_with(UNNAMED_PREFIX.as_bytes())
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

/// What stands at a name.
#[derive(Debug)]
pub enum Probe {
    Absent,
    /// Nobody holds it. `is_proven` is false where only a partial view of /proc says so.
    Dead {
        found: Found,
        is_proven: bool,
    },
    Live(Found),
}

/// A region file that was looked at, held open for reading so that its identity stays proof.
#[derive(Debug)]
pub struct Found {
    fd: OwnedFd,
    pub size_bytes: u64,
    pub allocated_bytes: u64,
}

impl Found {
    /// The block size that a living holder of ours announced.
    #[must_use]
    pub fn announced_block_size(&self) -> Option<u64> {
        lock::announced_block_size(&self.fd)
    }

    #[must_use]
    pub fn is_being_prepared(&self) -> bool {
        lock::is_being_prepared(&self.fd)
    }
}

fn identity(stat: &FileStat) -> FileIdentity {
    FileIdentity {
        device: stat.st_dev,
        inode: stat.st_ino,
    }
}

fn file_type(stat: &FileStat) -> libc::mode_t {
    stat.st_mode & libc::S_IFMT
}

/// The lock of the directory, held. Dropping it gives it back.
#[derive(Debug)]
pub struct Locked<'d> {
    directory: &'d Directory,
    _held: Exclusive<OwnedFd>,
}

impl Locked<'_> {
    fn stat(&self, name: &CStr) -> Result<Option<FileStat>> {
        match fstatat(&self.directory.fd, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::ENOENT) => Ok(None),
            Err(errno) => Err(Error::os("fstatat", self.directory.join(name), errno)),
        }
    }

    /// Looks at a name and decides whether anybody alive holds the file.
    ///
    /// # Errors
    /// [`Error::Foreign`] for what is not a region file of this user, [`Error::Os`].
    pub fn probe(&self, name: &CStr) -> Result<Probe> {
        loop {
            let Some(stat) = self.stat(name)? else {
                return Ok(Probe::Absent);
            };
            self.verify(name, &stat)?;
            // O_NONBLOCK: whatever took the name meanwhile, the open must not hang on it.
            let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
            let fd = match openat(&self.directory.fd, name, flags, Permissions::empty()) {
                Ok(fd) => fd,
                Err(Errno::ENOENT) => continue,
                Err(errno) => return Err(Error::os("open", self.directory.join(name), errno)),
            };
            let opened = fstat(&fd).map_err(|errno| Error::os("fstat", self.directory.join(name), errno))?;
            if identity(&opened) != identity(&stat) || opened.st_nlink == 0 {
                continue; // the original class takes no lock: the name changed hands
            }
            self.verify(name, &opened)?;
            return self.judge(name, fd, &opened);
        }
    }

    /// G10: a plain file of this user, on this filesystem, with one name, closed to others.
    fn verify(&self, name: &CStr, stat: &FileStat) -> Result<()> {
        let me = geteuid().as_raw();
        let (reason, errno) = match file_type(stat) {
            libc::S_IFREG if stat.st_uid != me => (
                format!("it belongs to uid {}, this process runs as uid {me}", stat.st_uid),
                libc::EPERM,
            ),
            libc::S_IFREG if stat.st_mode & 0o077 != 0 => (
                format!(
                    "its mode {:04o} lets other users in, a region has 0600",
                    stat.st_mode & 0o7777
                ),
                libc::EPERM,
            ),
            libc::S_IFREG if stat.st_nlink > 1 => {
                (format!("it has {} names, a region has one", stat.st_nlink), libc::EPERM)
            }
            libc::S_IFREG if stat.st_dev != self.directory.device => {
                ("it is mounted from another filesystem".to_owned(), libc::EXDEV)
            }
            libc::S_IFREG => return Ok(()),
            libc::S_IFLNK => ("it is a symbolic link".to_owned(), libc::ELOOP),
            libc::S_IFDIR => ("it is a directory".to_owned(), libc::EISDIR),
            libc::S_IFIFO => ("it is a FIFO".to_owned(), libc::EPERM),
            libc::S_IFSOCK => ("it is a socket".to_owned(), libc::EPERM),
            _ => ("it is a device".to_owned(), libc::EPERM),
        };
        Err(Error::Foreign {
            path: self.directory.join(name),
            reason,
            errno,
        })
    }

    fn judge(&self, name: &CStr, fd: OwnedFd, stat: &FileStat) -> Result<Probe> {
        let exclusive =
            Exclusive::try_hold(&fd).map_err(|source| Error::os("flock", self.directory.join(name), source))?;
        let (is_live, is_proven) = match exclusive {
            None => (true, true),
            Some(_) => match lock::has_writer(&fd) {
                Some(is_live) => (is_live, true),
                None => (
                    holders::is_held(identity(stat), &[fd.as_raw_fd()]),
                    holders::sees_everything(),
                ),
            },
        };
        drop(exclusive);
        let found = Found {
            fd,
            size_bytes: u64::try_from(stat.st_size).unwrap_or(0),
            allocated_bytes: allocated_bytes(stat),
        };
        Ok(if is_live {
            Probe::Live(found)
        } else {
            Probe::Dead { found, is_proven }
        })
    }

    /// Opens a live file for sharing, with our own sign of life on it.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn attach(&self, name: &CStr, found: &Found, geometry: Geometry) -> Result<Attach> {
        let os = |call| move |source: io::Error| Error::os(call, self.directory.join(name), source);
        // No O_CREAT: fs.protected_regular refuses it on files in sticky directories, proc_sys_fs(5).
        let flags = OFlag::O_RDWR | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
        let fd = match openat(&self.directory.fd, name, flags, Permissions::empty()) {
            Ok(fd) => fd,
            Err(Errno::ENOENT) => return Ok(Attach::NameChanged),
            Err(Errno::EWOULDBLOCK) => return Ok(Attach::Locked), // somebody's lease
            Err(errno) => return Err(os("open")(errno.into())),
        };
        let stat = fstat(&fd).map_err(|errno| os("fstat")(errno.into()))?;
        let probed = fstat(&found.fd).map_err(|errno| os("fstat")(errno.into()))?;
        if identity(&stat) != identity(&probed) {
            return Ok(Attach::NameChanged);
        }
        if !lock::hold_shared(&fd).map_err(os("flock"))? {
            return Ok(Attach::Locked);
        }
        lock::announce_block_size(&fd, geometry.block_size_bytes());
        // After locking, look again whether the name is still that file.
        match self.stat(name)? {
            Some(now) if identity(&now) == identity(&stat) => Ok(Attach::Attached(fd.into())),
            _ => Ok(Attach::NameChanged),
        }
    }

    /// Makes a file of the full size, with our signs of life and the sign "being prepared" on it,
    /// and gives it its name in one step. `None` where the name was taken meanwhile.
    ///
    /// # Errors
    /// [`Error::Os`]; nothing is left behind.
    pub fn publish(&self, name: &CStr, geometry: Geometry) -> Result<Option<File>> {
        match self.publish_unnamed(name, geometry)? {
            Published::Yes(unnamed) => self.reopen_by_name(name, unnamed, geometry),
            Published::NameTaken => Ok(None),
            Published::Refused => self.publish_renamed(name, geometry),
        }
    }

    /// An `O_TMPFILE` file goes by `#inode (deleted)` in /proc for as long as it is open, whatever its name:
    /// nobody could tell whose memory it is. So the signs of life move to an open file that knows its name.
    /// Others look only under the directory's lock, which we hold, so they see no gap.
    fn reopen_by_name(&self, name: &CStr, unnamed: File, geometry: Geometry) -> Result<Option<File>> {
        let os = |call| move |source: io::Error| Error::os(call, self.directory.join(name), source);
        let flags = OFlag::O_RDWR | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
        let named = match openat(&self.directory.fd, name, flags, Permissions::empty()) {
            Ok(named) => named,
            Err(Errno::ENOENT) => return Ok(None),
            Err(errno) => {
                let _ = self.drop_name(name, &unnamed);
                return Err(os("open")(errno.into()));
            }
        };
        let stat = |fd: &dyn AsRawFd| stat_of(fd.as_raw_fd()).map_err(os("fstat"));
        if identity(&stat(&named)?) != identity(&stat(&unnamed)?) {
            return Ok(None);
        }
        // "Preparing" is exclusive: the old open file must give it up first. "Life" knows no gap, for those
        // who look without our lock.
        lock::end_preparing(&unnamed);
        self.show_life(name, &named, geometry)?;
        Ok(Some(named.into()))
    }

    fn publish_unnamed(&self, name: &CStr, geometry: Geometry) -> Result<Published> {
        let flags = OFlag::O_TMPFILE | OFlag::O_RDWR | OFlag::O_CLOEXEC;
        let fd = match openat(&self.directory.fd, c".", flags, PERMISSIONS) {
            Ok(fd) => fd,
            // What sandboxes and old kernels answer, open(2).
            Err(Errno::EOPNOTSUPP | Errno::EISDIR | Errno::ENOENT | Errno::EINVAL | Errno::ENOSYS) => {
                return Ok(Published::Refused);
            }
            Err(errno) => return Err(self.cannot_make(name, geometry, errno)),
        };
        self.make_ready(name, &fd, geometry)?;
        // The documented way to name an O_TMPFILE file without privilege, open(2).
        let from = format!("/proc/self/fd/{}", fd.as_raw_fd());
        match linkat(
            AT_FDCWD,
            from.as_str(),
            &self.directory.fd,
            name,
            AtFlags::AT_SYMLINK_FOLLOW,
        ) {
            Ok(()) => Ok(Published::Yes(fd.into())),
            Err(Errno::EEXIST) => Ok(Published::NameTaken),
            // No /proc, or a sandbox that does not let links through it.
            Err(Errno::ENOENT | Errno::EXDEV | Errno::EPERM | Errno::EACCES | Errno::EINVAL) => Ok(Published::Refused),
            Err(errno) => Err(Error::os("linkat", self.directory.join(name), errno)),
        }
    }

    /// A temporary name, renamed without replacing: at no moment has the file two names.
    fn publish_renamed(&self, name: &CStr, geometry: Geometry) -> Result<Option<File>> {
        let directory = &self.directory.fd;
        let stamp = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default()
            .as_nanos();
        let unnamed = CString::new(format!("{UNNAMED_PREFIX}{}_{stamp}", std::process::id())).unwrap_or_default();
        let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_RDWR | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW;
        let fd = openat(directory, unnamed.as_c_str(), flags, PERMISSIONS)
            .map_err(|errno| self.cannot_make(name, geometry, errno))?;
        let published = self.make_ready(name, &fd, geometry).and_then(|()| {
            match renameat2(
                directory,
                unnamed.as_c_str(),
                directory,
                name,
                RenameFlags::RENAME_NOREPLACE,
            ) {
                Ok(()) => Ok(true),
                Err(Errno::EEXIST) => Ok(false),
                Err(errno) => Err(Error::os("renameat2", self.directory.join(name), errno)),
            }
        });
        match published {
            Ok(true) => Ok(Some(fd.into())),
            Ok(false) | Err(_) => {
                let _ = unlinkat(directory, unnamed.as_c_str(), UnlinkatFlags::NoRemoveDir);
                published.map(|_| None)
            }
        }
    }

    /// A new file takes an inode and no bytes, so what ran out is inodes.
    fn cannot_make(&self, name: &CStr, geometry: Geometry, errno: Errno) -> Error {
        match (errno, self.directory.room()) {
            (Errno::ENOSPC | Errno::EDQUOT, Ok(room)) => Error::NoSpace {
                path: self.directory.join(name),
                resource: Resource::Inodes,
                wanted_bytes: geometry.total_bytes() as u64,
                available: Available::Inodes {
                    free: room.free_inodes,
                    total: room.total_inodes,
                },
                errno: errno as i32,
            },
            _ => Error::os("open", self.directory.join(name), errno),
        }
    }

    fn make_ready(&self, name: &CStr, fd: &OwnedFd, geometry: Geometry) -> Result<()> {
        let os = |call| move |source: io::Error| Error::os(call, self.directory.join(name), source);
        fchmod(fd, PERMISSIONS).map_err(|errno| os("fchmod")(errno.into()))?; // the umask does not matter
        let size = libc::off_t::try_from(geometry.total_bytes()).unwrap_or(libc::off_t::MAX);
        nix::unistd::ftruncate(fd, size).map_err(|errno| os("ftruncate")(errno.into()))?;
        self.show_life(name, fd, geometry)
    }

    /// The signs of a creator at work.
    fn show_life(&self, name: &CStr, fd: &OwnedFd, geometry: Geometry) -> Result<()> {
        let os = |call| move |source: io::Error| Error::os(call, self.directory.join(name), source);
        lock::hold_shared(fd).map_err(os("flock"))?;
        lock::begin_preparing(fd);
        lock::announce_block_size(fd, geometry.block_size_bytes());
        Ok(())
    }

    /// Takes the name away if it still stands for this very file (G7), and says whether it did.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn drop_name(&self, name: &CStr, file: &impl AsFd) -> Result<bool> {
        self.directory.drop_name(name, file)
    }

    /// [`Locked::drop_name`] for a file that was just probed.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn drop_dead_name(&self, name: &CStr, found: &Found) -> Result<bool> {
        self.drop_name(name, &found.fd)
    }
}

/// What an attempt to attach came to.
#[derive(Debug)]
pub enum Attach {
    Attached(File),
    /// Look again.
    NameChanged,
    /// Somebody who does not take the directory's lock holds the file exclusively.
    Locked,
}

enum Published {
    Yes(File),
    NameTaken,
    /// This way is not open here.
    Refused,
}

impl Directory {
    fn drop_name(&self, name: &CStr, file: &impl AsFd) -> Result<bool> {
        let os = |call| move |errno: Errno| Error::os(call, self.join(name), errno);
        let ours = fstat(file).map_err(os("fstat"))?;
        match fstatat(&self.fd, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Ok(stat) if identity(&stat) == identity(&ours) => {}
            Ok(_) | Err(Errno::ENOENT) => return Ok(false),
            Err(errno) => return Err(os("fstatat")(errno)),
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
    pub fn drop_own_name(&self, name: &CStr, file: &impl AsFd) -> Result<bool> {
        let mut go_on = crate::wait::never_stop();
        let _locked = self.lock(&mut Waiter::new(Duration::from_secs(1), &mut go_on)).ok();
        self.drop_name(name, file)
    }
}

/// Bytes that the file takes in the filesystem; `st_blocks` counts 512-byte units, stat(2).
#[must_use]
fn allocated_bytes(stat: &FileStat) -> u64 {
    u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512)
}

/// Is every page of the file backed by the filesystem, so that no touch can fail for lack of space?
///
/// # Errors
/// The error of `fstat(2)`.
pub fn is_backed(file: &File, total_bytes: usize) -> io::Result<bool> {
    Ok(allocated_bytes(&fstat(file)?) >= total_bytes as u64)
}

/// Polls the size of the file behind a descriptor of the caller's until it has `expected_bytes`.
///
/// # Errors
/// [`Error::Timeout`], [`Error::Interrupted`], [`Error::Os`] where the descriptor is not open.
pub fn wait_for_size(fd: RawFd, expected_bytes: u64, limit: Duration, checkpoint: &mut Checkpoint<'_>) -> Result<()> {
    let path = || PathBuf::from(format!("/proc/self/fd/{fd}"));
    let mut waiter = Waiter::new(limit, checkpoint);
    let since = Instant::now();
    loop {
        let stat = stat_of(fd).map_err(|source| Error::os("fstat", path(), source))?;
        let seen_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        if seen_bytes >= expected_bytes {
            return Ok(());
        }
        if waiter.is_over() {
            return Err(Error::Timeout {
                path: path(),
                waited: waiter.elapsed(),
                state: WaitState::NotSized {
                    wanted_bytes: expected_bytes,
                    seen_bytes,
                },
                similar: Vec::new(),
            });
        }
        waiter.pause(since)?;
    }
}

/// `fstat` of a number that may be no open descriptor at all, which a `BorrowedFd` must not be.
fn stat_of(fd: RawFd) -> io::Result<FileStat> {
    let mut stat = std::mem::MaybeUninit::uninit();
    // SAFETY: fstat writes a whole `stat`, or fails; any number may be passed.
    if unsafe { libc::fstat(fd, stat.as_mut_ptr()) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it was written.
    Ok(unsafe { stat.assume_init() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait::never_stop;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    fn shape(blocks: u64, size: u64) -> Geometry {
        Geometry::new(blocks, size).unwrap()
    }

    fn with_locked(check: impl FnOnce(&Path, &Locked<'_>)) {
        let temp = tempfile::tempdir_in("/dev/shm").unwrap();
        let directory = Directory::open(temp.path()).unwrap();
        let mut go_on = never_stop();
        let locked = directory
            .lock(&mut Waiter::new(Duration::from_secs(5), &mut go_on))
            .unwrap();
        check(temp.path(), &locked);
    }

    #[test]
    fn both_ways_of_publishing_give_the_same_file() {
        with_locked(|path, locked| {
            let unnamed = locked.publish(c"vllm_ec_a.mmap", shape(8, 64)).unwrap().unwrap();
            let renamed = locked
                .publish_renamed(c"vllm_ec_b.mmap", shape(8, 64))
                .unwrap()
                .unwrap();
            for (name, file) in [("a", &unnamed), ("b", &renamed)] {
                let meta = path.join(format!("vllm_ec_{name}.mmap")).metadata().unwrap();
                assert_eq!(meta.len(), 512);
                assert_eq!(meta.permissions().mode() & 0o7777, 0o600);
                assert_eq!(meta.ino(), file.metadata().unwrap().ino());
                assert_eq!(meta.nlink(), 1);
                let shown = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
                assert_eq!(shown, path.join(format!("vllm_ec_{name}.mmap")));
            }
            assert_eq!(std::fs::read_dir(path).unwrap().count(), 2);
        });
    }

    #[test]
    fn a_taken_name_is_left_alone_by_both_ways() {
        with_locked(|path, locked| {
            std::fs::write(path.join("vllm_ec_a.mmap"), b"somebody's").unwrap();
            assert!(locked.publish(c"vllm_ec_a.mmap", shape(1, 64)).unwrap().is_none());
            assert!(
                locked
                    .publish_renamed(c"vllm_ec_a.mmap", shape(1, 64))
                    .unwrap()
                    .is_none()
            );
            assert_eq!(std::fs::read(path.join("vllm_ec_a.mmap")).unwrap(), b"somebody's");
            assert_eq!(std::fs::read_dir(path).unwrap().count(), 1);
        });
    }

    #[test]
    fn a_published_file_lives_until_it_is_dropped() {
        with_locked(|_, locked| {
            let name = c"vllm_ec_a.mmap";
            assert!(matches!(locked.probe(name).unwrap(), Probe::Absent));
            let file = locked.publish(name, shape(4, 128)).unwrap().unwrap();
            let Probe::Live(found) = locked.probe(name).unwrap() else {
                panic!("its creator is alive");
            };
            assert_eq!(found.announced_block_size(), Some(128));
            assert!(found.is_being_prepared());
            drop(file);
            assert!(matches!(locked.probe(name).unwrap(), Probe::Dead { .. }));
        });
    }

    #[test]
    fn a_name_that_stands_for_another_file_is_not_dropped() {
        with_locked(|path, locked| {
            let name = c"vllm_ec_a.mmap";
            let old = locked.publish(name, shape(1, 64)).unwrap().unwrap();
            assert!(locked.drop_name(name, &old).unwrap());
            let new = locked.publish(name, shape(1, 64)).unwrap().unwrap();
            assert!(!locked.drop_name(name, &old).unwrap());
            assert!(path.join("vllm_ec_a.mmap").exists());
            assert!(locked.drop_name(name, &new).unwrap());
            assert!(!locked.drop_name(name, &new).unwrap());
        });
    }

    #[test]
    fn what_is_no_region_file_is_refused_and_not_touched() {
        with_locked(|path, locked| {
            let name = c"vllm_ec_a.mmap";
            let at = path.join("vllm_ec_a.mmap");
            let victim = path.join("victim");
            std::fs::write(&victim, b"victim").unwrap();
            let refused = |errno| match locked.probe(name) {
                Err(Error::Foreign { errno: found, .. }) => assert_eq!(found, errno),
                other => panic!("{other:?}"),
            };

            std::os::unix::fs::symlink(&victim, &at).unwrap();
            refused(libc::ELOOP);
            std::fs::remove_file(&at).unwrap();

            std::fs::create_dir(&at).unwrap();
            refused(libc::EISDIR);
            std::fs::remove_dir(&at).unwrap();

            nix::unistd::mkfifo(&at, PERMISSIONS).unwrap();
            refused(libc::EPERM);
            std::fs::remove_file(&at).unwrap();

            std::fs::write(&at, b"x").unwrap();
            std::fs::set_permissions(&at, std::fs::Permissions::from_mode(0o666)).unwrap();
            refused(libc::EPERM);
            std::fs::set_permissions(&at, std::fs::Permissions::from_mode(0o600)).unwrap();
            std::fs::hard_link(&at, path.join("second")).unwrap();
            refused(libc::EPERM);
            assert_eq!(std::fs::read(&victim).unwrap(), b"victim");
        });
    }

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
