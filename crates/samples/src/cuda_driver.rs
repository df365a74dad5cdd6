//! A client of the CUDA driver, which loads `libcuda.so.1` by name like other CUDA programs.
#![allow(unsafe_code)]

use partage_driver_api::cuda::{
    self, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr,
    CUevent, CUfunction, CUmodule, CUresult, CudaError,
};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::rc::Rc;

/// Blocks of this size can fill every multiprocessor.
const THREADS_PER_BLOCK: c_uint = 1024;

/// Why a GPU cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CudaDriverError {
    /// The driver library or one of its functions is missing.
    #[error("cannot load the driver: {0}; add the directory of libcuda.so.1 to LD_LIBRARY_PATH")]
    NotLoaded(String),
    /// A driver function returned an error.
    #[error("{call} failed: {error} ({error:?})")]
    Refused {
        /// The name of the function.
        call: &'static str,
        /// The error that it returned.
        error: CudaError,
    },
}

impl CudaDriverError {
    /// Returns whether the GPU is out of memory, which a program can handle.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, CudaDriverError::Refused { error: CudaError::OUT_OF_MEMORY, .. })
    }
}

/// Declares the driver functions that are used, and looks up each of them in the library.
macro_rules! driver {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?);)*) => {
        #[allow(non_snake_case)]
        struct CudaDriver { $($name: unsafe extern "C" fn($($type),*) -> CUresult),* }

        #[allow(non_snake_case, clippy::too_many_arguments)]
        impl CudaDriver {
            fn load() -> Result<Self, CudaDriverError> {
                // SAFETY: the name is a C string; the driver's initializers have no preconditions.
                let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
                if library.is_null() {
                    return Err(CudaDriverError::NotLoaded(last_error()));
                }
                Ok(Self { $($name: {
                    let name = concat!(stringify!($name), "\0");
                    // SAFETY: the library is open and the name is NUL-terminated.
                    let address = unsafe { libc::dlsym(library, name.as_ptr().cast()) };
                    if address.is_null() {
                        return Err(CudaDriverError::NotLoaded(last_error()));
                    }
                    // SAFETY: the address is not null, and the CUDA documentation gives the function this signature.
                    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> CUresult>(address) }
                }),* })
            }

            $(fn $name(&self, $($arg: $type),*) -> Result<(), CudaDriverError> {
                // SAFETY: the methods of this module pass pointers to live variables and handles that the driver
                // returned.
                let code = unsafe { (self.$name)($($arg),*) };
                cuda::check(code).map_err(|error| CudaDriverError::Refused { call: stringify!($name), error })
            })*
        }
    };
}

driver! {
    fn cuInit(flags: c_uint);
    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
    fn cuCtxCreate_v2(context: *mut CUcontext, flags: c_uint, device: CUdevice);
    fn cuCtxDestroy_v2(context: CUcontext);
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuMemAlloc_v2(pointer: *mut CUdeviceptr, bytes: usize);
    fn cuMemFree_v2(pointer: CUdeviceptr);
    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int,
        function: CUfunction,
        threads: c_int,
        shared: usize,
    );
    fn cuEventCreate(event: *mut CUevent, flags: c_uint);
    fn cuEventDestroy_v2(event: CUevent);
    fn cuEventRecord(event: CUevent, stream: *mut c_void);
    fn cuEventSynchronize(event: CUevent);
    fn cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared: c_uint,
        stream: *mut c_void,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    );
}

fn last_error() -> String {
    // SAFETY: dlerror has no preconditions.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no reason given".to_string();
    }
    // SAFETY: dlerror returned a C string that is valid until the next dl call of this thread.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// A CUDA context. It is destroyed with the last object that was created in it.
struct DriverContext {
    driver: CudaDriver,
    context: CUcontext,
    multiprocessors: c_uint,
}

impl Drop for DriverContext {
    fn drop(&mut self) {
        // An error is ignored: the driver destroys the context at process exit.
        let _ = self.driver.cuCtxDestroy_v2(self.context);
    }
}

/// A GPU with a context that is current on this thread.
pub struct GpuContext(Rc<DriverContext>);

impl GpuContext {
    /// Loads the driver and creates a context on the GPU with this ordinal.
    pub fn open(number: u32) -> Result<GpuContext, CudaDriverError> {
        let driver = CudaDriver::load()?;
        driver.cuInit(0)?;
        let (mut device, mut count, mut context) = (0, 0, null_mut());
        driver.cuDeviceGet(&mut device, c_int::try_from(number).unwrap_or(c_int::MAX))?;
        driver.cuDeviceGetAttribute(&mut count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device)?;
        driver.cuCtxCreate_v2(&mut context, 0, device)?;
        Ok(GpuContext(Rc::new(DriverContext {
            driver,
            context,
            multiprocessors: count.max(1).unsigned_abs(),
        })))
    }

    /// Returns the free and total memory in bytes that the driver reports to this program.
    pub fn memory(&self) -> Result<(u64, u64), CudaDriverError> {
        let (mut free, mut total) = (0, 0);
        self.0.driver.cuMemGetInfo_v2(&mut free, &mut total)?;
        Ok((free as u64, total as u64))
    }

    /// Allocates this many bytes of GPU memory, which are freed on drop.
    pub fn allocate(&self, bytes: u64) -> Result<DeviceMemory, CudaDriverError> {
        let mut pointer = 0;
        self.0.driver.cuMemAlloc_v2(&mut pointer, usize::try_from(bytes).unwrap_or(usize::MAX))?;
        Ok(DeviceMemory { context: Rc::clone(&self.0), pointer, bytes })
    }

    /// Loads a kernel that occupies the whole GPU for this time.
    pub fn kernel(&self, micros: u32) -> Result<SpinKernel, CudaDriverError> {
        let driver = &self.0.driver;
        let (mut module, mut function, mut blocks) = (null_mut(), null_mut(), 0);
        let name = format!("busy_{micros}us");
        let image = c_string(spin_kernel_ptx(&name, micros));
        driver.cuModuleLoadData(&mut module, image.as_ptr().cast())?;
        driver.cuModuleGetFunction(&mut function, module, c_string(name).as_ptr())?;
        driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            &mut blocks,
            function,
            THREADS_PER_BLOCK as c_int,
            0,
        )?;
        let blocks = blocks.max(1).unsigned_abs() * self.0.multiprocessors;
        Ok(SpinKernel { context: Rc::clone(&self.0), function, blocks })
    }
}

/// Converts a string without NUL bytes.
fn c_string(text: String) -> CString {
    CString::new(text).unwrap_or_default()
}

/// Returns PTX of a kernel whose threads spin until the time has passed. A simulated driver, which does not execute
/// code, takes the duration from the name.
fn spin_kernel_ptx(name: &str, micros: u32) -> String {
    let nanos = u64::from(micros) * 1000;
    format!(
        "\
.version 6.0
.target sm_50
.address_size 64
.visible .entry {name}()
{{
    .reg .pred %going;
    .reg .b64 %now, %end;
    mov.u64 %now, %globaltimer;
    add.u64 %end, %now, {nanos};
$spin:
    mov.u64 %now, %globaltimer;
    setp.lt.u64 %going, %now, %end;
    @%going bra $spin;
    ret;
}}
"
    )
}

/// Memory of a GPU, freed on drop.
pub struct DeviceMemory {
    context: Rc<DriverContext>,
    pointer: CUdeviceptr,
    bytes: u64,
}

impl DeviceMemory {
    /// The requested size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // An error is ignored: the driver frees the memory at process exit.
        let _ = self.context.driver.cuMemFree_v2(self.pointer);
    }
}

/// A kernel that occupies its GPU for a known time.
pub struct SpinKernel {
    context: Rc<DriverContext>,
    function: CUfunction,
    /// The number of blocks that the GPU runs concurrently. Further blocks would run afterwards and multiply the
    /// duration.
    blocks: c_uint,
}

impl SpinKernel {
    /// Launches the kernel after all earlier ones and returns an event for its completion.
    pub fn launch(&self) -> Result<KernelEvent, CudaDriverError> {
        let mut event = null_mut();
        self.context.driver.cuEventCreate(&mut event, 0)?;
        let done = KernelEvent { context: Rc::clone(&self.context), event };
        self.launch_with_event(&done)?;
        Ok(done)
    }

    /// Launches the kernel and records its completion with an existing event, which must not be pending.
    pub fn launch_with_event(&self, done: &KernelEvent) -> Result<(), CudaDriverError> {
        let (parameters, extra) = (null_mut(), null_mut());
        let driver = &self.context.driver;
        driver.cuLaunchKernel(
            self.function,
            self.blocks,
            1,
            1,
            THREADS_PER_BLOCK,
            1,
            1,
            0,
            null_mut(),
            parameters,
            extra,
        )?;
        driver.cuEventRecord(done.event, null_mut())
    }
}

/// An event that a kernel's completion is recorded with.
pub struct KernelEvent {
    context: Rc<DriverContext>,
    event: CUevent,
}

impl KernelEvent {
    /// Waits for the completion.
    pub fn wait(&self) -> Result<(), CudaDriverError> {
        self.context.driver.cuEventSynchronize(self.event)
    }
}

impl Drop for KernelEvent {
    fn drop(&mut self) {
        // An error is ignored: the event is destroyed with its context.
        let _ = self.context.driver.cuEventDestroy_v2(self.event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_duration_is_in_its_name_and_code() {
        let image = spin_kernel_ptx("busy_4000us", 4000);
        assert!(image.contains(".entry busy_4000us()") && image.contains("%now, 4000000;"), "{image}");
        assert!(image.lines().all(|line| !line.contains("{{")));
    }

    #[test]
    fn driver_errors_have_messages_and_names() {
        let error = CudaDriverError::Refused { call: "cuMemAlloc_v2", error: CudaError::OUT_OF_MEMORY };
        assert_eq!(error.to_string(), "cuMemAlloc_v2 failed: out of memory (CUDA_ERROR_OUT_OF_MEMORY)");
        assert!(error.is_out_of_memory());
        assert!(!CudaDriverError::Refused { call: "cuInit", error: CudaError::NO_DEVICE }.is_out_of_memory());
    }
}
