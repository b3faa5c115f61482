//! What this process did so far, for whoever exports metrics. A forked child goes on from its parent's numbers.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Numbers since the process began.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct Counters { $($(#[$doc])* pub $name: u64,)* }

        #[derive(Debug, Default)]
        pub(crate) struct Counting { $(pub(crate) $name: AtomicU64,)* }

        pub(crate) static COUNTING: Counting = Counting { $($name: AtomicU64::new(0),)* };

        impl Counters {
            /// Their names, in order, with the values.
            #[must_use]
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }

        /// The numbers now.
        #[must_use]
        pub fn now() -> Counters {
            Counters { $($name: COUNTING.$name.load(Ordering::Relaxed),)* }
        }
    };
}

counters! {
    /// Constructors that made a region.
    created,
    /// Constructors that joined one.
    joined,
    /// Constructors that ended in an error, a timeout or Ctrl-C.
    failed,
    /// Files of the dead that were removed, by constructors, by the last out, and by `reap`.
    reclaimed_files,
    /// Bytes that came back with them.
    reclaimed_bytes,
    /// Constructors that took a slower way to prepare the region than the machine could have.
    fallbacks,
    /// Registrations of a whole region with a device.
    pinned,
    /// Registrations that the runtime refused.
    pins_refused,
    /// Registrations that were not tried: no CUDA, or switched off.
    pins_skipped,
}

pub(crate) fn count(counter: &AtomicU64) {
    add(counter, 1);
}

pub(crate) fn add(counter: &AtomicU64, number: u64) {
    counter.fetch_add(number, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_counts_and_goes_by_its_name() {
        let before = now();
        count(&COUNTING.pins_skipped);
        add(&COUNTING.pins_skipped, 2);
        assert_eq!(now().pins_skipped, before.pins_skipped + 3);
        let named = now().named();
        assert_eq!(named.first().map(|(name, _)| *name), Some("created"));
        assert!(named.contains(&("pins_skipped", now().pins_skipped)));
    }
}
