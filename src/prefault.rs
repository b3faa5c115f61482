//! From a sized file to pages that are there: reserve (so that no later touch can fail), then map
//! ahead (so that no later touch is slow). In pieces, with a checkpoint between them.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::libc;

use crate::cgroup;
use crate::directory::Directory;
use crate::error::{Available, Error, Resource, Result, Warning};
use crate::mapping::{Mapping, page_bytes};
use crate::step::{Step, reached};
use crate::wait::Waiter;

/// About 10 ms of work: Ctrl-C is noticed between pieces.
const POPULATE_PIECE_BYTES: usize = 16 << 20;
const LARGEST_RESERVE_PIECE_BYTES: usize = 64 << 20;
/// Kernels before 6.x undo a whole fallocate call when a signal comes: a piece must fit between two
/// ticks of a profiler.
const SMALLEST_RESERVE_PIECE_BYTES: usize = 256 << 10;

/// The smallest piece is not interrupted this often in a row by any signal that a program lives with.
const MOST_INTERRUPTIONS: u32 = 10_000;

/// How pages were mapped ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// Not asked for.
    None,
    /// `MADV_POPULATE_WRITE`.
    PopulateWrite,
    /// One atomic write per page, on kernels before 5.14.
    TouchWrite,
    /// `MADV_POPULATE_READ`.
    PopulateRead,
    /// One read per page, on kernels before 5.14.
    TouchRead,
}

/// What preparing a region took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefaultReport {
    pub method: Method,
    pub reserve: Duration,
    pub prefault: Duration,
}

/// What a touch is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
}

/// Makes the filesystem set aside every page of the file, and changes neither its size nor a byte.
///
/// # Errors
/// [`Error::NoSpace`], [`Error::Interrupted`], [`Error::Os`]. Pages reserved until then stay with
/// the file.
pub fn reserve(
    file: &File,
    total_bytes: usize,
    directory: &Directory,
    path: &Path,
    waiter: &mut Waiter<'_, '_>,
) -> Result<()> {
    let mut piece = LARGEST_RESERVE_PIECE_BYTES;
    let mut offset = 0;
    let mut how = Reserve::Fallocate;
    let mut interruptions = 0;
    while offset < total_bytes {
        waiter.checkpoint()?;
        reached(Step::Reserve);
        let len = piece.min(total_bytes - offset);
        match how.call(file, offset, len) {
            Ok(()) => {
                interruptions = 0;
                offset += len;
                piece = (piece * 2).min(LARGEST_RESERVE_PIECE_BYTES);
            }
            Err(Errno::EINTR) if interruptions < MOST_INTERRUPTIONS => {
                interruptions += 1;
                piece = (piece / 2).max(SMALLEST_RESERVE_PIECE_BYTES);
            }
            // One call can ask for more than the kernel grants at once, though smaller ones work.
            Err(Errno::ENOMEM) if piece > SMALLEST_RESERVE_PIECE_BYTES => {
                piece = (piece / 2).max(SMALLEST_RESERVE_PIECE_BYTES);
            }
            Err(Errno::EOPNOTSUPP | Errno::ENOSYS) if how == Reserve::Fallocate => how = Reserve::Posix,
            Err(errno) => return Err(no_space(errno, total_bytes, directory, path)),
        }
    }
    Ok(())
}

/// Which call reserves: the C library's own writes to a page at a time where the kernel has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reserve {
    Fallocate,
    Posix,
}

impl Reserve {
    fn call(self, file: &File, offset: usize, len: usize) -> nix::Result<()> {
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
pub(crate) fn no_space(errno: Errno, wanted_bytes: usize, directory: &Directory, path: &Path) -> Error {
    let filesystem = || {
        let room = directory.room().ok();
        Available::Filesystem {
            free_bytes: room.map_or(0, |room| room.free_bytes),
            total_bytes: room.map_or(0, |room| room.total_bytes),
        }
    };
    let resource = match errno {
        Errno::ENOSPC | Errno::EDQUOT => Resource::Space,
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

/// Maps every page ahead, and says how.
///
/// # Errors
/// [`Error::Interrupted`], [`Error::Os`]. Only `EINVAL` falls back to touching: that is what a kernel
/// says that does not know the advice, every other error is a fault.
pub fn map_ahead(mapping: &Mapping, access: Access, path: &Path, waiter: &mut Waiter<'_, '_>) -> Result<Method> {
    let page = page_bytes();
    let (populated, touched) = match access {
        Access::Write => (Method::PopulateWrite, Method::TouchWrite),
        Access::Read => (Method::PopulateRead, Method::TouchRead),
    };
    let mut method = populated;
    for piece in pieces(mapping.len_bytes(), POPULATE_PIECE_BYTES) {
        let mut interruptions = 0;
        loop {
            waiter.checkpoint()?;
            reached(Step::MapAhead);
            match step(mapping, method, piece.clone(), page) {
                Ok(()) => break,
                Err(error) => match error.raw_os_error().map(Errno::from_raw) {
                    Some(Errno::EINVAL) => method = touched,
                    Some(Errno::EINTR | Errno::EAGAIN) if interruptions < MOST_INTERRUPTIONS => interruptions += 1,
                    _ => return Err(Error::os("madvise", path, error)),
                },
            }
        }
    }
    Ok(method)
}

fn step(mapping: &Mapping, method: Method, piece: Range<usize>, page: usize) -> io::Result<()> {
    match method {
        Method::PopulateWrite => mapping.populate_write(piece)?,
        Method::PopulateRead => mapping.populate_read(piece)?,
        Method::TouchWrite => mapping.touch_write(piece, page),
        Method::TouchRead => mapping.touch_read(piece, page),
        Method::None => {}
    }
    Ok(())
}

/// `0..total` cut into pieces of `piece_bytes`; the last one is what is left.
fn pieces(total_bytes: usize, piece_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    (0..total_bytes)
        .step_by(piece_bytes)
        .map(move |start| start..total_bytes.min(start.saturating_add(piece_bytes)))
}

/// Times a step for the report.
pub(crate) fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<(T, Duration)> {
    let began = Instant::now();
    Ok((work()?, began.elapsed()))
}

/// The limit of this process on the size of a file (`RLIMIT_FSIZE`); going over it is SIGXFSZ.
pub(crate) fn file_size_limit() -> u64 {
    nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_FSIZE).map_or(u64::MAX, |(soft, _)| soft)
}

/// RAM and swap of the machine.
pub(crate) fn machine_memory_bytes() -> u64 {
    nix::sys::sysinfo::sysinfo().map_or(u64::MAX, |info| info.ram_total().saturating_add(info.swap_total()))
}

/// Would the control group's limit be passed? A warning and no error, since the group's page cache may give way.
#[must_use]
pub fn control_group_warning(total_bytes: usize, path: &Path) -> Option<Warning> {
    let membership = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let limit = cgroup::memory_limit(Path::new(cgroup::ROOT), &membership)?;
    (total_bytes as u64 > limit.left_bytes()).then(|| Warning::ControlGroup {
        path: path.to_owned(),
        wanted_bytes: total_bytes as u64,
        current_bytes: limit.current_bytes,
        limit_bytes: limit.limit_bytes,
    })
}

/// Refuses what cannot fit before a byte is reserved: reserving an absurd size in pieces would fill
/// the filesystem, or on one without a limit the memory, before it failed.
///
/// # Errors
/// [`Error::NoSpace`].
pub fn check_room(directory: &Directory, total_bytes: usize, path: &Path) -> Result<()> {
    let wanted_bytes = (total_bytes as u64).next_multiple_of(page_bytes() as u64);
    let room = directory.room()?;
    let filesystem = Available::Filesystem {
        free_bytes: room.free_bytes,
        total_bytes: room.total_bytes,
    };
    let memory_bytes = machine_memory_bytes();
    let limit_bytes = file_size_limit();
    let (resource, available, errno) = if total_bytes as u64 > limit_bytes {
        (
            Resource::FileSizeLimit,
            Available::Limit { max_bytes: limit_bytes },
            Errno::EFBIG,
        )
    } else if room.is_limited() && wanted_bytes > room.free_bytes {
        (Resource::Space, filesystem, Errno::ENOSPC)
    } else if wanted_bytes > memory_bytes {
        (
            Resource::Memory,
            Available::Memory {
                total_bytes: memory_bytes,
            },
            Errno::ENOMEM,
        )
    } else if room.total_inodes != 0 && room.free_inodes == 0 {
        let inodes = Available::Inodes {
            free: room.free_inodes,
            total: room.total_inodes,
        };
        (Resource::Inodes, inodes, Errno::ENOSPC)
    } else {
        return Ok(());
    };
    Err(Error::NoSpace {
        path: path.to_owned(),
        resource,
        wanted_bytes: total_bytes as u64,
        available,
        errno: errno as i32,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait::never_stop;
    use proptest::prelude::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn reserving_backs_every_page_and_keeps_the_size() {
        let temp = tempfile::tempdir_in("/dev/shm").unwrap();
        let directory = Directory::open(temp.path()).unwrap();
        for how in [Reserve::Fallocate, Reserve::Posix] {
            let file = tempfile::tempfile_in(temp.path()).unwrap();
            let total = 3 * page_bytes() + 1;
            file.set_len(total as u64).unwrap();
            how.call(&file, 0, total).unwrap();
            let meta = file.metadata().unwrap();
            assert_eq!(
                (meta.len(), meta.blocks() * 512),
                (total as u64, 4 * page_bytes() as u64)
            );
        }
        drop(directory);
    }

    #[test]
    fn mapping_ahead_tells_how_and_stops_when_asked() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(1 << 20).unwrap();
        let mapping = Mapping::new(&file, 1 << 20).unwrap();
        let mut go_on = never_stop();
        let mut waiter = Waiter::new(Duration::ZERO, &mut go_on);
        let method = map_ahead(&mapping, Access::Write, Path::new("x"), &mut waiter).unwrap();
        assert!(matches!(method, Method::PopulateWrite | Method::TouchWrite));
        assert_eq!(file.metadata().unwrap().blocks() * 512, 1 << 20);
        let mut stop = || std::ops::ControlFlow::Break(());
        let stopped = map_ahead(
            &mapping,
            Access::Read,
            Path::new("x"),
            &mut Waiter::new(Duration::ZERO, &mut stop),
        );
        assert!(matches!(stopped, Err(Error::Interrupted)));
    }

    #[test]
    fn an_absurd_size_is_refused_at_once() {
        let directory = Directory::open(Path::new("/dev/shm")).unwrap();
        let refused = check_room(&directory, 1 << 60, Path::new("x"));
        assert!(matches!(refused, Err(Error::NoSpace { .. })), "{refused:?}");
        assert!(check_room(&directory, 1, Path::new("x")).is_ok());
    }

    proptest! {
        #[test]
        fn pieces_tile_the_whole(total in 0usize..10_000, piece in 1usize..500) {
            let mut end = 0;
            for range in pieces(total, piece) {
                prop_assert_eq!(range.start, end);
                prop_assert!(range.len() <= piece && !range.is_empty());
                end = range.end;
            }
            prop_assert_eq!(end, total);
        }
    }
}
