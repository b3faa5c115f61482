//! Every step of a region's life by size, ours beside the stock way, as Criterion sees it: the report
//! is `target/criterion/report/index.html`.
//!
//! Criterion takes all samples of one way before those of the other, and a busy neighbour can fall on
//! one of them alone: read speeds here, and ratios in the table of `benches/table/`, which measures the
//! package, beside the pure-Python class.
//!
//! `EC_BENCH_MIB=64,1024` measures other sizes; Criterion's own options, after `--`, take longer or
//! shorter samples.

mod support;

use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, SamplingMode, Throughput};
use ec_shared_region::Region;

use support::case::{Case, Shared, Step};
use support::place::Place;
use support::stock::Stock;

fn main() -> std::io::Result<()> {
    // All options are read before there is anything to clean up: wrong ones end the process.
    let mut usual = criterion(Duration::from_secs(2));
    // Making a region takes several times as long as cleaning it up, and is not timed there.
    let mut brief = criterion(Duration::from_millis(500));

    let place = Place::new()?;
    let sizes_bytes = place.sizes_bytes();
    for step in Step::ALL {
        let criterion = match step {
            Step::CleanupCreator | Step::CleanupJoiner => &mut brief,
            _ => &mut usual,
        };
        let mut group = criterion.benchmark_group(step.to_string());
        for &len_bytes in &sizes_bytes {
            group.throughput(Throughput::Bytes(len_bytes as u64));
            // Growing numbers of long steps would not fit into the time.
            group.sampling_mode(match len_bytes >> 20 {
                0..64 => SamplingMode::Auto,
                _ => SamplingMode::Flat,
            });
            bench::<Region>(&mut group, &place, step, len_bytes);
            bench::<Stock>(&mut group, &place, step, len_bytes);
        }
        group.finish();
    }
    usual.final_summary();
    Ok(())
}

/// Short enough for the whole to take a few minutes on two cores; options on the command line win.
fn criterion(measurement: Duration) -> Criterion {
    Criterion::default()
        .sample_size(10)
        .nresamples(10_000)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(measurement)
        .configure_from_args()
}

fn bench<S: Shared>(group: &mut BenchmarkGroup<'_, WallTime>, place: &Place, step: Step, len_bytes: usize) {
    // Made with the first sample: a filter may leave this one out.
    let mut case = None;
    let id = BenchmarkId::new(S::WAY, format!("{} MiB", len_bytes >> 20));
    group.bench_function(id, |bencher| {
        let case = case.get_or_insert_with(|| Case::<S>::new(place, step, len_bytes));
        bencher.iter_custom(|iterations| {
            case.prepare();
            (0..iterations).map(|_| case.sample()).sum()
        });
    });
}
