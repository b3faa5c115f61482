//! The CUDA runtime, through cudarc: the only file that names it. The library is loaded by the first
//! [`CudaRuntime::find`], never before.

#![allow(unsafe_code)] // calls into a library that was loaded at run time

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use cudarc::runtime::sys;

use crate::pin::{HostRegistrar, Refusal};

/// Every context may use the memory, not only the one that is current (CUDA Runtime API, `cudaHostRegister`).
const PORTABLE: c_uint = sys::cudaHostRegisterPortable;

// Return codes are read as integers: cudarc's enum knows the codes of one CUDA release, and a code
// that it does not know would be undefined behaviour.
type Register = unsafe extern "C" fn(*mut c_void, usize, c_uint) -> c_int;
type Unregister = unsafe extern "C" fn(*mut c_void) -> c_int;
type DeviceCount = unsafe extern "C" fn(*mut c_int) -> c_int;
type LastError = unsafe extern "C" fn() -> c_int;
type ErrorName = unsafe extern "C" fn(c_int) -> *const c_char;

/// Entry points of the runtime copy that cudarc loaded, which stays loaded for good.
#[derive(Debug, Clone, Copy)]
pub struct CudaRuntime {
    register: Register,
    unregister: Unregister,
    device_count: DeviceCount,
    last_error: Option<LastError>,
    error_name: Option<ErrorName>,
}

impl CudaRuntime {
    /// Loads the runtime. `None` where there is none, or one without the calls that are needed.
    #[must_use]
    pub fn find() -> Option<Self> {
        // SAFETY: loading a library runs its initialisers; cudarc looks only for names of the CUDA runtime.
        if !unsafe { sys::is_culib_present() } {
            return None; // `culib` would panic
        }
        // SAFETY: it was there a moment ago, and stays loaded.
        let library = unsafe { sys::culib() };
        // SAFETY: the types are those of the CUDA Runtime API's functions of these names.
        unsafe {
            Some(Self {
                register: *library.get(b"cudaHostRegister\0").ok()?,
                unregister: *library.get(b"cudaHostUnregister\0").ok()?,
                device_count: *library.get(b"cudaGetDeviceCount\0").ok()?,
                last_error: library.get(b"cudaGetLastError\0").ok().map(|symbol| *symbol),
                error_name: library.get(b"cudaGetErrorName\0").ok().map(|symbol| *symbol),
            })
        }
    }

    /// # Errors
    /// The runtime's answer where it has no driver or no device.
    pub fn require_device(&self) -> Result<(), Refusal> {
        const NO_DEVICE: c_int = 100;
        let mut count: c_int = 0;
        // SAFETY: the call writes one int.
        self.check(unsafe { (self.device_count)(&raw mut count) })?;
        if count > 0 {
            Ok(())
        } else {
            Err(self.refusal(NO_DEVICE))
        }
    }

    /// A failed call leaves its error pending in this copy of the runtime, on this thread, where it
    /// would hit an innocent call: it is taken off. Once: without a driver there is always another.
    fn check(&self, code: c_int) -> Result<(), Refusal> {
        if code == 0 {
            return Ok(());
        }
        if let Some(last_error) = self.last_error {
            // SAFETY: takes nothing, returns an int.
            unsafe { last_error() };
        }
        Err(self.refusal(code))
    }

    fn refusal(&self, code: c_int) -> Refusal {
        let name = self.error_name.map(|error_name| {
            // SAFETY: any int is a valid argument.
            let text = unsafe { error_name(code) };
            if text.is_null() {
                String::new()
            } else {
                // SAFETY: a NUL-terminated string that lives as long as the library.
                unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
            }
        });
        Refusal {
            code,
            name: name.unwrap_or_default(),
        }
    }
}

impl HostRegistrar for CudaRuntime {
    fn register(&self, address: usize, len_bytes: usize) -> Result<(), Refusal> {
        // SAFETY: the region keeps the range mapped until it is unregistered.
        self.check(unsafe { (self.register)(address as *mut c_void, len_bytes, PORTABLE) })
    }

    fn unregister(&self, address: usize) -> Result<(), Refusal> {
        // SAFETY: an address that was registered, or one that the runtime refuses.
        self.check(unsafe { (self.unregister)(address as *mut c_void) })
    }
}
