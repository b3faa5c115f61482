//! What the control group of this process may still use. tmpfs pages are charged to the group of whoever
//! touches them first, and going over the limit is SIGKILL without a word (cgroups(7), memory controller).

use std::fs;
use std::path::{Path, PathBuf};

/// Where systemd and container runtimes mount the controllers.
pub const ROOT: &str = "/sys/fs/cgroup";

/// The tightest limit above this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLimit {
    pub limit_bytes: u64,
    pub current_bytes: u64,
}

impl MemoryLimit {
    #[must_use]
    pub fn left_bytes(&self) -> u64 {
        self.limit_bytes.saturating_sub(self.current_bytes)
    }
}

/// Version 1 writes "no limit" as a number just below 2^63, rounded to a page.
const NO_LIMIT: u64 = 1 << 62;

/// The limit with the least left among this process's group and those above it; `None` where there is none.
/// `membership` is the text of /proc/self/cgroup.
#[must_use]
pub fn memory_limit(root: &Path, membership: &str) -> Option<MemoryLimit> {
    membership
        .lines()
        .filter_map(|line| {
            // hierarchy-ID:controllers:path; version 2 has an empty list of controllers.
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            let path = path.trim_start_matches('/');
            if controllers.is_empty() {
                tightest(root, path, "memory.max", "memory.current")
            } else if controllers.split(',').any(|controller| controller == "memory") {
                let root = root.join("memory");
                tightest(&root, path, "memory.limit_in_bytes", "memory.usage_in_bytes")
            } else {
                None
            }
        })
        .min_by_key(MemoryLimit::left_bytes)
}

fn tightest(root: &Path, path: &str, limit: &str, current: &str) -> Option<MemoryLimit> {
    // In a container the path may be that of the host, and the group itself is mounted at the root.
    let group = root.join(path);
    let group: PathBuf = if group.is_dir() { group } else { root.to_owned() };
    group
        .ancestors()
        .take_while(|folder| folder.starts_with(root))
        .filter_map(|folder| {
            Some(MemoryLimit {
                limit_bytes: number(&folder.join(limit)).filter(|&limit| limit < NO_LIMIT)?,
                current_bytes: number(&folder.join(current))?,
            })
        })
        .min_by_key(MemoryLimit::left_bytes)
}

/// The number in a file; `None` for "max" and for a file that is not there.
fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn the_tightest_group_above_counts() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        write(root, "a/memory.max", "1000\n");
        write(root, "a/memory.current", "900\n");
        write(root, "a/b/memory.max", "500\n");
        write(root, "a/b/memory.current", "10\n");
        write(root, "a/b/c/memory.max", "max\n");
        write(root, "a/b/c/memory.current", "10\n");
        let limit = memory_limit(root, "0::/a/b/c\n").unwrap();
        assert_eq!((limit.limit_bytes, limit.left_bytes()), (1000, 100));
        assert_eq!(memory_limit(root, "0::/other\n"), None);
        assert_eq!(memory_limit(root, "nonsense"), None);
    }

    #[test]
    fn version_1_and_a_container_that_sees_its_group_at_the_root() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        write(root, "memory/memory.limit_in_bytes", "4096\n");
        write(root, "memory/memory.usage_in_bytes", "96\n");
        let membership = "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n";
        assert_eq!(memory_limit(root, membership).unwrap().left_bytes(), 4000);
        write(root, "memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(memory_limit(root, membership), None);
    }
}
