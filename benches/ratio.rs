//! How many times as fast as the stock way each step is: the table of the README.
//!
//! Each ratio is taken from samples that alternate between the two ways, so that whatever else the
//! machine does falls on both. A round is a few of them; the table shows the least, the median and the
//! greatest ratio over the rounds.
//!
//! `EC_BENCH_MIB=64,1024` measures other sizes, `EC_BENCH_ROUNDS=51` more rounds; a word on the command
//! line (`cargo bench --bench ratio -- join`) only the steps that have it in their names.

mod support;

use std::time::{Duration, Instant};

use ec_shared_region::Region;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::{TimeVal, TimeValLike};

use support::case::{Case, Step};
use support::place::{Place, is_bench_run};
use support::stock::Stock;

const ROUNDS_VARIABLE: &str = "EC_BENCH_ROUNDS";
const USUAL_ROUNDS: usize = 15;
/// A round of a short step takes as many samples as fill this time.
const ROUND: Duration = Duration::from_millis(2);
const MAX_SAMPLES_PER_ROUND: u32 = 200;
/// A share of the run's time spent waiting for a core from which its reader should know.
const DISTURBED: f64 = 0.05;

/// Options of Criterion's that are followed by a value: `cargo bench` hands all options to both benches.
const CRITERION_OPTIONS: [&str; 20] = [
    "-b",
    "--baseline",
    "--baseline-lenient",
    "-c",
    "--color",
    "--colour",
    "--confidence-level",
    "--format",
    "--load-baseline",
    "--measurement-time",
    "--noise-threshold",
    "--nresamples",
    "--output-format",
    "--plotting-backend",
    "--profile-time",
    "-s",
    "--sample-size",
    "--save-baseline",
    "--significance-level",
    "--warm-up-time",
];

fn main() -> std::io::Result<()> {
    if std::env::args().any(|arg| arg == "--list") {
        return Ok(()); // a test runner asks which tests there are: none that it could run by name
    }
    let filter = filter(std::env::args().skip(1));
    let rounds = if is_bench_run() {
        let asked = std::env::var(ROUNDS_VARIABLE).ok().and_then(|word| word.parse().ok());
        asked.unwrap_or(USUAL_ROUNDS).max(1)
    } else {
        1
    };
    let place = Place::new()?;
    let began = (Instant::now(), cpu_time());
    let mut rows = Vec::new();
    for len_bytes in place.sizes_bytes() {
        for step in Step::ALL {
            if filter.as_ref().is_none_or(|word| step.to_string().contains(word)) {
                eprintln!("{step}, {} MiB", len_bytes >> 20);
                rows.push(measure(&place, step, len_bytes, rounds));
            }
        }
    }
    // By step rather than by size, as in Criterion's report.
    rows.sort_by_key(|row| Step::ALL.iter().position(|step| *step == row.step));
    match &filter {
        Some(word) if rows.is_empty() => eprintln!("no step has {word:?} in its name"),
        _ if is_bench_run() => {
            print_table(&rows, rounds);
            print_disturbance(began.0.elapsed(), cpu_time().saturating_sub(began.1));
        }
        _ => eprintln!("every step works; `cargo bench` measures them"),
    }
    Ok(())
}

fn filter(mut args: impl Iterator<Item = String>) -> Option<String> {
    while let Some(arg) = args.next() {
        if CRITERION_OPTIONS.contains(&arg.as_str()) {
            args.next();
        } else if !arg.starts_with('-') {
            return Some(arg);
        }
    }
    None
}

/// One step at one size.
struct Row {
    step: Step,
    len_bytes: usize,
    rounds: Vec<Round>,
}

/// The seconds of a sample: the median, which a sample that was interrupted does not move.
struct Round {
    ours: f64,
    stock: f64,
}

impl Round {
    fn ratio(&self) -> f64 {
        self.stock / self.ours
    }
}

fn measure(place: &Place, step: Step, len_bytes: usize, rounds: usize) -> Row {
    let mut ours = Case::<Region>::new(place, step, len_bytes);
    let mut stock = Case::<Stock>::new(place, step, len_bytes);
    let mut ours_first = true;
    let mut round = |samples: u32| {
        // One set of physical pages can be half as fast as another, for as long as it is used, and caches
        // are warmer for whoever comes second: make the regions anew each time, and take turns.
        ours.clear();
        stock.clear();
        ours_first = !ours_first;
        if ours_first {
            ours.prepare();
            stock.prepare();
        } else {
            stock.prepare();
            ours.prepare();
        }
        let mut times = (Vec::new(), Vec::new());
        for sample in 0..samples {
            if (sample % 2 == 0) == ours_first {
                times.0.push(ours.sample());
                times.1.push(stock.sample());
            } else {
                times.1.push(stock.sample());
                times.0.push(ours.sample());
            }
        }
        let median = |times: Vec<Duration>| Spread::of(times.iter().map(Duration::as_secs_f64)).median;
        Round {
            ours: median(times.0),
            stock: median(times.1),
        }
    };
    round(1); // not counted: the code is cold
    let Round { ours, stock } = round(1);
    // The cast saturates.
    let samples = (ROUND.as_secs_f64() / (ours + stock)) as u32;
    let samples = samples.clamp(1, MAX_SAMPLES_PER_ROUND);
    Row {
        step,
        len_bytes,
        rounds: (0..rounds).map(|_| round(samples)).collect(),
    }
}

fn print_table(rows: &[Row], rounds: usize) {
    let mut lines = vec![["step", "MiB", "stock", "ours", "ours/stock", "min", "max"].map(str::to_owned)];
    for row in rows {
        let ratios = Spread::of(row.rounds.iter().map(Round::ratio));
        let seconds = |of: fn(&Round) -> f64| Spread::of(row.rounds.iter().map(of)).median;
        lines.push([
            row.step.to_string(),
            (row.len_bytes >> 20).to_string(),
            speed(row, seconds(|round| round.stock)),
            speed(row, seconds(|round| round.ours)),
            format!("{:.2}x", ratios.median),
            format!("{:.2}x", ratios.min),
            format!("{:.2}x", ratios.max),
        ]);
    }
    println!("\nSpeed of a step, ours as a multiple of stock (above 1: faster); {rounds} interleaved rounds\n");
    println!("{}", markdown(&lines));
}

/// The benches never sleep, so time that they did not spend on a core is time they had to wait for one.
fn print_disturbance(elapsed: Duration, on_a_core: Duration) {
    let waited = elapsed.saturating_sub(on_a_core).as_secs_f64() / elapsed.as_secs_f64();
    if waited > DISTURBED {
        println!(
            "The machine was busy: {:.0} % of the run went by waiting for a core. Repeat it in a quiet moment.",
            waited * 100.0
        );
    }
}

fn cpu_time() -> Duration {
    let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) else {
        return Duration::ZERO;
    };
    let micros = |time: TimeVal| u64::try_from(time.num_microseconds()).unwrap_or(0);
    Duration::from_micros(micros(usage.user_time()) + micros(usage.system_time()))
}

/// Time, and bytes by time where the step goes through all of them.
fn speed(row: &Row, seconds: f64) -> String {
    let time = if seconds < 1e-3 {
        format!("{:.1} us", seconds * 1e6)
    } else {
        format!("{:.2} ms", seconds * 1e3)
    };
    match row.step {
        Step::Join | Step::CleanupJoiner => time,
        _ => format!(
            "{time}, {:.1} GiB/s",
            row.len_bytes as f64 / seconds / (1u64 << 30) as f64
        ),
    }
}

struct Spread {
    min: f64,
    median: f64,
    max: f64,
}

impl Spread {
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let at = |index: usize| values.get(index).copied().unwrap_or(f64::NAN);
        let last = values.len().saturating_sub(1);
        Self {
            min: at(0),
            median: f64::midpoint(at(last / 2), at(last.div_ceil(2))),
            max: at(last),
        }
    }
}

/// Columns of equal width, so that it reads as well in a terminal as in a README.
fn markdown<const N: usize>(lines: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for line in lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = cell.len().max(*width);
        }
    }
    let mut text = String::new();
    for (index, line) in lines.iter().enumerate() {
        let cells = line.iter().zip(&widths).enumerate();
        let cells = cells.map(|(column, (cell, &width))| match column {
            0 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        text.push_str(&format!("| {} |\n", cells.collect::<Vec<_>>().join(" | ")));
        if index == 0 {
            let rules = widths.iter().enumerate().map(|(column, &width)| match column {
                0 => format!("|-{}-", "-".repeat(width)),
                _ => format!("|-{}:", "-".repeat(width)),
            });
            text.push_str(&format!("{}|\n", rules.collect::<String>()));
        }
    }
    text
}
