//! What is measured: one step of a region's life, taken our way or the stock way. Both ways run the
//! same code here; they differ only behind [`Shared`].

#![allow(unsafe_code)] // copies to and from the mappings

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ec_shared_region::wait::never_stop;
use ec_shared_region::{EngineId, Geometry, Mode, Populate, Region, Spec};

use super::place::Place;
use super::stock::Stock;

/// A pass copies in pieces that stay in the cache, so that the mapping is the only memory it waits for.
const PIECE_BYTES: usize = 256 << 10;
/// Divides every size that is measured.
const BLOCK_BYTES: usize = 4096;

/// One row of the tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Make the file and have every page of it mapped.
    Create,
    /// Open an existing region.
    Join,
    /// The first pass that writes every byte through a joiner's mapping.
    FirstWrite,
    /// The same where our joiner was opened with [`Populate::Join`]; opening is not timed.
    FirstWriteAhead,
    /// The same with opening timed: what mapping ahead costs and saves together.
    JoinAheadAndFirstWrite,
    /// Copy every byte out of a mapping that is in use.
    Read,
    /// Copy every byte into a mapping that is in use.
    Write,
    /// Let go as the creator and last holder: the pages are freed.
    CleanupCreator,
    /// Let go as a joiner that used every page.
    CleanupJoiner,
}

impl Step {
    pub const ALL: [Self; 9] = [
        Self::Create,
        Self::Join,
        Self::FirstWrite,
        Self::FirstWriteAhead,
        Self::JoinAheadAndFirstWrite,
        Self::Read,
        Self::Write,
        Self::CleanupCreator,
        Self::CleanupJoiner,
    ];

    /// Does a sample take memory that was free before?
    fn takes_memory(self) -> bool {
        matches!(self, Self::Create | Self::CleanupCreator)
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Create => "create and populate",
            Self::Join => "join",
            Self::FirstWrite => "first write pass",
            Self::FirstWriteAhead => "first write pass, populate=join",
            Self::JoinAheadAndFirstWrite => "join and first write pass, populate=join",
            Self::Read => "read pass",
            Self::Write => "write pass",
            Self::CleanupCreator => "cleanup, creator",
            Self::CleanupJoiner => "cleanup, joiner",
        })
    }
}

/// A way to share memory. Dropping is the way's cleanup.
pub trait Shared: Sized {
    const WAY: &'static str;

    fn create(directory: &Path, len_bytes: usize) -> Self;
    /// `populate` is a wish: the stock way has nothing to map ahead with.
    fn join(directory: &Path, len_bytes: usize, populate: Populate) -> Self;
    /// The start of the mapping, which has the bytes that were asked for.
    fn as_ptr(&self) -> *mut u8;
}

impl Shared for Region {
    const WAY: &'static str = "ours";

    fn create(directory: &Path, len_bytes: usize) -> Self {
        open(directory, len_bytes, Mode::Create, Populate::Create)
    }

    fn join(directory: &Path, len_bytes: usize, populate: Populate) -> Self {
        open(directory, len_bytes, Mode::Join, populate)
    }

    fn as_ptr(&self) -> *mut u8 {
        self.mapping().expect("the region is open").as_ptr()
    }
}

fn open(directory: &Path, len_bytes: usize, mode: Mode, populate: Populate) -> Region {
    let id = EngineId::new("bench").expect("the id is valid");
    let geometry = Geometry::new((len_bytes / BLOCK_BYTES) as u64, BLOCK_BYTES as u64).expect("the size is valid");
    let spec = Spec {
        mode,
        populate,
        ..Spec::new(id, geometry)
    };
    let (region, _report) = Region::open_in(directory, &spec, &mut never_stop()).expect("the region opens");
    region
}

impl Shared for Stock {
    const WAY: &'static str = "stock";

    fn create(directory: &Path, len_bytes: usize) -> Self {
        Self::create(&directory.join("stock.mmap"), len_bytes).expect("the stock way creates")
    }

    fn join(directory: &Path, len_bytes: usize, _: Populate) -> Self {
        Self::join(&directory.join("stock.mmap"), len_bytes).expect("the stock way joins")
    }

    fn as_ptr(&self) -> *mut u8 {
        self.as_ptr()
    }
}

/// One step at one size, one way, with what must stand before it.
pub struct Case<'p, S: Shared> {
    step: Step,
    len_bytes: usize,
    place: &'p Place,
    directory: PathBuf,
    /// The region that joiners join, or that passes run over.
    standing: Option<S>,
    /// What a pass reads from, or a copy of which it writes to.
    scratch: Vec<u8>,
}

impl<'p, S: Shared> Case<'p, S> {
    pub fn new(place: &'p Place, step: Step, len_bytes: usize) -> Self {
        Self {
            step,
            len_bytes,
            place,
            directory: place.subdirectory(S::WAY).expect("a directory can be made"),
            standing: None,
            scratch: vec![1; PIECE_BYTES.min(len_bytes)],
        }
    }

    /// To be called before a run of samples: warms the memory that they take, see [`Place::warm`], or
    /// makes the region that they use.
    pub fn prepare(&mut self) {
        self.clear();
        if self.step.takes_memory() {
            self.place.warm(self.len_bytes).expect("memory can be warmed");
        } else {
            self.standing = Some(S::create(&self.directory, self.len_bytes));
        }
    }

    /// Gives back what [`Case::prepare`] made.
    pub fn clear(&mut self) {
        self.standing = None;
    }

    /// Takes the step once. What it needs before and after is not timed.
    pub fn sample(&self) -> Duration {
        match self.step {
            Step::Create => timed(|| S::create(&self.directory, self.len_bytes)),
            Step::Join => timed(|| self.join(Populate::Create)),
            Step::FirstWrite => {
                let joined = self.join(Populate::Create);
                timed(|| self.write_pass(&joined))
            }
            Step::FirstWriteAhead => {
                let joined = self.join(Populate::Join);
                timed(|| self.write_pass(&joined))
            }
            Step::JoinAheadAndFirstWrite => timed(|| {
                let joined = self.join(Populate::Join);
                self.write_pass(&joined);
                joined
            }),
            Step::Read => {
                let mut scratch = self.scratch.clone();
                timed(|| self.read_pass(self.standing(), &mut scratch))
            }
            Step::Write => timed(|| self.write_pass(self.standing())),
            Step::CleanupCreator => {
                let created = S::create(&self.directory, self.len_bytes);
                timed(|| drop(created))
            }
            Step::CleanupJoiner => {
                let joined = self.join(Populate::Create);
                self.write_pass(&joined);
                timed(|| drop(joined))
            }
        }
    }

    fn join(&self, populate: Populate) -> S {
        S::join(&self.directory, self.len_bytes, populate)
    }

    fn standing(&self) -> &S {
        self.standing.as_ref().expect("the case is prepared")
    }

    fn write_pass(&self, region: &S) {
        for offset in (0..self.len_bytes).step_by(self.scratch.len()) {
            let len = self.scratch.len().min(self.len_bytes - offset);
            // SAFETY: every region of this case has `len_bytes` bytes and is borrowed, so it is mapped;
            // the scratch is private memory, and no other thread or process uses the mapping.
            unsafe {
                region
                    .as_ptr()
                    .add(offset)
                    .copy_from_nonoverlapping(self.scratch.as_ptr(), len)
            };
        }
    }

    fn read_pass(&self, region: &S, scratch: &mut [u8]) {
        for offset in (0..self.len_bytes).step_by(scratch.len()) {
            let len = scratch.len().min(self.len_bytes - offset);
            // SAFETY: as in `write_pass`.
            unsafe {
                region
                    .as_ptr()
                    .add(offset)
                    .copy_to_nonoverlapping(scratch.as_mut_ptr(), len)
            };
            std::hint::black_box(&mut *scratch);
        }
    }
}

/// The result is dropped after the clock has stopped.
fn timed<T>(work: impl FnOnce() -> T) -> Duration {
    let began = Instant::now();
    let result = std::hint::black_box(work());
    let elapsed = began.elapsed();
    drop(result);
    elapsed
}
