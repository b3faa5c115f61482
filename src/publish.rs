//! Publication: a file that appears under its name in one step, complete and alive.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::SystemTime;

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, RenameFlags, openat, renameat2};
use nix::libc;
use nix::sys::stat::{Mode as Permissions, fchmod};
use nix::unistd::{UnlinkatFlags, linkat, unlinkat};

use crate::directory::Locked;
use crate::error::{Available, Error, Resource, Result};
use crate::file::{identity, stat_of};
use crate::fork::Unshared;
use crate::lock::{self, Preparing};
use crate::retry::uninterrupted;
use crate::spec::Geometry;
use crate::step::{Step, reached};

/// Files that a killed process left between making and naming, where `O_TMPFILE` is refused.
pub(crate) const UNNAMED_PREFIX: &str = ".vllm_ec_unnamed_";
/// Readable and writable by the owner, by nobody else.
const PERMISSIONS: Permissions = Permissions::from_bits_truncate(0o600);

/// A file that was just published.
#[derive(Debug)]
pub struct Publication {
    /// Opened by its name; to be mapped.
    pub file: Unshared,
    /// The sign of the creator at work.
    pub preparing: Preparing,
}

impl Locked<'_> {
    /// Makes a file of the full size, with our signs of life and the sign "being prepared" on it,
    /// and gives it its name in one step. `None` where the name was taken meanwhile.
    ///
    /// # Errors
    /// [`Error::Os`]; nothing is left behind.
    pub fn publish(&self, name: &CStr, geometry: Geometry) -> Result<Option<Publication>> {
        reached(Step::Publish);
        let published = match self.publish_unnamed(name, geometry)? {
            Published::Refused => self.publish_renamed(name, geometry)?,
            published => published,
        };
        match published {
            Published::Yes(preparing) => {
                reached(Step::Linked);
                self.reopen_by_name(name, preparing, geometry)
            }
            Published::NameTaken | Published::Refused => Ok(None),
        }
    }

    /// The open file that was published keeps the sign "being prepared" and nothing else is done with it. What is
    /// mapped is opened by its name: an `O_TMPFILE` file goes by `#inode (deleted)` in /proc for as long as it is
    /// open, and nobody could tell whose memory it is.
    fn reopen_by_name(&self, name: &CStr, preparing: Preparing, geometry: Geometry) -> Result<Option<Publication>> {
        let os = |call| move |source: io::Error| Error::os(call, self.directory.join(name), source);
        let flags = OFlag::O_RDWR | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
        let stat = |file: &Unshared| stat_of(file.as_fd().as_raw_fd()).map_err(os("fstat"));
        let reopen = || {
            let named = match uninterrupted(|| openat(&self.directory.fd, name, flags, Permissions::empty())) {
                Ok(named) => Unshared::from(named),
                Err(Errno::ENOENT) => return Ok(None),
                Err(errno) => return Err(os("open")(errno.into())),
            };
            if identity(&stat(&named)?) != identity(&stat(preparing.file())?) {
                return Ok(None);
            }
            Ok(self.show_life(name, &named, geometry)?.then_some(named))
        };
        match reopen() {
            Ok(Some(file)) => Ok(Some(Publication { file, preparing })),
            failed => {
                let _ = self.drop_name(name, preparing.file());
                failed.map(|_| None)
            }
        }
    }

    fn publish_unnamed(&self, name: &CStr, geometry: Geometry) -> Result<Published> {
        let flags = OFlag::O_TMPFILE | OFlag::O_RDWR | OFlag::O_CLOEXEC;
        let fd = match uninterrupted(|| openat(&self.directory.fd, c".", flags, PERMISSIONS)) {
            Ok(fd) => Unshared::from(fd),
            // What sandboxes and old kernels answer, open(2).
            Err(Errno::EOPNOTSUPP | Errno::EISDIR | Errno::ENOENT | Errno::EINVAL | Errno::ENOSYS) => {
                return Ok(Published::Refused);
            }
            Err(errno) => return Err(self.cannot_make("open", name, geometry, errno)),
        };
        self.make_ready(name, &fd, geometry)?;
        let preparing = Preparing::begin(fd);
        reached(Step::Link);
        // The documented way to name an O_TMPFILE file without privilege, open(2).
        let from = format!("/proc/self/fd/{}", preparing.file().as_fd().as_raw_fd());
        match linkat(
            AT_FDCWD,
            from.as_str(),
            &self.directory.fd,
            name,
            AtFlags::AT_SYMLINK_FOLLOW,
        ) {
            Ok(()) => Ok(Published::Yes(preparing)),
            Err(Errno::EEXIST) => Ok(Published::NameTaken),
            // No /proc, or a sandbox that does not let links through it.
            Err(Errno::ENOENT | Errno::EXDEV | Errno::EPERM | Errno::EACCES | Errno::EINVAL) => Ok(Published::Refused),
            Err(errno) => Err(self.cannot_make("linkat", name, geometry, errno)),
        }
    }

    /// A temporary name, renamed without replacing: at no moment has the file two names.
    fn publish_renamed(&self, name: &CStr, geometry: Geometry) -> Result<Published> {
        let directory = &self.directory.fd;
        let stamp = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default()
            .as_nanos();
        let unnamed = CString::new(format!("{UNNAMED_PREFIX}{}_{stamp}", std::process::id())).unwrap_or_default();
        let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_RDWR | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW;
        let fd = uninterrupted(|| openat(directory, unnamed.as_c_str(), flags, PERMISSIONS))
            .map(Unshared::from)
            .map_err(|errno| self.cannot_make("open", name, geometry, errno))?;
        let preparing = Preparing::begin(fd);
        let published = self.make_ready(name, preparing.file(), geometry).and_then(|()| {
            reached(Step::Link);
            match renameat2(
                directory,
                unnamed.as_c_str(),
                directory,
                name,
                RenameFlags::RENAME_NOREPLACE,
            ) {
                Ok(()) => Ok(true),
                Err(Errno::EEXIST) => Ok(false),
                Err(errno) => Err(self.cannot_make("renameat2", name, geometry, errno)),
            }
        });
        match published {
            Ok(true) => Ok(Published::Yes(preparing)),
            Ok(false) | Err(_) => {
                let _ = unlinkat(directory, unnamed.as_c_str(), UnlinkatFlags::NoRemoveDir);
                published.map(|_| Published::NameTaken)
            }
        }
    }

    /// A new file takes an inode and no bytes, so what ran out is inodes, or what this user may have of them.
    fn cannot_make(&self, call: &'static str, name: &CStr, geometry: Geometry, errno: Errno) -> Error {
        match (errno, self.directory.room()) {
            (Errno::ENOSPC | Errno::EDQUOT, Ok(room)) => Error::NoSpace {
                path: self.directory.join(name),
                resource: if errno == Errno::EDQUOT {
                    Resource::Quota
                } else {
                    Resource::Inodes
                },
                wanted_bytes: geometry.total_bytes() as u64,
                available: Available::Inodes {
                    free: room.free_inodes,
                    total: room.total_inodes,
                },
                errno: errno as i32,
            },
            _ => Error::os(call, self.directory.join(name), errno),
        }
    }

    fn make_ready(&self, name: &CStr, fd: &Unshared, geometry: Geometry) -> Result<()> {
        let os = |call| move |source: io::Error| Error::os(call, self.directory.join(name), source);
        fchmod(fd, PERMISSIONS).map_err(|errno| os("fchmod")(errno.into()))?; // the umask does not matter
        let size = libc::off_t::try_from(geometry.total_bytes()).unwrap_or(libc::off_t::MAX);
        uninterrupted(|| nix::unistd::ftruncate(fd, size)).map_err(|errno| os("ftruncate")(errno.into()))?;
        self.show_life(name, fd, geometry).map(drop)
    }

    /// The signs of life. False where somebody who looks without our lock holds the file right now.
    fn show_life(&self, name: &CStr, fd: &Unshared, geometry: Geometry) -> Result<bool> {
        let os = |call| move |source: io::Error| Error::os(call, self.directory.join(name), source);
        let is_alive = lock::hold_shared(fd).map_err(os("flock"))?;
        lock::announce_block_size(fd, geometry.block_size_bytes());
        lock::share_nonce(fd);
        Ok(is_alive)
    }
}

enum Published {
    Yes(Preparing),
    NameTaken,
    /// This way is not open here.
    Refused,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::directory::Directory;
    use crate::wait::{Waiter, never_stop};
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::path::Path;
    use std::time::Duration;

    pub(crate) fn shape(blocks: u64, size: u64) -> Geometry {
        Geometry::new(blocks, size).unwrap()
    }

    pub(crate) fn with_locked(check: impl FnOnce(&Path, &Locked<'_>)) {
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
            let Published::Yes(preparing) = locked.publish_renamed(c"vllm_ec_b.mmap", shape(8, 64)).unwrap() else {
                panic!("the name is free");
            };
            let renamed = locked
                .reopen_by_name(c"vllm_ec_b.mmap", preparing, shape(8, 64))
                .unwrap()
                .unwrap();
            for (name, file) in [("a", unnamed.file.share()), ("b", renamed.file.share())] {
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
            let renamed = locked.publish_renamed(c"vllm_ec_a.mmap", shape(1, 64)).unwrap();
            assert!(matches!(renamed, Published::NameTaken));
            assert_eq!(std::fs::read(path.join("vllm_ec_a.mmap")).unwrap(), b"somebody's");
            assert_eq!(std::fs::read_dir(path).unwrap().count(), 1);
        });
    }
}
