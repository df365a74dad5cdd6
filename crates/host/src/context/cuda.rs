//! The few functions of `libcuda.so.1` that a measurement needs.
#![allow(unsafe_code)]

use super::ContextError;
use partage_driver_api::cuda::{CUDA_SUCCESS, CUcontext, CUdevice, CUresult, CUuuid};
use std::ffi::{CStr, CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::null_mut;

/// Declares the functions; each is looked up in the library.
macro_rules! functions {
    ($(fn $name:ident($($arg:ident: $type:ty),*);)*) => {
        /// A driver, loaded and initialised. It is never unloaded: its threads may be anywhere.
        #[allow(non_snake_case)]
        pub(super) struct Cuda { $($name: unsafe extern "C" fn($($type),*) -> CUresult),* }

        #[allow(non_snake_case)]
        impl Cuda {
            fn of(library: Library) -> Result<Self, String> {
                Ok(Self { $($name: {
                    let address = library.symbol(concat!(stringify!($name), "\0"))?;
                    // SAFETY: not null, and the driver's function of this name has this signature.
                    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> CUresult>(address) }
                }),* })
            }

            $(fn $name(&self, $($arg: $type),*) -> Result<(), ContextError> {
                // SAFETY: what is passed in this file are variables of the callers and numbers that the driver gave.
                match unsafe { (self.$name)($($arg),*) } {
                    CUDA_SUCCESS => Ok(()),
                    code => Err(ContextError::Refused { call: stringify!($name), code }),
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

impl Cuda {
    /// Loads a driver and begins with it.
    pub(super) fn load(path: &Path) -> Result<Self, ContextError> {
        let failed = |what| ContextError::NoLibrary { path: path.into(), what };
        let cuda = Library::open(path).and_then(Self::of).map_err(failed)?;
        cuda.cuInit(0)?;
        Ok(cuda)
    }

    /// All GPUs that it has.
    pub(super) fn devices(&self) -> Result<Vec<CUdevice>, ContextError> {
        let mut count = 0;
        self.cuDeviceGetCount(&mut count)?;
        let device = |ordinal| {
            let mut device = 0;
            self.cuDeviceGet(&mut device, ordinal)?;
            Ok(device)
        };
        (0..count).map(device).collect()
    }

    /// Makes a GPU's context, which is there as long as the value.
    pub(super) fn context(&self, device: CUdevice) -> Result<Context<'_>, ContextError> {
        let mut uuid = CUuuid::default();
        self.cuDeviceGetUuid(&mut uuid, device)?;
        let mut context = null_mut();
        self.cuDevicePrimaryCtxRetain(&mut context, device)?;
        Ok(Context { cuda: self, device, uuid })
    }
}

/// A context on a GPU.
pub(super) struct Context<'a> {
    cuda: &'a Cuda,
    device: CUdevice,
    uuid: CUuuid,
}

impl Context<'_> {
    /// The GPU's UUID.
    pub(super) fn uuid(&self) -> [u8; 16] {
        self.uuid.bytes.map(|byte| byte as u8)
    }
}

impl Drop for Context<'_> {
    fn drop(&mut self) {
        // A driver that fails here has lost the GPU.
        let _ = self.cuda.cuDevicePrimaryCtxRelease_v2(self.device);
    }
}

/// An open library.
struct Library(*mut c_void);

impl Library {
    fn open(path: &Path) -> Result<Self, String> {
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
        // SAFETY: a text that ends in zero; the library is a driver, which may run its constructors here.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() { Err(last_error()) } else { Ok(Self(library)) }
    }

    /// The address of a function whose name ends in zero.
    fn symbol(&self, name: &'static str) -> Result<*mut c_void, String> {
        // SAFETY: an open library and a text that ends in zero.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr().cast()) };
        if address.is_null() { Err(last_error()) } else { Ok(address) }
    }
}

fn last_error() -> String {
    // SAFETY: the dynamic linker's text for this thread, or nothing.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no reason given".to_string();
    }
    // SAFETY: not null, so a text, which stays until the thread's next call of the linker.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
