//! A program that uses a GPU as any other does, through `libcuda.so.1`: it holds memory and keeps the GPU busy, so that
//! there is something to see. `partage-testkit workload` is it; [`crate::sim_node::SimNode::workload`] starts it.
#![allow(unsafe_code)]

use partage_driver_api::cuda::{
    CUDA_SUCCESS, CUcontext, CUdeviceptr, CUevent, CUfunction, CUmodule, CUresult,
};
use std::collections::VecDeque;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::io::{Read, Write};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// One kernel of a GPU that is always busy, or one round of a GPU that rests in between.
const ROUND_MICROS: u32 = 10_000;
/// Kernels on their way to a GPU that is always busy.
const AHEAD: usize = 16;
/// How often a program that computes nothing looks whether it should end.
const GLANCE: Duration = Duration::from_millis(20);

/// How a GPU is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Args)]
pub struct Load {
    /// The GPU's index among those the program sees
    #[arg(long, default_value_t = 0)]
    pub gpu: u32,
    /// Memory to hold, in MiB, besides what the driver takes for the process
    #[arg(long, default_value_t = 0)]
    pub memory_mib: u64,
    /// Percent of the time that kernels run
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=100))]
    pub busy: u32,
}

/// Why a GPU cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    /// No driver, or half of one.
    #[error("the driver cannot be loaded: {0}; put the folder of libcuda.so.1 on LD_LIBRARY_PATH")]
    NoDriver(String),
    /// The driver refused.
    #[error("{call} failed with {code}")]
    Refused {
        /// The function.
        call: &'static str,
        /// Its answer.
        code: CUresult,
    },
    /// Who started it does not listen.
    #[error("nobody listens: {0}")]
    Alone(#[from] std::io::Error),
}

/// Declares the driver's functions that are used; each is looked up in the library.
macro_rules! driver {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?);)*) => {
        #[allow(non_snake_case)]
        struct Driver { $($name: unsafe extern "C" fn($($type),*) -> CUresult),* }

        #[allow(non_snake_case, clippy::too_many_arguments)]
        impl Driver {
            fn load() -> Result<Self, WorkloadError> {
                // SAFETY: a text that ends in zero.
                let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
                if library.is_null() {
                    return Err(WorkloadError::NoDriver(last_error()));
                }
                Ok(Self { $($name: {
                    let name = concat!(stringify!($name), "\0");
                    // SAFETY: an open library and a text that ends in zero.
                    let address = unsafe { libc::dlsym(library, name.as_ptr().cast()) };
                    if address.is_null() {
                        return Err(WorkloadError::NoDriver(last_error()));
                    }
                    // SAFETY: not null, and the driver's function of this name has this signature.
                    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> CUresult>(address) }
                }),* })
            }

            $(fn $name(&self, $($arg: $type),*) -> Result<(), WorkloadError> {
                // SAFETY: what is passed here are variables of the callers and handles that the driver gave.
                match unsafe { (self.$name)($($arg),*) } {
                    CUDA_SUCCESS => Ok(()),
                    code => Err(WorkloadError::Refused { call: stringify!($name), code }),
                }
            })*
        }
    };
}

driver! {
    fn cuInit(flags: c_uint);
    fn cuCtxCreate_v2(context: *mut CUcontext, flags: c_uint, device: c_int);
    fn cuMemAlloc_v2(pointer: *mut CUdeviceptr, bytes: usize);
    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    fn cuEventCreate(event: *mut CUevent, flags: c_uint);
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

/// Uses the GPU until standard input ends or `stop` says so. Says `ready` when the memory is held and, where kernels
/// run, the first ones are done.
pub fn run(load: &Load, out: &mut dyn Write, stop: &AtomicBool) -> Result<(), WorkloadError> {
    let over = until_input_ends();
    let ends = || stop.load(Ordering::Relaxed) || over.load(Ordering::Relaxed);
    let driver = Driver::load()?;
    let (mut context, mut pointer) = (null_mut(), 0);
    driver.cuInit(0)?;
    driver.cuCtxCreate_v2(&mut context, 0, load.gpu as c_int)?;
    if load.memory_mib > 0 {
        driver.cuMemAlloc_v2(&mut pointer, (load.memory_mib << 20) as usize)?;
    }
    if load.busy == 0 {
        writeln!(out, "ready")?;
        while !ends() {
            std::thread::sleep(GLANCE);
        }
        return Ok(());
    }
    let kernel = Kernel::new(&driver, ROUND_MICROS * load.busy / 100)?;
    let mut events = VecDeque::new();
    // A GPU that never rests has its next kernels before it needs them, whatever else the machine does.
    for _ in 0..if load.busy == 100 { AHEAD } else { 1 } {
        events.push_back(kernel.launch()?);
    }
    let begun = Instant::now();
    let mut due = Duration::ZERO;
    while let Some(event) = events.pop_front() {
        driver.cuEventSynchronize(event)?;
        if due.is_zero() {
            writeln!(out, "ready")?;
        }
        if ends() {
            break;
        }
        due += Duration::from_micros(u64::from(ROUND_MICROS));
        if load.busy < 100 {
            std::thread::sleep(due.saturating_sub(begun.elapsed()));
        }
        kernel.launch_before(event)?;
        events.push_back(event);
    }
    Ok(())
}

/// True from when standard input has ended: who started the program is gone, or wants it to go.
fn until_input_ends() -> Arc<AtomicBool> {
    let over = Arc::new(AtomicBool::new(false));
    let says = Arc::clone(&over);
    std::thread::spawn(move || {
        let mut stdin = std::io::stdin();
        while matches!(stdin.read(&mut [0; 64]), Ok(1..)) {}
        says.store(true, Ordering::Relaxed);
    });
    over
}

/// A kernel that fills the GPU for a known time.
struct Kernel<'a> {
    driver: &'a Driver,
    function: CUfunction,
}

impl<'a> Kernel<'a> {
    fn new(driver: &'a Driver, micros: u32) -> Result<Self, WorkloadError> {
        let (mut module, mut function) = (null_mut(), null_mut());
        driver.cuModuleLoadData(&mut module, IMAGE.as_ptr().cast())?;
        let name = CString::new(format!("busy_{micros}us")).unwrap_or_default();
        driver.cuModuleGetFunction(&mut function, module, name.as_ptr())?;
        Ok(Self { driver, function })
    }

    fn launch(&self) -> Result<CUevent, WorkloadError> {
        let mut event = null_mut();
        self.driver.cuEventCreate(&mut event, 0)?;
        self.launch_before(event)?;
        Ok(event)
    }

    fn launch_before(&self, event: CUevent) -> Result<(), WorkloadError> {
        let (none, nothing) = (null_mut(), null_mut());
        self.driver.cuLaunchKernel(self.function, 1 << 16, 1, 1, 1024, 1, 1, 0, null_mut(), none, nothing)?;
        self.driver.cuEventRecord(event, null_mut())
    }
}

/// The simulated driver takes any image, and finds every function in one that it cannot read.
const IMAGE: &CStr = c"an image";
