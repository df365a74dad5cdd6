//! Bindings to the functions of `libcuda.so.1` that the measurement needs.
#![allow(unsafe_code)]

use super::ContextSizeError;
use partage_driver_api::cuda::{CUDA_SUCCESS, CUcontext, CUdevice, CUresult, CUuuid};
use std::ffi::{CStr, CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::null_mut;

/// Declares functions that are looked up in the library.
macro_rules! functions {
    ($(fn $name:ident($($arg:ident: $type:ty),*);)*) => {
        /// The CUDA driver, loaded and initialized. It is never unloaded, because its threads may run at any time.
        #[allow(non_snake_case)]
        pub(super) struct CudaDriver { $($name: unsafe extern "C" fn($($type),*) -> CUresult),* }

        #[allow(non_snake_case)]
        impl CudaDriver {
            fn of(library: DynamicLibrary) -> Result<Self, String> {
                Ok(Self { $($name: {
                    let address = library.symbol(concat!(stringify!($name), "\0"))?;
                    // SAFETY: the address is not null, and the driver's function of this name has this signature.
                    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> CUresult>(address) }
                }),* })
            }

            $(fn $name(&self, $($arg: $type),*) -> Result<(), ContextSizeError> {
                // SAFETY: all callers are in this file; they pass pointers to live variables, and device numbers from
                // the driver.
                match unsafe { (self.$name)($($arg),*) } {
                    CUDA_SUCCESS => Ok(()),
                    code => Err(ContextSizeError::CallFailed { call: stringify!($name), code }),
                }
            })*
        }
    };
}

functions! {
    fn cuInit(flags: u32);
    fn cuDeviceGetCount(count: *mut i32);
    fn cuDeviceGet(device: *mut CUdevice, ordinal: i32);
    fn cuDeviceGetUuid(uuid: *mut CUuuid, device: CUdevice);
    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice);
}

impl CudaDriver {
    /// Loads and initializes the driver.
    pub(super) fn load(path: &Path) -> Result<Self, ContextSizeError> {
        let failed = |what| ContextSizeError::LoadFailed { path: path.into(), what };
        let cuda = DynamicLibrary::open(path).and_then(Self::of).map_err(failed)?;
        cuda.cuInit(0)?;
        Ok(cuda)
    }

    /// Returns all GPUs of the driver.
    pub(super) fn devices(&self) -> Result<Vec<CUdevice>, ContextSizeError> {
        let mut count = 0;
        self.cuDeviceGetCount(&mut count)?;
        let device = |ordinal| {
            let mut device = 0;
            self.cuDeviceGet(&mut device, ordinal)?;
            Ok(device)
        };
        (0..count).map(device).collect()
    }

    /// Retains the primary context of a GPU until the returned value is dropped.
    pub(super) fn context(&self, device: CUdevice) -> Result<PrimaryContext<'_>, ContextSizeError> {
        let mut uuid = CUuuid::default();
        self.cuDeviceGetUuid(&mut uuid, device)?;
        let mut context = null_mut();
        self.cuDevicePrimaryCtxRetain(&mut context, device)?;
        Ok(PrimaryContext { cuda: self, device, uuid })
    }
}

/// A retained primary context of a GPU.
pub(super) struct PrimaryContext<'a> {
    cuda: &'a CudaDriver,
    device: CUdevice,
    uuid: CUuuid,
}

impl PrimaryContext<'_> {
    /// Returns the UUID of the GPU.
    pub(super) fn uuid(&self) -> [u8; 16] {
        self.uuid.bytes.map(|byte| byte as u8)
    }
}

impl Drop for PrimaryContext<'_> {
    fn drop(&mut self) {
        // It fails only if the driver has lost the GPU.
        let _ = self.cuda.cuDevicePrimaryCtxRelease_v2(self.device);
    }
}

/// A library opened with `dlopen`. It is never closed.
struct DynamicLibrary(*mut c_void);

impl DynamicLibrary {
    fn open(path: &Path) -> Result<Self, String> {
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
        // SAFETY: the name is nul-terminated; the library is a GPU driver, whose constructors are safe to run here.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() { Err(last_error()) } else { Ok(Self(library)) }
    }

    /// Returns the address of a function. The name must be nul-terminated.
    fn symbol(&self, name: &'static str) -> Result<*mut c_void, String> {
        // SAFETY: the handle is an open library, and callers pass a nul-terminated name.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr().cast()) };
        if address.is_null() { Err(last_error()) } else { Ok(address) }
    }
}

fn last_error() -> String {
    // SAFETY: `dlerror` has no preconditions; it returns a message for this thread, or null.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no reason given".to_string();
    }
    // SAFETY: it is not null, so it is a nul-terminated message, valid until this thread next calls the dynamic linker.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
