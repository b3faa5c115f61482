//! A table of numbers (descriptors) that threads put in and take out without a lock, so that the handler of a fork
//! can read it.

use std::sync::atomic::Ordering;

use crate::sync::AtomicI32;

/// A slot without a number: no descriptor is negative.
pub const FREE: i32 = -1;

#[derive(Debug)]
pub struct Slots<const N: usize>([AtomicI32; N]);

impl<const N: usize> Slots<N> {
    /// All of `slots` are [`FREE`].
    #[must_use]
    pub const fn new(slots: [AtomicI32; N]) -> Self {
        Self(slots)
    }

    /// `None` where every slot is taken. Nobody else puts the same number in before this one is out again: a
    /// descriptor has one owner.
    pub fn put(&self, number: i32) -> Option<Taken<'_>> {
        // No order is asked for: a slot carries nothing but its number, and a fork sees what its own thread saw.
        let slot = self.0.iter().find(|slot| {
            slot.compare_exchange(FREE, number, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
        })?;
        Some(Taken { slot, number })
    }

    /// Takes every number out. For a forked child, where nobody else is at work; it allocates nothing.
    pub fn drain(&self, mut each: impl FnMut(i32)) {
        for slot in &self.0 {
            let number = slot.swap(FREE, Ordering::Relaxed);
            if number != FREE {
                each(number);
            }
        }
    }

    #[cfg(test)]
    pub fn holds(&self, number: i32) -> bool {
        self.0.iter().any(|slot| slot.load(Ordering::Relaxed) == number)
    }
}

/// A slot that holds a number until dropped.
#[derive(Debug)]
pub struct Taken<'s> {
    slot: &'s AtomicI32,
    number: i32,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        // Not in a child, where the handler emptied the slot and another may have taken it.
        let _ = self
            .slot
            .compare_exchange(self.number, FREE, Ordering::Relaxed, Ordering::Relaxed);
    }
}
