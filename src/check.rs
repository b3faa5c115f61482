//! What a careful operator asks of a live region, without touching its memory: a page of a file that was
//! shortened is SIGBUS.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::directory::Directory;
use crate::holders;
use crate::lock;
use crate::spec::Geometry;

/// What stands at the region's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Name {
    /// Our file.
    Ours,
    /// Nothing: somebody took the name away (its creator by closing; a person; a clean-up daemon).
    Lost,
    /// Another file: whoever opens the id now gets another region.
    Replaced,
}

/// What a live region is found to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckReport {
    pub name: Name,
    /// The size of the file now, and the size that is mapped.
    pub size_bytes: u64,
    pub expected_bytes: u64,
    /// Bytes that the filesystem holds for it.
    pub allocated_bytes: u64,
    pub links: u64,
    /// Permission bits.
    pub mode: u32,
    pub uid: u32,
    /// A creator is still at work: not every byte is backed yet.
    pub is_being_prepared: bool,
    /// A block size that another holder announces and that is not ours.
    pub foreign_block_size: Option<u64>,
    /// Processes that have it open or mapped, as far as they can be seen from here; this one is among them.
    pub holders: Vec<u32>,
    /// Holders of the life lock that cannot be seen from here: other PID namespaces.
    pub unseen_holders: usize,
}

/// Which creation of a region this is. Participants can compare it over a channel of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    pub device: u64,
    pub inode: u64,
    /// Chosen when the region was created; tmpfs uses inode numbers again, a nonce is used once.
    pub nonce: u64,
}

impl Identity {
    /// # Errors
    /// The error of `fstat(2)`, or of opening the file again.
    pub fn of(file: &File, path: &Path) -> io::Result<Self> {
        let unsupported = |what| io::Error::new(io::ErrorKind::Unsupported, what);
        let meta = file.metadata()?;
        // Locks of one open file are no conflict for itself: another one sees what we announce. /proc may be missing,
        // and the name may be lost.
        let other = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).or_else(|error| {
            match (error.kind(), File::open(path)) {
                (io::ErrorKind::NotFound, Ok(named)) => Ok(named),
                (io::ErrorKind::NotFound, Err(_)) => Err(unsupported("neither /proc nor the name is there")),
                _ => Err(error),
            }
        })?;
        let seen = other.metadata()?;
        if (seen.dev(), seen.ino()) != (meta.dev(), meta.ino()) {
            return Err(unsupported("no /proc, and another file at the name"));
        }
        let nonce = lock::announced_nonce(&other).ok_or_else(|| unsupported("this system has no OFD locks"))?;
        Ok(Self {
            device: meta.dev(),
            inode: meta.ino(),
            nonce,
        })
    }
}

/// # Errors
/// The error of `fstat(2)`.
pub fn check(file: &File, directory: &Directory, name: &CStr, geometry: Geometry) -> io::Result<CheckReport> {
    let meta = file.metadata()?;
    let identity = holders::FileIdentity {
        device: meta.dev(),
        inode: meta.ino(),
    };
    let at_name = std::fs::symlink_metadata(directory.join(name)).ok();
    Ok(CheckReport {
        name: match at_name {
            None => Name::Lost,
            Some(found) if found.dev() == identity.device && found.ino() == identity.inode => Name::Ours,
            Some(_) => Name::Replaced,
        },
        size_bytes: meta.len(),
        expected_bytes: geometry.total_bytes() as u64,
        allocated_bytes: meta.blocks().saturating_mul(512),
        links: meta.nlink(),
        mode: meta.mode() & 0o7777,
        uid: meta.uid(),
        is_being_prepared: lock::is_being_prepared(file),
        foreign_block_size: lock::announced_block_size(file)
            .filter(|&announced| announced != geometry.block_size_bytes() as u64),
        holders: holders::of(identity),
        unseen_holders: holders::unseen(identity),
    })
}
