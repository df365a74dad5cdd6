//! The driver's libraries as a program uses them: loaded by name and called through their exported functions.
#![allow(
    unsafe_code,
    non_snake_case,
    dead_code,
    unreachable_pub,
    missing_docs,
    clippy::missing_safety_doc,
    clippy::too_many_arguments
)]

use std::ffi::{CStr, CString, c_void};

/// Declares one method per function of a library; each looks up its symbol once.
macro_rules! calls {
    ($library:ident, $code:ident, $($(#[$doc:meta])* trait $family:ident {
        $(fn $name:ident $args:tt $(twin $twin:ident)?;)*
    })*) => {
        impl $library {
            $($(
                calls! { @one $name $args $code }
                $(calls! { @one $twin $args $code })?
            )*)*
        }
    };
    (@one $name:ident($($arg:ident: $type:ty),* $(,)?) $code:ident) => {
        pub unsafe fn $name(&self, $($arg: $type),*) -> $code {
            static ADDRESS: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
            let address = *ADDRESS.get_or_init(|| self.0.symbol(stringify!($name)).expect(stringify!($name)) as usize);
            // SAFETY: the symbol has this signature: driver-api's tests compare it with two other sources.
            let function: unsafe extern "C" fn($($type),*) -> $code = unsafe { std::mem::transmute(address) };
            // SAFETY: this method has the same contract as the function.
            unsafe { function($($arg),*) }
        }
    };
}

/// A library loaded by `dlopen`.
pub struct LoadedLibrary(*mut c_void);

// SAFETY: a handle of the dynamic linker, valid in every thread.
unsafe impl Send for LoadedLibrary {}
// SAFETY: the functions of the dynamic linker may be called with one handle from several threads at once.
unsafe impl Sync for LoadedLibrary {}

impl LoadedLibrary {
    pub fn open(name: &str) -> Result<Self, String> {
        let name = CString::new(name).unwrap();
        // SAFETY: the name is NUL-terminated.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            // SAFETY: the function takes no arguments.
            let text = unsafe { libc::dlerror() };
            // SAFETY: after a failure, `dlerror` returns a NUL-terminated string.
            return Err(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned());
        }
        Ok(Self(handle))
    }

    pub fn symbol(&self, name: &str) -> Option<*mut c_void> {
        let name = CString::new(name).unwrap();
        // SAFETY: an open handle and a NUL-terminated name.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    }
}

pub mod cuda {
    use super::LoadedLibrary;
    pub use partage_driver_api::cuda::*;

    /// A loaded libcuda, with one method per function.
    pub struct CudaLibrary(pub LoadedLibrary);

    impl CudaLibrary {
        /// Loads the libcuda that the dynamic linker finds, and initializes it.
        pub fn started() -> Self {
            let cuda = Self(LoadedLibrary::open("libcuda.so.1").unwrap());
            // SAFETY: no pointer is passed.
            assert_eq!(unsafe { cuda.cuInit(0) }, CUDA_SUCCESS);
            cuda
        }
    }

    macro_rules! expand { ($($table:tt)*) => { calls! { CudaLibrary, CUresult, $($table)* } }; }
    partage_driver_api::cuda_functions!(expand);
}

pub mod nvml {
    use super::LoadedLibrary;
    pub use partage_driver_api::nvml::*;

    /// A loaded libnvidia-ml, with one method per function.
    pub struct NvmlLibrary(pub LoadedLibrary);

    impl NvmlLibrary {
        pub fn open() -> Self {
            Self(LoadedLibrary::open("libnvidia-ml.so.1").unwrap())
        }
    }

    macro_rules! expand { ($($table:tt)*) => { calls! { NvmlLibrary, nvmlReturn_t, $($table)* } }; }
    partage_driver_api::nvml_functions!(expand);
}
