//! Registration of host memory with a device: a pure plan, and the rule "all or nothing".
//! What talks to a device is a [`HostRegistrar`]; see [`crate::cuda`] for the one of CUDA.

use std::fmt;
use std::ops::Range;

/// Drivers of the R580 series and later refuse one call of 512 GiB, and one call holds a driver-wide
/// lock for its whole time (vllm-project/vllm issue 51080).
pub const MAX_PIECE_BYTES: usize = 64 << 30;

/// `cudaErrorHostMemoryAlreadyRegistered`.
const ALREADY_REGISTERED: i32 = 712;
/// Codes that say "the runtime or its context is going or gone": at the end of a process that is no
/// fault (`cudaErrorCudartUnloading`, `cudaErrorDeviceUninitialized`, `cudaErrorContextIsDestroyed`).
const BENIGN_AT_RELEASE: [i32; 3] = [4, 201, 709];

/// A call that a device runtime answered with an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub code: i32,
    /// The symbolic name, such as `cudaErrorMemoryAllocation`.
    pub name: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "code {} ({})", self.code, self.name)
    }
}

/// What a device runtime does with host memory.
pub trait HostRegistrar: Send + Sync {
    /// # Errors
    /// The runtime's answer. No error stays pending in the runtime.
    fn register(&self, address: usize, len_bytes: usize) -> Result<(), Refusal>;

    /// # Errors
    /// As [`HostRegistrar::register`].
    fn unregister(&self, address: usize) -> Result<(), Refusal>;
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Cuts `0..total_bytes` so that no block lies across two registrations and no two registrations
/// share a page: every cut is a multiple of lcm(page, block). Pieces have at most `max_piece_bytes`,
/// or one such step where that is more.
#[must_use]
pub fn plan(
    total_bytes: usize,
    page_bytes: usize,
    block_size_bytes: usize,
    max_piece_bytes: usize,
) -> Vec<Range<usize>> {
    let (page, block) = (page_bytes.max(1), block_size_bytes.max(1));
    let piece = (page / gcd(page, block))
        .checked_mul(block)
        .map_or(total_bytes, |step| (max_piece_bytes / step).max(1).saturating_mul(step))
        .max(1);
    (0..total_bytes)
        .step_by(piece)
        .map(|start| start..total_bytes.min(start.saturating_add(piece)))
        .collect()
}

/// A region whose every byte is registered.
pub struct Pinned {
    registrar: Box<dyn HostRegistrar>,
    /// Addresses that were registered by us; empty where somebody else had done it.
    addresses: Vec<usize>,
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned")
            .field("addresses", &self.addresses)
            .finish_non_exhaustive()
    }
}

impl Pinned {
    /// Registers every piece, or none: a refusal undoes the pieces before it, in reverse order.
    ///
    /// # Errors
    /// The first refusal.
    pub fn register(registrar: Box<dyn HostRegistrar>, base: usize, pieces: &[Range<usize>]) -> Result<Self, Refusal> {
        let mut addresses = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let address = base + piece.start;
            match registrar.register(address, piece.len()) {
                Ok(()) => addresses.push(address),
                Err(refusal) if refusal.code == ALREADY_REGISTERED => {} // pinned, and not ours to undo
                Err(refusal) => {
                    for &address in addresses.iter().rev() {
                        let _ = registrar.unregister(address);
                    }
                    return Err(refusal);
                }
            }
        }
        Ok(Self { registrar, addresses })
    }

    /// Unregisters exactly what was registered.
    ///
    /// # Errors
    /// The refusals that leave the driver with pages of ours: the memory must stay mapped then.
    pub fn release(self) -> Result<(), Vec<Refusal>> {
        let refusals: Vec<_> = self
            .addresses
            .iter()
            .rev()
            .filter_map(|&address| self.registrar.unregister(address).err())
            .filter(|refusal| !BENIGN_AT_RELEASE.contains(&refusal.code))
            .collect();
        if refusals.is_empty() { Ok(()) } else { Err(refusals) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::{Arc, Mutex};

    /// Records calls, and refuses what it is told to.
    #[derive(Default)]
    struct Recorder {
        calls: Arc<Mutex<Vec<(bool, usize)>>>,
        refuse_register: Option<(usize, i32)>,
        refuse_unregister: Option<i32>,
    }

    fn refusal(code: i32) -> Refusal {
        Refusal {
            code,
            name: String::from("test"),
        }
    }

    impl HostRegistrar for Recorder {
        fn register(&self, address: usize, _: usize) -> Result<(), Refusal> {
            self.calls.lock().unwrap().push((true, address));
            match self.refuse_register {
                Some((at, code)) if at == address => Err(refusal(code)),
                _ => Ok(()),
            }
        }
        fn unregister(&self, address: usize) -> Result<(), Refusal> {
            self.calls.lock().unwrap().push((false, address));
            self.refuse_unregister.map_or(Ok(()), |code| Err(refusal(code)))
        }
    }

    const PIECES: [Range<usize>; 3] = [0..10, 10..20, 20..25];

    #[test]
    fn a_refusal_undoes_what_was_done_in_reverse() {
        let recorder = Recorder {
            refuse_register: Some((1020, 2)),
            ..Recorder::default()
        };
        let calls = Arc::clone(&recorder.calls);
        let refused = Pinned::register(Box::new(recorder), 1000, &PIECES).unwrap_err();
        assert_eq!(refused.code, 2);
        assert_eq!(
            *calls.lock().unwrap(),
            [(true, 1000), (true, 1010), (true, 1020), (false, 1010), (false, 1000)]
        );
    }

    #[test]
    fn what_somebody_else_registered_is_pinned_and_not_ours_to_undo() {
        let recorder = Recorder {
            refuse_register: Some((1010, ALREADY_REGISTERED)),
            ..Recorder::default()
        };
        let calls = Arc::clone(&recorder.calls);
        Pinned::register(Box::new(recorder), 1000, &PIECES)
            .unwrap()
            .release()
            .unwrap();
        assert_eq!(calls.lock().unwrap()[3..], [(false, 1020), (false, 1000)]);
    }

    #[test]
    fn a_runtime_that_is_going_is_no_fault_and_any_other_refusal_is() {
        for (code, is_fault) in [(4, false), (201, false), (709, false), (1, true)] {
            let recorder = Recorder {
                refuse_unregister: Some(code),
                ..Recorder::default()
            };
            let pinned = Pinned::register(Box::new(recorder), 1000, &PIECES).unwrap();
            assert_eq!(pinned.release().is_err(), is_fault, "code {code}");
        }
    }

    #[test]
    fn rows_of_7168_bytes_are_cut_at_28672() {
        let pieces = plan(100 * 7168, 4096, 7168, 64 << 10);
        assert!(pieces.len() > 1);
        assert!(pieces.iter().all(|piece| piece.start % 28672 == 0));
    }

    proptest! {
        #[test]
        fn a_plan_covers_all_and_splits_nothing(
            blocks in 1usize..2000,
            block in 1usize..20_000,
            page in prop_oneof![Just(4096usize), Just(65_536), Just(2 << 20)],
            max in 1usize..(1 << 30),
        ) {
            let total = blocks * block;
            let mut end = 0;
            for piece in plan(total, page, block, max) {
                prop_assert_eq!(piece.start, end);
                prop_assert!(!piece.is_empty());
                prop_assert_eq!(piece.start % page, 0);
                prop_assert_eq!(piece.start % block, 0);
                end = piece.end;
            }
            prop_assert_eq!(end, total);
        }
    }
}
