//! A region's file: look at a name and judge who lives, attach to the living, take a name away.

#![allow(unsafe_code)] // `fstat` of a caller's number, in one place

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::libc;
use nix::sys::stat::{FileStat, Mode as Permissions, fstat, fstatat};
use nix::unistd::geteuid;

use crate::directory::Locked;
use crate::error::{Error, Result, WaitState};
use crate::fork::Unshared;
use crate::holders::{self, FileIdentity};
use crate::lock::{self, Exclusive, HasWriter, Lease};
use crate::retry::uninterrupted;
use crate::spec::Geometry;
use crate::step::{Step, reached};
use crate::wait::{Checkpoint, Waiter};

/// What stands at a name.
#[derive(Debug)]
pub enum Probe {
    /// The name changed hands while it was looked at.
    Changed,
    /// Nobody has it open for writing, and somebody holds its lock.
    Locked,
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
    fd: Unshared,
    identity: FileIdentity,
    announced_block_size: Option<u64>,
    /// Somebody holds its life lock.
    is_locked: bool,
    pub size_bytes: u64,
    pub allocated_bytes: u64,
}

impl Found {
    /// The block size that a living holder of ours announced.
    #[must_use]
    pub fn announced_block_size(&self) -> Option<u64> {
        self.announced_block_size
    }

    #[must_use]
    pub fn identity(&self) -> FileIdentity {
        self.identity
    }

    /// The nonce that a living holder of ours announced.
    #[must_use]
    pub fn announced_nonce(&self) -> Option<u64> {
        lock::announced_nonce(&self.fd)
    }

    /// Does somebody hold its life lock? The original class takes none.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        self.is_locked
    }

    /// Is everybody who holds it, as far as can be seen, on the way out?
    #[must_use]
    pub fn is_held_by_the_dying_only(&self) -> bool {
        holders::are_dying(self.identity)
    }

    #[must_use]
    pub fn is_being_prepared(&self) -> bool {
        lock::is_being_prepared(&self.fd)
    }
}

pub(crate) fn identity(stat: &FileStat) -> FileIdentity {
    FileIdentity {
        device: stat.st_dev,
        inode: stat.st_ino,
    }
}

fn file_type(stat: &FileStat) -> libc::mode_t {
    stat.st_mode & libc::S_IFMT
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
        reached(Step::Probe);
        // Bounded: the directory's lock is held, and a neighbour that keeps renaming takes none.
        for _ in 0..16 {
            let Some(stat) = self.stat(name)? else {
                return Ok(Probe::Absent);
            };
            self.verify(name, &stat)?;
            // O_NONBLOCK: whatever took the name meanwhile, the open must not hang on it.
            let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
            let fd = match uninterrupted(|| openat(&self.directory.fd, name, flags, Permissions::empty())) {
                Ok(fd) => fd,
                Err(Errno::ENOENT) => continue,
                Err(errno) => return Err(Error::os("open", self.directory.join(name), errno)),
            };
            let opened = fstat(&fd).map_err(|errno| Error::os("fstat", self.directory.join(name), errno))?;
            if identity(&opened) != identity(&stat) || opened.st_nlink == 0 {
                continue; // the original class takes no lock: the name changed hands
            }
            self.verify(name, &opened)?;
            return self.judge(name, fd.into(), &opened);
        }
        Ok(Probe::Changed)
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

    fn judge(&self, name: &CStr, fd: Unshared, stat: &FileStat) -> Result<Probe> {
        let found = |fd, announced_block_size, is_locked| Found {
            identity: identity(stat),
            announced_block_size,
            is_locked,
            size_bytes: u64::try_from(stat.st_size).unwrap_or(0),
            allocated_bytes: allocated_bytes(stat),
            fd,
        };
        // The sign of a holder of ours, and the shortest way to know of one.
        if let Some(block_size_bytes) = lock::announced_block_size(&fd) {
            return Ok(Probe::Live(found(fd, Some(block_size_bytes), true)));
        }
        let exclusive = Exclusive::try_hold(&fd)
            .map_err(|source| Error::os("flock", self.directory.join(name), source))?
            .ok();
        let (is_live, is_proven) = match (&exclusive, lock::has_writer(&fd)) {
            // A lock alone is no life: whoever only reads the file can hold one.
            (None, Some(false)) => return Ok(Probe::Locked),
            (_, Some(is_live)) => (is_live, true),
            (None, None) => (true, true),
            (Some(_), None) => (
                holders::is_held(identity(stat), &[fd.as_fd().as_raw_fd()]),
                holders::sees_everything(),
            ),
        };
        let is_locked = exclusive.is_none();
        drop(exclusive);
        let found = found(fd, None, is_locked);
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
        reached(Step::Attach);
        let os = |call| move |source: io::Error| Error::os(call, self.directory.join(name), source);
        // No O_CREAT: fs.protected_regular refuses it on files in sticky directories, proc_sys_fs(5).
        let flags = OFlag::O_RDWR | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
        let fd = match uninterrupted(|| openat(&self.directory.fd, name, flags, Permissions::empty())) {
            Ok(fd) => Unshared::from(fd),
            Err(Errno::ENOENT) => return Ok(Attach::NameChanged),
            Err(Errno::EWOULDBLOCK) => return Ok(Attach::Locked), // somebody's lease
            Err(errno) => return Err(os("open")(errno.into())),
        };
        let stat = fstat(&fd).map_err(|errno| os("fstat")(errno.into()))?;
        if identity(&stat) != found.identity {
            return Ok(Attach::NameChanged);
        }
        if !lock::hold_shared(&fd).map_err(os("flock"))? {
            return Ok(Attach::Locked);
        }
        lock::announce_block_size(&fd, geometry.block_size_bytes());
        lock::share_nonce(&fd);
        reached(Step::Attached);
        // After locking, look again whether the name is still that file.
        match self.stat(name)? {
            Some(now) if identity(&now) == identity(&stat) => Ok(Attach::Attached(fd)),
            _ => Ok(Attach::NameChanged),
        }
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
        // The original class takes no lock: it may have opened the file since it was judged, and then it lives. While
        // the lease stands it waits, and who waits right before the name goes is let in.
        let lease = match Lease::take(&found.fd) {
            Some(Err(HasWriter)) => return Ok(false),
            Some(Ok(lease)) => Some(lease),
            None => None,
        };
        let is_wanted = || lease.as_ref().is_some_and(Lease::is_in_the_way);
        self.directory.drop_name_unless(name, &found.fd, is_wanted)
    }
}

/// What an attempt to attach came to.
#[derive(Debug)]
pub enum Attach {
    Attached(Unshared),
    /// Look again.
    NameChanged,
    /// Somebody who does not take the directory's lock holds the file exclusively.
    Locked,
}

/// Bytes that the file takes in the filesystem; `st_blocks` counts 512-byte units, stat(2).
#[must_use]
fn allocated_bytes(stat: &FileStat) -> u64 {
    u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512)
}

/// Which file it is, how large, and how much of it is backed by the filesystem.
#[derive(Debug, Clone, Copy)]
pub struct Extent {
    pub identity: FileIdentity,
    pub size_bytes: u64,
    pub allocated_bytes: u64,
}

impl Extent {
    /// # Errors
    /// The error of `fstat(2)`.
    pub fn of(file: &impl AsFd) -> io::Result<Self> {
        let stat = fstat(file)?;
        Ok(Self {
            identity: identity(&stat),
            size_bytes: u64::try_from(stat.st_size).unwrap_or(0),
            allocated_bytes: allocated_bytes(&stat),
        })
    }
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
pub(crate) fn stat_of(fd: RawFd) -> io::Result<FileStat> {
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
    use crate::publish::tests::{shape, with_locked};
    use std::os::unix::fs::PermissionsExt;

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
            drop(file.preparing);
            let Probe::Live(found) = locked.probe(name).unwrap() else {
                panic!("it is prepared, and its creator is alive");
            };
            assert!(!found.is_being_prepared());
            drop((found, file.file));
            assert!(matches!(locked.probe(name).unwrap(), Probe::Dead { .. }));
        });
    }

    #[test]
    fn a_name_that_stands_for_another_file_is_not_dropped() {
        with_locked(|path, locked| {
            let name = c"vllm_ec_a.mmap";
            let old = locked.publish(name, shape(1, 64)).unwrap().unwrap();
            assert!(locked.drop_name(name, &old.file).unwrap());
            let new = locked.publish(name, shape(1, 64)).unwrap().unwrap();
            assert!(!locked.drop_name(name, &old.file).unwrap());
            assert!(path.join("vllm_ec_a.mmap").exists());
            assert!(locked.drop_name(name, &new.file).unwrap());
            assert!(!locked.drop_name(name, &new.file).unwrap());
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

            nix::unistd::mkfifo(&at, Permissions::S_IRUSR).unwrap();
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
}
