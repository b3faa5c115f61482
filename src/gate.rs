//! A gate that is closed once: who is inside gets out, and nobody follows.

use std::sync::atomic::Ordering;

use crate::sync::AtomicUsize;

/// The lowest bit of the state says "closed", the rest counts who is inside: in one number, so that whoever
/// enters and whoever closes see each other whatever the order.
const CLOSED: usize = 1;
const ONE_INSIDE: usize = 2;

#[derive(Debug)]
pub struct Gate(AtomicUsize);

impl Gate {
    /// `state` is 0: open, with nobody inside.
    #[must_use]
    pub const fn new(state: AtomicUsize) -> Self {
        Self(state)
    }

    /// `None` where the gate is closed.
    pub fn enter(&self) -> Option<Inside<'_>> {
        let before = self.0.fetch_add(ONE_INSIDE, Ordering::Acquire);
        let inside = Inside(self);
        (before & CLOSED == 0).then_some(inside)
    }

    pub fn close(&self) {
        self.0.fetch_or(CLOSED, Ordering::AcqRel);
    }

    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.load(Ordering::Acquire) & CLOSED != 0
    }

    /// Once this is true of a closed gate it stays true but for those who look in and turn back at once, and all
    /// that was done inside has happened before.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        // Below zero where a thread that was inside forked, and came out in the child, which had forgotten it.
        self.0.load(Ordering::Acquire).cast_signed() < ONE_INSIDE.cast_signed()
    }

    /// In a forked child: the threads inside are the parent's, and none of them comes out here.
    pub fn forget_inside(&self) {
        self.0.fetch_and(CLOSED, Ordering::AcqRel);
    }
}

/// Outside again when dropped.
#[derive(Debug)]
pub struct Inside<'g>(&'g Gate);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(ONE_INSIDE, Ordering::Release);
    }
}
