//! Registration of host memory with a device: a pure plan, and the rule "all or nothing".
//! What talks to a device is a [`HostRegistrar`]; see [`crate::cuda`] for the one of CUDA.

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::step::{Step, reached};

/// Drivers of the R580 series and later refuse one call of 512 GiB, and one call holds a driver-wide
/// lock for its whole time (vllm-project/vllm issue 51080).
pub const MAX_PIECE_BYTES: usize = 64 << 30;
/// Halving a refused piece ends here (or at one step of the plan, where that is more).
pub const SMALLEST_PIECE_BYTES: usize = 1 << 20;

/// `cudaErrorInvalidValue` and `cudaErrorMemoryAllocation`: what drivers answer to a piece that is too
/// large, as well as to one that is wrong. A smaller one tells.
const MAY_FIT_IF_SMALLER: [i32; 2] = [1, 2];
/// `cudaErrorHostMemoryAlreadyRegistered`.
const ALREADY_REGISTERED: i32 = 712;
/// Codes that say "the runtime or its context is going or gone": at the end of a process that is no
/// fault (`cudaErrorCudartUnloading`, `cudaErrorDeviceUninitialized`, `cudaErrorContextIsDestroyed`).
const BENIGN_AT_RELEASE: [i32; 3] = [4, 201, 709];

/// A call that a device runtime answered with an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The runtime's function, such as `cudaHostRegister`.
    pub call: &'static str,
    pub code: i32,
    /// The symbolic name, such as `cudaErrorMemoryAllocation`; empty where the runtime has none.
    pub name: String,
    /// The runtime's own words; empty where it has none.
    pub text: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "code {}", self.code)?;
        if !self.name.is_empty() {
            write!(f, " ({})", self.name)?;
        }
        if !self.text.is_empty() {
            write!(f, ": {}", self.text)?;
        }
        Ok(())
    }
}

/// What a device runtime does with host memory. Other devices follow by implementing it.
pub trait HostRegistrar: Send + Sync {
    /// # Errors
    /// The runtime's answer. No error of this call stays pending in the runtime.
    fn register(&self, address: usize, len_bytes: usize) -> Result<(), Refusal>;

    /// # Errors
    /// As [`HostRegistrar::register`].
    fn unregister(&self, address: usize) -> Result<(), Refusal>;

    /// Is the byte at `address` registered, by whomever? `None` where the runtime cannot tell.
    fn is_registered(&self, _address: usize) -> Option<bool> {
        None
    }

    /// Makes a row of calls, with the wanted device current.
    ///
    /// # Errors
    /// The device cannot be made current; then no call was made.
    fn run(&self, calls: &mut (dyn FnMut() + Send)) -> Result<(), Refusal> {
        calls();
        Ok(())
    }

    /// The word for it in reports.
    fn backend(&self) -> &'static str;

    /// The library that answers, where that is known.
    fn library_path(&self) -> Option<PathBuf>;
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Where a region may be cut: at multiples of lcm(page, block), so that no block lies across two
/// registrations (a copy of it would fail) and no two registrations share a page (error 712).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    total_bytes: usize,
    page_bytes: usize,
    /// A piece has a multiple of this; the whole region, where the lcm does not fit into it.
    step_bytes: usize,
}

impl Plan {
    #[must_use]
    pub fn new(total_bytes: usize, page_bytes: usize, block_size_bytes: usize) -> Self {
        let (page, block) = (page_bytes.max(1), block_size_bytes.max(1));
        let step = (page / gcd(page, block)).checked_mul(block).unwrap_or(total_bytes);
        Self {
            total_bytes,
            page_bytes: page,
            step_bytes: step.min(total_bytes.max(1)),
        }
    }

    /// The largest piece of at most `max_bytes`: all, or a multiple of the step, and at least one.
    fn piece(&self, max_bytes: usize) -> usize {
        if self.total_bytes <= max_bytes {
            return self.total_bytes;
        }
        (max_bytes / self.step_bytes).max(1).saturating_mul(self.step_bytes)
    }

    /// What to register at `offset`: a piece, or what is left, rounded up to its page (which the mapping
    /// has anyhow).
    fn len_at(&self, offset: usize, piece_bytes: usize) -> usize {
        let left = self.total_bytes - offset;
        if piece_bytes < left {
            piece_bytes
        } else {
            left.checked_next_multiple_of(self.page_bytes).unwrap_or(left)
        }
    }
}

/// What a registration came to.
#[derive(Debug, Clone, PartialEq)]
pub struct PinReport {
    pub backend: &'static str,
    pub library_path: Option<PathBuf>,
    /// Calls that registered something.
    pub pieces: usize,
    /// Pieces that somebody else had registered before.
    pub foreign_pieces: usize,
    pub elapsed: Duration,
}

/// A refusal, and what was asked for.
#[derive(Debug)]
pub struct PinRefused {
    pub refusal: Refusal,
    pub backend: &'static str,
    pub library_path: Option<PathBuf>,
    /// The size of the piece that was refused.
    pub piece_bytes: usize,
    pub elapsed: Duration,
    /// Pieces before it that could not be undone: the memory must stay mapped.
    pub not_undone: Option<Leftover>,
}

/// Registrations that the driver would not take back.
#[derive(Debug)]
pub struct Leftover {
    pub refusals: Vec<Refusal>,
    /// What is still registered; to be released again later.
    pub pinned: Pinned,
}

/// A region whose every byte is registered. Dropping it takes the registrations back as well as it can.
pub struct Pinned {
    registrar: Box<dyn HostRegistrar>,
    /// Addresses that we registered, in order; not those that somebody else had.
    addresses: Vec<usize>,
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned")
            .field("addresses", &self.addresses)
            .finish_non_exhaustive()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.release_all();
    }
}

impl Pinned {
    /// Registers everything from `base` on, or nothing. A piece that is refused for its size or for lack
    /// of memory is halved before giving up; giving up undoes the pieces before it, in reverse order.
    ///
    /// # Errors
    /// The last refusal.
    pub fn register(
        registrar: Box<dyn HostRegistrar>,
        base: usize,
        plan: Plan,
        max_piece_bytes: usize,
    ) -> Result<(Self, PinReport), Box<PinRefused>> {
        let began = Instant::now();
        let mut pinned = Self {
            registrar,
            addresses: Vec::new(),
        };
        let mut addresses = Vec::new();
        let mut result = Ok(0);
        let ran = pinned
            .registrar
            .run(&mut || result = register_pieces(&*pinned.registrar, base, plan, max_piece_bytes, &mut addresses));
        pinned.addresses = addresses;
        let refused = match (ran, result) {
            (Ok(()), Ok(foreign_pieces)) => {
                let report = PinReport {
                    backend: pinned.registrar.backend(),
                    library_path: pinned.registrar.library_path(),
                    pieces: pinned.addresses.len(),
                    foreign_pieces,
                    elapsed: began.elapsed(),
                };
                return Ok((pinned, report));
            }
            (Ok(()), Err(refused)) => refused,
            (Err(refusal), _) => (refusal, 0),
        };
        reached(Step::Rollback);
        Err(Box::new(PinRefused {
            refusal: refused.0,
            backend: pinned.registrar.backend(),
            library_path: pinned.registrar.library_path(),
            piece_bytes: refused.1,
            elapsed: began.elapsed(),
            not_undone: pinned.release().err(),
        }))
    }

    /// Unregisters exactly what was registered, in reverse order.
    ///
    /// # Errors
    /// What the driver would not take back: the memory must stay mapped then.
    pub fn release(mut self) -> Result<(), Leftover> {
        let refusals = self.release_all();
        if refusals.is_empty() {
            Ok(())
        } else {
            Err(Leftover { refusals, pinned: self })
        }
    }

    fn release_all(&mut self) -> Vec<Refusal> {
        let addresses = std::mem::take(&mut self.addresses);
        if addresses.is_empty() {
            return Vec::new();
        }
        let (mut kept, mut refusals) = (Vec::new(), Vec::new());
        let ran = self.registrar.run(&mut || {
            for &address in addresses.iter().rev() {
                match self.registrar.unregister(address) {
                    Err(refusal) if !BENIGN_AT_RELEASE.contains(&refusal.code) => {
                        kept.push(address);
                        refusals.push(refusal);
                    }
                    Ok(()) | Err(_) => {}
                }
            }
        });
        kept.reverse();
        self.addresses = kept;
        if let Err(refusal) = ran {
            self.addresses = addresses;
            refusals = vec![refusal];
        }
        refusals
    }
}

/// Registers pieces until all is registered, or one is refused for good: the refusal and the piece's size.
/// Returns how many pieces somebody else had registered.
fn register_pieces(
    registrar: &dyn HostRegistrar,
    base: usize,
    plan: Plan,
    max_piece_bytes: usize,
    addresses: &mut Vec<usize>,
) -> Result<usize, (Refusal, usize)> {
    let mut foreign_pieces = 0;
    let mut piece = plan.piece(max_piece_bytes);
    let smallest = plan.piece(SMALLEST_PIECE_BYTES.min(piece));
    let mut offset = 0;
    while offset < plan.total_bytes {
        let len = plan.len_at(offset, piece);
        let address = base + offset;
        reached(Step::Register);
        match registrar.register(address, len) {
            Ok(()) => addresses.push(address),
            Err(refusal) if refusal.code == ALREADY_REGISTERED => {
                // The answer is the same where only a part of the piece is registered, which is not pinned.
                let ends = [address, address + len - 1];
                if ends.iter().any(|&end| registrar.is_registered(end) == Some(false)) {
                    return Err((refusal, len));
                }
                foreign_pieces += 1;
            }
            Err(refusal) if MAY_FIT_IF_SMALLER.contains(&refusal.code) && piece.min(len) > smallest => {
                piece = plan.piece(piece.min(len) / 2).max(smallest);
                continue;
            }
            Err(refusal) => return Err((refusal, len)),
        }
        offset += len;
    }
    Ok(foreign_pieces)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::{Arc, Mutex};

    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Call {
        Register(usize, usize),
        Unregister(usize),
    }
    use Call::{Register, Unregister};

    type Rule = Box<dyn Fn(usize, usize) -> i32 + Send + Sync>;

    /// Records calls, and answers what it is told to.
    struct Recorder {
        calls: Arc<Mutex<Vec<Call>>>,
        /// The code for a registration of (address, length).
        register: Rule,
        unregister: i32,
        /// Addresses below this are registered, by whomever.
        registered_below: Option<usize>,
    }

    fn answer(code: i32) -> Result<(), Refusal> {
        if code == 0 {
            return Ok(());
        }
        Err(Refusal {
            call: "test",
            code,
            name: String::from("test"),
            text: String::new(),
        })
    }

    impl HostRegistrar for Recorder {
        fn register(&self, address: usize, len: usize) -> Result<(), Refusal> {
            self.calls.lock().unwrap().push(Register(address, len));
            answer((self.register)(address, len))
        }
        fn unregister(&self, address: usize) -> Result<(), Refusal> {
            self.calls.lock().unwrap().push(Unregister(address));
            answer(self.unregister)
        }
        fn is_registered(&self, address: usize) -> Option<bool> {
            self.registered_below.map(|end| address < end)
        }
        fn backend(&self) -> &'static str {
            "test"
        }
        fn library_path(&self) -> Option<PathBuf> {
            None
        }
    }

    const BASE: usize = 1 << 30;

    type Outcome = Result<(Pinned, PinReport), Box<PinRefused>>;

    fn pin(
        plan: Plan,
        max: usize,
        unregister: i32,
        register: impl Fn(usize, usize) -> i32 + Send + Sync + 'static,
    ) -> (Outcome, Arc<Mutex<Vec<Call>>>) {
        let calls = Arc::default();
        let recorder = Recorder {
            calls: Arc::clone(&calls),
            register: Box::new(register),
            unregister,
            registered_below: None,
        };
        (Pinned::register(Box::new(recorder), BASE, plan, max), calls)
    }

    /// Ten pages, a page a block.
    fn ten_pages() -> Plan {
        Plan::new(10 << 12, 1 << 12, 1 << 12)
    }

    #[test]
    fn a_refusal_undoes_what_was_done_in_reverse() {
        let (outcome, calls) = pin(ten_pages(), 4 << 12, 0, |address, _| {
            if address == BASE + (8 << 12) { 801 } else { 0 }
        });
        let refused = outcome.unwrap_err();
        assert_eq!((refused.refusal.code, refused.piece_bytes), (801, 2 << 12));
        assert!(refused.not_undone.is_none());
        assert_eq!(
            *calls.lock().unwrap(),
            [
                Register(BASE, 4 << 12),
                Register(BASE + (4 << 12), 4 << 12),
                Register(BASE + (8 << 12), 2 << 12),
                Unregister(BASE + (4 << 12)),
                Unregister(BASE),
            ]
        );
    }

    #[test]
    fn a_refusal_that_cannot_be_undone_says_so() {
        let (outcome, _) = pin(
            ten_pages(),
            4 << 12,
            1,
            |address, _| if address == BASE { 0 } else { 801 },
        );
        let leftover = outcome.unwrap_err().not_undone.unwrap();
        assert_eq!((leftover.refusals.len(), leftover.pinned.addresses.len()), (1, 1));
    }

    #[test]
    fn what_somebody_else_registered_is_pinned_and_not_ours_to_undo() {
        let (outcome, calls) = pin(ten_pages(), 4 << 12, 0, |address, _| {
            if address == BASE { ALREADY_REGISTERED } else { 0 }
        });
        let (pinned, report) = outcome.unwrap();
        assert_eq!((report.pieces, report.foreign_pieces), (2, 1));
        pinned.release().unwrap();
        assert_eq!(
            calls.lock().unwrap()[3..],
            [Unregister(BASE + (8 << 12)), Unregister(BASE + (4 << 12))]
        );
    }

    #[test]
    fn a_piece_that_somebody_else_registered_in_part_is_not_pinned() {
        for (end, is_pinned) in [(BASE + (10 << 12), true), (BASE + (1 << 12), false)] {
            let recorder = Recorder {
                calls: Arc::default(),
                register: Box::new(|_, _| ALREADY_REGISTERED),
                unregister: 0,
                registered_below: Some(end),
            };
            let outcome = Pinned::register(Box::new(recorder), BASE, ten_pages(), usize::MAX);
            assert_eq!(outcome.is_ok(), is_pinned);
        }
    }

    #[test]
    fn what_was_not_taken_back_is_tried_again() {
        let answers = Arc::new(std::sync::atomic::AtomicI32::new(1));
        struct Late(Arc<std::sync::atomic::AtomicI32>);
        impl HostRegistrar for Late {
            fn register(&self, _: usize, _: usize) -> Result<(), Refusal> {
                Ok(())
            }
            fn unregister(&self, _: usize) -> Result<(), Refusal> {
                answer(self.0.load(std::sync::atomic::Ordering::Relaxed))
            }
            fn backend(&self) -> &'static str {
                "test"
            }
            fn library_path(&self) -> Option<PathBuf> {
                None
            }
        }
        let (pinned, _) = Pinned::register(Box::new(Late(Arc::clone(&answers))), BASE, ten_pages(), 4 << 12).unwrap();
        let leftover = pinned.release().unwrap_err();
        assert_eq!(leftover.pinned.addresses, [BASE, BASE + (4 << 12), BASE + (8 << 12)]);
        answers.store(0, std::sync::atomic::Ordering::Relaxed);
        leftover.pinned.release().unwrap();
    }

    #[test]
    fn a_runtime_that_is_going_is_no_fault_and_any_other_refusal_is() {
        for (code, is_fault) in [(4, false), (201, false), (709, false), (1, true)] {
            let (outcome, _) = pin(ten_pages(), usize::MAX, code, |_, _| 0);
            assert_eq!(outcome.unwrap().0.release().is_err(), is_fault, "code {code}");
        }
    }

    #[test]
    fn pieces_shrink_to_what_the_driver_takes() {
        for code in MAY_FIT_IF_SMALLER {
            let plan = Plan::new(64 << 20, 4096, 7168);
            let (outcome, calls) = pin(plan, usize::MAX, 0, move |_, len| if len > 5 << 20 { code } else { 0 });
            let (_, report) = outcome.unwrap();
            assert!(report.pieces >= 13, "{report:?}");
            let mut end = BASE;
            for call in calls.lock().unwrap().iter() {
                if let Register(address, len) = *call {
                    assert_eq!(address, end);
                    if len <= 5 << 20 {
                        end += len;
                    }
                }
            }
            assert_eq!(end, BASE + (64 << 20));
        }
    }

    #[test]
    fn shrinking_ends_at_a_mebibyte_and_any_other_code_is_final() {
        let plan = Plan::new(64 << 20, 4096, 4096);
        let (outcome, calls) = pin(plan, usize::MAX, 0, |_, _| 2);
        assert_eq!(outcome.unwrap_err().piece_bytes, SMALLEST_PIECE_BYTES);
        assert_eq!(calls.lock().unwrap().len(), 7); // 64, 32, 16, 8, 4, 2, 1 MiB
        let (outcome, calls) = pin(plan, usize::MAX, 0, |_, _| 801);
        assert!(outcome.is_err());
        assert_eq!(calls.lock().unwrap().len(), 1);
    }

    #[test]
    fn rows_of_7168_bytes_are_cut_at_28672() {
        let (_pinned, calls) = pin(Plan::new(9 * 7168, 4096, 7168), 9 * 7168, 0, |_, _| 0);
        assert_eq!(*calls.lock().unwrap(), [Register(BASE, 16 * 4096)]); // it fits into one
        let (_pinned, calls) = pin(Plan::new(100 * 7168, 4096, 7168), 64 << 10, 0, |_, _| 0);
        let calls = calls.lock().unwrap();
        assert!(calls.len() > 2);
        for call in calls.iter() {
            let Register(address, len) = *call else { continue };
            assert_eq!((address - BASE) % 28672, 0);
            assert!(len <= 64 << 10);
        }
    }

    proptest! {
        #[test]
        fn a_registration_covers_all_overlaps_nothing_and_splits_nothing(
            blocks in 1usize..2000,
            block in 1usize..20_000,
            page in prop_oneof![Just(4096usize), Just(65_536), Just(2 << 20)],
            max in 1usize..(1 << 28),
            takes in (1usize << 20)..(1 << 28),
        ) {
            let total = blocks * block;
            let plan = Plan::new(total, page, block);
            let (outcome, calls) = pin(plan, max, 0, move |_, len| i32::from(len > takes));
            let accepted: Vec<_> = calls.lock().unwrap().iter().filter_map(|call| match *call {
                Register(address, len) if len <= takes => Some((address - BASE, len)),
                _ => None,
            }).collect();
            if outcome.is_ok() {
                let mut end = 0;
                for &(start, len) in &accepted {
                    prop_assert_eq!(start, end);
                    prop_assert_eq!(start % page, 0);
                    prop_assert_eq!(start % block, 0);
                    prop_assert_eq!(len % page, 0);
                    end = start + len;
                }
                prop_assert_eq!(end, total.next_multiple_of(page));
            } else {
                // Only where not even one step, or a mebibyte, is taken.
                prop_assert!(plan.step_bytes.max(SMALLEST_PIECE_BYTES).next_multiple_of(page) > takes);
            }
        }
    }
}
