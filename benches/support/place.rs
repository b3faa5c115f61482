//! Where the benches work: a directory of their own under `/dev/shm` that goes with them, and memory
//! that the machine has handed out before.

#![allow(unsafe_code)] // signals by way of libc: nothing else in the crate needs them

use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::ptr;

use ec_shared_region::DEV_SHM;
use ec_shared_region::mapping::Mapping;
use nix::libc;
use nix::sys::statvfs::statvfs;
use tempfile::TempDir;

const MIB: usize = 1 << 20;
/// Sizes in MiB, separated by commas, instead of the usual ones.
const SIZES_VARIABLE: &str = "EC_BENCH_MIB";
const USUAL_SIZES: &str = "1,64,256";
/// Removing the directory races with a bench that still makes files in it.
const MAX_REMOVALS: u32 = 1_000;

/// A directory in `/dev/shm` that is removed when this is dropped, and on Ctrl-C. Only a kill that no
/// program can answer leaves it behind.
#[derive(Debug)]
pub struct Place {
    directory: TempDir,
}

impl Place {
    /// To be called before any other thread is started: they take over which signals are blocked.
    pub fn new() -> io::Result<Self> {
        // Blocked before the directory is there, so that no signal comes between the two.
        let signals = block_signals();
        let directory = tempfile::Builder::new()
            .prefix("ec-shared-region-bench-")
            .tempdir_in(DEV_SHM)?;
        let path = directory.path().to_owned();
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || remove_on_signal(&signals, &path))?;
        Ok(Self { directory })
    }

    /// A directory inside, one for each way: neither looks at the other's files.
    pub fn subdirectory(&self, name: &str) -> io::Result<PathBuf> {
        let path = self.directory.path().join(name);
        fs::create_dir_all(&path)?;
        Ok(path)
    }

    /// The sizes to measure; those that do not fit here are named and left out.
    pub fn sizes_bytes(&self) -> Vec<usize> {
        let wanted = if is_bench_run() {
            std::env::var(SIZES_VARIABLE).unwrap_or_else(|_| USUAL_SIZES.to_owned())
        } else {
            "1".to_owned() // a test run shows that it works, not how fast
        };
        let free_bytes = statvfs(self.directory.path())
            .map_or(0, |stat| stat.blocks_available().saturating_mul(stat.fragment_size()))
            .min(available_memory_bytes());
        let fits = |bytes: &usize| {
            // Both ways stand side by side while they are measured, and warming takes 1.25 of the size.
            let needed_bytes = (*bytes as u64).saturating_mul(13) / 4;
            let fits = needed_bytes <= free_bytes;
            if !fits {
                eprintln!(
                    "left out: {} MiB, which needs {} MiB in {DEV_SHM} and in memory where {} MiB are free",
                    bytes / MIB,
                    needed_bytes / MIB as u64,
                    free_bytes / MIB as u64,
                );
            }
            fits
        };
        let parse = |word: &str| match word.trim().parse::<usize>() {
            Ok(mib) if mib > 0 => mib.checked_mul(MIB),
            _ => {
                eprintln!("left out: {word:?} in {SIZES_VARIABLE} is not a number of MiB");
                None
            }
        };
        wanted.split(',').filter_map(parse).filter(fits).collect()
    }

    /// Touches and frees a quarter more than `bytes`. A virtual machine hands free memory back to its
    /// host, and the first touch after that costs a fault of the host's, whoever touches.
    ///
    /// A file without a name in the same filesystem: pages of the size that a region would get.
    pub fn warm(&self, bytes: usize) -> io::Result<()> {
        let len_bytes = bytes.saturating_add(bytes / 4);
        let file = tempfile::tempfile_in(self.directory.path())?;
        file.set_len(len_bytes as u64)?;
        // No touching where this fails: with the filesystem full that would be SIGBUS, and the stock way
        // needs the same advice (Linux 5.14).
        Mapping::new(&file, len_bytes, 4096)?.populate_write(0..len_bytes)
    }
}

/// `cargo bench` says so; `cargo test --benches` does not.
pub fn is_bench_run() -> bool {
    std::env::args().any(|arg| arg == "--bench") && !std::env::args().any(|arg| arg == "--test")
}

/// What the machine can give without swapping; everything where the kernel does not tell.
fn available_memory_bytes() -> u64 {
    let kib = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    });
    kib.map_or(u64::MAX, |kib| kib.saturating_mul(1024))
}

/// Blocks the signals that end a program from outside, so that a thread can wait for them. A thread
/// rather than a handler: it may remove files, and it interrupts no system call that is being timed.
fn block_signals() -> libc::sigset_t {
    let mut signals = MaybeUninit::uninit();
    // SAFETY: sigemptyset(3) makes the set; the other calls read or change a set that is made.
    unsafe {
        libc::sigemptyset(signals.as_mut_ptr());
        let mut signals = signals.assume_init();
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT] {
            // Who started us wants these ignored (`nohup`): a blocked one would be waited for instead.
            if !is_ignored(signal) {
                libc::sigaddset(&raw mut signals, signal);
            }
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const signals, ptr::null_mut());
        signals
    }
}

fn is_ignored(signal: libc::c_int) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: sigaction(2) changes nothing without a new action; all zeroes is a valid `sigaction`.
    let action = unsafe {
        libc::sigaction(signal, ptr::null(), action.as_mut_ptr());
        action.assume_init()
    };
    action.sa_sigaction == libc::SIG_IGN
}

/// Waits for one of the signals, removes the directory, and lets the signal do what it always does.
fn remove_on_signal(signals: &libc::sigset_t, directory: &Path) {
    let mut signal = 0;
    // SAFETY: the set was made by `block_signals`, and `signal` is ours to write to.
    if unsafe { libc::sigwait(signals, &raw mut signal) } != 0 {
        return;
    }
    for _ in 0..MAX_REMOVALS {
        match fs::remove_dir_all(directory) {
            Ok(()) => break,
            Err(error) if error.kind() == io::ErrorKind::NotFound => break,
            Err(_) => std::thread::yield_now(),
        }
    }
    // SAFETY: as above; the signal's action is still the default one, which ends the process.
    unsafe {
        libc::pthread_sigmask(libc::SIG_UNBLOCK, signals, ptr::null_mut());
        libc::raise(signal);
    }
}
