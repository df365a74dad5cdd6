//! The driver's own functions, looked up only in the driver's own files.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// One of the driver's libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Library {
    Cuda,
    Nvml,
}

impl Library {
    /// Returns the library's handle; it is opened on first use. If it is in the chain of dependencies, it is already
    /// loaded.
    fn handle(self) -> *mut c_void {
        static CUDA: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
        static NVML: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
        let (cell, path) = match self {
            Self::Cuda => (&CUDA, crate::embedded_config::get().real_cuda()),
            Self::Nvml => (&NVML, crate::embedded_config::get().real_nvml()),
        };
        let known = cell.load(Ordering::Acquire);
        if !known.is_null() {
            return known;
        }
        let Some(path) = path else { return std::ptr::null_mut() };
        // Two threads that get here at once open it twice, which only increments its reference count.
        // SAFETY: the path is a C string.
        let opened = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
        cell.store(opened, Ordering::Release);
        opened
    }

    /// Returns the library's own function of this name; null if it has none.
    pub(crate) fn symbol(self, name: &CStr) -> *mut c_void {
        let handle = self.handle();
        if handle.is_null() {
            return std::ptr::null_mut();
        }
        crate::lookup::libc_dlsym(handle, name)
    }
}

/// A function of the driver, looked up once.
pub(crate) struct DriverFunction {
    library: Library,
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

/// Marks a function that was looked up and does not exist. (Zero means that it was not looked up yet.)
const FUNCTION_ABSENT: *mut c_void = std::ptr::without_provenance_mut(1);

impl DriverFunction {
    pub(crate) const fn new(library: Library, name: &'static str) -> Self {
        let Ok(name) = CStr::from_bytes_with_nul(name.as_bytes()) else {
            panic!("the name does not end in zero")
        };
        Self { library, name, address: AtomicPtr::new(std::ptr::null_mut()) }
    }

    #[inline]
    pub(crate) fn address(&self) -> Option<*mut c_void> {
        let known = self.address.load(Ordering::Acquire);
        if known as usize > 1 { Some(known) } else { self.find(known) }
    }

    #[cold]
    fn find(&self, known: *mut c_void) -> Option<*mut c_void> {
        if known == FUNCTION_ABSENT {
            return None;
        }
        let found = self.library.symbol(self.name);
        self.address.store(if found.is_null() { FUNCTION_ABSENT } else { found }, Ordering::Release);
        (!found.is_null()).then_some(found)
    }
}

/// Defines one Rust function per function of a library, which calls the driver's; a function that the driver lacks
/// returns `$missing`.
macro_rules! functions {
    ($library:expr, $code:ident, $missing:expr, $($(#[$doc:meta])* trait $family:ident {
        $(fn $name:ident $args:tt $(twin $twin:ident)?;)*
    })*) => {
        /// The types of the functions, against which the compiler checks the hooks.
        pub(crate) mod types {
            use super::*;
            $($(
                functions! { @type $name $args $code }
                $(functions! { @type $twin $args $code })?
            )*)*
        }
        $($(
            functions! { @call $library, $missing, $name $args $code }
            $(functions! { @call $library, $missing, $twin $args $code })?
        )*)*
    };
    (@type $name:ident($($arg:ident: $type:ty),* $(,)?) $code:ident) => {
        pub(crate) type $name = unsafe extern "C" fn($($arg: $type),*) -> $code;
    };
    (@call $library:expr, $missing:expr, $name:ident($($arg:ident: $type:ty),* $(,)?) $code:ident) => {
        #[inline]
        pub(crate) unsafe fn $name($($arg: $type),*) -> $code {
            static FUNCTION: DriverFunction = DriverFunction::new($library, concat!(stringify!($name), "\0"));
            let Some(address) = FUNCTION.address() else { return $missing };
            // SAFETY: the driver's function of this name has this type; tests of driver-api compare the types with two
            // other sources.
            let function = unsafe { std::mem::transmute::<*mut c_void, types::$name>(address) };
            // SAFETY: the caller passes arguments that are valid for this driver function.
            unsafe { function($($arg),*) }
        }
    };
}

/// The driver's own libcuda functions; one that it lacks returns `CUDA_ERROR_NOT_FOUND`.
#[allow(
    non_snake_case,
    non_camel_case_types,
    dead_code,
    clippy::too_many_arguments,
    clippy::missing_safety_doc
)]
pub(crate) mod cuda {
    use super::{DriverFunction, Library, c_void};
    use partage_driver_api::cuda::*;
    macro_rules! expand { ($($table:tt)*) => { functions! { Library::Cuda, CUresult, CUDA_ERROR_NOT_FOUND, $($table)* } }; }
    partage_driver_api::cuda_functions!(expand);
}

/// The driver's own libnvidia-ml functions; one that it lacks returns `NVML_ERROR_FUNCTION_NOT_FOUND`.
#[allow(
    non_snake_case,
    non_camel_case_types,
    dead_code,
    clippy::too_many_arguments,
    clippy::missing_safety_doc
)]
pub(crate) mod nvml {
    use super::{DriverFunction, Library, c_void};
    use partage_driver_api::nvml::*;
    macro_rules! expand { ($($table:tt)*) => { functions! { Library::Nvml, nvmlReturn_t, NVML_ERROR_FUNCTION_NOT_FOUND, $($table)* } }; }
    partage_driver_api::nvml_functions!(expand);
}
