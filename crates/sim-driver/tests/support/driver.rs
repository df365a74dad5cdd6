//! The driver's libraries as a program sees them: opened by name, called through their exported functions.
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

/// One method per function of a library; each looks its symbol up once.
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
            // SAFETY: the caller's promise.
            unsafe { function($($arg),*) }
        }
    };
}

/// An opened library.
pub struct Library(*mut c_void);

// SAFETY: a handle of the dynamic linker, good for every thread.
unsafe impl Send for Library {}
// SAFETY: likewise.
unsafe impl Sync for Library {}

impl Library {
    pub fn open(name: &str) -> Result<Self, String> {
        let name = CString::new(name).unwrap();
        // SAFETY: a text that ends in zero.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            // SAFETY: no arguments.
            let text = unsafe { libc::dlerror() };
            // SAFETY: there was an error, so there is a text.
            return Err(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned());
        }
        Ok(Self(handle))
    }

    pub fn symbol(&self, name: &str) -> Option<*mut c_void> {
        let name = CString::new(name).unwrap();
        // SAFETY: an open handle and a text that ends in zero.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    }
}

pub mod cuda {
    use super::Library;
    pub use partage_driver_api::cuda::*;

    pub struct Cuda(pub Library);

    impl Cuda {
        /// The libcuda that the dynamic linker finds, initialised.
        pub fn started() -> Self {
            let cuda = Self(Library::open("libcuda.so.1").unwrap());
            // SAFETY: no pointers.
            assert_eq!(unsafe { cuda.cuInit(0) }, CUDA_SUCCESS);
            cuda
        }
    }

    macro_rules! expand { ($($table:tt)*) => { calls! { Cuda, CUresult, $($table)* } }; }
    partage_driver_api::cuda_functions!(expand);
}

pub mod nvml {
    use super::Library;
    pub use partage_driver_api::nvml::*;

    pub struct Nvml(pub Library);

    impl Nvml {
        pub fn open() -> Self {
            Self(Library::open("libnvidia-ml.so.1").unwrap())
        }
    }

    macro_rules! expand { ($($table:tt)*) => { calls! { Nvml, nvmlReturn_t, $($table)* } }; }
    partage_driver_api::nvml_functions!(expand);
}
