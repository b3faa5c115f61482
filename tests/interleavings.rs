//! The protocols between our own threads, run under loom: every interleaving of the threads below, with every value that the
//! memory model lets a load see. The files are the product's own, built here over loom's atomics instead of the
//! standard library's; what a test adds is the threads, and memory that loom watches for races.
//!
//! Loom explores each test to its end, and the one with three threads up to four preemptions, which takes a second
//! (`LOOM_MAX_PREEMPTIONS=99` runs it to its end too, in half a minute).

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test fails by panicking
#![allow(clippy::arc_with_non_send_sync)] // loom's threads are not the system's, and its cells watch who comes

use std::sync::Arc; // not loom's, whose counting is no part of the protocols and takes most of the time

use loom::cell::UnsafeCell;
use loom::sync::Mutex;
use loom::thread;

mod sync {
    pub use loom::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize};
}
#[path = "../src/gate.rs"]
mod gate;
#[path = "../src/slots.rs"]
mod slots;
#[path = "../src/turn.rs"]
mod turn;

use gate::Gate;
use slots::{FREE, Slots};
use sync::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize};
use turn::Turn;

/// `docs/protocol.md` has no step for it: the end of the interpreter (`src/python/thread.rs`).
mod the_way_back_to_python {
    use super::*;

    struct Interpreter {
        way_back: Gate,
        /// Read by who is attached, written by the end: loom fails where one may meet the other.
        state: UnsafeCell<()>,
    }

    impl Interpreter {
        fn new() -> Self {
            Self {
                way_back: Gate::new(AtomicUsize::new(0)),
                state: UnsafeCell::new(()),
            }
        }

        /// What `begin_return` does, but that a thread which finds the gate closed ends instead of parking.
        fn return_from_native_work(&self) {
            if let Some(_inside) = self.way_back.enter() {
                self.state.with(|_| ());
            }
        }

        fn end(&self) {
            self.way_back.close();
            // The product looks until it is so; loom tries every moment of one look.
            if self.way_back.is_empty() {
                self.state.with_mut(|_| ());
            }
        }
    }

    #[test]
    fn nobody_is_attached_after_the_end() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = model.preemption_bound.or(Some(4));
        model.check(|| {
            let interpreter = Arc::new(Interpreter::new());
            let threads = [(); 2].map(|()| {
                let interpreter = Arc::clone(&interpreter);
                thread::spawn(move || interpreter.return_from_native_work())
            });
            interpreter.end();
            assert!(interpreter.way_back.is_closed());
            assert!(interpreter.way_back.enter().is_none());
            for thread in threads {
                thread.join().unwrap();
            }
            assert!(interpreter.way_back.is_empty());
        });
    }

    #[test]
    fn a_thread_may_return_again_and_again() {
        loom::model(|| {
            let interpreter = Arc::new(Interpreter::new());
            let other = Arc::clone(&interpreter);
            let thread = thread::spawn(move || {
                other.return_from_native_work();
                other.return_from_native_work();
            });
            interpreter.end();
            thread.join().unwrap();
        });
    }

    #[test]
    fn a_forked_child_forgets_the_parents_threads() {
        loom::model(|| {
            let gate = Gate::new(AtomicUsize::new(0));
            let inside = gate.enter();
            assert!(inside.is_some() && !gate.is_empty());
            gate.forget_inside();
            assert!(gate.is_empty() && !gate.is_closed());
            drop(inside); // the thread that forked, if it was inside itself
            assert!(gate.is_empty() && !gate.is_closed());
            gate.close();
            gate.forget_inside();
            assert!(gate.is_empty() && gate.is_closed());
        });
    }
}

/// Descriptors that forked children must not have (`src/fork.rs`).
mod the_table_of_transient_descriptors {
    use super::*;

    fn slots<const N: usize>() -> Slots<N> {
        Slots::new(std::array::from_fn(|_| AtomicI32::new(FREE)))
    }

    /// What the handler finds in a child that was forked now.
    fn found_by_a_child<const N: usize>(slots: &Slots<N>) -> Vec<i32> {
        let mut found = Vec::new();
        slots.drain(|number| found.push(number));
        found.sort_unstable();
        found
    }

    #[test]
    fn every_descriptor_has_a_slot_of_its_own() {
        loom::model(|| {
            let table = Arc::new(slots::<3>());
            let put = |number| {
                let table = Arc::clone(&table);
                // The slot outlives the thread as a number only: `Taken` borrows the table.
                thread::spawn(move || std::mem::forget(table.put(number).expect("there is room")))
            };
            let threads = [put(3), put(4)];
            std::mem::forget(table.put(5).expect("there is room"));
            for thread in threads {
                thread.join().unwrap();
            }
            assert_eq!(found_by_a_child(&table), [3, 4, 5]);
            assert_eq!(found_by_a_child(&table), []);
        });
    }

    #[test]
    fn what_is_held_is_found_and_what_was_given_back_is_not() {
        loom::model(|| {
            let table = Arc::new(slots::<2>());
            let other = Arc::clone(&table);
            let thread = thread::spawn(move || {
                drop(other.put(4));
                drop(other.put(5));
            });
            let held = table.put(3);
            assert!(held.is_some());
            assert!(table.holds(3));
            thread.join().unwrap();
            assert!(table.holds(3) && !table.holds(4) && !table.holds(5));
            assert_eq!(found_by_a_child(&table), [3]);
            // In the child, whose handler emptied the slot: another number may be there now, and stays.
            let next = table.put(6);
            drop(held);
            assert_eq!(found_by_a_child(&table), [6]);
            drop(next);
        });
    }

    #[test]
    fn a_full_table_refuses_and_loses_nothing() {
        loom::model(|| {
            let table = Arc::new(slots::<1>());
            let other = Arc::clone(&table);
            let thread = thread::spawn(move || other.put(4).is_some());
            let held = table.put(3);
            let was_put = thread.join().unwrap();
            assert!(held.is_some() || was_put);
            assert_eq!(found_by_a_child(&table), if held.is_some() { vec![3] } else { vec![] });
        });
    }
}

/// Pinning, and closing from below it (`src/python/region.rs`).
mod a_region_that_is_locked_for_a_slow_step {
    use super::*;

    /// `PyRegion`, as far as its threads meet: `true` in place of the open region.
    struct Region {
        state: Mutex<Option<bool>>,
        turn: Turn,
    }

    impl Region {
        fn new() -> Self {
            Self {
                state: Mutex::new(Some(true)),
                turn: Turn::new(AtomicU64::new(0), AtomicBool::new(false)),
            }
        }

        /// As `PyRegion::on_region`; `None` where the region is closed, or a handler closed it.
        fn on_region(&self, me: u64, handler: impl FnOnce()) -> Option<()> {
            let is_close_wanted = {
                let state = self.state.lock().unwrap();
                state.as_ref()?;
                let turn = self.turn.begin(me);
                handler();
                let is_close_wanted = turn.end();
                drop(state);
                is_close_wanted
            };
            if is_close_wanted {
                self.close(me);
                return None;
            }
            Some(())
        }

        /// As `PyRegion::_close`.
        fn close(&self, me: u64) {
            if self.turn.is_of(me) {
                self.turn.want_close();
                return;
            }
            self.state.lock().unwrap().take();
        }
    }

    /// A handler that waited for its own thread would be a deadlock, which loom finds.
    #[test]
    fn a_handler_that_closes_is_heard_by_its_own_step() {
        loom::model(|| {
            let region = Arc::new(Region::new());
            let other = Arc::clone(&region);
            let thread = thread::spawn(move || {
                let _ = other.on_region(2, || ());
            });
            let pinned = region.on_region(1, || region.close(1));
            assert_eq!(pinned, None);
            // Not only at some time: when the step has ended the region is closed.
            assert_eq!(*region.state.lock().unwrap(), None);
            thread.join().unwrap();
        });
    }

    #[test]
    fn another_threads_close_waits_and_closes() {
        loom::model(|| {
            let region = Arc::new(Region::new());
            let other = Arc::clone(&region);
            let thread = thread::spawn(move || other.close(2));
            let _ = region.on_region(1, || ());
            thread.join().unwrap();
            assert_eq!(*region.state.lock().unwrap(), None);
        });
    }

    #[test]
    fn two_threads_close_from_below_their_steps() {
        loom::model(|| {
            let region = Arc::new(Region::new());
            let other = Arc::clone(&region);
            let thread = thread::spawn(move || {
                let _ = other.on_region(2, || other.close(2));
            });
            let _ = region.on_region(1, || region.close(1));
            assert_eq!(*region.state.lock().unwrap(), None);
            thread.join().unwrap();
        });
    }
}
