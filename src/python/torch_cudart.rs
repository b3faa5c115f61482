//! `torch.cuda.cudart()` as a registrar: for builds whose runtime cudarc cannot reach (ROCm, a runtime
//! linked statically), and for callers' tests that replace it.

use pyo3::prelude::*;

use crate::pin::{HostRegistrar, Refusal};

/// `cudaErrorUnknown`: what is said where the call raised instead of answering.
const UNKNOWN: i32 = 999;
/// `cudaHostRegisterPortable`.
const PORTABLE: u32 = 1;

pub(super) struct TorchCudart(Py<PyAny>);

impl TorchCudart {
    pub(super) fn new(cudart: Py<PyAny>) -> Self {
        Self(cudart)
    }

    fn call(&self, method: &str, args: impl for<'py> pyo3::call::PyCallArgs<'py>) -> Result<(), Refusal> {
        Python::attach(|py| {
            let answer = self.0.bind(py).call_method1(method, args).and_then(|result| {
                // An enum of the binding, or a plain number.
                let code = result.getattr("value").unwrap_or_else(|_| result.clone());
                let name = result.getattr("name").and_then(|name| name.extract::<String>());
                Ok((code.extract::<i32>()?, name.unwrap_or_default()))
            });
            match answer {
                Ok((0, _)) => Ok(()),
                Ok((code, name)) => Err(Refusal { code, name }),
                Err(raised) => Err(Refusal {
                    code: UNKNOWN,
                    name: raised.to_string(),
                }),
            }
        })
    }
}

impl HostRegistrar for TorchCudart {
    fn register(&self, address: usize, len_bytes: usize) -> Result<(), Refusal> {
        self.call("cudaHostRegister", (address, len_bytes, PORTABLE))
    }

    fn unregister(&self, address: usize) -> Result<(), Refusal> {
        self.call("cudaHostUnregister", (address,))
    }
}
