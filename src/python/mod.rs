//! The extension module `ec_shared_region._core`: a thin binding. It takes and gives plain values,
//! lets go of the GIL around everything that can take long, and turns every [`crate::Error`] into an
//! exception. What callers see is the Python package around it.

mod buffer;
mod copy;
mod errors;
mod operator;
mod region;
mod thread;
mod torch_cudart;

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::Warning;
use crate::wait::Host;

/// How long Ctrl-C may go unnoticed. Each look takes the GIL, so it is not done at every step.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(20);

/// Whom the caller wants to be told of what happens on the way.
#[derive(Default)]
struct Callables {
    /// Called with the text of a warning.
    warn: Option<Py<PyAny>>,
    /// Called with the bytes done and the bytes in all.
    progress: Option<Py<PyAny>>,
}

/// The core's host: runs Python's signal handlers at checkpoints, and hands warnings and progress to callables.
struct PythonHost {
    runs_handlers: bool,
    last_look: Instant,
    last_progress: Option<Instant>,
    raised: Option<PyErr>,
    callables: Callables,
}

impl PythonHost {
    fn keep(&mut self, answer: Option<PyResult<()>>) -> ControlFlow<()> {
        match answer {
            Some(Err(error)) => {
                self.raised = Some(error);
                ControlFlow::Break(())
            }
            Some(Ok(())) | None => ControlFlow::Continue(()),
        }
    }
}

impl Host for PythonHost {
    fn checkpoint(&mut self) -> ControlFlow<()> {
        // A daemon thread whose process is about to end: what it made is given back.
        if self.raised.is_some() || !self.runs_handlers && thread::is_ending() {
            return ControlFlow::Break(());
        }
        if !self.runs_handlers || self.last_look.elapsed() < SIGNAL_INTERVAL {
            return ControlFlow::Continue(());
        }
        self.last_look = Instant::now();
        let answer = Python::try_attach(|py| py.check_signals());
        self.keep(answer)
    }

    fn progress(&mut self, done_bytes: usize, total_bytes: usize) {
        let Some(progress) = &self.callables.progress else {
            return;
        };
        let is_early = self.last_progress.is_some_and(|last| last.elapsed() < SIGNAL_INTERVAL);
        if self.raised.is_some() || is_early && done_bytes < total_bytes {
            return;
        }
        self.last_progress = Some(Instant::now());
        let _returning = thread::begin_return();
        let answer = Python::try_attach(|py| progress.call1(py, (done_bytes, total_bytes)).map(drop));
        let _ = self.keep(answer);
    }

    fn warn(&mut self, warning: &Warning) {
        let text = format!("{warning}\nhint: {}", warning.hint());
        let _returning = thread::begin_return();
        let answer = Python::try_attach(|py| match &self.callables.warn {
            Some(warn) => warn.call1(py, (text,)).map(drop),
            None => Ok(()),
        });
        // What the callable raises ends the work at the next checkpoint.
        let _ = self.keep(answer);
    }
}

/// Runs core code without the GIL. An exception of a signal handler (`KeyboardInterrupt`) comes out in
/// place of the core's "interrupted".
fn run_detached<T: Send>(
    py: Python<'_>,
    callables: Callables,
    work: impl Send + FnOnce(&mut crate::wait::Checkpoint<'_>) -> crate::Result<T>,
) -> PyResult<T> {
    let (result, raised) = detached(py, || {
        let mut host = PythonHost {
            runs_handlers: thread::runs_signal_handlers(),
            last_look: Instant::now(),
            last_progress: None,
            raised: None,
            callables,
        };
        let result = work(&mut host);
        (result, host.raised)
    });
    match (result, raised) {
        (Ok(value), None) => Ok(value),
        (_, Some(raised)) => Err(raised),
        (Err(error), None) => Err(errors::to_python(py, &error)),
    }
}

/// Lets go of the GIL for work that may take long, in a daemon thread perhaps until the interpreter ends.
fn detached<T: Send>(py: Python<'_>, work: impl Send + FnOnce() -> T) -> T {
    let (result, returning) = py.detach(|| {
        let result = work();
        (result, thread::begin_return())
    });
    drop(returning);
    result
}

/// Drops what may unmap gigabytes, without the GIL where the interpreter still allows it.
fn drop_detached<T: Send>(value: T) {
    let mut value = Some(value);
    Python::try_attach(|py| detached(py, || drop(value.take())));
}

/// What this build of the extension is: `version`, `target`, `profile`, `features`, `python_abi`.
#[pyfunction]
fn build_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let info = PyDict::new(py);
    info.set_item("version", env!("CARGO_PKG_VERSION"))?;
    info.set_item("target", format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS))?;
    info.set_item("profile", if cfg!(debug_assertions) { "debug" } else { "release" })?;
    let features: Vec<&str> = [("cuda", cfg!(feature = "cuda")), ("python", cfg!(feature = "python"))]
        .into_iter()
        .filter_map(|(name, is_on)| is_on.then_some(name))
        .collect();
    info.set_item("features", features)?;
    info.set_item("python_abi", "abi3-py311")?;
    info.set_item("page_size_bytes", crate::mapping::page_bytes())?;
    Ok(info)
}

/// Waits until the file behind the descriptor `fd` has at least `expected_size` bytes, without the GIL.
/// `timeout` is in seconds. Raises `TimeoutError` with both sizes, `OSError` where `fd` is not open.
#[pyfunction]
#[pyo3(signature = (fd, expected_size, timeout = 30.0))]
fn wait_for_file_size(py: Python<'_>, fd: i32, expected_size: u64, timeout: f64) -> PyResult<()> {
    let limit = errors::seconds(py, timeout)?;
    run_detached(py, Callables::default(), |checkpoint| {
        crate::file::wait_for_size(fd, expected_size, limit, checkpoint)
    })
}

/// Mappings that are kept for good because a driver would not let go of their pages.
#[pyfunction]
fn kept_mappings() -> usize {
    crate::region::kept_mappings()
}

/// A name or a path as messages show it, see [`crate::text`].
#[pyfunction]
fn shown(name: &str) -> String {
    crate::text::Shown(name).to_string()
}

/// To be called as the last thing at exit: daemon threads in native work stay there from now on.
#[pyfunction]
fn begin_exit(py: Python<'_>) {
    thread::end(py);
}

#[pymodule]
#[pyo3(gil_used = false)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    thread::must_be_main_interpreter()?;
    errors::module(module.py())?;
    thread::learn_main_thread(module.py())?;
    module.add_class::<region::PyRegion>()?;
    module.add_class::<region::PyOpenReport>()?;
    module.add_class::<region::PyPinOutcome>()?;
    module.add_class::<region::PyCheckReport>()?;
    module.add_class::<buffer::PyMapping>()?;
    module.add_class::<copy::PyCopyPlan>()?;
    module.add_class::<copy::PySpan>()?;
    module.add_class::<operator::PyEntry>()?;
    module.add_class::<operator::PyDecision>()?;
    module.add_class::<operator::PyPreflight>()?;
    module.add_function(wrap_pyfunction!(build_info, module)?)?;
    module.add_function(wrap_pyfunction!(kept_mappings, module)?)?;
    module.add_function(wrap_pyfunction!(begin_exit, module)?)?;
    module.add_function(wrap_pyfunction!(shown, module)?)?;
    module.add_function(wrap_pyfunction!(wait_for_file_size, module)?)?;
    module.add_function(wrap_pyfunction!(copy::plan_copy, module)?)?;
    module.add_function(wrap_pyfunction!(copy::copy_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(operator::list_regions, module)?)?;
    module.add_function(wrap_pyfunction!(operator::inspect, module)?)?;
    module.add_function(wrap_pyfunction!(operator::reap, module)?)?;
    module.add_function(wrap_pyfunction!(operator::preflight, module)?)?;
    module.add_function(wrap_pyfunction!(operator::counters, module)?)?;
    module.add_function(wrap_pyfunction!(operator::count_pin_skipped, module)?)?;
    Ok(())
}
