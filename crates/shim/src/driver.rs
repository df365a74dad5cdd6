//! The driver's own functions, found in its own file and nowhere else.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Which of the driver's libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Library {
    Cuda,
    Nvml,
}

impl Library {
    /// The file, opened at the first question. Where it stands in the chain of dependencies it is loaded already.
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
        // Two threads that come here at once open it twice, which counts and does no harm.
        // SAFETY: a text that ends in zero.
        let opened = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
        cell.store(opened, Ordering::Release);
        opened
    }

    /// The library's own function of this name; null where it has none.
    pub(crate) fn symbol(self, name: &CStr) -> *mut c_void {
        let handle = self.handle();
        if handle.is_null() {
            return std::ptr::null_mut();
        }
        crate::lookup::libc_dlsym(handle, name)
    }
}

/// A function of the driver, looked up once.
pub(crate) struct Function {
    library: Library,
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

/// No function: it was looked for and is not there. (Zero is "not yet looked for".)
const ABSENT: *mut c_void = std::ptr::without_provenance_mut(1);

impl Function {
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
        if known == ABSENT {
            return None;
        }
        let found = self.library.symbol(self.name);
        self.address.store(if found.is_null() { ABSENT } else { found }, Ordering::Release);
        (!found.is_null()).then_some(found)
    }
}

/// One Rust function per function of a library, which calls the driver's; one that the driver lacks answers `$missing`.
macro_rules! functions {
    ($library:expr, $code:ident, $missing:expr, $($(#[$doc:meta])* trait $family:ident {
        $(fn $name:ident $args:tt $(twin $twin:ident)?;)*
    })*) => {
        /// The types of the functions, for the compiler to hold the hooks against.
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
            static FUNCTION: Function = Function::new($library, concat!(stringify!($name), "\0"));
            let Some(address) = FUNCTION.address() else { return $missing };
            // SAFETY: the driver's function of this name has this type; driver-api's tests compare it with two other sources.
            let function = unsafe { std::mem::transmute::<*mut c_void, types::$name>(address) };
            // SAFETY: the caller's promise.
            unsafe { function($($arg),*) }
        }
    };
}

/// libcuda.
#[allow(
    non_snake_case,
    non_camel_case_types,
    dead_code,
    clippy::too_many_arguments,
    clippy::missing_safety_doc
)]
pub(crate) mod cuda {
    use super::{Function, Library, c_void};
    use partage_driver_api::cuda::*;
    macro_rules! expand { ($($table:tt)*) => { functions! { Library::Cuda, CUresult, CUDA_ERROR_NOT_FOUND, $($table)* } }; }
    partage_driver_api::cuda_functions!(expand);
}

/// libnvidia-ml.
#[allow(
    non_snake_case,
    non_camel_case_types,
    dead_code,
    clippy::too_many_arguments,
    clippy::missing_safety_doc
)]
pub(crate) mod nvml {
    use super::{Function, Library, c_void};
    use partage_driver_api::nvml::*;
    macro_rules! expand { ($($table:tt)*) => { functions! { Library::Nvml, nvmlReturn_t, NVML_ERROR_FUNCTION_NOT_FOUND, $($table)* } }; }
    partage_driver_api::nvml_functions!(expand);
}
