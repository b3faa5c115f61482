//! Whose turn it is at a region that is locked for a slow step, so that code which runs below that step, in the same
//! thread (a signal handler), does not wait for its own thread, but leaves its wish to it.

use std::sync::atomic::Ordering;

use crate::sync::{AtomicBool, AtomicU64};

#[derive(Debug)]
pub struct Turn {
    /// The number of the thread at work, or 0.
    thread: AtomicU64,
    is_close_wanted: AtomicBool,
}

impl Turn {
    /// `thread` is 0, `is_close_wanted` false: nobody is at work.
    #[must_use]
    pub const fn new(thread: AtomicU64, is_close_wanted: AtomicBool) -> Self {
        Self {
            thread,
            is_close_wanted,
        }
    }

    /// To be called with the lock held, and ended before it is given back. `thread` is the caller's number, not 0.
    pub fn begin(&self, thread: u64) -> Step<'_> {
        self.thread.store(thread, Ordering::Relaxed);
        Step(self)
    }

    /// Is it the thread of this number that is at work? Asked by that thread, which sees its own stores; what
    /// it sees of others' is never its own number.
    #[must_use]
    pub fn is_of(&self, thread: u64) -> bool {
        self.thread.load(Ordering::Relaxed) == thread
    }

    /// To be called where [`Turn::is_of`] says that the caller's own thread is at work.
    pub fn want_close(&self) {
        self.is_close_wanted.store(true, Ordering::Relaxed);
    }
}

/// A slow step, which ends when dropped, also by a panic.
#[derive(Debug)]
pub struct Step<'t>(&'t Turn);

impl Step<'_> {
    /// Says whether somebody below the step wants the region closed. The wish goes to this step and no other, since the
    /// lock is still held.
    #[must_use]
    pub fn end(self) -> bool {
        self.0.is_close_wanted.swap(false, Ordering::Relaxed)
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        self.0.thread.store(0, Ordering::Relaxed);
    }
}
