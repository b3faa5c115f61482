//! Which thread runs Python's signal handlers, and what becomes of the others when the interpreter ends.

use std::sync::atomic::{AtomicI32, Ordering};

use nix::unistd::{getpid, gettid};
use pyo3::prelude::*;

/// Python's main thread: not the process's first where a program embeds the interpreter in another.
static MAIN_THREAD: AtomicI32 = AtomicI32::new(0);

pub(super) fn learn_main_thread(py: Python<'_>) -> PyResult<()> {
    let main = py.import("threading")?.call_method0("main_thread")?;
    let id: Option<i32> = main.getattr("native_id")?.extract()?;
    MAIN_THREAD.store(id.unwrap_or(0), Ordering::Relaxed);
    Ok(())
}

/// Python runs signal handlers in its main thread only. In a forked child that is the process's first.
pub(super) fn runs_signal_handlers() -> bool {
    gettid() == getpid() || gettid().as_raw() == MAIN_THREAD.load(Ordering::Relaxed)
}

/// Called by a thread before it goes back to Python after a long time. If the interpreter is ending, a
/// daemon thread that asks for the GIL is killed by unwinding, which Rust does not survive: it waits
/// here for the end of the process instead, holding nothing.
pub(super) fn end_with_the_interpreter() {
    while Python::try_attach(|_| ()).is_none() {
        std::thread::park();
    }
}
