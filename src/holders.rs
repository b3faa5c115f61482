//! Who has a file open or mapped, found under /proc: the answer where the kernel has no leases
//! (see [`crate::lock::has_writer`]). It sees processes of the same PID namespace whose entries
//! this user may read, so [`sees_everything`] tells how far "nobody" can be trusted.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A file's identity: proof only while the file is held open, since tmpfs reuses inode numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

/// Processes that have the file open for writing, or mapped; sorted.
#[must_use]
pub fn of(file: FileIdentity) -> Vec<u32> {
    let mut found: Vec<_> = processes()
        .filter(|&pid| has_open(pid, file, &[]) || has_mapped(pid, file))
        .collect();
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

/// Life locks on the file whose holders live in other PID namespaces: /proc/locks shows them without a pid.
#[must_use]
pub fn unseen(file: FileIdentity) -> usize {
    fs::read_to_string("/proc/locks").map_or(0, |locks| {
        locks.lines().filter(|line| is_unseen_lock(line, file)).count()
    })
}

/// A line of /proc/locks: `1: FLOCK ADVISORY READ pid major:minor:inode start end`; the pid is 0 or less
/// where it cannot be told.
fn is_unseen_lock(line: &str, file: FileIdentity) -> bool {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (Some("FLOCK"), Some(pid), Some(place)) = (fields.next(), fields.nth(2), fields.next()) else {
        return false;
    };
    let Some((device, inode)) = place.rsplit_once(':') else {
        return false;
    };
    pid.parse::<i32>().is_ok_and(|pid| pid <= 0) && is_device(device, file) && inode.parse() == Ok(file.inode)
}

/// `major:minor` in hex, as in /proc/PID/maps and /proc/locks.
fn is_device(text: &str, file: FileIdentity) -> bool {
    let Some((major, minor)) = text.split_once(':') else {
        return false;
    };
    match (u64::from_str_radix(major, 16), u64::from_str_radix(minor, 16)) {
        (Ok(major), Ok(minor)) => nix::sys::stat::makedev(major, minor) == file.device,
        _ => false,
    }
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

fn has_open(pid: u32, file: FileIdentity, except: &[i32]) -> bool {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else {
        return false;
    };
    descriptors.flatten().any(|entry| {
        let Some(number) = entry.file_name().to_str().and_then(|n| n.parse::<i32>().ok()) else {
            return false;
        };
        !except.contains(&number)
            && fs::metadata(entry.path()).is_ok_and(|found| found.dev() == file.device && found.ino() == file.inode)
            && is_open_for_writing(pid, number)
    })
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
    fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("maps"))
        .is_ok_and(|maps| maps.lines().any(|line| maps_line_is(line, file)))
}

/// A line of /proc/PID/maps: `address perms offset major:minor inode path`, numbers of the device in hex.
fn maps_line_is(line: &str, file: FileIdentity) -> bool {
    let mut fields = line.split_ascii_whitespace().skip(3);
    let (Some(device), Some(inode)) = (fields.next(), fields.next()) else {
        return false;
    };
    inode.parse() == Ok(file.inode) && is_device(device, file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsRawFd;

    #[test]
    fn a_maps_line_is_read() {
        let file = FileIdentity {
            device: nix::sys::stat::makedev(0, 0x1a),
            inode: 42,
        };
        let line = "7f00-7f01 rw-s 00000000 00:1a 42 /dev/shm/vllm_ec_x.mmap";
        assert!(maps_line_is(line, file));
        assert!(!maps_line_is(&line.replace("42", "43"), file));
        assert!(!maps_line_is(&line.replace("1a", "1b"), file));
        assert!(!maps_line_is("", file));
    }

    #[test]
    fn a_lock_without_a_visible_pid_is_unseen() {
        let file = FileIdentity {
            device: nix::sys::stat::makedev(0, 0x1a),
            inode: 42,
        };
        let line = "3: FLOCK  ADVISORY  READ  0 00:1a:42 0 EOF";
        assert!(is_unseen_lock(line, file));
        assert!(is_unseen_lock(&line.replace(" 0 00", " -1 00"), file));
        assert!(!is_unseen_lock(&line.replace(" 0 00", " 77 00"), file));
        assert!(!is_unseen_lock(&line.replace("FLOCK", "OFDLCK"), file));
        assert!(!is_unseen_lock(&line.replace("42", "43"), file));
        assert!(!is_unseen_lock("", file));
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
        drop(raw);
        assert!(!is_held(identity, &[]));
    }
}
