//! The mapping: one owner of pointer and length, which hands out pointers and never slices, since
//! other processes write to the same bytes.

#![allow(unsafe_code)] // volatile and atomic access to pages that other processes share

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use memmap2::{Advice, MmapOptions, MmapRaw, RemapOptions};
use nix::errno::Errno;
use nix::libc;

/// A shared, readable and writable mapping of a whole region. Unmapped on drop, through libc.
pub struct Mapping {
    /// Always there until the drop.
    raw: Option<MmapRaw>,
    start: *mut u8,
    len_bytes: usize,
    after_unmap: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// Buffers that callers hold of it, for who wants to know why it stays.
    pub views: AtomicUsize,
}

// SAFETY: `start` is the address of `raw`, which may be used and dropped by any thread; nothing is borrowed from it.
unsafe impl Send for Mapping {}
// SAFETY: as above; shared use goes through raw pointers, whose users answer for ordering.
unsafe impl Sync for Mapping {}

impl std::fmt::Debug for Mapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mapping")
            .field("start", &self.start)
            .field("len_bytes", &self.len_bytes)
            .finish_non_exhaustive()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.raw = None;
        let after = self
            .after_unmap
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(after) = after {
            after();
        }
    }
}

impl Mapping {
    /// Maps `len_bytes` from the start of `file`, which must be that long: the caller checked it on
    /// this very descriptor, and nobody who keeps the protocol shortens a file.
    ///
    /// The address is a multiple of `align_bytes` where the region is that large and the address space lets it
    /// be: a huge page can only be mapped where address and file offset agree.
    ///
    /// # Errors
    /// The error of `mmap(2)`.
    pub fn new(file: &File, len_bytes: usize, align_bytes: usize) -> io::Result<Self> {
        let mut raw = MmapOptions::new().len(len_bytes).map_raw(file)?;
        if len_bytes >= align_bytes && !is_aligned(&raw, align_bytes) {
            raw = map_aligned(file, len_bytes, align_bytes, raw)?;
        }
        // A core file of each process would hold the whole region. Where the kernel refuses, it does.
        let _ = raw.advise(Advice::DontDump);
        Ok(Self {
            start: raw.as_mut_ptr(),
            raw: Some(raw),
            len_bytes,
            views: AtomicUsize::new(0),
            after_unmap: Mutex::new(None),
        })
    }

    /// What is to happen once the last user of the mapping is gone.
    pub fn after_unmap(&self, work: impl FnOnce() + Send + 'static) {
        *self.after_unmap.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(work));
    }

    fn advise(&self, advice: Advice, range: &Range<usize>) -> io::Result<()> {
        match &self.raw {
            Some(raw) => raw.advise_range(advice, range.start, range.len()),
            None => Ok(()),
        }
    }

    /// The address of byte 0: fixed for the life of the mapping, a multiple of the page size.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// `None` where the range does not lie within the mapping.
    fn checked(&self, range: &Range<usize>) -> Option<*mut u8> {
        (range.start <= range.end && range.end <= self.len_bytes).then(|| self.as_ptr().wrapping_add(range.start))
    }

    /// Maps the pages of the range ahead for writing (`MADV_POPULATE_WRITE`, Linux 5.14).
    ///
    /// # Errors
    /// The error of `madvise(2)`; `EINVAL` where the kernel does not know the advice.
    pub fn populate_write(&self, range: Range<usize>) -> io::Result<()> {
        self.advise(Advice::PopulateWrite, &range)
    }

    /// Maps the pages of the range ahead for reading (`MADV_POPULATE_READ`, Linux 5.14).
    ///
    /// # Errors
    /// As [`Mapping::populate_write`].
    pub fn populate_read(&self, range: Range<usize>) -> io::Result<()> {
        self.advise(Advice::PopulateRead, &range)
    }

    /// Asks for huge pages where the filesystem has some, or for none (`MADV_HUGEPAGE`, `MADV_NOHUGEPAGE`).
    ///
    /// # Errors
    /// The error of `madvise(2)`; `EINVAL` where the kernel has no huge pages.
    pub fn want_huge_pages(&self, range: Range<usize>, is_wanted: bool) -> io::Result<()> {
        let advice = if is_wanted {
            Advice::HugePage
        } else {
            Advice::NoHugePage
        };
        self.advise(advice, &range)
    }

    /// Puts a huge page behind each extent of the range, zeroed where the file has no page, and maps it
    /// (`MADV_COLLAPSE`, Linux 6.1). An extent without any page is passed over: one must be there.
    ///
    /// # Errors
    /// The error of `madvise(2)`, of the first extent that failed; `EINVAL` where the kernel does not know the
    /// advice or huge pages of shared memory are denied.
    pub fn collapse(&self, range: Range<usize>) -> io::Result<()> {
        const MADV_COLLAPSE: libc::c_int = 25; // linux/mman.h; memmap2 does not name it

        let start = self.checked(&range).ok_or(Errno::EINVAL)?;
        // SAFETY: `checked` saw that the range lies within the mapping, which `self` keeps; the advice moves bytes
        // to other physical pages and changes none.
        Errno::result(unsafe { libc::madvise(start.cast(), range.len(), MADV_COLLAPSE) })?;
        Ok(())
    }

    /// Writes to one byte of each page of the range without changing it, whatever other processes
    /// store meanwhile. The pages must be backed: a touch that the filesystem cannot serve is SIGBUS.
    pub fn touch_write(&self, range: Range<usize>, page_bytes: usize) {
        let Some(start) = self.checked(&range) else { return };
        for offset in (0..range.len()).step_by(page_bytes.max(1)) {
            // SAFETY: `checked` saw that the range lies within the mapping, which `self` keeps; an
            // AtomicU8 has no alignment, and other processes' stores are no data race with it.
            let byte = unsafe { AtomicU8::from_ptr(start.wrapping_add(offset)) };
            // `|= 0` and `fetch_or(0)` compile to no store at all; this does write.
            let seen = byte.load(Ordering::Relaxed);
            let _ = byte.compare_exchange(seen, seen, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Reads one byte of each page of the range.
    pub fn touch_read(&self, range: Range<usize>, page_bytes: usize) {
        let Some(start) = self.checked(&range) else { return };
        for offset in (0..range.len()).step_by(page_bytes.max(1)) {
            // SAFETY: as in `touch_write`; a volatile read is not optimised away.
            unsafe { start.wrapping_add(offset).read_volatile() };
        }
    }
}

fn is_aligned(raw: &MmapRaw, align_bytes: usize) -> bool {
    (raw.as_mut_ptr() as usize).is_multiple_of(align_bytes.max(1))
}

/// The kernel chooses addresses from the top down, so a mapping that is longer by what the first one is off
/// begins that much lower. What is too long lies behind the end of the file and is taken off again.
fn map_aligned(file: &File, len_bytes: usize, align_bytes: usize, first: MmapRaw) -> io::Result<MmapRaw> {
    const MOST_TRIES: u32 = 4; // other threads map as well

    let mut raw = first;
    let mut excess_bytes = 0;
    for _ in 0..MOST_TRIES {
        excess_bytes = (excess_bytes + raw.as_mut_ptr() as usize % align_bytes) % align_bytes;
        drop(raw);
        raw = match MmapOptions::new().len(len_bytes + excess_bytes).map_raw(file) {
            Ok(raw) => raw,
            // The address space is limited: better at any address than not at all.
            Err(_) => return MmapOptions::new().len(len_bytes).map_raw(file),
        };
        if is_aligned(&raw, align_bytes) {
            break;
        }
    }
    if excess_bytes > 0 {
        // Where the kernel refuses, the excess stays: addresses that nobody is told of.
        // SAFETY: nobody has the address yet; a shorter mapping stays where it is.
        let _ = unsafe { raw.remap(len_bytes, RemapOptions::new()) };
    }
    Ok(raw)
}

/// The page size of this machine: 4 KiB on x86-64, 64 KiB on some aarch64 kernels.
#[must_use]
pub fn page_bytes() -> usize {
    nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE)
        .ok()
        .flatten()
        .and_then(|size| usize::try_from(size).ok())
        // POSIX lets sysconf fail only for unknown names; the largest page of any Linux is a safe stride for rounding up.
        .unwrap_or(64 << 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    fn mapped(len: usize) -> (File, Mapping) {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(len as u64).unwrap();
        let mapping = Mapping::new(&file, len, page_bytes()).unwrap();
        (file, mapping)
    }

    #[test]
    fn touching_for_writing_backs_every_page_and_changes_no_byte() {
        let page = page_bytes();
        let len = 5 * page + 7;
        let (file, mapping) = mapped(len);
        // SAFETY: within the mapping, and this test is its only user.
        unsafe { mapping.as_ptr().add(page).write(42) };
        mapping.touch_write(0..len, page);
        assert_eq!(file.metadata().unwrap().blocks() * 512, 6 * page as u64);
        // SAFETY: as above.
        assert_eq!(unsafe { mapping.as_ptr().add(page).read() }, 42);
    }

    #[test]
    fn a_range_outside_is_not_touched() {
        let page = page_bytes();
        let (file, mapping) = mapped(page);
        mapping.touch_write(0..page + 1, page);
        mapping.touch_read(page..2 * page, page);
        assert_eq!(file.metadata().unwrap().blocks(), 0);
        assert!(mapping.populate_write(0..3 * page).is_err());
    }

    #[test]
    fn a_large_mapping_is_aligned_and_ends_with_the_file() {
        let align = 2 << 20;
        for len in [align, align + 1, 3 * align - 4096, 5 * align + 4096] {
            let file = tempfile::tempfile_in("/dev/shm").unwrap();
            file.set_len(len as u64).unwrap();
            let mappings: Vec<_> = (0..3).map(|_| Mapping::new(&file, len, align).unwrap()).collect();
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            for mapping in mappings {
                let start = mapping.as_ptr() as usize;
                assert_eq!(start % align, 0);
                let line = format!("{start:08x}-{:08x} ", (start + len).next_multiple_of(page_bytes()));
                assert!(maps.contains(&line), "no {line} in {maps}");
            }
        }
    }

    #[test]
    fn less_than_a_page_is_mapped() {
        let (_file, mapping) = mapped(64);
        assert_eq!(mapping.len_bytes(), 64);
        assert_eq!(mapping.as_ptr() as usize % page_bytes(), 0);
    }
}
