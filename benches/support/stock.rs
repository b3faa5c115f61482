//! The stock way: what a straightforward port of the original class does, one system call per step.
//!
//! No lock, no check of what stands at the name, no reserve: this is what the region is measured
//! against, not a second implementation of it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use memmap2::{Advice, MmapOptions, MmapRaw};
use nix::sys::stat::fstat;

/// The original class looks at the size every 5 ms.
const POLL: Duration = Duration::from_millis(5);

/// A mapping made the stock way; dropping it is the stock cleanup.
#[derive(Debug)]
pub struct Stock {
    /// Where the name is taken away again: the creator's part.
    unlink: Option<PathBuf>,
    // The order in which the original lets go of them: munmap, then close.
    mapping: MmapRaw,
    _file: File,
}

impl Stock {
    pub fn create(path: &Path, len_bytes: usize) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)?;
        // From here on a failure takes the name away, too.
        let named = Unlink(Some(path.to_owned()));
        file.set_len(len_bytes as u64)?;
        let mapping = MmapOptions::new().len(len_bytes).map_raw(&file)?;
        mapping.advise(Advice::PopulateWrite)?;
        Ok(Self {
            unlink: named.keep(),
            mapping,
            _file: file,
        })
    }

    pub fn join(path: &Path, len_bytes: usize) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        while usize::try_from(fstat(&file)?.st_size).unwrap_or(0) < len_bytes {
            std::thread::sleep(POLL);
        }
        Ok(Self {
            unlink: None,
            mapping: MmapOptions::new().len(len_bytes).map_raw(&file)?,
            _file: file,
        })
    }

    pub fn as_ptr(&self) -> *mut u8 {
        self.mapping.as_mut_ptr()
    }
}

impl Drop for Stock {
    fn drop(&mut self) {
        drop(Unlink(self.unlink.take()));
    }
}

/// Takes a name away when it is dropped, unless it was kept.
struct Unlink(Option<PathBuf>);

impl Unlink {
    fn keep(mut self) -> Option<PathBuf> {
        self.0.take()
    }
}

impl Drop for Unlink {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            // The directory goes as a whole at the end: a name that stays is not left behind.
            let _ = std::fs::remove_file(path);
        }
    }
}
