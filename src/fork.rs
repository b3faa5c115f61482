//! A forked child is not a second owner (G11), and it must not carry the signs of a constructor at work in
//! another thread: that thread does not exist in the child, so nobody would ever take them back.
//!
//! A handler that runs in every forked child counts the fork, and replaces the descriptors that are held only
//! for a moment (the directory's lock, the file under construction) by /dev/null. Their numbers stay taken, so
//! that a value in the child that still closes one closes nothing else; their locks are the parent's alone again.
//! A raw `clone` without the C library is not noticed.

#![allow(unsafe_code)] // pthread_atfork, and what may be called between fork and exec

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Once, OnceLock};

use nix::libc;

use crate::slots::{FREE, Slots, Taken};
use crate::sync::AtomicI32;

/// Counts the forks between the first process and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Descriptors that a forked child must not have. A constructor holds a handful at a time; where the table is
/// full, one stays with the child as it would without this.
static TRANSIENT: Slots<256> = Slots::new([const { AtomicI32::new(FREE) }; 256]);

/// See [`in_children`].
static IN_CHILDREN: OnceLock<fn()> = OnceLock::new();

/// Which process this is: unlike a pid, it is never the same for a parent and its child in a new PID namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    pid: u32,
    generation: u32,
}

impl Process {
    #[must_use]
    pub fn current() -> Self {
        watch();
        Self {
            pid: std::process::id(),
            generation: GENERATION.load(Ordering::Relaxed),
        }
    }

    /// For an atomic.
    #[must_use]
    pub fn to_bits(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.pid)
    }

    #[must_use]
    pub fn is_current(self) -> bool {
        self == Self::current()
    }
}

fn watch() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        // SAFETY: the handler is a function of this library, which is never unloaded: Python keeps extension
        // modules, and in a Rust program it is a part of the program.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

/// Has `forget` run in every forked child, to forget threads of the parent. It may do only what a signal handler
/// may. Of several calls the first counts.
pub fn in_children(forget: fn()) {
    watch();
    let _ = IN_CHILDREN.set(forget);
}

/// Runs in the child of a process that may have had threads: only calls that are safe in a signal handler.
extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    if let Some(forget) = IN_CHILDREN.get() {
        forget();
    }
    // SAFETY: open, dup3 and close take numbers and a static string; errno belongs to this thread.
    unsafe {
        let nothing = libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        TRANSIENT.drain(|descriptor| {
            if nothing >= 0 {
                libc::dup3(nothing, descriptor, libc::O_CLOEXEC);
            } else {
                libc::close(descriptor);
            }
        });
        if nothing >= 0 {
            libc::close(nothing);
        }
    }
}

/// Keeps a descriptor out of forked children until dropped.
fn keep_out_of_children(file: &impl AsRawFd) -> Option<Taken<'static>> {
    watch();
    TRANSIENT.put(file.as_raw_fd())
}

/// An open file that a forked child does not have.
#[derive(Debug)]
pub struct Unshared {
    // Dropped in this order: a number must leave the table before it is free for others.
    _transient: Option<Taken<'static>>,
    file: File,
}

impl Unshared {
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// From now on forked children share it.
    #[must_use]
    pub fn share(self) -> File {
        self.file
    }
}

/// The same open file under a number above those of stdin, stdout and stderr: where one of these is closed, the next
/// file gets its number, and what others print would be written into a region.
#[must_use]
pub fn above_standard(fd: OwnedFd) -> OwnedFd {
    if fd.as_raw_fd() > libc::STDERR_FILENO {
        return fd;
    }
    // Cloning takes a number from 3 on. Locks belong to the open file, which stays.
    fd.try_clone().unwrap_or(fd)
}

impl From<OwnedFd> for Unshared {
    fn from(fd: OwnedFd) -> Self {
        let fd = above_standard(fd);
        Self {
            _transient: keep_out_of_children(&fd),
            file: fd.into(),
        }
    }
}

impl std::os::fd::AsFd for Unshared {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_another_process_and_lacks_transient_descriptors() {
        let parent = Process::current();
        assert!(parent.is_current());
        let file = File::open("/proc/self/exe").unwrap();
        let transient = keep_out_of_children(&file);
        let kept = File::open("/proc/self/exe").unwrap();
        // SAFETY: the child makes a few system calls and ends by _exit.
        match unsafe { libc::fork() } {
            0 => {
                let rdev = |file: &File| {
                    let mut stat = std::mem::MaybeUninit::<libc::stat>::zeroed();
                    // SAFETY: writes one stat.
                    unsafe {
                        libc::fstat(file.as_raw_fd(), stat.as_mut_ptr());
                        stat.assume_init().st_rdev
                    }
                };
                let is_null = rdev(&file) == libc::makedev(1, 3) && rdev(&kept) == 0;
                // SAFETY: ends the child.
                unsafe { libc::_exit(i32::from(!is_null || parent.is_current())) };
            }
            child => {
                let mut status = 0;
                // SAFETY: waits for our child.
                unsafe { libc::waitpid(child, &raw mut status, 0) };
                assert_eq!(libc::WEXITSTATUS(status), 0);
            }
        }
        assert!(TRANSIENT.holds(file.as_raw_fd()));
        drop(transient);
        assert!(!TRANSIENT.holds(file.as_raw_fd()));
    }
}
