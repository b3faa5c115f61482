//! From a mapped file to pages that are there: reserved (so that no later touch can fail) and mapped ahead (so that
//! no later touch is slow). In pieces, by several threads, with a look at the caller's wishes between them.
//!
//! The ladder, best rung first ([`Tier`]): huge pages of the mount, huge pages by collapsing, base pages. A thread
//! that finds its rung refused or slow puts all of them on the one below. `docs/performance.md` has the measurements.

#![allow(unsafe_code)] // helper threads borrow from the thread that waits for them

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::directory::Directory;
use crate::error::{Error, Result};
use crate::fork::{Process, Unshared};
use crate::huge;
use crate::mapping::{Mapping, page_bytes};
use crate::reserve::{Fault, MOST_INTERRUPTIONS, reserve};
use crate::signals::without_signals;
use crate::spec::{HugePages, Spec};
use crate::step::{Step, reached};
use crate::wait::Waiter;

/// About 10 ms of work for one thread: Ctrl-C is noticed between pieces.
const PIECE_BYTES: usize = 16 << 20;
/// The last pieces: threads end together.
const SMALLEST_PIECE_BYTES: usize = 2 << 20;
/// A thread must have this much to do, or starting it costs more than it brings.
const BYTES_PER_THREAD: usize = 32 << 20;
/// More of them wait for each other in the kernel.
const MOST_THREADS: usize = 4;

/// Huge pages are slow below this rate of one thread, and base pages are tried beside them: 1 GiB/s, in bytes per second.
const SLOW_RATE: u64 = 1 << 30;
/// Compaction may take this long before the first look at the rate.
const FIRST_LOOK: Duration = Duration::from_millis(50);
/// Memory that the host has to find first comes at 0.4 GiB/s, in whatever pages, and a few base pages that were used
/// before come at 3: only what is slower by more than this is left without a sign of compaction.
const COLD_FACTOR: u64 = 16;
/// So many pieces in a row without a huge page: there are none to be had.
const MOST_REFUSALS: u32 = 2;

/// How pages are mapped ahead.
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

/// The rung of the ladder that was reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// Nothing was placed.
    None,
    /// Base pages only.
    Base,
    /// Huge pages, by `MADV_COLLAPSE`.
    Collapse,
    /// Huge pages, by the mount's own option (`huge=`).
    Mount,
}

impl Tier {
    const ALL: [Self; 4] = [Self::None, Self::Base, Self::Collapse, Self::Mount];
}

/// Why the ladder ended below the top.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fallback {
    /// `huge_pages="off"`.
    NotWanted,
    /// The region is smaller than a huge page.
    TooSmall { huge_page_bytes: usize },
    /// The kernel has no huge pages.
    NoSupport,
    /// The kernel refused: it is older than 6.1, or denies huge pages to shared memory, or has none free.
    Refused { errno: i32 },
    /// Huge pages came much more slowly than base pages.
    Slow { bytes_per_second: u64 },
}

impl std::fmt::Display for Fallback {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Self::NotWanted => f.write_str("huge pages are switched off"),
            Self::TooSmall { huge_page_bytes } => {
                write!(f, "the region is smaller than a huge page of {huge_page_bytes} bytes")
            }
            Self::NoSupport => f.write_str("the kernel has no huge pages"),
            Self::Refused { errno } => write!(
                f,
                "the kernel gives no huge pages to shared memory: {}",
                io::Error::from_raw_os_error(errno)
            ),
            Self::Slow { bytes_per_second } => write!(
                f,
                "huge pages came more slowly than base pages, {} MiB/s",
                bytes_per_second >> 20
            ),
        }
    }
}

/// What preparing a region took, and what came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefaultReport {
    /// The rung that was reached.
    pub tier: Tier,
    pub method: Method,
    /// Bytes that huge pages map in this process, and the rest of what was mapped ahead.
    pub huge_bytes: u64,
    pub base_bytes: u64,
    /// Threads that worked, the calling one among them.
    pub threads: usize,
    pub elapsed: Duration,
    pub fallback: Option<Fallback>,
}

impl PrefaultReport {
    /// Nothing was mapped ahead; `elapsed` went into reserving.
    #[must_use]
    pub fn reserved(elapsed: Duration) -> Self {
        Self {
            tier: Tier::None,
            method: Method::None,
            huge_bytes: 0,
            base_bytes: 0,
            threads: 1,
            elapsed,
            fallback: None,
        }
    }
}

/// What is to be prepared, and who is told of errors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Site<'a> {
    pub(crate) mapping: &'a Mapping,
    pub(crate) file: &'a Unshared,
    pub(crate) directory: &'a Directory,
    pub(crate) path: &'a Path,
}

/// The creator's: puts a page behind every byte and maps it for writing.
///
/// # Errors
/// [`Error::NoSpace`], [`Error::NoHugePages`], [`Error::Interrupted`], [`Error::Os`]. Pages placed until then stay
/// with the file.
pub(crate) fn place(site: Site<'_>, spec: &Spec, waiter: &mut Waiter<'_, '_>) -> Result<PrefaultReport> {
    let total = site.mapping.len_bytes();
    let ladder = Ladder::choose(spec.huge_pages, total, || {
        huge::mount_gives_huge_pages(site.directory.device)
    });
    let crew = Crew::new(site, Access::Write, ladder);
    let began = Instant::now();
    let threads = crew.work(threads_for(total, spec), waiter)?;
    let report = crew.report(threads, began.elapsed());
    let wanted_bytes = (total - total % ladder.huge_page_bytes.unwrap_or(1)) as u64;
    if spec.huge_pages == HugePages::Require && (wanted_bytes == 0 || report.huge_bytes < wanted_bytes) {
        return Err(Error::NoHugePages {
            path: site.path.to_owned(),
            wanted_bytes,
            huge_bytes: report.huge_bytes,
            reason: report.fallback.map_or_else(
                || String::from("the kernel has none free"),
                |fallback| fallback.to_string(),
            ),
        });
    }
    Ok(report)
}

/// The creator's, where nothing is to be mapped ahead: sets every page aside.
///
/// # Errors
/// [`Error::NoSpace`], [`Error::Interrupted`], [`Error::Os`]. Pages placed until then stay with the file.
pub(crate) fn set_aside(site: Site<'_>, waiter: &mut Waiter<'_, '_>) -> Result<PrefaultReport> {
    let total = site.mapping.len_bytes();
    let began = Instant::now();
    // There `fallocate` would put a huge page behind the tail, beyond the end of the file.
    let tail_bytes = match huge::huge_page_bytes() {
        Some(huge_page_bytes) if huge::mount_gives_huge_pages(site.directory.device) => total % huge_page_bytes,
        Some(_) | None => 0,
    };
    let whole_bytes = total - tail_bytes;
    let placed = reserve(site.file, 0..whole_bytes, &mut |done_bytes| {
        waiter.checkpoint().map_err(Fault::Stop)?;
        waiter.progress(done_bytes, total).map_err(Fault::Stop)
    })
    .and_then(|()| {
        if tail_bytes == 0 {
            return Ok(());
        }
        let _ = site.mapping.want_huge_pages(whole_bytes..total, false);
        let crew = Crew::new(site, Access::Write, Ladder::base_pages());
        crew.populate(whole_bytes..total, &mut || waiter.checkpoint().map_err(Fault::Stop))
    });
    placed.map_err(|fault| fault.into_error(total, site.directory, site.path))?;
    waiter.progress(total, total)?;
    Ok(PrefaultReport::reserved(began.elapsed()))
}

/// A joiner's: maps the pages that are there. Reading does not write to them, and a shared mapping of tmpfs needs no
/// second fault to be written.
///
/// # Errors
/// [`Error::Interrupted`], [`Error::Os`].
pub(crate) fn map_existing(site: Site<'_>, spec: &Spec, waiter: &mut Waiter<'_, '_>) -> Result<PrefaultReport> {
    let ladder = Ladder {
        tier: Tier::None,
        huge_page_bytes: huge::huge_page_bytes(),
        fallback: None,
        reserves: false,
        may_fall: true,
    };
    let crew = Crew::new(site, Access::Read, ladder);
    let began = Instant::now();
    let threads = crew.work(threads_for(site.mapping.len_bytes(), spec), waiter)?;
    Ok(crew.report(threads, began.elapsed()))
}

fn threads_for(total_bytes: usize, spec: &Spec) -> usize {
    spec.threads.map_or_else(
        || {
            // Knows of the affinity mask and of the control group's quota.
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            cores.min(MOST_THREADS).min(total_bytes / BYTES_PER_THREAD).max(1)
        },
        usize::from,
    )
}

/// Where to begin, and on what.
#[derive(Debug, Clone, Copy)]
struct Ladder {
    tier: Tier,
    huge_page_bytes: Option<usize>,
    fallback: Option<Fallback>,
    /// `fallocate` gives base pages here. With `huge=always` and `huge=within_size` it gives huge ones, the last of them
    /// beyond the end of the file; there, only faults can be told not to.
    reserves: bool,
    /// Slow huge pages may be left for base pages.
    may_fall: bool,
}

impl Ladder {
    /// By faults alone.
    fn base_pages() -> Self {
        Self {
            tier: Tier::Base,
            huge_page_bytes: None,
            fallback: None,
            reserves: false,
            may_fall: true,
        }
    }

    fn choose(wish: HugePages, total_bytes: usize, mount_gives: impl FnOnce() -> bool) -> Self {
        let huge_page_bytes = huge::huge_page_bytes();
        let is_too_small = huge_page_bytes.is_some_and(|huge_page_bytes| total_bytes < huge_page_bytes);
        // A look at all mounts, saved where nothing depends on it: so little is quickly placed by faults.
        let mount_gives = huge_page_bytes.is_some() && !is_too_small && mount_gives();
        let (tier, fallback) = match huge_page_bytes {
            _ if wish == HugePages::Off => (Tier::Base, Some(Fallback::NotWanted)),
            None => (Tier::Base, Some(Fallback::NoSupport)),
            Some(huge_page_bytes) if is_too_small => (Tier::Base, Some(Fallback::TooSmall { huge_page_bytes })),
            Some(_) if mount_gives => (Tier::Mount, None),
            Some(_) => (Tier::Collapse, None),
        };
        Self {
            tier,
            huge_page_bytes,
            fallback,
            reserves: !mount_gives && !is_too_small,
            may_fall: wish == HugePages::Auto,
        }
    }
}

/// What a touch is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    /// Pages are put behind every byte.
    Write,
    /// All pages are there.
    Read,
}

type Outcome = std::result::Result<(), Fault>;
/// Asked between pieces.
type GoOn<'a> = dyn FnMut() -> Outcome + 'a;

/// The threads that prepare one region, and what they know together.
struct Crew<'a> {
    site: Site<'a>,
    access: Access,
    first_tier: Tier,
    reserves: bool,
    huge_page_bytes: usize,
    /// Pieces are a multiple of it: no huge page is shared by two.
    grain_bytes: usize,
    /// The whole huge pages of the region; what is behind them stays in base pages, so that it grows no larger.
    whole_bytes: usize,
    threads: AtomicUsize,
    /// Everything before it is taken.
    next: AtomicUsize,
    done_bytes: AtomicUsize,
    is_stopped: AtomicBool,
    /// An index into [`Tier::ALL`].
    tier: AtomicUsize,
    /// The kernel does not know how to populate.
    is_touching: AtomicBool,
    fallback: Mutex<Option<Fallback>>,
    /// Pieces in a row for which there was no huge page.
    refusals: AtomicU32,
    /// Leaving huge pages for being slow is allowed.
    may_fall: bool,
    // What huge pages took, in all threads, and when to look at their rate next.
    huge_done_bytes: AtomicU64,
    huge_nanos: AtomicU64,
    next_look_nanos: AtomicU64,
    /// The rate of the fastest call since the last look: that one was disturbed least.
    best_huge_rate: AtomicU64,
    /// [`huge::memory_stalls`] at the last look; `UNKNOWN` before it.
    stalls: AtomicU64,
}

const UNKNOWN: u64 = u64::MAX;

/// What one thread remembers.
struct Hand {
    /// Huge pages to ask for by one call: many only while they come fast, so that none takes long.
    stride: usize,
    /// Huge pages are slow: the next extent is to be put in base pages, to see whether they are faster.
    compares: Option<Stalled>,
}

/// Did the kernel have to compact or reclaim memory, as far as it tells?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stalled(bool);

impl<'a> Crew<'a> {
    fn new(site: Site<'a>, access: Access, ladder: Ladder) -> Self {
        let total = site.mapping.len_bytes();
        let huge_page_bytes = ladder.huge_page_bytes.unwrap_or(PIECE_BYTES);
        Self {
            site,
            access,
            first_tier: ladder.tier,
            reserves: ladder.reserves,
            may_fall: ladder.may_fall,
            huge_page_bytes,
            grain_bytes: if ladder.tier > Tier::Base {
                huge_page_bytes
            } else {
                SMALLEST_PIECE_BYTES
            },
            whole_bytes: total - total % huge_page_bytes,
            threads: AtomicUsize::new(1),
            next: AtomicUsize::new(0),
            done_bytes: AtomicUsize::new(0),
            is_stopped: AtomicBool::new(false),
            tier: AtomicUsize::new(ladder.tier as usize),
            is_touching: AtomicBool::new(false),
            fallback: Mutex::new(ladder.fallback),
            refusals: AtomicU32::new(0),
            huge_done_bytes: AtomicU64::new(0),
            huge_nanos: AtomicU64::new(0),
            next_look_nanos: AtomicU64::new(nanos(FIRST_LOOK)),
            best_huge_rate: AtomicU64::new(0),
            stalls: AtomicU64::new(UNKNOWN),
        }
    }

    /// Does all of the work, and says how many threads did it.
    fn work(&self, threads: usize, waiter: &mut Waiter<'_, '_>) -> Result<usize> {
        let total = self.site.mapping.len_bytes();
        self.advise();
        let mut helpers = Helpers::new(self);
        helpers.start(threads - 1);
        let threads = 1 + helpers.len();
        let mut outcome = self.run(&mut || {
            waiter.checkpoint().map_err(Fault::Stop)?;
            waiter
                .progress(self.done_bytes.load(Relaxed), total)
                .map_err(Fault::Stop)?;
            self.go_on()
        });
        if outcome.is_err() {
            self.is_stopped.store(true, Relaxed);
        }
        if let Err(fault) = helpers.join() {
            // The thread that met the fault knows more than those that were stopped for it.
            if matches!(outcome, Ok(()) | Err(Fault::Stop(Error::Interrupted))) {
                outcome = Err(fault);
            }
        }
        let site = self.site;
        outcome.map_err(|fault| fault.into_error(total, site.directory, site.path))?;
        waiter.progress(total, total)?;
        Ok(threads)
    }

    fn go_on(&self) -> Outcome {
        if self.is_stopped.load(Relaxed) {
            Err(Fault::Stop(Error::Interrupted))
        } else {
            Ok(())
        }
    }

    /// What every thread does: piece after piece.
    fn run(&self, go_on: &mut GoOn<'_>) -> Outcome {
        let mut hand = Hand {
            stride: 1,
            compares: None,
        };
        while let Some(piece) = self.take() {
            let len = piece.len();
            self.prepare(piece, &mut hand, go_on)?;
            self.done_bytes.fetch_add(len, Relaxed);
        }
        go_on()
    }

    /// The next piece: smaller towards the end, so that no thread waits long for another.
    fn take(&self) -> Option<Range<usize>> {
        let total = self.site.mapping.len_bytes();
        let mut taken = 0..0;
        self.next
            .fetch_update(Relaxed, Relaxed, |start| {
                let share = (total - start) / (4 * self.threads.load(Relaxed));
                let len = share.clamp(1, PIECE_BYTES).next_multiple_of(self.grain_bytes);
                taken = start..total.min(start + len);
                (start < total).then_some(taken.end)
            })
            .ok()
            .map(|_| taken)
    }

    fn tier(&self) -> Tier {
        Tier::ALL.get(self.tier.load(Relaxed)).copied().unwrap_or(Tier::None)
    }

    /// Puts every thread on base pages.
    fn fall(&self, why: Fallback) {
        if self.tier.swap(Tier::Base as usize, Relaxed) == Tier::Mount as usize {
            let _ = self.site.mapping.want_huge_pages(0..self.whole_bytes, false);
        }
        *self.fallback.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
    }

    /// Tells the kernel where it may put huge pages of the mount.
    fn advise(&self) {
        let (mapping, total) = (self.site.mapping, self.site.mapping.len_bytes());
        let base_pages_from = match self.first_tier {
            Tier::Mount => match mapping.want_huge_pages(0..self.whole_bytes, true) {
                Ok(()) => self.whole_bytes,
                Err(error) => {
                    self.fall(Fallback::Refused {
                        errno: error.raw_os_error().unwrap_or(0),
                    });
                    0
                }
            },
            Tier::Base if !self.reserves => 0,
            Tier::None | Tier::Base | Tier::Collapse => total,
        };
        if base_pages_from < total {
            let _ = mapping.want_huge_pages(base_pages_from..total, false);
        }
    }

    fn prepare(&self, mut piece: Range<usize>, hand: &mut Hand, go_on: &mut GoOn<'_>) -> Outcome {
        if let Some(stalled) = hand.compares.take()
            && self.tier() > Tier::Base
        {
            let extent = piece.start..piece.end.min(piece.start + self.huge_page_bytes);
            piece.start = extent.end;
            self.compare(extent, stalled, go_on)?;
        }
        match self.tier() {
            Tier::None => self.populate(piece, go_on),
            Tier::Base => {
                if self.reserves {
                    self.reserve(piece.clone(), go_on)?;
                }
                self.populate(piece, go_on)
            }
            Tier::Collapse => {
                self.collapse(piece.clone(), hand, go_on)?;
                self.populate(piece, go_on) // repairs what did not collapse, and maps the tail
            }
            // Not reserved first: with `huge=advise` that would fill it with base pages.
            Tier::Mount => {
                let (began, len) = (Instant::now(), piece.len());
                self.populate(piece, go_on)?;
                self.look_at_the_rate(len, began.elapsed(), hand);
                Ok(())
            }
        }
    }

    /// One page for each extent, then the kernel puts a huge page in its place, zeroed but for that one.
    fn collapse(&self, piece: Range<usize>, hand: &mut Hand, go_on: &mut GoOn<'_>) -> Outcome {
        let whole_end = piece.end.min(self.whole_bytes).max(piece.start);
        for seed in (piece.start..whole_end).step_by(self.huge_page_bytes) {
            self.reserve(seed..seed + page_bytes(), go_on)?;
        }
        let mut at = piece.start;
        while at < whole_end && self.tier() == Tier::Collapse {
            go_on()?;
            reached(Step::Collapse);
            let end = whole_end.min(at + hand.stride * self.huge_page_bytes);
            let began = Instant::now();
            match self.site.mapping.collapse(at..end) {
                Ok(()) => {
                    self.refusals.store(0, Relaxed);
                    self.look_at_the_rate(end - at, began.elapsed(), hand);
                }
                Err(error) => self.refused(&error),
            }
            at = end;
        }
        if self.tier() == Tier::Base {
            self.reserve(at..whole_end, go_on)?;
        }
        self.reserve(whole_end..piece.end, go_on)
    }

    fn refused(&self, error: &io::Error) {
        let errno = error.raw_os_error().unwrap_or(0);
        // A kernel that does not know the advice, or denies it, will say the same again.
        let is_final = errno == Errno::EINVAL as i32 || errno == Errno::EPERM as i32 || errno == Errno::ENOSYS as i32;
        if is_final || self.refusals.fetch_add(1, Relaxed) + 1 >= MOST_REFUSALS {
            self.fall(Fallback::Refused { errno });
        }
    }

    fn look_at_the_rate(&self, bytes: usize, took: Duration, hand: &mut Hand) {
        let took = nanos(took);
        let now = rate(bytes as u64, took);
        self.best_huge_rate.fetch_max(now, Relaxed);
        hand.stride = if now < SLOW_RATE {
            1
        } else {
            (hand.stride * 2).min(PIECE_BYTES.div_ceil(self.huge_page_bytes))
        };
        let done = self.huge_done_bytes.fetch_add(bytes as u64, Relaxed) + bytes as u64;
        let spent = self.huge_nanos.fetch_add(took, Relaxed) + took;
        let look = self.next_look_nanos.load(Relaxed);
        if self.may_fall
            && spent >= look
            && rate(done, spent) < SLOW_RATE
            && self
                .next_look_nanos
                .compare_exchange(look, 2 * spent, Relaxed, Relaxed)
                .is_ok()
        {
            let stalls = huge::memory_stalls();
            let before = self.stalls.swap(stalls.unwrap_or(UNKNOWN), Relaxed);
            hand.compares = Some(Stalled(
                stalls.is_none_or(|stalls| before != UNKNOWN && stalls > before),
            ));
        }
    }

    /// Are base pages faster? Then they are taken for the rest. Slow huge pages without a stall are mostly memory that
    /// the host has to find first, which base pages soon meet as well: they must be much faster.
    fn compare(&self, extent: Range<usize>, stalled: Stalled, go_on: &mut GoOn<'_>) -> Outcome {
        if self.tier() == Tier::Mount {
            let _ = self.site.mapping.want_huge_pages(extent.clone(), false);
        }
        let (began, bytes) = (Instant::now(), extent.len() as u64);
        if self.reserves {
            self.reserve(extent.clone(), go_on)?;
        }
        self.populate(extent, go_on)?;
        let base_rate = rate(bytes, nanos(began.elapsed()));
        let huge_rate = self.best_huge_rate.swap(0, Relaxed);
        let bar = if stalled.0 {
            huge_rate + huge_rate / 2
        } else {
            COLD_FACTOR * huge_rate
        };
        if base_rate > bar {
            self.fall(Fallback::Slow {
                bytes_per_second: huge_rate,
            });
        }
        Ok(())
    }

    fn populate(&self, piece: Range<usize>, go_on: &mut GoOn<'_>) -> Outcome {
        let (mapping, page) = (self.site.mapping, page_bytes());
        let mut interruptions = 0;
        loop {
            go_on()?;
            if self.is_touching.load(Relaxed) {
                return self.touch(piece, page, go_on);
            }
            let populated = match self.access {
                Access::Write => {
                    reached(Step::MapAhead);
                    mapping.populate_write(piece.clone())
                }
                Access::Read => {
                    reached(Step::JoinMapAhead);
                    mapping.populate_read(piece.clone())
                }
            };
            let Err(error) = populated else { return Ok(()) };
            match error.raw_os_error().map(Errno::from_raw) {
                // Only this is what a kernel says that does not know the advice.
                Some(Errno::EINVAL) => self.is_touching.store(true, Relaxed),
                Some(Errno::EINTR | Errno::EAGAIN) if interruptions < MOST_INTERRUPTIONS => interruptions += 1,
                // The bus error that a touch would have met: the filesystem is full, if the file has its size.
                Some(Errno::EFAULT) if self.access == Access::Write && self.has_its_size() => {
                    return Err(Fault::Room(Errno::ENOSPC));
                }
                Some(Errno::ENOMEM) if self.access == Access::Write => return Err(Fault::Room(Errno::ENOMEM)),
                _ => return Err(Fault::Call("madvise", error)),
            }
        }
    }

    fn reserve(&self, range: Range<usize>, go_on: &mut GoOn<'_>) -> Outcome {
        reserve(self.site.file, range, &mut |_| go_on())
    }

    fn touch(&self, piece: Range<usize>, page: usize, go_on: &mut GoOn<'_>) -> Outcome {
        match self.access {
            Access::Write => {
                // A touch that finds no room is a bus error.
                self.reserve(piece.clone(), go_on)?;
                reached(Step::MapAhead);
                self.site.mapping.touch_write(piece, page);
            }
            Access::Read => {
                reached(Step::JoinMapAhead);
                self.site.mapping.touch_read(piece, page);
            }
        }
        Ok(())
    }

    fn has_its_size(&self) -> bool {
        let meta = self.site.file.file().metadata();
        meta.is_ok_and(|meta| meta.len() >= self.site.mapping.len_bytes() as u64)
    }

    fn report(&self, threads: usize, elapsed: Duration) -> PrefaultReport {
        let total = self.site.mapping.len_bytes() as u64;
        // A look at the page tables, saved where no huge page can be.
        let may_be_huge = match self.access {
            Access::Write => self.first_tier > Tier::Base && self.huge_done_bytes.load(Relaxed) > 0,
            Access::Read => self.whole_bytes > 0,
        };
        let huge_bytes = if may_be_huge {
            huge::mapped_huge_bytes(self.site.mapping).unwrap_or(0)
        } else {
            0
        };
        let is_touching = self.is_touching.load(Relaxed);
        PrefaultReport {
            tier: match self.first_tier {
                Tier::Collapse | Tier::Mount if huge_bytes == 0 => Tier::Base,
                first => first,
            },
            method: match (self.access, is_touching) {
                (Access::Write, false) => Method::PopulateWrite,
                (Access::Write, true) => Method::TouchWrite,
                (Access::Read, false) => Method::PopulateRead,
                (Access::Read, true) => Method::TouchRead,
            },
            huge_bytes,
            base_bytes: total.saturating_sub(huge_bytes),
            threads,
            elapsed,
            fallback: *self.fallback.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Bytes per second.
fn rate(bytes: u64, nanos: u64) -> u64 {
    u64::try_from(u128::from(bytes) * 1_000_000_000 / u128::from(nanos.max(1))).unwrap_or(u64::MAX)
}

/// The other threads of a crew. Not `std::thread::scope`: a signal handler that forks in the calling thread makes a
/// child in which they do not exist, and a scope would wait for them for ever.
struct Helpers<'c> {
    crew: &'c Crew<'c>,
    process: Process,
    handles: Vec<JoinHandle<Outcome>>,
}

/// The crew's address, for a thread that ends before the crew does.
struct Shared(*const Crew<'static>);

// SAFETY: a crew is made of atomics, a mutex, and references to what any thread may use.
unsafe impl Send for Shared {}

impl<'c> Helpers<'c> {
    fn new(crew: &'c Crew<'c>) -> Self {
        Self {
            crew,
            process: Process::current(),
            handles: Vec::new(),
        }
    }

    fn len(&self) -> usize {
        self.handles.len()
    }

    fn start(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        without_signals(|| {
            for _ in 0..count {
                let shared = Shared(std::ptr::from_ref(self.crew).cast());
                let work = move || {
                    let shared = shared;
                    // SAFETY: `join`, which runs before the crew goes, also by a panic, waits for this thread.
                    let crew = unsafe { &*shared.0 };
                    let outcome = crew.run(&mut || crew.go_on());
                    if outcome.is_err() {
                        crew.is_stopped.store(true, Relaxed);
                    }
                    outcome
                };
                match std::thread::Builder::new().name("ec-prefault".into()).spawn(work) {
                    Ok(handle) => self.handles.push(handle),
                    Err(_) => break, // no more threads to be had: fewer do the work
                }
            }
        });
        self.crew.threads.store(1 + self.handles.len(), Relaxed);
    }

    /// Waits for all of them. The first fault that one met; being stopped is none.
    fn join(&mut self) -> Outcome {
        let mut outcome = Ok(());
        for handle in self.handles.drain(..) {
            if !self.process.is_current() {
                std::mem::forget(handle); // in the child of a fork there is no such thread
                continue;
            }
            // A panic is a fault like others here: to unwind would leave those that are not waited for yet with a
            // crew that is gone, and cross into the caller's language.
            let ended = handle.join().unwrap_or_else(|_| {
                self.crew.is_stopped.store(true, Relaxed);
                let panicked = io::Error::other("a thread that prepares the region panicked");
                Err(Fault::Call("prefault", panicked))
            });
            match ended {
                Err(fault) if outcome.is_ok() && !matches!(fault, Fault::Stop(_)) => outcome = Err(fault),
                Ok(()) | Err(_) => {}
            }
        }
        outcome
    }
}

impl Drop for Helpers<'_> {
    fn drop(&mut self) {
        self.crew.is_stopped.store(true, Relaxed);
        let _ = self.join();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{EngineId, Geometry};
    use crate::wait::never_stop;
    use proptest::prelude::*;
    use std::num::NonZeroUsize;
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::MetadataExt;

    const COLLAPSING: Ladder = Ladder {
        tier: Tier::Collapse,
        huge_page_bytes: Some(2 << 20),
        fallback: None,
        reserves: true,
        may_fall: true,
    };

    struct Place {
        directory: Directory,
        file: Unshared,
        mapping: Mapping,
        spec: Spec,
    }

    impl Place {
        fn new(total: usize) -> Self {
            let file = tempfile::tempfile_in("/dev/shm").unwrap();
            file.set_len(total as u64).unwrap();
            let align = huge::huge_page_bytes().unwrap_or(page_bytes());
            let mapping = Mapping::new(&file, total, align).unwrap();
            Self {
                directory: Directory::open(Path::new("/dev/shm")).unwrap(),
                file: Unshared::from(OwnedFd::from(file)),
                mapping,
                spec: Spec::new(EngineId::new("x").unwrap(), Geometry::new(1, total as u64).unwrap()),
            }
        }

        fn site(&self) -> Site<'_> {
            Site {
                mapping: &self.mapping,
                file: &self.file,
                directory: &self.directory,
                path: Path::new("x"),
            }
        }

        fn allocated(&self) -> u64 {
            self.file.file().metadata().unwrap().blocks() * 512
        }
    }

    #[test]
    fn every_wish_and_number_of_threads_backs_every_page_and_not_one_more() {
        let huge_page = huge::huge_page_bytes()
            .filter(|&bytes| bytes <= 4 << 20)
            .unwrap_or(2 << 20);
        for total in [1, huge_page - 1, 2 * huge_page, 9 * huge_page + 7169] {
            for wish in [HugePages::Auto, HugePages::Off] {
                for threads in [1, 3] {
                    let mut place = Place::new(total);
                    place.spec.huge_pages = wish;
                    place.spec.threads = NonZeroUsize::new(threads);
                    let mut go_on = never_stop();
                    let mut waiter = Waiter::new(Duration::ZERO, &mut go_on);
                    let report = super::place(place.site(), &place.spec, &mut waiter).unwrap();
                    assert_eq!(
                        place.allocated(),
                        total.next_multiple_of(page_bytes()) as u64,
                        "{report:?}"
                    );
                    assert_eq!(report.huge_bytes + report.base_bytes, total as u64, "{report:?}");
                    assert_eq!(report.threads, threads);
                    assert_eq!(report.huge_bytes > 0, report.tier > Tier::Base, "{report:?}");
                    if wish == HugePages::Off {
                        assert_eq!((report.tier, report.fallback), (Tier::Base, Some(Fallback::NotWanted)));
                    }
                    let report = map_existing(place.site(), &place.spec, &mut waiter).unwrap();
                    assert!(matches!(report.method, Method::PopulateRead | Method::TouchRead));
                }
            }
        }
    }

    #[test]
    fn who_wants_to_stop_stops_every_thread() {
        let mut place = Place::new(64 << 20);
        place.spec.threads = NonZeroUsize::new(3);
        let mut asked = 0;
        let mut stop = || {
            asked += 1;
            if asked > 2 {
                std::ops::ControlFlow::Break(())
            } else {
                std::ops::ControlFlow::Continue(())
            }
        };
        let stopped = super::place(place.site(), &place.spec, &mut Waiter::new(Duration::ZERO, &mut stop));
        assert!(matches!(stopped, Err(Error::Interrupted)), "{stopped:?}");
    }

    #[test]
    fn a_region_below_a_huge_page_cannot_require_one() {
        let mut place = Place::new(page_bytes());
        place.spec.huge_pages = HugePages::Require;
        let mut go_on = never_stop();
        let refused = super::place(place.site(), &place.spec, &mut Waiter::new(Duration::ZERO, &mut go_on));
        assert!(matches!(refused, Err(Error::NoHugePages { .. })), "{refused:?}");
    }

    #[test]
    fn slow_huge_pages_are_left_where_base_pages_are_faster() {
        let place = Place::new(64 << 20);
        let crew = Crew::new(place.site(), Access::Write, COLLAPSING);
        let mut hand = Hand {
            stride: 4,
            compares: None,
        };
        crew.look_at_the_rate(2 << 30, Duration::from_secs(1), &mut hand);
        assert_eq!((hand.stride, hand.compares), (8, None));
        crew.best_huge_rate.store(0, Relaxed);
        crew.look_at_the_rate(2 << 20, Duration::from_secs(60), &mut hand);
        assert_eq!((hand.stride, hand.compares.is_some()), (1, true));
        crew.prepare(0..2 << 20, &mut hand, &mut || Ok(())).unwrap();
        assert_eq!(crew.tier(), Tier::Base);
        assert!(matches!(*crew.fallback.lock().unwrap(), Some(Fallback::Slow { .. })));
    }

    #[test]
    fn refusals_end_the_rung() {
        let place = Place::new(64 << 20);
        let crew = Crew::new(place.site(), Access::Write, COLLAPSING);
        let refusal = |errno: Errno| io::Error::from_raw_os_error(errno as i32);
        crew.refused(&refusal(Errno::ENOMEM));
        assert_eq!(crew.tier(), Tier::Collapse);
        crew.refused(&refusal(Errno::ENOMEM));
        assert_eq!(crew.tier(), Tier::Base);
        let crew = Crew::new(place.site(), Access::Write, COLLAPSING);
        crew.refused(&refusal(Errno::EINVAL));
        assert_eq!(crew.tier(), Tier::Base);
    }

    proptest! {
        #[test]
        fn pieces_tile_the_whole(total in 1usize..(200 << 20), threads in 1usize..6) {
            let place = Place::new(total);
            let crew = Crew::new(place.site(), Access::Write, COLLAPSING);
            crew.threads.store(threads, Relaxed);
            let mut end = 0;
            while let Some(piece) = crew.take() {
                prop_assert_eq!(piece.start, end);
                prop_assert!(!piece.is_empty() && piece.len() <= PIECE_BYTES);
                // No huge page is shared by two pieces.
                prop_assert!(piece.end == total || piece.end % (2 << 20) == 0);
                end = piece.end;
            }
            prop_assert_eq!(end, total);
        }
    }
}
