//! Block copies by size of a block, ours beside a loop of one `memcpy` per block, as Criterion sees it: the report is
//! `target/criterion/report/index.html`. `whole` is one run of as many bytes: what this machine can do at best.
//!
//! The blocks are other ones each time, at random in 1 GiB, as an allocator hands them out after a while.

#![allow(unsafe_code)] // the loop that a caller without block copies would write

#[path = "support/place.rs"]
#[allow(dead_code)] // the sizes here are those of blocks
mod place;

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput};
use ec_shared_region::wait::never_stop;
use ec_shared_region::{EngineId, Geometry, Region, Spec};

use place::{Place, is_bench_run};

/// Block size and number of blocks of a batch.
const BATCHES: [(usize, usize); 5] = [(4096, 1000), (7168, 1000), (8192, 1000), (64 << 10, 256), (1 << 20, 64)];

fn main() -> std::io::Result<()> {
    let mut criterion = Criterion::default()
        .sample_size(10)
        .nresamples(10_000)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    let place = Place::new()?;
    let (region_bytes, batches) = if is_bench_run() {
        (1 << 30, &BATCHES[..])
    } else {
        (8 << 20, &[(7168, 1000)][..]) // a test run shows that it works, not how fast
    };
    for &(block_bytes, count) in batches {
        let region = open(&place, region_bytes / block_bytes, block_bytes)?;
        bench(&mut criterion, &region, count);
    }
    criterion.final_summary();
    Ok(())
}

fn open(place: &Place, num_blocks: usize, block_bytes: usize) -> std::io::Result<Region> {
    let directory = place.subdirectory("copy")?;
    let id = EngineId::new(&format!("copy-{block_bytes}")).map_err(std::io::Error::other)?;
    let geometry = Geometry::new(num_blocks as u64, block_bytes as u64).map_err(std::io::Error::other)?;
    place.warm(geometry.total_bytes())?;
    let opened = Region::open_in(&directory, &Spec::new(id, geometry), &mut never_stop());
    opened.map(|(region, _)| region).map_err(std::io::Error::other)
}

fn bench(criterion: &mut Criterion, region: &Region, count: usize) {
    let (num_blocks, size) = (region.geometry().num_blocks(), region.geometry().block_size_bytes());
    let mut packed = vec![1_u8; count * size];
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let start = region
        .mapping()
        .map_or(std::ptr::null_mut(), |mapping| mapping.as_ptr());
    let block = |id: i64| start.wrapping_add(id as usize * size);
    let copied = |result: ec_shared_region::Result<()>| assert!(result.is_ok(), "{result:?}");

    let mut group = criterion.benchmark_group(format!("scatter {count} blocks"));
    group.throughput(Throughput::Bytes(packed.len() as u64));
    group.bench_function(BenchmarkId::new("ours", size), |bencher| {
        let ids = || random.ids(count, num_blocks);
        let copy = |ids: Vec<i64>| copied(region.scatter(&ids, &packed, &mut never_stop()));
        bencher.iter_batched(ids, copy, criterion::BatchSize::PerIteration);
    });
    group.bench_function(BenchmarkId::new("loop", size), |bencher| {
        let ids = || random.ids(count, num_blocks);
        let copy = |ids: Vec<i64>| {
            for (row, id) in packed.chunks(size).zip(ids) {
                // SAFETY: the block lies in the mapping, which only this bench uses.
                unsafe { row.as_ptr().copy_to_nonoverlapping(block(id), size) };
            }
        };
        bencher.iter_batched(ids, copy, criterion::BatchSize::PerIteration);
    });
    group.bench_function(BenchmarkId::new("whole", size), |bencher| {
        let first = || random.below(num_blocks - count + 1) as i64;
        let copy = |first| copied(region.scatter(first..first + count as i64, &packed, &mut never_stop()));
        bencher.iter_batched(first, copy, criterion::BatchSize::PerIteration);
    });
    group.finish();

    let mut group = criterion.benchmark_group(format!("gather {count} blocks"));
    group.throughput(Throughput::Bytes(packed.len() as u64));
    group.bench_function(BenchmarkId::new("ours", size), |bencher| {
        let ids = || random.ids(count, num_blocks);
        let copy = |ids: Vec<i64>| copied(region.gather(&ids, &mut packed, &mut never_stop()));
        bencher.iter_batched(ids, copy, criterion::BatchSize::PerIteration);
    });
    group.bench_function(BenchmarkId::new("loop", size), |bencher| {
        let ids = || random.ids(count, num_blocks);
        let copy = |ids: Vec<i64>| {
            for (row, id) in packed.chunks_mut(size).zip(ids) {
                // SAFETY: as above.
                unsafe { row.as_mut_ptr().copy_from_nonoverlapping(block(id), size) };
            }
        };
        bencher.iter_batched(ids, copy, criterion::BatchSize::PerIteration);
    });
    group.bench_function(BenchmarkId::new("whole", size), |bencher| {
        let first = || random.below(num_blocks - count + 1) as i64;
        let copy = |first| copied(region.gather(first..first + count as i64, &mut packed, &mut never_stop()));
        bencher.iter_batched(first, copy, criterion::BatchSize::PerIteration);
    });
    group.finish();
}

/// An xorshift generator: the same blocks in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end as u64) as usize
    }

    /// Different ids of blocks.
    fn ids(&mut self, count: usize, num_blocks: usize) -> Vec<i64> {
        let mut seen = std::collections::HashSet::new();
        let draws = std::iter::repeat_with(|| self.below(num_blocks) as i64);
        draws.filter(|id| seen.insert(*id)).take(count).collect()
    }
}
