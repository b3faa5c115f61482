//! One match: every error of the core becomes an exception of `ec_shared_region.errors`.

use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::Error;
use crate::error::WaitState;

fn class_name(error: &Error) -> &'static str {
    match error {
        Error::InvalidId { .. } | Error::InvalidNumber { .. } => "InvalidArgumentError",
        Error::TooLarge { .. } => "SizeOverflowError",
        Error::GeometryMismatch { .. } => "GeometryMismatchError",
        Error::NoSpace { .. } => "NoSpaceError",
        Error::NoHugePages { .. } => "NoHugePagesError",
        Error::Foreign { .. } => "ForeignFileError",
        Error::Exists { .. } => "RegionExistsError",
        Error::Timeout {
            state: WaitState::NoFile { .. },
            ..
        } => "RegionNotFoundError",
        Error::Timeout { .. } => "RegionTimeoutError",
        Error::BlockOutOfRange { .. } => "BlockIndexError",
        Error::DuplicateBlock { .. }
        | Error::PartialBytes { .. }
        | Error::BytesMismatch { .. }
        | Error::Overlap { .. } => "InvalidArgumentError",
        Error::Closed => "RegionClosedError",
        Error::Os { source, .. } => match source.raw_os_error() {
            Some(nix::libc::ENOENT) => "DirectoryMissingError",
            Some(nix::libc::EACCES | nix::libc::EPERM) => "AccessDeniedError",
            _ => "SystemCallError",
        },
        // Reached only where a checkpoint stops without an exception, which none of ours does.
        Error::Interrupted | Error::Forked => "RegionError",
    }
}

/// Imported once, with the extension: an error may come where nothing can be imported any more, for lack
/// of descriptors or rights.
static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

pub(super) fn module(py: Python<'_>) -> PyResult<&Bound<'_, PyModule>> {
    let module = ERRORS.get_or_try_init(py, || py.import("ec_shared_region.errors").map(Bound::unbind))?;
    Ok(module.bind(py))
}

pub(super) fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    build(py, error).unwrap_or_else(|failure| {
        let plain = PyRuntimeError::new_err(error.to_string());
        plain.set_cause(py, Some(failure));
        plain
    })
}

/// An argument that is wrong by itself, whatever the region: what the binding sees and the core never does.
pub(super) fn argument(py: Python<'_>, class: &'static str, text: &str, hint: &str) -> PyErr {
    let build = || {
        let exception = module(py)?.getattr(class)?.call1((text,))?;
        exception.setattr("hint", hint)?;
        Ok(PyErr::from_value(exception))
    };
    build().unwrap_or_else(|failure: PyErr| failure)
}

fn build(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let class = module(py)?.getattr(class_name(error))?;
    let exception = match (error.errno(), error.path()) {
        (Some(errno), Some(path)) => class.call1((errno, error.to_string(), path.as_os_str()))?,
        _ => class.call1((error.to_string(),))?,
    };
    exception.setattr("hint", error.hint())?;
    Ok(PyErr::from_value(exception))
}

/// Seconds of a caller as a duration: not negative, not infinite, a number.
pub(super) fn seconds(py: Python<'_>, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value).map_err(|_| {
        let error = Error::InvalidNumber {
            what: "timeout",
            value: value.to_string(),
            reason: "it must be a number of seconds from 0 to about 1.8e19",
        };
        to_python(py, &error)
    })
}
