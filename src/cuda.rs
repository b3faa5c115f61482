//! The CUDA runtime, through cudarc: the only file that names it. A library is loaded by the first
//! [`CudaRuntime::find`], never before, and stays loaded.
//!
//! Error state is per copy of the library and per thread, and a process may hold several copies, so it
//! matters which one answers: the one that torch calls. cudarc chooses by short names and takes no path, so
//! a copy that was found is opened by its path with libloading, on which cudarc builds, and called with
//! cudarc's constants; cudarc's own choice comes last.

#![allow(unsafe_code)] // calls into libraries that are loaded at run time

use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};

use cudarc::runtime::sys;
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL, RTLD_NOW};

use crate::locate;
use crate::pin::{HostRegistrar, Refusal};

/// Every context may use the memory, not only the one that is current (CUDA Runtime API, `cudaHostRegister`).
const PORTABLE: c_uint = sys::cudaHostRegisterPortable;
/// "Give me the copy that is loaded, and load none", dlopen(3); libloading does not name it.
const RTLD_NOLOAD: c_int = nix::libc::RTLD_NOLOAD;
const NO_DEVICE: c_int = sys::cudaError::cudaErrorNoDevice as c_int;
const UNKNOWN: c_int = sys::cudaError::cudaErrorUnknown as c_int;

// Return codes are read as integers: cudarc's enum knows the codes of one CUDA release, and a code
// that it does not know would be undefined behaviour.
type Register = unsafe extern "C" fn(*mut c_void, usize, c_uint) -> c_int;
type Unregister = unsafe extern "C" fn(*mut c_void) -> c_int;
type DeviceCount = unsafe extern "C" fn(*mut c_int) -> c_int;
type SetDevice = unsafe extern "C" fn(c_int) -> c_int;
type LastError = unsafe extern "C" fn() -> c_int;
type ErrorText = unsafe extern "C" fn(c_int) -> *const c_char;

/// Entry points of one copy of the runtime, which stays loaded for good.
#[derive(Debug, Clone)]
pub struct CudaRuntime {
    path: PathBuf,
    register: Register,
    unregister: Unregister,
    device_count: DeviceCount,
    set_device: Option<SetDevice>,
    host_get_flags: Option<HostGetFlags>,
    last_error: Option<LastError>,
    error_name: Option<ErrorText>,
    error_text: Option<ErrorText>,
    device: Option<c_int>,
}

/// What is known of an address, `cudaHostGetFlags`.
type HostGetFlags = unsafe extern "C" fn(*mut c_uint, *mut c_void) -> c_int;

/// No copy would do: what was tried, and why it was passed over.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NotFound {
    pub tried: Vec<(PathBuf, String)>,
}

impl CudaRuntime {
    /// The first copy that has the calls that are needed, in this order: what torch is bound to, what is
    /// loaded, versioned names on the loader's path, pip's packages under `package_roots`, cudarc's choice.
    ///
    /// # Errors
    /// [`NotFound`] is a value, not a fault: a machine without CUDA has no runtime.
    pub fn find(package_roots: &[PathBuf]) -> Result<Self, NotFound> {
        // Lossy: one file with an odd name must not hide the others.
        let maps = std::fs::read("/proc/self/maps").unwrap_or_default();
        let maps = String::from_utf8_lossy(&maps);
        let mut tried = NotFound::default();
        for torch in locate::loaded_torch(&maps) {
            // What torch is linked to statically has no symbol that could be found.
            if let Ok(library) = open(&torch, RTLD_LAZY | RTLD_NOLOAD)
                && let Some(found) = tried.keep(&torch, Self::bound_to(library))
            {
                return Ok(found);
            }
        }
        for path in locate::loaded_runtimes(&maps) {
            if let Some(found) = tried.keep(&path, open(&path, RTLD_LAZY | RTLD_NOLOAD).and_then(Self::from_library)) {
                return Ok(found);
            }
        }
        let names = locate::VERSIONED_NAMES.iter().map(PathBuf::from);
        for path in names.chain(locate::in_packages(package_roots)) {
            if let Some(broken) = locate::broken_file(&path) {
                tried.tried.push((broken, "it is no whole library".to_owned()));
                continue;
            }
            if let Some(found) = tried.keep(&path, open(&path, RTLD_NOW | RTLD_LOCAL).and_then(Self::from_library)) {
                return Ok(found);
            }
        }
        // SAFETY: loading a library runs its initialisers; cudarc looks only for names of the CUDA runtime.
        if unsafe { sys::is_culib_present() } {
            // SAFETY: it was there a moment ago; without the look before it, `culib` would panic.
            let library = unsafe { sys::culib() };
            // SAFETY: only looked up, not called.
            let found = Self::from_symbols(|name| unsafe { library.get(name) }.ok().map(|symbol| *symbol));
            if let Some(found) = tried.keep(Path::new("libcudart.so"), found) {
                return Ok(found);
            }
        }
        Err(tried)
    }

    /// The same runtime, with `device` current during its calls; `None` is the calling thread's device.
    #[must_use]
    pub fn on_device(mut self, device: Option<i32>) -> Self {
        self.device = device;
        self
    }

    /// The copy that a loaded library's own calls go to: the global scope comes first, as it does for the
    /// loader (`LD_PRELOAD`, `RTLD_GLOBAL`), where it offers the version that the library was linked with.
    fn bound_to(library: Library) -> Result<Self, String> {
        const VERSIONS: [&CStr; 3] = [c"libcudart.so.13", c"libcudart.so.12", c"libcudart.so.11.0"];
        // SAFETY: only looked up, not called.
        let versioned = |handle: *mut c_void, name: &[u8], version: &CStr| unsafe {
            nix::libc::dlvsym(handle, name.as_ptr().cast(), version.as_ptr()).cast_const()
        };
        let handle = library.into_raw();
        let wanted = VERSIONS
            .into_iter()
            .find(|version| !versioned(handle, b"cudaHostRegister\0", version).is_null());
        // SAFETY: the handle that was just taken apart.
        let library = unsafe { Library::from_raw(handle) };
        if let Some(version) = wanted {
            let global =
                |name: &[u8]| Some(versioned(nix::libc::RTLD_DEFAULT, name, version)).filter(|found| !found.is_null());
            if let Ok(found) = Self::from_symbols(global) {
                std::mem::forget(library);
                return Ok(found);
            }
        }
        Self::from_library(library)
    }

    fn from_library(library: Library) -> Result<Self, String> {
        // SAFETY: only looked up, not called. A lookup in a handle searches the library, then what it was linked to.
        let found = Self::from_symbols(|name| unsafe { library.get::<*const c_void>(name) }.ok().map(|symbol| *symbol));
        if found.is_ok() {
            // Pointers into it live as long as the process: it must never be unloaded.
            std::mem::forget(library);
        }
        found
    }

    fn from_symbols(symbol: impl Fn(&[u8]) -> Option<*const c_void>) -> Result<Self, String> {
        let needed = |name: &'static CStr| {
            symbol(name.to_bytes_with_nul())
                .filter(|address| !address.is_null())
                .ok_or_else(|| format!("it has no {}", name.to_string_lossy()))
        };
        let register = needed(c"cudaHostRegister")?;
        let unregister = needed(c"cudaHostUnregister")?;
        let device_count = needed(c"cudaGetDeviceCount")?;
        // SAFETY: the types are those of the CUDA Runtime API's functions of these names.
        unsafe {
            Ok(Self {
                path: path_of(register),
                register: std::mem::transmute::<*const c_void, Register>(register),
                unregister: std::mem::transmute::<*const c_void, Unregister>(unregister),
                device_count: std::mem::transmute::<*const c_void, DeviceCount>(device_count),
                set_device: needed(c"cudaSetDevice")
                    .ok()
                    .map(|f| std::mem::transmute::<*const c_void, SetDevice>(f)),
                host_get_flags: needed(c"cudaHostGetFlags")
                    .ok()
                    .map(|f| std::mem::transmute::<*const c_void, HostGetFlags>(f)),
                last_error: needed(c"cudaGetLastError")
                    .ok()
                    .map(|f| std::mem::transmute::<*const c_void, LastError>(f)),
                error_name: needed(c"cudaGetErrorName")
                    .ok()
                    .map(|f| std::mem::transmute::<*const c_void, ErrorText>(f)),
                error_text: needed(c"cudaGetErrorString")
                    .ok()
                    .map(|f| std::mem::transmute::<*const c_void, ErrorText>(f)),
                device: None,
            })
        }
    }

    /// # Errors
    /// The runtime's answer where it has no driver or no device.
    pub fn require_device(&self) -> Result<(), Refusal> {
        let mut count: c_int = 0;
        // SAFETY: the call writes one int.
        self.check("cudaGetDeviceCount", unsafe { (self.device_count)(&raw mut count) })?;
        if count > 0 {
            Ok(())
        } else {
            Err(self.refusal("cudaGetDeviceCount", NO_DEVICE))
        }
    }

    /// A failed call leaves its error pending in this copy of the runtime, on this thread, where it
    /// would hit an innocent call: it is taken off. Once: without a driver there is always another.
    /// Success takes nothing off, so an error of somebody else's stays theirs.
    fn check(&self, call: &'static str, code: c_int) -> Result<(), Refusal> {
        if code == 0 {
            return Ok(());
        }
        if let Some(last_error) = self.last_error {
            // SAFETY: takes nothing, returns an int.
            unsafe { last_error() };
        }
        Err(self.refusal(call, code))
    }

    fn refusal(&self, call: &'static str, code: c_int) -> Refusal {
        let text = |function: Option<ErrorText>| {
            // SAFETY: any int is a valid argument.
            let text = function.map_or(std::ptr::null(), |function| unsafe { function(code) });
            if text.is_null() {
                String::new()
            } else {
                // SAFETY: a NUL-terminated string that lives as long as the library.
                unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
            }
        };
        Refusal {
            call,
            code,
            name: text(self.error_name),
            text: text(self.error_text),
        }
    }
}

impl NotFound {
    fn keep(&mut self, path: &Path, found: Result<CudaRuntime, String>) -> Option<CudaRuntime> {
        found.map_err(|why| self.tried.push((path.to_owned(), why))).ok()
    }
}

fn open(path: &Path, flags: c_int) -> Result<Library, String> {
    // SAFETY: loading runs initialisers; these are copies of the CUDA runtime by their names, or loaded already.
    unsafe { Library::open(Some(path), flags) }.map_err(|error| {
        // The loader's own words are the source.
        error.source().map_or_else(|| error.to_string(), ToString::to_string)
    })
}

/// The file that a symbol lies in.
fn path_of(symbol: *const c_void) -> PathBuf {
    let mut info = std::mem::MaybeUninit::<nix::libc::Dl_info>::zeroed();
    // SAFETY: dladdr writes the structure, or returns 0 and leaves it zeroed.
    let name = unsafe {
        if nix::libc::dladdr(symbol, info.as_mut_ptr()) == 0 {
            return PathBuf::new();
        }
        info.assume_init().dli_fname
    };
    if name.is_null() {
        return PathBuf::new();
    }
    // SAFETY: a NUL-terminated string of the loader's, which lives while the library is loaded.
    PathBuf::from(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
}

impl HostRegistrar for CudaRuntime {
    fn register(&self, address: usize, len_bytes: usize) -> Result<(), Refusal> {
        // SAFETY: the region keeps the range mapped until it is unregistered.
        let code = unsafe { (self.register)(address as *mut c_void, len_bytes, PORTABLE) };
        self.check("cudaHostRegister", code)
    }

    fn unregister(&self, address: usize) -> Result<(), Refusal> {
        // SAFETY: an address that was registered, or one that the runtime refuses.
        self.check("cudaHostUnregister", unsafe {
            (self.unregister)(address as *mut c_void)
        })
    }

    fn is_registered(&self, address: usize) -> Option<bool> {
        let get_flags = self.host_get_flags?;
        let mut flags: c_uint = 0;
        // SAFETY: writes one unsigned int; any address may be asked about.
        let code = unsafe { get_flags(&raw mut flags, address as *mut c_void) };
        Some(self.check("cudaHostGetFlags", code).is_ok())
    }

    /// On a thread of its own where a device is wanted: setting a device makes its context, so setting the
    /// old one back could make one on GPU 0 that nobody asked for.
    fn run(&self, calls: &mut (dyn FnMut() + Send)) -> Result<(), Refusal> {
        let Some(device) = self.device else {
            calls();
            return Ok(());
        };
        let failed = |text: String| Refusal {
            call: "cudaSetDevice",
            code: UNKNOWN,
            name: "cudaErrorUnknown".to_owned(),
            text,
        };
        let Some(set_device) = self.set_device else {
            return Err(failed("this runtime has no cudaSetDevice".to_owned()));
        };
        std::thread::scope(|scope| {
            let worker = std::thread::Builder::new()
                .spawn_scoped(scope, || {
                    // SAFETY: takes an int.
                    self.check("cudaSetDevice", unsafe { set_device(device) })?;
                    calls();
                    Ok(())
                })
                .map_err(|error| failed(format!("no thread to make the calls on: {error}")))?;
            worker
                .join()
                .unwrap_or_else(|_| Err(failed("the registering thread panicked".to_owned())))
        })
    }

    fn backend(&self) -> &'static str {
        "cudart"
    }

    fn library_path(&self) -> Option<PathBuf> {
        Some(self.path.clone())
    }
}

/// Takes the pending error off the runtime that torch's libraries call, on this thread: what was called
/// through torch's own binding leaves its error there.
pub fn drain_torch() {
    let maps = std::fs::read("/proc/self/maps").unwrap_or_default();
    for torch in locate::loaded_torch(&String::from_utf8_lossy(&maps)) {
        let Ok(library) = open(&torch, RTLD_LAZY | RTLD_NOLOAD) else {
            continue;
        };
        if let Ok(CudaRuntime {
            last_error: Some(last_error),
            ..
        }) = CudaRuntime::bound_to(library)
        {
            // SAFETY: takes nothing, returns an int.
            unsafe { last_error() };
            return;
        }
    }
}
