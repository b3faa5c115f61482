//! The worker: the same test binary in another process, with at most one region, which does what it is told.

#![allow(unsafe_code)] // reads and writes bytes of the mapping, as a user of the raw pointer does

use std::fs::{self, File};
use std::io::BufRead;
use std::ops::ControlFlow;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ec_shared_region::error::Warning;
use ec_shared_region::mapping::page_bytes;
use ec_shared_region::pin::{HostRegistrar, Refusal};
use ec_shared_region::region::kept_mappings;
use ec_shared_region::spec::Numa;
use ec_shared_region::wait::{Host, never_stop};
use ec_shared_region::{EngineId, Error, Geometry, Region, Role, Spec};
use nix::libc;

/// Marks an answer among the lines that the test harness prints.
pub const ANSWER: &str = "@@@ ";
/// The variable that makes a process a worker, and says where.
pub const DIRECTORY: &str = "EC_TEST_WORKER_DIRECTORY";

#[derive(Default)]
pub struct Worker {
    directory: PathBuf,
    region: Option<Region>,
    /// A file that this process made as the original class does: no lock, in place.
    original: Option<(PathBuf, File)>,
    /// What the last constructor warned of.
    warnings: String,
    /// Told `true` right before the core is called, and `false` right after.
    pub around: Option<fn(bool)>,
}

/// Serves commands until the test is gone. Does nothing in a process that is no worker.
pub fn run(mut extra: impl FnMut(&mut Worker, &[&str]) -> Option<String>) {
    let Some(directory) = std::env::var_os(DIRECTORY) else {
        return;
    };
    // A test run that is killed must not leave workers with regions behind, least of all stopped ones.
    // SAFETY: prctl takes integers here.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let mut worker = Worker {
        directory: directory.into(),
        ..Worker::default()
    };
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let answer = extra(&mut worker, &words).unwrap_or_else(|| worker.execute(&words));
        println!("\n{ANSWER}{answer}");
    }
}

/// A spec in words: `id blocks block_size mode populate timeout_ms`, and perhaps `huge=off`, `threads=3` and their like.
pub fn spec(words: &[&str], options: &[&str]) -> Spec {
    let mut spec = Spec {
        mode: words[3].parse().unwrap(),
        populate: words[4].parse().unwrap(),
        timeout: Duration::from_millis(words[5].parse().unwrap()),
        ..Spec::new(
            EngineId::new(words[0]).unwrap(),
            Geometry::new(words[1].parse().unwrap(), words[2].parse().unwrap()).unwrap(),
        )
    };
    for option in options {
        match option.split_once('=').unwrap() {
            ("huge", word) => spec.huge_pages = word.parse().unwrap(),
            ("threads", number) => spec.threads = Some(number.parse().unwrap()),
            ("numa", "interleave") => spec.numa = Numa::Interleave,
            ("numa", node) => spec.numa = Numa::Node(node.parse().unwrap()),
            other => panic!("{other:?}"),
        }
    }
    spec
}

/// `err` and the class of the error, its errno, and its text.
pub fn failure(error: &Error) -> String {
    let debug = format!("{error:?}");
    let class = debug.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
    format!("err {class} {} {error}", error.errno().unwrap_or(0))
}

impl Worker {
    pub fn execute(&mut self, words: &[&str]) -> String {
        match *words {
            ["open", ref rest @ ..] => self.open(rest),
            // Opens, and has the bytes.
            ["use", ref rest @ ..] => match (self.open(rest), self.wait_until_ready()) {
                (opened, ready) if ready == "ok" || opened.starts_with("err") => opened,
                (_, refused) => refused,
            },
            ["ready"] => self.wait_until_ready(),
            ["warnings"] => format!("ok {}", self.warnings),
            ["pin", refuse_at] => self.pin(refuse_at.parse().unwrap()),
            ["unpin"] => match self.region.as_mut().unwrap().unpin() {
                Ok(true) => "ok".into(),
                other => format!("err Unpin 0 {other:?}"),
            },
            ["close"] => self.close(),
            ["fill", byte] => self.fill(byte.parse().unwrap()),
            ["check", byte] => self.check(byte.parse().unwrap()),
            ["original", id] => self.original(id),
            // As a process of the original class that is killed: its file stays.
            ["leave"] => {
                self.original = None;
                "ok".into()
            }
            ["size", bytes] => {
                self.original
                    .as_ref()
                    .unwrap()
                    .1
                    .set_len(bytes.parse().unwrap())
                    .unwrap();
                "ok".into()
            }
            ref other => format!("err Unknown 0 {other:?}"),
        }
    }

    /// The words of a spec, the checkpoint at which the caller wants to stop (0: never), and options; with `pause`
    /// among them the process stops there first, for others to do something.
    pub fn open(&mut self, words: &[&str]) -> String {
        let mut left: usize = words[6].parse().unwrap();
        let mut options = words[7..].to_vec();
        options.retain(|option| *option != "pause");
        let is_pausing = options.len() < words[7..].len();
        let checkpoint = move || {
            left = left.wrapping_sub(1);
            if left > 0 {
                return ControlFlow::Continue(());
            }
            if is_pausing {
                // SAFETY: raise takes an integer.
                unsafe { libc::raise(libc::SIGSTOP) };
            }
            ControlFlow::Break(())
        };
        let spec = spec(words, &options);
        let mut caller = Caller {
            checkpoint,
            warnings: String::new(),
        };
        self.tell(true);
        let opened = Region::open_in(&self.directory, &spec, &mut caller);
        self.tell(false);
        self.warnings = caller.warnings;
        match opened {
            Err(error) => failure(&error),
            Ok((region, _)) => {
                let role = if region.role() == Role::Creator {
                    "creator"
                } else {
                    "joiner"
                };
                let inode = region.file().unwrap().metadata().unwrap().ino();
                self.region = Some(region);
                format!("ok {role} {inode}")
            }
        }
    }

    fn wait_until_ready(&mut self) -> String {
        let Some(mut region) = self.region.take() else {
            return "err Closed 0 there is no region".into();
        };
        self.tell(true);
        let ready = region.wait_until_ready(&mut never_stop());
        self.tell(false);
        self.region = Some(region);
        match ready {
            Ok(()) => "ok".into(),
            Err(error) => failure(&error),
        }
    }

    fn tell(&self, is_before: bool) {
        if let Some(around) = self.around {
            around(is_before);
        }
    }

    fn pin(&mut self, refuse_at: usize) -> String {
        let double = Double {
            refuse_at,
            calls: AtomicUsize::new(0),
        };
        let region = self.region.as_mut().unwrap();
        match region.pin(Box::new(double), 3 * page_bytes()) {
            Ok(Some(report)) => format!("ok {}", report.pieces),
            Ok(None) => "err AlreadyPinned 0".into(),
            Err(error) => format!("err Pin 0 {error}"),
        }
    }

    pub fn close(&mut self) -> String {
        if let Some((path, file)) = self.original.take() {
            let ours = file.metadata().unwrap().ino();
            if path.metadata().is_ok_and(|meta| meta.ino() == ours) {
                fs::remove_file(path).unwrap();
            }
        }
        let Some(mut region) = self.region.take() else {
            return "ok".into();
        };
        self.tell(true);
        let report = region.close();
        self.tell(false);
        if let Some(problem) = report.name_problem {
            return failure(&problem);
        }
        match (REGISTERED.load(Ordering::Relaxed), kept_mappings()) {
            (0, 0) => "ok".into(),
            (registered, kept) => format!("err Kept 0 {registered} pieces registered, {kept} mappings kept"),
        }
    }

    fn fill(&mut self, byte: u8) -> String {
        if let Some((_, file)) = &self.original {
            let len = usize::try_from(file.metadata().unwrap().len()).unwrap();
            file.write_all_at(&vec![byte; len], 0).unwrap();
        }
        if let Some(region) = &self.region {
            let mapping = region.mapping().unwrap();
            // SAFETY: the whole of the mapping, which the region keeps; nobody else writes in these tests.
            unsafe { mapping.as_ptr().write_bytes(byte, mapping.len_bytes()) };
        }
        "ok".into()
    }

    /// Looks at every byte, through the mapping; of an original's file through the file. In a region of ours there
    /// is a page behind each of them before it is touched.
    fn check(&mut self, byte: u8) -> String {
        if let Some(region) = &self.region {
            let allocated = region.file().unwrap().metadata().unwrap().blocks() * 512;
            let wanted = region.geometry().total_bytes() as u64;
            if allocated < wanted {
                return format!("err Check 0 {allocated} of {wanted} bytes are backed");
            }
        }
        let expected = vec![byte; 1 << 20];
        let mut seen = vec![!byte; 1 << 20];
        let original = self.original.as_ref().map(|(_, file)| file);
        let mapping = self.region.as_ref().and_then(Region::mapping);
        let len = match (original, mapping) {
            (Some(file), _) => usize::try_from(file.metadata().unwrap().len()).unwrap(),
            (None, Some(mapping)) => mapping.len_bytes(),
            (None, None) => return "err Check 0 nothing to look at".into(),
        };
        for start in (0..len).step_by(seen.len()) {
            let part = seen.len().min(len - start);
            match (original, mapping) {
                (Some(file), _) => file.read_exact_at(&mut seen[..part], start as u64).unwrap(),
                (None, Some(mapping)) => {
                    // SAFETY: as in `fill`; `start + part` is at most the length, and `seen` has `part` bytes.
                    unsafe {
                        seen.as_mut_ptr()
                            .copy_from_nonoverlapping(mapping.as_ptr().add(start), part)
                    };
                }
                (None, None) => {}
            }
            // Compared as a whole: byte by byte takes seconds without optimisation.
            if seen[..part] != expected[..part] {
                let at = seen[..part].iter().position(|found| *found != byte).unwrap_or(part - 1);
                return format!("err Check 0 byte {} is {:#x}, not {byte:#x}", start + at, seen[at]);
            }
        }
        "ok".into()
    }

    fn original(&mut self, id: &str) -> String {
        let path = self.directory.join(format!("vllm_ec_{id}.mmap"));
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .unwrap();
        let inode = file.metadata().unwrap().ino();
        self.original = Some((path, file));
        format!("ok creator {inode}")
    }
}

/// For whom a region is opened.
struct Caller<F> {
    checkpoint: F,
    warnings: String,
}

impl<F: FnMut() -> ControlFlow<()>> Host for Caller<F> {
    fn checkpoint(&mut self) -> ControlFlow<()> {
        (self.checkpoint)()
    }

    fn warn(&mut self, warning: &Warning) {
        self.warnings += &format!("{warning:?} ");
    }
}

/// Pieces that the double has registered in this process.
static REGISTERED: AtomicUsize = AtomicUsize::new(0);

/// Stands for a device runtime: takes every piece, but the one it is told to refuse for good.
struct Double {
    refuse_at: usize,
    calls: AtomicUsize,
}

impl HostRegistrar for Double {
    fn register(&self, _: usize, _: usize) -> Result<(), Refusal> {
        if self.calls.fetch_add(1, Ordering::Relaxed) + 1 == self.refuse_at {
            return Err(Refusal {
                call: "register",
                code: 801, // cudaErrorNotSupported: no smaller piece will do
                name: "cudaErrorNotSupported".into(),
                text: String::new(),
            });
        }
        REGISTERED.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn unregister(&self, _: usize) -> Result<(), Refusal> {
        REGISTERED.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    fn backend(&self) -> &'static str {
        "double"
    }

    fn library_path(&self) -> Option<PathBuf> {
        None
    }
}
