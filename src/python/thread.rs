//! Which thread runs Python's signal handlers, and what becomes of the others when the interpreter ends.
//!
//! A daemon thread that asks for the GIL of an ending interpreter is killed by unwinding, which Rust does not
//! survive. So before the interpreter begins to end ([`end`], called at exit) nobody may be left on the way back
//! from native work, and whoever comes later waits for the end of the process instead, holding nothing.

#![allow(unsafe_code)] // the interpreter's number, which has no safe wrapper

use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use nix::unistd::{getpid, gettid};
use pyo3::exceptions::PyImportError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::fork;
use crate::gate::{Gate, Inside};
use crate::sync::AtomicUsize;

/// Python's main thread: not the process's first where a program embeds the interpreter in another.
static MAIN_THREAD: AtomicI32 = AtomicI32::new(0);
/// Threads between native work and Python are inside; closed when the interpreter is about to end.
static WAY_BACK: Gate = Gate::new(AtomicUsize::new(0));

/// What runs without the GIL comes back to the main interpreter: in another one it would wait for itself.
pub(super) fn must_be_main_interpreter() -> PyResult<()> {
    const MAIN: i64 = 0; // PyInterpreterState_GetID

    // SAFETY: the import of this module holds the GIL, so there is a current interpreter.
    let id = unsafe { ffi::PyInterpreterState_GetID(ffi::PyInterpreterState_Get()) };
    if id == MAIN {
        return Ok(());
    }
    Err(PyImportError::new_err(
        "ec_shared_region does not work in a sub-interpreter\nhint: import it in the main interpreter, or in a process of its own",
    ))
}

pub(super) fn learn_main_thread(py: Python<'_>) -> PyResult<()> {
    let main = py.import("threading")?.call_method0("main_thread")?;
    let id: Option<i32> = main.getattr("native_id")?.extract()?;
    MAIN_THREAD.store(id.unwrap_or(0), Ordering::Relaxed);
    // Else a child forked while a thread was on the way back would wait for that thread at its end.
    fork::in_children(|| WAY_BACK.forget_inside());
    Ok(())
}

/// Python runs signal handlers in its main thread only. In a forked child that is the process's first.
pub(super) fn runs_signal_handlers() -> bool {
    gettid() == getpid() || gettid().as_raw() == MAIN_THREAD.load(Ordering::Relaxed)
}

/// A thread on its way back to Python is inside until it drops this, there. Does not come back if the
/// interpreter is ending.
pub(super) fn begin_return() -> Option<Inside<'static>> {
    if runs_signal_handlers() {
        return None; // it is the main thread that ends the interpreter
    }
    let inside = WAY_BACK.enter();
    if inside.is_none() {
        loop {
            std::thread::park();
        }
    }
    inside
}

/// Is the interpreter about to end?
pub(super) fn is_ending() -> bool {
    WAY_BACK.is_closed()
}

/// The interpreter is about to end: lets those who are on the way back arrive, and nobody follow.
pub(super) fn end(py: Python<'_>) {
    const PATIENCE: Duration = Duration::from_secs(1);

    WAY_BACK.close();
    py.detach(|| {
        let since = Instant::now();
        while !WAY_BACK.is_empty() && since.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_micros(200));
        }
    });
}
