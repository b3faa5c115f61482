//! One error type for the whole core. Every variant carries the values that a person needs at
//! three in the morning, and [`Error::hint`] says what to do about it.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::libc;

use crate::spec::Geometry;
use crate::text::{Shown, shown};

pub type Result<T> = std::result::Result<T, Error>;

/// Why a region could not be opened, used or closed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The id cannot be a part of a file name.
    #[error("invalid engine_id {id:?}: {reason}")]
    InvalidId { id: String, reason: String },

    /// A number that no region can have.
    #[error("invalid {what}: {value}: {reason}")]
    InvalidNumber {
        what: &'static str,
        value: String,
        reason: &'static str,
    },

    /// `num_blocks * block_size_bytes` is beyond what a file offset can hold.
    #[error("region too large: {num_blocks} blocks x {block_size_bytes} bytes is more than {max_bytes} bytes")]
    TooLarge {
        num_blocks: u64,
        block_size_bytes: u64,
        max_bytes: u64,
    },

    /// A live region under this id has another shape.
    #[error("another geometry lives at `{path}`: wanted {wanted}, found {found}", path = shown(path))]
    GeometryMismatch {
        path: PathBuf,
        wanted: Geometry,
        found: FoundGeometry,
    },

    /// The filesystem, the memory or a limit cannot hold the region.
    #[error("not enough {resource} for `{path}`: wanted {wanted_bytes} bytes, {available}", path = shown(path))]
    NoSpace {
        path: PathBuf,
        resource: Resource,
        wanted_bytes: u64,
        available: Available,
        errno: i32,
    },

    /// `huge_pages="require"`, and not every whole huge page of the region is one.
    #[error(
        "huge pages are required for `{path}`: {huge_bytes} of {wanted_bytes} bytes are in huge pages: {reason}",
        path = shown(path)
    )]
    NoHugePages {
        path: PathBuf,
        /// The whole huge pages of the region; 0 where it is smaller than one.
        wanted_bytes: u64,
        huge_bytes: u64,
        reason: String,
    },

    /// Something at the path is not a region file of ours. It was not touched.
    #[error("refused the file at `{path}`: {reason}", path = shown(path))]
    Foreign { path: PathBuf, reason: String, errno: i32 },

    /// `mode="create"`, and the region lives.
    #[error("region `{path}` exists and is in use ({size_bytes} bytes)", path = shown(path))]
    Exists { path: PathBuf, size_bytes: u64 },

    /// A wait came to its end.
    #[error("gave up on `{path}` after {:.3} s: {state}", waited.as_secs_f64(), path = shown(path))]
    Timeout {
        path: PathBuf,
        waited: Duration,
        state: WaitState,
        /// Ids of other regions in the same directory.
        similar: Vec<String>,
    },

    /// The region has no block of that id.
    #[error("block id out of range: {id} at position {position}: the region has {num_blocks} blocks")]
    BlockOutOfRange {
        /// As text, since callers have longer integers than 64 bits.
        id: String,
        position: usize,
        num_blocks: usize,
    },

    /// A scatter names a block twice: which bytes it would hold is nobody's to guess.
    #[error("duplicate block id: {id} at positions {first} and {second}")]
    DuplicateBlock { id: i64, first: usize, second: usize },

    /// A number of bytes that does not end in the last block.
    #[error(
        "{len_bytes} bytes do not end in the last of {count} blocks of {block_size_bytes} bytes: wanted {} to {} bytes",
        partial_bytes(*count, *block_size_bytes).start(), partial_bytes(*count, *block_size_bytes).end()
    )]
    PartialBytes {
        len_bytes: usize,
        count: usize,
        block_size_bytes: usize,
    },

    /// The caller's side holds another number of bytes than the copy moves.
    #[error(
        "`{what}` holds {held_bytes} bytes: wanted {wanted_bytes} bytes for {count} blocks of {block_size_bytes} bytes"
    )]
    BytesMismatch {
        what: &'static str,
        held_bytes: usize,
        wanted_bytes: usize,
        count: usize,
        block_size_bytes: usize,
    },

    /// The caller's side is a view of the very blocks that the copy touches.
    #[error("`{what}` shares bytes with the blocks that are copied")]
    Overlap { what: &'static str },

    /// The caller's checkpoint asked to stop (Ctrl-C). Everything was undone, except that a copy of blocks leaves
    /// those it had written.
    #[error("interrupted")]
    Interrupted,

    /// A signal handler forked during the call, and this is the child. Nothing of the parent's was touched.
    #[error("this process was forked while the call ran in its parent")]
    Forked,

    /// The region was closed.
    #[error("the region is closed")]
    Closed,

    /// A system call failed in a way that has no better name.
    #[error("{call} failed for `{path}`: {source}", path = shown(path))]
    Os {
        call: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

/// The numbers of bytes that end in the last of `count` blocks.
fn partial_bytes(count: usize, block_size_bytes: usize) -> std::ops::RangeInclusive<usize> {
    let whole = count.saturating_mul(block_size_bytes);
    let least = count.saturating_sub(1).saturating_mul(block_size_bytes) + usize::from(count > 0);
    least.min(whole)..=whole
}

/// The shape that a live file was found to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FoundGeometry {
    /// Announced by a live holder, see [`crate::lock`].
    Announced { size_bytes: u64, block_size_bytes: u64 },
    /// A file that carries no announcement (the original class made it): only its size is known.
    SizeOnly { size_bytes: u64 },
}

impl std::fmt::Display for FoundGeometry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Self::Announced {
                size_bytes,
                block_size_bytes,
            } => write!(
                f,
                "{} blocks x {block_size_bytes} bytes ({size_bytes} bytes)",
                size_bytes / block_size_bytes.max(1)
            ),
            Self::SizeOnly { size_bytes } => write!(f, "a file of {size_bytes} bytes"),
        }
    }
}

/// What ran out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource {
    Space,
    /// What this user may have of the filesystem (tmpfs knows quotas from Linux 6.6 on).
    Quota,
    Inodes,
    Memory,
    FileSizeLimit,
}

impl std::fmt::Display for Resource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Space => "space",
            Self::Quota => "quota",
            Self::Inodes => "inodes",
            Self::Memory => "memory",
            Self::FileSizeLimit => "room under the file size limit",
        })
    }
}

/// How much of it there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Available {
    /// Bytes free and in all; `total_bytes` 0 is a tmpfs without a limit.
    Filesystem {
        free_bytes: u64,
        total_bytes: u64,
    },
    Inodes {
        free: u64,
        total: u64,
    },
    /// RAM plus swap of the machine.
    Memory {
        total_bytes: u64,
    },
    /// The limit (`RLIMIT_FSIZE`) of this process.
    Limit {
        max_bytes: u64,
    },
}

impl std::fmt::Display for Available {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Self::Filesystem {
                free_bytes,
                total_bytes: 0,
            } => write!(f, "{free_bytes} bytes free on a filesystem without a limit"),
            Self::Filesystem {
                free_bytes,
                total_bytes,
            } => write!(f, "{free_bytes} bytes free of {total_bytes}"),
            Self::Inodes { free, total } => write!(f, "{free} inodes free of {total}"),
            Self::Memory { total_bytes } => {
                write!(f, "the machine has {total_bytes} bytes of RAM and swap")
            }
            Self::Limit { max_bytes } => write!(f, "RLIMIT_FSIZE is {max_bytes} bytes"),
        }
    }
}

/// What a constructor was waiting for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitState {
    /// No file at the path, and this constructor may not make one.
    NoFile { wanted_bytes: u64 },
    /// A file that nobody alive holds, and this constructor may not replace it.
    DeadFile { wanted_bytes: u64, seen_bytes: u64 },
    /// A live creator of the original class that has not sized its file.
    NotSized { wanted_bytes: u64, seen_bytes: u64 },
    /// A live creator that is reserving the bytes.
    BeingPrepared { wanted_bytes: u64 },
    /// Another process holds the file's lock exclusively.
    FileLocked,
    /// Another process holds the directory's lock.
    DirectoryLocked,
    /// Names came and went under this constructor for all of its time.
    Unsettled,
}

impl std::fmt::Display for WaitState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Self::NoFile { wanted_bytes } => {
                write!(
                    f,
                    "no such region: wanted {wanted_bytes} bytes, no file seen, no live creator"
                )
            }
            Self::DeadFile {
                wanted_bytes,
                seen_bytes,
            } => write!(
                f,
                "only a dead region: wanted {wanted_bytes} bytes, seen {seen_bytes} bytes, no live creator"
            ),
            Self::NotSized {
                wanted_bytes,
                seen_bytes,
            } => write!(
                f,
                "not sized yet: wanted {wanted_bytes} bytes, seen {seen_bytes} bytes, a live process holds it open"
            ),
            Self::BeingPrepared { wanted_bytes } => write!(
                f,
                "being prepared: wanted {wanted_bytes} bytes, a live creator is reserving them"
            ),
            Self::FileLocked => f.write_str("another process holds the lock of the file exclusively"),
            Self::DirectoryLocked => f.write_str("another process holds the lock of the directory"),
            Self::Unsettled => f.write_str("the name kept changing hands"),
        }
    }
}

/// Something that did not stop the constructor, and that somebody should know before it goes on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Warning {
    /// The region fits the filesystem, but not what the control group may still use: the kernel may kill.
    #[error(
        "{wanted_bytes} bytes for `{path}` are charged to this control group, which uses {current_bytes} of {limit_bytes} bytes",
        path = shown(path)
    )]
    ControlGroup {
        path: PathBuf,
        wanted_bytes: u64,
        current_bytes: u64,
        limit_bytes: u64,
    },

    /// Every byte goes to a disk, sooner or later.
    #[error("the directory of `{path}` is not in memory: filesystem type {filesystem_type:#x}, not a tmpfs", path = shown(path))]
    NotInMemory { path: PathBuf, filesystem_type: i64 },

    /// The pages are placed as the kernel does by default.
    #[error("the NUMA policy of `{path}` was not set: {source}", path = shown(path), source = io::Error::from_raw_os_error(*errno))]
    Numa { path: PathBuf, errno: i32 },
}

impl Warning {
    /// What a person can do about it.
    #[must_use]
    pub fn hint(&self) -> &'static str {
        match self {
            Self::ControlGroup { .. } => {
                "raise the container's memory limit by the size of the region, or the kernel may kill a process while pages are reserved"
            }
            Self::NotInMemory { .. } => {
                "mount a tmpfs there: on a disk the region is slow, its pages are written out, and a crash leaves it there until the next constructor"
            }
            Self::Numa {
                errno: libc::EINVAL, ..
            } => "the node must exist and be among those that this process may use (`numactl --show`)",
            Self::Numa { .. } => {
                "the region works and is placed as the kernel does by default; in a container, CAP_SYS_NICE lets the call through"
            }
        }
    }
}

impl Error {
    pub(crate) fn os(call: &'static str, path: impl Into<PathBuf>, source: impl Into<io::Error>) -> Self {
        Self::Os {
            call,
            path: path.into(),
            source: source.into(),
        }
    }

    /// The `errno` that belongs to this error, where there is one.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::NoSpace { errno, .. } | Self::Foreign { errno, .. } => Some(*errno),
            Self::Exists { .. } => Some(libc::EEXIST),
            Self::NoHugePages { .. } => Some(libc::ENOMEM),
            Self::Timeout {
                state: WaitState::NoFile { .. },
                ..
            } => Some(libc::ENOENT),
            Self::Timeout { .. } => Some(libc::ETIMEDOUT),
            Self::Os { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }

    /// The path that the error is about, where there is one.
    #[must_use]
    pub fn path(&self) -> Option<&std::path::Path> {
        match self {
            Self::GeometryMismatch { path, .. }
            | Self::NoSpace { path, .. }
            | Self::NoHugePages { path, .. }
            | Self::Foreign { path, .. }
            | Self::Exists { path, .. }
            | Self::Timeout { path, .. }
            | Self::Os { path, .. } => Some(path),
            _ => None,
        }
    }

    /// What a person can do about it: one line, no full stop.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::InvalidId { .. } => {
                "use a short name of letters, digits, `_` and `-`, for example `engine0_dp0`".into()
            }
            Self::InvalidNumber { what: "timeout", .. } => {
                "give seconds as a number, for example 30.0".into()
            }
            Self::InvalidNumber { what: "mode" | "populate" | "huge_pages", .. } => {
                "see the constructor's documentation for the words it takes".into()
            }
            Self::InvalidNumber { what: "numa", .. } => {
                "`ls /sys/devices/system/node` shows the nodes, Mems_allowed_list in /proc/self/status those of this process"
                    .into()
            }
            Self::InvalidNumber { what: "num_blocks", .. } => {
                "num_blocks is byte_budget // block_size_bytes: a budget below one block gives 0".into()
            }
            Self::InvalidNumber { .. } => "give a whole number of bytes above zero".into(),
            Self::TooLarge { .. } => "check the unit of the budget: it is in bytes".into(),
            Self::GeometryMismatch { .. } => {
                "every process of an engine must pass the same num_blocks and block_size_bytes; another engine needs another engine_id"
                    .into()
            }
            Self::NoSpace { resource, .. } => match resource {
                Resource::Space => {
                    "make /dev/shm larger (docker: --shm-size or --ipc=host; Kubernetes: an emptyDir with medium Memory), or ask for fewer blocks"
                        .into()
                }
                Resource::Quota => {
                    "the filesystem has room, this user's quota has not: remove what the user no longer needs there, or have the quota raised (`mount | grep /dev/shm` and `quota` show it; systemd sets one at log-in)"
                        .into()
                }
                Resource::Inodes => {
                    "bytes may be free, but the mount's nr_inodes are used up: remove small files or remount with more".into()
                }
                Resource::Memory => {
                    "the region would not fit into this machine's memory: ask for fewer blocks".into()
                }
                Resource::FileSizeLimit => "raise it with `ulimit -f unlimited`".into(),
            },
            Self::NoHugePages { .. } => {
                "huge_pages=\"auto\" takes what there is; to have more, free memory, restart long-running processes, or mount /dev/shm with huge=within_size"
                    .into()
            }
            Self::Foreign { .. } => {
                "it was left untouched; remove it if it is not needed, or use another engine_id".into()
            }
            Self::Exists { .. } => {
                "use mode=\"create_or_join\" to share it, or another engine_id".into()
            }
            Self::Timeout { state, similar, .. } => {
                let mut hint = String::from(match state {
                    WaitState::DeadFile { .. } => "a constructor that may create replaces it: use mode=\"create_or_join\"",
                    WaitState::NoFile { .. } => {
                        "is the engine running, on this host and in this container? /dev/shm is not shared between hosts, and a log-out can take names away (systemd's RemoveIPC)"
                    }
                    WaitState::NotSized { .. } => {
                        "is its creator stuck, or was it started with a smaller geometry?"
                    }
                    WaitState::BeingPrepared { .. } => {
                        "a large region takes seconds to prepare: give a longer timeout"
                    }
                    WaitState::FileLocked | WaitState::DirectoryLocked | WaitState::Unsettled => {
                        "look for a stopped process that uses /dev/shm (`lslocks` shows it)"
                    }
                });
                if !similar.is_empty() {
                    hint.push_str("; regions present: ");
                    let similar: Vec<_> = similar.iter().map(|id| Shown(id).to_string()).collect();
                    hint.push_str(&similar.join(", "));
                }
                if let Ok(host) = nix::sys::utsname::uname() {
                    hint.push_str("; host: ");
                    hint.push_str(&host.nodename().to_string_lossy());
                }
                hint
            }
            Self::BlockOutOfRange { num_blocks, .. } => {
                format!("ids are whole numbers from 0 to {}; none counts from the end", num_blocks.saturating_sub(1))
            }
            Self::DuplicateBlock { .. } => "give each block once, with the bytes that it shall hold".into(),
            Self::PartialBytes { .. } => {
                "nbytes is what moves in all: every block in full, and of the last one at least a byte".into()
            }
            Self::BytesMismatch { what, held_bytes, .. } => {
                format!("where only a part of the last block is meant, pass nbytes={held_bytes}, the bytes that `{what}` holds")
            }
            Self::Overlap { what } => {
                format!("copy `{what}` first (`.clone()`), or name other blocks: a view of the rest of the region is fine")
            }
            Self::Closed => "open a new region: a closed one does not come back".into(),
            Self::Forked => "open the region in the child by a call of its own".into(),
            Self::Interrupted => return None,
            Self::Os { call, path, source } => hint_for_call(call, path, source.raw_os_error()),
        };
        Some(text)
    }
}

/// What a person can do about a system call that failed with `errno`.
fn hint_for_call(call: &str, path: &Path, errno: Option<i32>) -> String {
    let Some(errno) = errno else {
        return "the system lacks what this needs: OFD locks, and /proc or the region's name".into();
    };
    match (call, errno) {
        ("mmap", libc::EACCES | libc::EPERM) => {
            "the file may be opened and not mapped: a security policy forbids it (SELinux `map`, seccomp, AppArmor `m`); its log tells which rule".into()
        }
        ("mmap", libc::EAGAIN) => {
            "this process locks all its memory (mlockall) and may not lock that much: raise `ulimit -l`".into()
        }
        ("flock", libc::ENOLCK | libc::ENOSYS | libc::EINVAL | libc::EOPNOTSUPP) => {
            "regions need `flock`, which this filesystem or sandbox does not have".into()
        }
        ("ftruncate" | "fallocate", libc::EINVAL | libc::EOPNOTSUPP) => {
            "is it a tmpfs? a hugetlbfs, for example, has no files of any size".into()
        }
        // Only of the directory: a name that is missing is no error anywhere.
        (_, libc::ENOENT | libc::ENOTDIR) => {
            format!("is `{}` mounted? regions need a writable tmpfs there", shown(path))
        }
        (_, libc::EROFS) => "the filesystem is mounted read-only: remount it read-write".into(),
        (_, libc::EACCES | libc::EPERM) => {
            "check the owner and mode of the directory (1777), and the sandbox's rules".into()
        }
        (_, libc::EMFILE | libc::ENFILE) => "raise the limit of open files (`ulimit -n`)".into(),
        (_, libc::ENOMEM) => {
            "the address space or the memory of this process is limited (`ulimit -v`, cgroup, `sysctl vm.max_map_count`)".into()
        }
        (_, libc::EBADF) => {
            "somebody closed all descriptors of this process, as daemons do when they start: open regions after that; blocks that are mapped stay usable".into()
        }
        _ => "the kernel or a sandbox did not let it happen: the manual page of the call explains the error".into(),
    }
}
