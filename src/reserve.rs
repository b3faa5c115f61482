//! Room: is there enough, and setting it aside, so that no later touch can fail.

use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::libc;

use crate::cgroup::{self, MemoryLimit};
use crate::directory::{Directory, Room};
use crate::error::{Available, Error, Resource, Result, Warning};
use crate::mapping::page_bytes;
use crate::step::{Step, reached};

const LARGEST_PIECE_BYTES: usize = 64 << 20;
/// Kernels before 6.x undo a whole fallocate call when a signal comes: a piece must fit between two
/// ticks of a profiler.
const SMALLEST_PIECE_BYTES: usize = 256 << 10;

/// The smallest piece is not interrupted this often in a row by any signal that a program lives with.
pub(crate) const MOST_INTERRUPTIONS: u32 = 10_000;

/// Why pages could not be put behind a part of the file, in a thread that has nobody to tell.
#[derive(Debug)]
pub(crate) enum Fault {
    /// There is no room.
    Room(Errno),
    Call(&'static str, io::Error),
    /// The caller wants to stop, or another thread met a fault.
    Stop(Error),
}

impl Fault {
    pub(crate) fn into_error(self, wanted_bytes: usize, directory: &Directory, path: &Path) -> Error {
        match self {
            Self::Room(errno) => no_space(errno, wanted_bytes, directory, path),
            Self::Call(call, source) => Error::os(call, path, source),
            Self::Stop(error) => error,
        }
    }
}

/// Asked between pieces whether to go on; told the bytes reserved so far.
pub(crate) type GoOn<'a> = dyn FnMut(usize) -> std::result::Result<(), Fault> + 'a;

/// Makes the filesystem set aside every page of the range, and changes neither the file's size nor a byte.
/// Pages reserved before a fault stay with the file.
pub(crate) fn reserve(file: &impl AsFd, range: Range<usize>, go_on: &mut GoOn<'_>) -> std::result::Result<(), Fault> {
    let mut piece = LARGEST_PIECE_BYTES;
    let mut offset = range.start;
    let mut how = How::Fallocate;
    let mut interruptions = 0;
    while offset < range.end {
        go_on(offset - range.start)?;
        reached(Step::Reserve);
        let len = piece.min(range.end - offset);
        match how.call(file, offset, len) {
            Ok(()) => {
                interruptions = 0;
                offset += len;
                piece = (piece * 2).min(LARGEST_PIECE_BYTES);
            }
            Err(Errno::EINTR) if interruptions < MOST_INTERRUPTIONS => {
                interruptions += 1;
                piece = (piece / 2).max(SMALLEST_PIECE_BYTES);
            }
            // One call can ask for more than the kernel grants at once, though smaller ones work.
            Err(Errno::ENOMEM) if piece > SMALLEST_PIECE_BYTES => {
                piece = (piece / 2).max(SMALLEST_PIECE_BYTES);
            }
            Err(Errno::EOPNOTSUPP | Errno::ENOSYS) if how == How::Fallocate => how = How::Posix,
            Err(errno) => return Err(Fault::Room(errno)),
        }
    }
    Ok(())
}

/// Which call reserves: the C library's own writes to a page at a time where the kernel has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    Fallocate,
    Posix,
}

impl How {
    fn call(self, file: &impl AsFd, offset: usize, len: usize) -> nix::Result<()> {
        let (Ok(offset), Ok(len)) = (libc::off_t::try_from(offset), libc::off_t::try_from(len)) else {
            return Err(Errno::EFBIG);
        };
        match self {
            Self::Fallocate => fallocate(file, FallocateFlags::FALLOC_FL_KEEP_SIZE, offset, len),
            Self::Posix => nix::fcntl::posix_fallocate(file, offset, len),
        }
    }
}

/// The error for a system call that asked for room.
fn no_space(errno: Errno, wanted_bytes: usize, directory: &Directory, path: &Path) -> Error {
    let filesystem = || {
        let room = directory.room().ok();
        Available::Filesystem {
            free_bytes: room.map_or(0, |room| room.free_bytes),
            total_bytes: room.map_or(0, |room| room.total_bytes),
        }
    };
    let resource = match errno {
        Errno::ENOSPC => Resource::Space,
        Errno::EDQUOT => Resource::Quota,
        Errno::ENOMEM => Resource::Memory,
        Errno::EFBIG => Resource::FileSizeLimit,
        other => return Error::os("fallocate", path, other),
    };
    Error::NoSpace {
        path: path.to_owned(),
        resource,
        wanted_bytes: wanted_bytes as u64,
        available: filesystem(),
        errno: errno as i32,
    }
}

/// The limit of this process on the size of a file (`RLIMIT_FSIZE`); going over it is SIGXFSZ.
pub(crate) fn file_size_limit() -> u64 {
    nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_FSIZE).map_or(u64::MAX, |(soft, _)| soft)
}

/// RAM and swap of the machine.
pub(crate) fn machine_memory_bytes() -> u64 {
    nix::sys::sysinfo::sysinfo().map_or(u64::MAX, |info| info.ram_total().saturating_add(info.swap_total()))
}

/// The memory limit of this process's control group, where there is one.
#[must_use]
pub fn control_group() -> Option<MemoryLimit> {
    let membership = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    cgroup::memory_limit(Path::new(cgroup::ROOT), &membership)
}

/// Would the control group's limit be passed? A warning and no error, since the group's page cache may give way.
#[must_use]
pub fn control_group_warning(limit: Option<MemoryLimit>, total_bytes: usize, path: &Path) -> Option<Warning> {
    let limit = limit?;
    (total_bytes as u64 > limit.left_bytes()).then(|| Warning::ControlGroup {
        path: path.to_owned(),
        wanted_bytes: total_bytes as u64,
        current_bytes: limit.current_bytes,
        limit_bytes: limit.limit_bytes,
    })
}

/// What a region must fit into, looked at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub room: Room,
    /// RAM and swap of the machine.
    pub memory_bytes: u64,
    /// `RLIMIT_FSIZE`; `u64::MAX` is none.
    pub file_size_limit_bytes: u64,
}

impl Limits {
    /// # Errors
    /// [`Error::Os`].
    pub fn of(directory: &Directory) -> Result<Self> {
        Ok(Self {
            room: directory.room()?,
            memory_bytes: machine_memory_bytes(),
            file_size_limit_bytes: file_size_limit(),
        })
    }

    /// Everything that stands against a region of this size; the first is what a constructor raises.
    #[must_use]
    pub fn shortages(&self, total_bytes: usize, path: &Path) -> Vec<Error> {
        let wanted_bytes = (total_bytes as u64).next_multiple_of(page_bytes() as u64);
        let room = self.room;
        let no_space = |resource, available, errno| Error::NoSpace {
            path: path.to_owned(),
            resource,
            wanted_bytes: total_bytes as u64,
            available,
            errno: errno as i32,
        };
        let mut shortages = Vec::new();
        if total_bytes as u64 > self.file_size_limit_bytes {
            let limit = Available::Limit {
                max_bytes: self.file_size_limit_bytes,
            };
            shortages.push(no_space(Resource::FileSizeLimit, limit, Errno::EFBIG));
        }
        if room.is_limited() && wanted_bytes > room.free_bytes {
            let filesystem = Available::Filesystem {
                free_bytes: room.free_bytes,
                total_bytes: room.total_bytes,
            };
            shortages.push(no_space(Resource::Space, filesystem, Errno::ENOSPC));
        }
        if wanted_bytes > self.memory_bytes {
            let memory = Available::Memory {
                total_bytes: self.memory_bytes,
            };
            shortages.push(no_space(Resource::Memory, memory, Errno::ENOMEM));
        }
        if room.total_inodes != 0 && room.free_inodes == 0 {
            let inodes = Available::Inodes {
                free: room.free_inodes,
                total: room.total_inodes,
            };
            shortages.push(no_space(Resource::Inodes, inodes, Errno::ENOSPC));
        }
        shortages
    }
}

/// Refuses what cannot fit before a byte is reserved: reserving an absurd size in pieces would fill
/// the filesystem, or on one without a limit the memory, before it failed.
///
/// # Errors
/// [`Error::NoSpace`].
pub fn check_room(directory: &Directory, total_bytes: usize, path: &Path) -> Result<()> {
    let shortages = Limits::of(directory)?.shortages(total_bytes, path);
    shortages.into_iter().next().map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn reserving_backs_every_page_and_keeps_the_size() {
        for how in [How::Fallocate, How::Posix] {
            let file = tempfile::tempfile_in("/dev/shm").unwrap();
            let total = 3 * page_bytes() + 1;
            file.set_len(total as u64).unwrap();
            how.call(&file, 0, total).unwrap();
            let meta = file.metadata().unwrap();
            assert_eq!(
                (meta.len(), meta.blocks() * 512),
                (total as u64, 4 * page_bytes() as u64)
            );
        }
    }

    #[test]
    fn a_range_is_reserved_and_nothing_beside_it() {
        let page = page_bytes();
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(8 * page as u64).unwrap();
        reserve(&file, 2 * page..5 * page, &mut |_| Ok(())).unwrap();
        assert_eq!(file.metadata().unwrap().blocks() * 512, 3 * page as u64);
        let stop = reserve(&file, 0..page, &mut |_| Err(Fault::Stop(Error::Interrupted)));
        assert!(matches!(stop, Err(Fault::Stop(Error::Interrupted))));
        assert_eq!(file.metadata().unwrap().blocks() * 512, 3 * page as u64);
    }

    #[test]
    fn an_absurd_size_is_refused_at_once() {
        let directory = Directory::open(Path::new("/dev/shm")).unwrap();
        let refused = check_room(&directory, 1 << 60, Path::new("x"));
        assert!(matches!(refused, Err(Error::NoSpace { .. })), "{refused:?}");
        assert!(check_room(&directory, 1, Path::new("x")).is_ok());
    }

    #[test]
    fn every_limit_is_a_shortage_of_its_own() {
        let limits = Limits {
            room: Room {
                total_bytes: 1 << 20,
                free_bytes: 1 << 20,
                total_inodes: 2,
                free_inodes: 1,
            },
            memory_bytes: 2 << 20,
            file_size_limit_bytes: u64::MAX,
        };
        let resources = |limits: &Limits, total| -> Vec<Resource> {
            let shortages = limits.shortages(total, Path::new("x"));
            let resource = |error: &Error| match error {
                Error::NoSpace { resource, .. } => *resource,
                other => panic!("{other}"),
            };
            shortages.iter().map(resource).collect()
        };
        assert_eq!(resources(&limits, 1 << 20), []);
        assert_eq!(resources(&limits, (1 << 20) + 1), [Resource::Space]);
        let mut poor = limits;
        poor.file_size_limit_bytes = 4096;
        poor.room.free_inodes = 0;
        assert_eq!(
            resources(&poor, 4 << 20),
            [
                Resource::FileSizeLimit,
                Resource::Space,
                Resource::Memory,
                Resource::Inodes
            ]
        );
        let mut unlimited = limits;
        unlimited.room.total_bytes = 0;
        unlimited.room.total_inodes = 0;
        unlimited.room.free_inodes = 0;
        assert_eq!(resources(&unlimited, 2 << 20), []);
    }
}
