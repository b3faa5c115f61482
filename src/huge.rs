//! Huge pages: their size, what the mount makes of them, and how many of a mapping's pages are one.

#![allow(unsafe_code)] // the `PAGEMAP_SCAN` ioctl

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::sync::OnceLock;

use nix::errno::Errno;
use nix::libc;
use nix::sys::stat::{major, minor};

use crate::mapping::Mapping;

/// Bytes of a huge page: 2 MiB on x86-64, up to 512 MiB on aarch64. `None` where the kernel has none.
#[must_use]
pub fn huge_page_bytes() -> Option<usize> {
    static BYTES: OnceLock<Option<usize>> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let text = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").ok()?;
        text.trim()
            .parse()
            .ok()
            .filter(|&bytes: &usize| bytes.is_power_of_two())
    })
}

/// Does a mount of tmpfs give huge pages of its own, where they are asked for by `madvise`?
///
/// The option `huge=` of tmpfs, `tmpfs(5)`; a mount without one, as `/dev/shm` mostly is, gives none.
#[must_use]
pub fn mount_gives_huge_pages(device: u64) -> bool {
    let Ok(mountinfo) = File::open("/proc/self/mountinfo") else {
        return false;
    };
    let number = format!("{}:{}", major(device), minor(device));
    BufReader::new(mountinfo)
        .split(b'\n')
        .map_while(Result::ok)
        .any(|line| gives_huge_pages(&String::from_utf8_lossy(&line), &number))
}

/// One line of `/proc/self/mountinfo`, `proc_pid_mountinfo(5)`: the third field is the device, the last one the
/// filesystem's options.
fn gives_huge_pages(line: &str, number: &str) -> bool {
    line.split(' ').nth(2) == Some(number)
        && line.rsplit(' ').next().is_some_and(|options| {
            options
                .split(',')
                .any(|option| matches!(option, "huge=always" | "huge=within_size" | "huge=advise"))
        })
}

/// How often any process of the machine had to wait while the kernel compacted or reclaimed memory for it
/// (`/proc/vmstat`). `None` where the kernel does not tell.
#[must_use]
pub fn memory_stalls() -> Option<u64> {
    let vmstat = std::fs::read_to_string("/proc/vmstat").ok()?;
    let counts = vmstat.lines().filter_map(|line| {
        let (name, count) = line.split_once(' ')?;
        (name == "compact_stall" || name.starts_with("allocstall"))
            .then(|| count.parse::<u64>().ok())
            .flatten()
    });
    counts.reduce(u64::saturating_add)
}

/// Bytes of the mapping that huge pages map in this process. `None` where the kernel does not tell.
#[must_use]
pub fn mapped_huge_bytes(mapping: &Mapping) -> Option<u64> {
    scan(mapping).or_else(|_| smaps(mapping)).ok()
}

/// `struct page_region` of linux/fs.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// `struct pm_scan_arg` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct ScanArguments {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

const PAGE_IS_HUGE: u64 = 1 << 6;
/// `_IOWR('f', 16, struct pm_scan_arg)`
const PAGEMAP_SCAN: u64 = 3 << 30 | (size_of::<ScanArguments>() as u64) << 16 | (b'f' as u64) << 8 | 16;

/// Asks for the huge pages of this one mapping, Linux 6.7.
fn scan(mapping: &Mapping) -> io::Result<u64> {
    let pagemap = File::open("/proc/self/pagemap")?;
    let end = (mapping.as_ptr() as usize + mapping.len_bytes()).next_multiple_of(crate::mapping::page_bytes()) as u64;
    let mut at = mapping.as_ptr() as u64;
    let mut huge_bytes = 0;
    while at < end {
        let mut found = [PageRegion::default(); 64];
        let mut arguments = ScanArguments {
            size: size_of::<ScanArguments>() as u64,
            start: at,
            end,
            vec: found.as_mut_ptr() as u64,
            vec_len: found.len() as u64,
            category_mask: PAGE_IS_HUGE,
            return_mask: PAGE_IS_HUGE,
            ..Default::default()
        };
        // SAFETY: the arguments are the kernel's structure, with its size, and name an array that lives here.
        let count = Errno::result(unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN as _, &mut arguments) })?;
        let regions = found.iter().take(usize::try_from(count).unwrap_or(0));
        huge_bytes += regions.map(|region| region.end - region.start).sum::<u64>();
        if arguments.walk_end <= at {
            break;
        }
        at = arguments.walk_end;
    }
    Ok(huge_bytes)
}

/// Reads the mapping's entry of `/proc/self/smaps`, which takes time where a process has many mappings.
fn smaps(mapping: &Mapping) -> io::Result<u64> {
    let start = format!("{:08x}-", mapping.as_ptr() as usize);
    let mut is_ours = false;
    for line in BufReader::new(File::open("/proc/self/smaps")?).lines() {
        let line = line?;
        is_ours |= line.starts_with(&start);
        if let (true, Some(kib)) = (is_ours, line.strip_prefix("ShmemPmdMapped:")) {
            let number = kib.trim().trim_end_matches(" kB").parse::<u64>();
            return number.map(|kib| kib << 10).map_err(io::Error::other);
        }
    }
    Err(io::Error::from(io::ErrorKind::NotFound))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_s_options_are_found_by_its_device() {
        let line = |options: &str| {
            format!("1043 1030 0:57 / /dev/shm rw,nosuid,nodev - tmpfs tmpfs rw,size=1048576k,{options}inode64")
        };
        for (options, gives) in [
            ("", false),
            ("huge=never,", false),
            ("huge=advise,", true),
            ("huge=within_size,", true),
            ("huge=always,", true),
        ] {
            assert_eq!(gives_huge_pages(&line(options), "0:57"), gives, "{options}");
            assert!(!gives_huge_pages(&line(options), "0:5"));
        }
        assert!(!gives_huge_pages("", "0:57"));
    }

    #[test]
    fn both_ways_of_counting_agree() {
        let Some(huge_page) = huge_page_bytes() else {
            eprintln!("skipped: this kernel has no huge pages");
            return;
        };
        let len = 4 * huge_page;
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(len as u64).unwrap();
        let mapping = Mapping::new(&file, len, huge_page).unwrap();
        mapping.touch_write(0..len, huge_page);
        if let Err(error) = mapping.collapse(0..2 * huge_page) {
            eprintln!("skipped: {error}");
            return;
        }
        let expected = 2 * huge_page as u64;
        assert_eq!(smaps(&mapping).unwrap(), expected);
        match scan(&mapping) {
            Ok(bytes) => assert_eq!(bytes, expected),
            Err(error) => eprintln!("PAGEMAP_SCAN is not to be had: {error}"),
        }
    }
}
