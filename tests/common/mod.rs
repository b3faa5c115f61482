//! What the tests with processes of their own share: the test binary starts itself again as a [`worker`],
//! which the test drives as a [`process::Process`].

#![allow(dead_code)] // each test binary uses a part of it
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)] // a test fails by panicking

pub mod process;
pub mod worker;

use std::fs;
use std::path::PathBuf;

/// A directory of a test's own beside the real regions. It is gone at the end, whatever happens.
pub struct Shm(tempfile::TempDir);

impl Shm {
    pub fn new() -> Self {
        Self(tempfile::tempdir_in("/dev/shm").unwrap())
    }

    pub fn path(&self) -> &std::path::Path {
        self.0.path()
    }

    pub fn file(&self, id: &str) -> PathBuf {
        self.0.path().join(format!("vllm_ec_{id}.mmap"))
    }

    /// The inode that the region's name stands for, if there is one.
    pub fn inode(&self, id: &str) -> Option<u64> {
        use std::os::unix::fs::MetadataExt;
        self.file(id).metadata().ok().map(|meta| meta.ino())
    }

    /// Every name in the directory, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(self.0.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    /// What a process that died long ago left: bytes that nobody must see again.
    pub fn leave_dead(&self, id: &str, bytes: usize) {
        use std::os::unix::fs::PermissionsExt;
        fs::write(self.file(id), vec![0x4f; bytes]).unwrap();
        fs::set_permissions(self.file(id), fs::Permissions::from_mode(0o600)).unwrap();
    }
}
