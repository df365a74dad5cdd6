//! Programs shaped like those that share GPUs: the zoo of `make bench-compute` and of the test `zoo`.
//!
//! Each prepares its kernels, prints `ready`, waits for a line on standard input, and then works until it is killed. It
//! counts its steps in the shared file that [`STEPS_VARIABLE`] names.

use crate::driver::cuda::*;
use std::ffi::{CString, c_void};
use std::io::{BufRead, Write};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Environment variable with the path of a file of at least eight bytes, in which a program counts its steps.
pub const STEPS_VARIABLE: &str = "PARTAGE_PROGRAM_STEPS";

/// Blocks of a grid that fills every simulated card.
pub const FULL_GRID: u32 = 1 << 20;

/// A program of the zoo.
pub struct Program {
    pub name: &'static str,
    /// GPUs that it uses, from the first one on.
    pub gpus: usize,
    /// Percent of a GPU that it uses at least, alone on a quiet machine, also without optimization.
    pub demand: u32,
    /// Microseconds of its longest kernel: what a share may exceed its time by.
    pub longest_kernel_us: u64,
    run: fn(&CudaLibrary),
}

const fn program(
    name: &'static str,
    gpus: usize,
    demand: u32,
    longest_kernel_us: u64,
    run: fn(&CudaLibrary),
) -> Program {
    Program { name, gpus, demand, longest_kernel_us, run }
}

/// The zoo.
pub const PROGRAMS: [Program; 14] = [
    program("eager", 1, 95, 20, eager),
    program("dynamic-shapes", 1, 95, 500, dynamic_shapes),
    program("graph-decode", 1, 60, 20, graph_decode),
    program("prefill-decode", 1, 75, 2_000, prefill_decode),
    program("ddp", 1, 90, 500, ddp),
    program("tensor-parallel-2", 2, 80, 300, tensor_parallel::<2>),
    program("tensor-parallel-4", 4, 70, 300, tensor_parallel::<4>),
    program("multi-stream", 1, 90, 300, multi_stream),
    program("data-loader", 1, 90, 2_000, data_loader),
    program("long-kernels", 1, 95, 1_000_000, long_kernels),
    program("tiny-kernels", 1, 10, 1, tiny_kernels),
    program("notebook", 1, 35, 2_000, notebook),
    program("cooperative", 1, 90, 500, cooperative),
    program("training", 1, 95, 8_000, training),
];

/// Returns the program of this name.
pub fn named(name: &str) -> Option<&'static Program> {
    PROGRAMS.iter().find(|program| program.name == name)
}

/// Runs a program of the zoo on the GPUs that the process sees; never returns.
pub fn run(program: &Program) {
    let cuda = CudaLibrary::started();
    if program.gpus == 1 {
        create_context(&cuda, 0);
    }
    (program.run)(&cuda);
}

macro_rules! ok {
    ($call:expr) => {{
        // SAFETY: every pointer in these calls is null, or to memory that lives through them.
        let code = unsafe { $call };
        assert_eq!(code, 0, "{}: {:?}", stringify!($call), partage_driver_api::cuda::name(code));
    }};
}
#[allow(unused_imports)]
pub(crate) use ok;

/// Reports that the program is ready, and waits until it may begin.
pub fn wait_for_start() {
    // A test harness may have begun a line.
    println!("\nready");
    std::io::stdout().flush().unwrap();
    std::io::stdin().lock().read_line(&mut String::new()).unwrap();
}

/// Returns the counter of this process's steps.
pub fn steps() -> &'static AtomicU64 {
    static UNOBSERVED: AtomicU64 = AtomicU64::new(0);
    let Some(path) = std::env::var_os(STEPS_VARIABLE) else { return &UNOBSERVED };
    map_steps(path.as_ref())
}

/// Maps a file of steps for the lifetime of the process.
pub fn map_steps(path: &std::path::Path) -> &'static AtomicU64 {
    use std::os::fd::AsRawFd;
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: maps eight bytes of an open file at an address that the kernel chooses.
    let place = unsafe { libc::mmap(null_mut(), 8, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    assert_ne!(place, libc::MAP_FAILED);
    // SAFETY: the mapping is aligned, at least eight bytes long and never unmapped.
    unsafe { &*place.cast::<AtomicU64>() }
}

pub fn create_context(cuda: &CudaLibrary, gpu: i32) -> CUcontext {
    let mut context = null_mut();
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, gpu));
    context
}

/// Creates a stream that does not wait for the legacy default stream.
pub fn create_stream(cuda: &CudaLibrary) -> CUstream {
    let mut stream = null_mut();
    ok!(cuda.cuStreamCreate(&mut stream, 1));
    stream
}

/// Creates an event that records no time.
pub fn create_event(cuda: &CudaLibrary) -> CUevent {
    let mut event = null_mut();
    ok!(cuda.cuEventCreate(&mut event, 2));
    event
}

/// Loads one module and returns its functions of these names.
pub fn functions<T: AsRef<str>>(cuda: &CudaLibrary, names: impl IntoIterator<Item = T>) -> Vec<CUfunction> {
    let mut module = null_mut();
    ok!(cuda.cuModuleLoadData(&mut module, c"any".as_ptr().cast()));
    let load = |name: T| {
        let name = CString::new(name.as_ref()).unwrap();
        let mut function = null_mut();
        ok!(cuda.cuModuleGetFunction(&mut function, module, name.as_ptr()));
        function
    };
    names.into_iter().map(load).collect()
}

/// Returns a kernel of this many microseconds.
pub fn busy(cuda: &CudaLibrary, micros: u64) -> CUfunction {
    functions(cuda, [format!("busy_{micros}us")])[0]
}

pub fn launch(cuda: &CudaLibrary, function: CUfunction, blocks: u32, stream: CUstream) {
    ok!(cuda.cuLaunchKernel(function, blocks, 1, 1, 256, 1, 1, 0, stream, null_mut(), null_mut()));
}

/// Makes `after` wait for what `before` has queued until now.
pub fn order(cuda: &CudaLibrary, before: CUstream, after: CUstream, event: CUevent) {
    ok!(cuda.cuEventRecord(event, before));
    ok!(cuda.cuStreamWaitEvent(after, event, 0));
}

/// Returns a graph of a chain of these kernels.
pub fn chain(cuda: &CudaLibrary, kernels: &[CUfunction]) -> CUgraphExec {
    let (mut graph, mut exec) = (null_mut(), null_mut());
    ok!(cuda.cuGraphCreate(&mut graph, 0));
    let mut last: Option<CUgraphNode> = None;
    for &func in kernels {
        let parameters = CUDA_KERNEL_NODE_PARAMS_v1 {
            func,
            gridDimX: FULL_GRID,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: 256,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            kernelParams: null_mut(),
            extra: null_mut(),
        };
        let mut node = null_mut();
        let before = last.as_ref().map_or(null(), std::ptr::from_ref);
        ok!(cuda.cuGraphAddKernelNode(&mut node, graph, before, usize::from(last.is_some()), &parameters));
        last = Some(node);
    }
    ok!(cuda.cuGraphInstantiateWithFlags(&mut exec, graph, 0));
    ok!(cuda.cuGraphDestroy(graph));
    exec
}

/// A small random number generator, so that runs do not share a rhythm.
pub struct Random(u64);

impl Random {
    pub fn new() -> Self {
        Self(u64::from(std::process::id()) * 0x9e37_79b9 + 1)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % limit
    }
}

fn pause(micros: u64) {
    std::thread::sleep(Duration::from_micros(micros));
}

/// Eager PyTorch: many kernels of many shapes in one stream, and a result every 200 launches.
fn eager(cuda: &CudaLibrary) {
    many_kernels(cuda, 100, 50);
}

/// Launches `kernels` kernels of 20 us in `shapes` grid sizes each, at random.
pub fn many_kernels(cuda: &CudaLibrary, kernels: usize, shapes: usize) {
    let functions = functions(cuda, (0..kernels).map(|at| format!("layer{at}_busy_20us")));
    let (stream, steps, mut random) = (create_stream(cuda), steps(), Random::new());
    wait_for_start();
    loop {
        for _ in 0..200 {
            let shape = FULL_GRID + random.below(shapes) as u32;
            launch(cuda, functions[random.below(kernels)], shape, stream);
        }
        ok!(cuda.cuStreamSynchronize(stream));
        steps.fetch_add(1, Relaxed);
    }
}

/// Inputs of varying lengths: each launch has a grid size that has not occurred before.
fn dynamic_shapes(cuda: &CudaLibrary) {
    let functions = functions(cuda, [50, 100, 200, 500].map(|micros| format!("busy_{micros}us")));
    let (stream, steps, mut random) = (create_stream(cuda), steps(), Random::new());
    wait_for_start();
    for shape in 0.. {
        launch(cuda, functions[random.below(4)], FULL_GRID + shape % FULL_GRID, stream);
        if shape % 32 == 31 {
            ok!(cuda.cuStreamSynchronize(stream));
            steps.fetch_add(1, Relaxed);
        }
    }
}

/// Decoding in an LLM server: a graph of 40 kernels per token, the token is fetched, and the host schedules the next.
fn graph_decode(cuda: &CudaLibrary) {
    let graph = chain(cuda, &[busy(cuda, 20); 40]);
    let (stream, steps) = (create_stream(cuda), steps());
    wait_for_start();
    loop {
        ok!(cuda.cuGraphLaunch(graph, stream));
        ok!(cuda.cuStreamSynchronize(stream));
        steps.fetch_add(1, Relaxed);
        pause(300);
    }
}

/// An LLM server with prompts: 30 ms of prefill in eager kernels, then 30 decoded tokens, and so on.
fn prefill_decode(cuda: &CudaLibrary) {
    let (prefill, graph) = (busy(cuda, 2_000), chain(cuda, &[busy(cuda, 20); 40]));
    let (stream, steps) = (create_stream(cuda), steps());
    wait_for_start();
    loop {
        (0..15).for_each(|_| launch(cuda, prefill, FULL_GRID, stream));
        for _ in 0..30 {
            ok!(cuda.cuGraphLaunch(graph, stream));
            ok!(cuda.cuStreamSynchronize(stream));
            steps.fetch_add(1, Relaxed);
            pause(200);
        }
    }
}

/// Distributed data parallel training: gradients of each layer are reduced in a communication stream, beside the
/// backward pass of the next layer.
pub fn ddp(cuda: &CudaLibrary) {
    let (compute, reduce) = (busy(cuda, 500), busy(cuda, 400));
    let (layers, communication) = (create_stream(cuda), create_stream(cuda));
    let (event, steps) = (create_event(cuda), steps());
    wait_for_start();
    loop {
        for _ in 0..4 {
            // Three quarters of an A100's multiprocessors, so that the reduction fits beside it.
            launch(cuda, compute, 640, layers);
            order(cuda, layers, communication, event);
            launch(cuda, reduce, 8, communication);
        }
        // The optimizer needs all gradients; the host does not wait for it.
        order(cuda, communication, layers, event);
        if steps.fetch_add(1, Relaxed) % 4 == 3 {
            ok!(cuda.cuStreamSynchronize(layers));
        }
    }
}

/// Tensor parallelism: on each GPU a thread launches a kernel and a collective operation per step.
fn tensor_parallel<const RANKS: usize>(cuda: &CudaLibrary) {
    kernel_and_collective(cuda, RANKS, 300);
}

/// Launches a kernel of this many microseconds and a collective operation of 30 us per step, on each of the GPUs.
pub fn kernel_and_collective(cuda: &CudaLibrary, ranks: usize, micros: u64) {
    let collective = format!("busy_until_peer_{}_of_{ranks}_30us", std::process::id());
    let begin = std::sync::Barrier::new(ranks + 1);
    let steps = steps();
    let rank = |gpu: usize| {
        create_context(cuda, gpu as i32);
        let kernels = functions(cuda, [format!("busy_{micros}us"), collective.clone()]);
        let stream = create_stream(cuda);
        begin.wait();
        begin.wait();
        for step in 0_u64.. {
            launch(cuda, kernels[0], FULL_GRID, stream);
            launch(cuda, kernels[1], FULL_GRID, stream);
            if step % 4 == 3 {
                ok!(cuda.cuStreamSynchronize(stream));
                if gpu == 0 {
                    steps.fetch_add(4, Relaxed);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for gpu in 0..ranks {
            let rank = &rank;
            scope.spawn(move || rank(gpu));
        }
        begin.wait();
        wait_for_start();
        begin.wait();
    });
}

/// An inference server: four threads with a stream each serve requests of three kernels that fill a third of an A100.
fn multi_stream(cuda: &CudaLibrary) {
    let (kernel, steps) = (busy(cuda, 300), steps());
    let mut context = null_mut();
    ok!(cuda.cuCtxGetCurrent(&mut context));
    let context = context as usize;
    let streams: Vec<usize> = (0..4).map(|_| create_stream(cuda) as usize).collect();
    let kernel = kernel as usize;
    wait_for_start();
    std::thread::scope(|scope| {
        for stream in streams {
            scope.spawn(move || {
                ok!(cuda.cuCtxSetCurrent(context as CUcontext));
                loop {
                    (0..3).for_each(|_| launch(cuda, kernel as CUfunction, 280, stream as CUstream));
                    ok!(cuda.cuStreamSynchronize(stream as CUstream));
                    steps.fetch_add(1, Relaxed);
                }
            });
        }
    });
}

extern "C" fn prepare_batch(_: *mut c_void) {
    pause(1_000);
}

/// Training with a data loader: a host callback of 1 ms prepares each batch and an asynchronous copy transfers it, in a
/// stream of their own, beside two kernels of 2 ms on the batch before.
fn data_loader(cuda: &CudaLibrary) {
    const BYTES: usize = 1 << 20;
    let (kernel, mut device, mut host) = (busy(cuda, 2_000), 0, null_mut());
    ok!(cuda.cuMemAlloc_v2(&mut device, BYTES));
    ok!(cuda.cuMemAllocHost_v2(&mut host, BYTES));
    let (compute, load) = (create_stream(cuda), create_stream(cuda));
    let (loaded, steps) = (create_event(cuda), steps());
    wait_for_start();
    loop {
        ok!(cuda.cuLaunchHostFunc(load, Some(prepare_batch), null_mut()));
        ok!(cuda.cuMemcpyHtoDAsync_v2(device, host, BYTES, load));
        order(cuda, load, compute, loaded);
        launch(cuda, kernel, FULL_GRID, compute);
        launch(cuda, kernel, FULL_GRID, compute);
        if steps.fetch_add(1, Relaxed) % 4 == 3 {
            ok!(cuda.cuStreamSynchronize(compute));
        }
    }
}

/// Kernels of one second.
fn long_kernels(cuda: &CudaLibrary) {
    repeat(cuda, 1_000_000, 1);
}

/// Kernels of one microsecond.
fn tiny_kernels(cuda: &CudaLibrary) {
    repeat(cuda, 1, 10_000);
}

/// Launches one kernel all the time, and waits after this many launches.
pub fn repeat(cuda: &CudaLibrary, micros: u64, launches: u32) {
    let (kernel, stream, steps) = (busy(cuda, micros), create_stream(cuda), steps());
    wait_for_start();
    loop {
        (0..launches).for_each(|_| launch(cuda, kernel, FULL_GRID, stream));
        ok!(cuda.cuStreamSynchronize(stream));
        steps.fetch_add(1, Relaxed);
    }
}

/// A notebook: cells of 200 ms of work, and 300 ms of thinking.
fn notebook(cuda: &CudaLibrary) {
    let (kernel, stream, steps) = (busy(cuda, 2_000), create_stream(cuda), steps());
    wait_for_start();
    loop {
        (0..100).for_each(|_| launch(cuda, kernel, FULL_GRID, stream));
        ok!(cuda.cuStreamSynchronize(stream));
        steps.fetch_add(1, Relaxed);
        pause(300_000);
    }
}

/// Cooperative launches, four between two waits.
fn cooperative(cuda: &CudaLibrary) {
    let (kernel, stream, steps) = (busy(cuda, 500), create_stream(cuda), steps());
    wait_for_start();
    loop {
        for _ in 0..4 {
            ok!(cuda.cuLaunchCooperativeKernel(kernel, 864, 1, 1, 256, 1, 1, 0, stream, null_mut()));
        }
        ok!(cuda.cuStreamSynchronize(stream));
        steps.fetch_add(1, Relaxed);
    }
}

/// Training that never waits: kernels of several lengths at random.
fn training(cuda: &CudaLibrary) {
    let kernels = functions(cuda, [200, 2_000, 8_000].map(|micros| format!("busy_{micros}us")));
    let (stream, steps, mut random) = (create_stream(cuda), steps(), Random::new());
    wait_for_start();
    loop {
        launch(cuda, kernels[random.below(3)], FULL_GRID, stream);
        steps.fetch_add(1, Relaxed);
    }
}
