//! The buffer protocol over a mapping, without copies.
//!
//! A consumer can hold a buffer (`memoryview`, numpy), or take it, give it back at once and keep only
//! the object that exported it (`torch.frombuffer`). So a held export keeps the mapping by itself, and
//! an exporter object keeps it for as long as the object lives.

#![allow(unsafe_code)] // fills Py_buffer, a C structure

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::mapping::Mapping;

/// How the bytes are shown.
#[derive(Debug, Clone, Copy)]
pub(super) enum Shape {
    /// `(len,)` of format `B`, as `mmap.mmap` shows itself.
    Bytes,
    /// `(num_blocks, block_size_bytes)` of format `b` (int8).
    Blocks { num_blocks: usize, block_size_bytes: usize },
}

/// What one export keeps until it is released: the mapping, and the numbers that `Py_buffer` points to.
struct Export {
    mapping: Arc<Mapping>,
    shape: [ffi::Py_ssize_t; 2],
    strides: [ffi::Py_ssize_t; 2],
}

fn has(flags: c_int, wanted: c_int) -> bool {
    flags & wanted == wanted
}

/// Fills `view` as PEP 3118 and the C API's "Buffer request types" say.
///
/// # Safety
/// `view` is null or points to a `Py_buffer` that the caller owns.
pub(super) unsafe fn fill(
    view: *mut ffi::Py_buffer,
    flags: c_int,
    owner: Bound<'_, PyAny>,
    mapping: &Arc<Mapping>,
    shape: Shape,
) -> PyResult<()> {
    if view.is_null() {
        return Err(PyBufferError::new_err("no view to fill"));
    }
    let size = |value: usize| ffi::Py_ssize_t::try_from(value).unwrap_or(ffi::Py_ssize_t::MAX);
    let len = size(mapping.len_bytes());
    let (ndim, format, dimensions) = match shape {
        Shape::Bytes => (1, c"B", [len, 1]),
        Shape::Blocks {
            num_blocks,
            block_size_bytes,
        } => (2, c"b", [size(num_blocks), size(block_size_bytes)]),
    };
    let strides = [if ndim == 2 { dimensions[1] } else { 1 }, 1];
    let is_one_dimensional = ndim == 1 || dimensions.contains(&1);
    if has(flags, ffi::PyBUF_F_CONTIGUOUS) && !is_one_dimensional {
        // SAFETY: not null, and the caller's to write.
        unsafe { (*view).obj = ptr::null_mut() };
        return Err(PyBufferError::new_err(
            "the blocks are C-contiguous, not Fortran-contiguous",
        ));
    }
    let export = Box::into_raw(Box::new(Export {
        mapping: Arc::clone(mapping),
        shape: dimensions,
        strides,
    }));
    mapping.views.fetch_add(1, Ordering::Relaxed);
    let wants_shape = has(flags, ffi::PyBUF_ND);
    // SAFETY: `view` is the caller's to write; `export` was just made and lives until `release`.
    unsafe {
        (*view).buf = mapping.as_ptr().cast::<c_void>();
        (*view).obj = owner.into_ptr();
        (*view).len = len;
        (*view).itemsize = 1;
        (*view).readonly = 0;
        (*view).ndim = if wants_shape { ndim } else { 1 };
        (*view).format = if has(flags, ffi::PyBUF_FORMAT) {
            format.as_ptr().cast_mut()
        } else {
            ptr::null_mut()
        };
        (*view).shape = if wants_shape {
            (*export).shape.as_mut_ptr()
        } else {
            ptr::null_mut()
        };
        (*view).strides = if has(flags, ffi::PyBUF_STRIDES) {
            (*export).strides.as_mut_ptr()
        } else {
            ptr::null_mut()
        };
        (*view).suboffsets = ptr::null_mut();
        (*view).internal = export.cast::<c_void>();
    }
    Ok(())
}

/// Ends an export that [`fill`] began.
///
/// # Safety
/// `view` was filled by [`fill`] and is released once.
pub(super) unsafe fn release(view: *mut ffi::Py_buffer) {
    // SAFETY: `internal` is the box of `fill`, which the interpreter gives back exactly once.
    let export = unsafe { Box::from_raw((*view).internal.cast::<Export>()) };
    export.mapping.views.fetch_sub(1, Ordering::Relaxed);
    super::drop_detached(export.mapping);
}

/// The mapping as an object, in the place of the original's `mmap.mmap`: `_mmap_obj`.
///
/// The buffer is one-dimensional, format `B`, writable.
#[pyclass(frozen, name = "Mapping", module = "ec_shared_region._core")]
pub(super) struct PyMapping {
    mapping: Option<Arc<Mapping>>,
    exports: AtomicUsize,
}

impl PyMapping {
    pub(super) fn new(mapping: Arc<Mapping>) -> Self {
        Self {
            mapping: Some(mapping),
            exports: AtomicUsize::new(0),
        }
    }
}

#[pymethods]
impl PyMapping {
    /// Views that are held right now; a tensor of `blocks` and all its slices are one.
    #[getter]
    fn exports(&self) -> usize {
        self.exports.load(Ordering::Relaxed)
    }

    fn __len__(&self) -> usize {
        self.mapping.as_ref().map_or(0, |mapping| mapping.len_bytes())
    }

    /// # Safety
    /// Called by the interpreter with a `Py_buffer` to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        let Some(mapping) = &this.mapping else {
            return Err(PyBufferError::new_err("the mapping is gone"));
        };
        // SAFETY: as the interpreter promises.
        unsafe { fill(view, flags, slf.clone().into_any(), mapping, Shape::Bytes) }?;
        this.exports.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// # Safety
    /// Called by the interpreter, once for each filled `Py_buffer`.
    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: as the interpreter promises.
        unsafe { release(view) };
        self.exports.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for PyMapping {
    fn drop(&mut self) {
        super::drop_detached(self.mapping.take());
    }
}
