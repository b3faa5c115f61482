//! `torch.cuda.cudart()` as a registrar: for builds whose runtime cannot be reached otherwise (ROCm, a runtime
//! linked statically), and for callers' tests that replace it.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyException;
use pyo3::prelude::*;

use crate::pin::{HostRegistrar, Refusal};

/// `cudaErrorUnknown`: what is said where the call raised instead of answering.
const UNKNOWN: i32 = 999;
/// `cudaHostRegisterPortable`.
const PORTABLE: u32 = 1;

/// What a signal handler raised during a call (`KeyboardInterrupt`): the user's, and no answer of a runtime.
#[derive(Clone, Default)]
pub(super) struct Interrupted(Arc<Mutex<Option<PyErr>>>);

impl Interrupted {
    fn put(&self, raised: PyErr) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(raised);
    }

    pub(super) fn take(&self) -> Option<PyErr> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

pub(super) struct TorchCudart {
    cudart: Py<PyAny>,
    interrupted: Interrupted,
    end: usize,
}

impl TorchCudart {
    /// `end` is the address behind the region's last byte.
    pub(super) fn new(cudart: Py<PyAny>, interrupted: Interrupted, end: usize) -> Self {
        Self {
            cudart,
            interrupted,
            end,
        }
    }

    fn call(&self, call: &'static str, args: impl for<'py> pyo3::call::PyCallArgs<'py>) -> Result<(), Refusal> {
        let result = Python::attach(|py| {
            let cudart = self.cudart.bind(py);
            let answer = cudart.call_method1(call, args).and_then(|result| {
                // An enum of the binding, or a plain number.
                let code = result.getattr("value").unwrap_or_else(|_| result.clone());
                Ok((code.extract::<i32>()?, result))
            });
            match answer {
                Ok((0, _)) => Ok(()),
                Ok((code, result)) => {
                    let text = |value: PyResult<Bound<'_, PyAny>>| value.and_then(|value| value.extract::<String>());
                    // The binding has no names for the codes and says "???".
                    let name = text(result.getattr("name")).ok().filter(|name| !name.contains('?'));
                    Err(Refusal {
                        call,
                        code,
                        name: name.unwrap_or_else(|| known_name(code).to_owned()),
                        text: text(cudart.call_method1("cudaGetErrorString", (result,))).unwrap_or_default(),
                    })
                }
                Err(raised) => {
                    let text = raised.to_string();
                    if !raised.is_instance_of::<PyException>(py) {
                        self.interrupted.put(raised);
                    }
                    Err(Refusal {
                        call,
                        code: UNKNOWN,
                        name: known_name(UNKNOWN).to_owned(),
                        text,
                    })
                }
            }
        });
        #[cfg(feature = "cuda")]
        if result.is_err() {
            crate::cuda::drain_torch();
        }
        result
    }
}

/// Names of the codes that a registration may answer (CUDA Runtime API, "Error Handling").
fn known_name(code: i32) -> &'static str {
    match code {
        1 => "cudaErrorInvalidValue",
        2 => "cudaErrorMemoryAllocation",
        3 => "cudaErrorInitializationError",
        4 => "cudaErrorCudartUnloading",
        35 => "cudaErrorInsufficientDriver",
        100 => "cudaErrorNoDevice",
        712 => "cudaErrorHostMemoryAlreadyRegistered",
        713 => "cudaErrorHostMemoryNotRegistered",
        801 => "cudaErrorNotSupported",
        UNKNOWN => "cudaErrorUnknown",
        _ => "",
    }
}

impl HostRegistrar for TorchCudart {
    fn register(&self, address: usize, len_bytes: usize) -> Result<(), Refusal> {
        // As the original class calls it, with the region's bytes and not its pages; the runtime rounds by itself.
        let len_bytes = len_bytes.min(self.end.saturating_sub(address));
        self.call("cudaHostRegister", (address, len_bytes, PORTABLE))
    }

    fn unregister(&self, address: usize) -> Result<(), Refusal> {
        self.call("cudaHostUnregister", (address,))
    }

    fn backend(&self) -> &'static str {
        "torch"
    }

    fn library_path(&self) -> Option<PathBuf> {
        None
    }
}
