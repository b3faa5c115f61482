//! Block copies: ids and memory of Python objects, for the plan and the copy of the core.
//!
//! A tensor has no buffer protocol, so the Python package looks at it and hands over its address; everything else comes as
//! the object itself. Nothing here imports torch.

#![allow(unsafe_code)] // reads addresses that the package took from tensors, and runs the core's copy

use std::ptr;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyList, PyMemoryView, PyRange, PyTuple};

use super::region::PyRegion;
use super::{Callables, detached, errors, run_detached};
use crate::Error;
use crate::copy::{Direction, Ids, Plan};
use crate::transfer::{self, Packed};

const ID_BYTES: usize = size_of::<i64>();

/// Memory of an object without a buffer: a contiguous CPU tensor's. Whoever makes one keeps the tensor alive, and its
/// memory where it is, for as long as this is used.
#[pyclass(frozen, get_all, name = "Span", module = "ec_shared_region._core")]
pub(super) struct PySpan {
    address: usize,
    nbytes: usize,
}

#[pymethods]
impl PySpan {
    #[new]
    fn new(address: usize, nbytes: usize) -> Self {
        Self { address, nbytes }
    }
}

/// A copy whose ids were checked against the region's shape.
#[pyclass(frozen, name = "CopyPlan", module = "ec_shared_region._core")]
pub(super) struct PyCopyPlan(Plan);

#[pymethods]
impl PyCopyPlan {
    /// Number of ids.
    #[getter]
    fn count(&self) -> usize {
        self.0.count()
    }

    /// Bytes of a whole block.
    #[getter]
    fn block_size_bytes(&self) -> usize {
        self.0.geometry().block_size_bytes()
    }

    /// Bytes that move.
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.len_bytes()
    }
}

/// Checks the ids of a copy. `ids` is a list, a tuple, a range, a buffer of int64, or the `Span` of an int64 tensor;
/// `nbytes` is what moves, where the last block is partial.
#[pyfunction]
pub(super) fn plan_copy(
    py: Python<'_>,
    region: &Bound<'_, PyRegion>,
    ids: &Bound<'_, PyAny>,
    nbytes: Option<usize>,
    is_scatter: bool,
) -> PyResult<PyCopyPlan> {
    let (_, geometry) = region
        .get()
        .open_mapping()
        .map_err(|error| errors::to_python(py, &error))?;
    let direction = if is_scatter {
        Direction::Scatter
    } else {
        Direction::Gather
    };
    let found = find_ids(py, ids, geometry.num_blocks())?;
    let plan = detached(py, || Plan::new(geometry, direction, found.as_ids(), nbytes));
    plan.map(PyCopyPlan).map_err(|error| errors::to_python(py, &error))
}

/// Moves the bytes, without the GIL. `memory` is a buffer or a `Span`; a gather needs one that it may write to.
#[pyfunction]
pub(super) fn copy_blocks(
    py: Python<'_>,
    region: &Bound<'_, PyRegion>,
    plan: &Bound<'_, PyCopyPlan>,
    memory: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let plan = &plan.get().0;
    let memory = Memory::of(memory, plan.direction())?;
    let packed = memory.packed();
    let (mapping, _) = region
        .get()
        .open_mapping()
        .map_err(|error| errors::to_python(py, &error))?;
    run_detached(py, Callables::default(), move |checkpoint| {
        // SAFETY: a buffer stays where it is until it is released, below; the maker of a span keeps what it names. `Memory::of` saw
        // that a gather may write. The mapping is ours until the closure ends, and its last share is dropped without the GIL.
        unsafe { transfer::run(&mapping, plan, packed, checkpoint) }
    })?;
    drop(memory);
    Ok(())
}

/// Ids as the core takes them.
enum FoundIds {
    Listed(Vec<i64>),
    Stepped { first: i64, step: i64, count: usize },
}

impl FoundIds {
    fn as_ids(&self) -> Ids<'_> {
        match *self {
            Self::Listed(ref ids) => Ids::Listed(ids),
            Self::Stepped { first, step, count } => Ids::Stepped { first, step, count },
        }
    }
}

/// A copy of the ids: another thread may change a list or an array behind the check.
fn find_ids(py: Python<'_>, ids: &Bound<'_, PyAny>, num_blocks: usize) -> PyResult<FoundIds> {
    if let Ok(list) = ids.cast::<PyList>() {
        return listed(list.iter(), num_blocks).map(FoundIds::Listed);
    }
    if let Ok(tuple) = ids.cast::<PyTuple>() {
        return listed(tuple.iter(), num_blocks).map(FoundIds::Listed);
    }
    if let Ok(range) = ids.cast::<PyRange>() {
        return stepped(range, num_blocks);
    }
    if let Ok(span) = ids.cast::<PySpan>() {
        let span = span.get();
        let count = span.nbytes / ID_BYTES;
        let mut found = vec![0_i64; count];
        if count > 0 {
            // SAFETY: whoever made the span keeps `nbytes` there; bytes have no alignment.
            unsafe {
                ptr::copy_nonoverlapping(
                    ptr::with_exposed_provenance::<u8>(span.address),
                    found.as_mut_ptr().cast::<u8>(),
                    count * ID_BYTES,
                );
            }
        }
        return Ok(FoundIds::Listed(found));
    }
    let wrong = |text: String| {
        let hint = "ids are a list, a tuple or a range of ints, or a one-dimensional int64 tensor or array";
        errors::argument(py, "ArgumentTypeError", &text, hint)
    };
    let buffer = buffer_of(ids).map_err(|_| wrong(format!("invalid ids: {}", type_name(ids))))?;
    if buffer.item_size() != ID_BYTES || !is_native_signed(buffer.format().to_bytes()) {
        return Err(wrong(format!(
            "invalid ids: elements of format `{}`, {} bytes each: wanted int64",
            buffer.format().to_string_lossy(),
            buffer.item_size()
        )));
    }
    let (&[count], &[stride], None) = (buffer.shape(), buffer.strides(), buffer.suboffsets()) else {
        return Err(wrong(format!("invalid ids: {} dimensions", buffer.dimensions())));
    };
    let start = buffer.buf_ptr().cast::<u8>();
    let id = |position: usize| {
        // SAFETY: the exporter says that an element is there until the buffer is released. It may lie anywhere: an empty
        // `array.array` is not even aligned.
        unsafe {
            start
                .wrapping_offset(stride.wrapping_mul(position as isize))
                .cast::<i64>()
                .read_unaligned()
        }
    };
    Ok(FoundIds::Listed((0..count).map(id).collect()))
}

/// pyo3 wants strides, which some exporters (ctypes) leave out; a memoryview fills them in.
fn buffer_of(object: &Bound<'_, PyAny>) -> PyResult<PyUntypedBuffer> {
    PyUntypedBuffer::get(object)
        .or_else(|_| PyMemoryView::from(object).and_then(|view| PyUntypedBuffer::get(view.as_any())))
}

/// One signed integer in this machine's order of bytes; its size is another field. pyo3's own answer takes big-endian for native.
fn is_native_signed(format: &[u8]) -> bool {
    let native = if cfg!(target_endian = "little") { b'<' } else { b'>' };
    match *format {
        [code] => b"lqn".contains(&code),
        [order, code] => [b'@', b'=', native].contains(&order) && b"lqn".contains(&code),
        _ => false,
    }
}

fn listed<'py>(items: impl ExactSizeIterator<Item = Bound<'py, PyAny>>, num_blocks: usize) -> PyResult<Vec<i64>> {
    let mut ids = Vec::with_capacity(items.len());
    for item in items {
        // Nearly always an int. An object's `__index__` may run any code, which the iterator bears.
        let id = if item.is_exact_instance_of::<PyInt>() || !item.is_instance_of::<PyBool>() {
            item.extract::<i64>()
        } else {
            Err(PyTypeError::new_err("a bool"))
        };
        ids.push(id.map_err(|error| not_an_id(&item, ids.len(), num_blocks, error))?);
    }
    Ok(ids)
}

fn not_an_id(item: &Bound<'_, PyAny>, position: usize, num_blocks: usize, error: PyErr) -> PyErr {
    let py = item.py();
    if error.is_instance_of::<PyOverflowError>(py) {
        let bits = item.call_method0("bit_length").and_then(|bits| bits.extract::<u64>());
        return errors::to_python(
            py,
            &Error::BlockOutOfRange {
                // Python itself does not print the longest ones.
                id: bits.map_or_else(
                    |_| String::from("an integer"),
                    |bits| format!("an integer of {bits} bits"),
                ),
                position,
                num_blocks,
            },
        );
    }
    if error.is_instance_of::<PyTypeError>(py) {
        let text = format!("invalid block id at position {position}: {}", type_name(item));
        return errors::argument(py, "ArgumentTypeError", &text, "a block id is an int");
    }
    error
}

/// A range names its ids without one of them being made. What does not fit into 64 bits is no block's.
fn stepped(range: &Bound<'_, PyRange>, num_blocks: usize) -> PyResult<FoundIds> {
    let refused = |position: usize, error: PyErr| match range.get_item(position) {
        Ok(item) => not_an_id(&item, position, num_blocks, error),
        Err(error) => error,
    };
    let count = match range.len() {
        Ok(0) => return Ok(FoundIds::Listed(Vec::new())),
        Ok(count) => count,
        Err(error) if error.is_instance_of::<PyOverflowError>(range.py()) => usize::MAX,
        Err(error) => return Err(error),
    };
    let number = |name| range.getattr(name)?.extract::<i64>();
    let first = number("start").map_err(|error| refused(0, error))?;
    let is_block = usize::try_from(first).is_ok_and(|first| first < num_blocks);
    let (step, count) = if count == 1 || !is_block {
        (1, 1) // the first is the only one, or the one that will be refused
    } else {
        (number("step").map_err(|error| refused(1, error))?, count)
    };
    Ok(FoundIds::Stepped { first, step, count })
}

/// The caller's side of a copy.
enum Memory {
    Buffer(PyUntypedBuffer),
    Span { address: usize, len_bytes: usize },
}

impl Memory {
    fn of(memory: &Bound<'_, PyAny>, direction: Direction) -> PyResult<Self> {
        let py = memory.py();
        let what = direction.packed_name();
        let wrong = |class, text: String, hint: &str| errors::argument(py, class, &text, hint);
        if let Ok(span) = memory.cast::<PySpan>() {
            let (address, len_bytes) = (span.get().address, span.get().nbytes);
            if address == 0 && len_bytes > 0 {
                return Err(wrong(
                    "InvalidArgumentError",
                    format!("`{what}` has no memory: {len_bytes} bytes at address 0"),
                    "its storage was freed, or it is a stand-in without data",
                ));
            }
            return Ok(Self::Span { address, len_bytes });
        }
        let buffer = buffer_of(memory).map_err(|_| {
            wrong(
                "ArgumentTypeError",
                format!("invalid `{what}`: {}", type_name(memory)),
                "give a contiguous CPU tensor, or an object with a buffer: numpy array, bytes, bytearray, memoryview",
            )
        })?;
        if holds_objects(buffer.format().to_bytes()) {
            return Err(wrong(
                "ArgumentTypeError",
                format!("invalid `{what}`: its elements are Python objects"),
                "blocks hold bytes, which mean nothing as references in another process",
            ));
        }
        if !buffer.is_c_contiguous() {
            return Err(wrong(
                "InvalidArgumentError",
                format!("`{what}` is not contiguous"),
                "make it so: numpy.ascontiguousarray(), or `.contiguous()` of a tensor",
            ));
        }
        if direction == Direction::Gather && buffer.readonly() {
            return Err(wrong(
                "InvalidArgumentError",
                format!("`{what}` is read-only"),
                "a gather writes to it: give a bytearray, a writable array or a tensor",
            ));
        }
        Ok(Self::Buffer(buffer))
    }

    fn packed(&self) -> Packed {
        match *self {
            Self::Buffer(ref buffer) => Packed {
                start: buffer.buf_ptr().cast::<u8>(),
                len_bytes: buffer.len_bytes(),
            },
            Self::Span { address, len_bytes } => Packed {
                start: ptr::with_exposed_provenance_mut::<u8>(address),
                len_bytes,
            },
        }
    }
}

/// Is there an `O` in the format, outside the names of fields (`:name:`)?
fn holds_objects(format: &[u8]) -> bool {
    format
        .split(|&byte| byte == b':')
        .step_by(2)
        .any(|part| part.contains(&b'O'))
}

fn type_name(object: &Bound<'_, PyAny>) -> String {
    object
        .get_type()
        .name()
        .map_or_else(|_| String::from("?"), |name| name.to_string())
}
