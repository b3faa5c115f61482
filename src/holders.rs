//! Who has a file open or mapped, found under /proc: what an operator asks, and the answer where the kernel has no
//! leases (see [`crate::lock::has_writer`]). It sees processes of the same PID namespace whose entries
//! this user may read, so [`sees_everything`] tells how far "nobody" can be trusted.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::os::unix::fs::MetadataExt;

use crate::lock;

/// A file's identity: proof only while the file is held open, since tmpfs reuses inode numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    pub device: u64,
    pub inode: u64,
}

/// The initial PID namespace has this inode number (`PROC_PID_INIT_INO` of the kernel).
const INITIAL_PID_NAMESPACE: &str = "pid:[4026531836]";

/// True in the initial PID namespace: there /proc shows the processes of every container.
#[must_use]
pub fn sees_everything() -> bool {
    fs::read_link("/proc/self/ns/pid").is_ok_and(|link| link.as_os_str() == INITIAL_PID_NAMESPACE)
}

/// Processes that can be seen from here.
fn processes() -> impl Iterator<Item = u32> {
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// A process that has a file open for writing, or mapped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    pub pid: u32,
    pub uid: u32,
    /// Its command line, or its short name in brackets where it has none.
    pub command: String,
    /// It has a descriptor that it can write through.
    pub has_open: bool,
    /// Up to which byte of the file its mappings reach, in whole pages; 0 where it has none.
    pub mapped_bytes: u64,
    /// It was killed, or has begun to exit, and is not gone yet.
    pub is_dying: bool,
}

/// Who holds which of many files.
#[derive(Debug, Default)]
pub struct Survey {
    holders: HashMap<FileIdentity, Vec<Holder>>,
    locks: HashMap<FileIdentity, LockCount>,
}

impl Survey {
    /// One pass over /proc, whatever the number of files.
    #[must_use]
    pub fn of(files: &HashSet<FileIdentity>) -> Self {
        let mut survey = Self {
            locks: count_locks(files),
            ..Self::default()
        };
        if files.is_empty() {
            return survey;
        }
        for pid in processes() {
            let held = held_by(pid, files);
            if held.is_empty() {
                continue;
            }
            let uid = fs::metadata(format!("/proc/{pid}")).map_or(0, |meta| meta.uid());
            let (command, is_dying) = (command(pid), is_dying(pid));
            for (file, (has_open, mapped_bytes)) in held {
                survey.holders.entry(file).or_default().push(Holder {
                    pid,
                    uid,
                    command: command.clone(),
                    has_open,
                    mapped_bytes,
                    is_dying,
                });
            }
        }
        for holders in survey.holders.values_mut() {
            holders.sort_unstable_by_key(|holder| holder.pid);
        }
        survey
    }

    /// By pid.
    #[must_use]
    pub fn holders(&self, file: FileIdentity) -> &[Holder] {
        self.holders.get(&file).map_or(&[], Vec::as_slice)
    }

    /// Holders of which only the lock is seen.
    #[must_use]
    pub fn unseen(&self, file: FileIdentity) -> usize {
        self.locks.get(&file).map_or(0, |count| count.unseen())
    }
}

/// Which of the files a process has open for writing, and up to which byte it has them mapped.
fn held_by(pid: u32, files: &HashSet<FileIdentity>) -> HashMap<FileIdentity, (bool, u64)> {
    let mut held: HashMap<_, (bool, u64)> = HashMap::new();
    for (number, file) in descriptors(pid) {
        if files.contains(&file) && is_open_for_writing(pid, number) {
            held.entry(file).or_default().0 = true;
        }
    }
    for (file, end_bytes) in maps(pid) {
        if files.contains(&file) {
            let reach = &mut held.entry(file).or_default().1;
            *reach = end_bytes.max(*reach);
        }
    }
    held
}

/// What a process was started as, with blanks between the arguments.
fn command(pid: u32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let line = String::from_utf8_lossy(&line).replace('\0', " ");
    if !line.trim().is_empty() {
        return line.trim().to_owned();
    }
    let name = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    format!("[{}]", String::from_utf8_lossy(&name).trim())
}

/// Processes that have the file open for writing, or mapped; sorted.
#[must_use]
pub fn of(file: FileIdentity) -> Vec<u32> {
    let files = HashSet::from([file]);
    let mut found: Vec<_> = processes().filter(|&pid| !held_by(pid, &files).is_empty()).collect();
    found.sort_unstable();
    found
}

/// Are all who hold the file dying? Also true where nobody is seen at all and no lock tells of somebody unseen:
/// then the last holder is just gone.
#[must_use]
pub fn are_dying(file: FileIdentity) -> bool {
    unseen(file) == 0 && of(file).into_iter().all(is_dying)
}

/// Has the process been killed, or begun to exit? It holds its files until its memory is unmapped.
fn is_dying(pid: u32) -> bool {
    const PF_EXITING: u64 = 0x4; // include/linux/sched.h
    const SIGKILL: u64 = 1 << 8;
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return true;
    };
    // pid (comm) state ppid pgrp session tty_nr tpgid flags ...; comm may hold anything, proc(5).
    let mut fields = stat.rsplit(')').next().unwrap_or_default().split_ascii_whitespace();
    let state = fields.next().unwrap_or_default();
    let flags: u64 = fields.nth(5).and_then(|flags| flags.parse().ok()).unwrap_or(0);
    let is_killed = || {
        fs::read_to_string(format!("/proc/{pid}/status")).is_ok_and(|status| {
            status
                .lines()
                .filter_map(|line| line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:")))
                .any(|mask| u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & SIGKILL != 0))
        })
    };
    matches!(state, "Z" | "X") || flags & PF_EXITING != 0 || is_killed()
}

/// Holders of ours that live in other PID namespaces, as far as their locks tell.
#[must_use]
pub fn unseen(file: FileIdentity) -> usize {
    let count = count_locks(&HashSet::from([file])).remove(&file);
    count.map_or(0, |count| count.unseen())
}

/// Locks of our processes on a file, by /proc/locks: every open file of ours has one of each kind. The life lock
/// (`flock`) is shown only where its process can be seen from here, the geometry lock (OFD) always, and without a pid.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct LockCount {
    /// Life locks of processes that can be seen.
    life: usize,
    geometry: usize,
}

impl LockCount {
    fn unseen(self) -> usize {
        self.geometry.saturating_sub(self.life)
    }
}

fn count_locks(files: &HashSet<FileIdentity>) -> HashMap<FileIdentity, LockCount> {
    let mut counts: HashMap<_, LockCount> = HashMap::new();
    for line in fs::read_to_string("/proc/locks").unwrap_or_default().lines() {
        let Some((file, kind)) = lock_of_ours(line) else {
            continue;
        };
        if files.contains(&file) {
            let count = counts.entry(file).or_default();
            match kind {
                LockKind::Life => count.life += 1,
                LockKind::Geometry => count.geometry += 1,
            }
        }
    }
    counts
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LockKind {
    Life,
    Geometry,
}

/// A line of /proc/locks: `1: FLOCK ADVISORY READ pid major:minor:inode start end`; older kernels give the pid 0
/// where it cannot be told.
fn lock_of_ours(line: &str) -> Option<(FileIdentity, LockKind)> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (kind, pid, place, start) = (fields.next()?, fields.nth(2)?, fields.next()?, fields.next()?);
    let kind = match kind {
        "FLOCK" if pid.parse::<i32>().is_ok_and(|pid| pid > 0) => LockKind::Life,
        "OFDLCK" if start.parse().is_ok_and(lock::is_geometry_byte) => LockKind::Geometry,
        _ => return None,
    };
    let (device, inode) = place.rsplit_once(':')?;
    let file = FileIdentity {
        device: device_of(device)?,
        inode: inode.parse().ok()?,
    };
    Some((file, kind))
}

/// `major:minor` in hex, as in /proc/PID/maps and /proc/locks.
fn device_of(text: &str) -> Option<u64> {
    let (major, minor) = text.split_once(':')?;
    let number = |digits| u64::from_str_radix(digits, 16).ok();
    Some(nix::sys::stat::makedev(number(major)?, number(minor)?))
}

/// Does any process have the file open for writing, or mapped? Descriptors of this process in
/// `except` do not count: they are the prober's own.
#[must_use]
pub fn is_held(file: FileIdentity, except: &[i32]) -> bool {
    let me = std::process::id();
    processes().any(|pid| {
        let except = if pid == me { except } else { &[] };
        has_open(pid, file, except) || has_mapped(pid, file)
    })
}

/// A process's descriptors, and what they are open on.
fn descriptors(pid: u32) -> impl Iterator<Item = (i32, FileIdentity)> {
    fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let number = entry.file_name().to_str()?.parse().ok()?;
            let found = fs::metadata(entry.path()).ok()?;
            let (device, inode) = (found.dev(), found.ino());
            Some((number, FileIdentity { device, inode }))
        })
}

fn has_open(pid: u32, file: FileIdentity, except: &[i32]) -> bool {
    descriptors(pid)
        .any(|(number, found)| found == file && !except.contains(&number) && is_open_for_writing(pid, number))
}

fn is_open_for_writing(pid: u32, number: i32) -> bool {
    // `flags:` is octal; its two lowest bits are O_RDONLY (0), O_WRONLY (1) or O_RDWR (2), proc(5).
    fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).is_ok_and(|info| {
        info.lines()
            .find_map(|line| line.strip_prefix("flags:"))
            .and_then(|flags| i64::from_str_radix(flags.trim(), 8).ok())
            .is_some_and(|flags| flags & 0o3 != 0)
    })
}

fn has_mapped(pid: u32, file: FileIdentity) -> bool {
    maps(pid).iter().any(|&(found, _)| found == file)
}

/// The files that a process has mapped, each with the byte behind the mapping's last.
fn maps(pid: u32) -> Vec<(FileIdentity, u64)> {
    // By bytes: the path of any mapping may be no valid text.
    let maps = fs::read(format!("/proc/{pid}/maps")).unwrap_or_default();
    String::from_utf8_lossy(&maps).lines().filter_map(mapped_file).collect()
}

/// A line of /proc/PID/maps: `start-end perms offset major:minor inode path`, all numbers but the inode in hex.
fn mapped_file(line: &str) -> Option<(FileIdentity, u64)> {
    let mut fields = line.split_ascii_whitespace();
    let (range, offset, device, inode) = (fields.next()?, fields.nth(1)?, fields.next()?, fields.next()?);
    let inode = inode.parse().ok().filter(|&inode| inode != 0)?;
    let (start, end) = range.split_once('-')?;
    let number = |digits| u64::from_str_radix(digits, 16).ok();
    let len_bytes = number(end)?.checked_sub(number(start)?)?;
    let device = device_of(device)?;
    Some((
        FileIdentity { device, inode },
        number(offset)?.saturating_add(len_bytes),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsRawFd;

    fn some_file() -> FileIdentity {
        FileIdentity {
            device: nix::sys::stat::makedev(0, 0x1a),
            inode: 42,
        }
    }

    #[test]
    fn a_maps_line_is_read() {
        let line = "7f001000-7f003000 rw-s 00001000 00:1a 42 /dev/shm/vllm_ec_x.mmap";
        assert_eq!(mapped_file(line), Some((some_file(), 0x3000)));
        for other in [line.replace("42", "43"), line.replace("1a", "1b")] {
            assert_ne!(mapped_file(&other).unwrap().0, some_file());
        }
        for none in ["", "7f00-7f01 rw-p 00000000 00:00 0", "7f01-7f00 rw-s 0 00:1a 42", "x"] {
            assert_eq!(mapped_file(none), None, "{none}");
        }
    }

    #[test]
    fn life_and_geometry_are_told_apart_in_the_table_of_locks() {
        let life = "3: FLOCK  ADVISORY  READ 77 00:1a:42 0 EOF";
        assert_eq!(lock_of_ours(life), Some((some_file(), LockKind::Life)));
        for pid in [" 0 ", " -1 "] {
            assert_eq!(
                lock_of_ours(&life.replace(" 77 ", pid)),
                None,
                "a process that is not seen"
            );
        }
        let geometry = "4: OFDLCK ADVISORY  READ -1 00:1a:42 1152921504606854145 1152921504606854145";
        assert_eq!(lock_of_ours(geometry), Some((some_file(), LockKind::Geometry)));
        let preparing = geometry.replace("1152921504606854145", "1152921504606846976");
        assert_eq!(lock_of_ours(&preparing), None, "another of our signs");
        assert_eq!(lock_of_ours(""), None);
        for (life, geometry, unseen) in [(0, 0, 0), (1, 1, 0), (0, 2, 2), (3, 1, 0)] {
            assert_eq!(LockCount { life, geometry }.unseen(), unseen);
        }
    }

    #[test]
    fn this_process_is_not_dying_and_a_zombie_is() {
        assert!(!is_dying(std::process::id()));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        while !is_dying(child.id()) {
            std::thread::yield_now();
        }
        child.wait().unwrap();
    }

    #[test]
    fn writers_are_found_and_readers_are_not() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path().join("file");
        let writer = File::create(&path).unwrap();
        writer.set_len(4096).unwrap();
        let meta = writer.metadata().unwrap();
        let identity = FileIdentity {
            device: meta.dev(),
            inode: meta.ino(),
        };
        assert!(is_held(identity, &[]));
        assert_eq!(of(identity), [std::process::id()]);
        let survey = Survey::of(&HashSet::from([identity]));
        let [holder] = survey.holders(identity) else {
            panic!("{survey:?}");
        };
        assert_eq!(
            (holder.pid, holder.uid),
            (std::process::id(), nix::unistd::geteuid().as_raw())
        );
        assert!(holder.has_open && !holder.is_dying && holder.mapped_bytes == 0);
        assert!(holder.command.contains("ec_shared_region"), "{}", holder.command);
        assert!(!is_held(identity, &[writer.as_raw_fd()]));
        drop(writer);
        let reader = File::open(&path).unwrap();
        assert!(!is_held(identity, &[]));
        drop(reader);
        let raw = memmap2::MmapOptions::new()
            .len(4096)
            .map_raw(&File::options().read(true).write(true).open(&path).unwrap())
            .unwrap();
        assert!(is_held(identity, &[]));
        let survey = Survey::of(&HashSet::from([identity]));
        assert_eq!(
            survey.holders(identity).first().map(|holder| holder.mapped_bytes),
            Some(4096)
        );
        drop(raw);
        assert!(!is_held(identity, &[]));
    }
}
