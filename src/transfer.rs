//! A planned copy carried out: in pieces with a checkpoint between them, each by one thread or two.
//!
//! The second thread is no pool's: it would be missing in a forked child. It is started for a piece, takes chunks from
//! the same counter as the caller, and is waited for only while it is in a chunk. Where no core is free for it, the caller has taken
//! every chunk before it comes, and it ends without having touched anything.

#![allow(unsafe_code)] // raw pointers: other processes write to the region, other threads to the caller's bytes

use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;

use crate::copy::{Direction, Ids, Plan};
use crate::error::{Error, Result};
use crate::kernel::{self, Span, Stores};
use crate::mapping::Mapping;
use crate::region::Region;
use crate::signals::without_signals;
use crate::wait::Checkpoint;

/// Some 5 to 10 ms of work: Ctrl-C is noticed between pieces.
const PIECE_BYTES: usize = 64 << 20;
/// A scatter from here on goes past the cache. 256 KiB in blocks of 4,096 bytes took 39 us so and 51 us through it; a smaller one
/// gains less, and another process may read it at once.
const STREAMED_SCATTER_BYTES: usize = 256 << 10;
/// A gather from here on. What it brings is used at once, so that a smaller one belongs into the cache: 256 KiB in blocks of 4,096 bytes
/// took 58 us through it and 81 us past it, 1 MiB 211 and 217, 4 MiB in blocks of 64 KiB 630 and 514.
const STREAMED_GATHER_BYTES: usize = 4 << 20;
/// A piece from here on is shared with a second thread. Starting it costs some 10 us, also where no core is free. 1 MiB in blocks
/// of 4,096 bytes took 140 us to scatter with one thread and 159 us with two, 2 MiB 288 and 265, 4 MiB 572 and 417; to gather 211 and 226,
/// 443 and 359, 875 and 624.
const SECOND_THREAD_BYTES: usize = 2 << 20;
/// What a thread takes at a time: some 30 us of work.
const CHUNK_BYTES: usize = 256 << 10;
/// Looks at the other thread's chunk before the core is given away.
const SPINS: u32 = 1_000;

impl Region {
    /// Copies `src` into the blocks, in the order of their ids; of the last one only as much as `src` has.
    ///
    /// Other processes see the bytes when this returns, and some of them before. Ordering between processes is the callers' own.
    ///
    /// # Errors
    /// [`Error::BlockOutOfRange`], [`Error::DuplicateBlock`], [`Error::PartialBytes`], [`Error::Closed`], [`Error::Timeout`]
    /// where the region is not [ready](Region::is_ready), all before the first byte moves. [`Error::Interrupted`] where the checkpoint asked to stop: some of the blocks are written then.
    pub fn scatter<'a>(&self, ids: impl Into<Ids<'a>>, src: &[u8], checkpoint: &mut Checkpoint<'_>) -> Result<()> {
        let plan = Plan::new(self.geometry(), Direction::Scatter, ids.into(), Some(src.len()))?;
        let mapping = self.ready_mapping()?;
        let packed = Packed {
            start: src.as_ptr().cast_mut(),
            len_bytes: src.len(),
        };
        // SAFETY: a slice can be read for as long as it is borrowed, and a scatter does not write to it.
        unsafe { run(mapping, &plan, packed, checkpoint) }
    }

    /// Copies the blocks into `out`, in the order of their ids, which may repeat; of the last one only as much as `out` takes.
    ///
    /// # Errors
    /// As [`Region::scatter`], without [`Error::DuplicateBlock`].
    pub fn gather<'a>(&self, ids: impl Into<Ids<'a>>, out: &mut [u8], checkpoint: &mut Checkpoint<'_>) -> Result<()> {
        let plan = Plan::new(self.geometry(), Direction::Gather, ids.into(), Some(out.len()))?;
        let mapping = self.ready_mapping()?;
        let packed = Packed {
            start: out.as_mut_ptr(),
            len_bytes: out.len(),
        };
        // SAFETY: a mutable slice is the borrower's alone.
        unsafe { run(mapping, &plan, packed, checkpoint) }
    }
}

/// The caller's bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packed {
    pub start: *mut u8,
    pub len_bytes: usize,
}

// SAFETY: an address and a length; who may use what is behind them is said at each use.
unsafe impl Send for Packed {}
// SAFETY: as above.
unsafe impl Sync for Packed {}

/// Carries out the plan between the mapping of its region and `packed`.
///
/// # Errors
/// [`Error::BytesMismatch`], [`Error::Overlap`], [`Error::Closed`] before the first byte moves, [`Error::Interrupted`]
/// between pieces.
///
/// # Safety
/// `packed` can be read, and for a gather be written, until this returns.
pub(crate) unsafe fn run(
    mapping: &Mapping,
    plan: &Plan,
    packed: Packed,
    checkpoint: &mut Checkpoint<'_>,
) -> Result<()> {
    let geometry = plan.geometry();
    if geometry.total_bytes() > mapping.len_bytes() {
        return Err(Error::Closed); // the region that the plan was made for
    }
    if packed.len_bytes != plan.len_bytes() {
        return Err(Error::BytesMismatch {
            what: plan.direction().packed_name(),
            held_bytes: packed.len_bytes,
            wanted_bytes: plan.len_bytes(),
            count: plan.count(),
            block_size_bytes: geometry.block_size_bytes(),
        });
    }
    if shared(mapping, packed).is_some_and(|shared| plan.touches(shared)) {
        return Err(Error::Overlap {
            what: plan.direction().packed_name(),
        });
    }
    let job = Job {
        region: mapping.as_ptr(),
        packed,
        plan: ptr::from_ref(plan),
        stores: match plan.direction() {
            Direction::Scatter if plan.len_bytes() >= STREAMED_SCATTER_BYTES => Stores::Streamed,
            Direction::Gather if plan.len_bytes() >= STREAMED_GATHER_BYTES => Stores::Streamed,
            Direction::Scatter | Direction::Gather => Stores::Cached,
        },
    };
    for start in (0..plan.len_bytes()).step_by(PIECE_BYTES) {
        // A handler that ran there may have forked: both processes go on, as after any other call, and copy the same bytes.
        if start > 0 && checkpoint.checkpoint().is_break() {
            return Err(Error::Interrupted);
        }
        let piece = start..plan.len_bytes().min(start + PIECE_BYTES);
        // SAFETY: the plan's runs lie within its geometry, which the mapping holds; `packed` holds all bytes of the plan, and the caller
        // promises access; what the runs touch is not in it.
        unsafe { job.copy(piece) };
    }
    Ok(())
}

/// The bytes of the region, as offsets, that `packed` lies on.
fn shared(mapping: &Mapping, packed: Packed) -> Option<Range<usize>> {
    let region = mapping.as_ptr() as usize;
    let start = packed.start as usize;
    let range = start.max(region)..start.saturating_add(packed.len_bytes).min(region + mapping.len_bytes());
    (!range.is_empty()).then(|| range.start - region..range.end - region)
}

/// What a copy is made of. The plan is a pointer because the second thread may come too late to find it.
#[derive(Clone, Copy)]
struct Job {
    region: *mut u8,
    packed: Packed,
    plan: *const Plan,
    stores: Stores,
}

// SAFETY: addresses; `Job::copy` says who may use what is behind them.
unsafe impl Send for Job {}
// SAFETY: as above.
unsafe impl Sync for Job {}

impl Job {
    /// Copies a range of the caller's bytes, with a second thread where that pays.
    ///
    /// # Safety
    /// `region` holds the plan's geometry and `packed` its bytes, all are accessible, and no run lies on `packed`.
    unsafe fn copy(&self, piece: Range<usize>) {
        if piece.len() < SECOND_THREAD_BYTES || !has_second_core() {
            // SAFETY: as the caller promises.
            return unsafe { self.copy_alone(piece) };
        }
        let chunks = Arc::new(Chunks::new(piece));
        let (theirs, job) = (Arc::clone(&chunks), *self);
        // SAFETY: the thread uses the job only within a chunk that it took, and the end of `finish` is the end of every chunk.
        let help = move || unsafe { theirs.work(&job) };
        // Where there are no more threads to be had, the chunks are all for this one.
        let _ = without_signals(|| thread::Builder::new().name(String::from("ec-copy")).spawn(help));
        // SAFETY: as the caller promises.
        unsafe { chunks.work(self) };
        chunks.finish();
    }

    /// # Safety
    /// As [`Job::copy`].
    unsafe fn copy_alone(&self, range: Range<usize>) {
        // SAFETY: the caller has the plan.
        let plan = unsafe { &*self.plan };
        let spans = plan.within(range).map(|run| {
            let block = self.region.wrapping_add(run.region_offset);
            let packed = self.packed.start.wrapping_add(run.packed_offset);
            let (to, from) = match plan.direction() {
                Direction::Scatter => (block, packed),
                Direction::Gather => (packed, block),
            };
            Span {
                to,
                from,
                len_bytes: run.len_bytes,
            }
        });
        // SAFETY: as the caller promises.
        unsafe { kernel::copy(self.stores, spans) };
    }
}

/// A piece as chunks, each of which is taken once.
struct Chunks {
    piece: Range<usize>,
    /// The next one to be taken; beyond `count` there is none.
    next: AtomicUsize,
    copied: AtomicUsize,
    count: usize,
}

impl Chunks {
    fn new(piece: Range<usize>) -> Self {
        Self {
            count: piece.len().div_ceil(CHUNK_BYTES),
            next: AtomicUsize::new(0),
            copied: AtomicUsize::new(0),
            piece,
        }
    }

    fn take(&self) -> Option<Range<usize>> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        (number < self.count).then(|| {
            let start = self.piece.start + number * CHUNK_BYTES;
            start..self.piece.end.min(start + CHUNK_BYTES)
        })
    }

    /// Copies chunks until there is none left to take.
    ///
    /// # Safety
    /// As [`Job::copy`], until every chunk is copied.
    unsafe fn work(&self, job: &Job) {
        while let Some(chunk) = self.take() {
            // SAFETY: as the caller promises.
            unsafe { job.copy_alone(chunk) };
            self.copied.fetch_add(1, Ordering::Release);
        }
    }

    /// Waits for the other thread's last chunk.
    fn finish(&self) {
        let mut looks = 0;
        while self.copied.load(Ordering::Acquire) < self.count {
            looks += 1;
            if looks < SPINS {
                std::hint::spin_loop();
            } else {
                thread::yield_now();
            }
        }
    }
}

/// May this thread's children run beside it? Asked each time, since engines narrow the affinity of running processes.
fn has_second_core() -> bool {
    // More processors than the set can name are more than one.
    sched_getaffinity(Pid::from_raw(0)).map_or(true, |cores| {
        (0..CpuSet::count())
            .filter(|&core| cores.is_set(core) == Ok(true))
            .nth(1)
            .is_some()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Geometry;
    use crate::wait::never_stop;
    use proptest::prelude::*;
    use std::ops::ControlFlow;

    struct World {
        _file: std::fs::File,
        mapping: Mapping,
        geometry: Geometry,
    }

    impl World {
        fn new(num_blocks: usize, block_size_bytes: usize) -> Self {
            let geometry = Geometry::new(num_blocks as u64, block_size_bytes as u64).unwrap();
            let file = tempfile::tempfile_in("/dev/shm").unwrap();
            file.set_len(geometry.total_bytes() as u64).unwrap();
            let mapping = Mapping::new(&file, geometry.total_bytes(), 4096).unwrap();
            Self {
                _file: file,
                mapping,
                geometry,
            }
        }

        fn run(&self, direction: Direction, ids: &[i64], packed: &mut [u8]) -> Result<()> {
            self.run_while(direction, ids, packed, &mut never_stop())
        }

        fn run_while(
            &self,
            direction: Direction,
            ids: &[i64],
            packed: &mut [u8],
            checkpoint: &mut Checkpoint<'_>,
        ) -> Result<()> {
            let plan = Plan::new(self.geometry, direction, Ids::Listed(ids), None)?;
            let packed = Packed {
                start: packed.as_mut_ptr(),
                len_bytes: packed.len(),
            };
            // SAFETY: a mutable slice is this test's alone.
            unsafe { run(&self.mapping, &plan, packed, checkpoint) }
        }

        fn block(&self, id: usize) -> Vec<u8> {
            let size = self.geometry.block_size_bytes();
            let mut block = vec![0; size];
            // SAFETY: a block of the mapping, which this test alone has.
            unsafe {
                std::ptr::copy_nonoverlapping(self.mapping.as_ptr().add(id * size), block.as_mut_ptr(), size);
            }
            block
        }
    }

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|at| (at * 31 % 251) as u8 + 1).collect()
    }

    /// Above every threshold, of streamed stores, of a second thread and of pieces, and not a multiple of any.
    #[test]
    fn a_large_batch_arrives_in_order_both_ways() {
        let (num_blocks, size) = (2 * PIECE_BYTES / 7168 + 1000, 7168);
        let world = World::new(num_blocks, size);
        // Every block but the last, each second one backwards.
        let mut ids: Vec<i64> = (0..num_blocks as i64 - 1).step_by(2).collect();
        ids.extend((1..num_blocks - 1).step_by(2).rev().map(|id| id as i64));
        let mut src = pattern(ids.len() * size);
        assert!(src.len() > 2 * PIECE_BYTES);
        world.run(Direction::Scatter, &ids, &mut src).unwrap();
        for (row, &id) in src.chunks(size).zip(&ids) {
            assert!(world.block(id as usize) == row, "block {id}");
        }
        assert_eq!(world.block(num_blocks - 1), vec![0; size]);
        let mut out = vec![0; src.len()];
        world.run(Direction::Gather, &ids, &mut out).unwrap();
        assert!(out == src);
    }

    #[test]
    fn a_stop_comes_between_pieces_and_leaves_what_was_copied() {
        let size = 1 << 20;
        let world = World::new(3 * (PIECE_BYTES >> 20), size);
        let ids: Vec<i64> = (0..world.geometry.num_blocks() as i64).collect();
        let mut src = vec![7; ids.len() * size];
        let mut pieces = 0;
        let mut stop_after_two = || {
            pieces += 1;
            if pieces == 2 {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        };
        let stopped = world.run_while(Direction::Scatter, &ids, &mut src, &mut stop_after_two);
        assert!(matches!(stopped, Err(Error::Interrupted)), "{stopped:?}");
        let second_end = 2 * (PIECE_BYTES >> 20);
        assert_eq!(world.block(second_end - 1), vec![7; size]);
        assert_eq!(world.block(second_end), vec![0; size]);
    }

    #[test]
    fn a_small_batch_asks_nobody() {
        let world = World::new(4, 64);
        let mut stop = || ControlFlow::Break(());
        let copied = world.run_while(Direction::Scatter, &[2], &mut pattern(64), &mut stop);
        assert!(copied.is_ok());
        assert_eq!(world.block(2), pattern(64));
    }

    #[test]
    fn wrong_bytes_and_views_of_the_same_blocks_are_refused() {
        let world = World::new(4, 100);
        let mismatch = world.run(Direction::Gather, &[1, 2], &mut [0; 199]).unwrap_err();
        assert_eq!(
            mismatch.to_string(),
            "`out` holds 199 bytes: wanted 200 bytes for 2 blocks of 100 bytes"
        );
        world.run(Direction::Scatter, &[0], &mut [5; 100]).unwrap();
        let view = |offset: usize| Packed {
            start: world.mapping.as_ptr().wrapping_add(offset),
            len_bytes: 100,
        };
        let plan = |id: i64| Plan::new(world.geometry, Direction::Scatter, Ids::Listed(&[id]), None).unwrap();
        // SAFETY: views lie in the mapping, which nobody else uses.
        let copy = |id, offset| unsafe { run(&world.mapping, &plan(id), view(offset), &mut never_stop()) };
        for offset in [100, 1, 199] {
            assert!(
                matches!(copy(1, offset), Err(Error::Overlap { what: "src" })),
                "{offset}"
            );
        }
        // From block 0 to block 3, which do not meet.
        copy(3, 0).unwrap();
        assert_eq!(world.block(3), vec![5; 100]);
    }

    proptest! {
        #[test]
        fn chunks_are_taken_once_and_tile_the_piece(start in 0usize..1000, len in 0usize..(3 << 20)) {
            let chunks = Chunks::new(start..start + len);
            let mut end = start;
            while let Some(chunk) = chunks.take() {
                prop_assert_eq!(chunk.start, end);
                prop_assert!(!chunk.is_empty() && chunk.len() <= CHUNK_BYTES);
                end = chunk.end;
            }
            prop_assert_eq!(end, start + len);
            prop_assert!(chunks.take().is_none());
        }
    }
}
