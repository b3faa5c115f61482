//! Signs of life that the kernel keeps and takes back by itself, also after SIGKILL.
//!
//! Five signs, each on the region's file or on its directory:
//!
//! | sign | kind | says | ends with |
//! |---|---|---|---|
//! | life | `flock(LOCK_SH)` on the file | "a process of ours has it mapped" | the last descriptor or mapping of that open file |
//! | geometry | OFD read lock on byte `GEOMETRY + block_size_bytes` of the file | "with this block size" | the same |
//! | nonce | OFD read lock on byte `NONCE + nonce` of the file | "this very creation of the name" | the same |
//! | preparing | OFD write lock on byte `PREPARING` of the file | "its creator is still reserving the bytes" | dropping it, or the same |
//! | freeing | OFD read lock on byte 0 of the directory | "somebody is giving pages back right now" | [`Freeing`] dropped |
//!
//! The original class takes no lock at all. What it cannot hide is that it has the file open for
//! writing: the kernel grants a *read lease* only on a file that no process has open for writing
//! (`fcntl(2)`, `F_SETLEASE`), a mapping counts as long as it lives, and this works across PID
//! namespaces, where a look through /proc sees nothing. So [`has_writer`] asks for a lease and
//! gives it back at once.
//!
//! The life lock is never unlocked, only closed: a forked child shares it, and `LOCK_UN` there
//! would take it from the parent (`flock(2)`). OFD locks belong to the open file in the same way.

#![allow(unsafe_code)] // `flock`, `F_SETLEASE` and `F_SETSIG` have no safe wrapper that fits: nix's unlocks on drop.

use std::hash::{BuildHasher, Hasher};
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

use crate::fork::Unshared;
use crate::retry::uninterrupted;
use crate::spec::MAX_REGION_BYTES;

/// Lock bytes lie behind every byte that a region can have.
const PREPARING: i64 = MAX_REGION_BYTES as i64;
const GEOMETRY: i64 = PREPARING + 1;
const GEOMETRY_END: i64 = GEOMETRY + MAX_REGION_BYTES as i64;
/// A nonce is below this, so that its byte lies below `off_t`'s end.
const NONCE_RANGE: i64 = 1 << 61;
const NONCE: i64 = 1 << 62;

/// `asm-generic/fcntl.h`; libc does not name it.
const F_SETSIG: libc::c_int = 10;

fn flock(fd: &impl AsFd, operation: libc::c_int) -> io::Result<bool> {
    let locked = uninterrupted(|| {
        // SAFETY: `fd` is borrowed for the call, so it is open; flock touches no memory of ours.
        Errno::result(unsafe { libc::flock(fd.as_fd().as_raw_fd(), operation | libc::LOCK_NB) })
    });
    match locked {
        Ok(_) => Ok(true),
        Err(Errno::EWOULDBLOCK) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// Takes the life lock. False where another process holds the file exclusively.
pub fn hold_shared(fd: &impl AsFd) -> io::Result<bool> {
    flock(fd, libc::LOCK_SH)
}

/// An exclusive lock that is given back on drop, by `LOCK_UN`: a child forked meanwhile by another
/// thread shares the descriptor and would keep the lock if it were only closed.
#[derive(Debug)]
pub struct Exclusive<Fd: AsFd>(Fd);

impl<Fd: AsFd> Exclusive<Fd> {
    /// The descriptor back where somebody else holds a lock. Takes one or a reference to one.
    ///
    /// # Errors
    /// The error of `flock(2)`.
    pub fn try_hold(fd: Fd) -> io::Result<Result<Self, Fd>> {
        Ok(if flock(&fd, libc::LOCK_EX)? {
            Ok(Self(fd))
        } else {
            Err(fd)
        })
    }
}

impl<Fd: AsFd> Drop for Exclusive<Fd> {
    fn drop(&mut self) {
        let _ = flock(&self.0, libc::LOCK_UN);
    }
}

/// `lock_type` takes `F_RDLCK` and its like, which libc gives as `c_int` and wants as `c_short`.
fn byte_lock(lock_type: libc::c_int, start: i64, len: i64) -> libc::flock {
    libc::flock {
        l_type: lock_type as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: len,
        l_pid: 0, // must be 0 for OFD locks, fcntl(2)
    }
}

// OFD locks are announcements: nobody waits for one, and none is ever refused to us. Where a sandbox has
// none of them, nothing is announced, and everybody does what they do with a file of the original class:
// compare the size, and reserve what is missing.

fn set(fd: &impl AsFd, lock_type: libc::c_int, start: i64) -> nix::Result<()> {
    let lock = byte_lock(lock_type, start, 1);
    uninterrupted(|| fcntl(fd, FcntlArg::F_OFD_SETLK(&lock))).map(drop)
}

/// The first lock of another open file that stands against a write lock on the range.
fn conflict(fd: &impl AsFd, start: i64, len: i64) -> Option<i64> {
    let mut query = byte_lock(libc::F_WRLCK, start, len);
    uninterrupted(|| fcntl(fd, FcntlArg::F_OFD_GETLK(&mut query))).ok()?;
    (i32::from(query.l_type) != libc::F_UNLCK).then_some(query.l_start)
}

/// Announces the block size to everybody who opens the file, for as long as it stays open here.
pub fn announce_block_size(fd: &impl AsFd, block_size_bytes: usize) {
    let _ = set(fd, libc::F_RDLCK, GEOMETRY + block_size_bytes as i64);
}

/// The block size that a live holder announced. `None` where no holder of ours is left.
pub fn announced_block_size(fd: &impl AsFd) -> Option<u64> {
    conflict(fd, GEOMETRY, GEOMETRY_END - GEOMETRY).and_then(|start| u64::try_from(start - GEOMETRY).ok())
}

/// A number that no other creation of a region has.
fn new_nonce() -> u64 {
    // Seeded by the system's random numbers, once for each value.
    let random = std::hash::RandomState::new().build_hasher().finish();
    random % NONCE_RANGE.unsigned_abs()
}

/// Takes over the nonce that another holder announces, or chooses one, and announces it for as long as the
/// file stays open here. To be called under the directory's lock.
pub fn share_nonce(fd: &impl AsFd) {
    let nonce = announced_nonce(fd).unwrap_or_else(new_nonce);
    let _ = set(fd, libc::F_RDLCK, NONCE + (nonce % NONCE_RANGE.unsigned_abs()) as i64);
}

/// The nonce that a live holder announced. `None` where no holder of ours is left.
pub fn announced_nonce(fd: &impl AsFd) -> Option<u64> {
    conflict(fd, NONCE, 0).and_then(|start| u64::try_from(start - NONCE).ok())
}

/// "Being prepared": every byte may be there or not. Stands until dropped, on an open file that nobody maps: a
/// mapping is inherited by forked children, and the sign with it.
#[derive(Debug)]
pub struct Preparing(Unshared);

impl Preparing {
    /// Where there are no OFD locks nothing is announced.
    pub fn begin(file: Unshared) -> Self {
        let _ = set(&file, libc::F_WRLCK, PREPARING);
        Self(file)
    }

    #[must_use]
    pub fn file(&self) -> &Unshared {
        &self.0
    }
}

impl Drop for Preparing {
    fn drop(&mut self) {
        // Closing takes it back as well, but for a copy that a raw `clone` made.
        let _ = set(&self.0, libc::F_UNLCK, PREPARING);
    }
}

/// Is this offset one of those that announce a block size?
pub(crate) fn is_geometry_byte(offset: i64) -> bool {
    (GEOMETRY..GEOMETRY_END).contains(&offset)
}

pub fn is_being_prepared(fd: &impl AsFd) -> bool {
    conflict(fd, PREPARING, 1).is_some()
}

/// "Pages are being given back": constructors that find too little space wait while one exists.
#[derive(Debug)]
pub struct Freeing(Unshared);

impl Freeing {
    /// `directory` must be an open file of its own.
    pub fn begin(directory: Unshared) -> Self {
        let _ = set(&directory, libc::F_RDLCK, 0);
        Self(directory)
    }
}

impl Drop for Freeing {
    fn drop(&mut self) {
        let _ = set(&self.0, libc::F_UNLCK, 0);
    }
}

/// Is somebody else giving pages back in this directory?
pub fn is_freeing(directory: &impl AsFd) -> bool {
    conflict(directory, 0, 1).is_some()
}

/// A read lease: while it stands, whoever opens the file for writing waits. Given back on drop.
#[derive(Debug)]
pub struct Lease<'f, Fd: AsFd>(&'f Fd);

/// Somebody has the file open for writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HasWriter;

impl<'f, Fd: AsFd> Lease<'f, Fd> {
    /// `read_only` must be opened `O_RDONLY`. `None` where the kernel or the sandbox has no leases
    /// (`fs.leases-enable=0`, gVisor, another owner without `CAP_LEASE`).
    pub fn take(read_only: &'f Fd) -> Option<Result<Self, HasWriter>> {
        let fd = read_only.as_fd().as_raw_fd();
        // Whoever opens the file for writing while the lease stands makes the kernel send a signal,
        // by default SIGIO, which kills. SIGURG is ignored by default.
        // SAFETY: `fd` is borrowed, so it is open; these commands take integers.
        let lease = unsafe {
            if libc::fcntl(fd, F_SETSIG, libc::SIGURG) == -1 {
                return None;
            }
            libc::fcntl(fd, libc::F_SETLEASE, libc::F_RDLCK)
        };
        if lease == -1 {
            return (Errno::last() == Errno::EAGAIN).then_some(Err(HasWriter));
        }
        Some(Ok(Self(read_only)))
    }

    /// Does somebody wait to open the file for writing?
    #[must_use]
    pub fn is_in_the_way(&self) -> bool {
        // SAFETY: as above.
        let kind = unsafe { libc::fcntl(self.0.as_fd().as_raw_fd(), libc::F_GETLEASE) };
        kind == libc::F_UNLCK // what a lease that is being broken is to become, fcntl(2)
    }
}

impl<Fd: AsFd> Drop for Lease<'_, Fd> {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { libc::fcntl(self.0.as_fd().as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) };
    }
}

/// Does any open file, here or in another process, container or namespace, have write access? `None` as for
/// [`Lease::take`].
pub fn has_writer(read_only: &impl AsFd) -> Option<bool> {
    Some(Lease::take(read_only)?.is_err())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    struct Pair {
        _directory: tempfile::TempDir,
        path: std::path::PathBuf,
    }

    fn file() -> Pair {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path().join("file");
        File::create(&path).unwrap();
        Pair {
            _directory: directory,
            path,
        }
    }

    fn writer(pair: &Pair) -> File {
        File::options().read(true).write(true).open(&pair.path).unwrap()
    }

    #[test]
    fn the_announced_block_size_is_read_by_others_and_ends_with_the_file() {
        let pair = file();
        let holder = writer(&pair);
        let reader = File::open(&pair.path).unwrap();
        assert_eq!(announced_block_size(&reader), None);
        announce_block_size(&holder, 7168);
        assert_eq!(announced_block_size(&reader), Some(7168));
        drop(holder);
        assert_eq!(announced_block_size(&reader), None);
    }

    #[test]
    fn the_nonce_is_announced_beside_the_block_size() {
        let pair = file();
        let holder = writer(&pair);
        let reader = File::open(&pair.path).unwrap();
        assert_eq!(announced_nonce(&reader), None);
        let first = writer(&pair);
        share_nonce(&first);
        let nonce = announced_nonce(&reader);
        assert!(nonce.is_some());
        share_nonce(&holder);
        drop(first);
        assert_eq!(announced_nonce(&reader), nonce);
        assert_eq!(announced_block_size(&reader), None);
        drop(holder);
        let holder = writer(&pair);
        share_nonce(&holder);
        assert_ne!(announced_nonce(&reader), nonce);
        drop(holder);
        let holder = writer(&pair);
        announce_block_size(&holder, crate::spec::MAX_REGION_BYTES as usize - 1);
        assert_eq!(announced_block_size(&reader), Some(crate::spec::MAX_REGION_BYTES - 1));
        assert_eq!(announced_nonce(&reader), None);
    }

    #[test]
    fn preparing_begins_and_ends() {
        let pair = file();
        let reader = File::open(&pair.path).unwrap();
        let preparing = Preparing::begin(Unshared::from(std::os::fd::OwnedFd::from(writer(&pair))));
        assert!(is_being_prepared(&reader));
        drop(preparing);
        assert!(!is_being_prepared(&reader));
    }

    #[test]
    fn a_writer_is_seen_and_a_reader_is_not() {
        let pair = file();
        let probe = File::open(&pair.path).unwrap();
        let Some(free) = has_writer(&probe) else {
            eprintln!("skipped: this kernel or sandbox has no leases");
            return;
        };
        assert!(!free);
        let onlooker = File::open(&pair.path).unwrap();
        assert_eq!(has_writer(&probe), Some(false));
        let holder = writer(&pair);
        assert_eq!(has_writer(&probe), Some(true));
        drop((holder, onlooker));
        assert_eq!(has_writer(&probe), Some(false));
    }

    #[test]
    fn a_lease_tells_of_who_waits_to_write() {
        let pair = file();
        let probe = File::open(&pair.path).unwrap();
        let Some(Ok(lease)) = Lease::take(&probe) else {
            eprintln!("skipped: this kernel or sandbox has no leases");
            return;
        };
        assert!(!lease.is_in_the_way());
        let path = pair.path.clone();
        let opener = std::thread::spawn(move || File::options().read(true).write(true).open(path).unwrap());
        while !lease.is_in_the_way() {
            std::thread::yield_now();
        }
        assert!(!opener.is_finished());
        drop(lease);
        let writer = opener.join().unwrap();
        assert!(matches!(Lease::take(&probe), Some(Err(HasWriter))));
        drop(writer);
    }

    #[test]
    fn an_exclusive_lock_is_refused_while_the_life_lock_is_held() {
        let pair = file();
        let holder = writer(&pair);
        let probe = File::open(&pair.path).unwrap();
        assert!(hold_shared(&holder).unwrap());
        assert!(Exclusive::try_hold(&probe).unwrap().is_err());
        drop(holder);
        let exclusive = Exclusive::try_hold(&probe).unwrap();
        assert!(exclusive.is_ok());
        let late = writer(&pair);
        assert!(!hold_shared(&late).unwrap());
        drop(exclusive);
        assert!(hold_shared(&late).unwrap());
    }

    #[test]
    fn freeing_is_seen_by_others() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let open = || Unshared::from(std::os::fd::OwnedFd::from(File::open(directory.path()).unwrap()));
        let other = open();
        let freeing = Freeing::begin(open());
        assert!(is_freeing(&other));
        drop(freeing);
        assert!(!is_freeing(&other));
    }
}
