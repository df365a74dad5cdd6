//! A GPU through `libcuda.so.1`, loaded by its name as any CUDA program does it.
#![allow(unsafe_code)]

use partage_driver_api::cuda::{
    self, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr,
    CUevent, CUfunction, CUmodule, CUresult, CudaError,
};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::rc::Rc;

/// Threads of a block. So many of them fill every multiprocessor.
const THREADS: c_uint = 1024;

/// Why a GPU cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// No driver, or half of one.
    #[error("the driver cannot be loaded: {0}; put the folder of libcuda.so.1 on LD_LIBRARY_PATH")]
    NoDriver(String),
    /// The driver refused.
    #[error("{call} was refused: {error} ({error:?})")]
    Refused {
        /// The function.
        call: &'static str,
        /// Its answer.
        error: CudaError,
    },
}

impl DriverError {
    /// Whether there was no memory left: what a program can live with.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, DriverError::Refused { error: CudaError::OUT_OF_MEMORY, .. })
    }
}

/// Declares the driver's functions that are used; each is looked up in the library.
macro_rules! driver {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?);)*) => {
        #[allow(non_snake_case)]
        struct Driver { $($name: unsafe extern "C" fn($($type),*) -> CUresult),* }

        #[allow(non_snake_case, clippy::too_many_arguments)]
        impl Driver {
            fn load() -> Result<Self, DriverError> {
                // SAFETY: a text that ends in zero.
                let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
                if library.is_null() {
                    return Err(DriverError::NoDriver(last_error()));
                }
                Ok(Self { $($name: {
                    let name = concat!(stringify!($name), "\0");
                    // SAFETY: an open library and a text that ends in zero.
                    let address = unsafe { libc::dlsym(library, name.as_ptr().cast()) };
                    if address.is_null() {
                        return Err(DriverError::NoDriver(last_error()));
                    }
                    // SAFETY: not null, and the driver's function of this name has this signature.
                    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> CUresult>(address) }
                }),* })
            }

            $(fn $name(&self, $($arg: $type),*) -> Result<(), DriverError> {
                // SAFETY: what is passed here are variables of the callers and handles that the driver gave.
                let code = unsafe { (self.$name)($($arg),*) };
                cuda::check(code).map_err(|error| DriverError::Refused { call: stringify!($name), error })
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
    // SAFETY: a text of the dynamic linker or nothing; nobody else loads libraries here.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no reason given".to_string();
    }
    // SAFETY: not null, so a text.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// A context. It goes with the last thing that is made in it.
struct Opened {
    driver: Driver,
    context: CUcontext,
    multiprocessors: c_uint,
}

impl Drop for Opened {
    fn drop(&mut self) {
        // The process ends, or tries anew; a driver that cannot do it does it at the end.
        let _ = self.driver.cuCtxDestroy_v2(self.context);
    }
}

/// A GPU that this thread has a context on.
pub struct Gpu(Rc<Opened>);

impl Gpu {
    /// Loads the driver and makes a context on the GPU of this number, among those that the program sees.
    pub fn open(number: u32) -> Result<Gpu, DriverError> {
        let driver = Driver::load()?;
        driver.cuInit(0)?;
        let (mut device, mut count, mut context) = (0, 0, null_mut());
        driver.cuDeviceGet(&mut device, c_int::try_from(number).unwrap_or(c_int::MAX))?;
        driver.cuDeviceGetAttribute(&mut count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device)?;
        driver.cuCtxCreate_v2(&mut context, 0, device)?;
        Ok(Gpu(Rc::new(Opened { driver, context, multiprocessors: count.max(1).unsigned_abs() })))
    }

    /// The bytes that are free, and all there are, as the driver tells this program.
    pub fn memory(&self) -> Result<(u64, u64), DriverError> {
        let (mut free, mut total) = (0, 0);
        self.0.driver.cuMemGetInfo_v2(&mut free, &mut total)?;
        Ok((free as u64, total as u64))
    }

    /// Takes memory.
    pub fn allocate(&self, bytes: u64) -> Result<Memory, DriverError> {
        let mut pointer = 0;
        self.0.driver.cuMemAlloc_v2(&mut pointer, usize::try_from(bytes).unwrap_or(usize::MAX))?;
        Ok(Memory { opened: Rc::clone(&self.0), pointer, bytes })
    }

    /// A kernel that fills the GPU for so long.
    pub fn kernel(&self, micros: u32) -> Result<Kernel, DriverError> {
        let driver = &self.0.driver;
        let (mut module, mut function, mut blocks) = (null_mut(), null_mut(), 0);
        let name = format!("busy_{micros}us");
        let image = text(spinning(&name, micros));
        driver.cuModuleLoadData(&mut module, image.as_ptr().cast())?;
        driver.cuModuleGetFunction(&mut function, module, text(name).as_ptr())?;
        driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, function, THREADS as c_int, 0)?;
        let blocks = blocks.max(1).unsigned_abs() * self.0.multiprocessors;
        Ok(Kernel { opened: Rc::clone(&self.0), function, blocks })
    }
}

/// None of our texts has a zero in it.
fn text(text: String) -> CString {
    CString::new(text).unwrap_or_default()
}

/// A kernel of which every thread looks at the clock until it is over. A simulated driver, which runs nothing, takes the
/// time from the name.
fn spinning(name: &str, micros: u32) -> String {
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

/// Memory of a GPU. It is given back with the value.
pub struct Memory {
    opened: Rc<Opened>,
    pointer: CUdeviceptr,
    bytes: u64,
}

impl Memory {
    /// As much as was asked for.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // What a driver does not take back, it takes at the end of the process.
        let _ = self.opened.driver.cuMemFree_v2(self.pointer);
    }
}

/// A kernel that fills its GPU for a known time.
pub struct Kernel {
    opened: Rc<Opened>,
    function: CUfunction,
    /// As many as the GPU runs at once: with more, each would spin after another, and it took a multiple of its time.
    blocks: c_uint,
}

impl Kernel {
    /// Puts it behind what was launched before.
    pub fn launch(&self) -> Result<Done, DriverError> {
        let mut event = null_mut();
        self.opened.driver.cuEventCreate(&mut event, 0)?;
        let done = Done { opened: Rc::clone(&self.opened), event };
        self.launch_before(&done)?;
        Ok(done)
    }

    /// The same, with an event that was waited for.
    pub fn launch_before(&self, done: &Done) -> Result<(), DriverError> {
        let (none, nothing) = (null_mut(), null_mut());
        let driver = &self.opened.driver;
        driver.cuLaunchKernel(
            self.function,
            self.blocks,
            1,
            1,
            THREADS,
            1,
            1,
            0,
            null_mut(),
            none,
            nothing,
        )?;
        driver.cuEventRecord(done.event, null_mut())
    }
}

/// Happens when a kernel is over.
pub struct Done {
    opened: Rc<Opened>,
    event: CUevent,
}

impl Done {
    /// Waits for it.
    pub fn wait(&self) -> Result<(), DriverError> {
        self.opened.driver.cuEventSynchronize(self.event)
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        // Events go with their context at the latest.
        let _ = self.opened.driver.cuEventDestroy_v2(self.event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_says_its_time_twice() {
        let image = spinning("busy_4000us", 4000);
        assert!(image.contains(".entry busy_4000us()") && image.contains("%now, 4000000;"), "{image}");
        assert!(image.lines().all(|line| !line.contains("{{")));
    }

    #[test]
    fn refusals_have_words_and_names() {
        let error = DriverError::Refused { call: "cuMemAlloc_v2", error: CudaError::OUT_OF_MEMORY };
        assert_eq!(error.to_string(), "cuMemAlloc_v2 was refused: out of memory (CUDA_ERROR_OUT_OF_MEMORY)");
        assert!(error.is_out_of_memory());
        assert!(!DriverError::Refused { call: "cuInit", error: CudaError::NO_DEVICE }.is_out_of_memory());
    }
}
