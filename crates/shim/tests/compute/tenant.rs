//! Programs that use a GPU's time.

use crate::driver::cuda::*;
use crate::node::{print_line, wait_for_resume};
use std::ptr::{null, null_mut};

/// Every way to submit work.
pub const SUBMISSION_FUNCTIONS: [&str; 10] = [
    "kernel",
    "kernel-per-thread",
    "ex",
    "ex-per-thread",
    "cooperative",
    "several-devices",
    "grid",
    "graph",
    "graph-per-thread",
    "captured-graph",
];

macro_rules! ok {
    ($call:expr) => {{
        // SAFETY: every pointer in these calls is null or to a variable that lives through them.
        let code = unsafe { $call };
        assert_eq!(code, 0, "{}: {:?}", stringify!($call), partage_driver_api::cuda::name(code));
    }};
}
pub(crate) use ok;

pub fn run_role(words: &[&str]) {
    let cuda = CudaLibrary::started();
    let mut context = null_mut();
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    match words {
        ["work", way, lengths] => work(&cuda, way, lengths),
        ["capture"] => capture(&cuda),
        ["open-captures"] => open_captures(&cuda),
        ["copy"] => copy(&cuda),
        ["once", length] => {
            kernel(&cuda, functions(&cuda, length)[0], null_mut());
            ok!(cuda.cuCtxSynchronize());
        }
        ["fail", count] => fail(&cuda, count.parse().unwrap()),
        ["contexts"] => contexts(&cuda),
        ["launches", count, length] => launches(&cuda, count.parse().unwrap(), length),
        other => assert!(crate::programs::run_role(&cuda, other), "{other:?}"),
    }
}

pub fn functions(cuda: &CudaLibrary, lengths: &str) -> Vec<CUfunction> {
    let mut module = null_mut();
    ok!(cuda.cuModuleLoadData(&mut module, c"any".as_ptr().cast()));
    let one = |micros: &str| {
        let name = std::ffi::CString::new(format!("busy_{micros}us")).unwrap();
        let mut function = null_mut();
        ok!(cuda.cuModuleGetFunction(&mut function, module, name.as_ptr()));
        function
    };
    lengths.split(',').map(one).collect()
}

pub fn kernel(cuda: &CudaLibrary, function: CUfunction, stream: CUstream) {
    ok!(cuda.cuLaunchKernel(function, 1 << 20, 1, 1, 256, 1, 1, 0, stream, null_mut(), null_mut()));
}

fn instantiated(cuda: &CudaLibrary, graph: CUgraph) -> CUgraphExec {
    let mut exec = null_mut();
    ok!(cuda.cuGraphInstantiateWithFlags(&mut exec, graph, 0));
    exec
}

fn parameters(function: CUfunction) -> CUDA_KERNEL_NODE_PARAMS_v1 {
    CUDA_KERNEL_NODE_PARAMS_v1 {
        func: function,
        gridDimX: 1 << 20,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: 256,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        kernelParams: null_mut(),
        extra: null_mut(),
    }
}

/// Returns a graph of one kernel, and its node.
fn graph(cuda: &CudaLibrary, function: CUfunction) -> (CUgraphExec, CUgraphNode) {
    let (mut graph, mut node) = (null_mut(), null_mut());
    ok!(cuda.cuGraphCreate(&mut graph, 0));
    ok!(cuda.cuGraphAddKernelNode(&mut node, graph, null(), 0, &parameters(function)));
    (instantiated(cuda, graph), node)
}

/// Launches one graph whose kernel changes: nine times the first, once the second, and so on.
fn changing_graph(cuda: &CudaLibrary, kernels: &[CUfunction]) {
    let (exec, node) = graph(cuda, kernels[0]);
    let mut random = 1_u32;
    loop {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let function = kernels[usize::from((random >> 16).is_multiple_of(10))];
        ok!(cuda.cuGraphExecKernelNodeSetParams(exec, node, &parameters(function)));
        ok!(cuda.cuGraphLaunch(exec, null_mut()));
    }
}

fn captured(cuda: &CudaLibrary, function: CUfunction, kernels: usize) -> CUgraphExec {
    let (mut stream, mut graph) = (null_mut(), null_mut());
    ok!(cuda.cuStreamCreate(&mut stream, 0));
    ok!(cuda.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    (0..kernels).for_each(|_| kernel(cuda, function, stream));
    ok!(cuda.cuStreamEndCapture(stream, &mut graph));
    instantiated(cuda, graph)
}

/// Submits work all the time, until killed.
fn work(cuda: &CudaLibrary, way: &str, lengths: &str) {
    let kernels = functions(cuda, lengths);
    let graphs: Vec<CUgraphExec> = match way {
        "graph" | "graph-per-thread" => kernels.iter().map(|&function| graph(cuda, function).0).collect(),
        "captured-graph" => kernels.iter().map(|&function| captured(cuda, function, 1)).collect(),
        _ => Vec::new(),
    };
    print_line("ready");
    if way == "changing-graph" {
        changing_graph(cuda, &kernels);
    }
    for (function, at) in kernels.iter().copied().zip(0..).cycle() {
        let config = CUlaunchConfig {
            gridDimX: 1 << 20,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: 256,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            hStream: null_mut(),
            attrs: null_mut(),
            numAttrs: 0,
        };
        let nothing = null_mut();
        match way {
            "kernel" => kernel(cuda, function, nothing),
            "kernel-per-thread" => ok!(cuda.cuLaunchKernel_ptsz(
                function,
                1 << 20,
                1,
                1,
                256,
                1,
                1,
                0,
                nothing,
                null_mut(),
                null_mut()
            )),
            "ex" => ok!(cuda.cuLaunchKernelEx(&config, function, null_mut(), null_mut())),
            "ex-per-thread" => ok!(cuda.cuLaunchKernelEx_ptsz(&config, function, null_mut(), null_mut())),
            "cooperative" => {
                ok!(cuda.cuLaunchCooperativeKernel(function, 100, 1, 1, 256, 1, 1, 0, nothing, null_mut()))
            }
            "several-devices" => several_devices(cuda, function),
            "grid" => {
                ok!(cuda.cuFuncSetBlockShape(function, 256, 1, 1));
                ok!(cuda.cuLaunchGrid(function, 1 << 15, 1 << 5));
            }
            "graph" | "captured-graph" => ok!(cuda.cuGraphLaunch(graphs[at], nothing)),
            "graph-per-thread" => ok!(cuda.cuGraphLaunch_ptsz(graphs[at], nothing)),
            other => panic!("{other}"),
        }
    }
}

fn several_devices(cuda: &CudaLibrary, function: CUfunction) {
    use std::cell::Cell;
    thread_local!(static STREAM: Cell<CUstream> = const { Cell::new(null_mut()) });
    if STREAM.get().is_null() {
        let mut stream = null_mut();
        ok!(cuda.cuStreamCreate(&mut stream, CU_STREAM_NON_BLOCKING));
        STREAM.set(stream);
    }
    let mut launch = CUDA_LAUNCH_PARAMS_v1 {
        function,
        gridDimX: 100,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: 256,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        hStream: STREAM.get(),
        kernelParams: null_mut(),
    };
    ok!(cuda.cuLaunchCooperativeKernelMultiDevice(&mut launch, 1, 0));
}

/// Returns what the container was charged. The turn scheduler charges a few milliseconds later.
fn charged() -> u64 {
    std::thread::sleep(std::time::Duration::from_millis(100));
    crate::container::charged(std::env::var_os(crate::container::REGION_VARIABLE).unwrap().as_ref(), 0)
}

/// Captures 200 kernels of a millisecond, and then runs the graph twice.
fn capture(cuda: &CudaLibrary) {
    let function = functions(cuda, "1000")[0];
    let before = charged();
    let exec = captured(cuda, function, 200);
    assert_eq!(charged(), before, "captured work was charged");
    for _ in 0..2 {
        ok!(cuda.cuGraphLaunch(exec, null_mut()));
        ok!(cuda.cuCtxSynchronize());
    }
    let charged = charged() - before;
    // A busy machine makes it longer.
    assert!((390_000_000..900_000_000).contains(&charged), "{charged} ns for twice 200 ms");
}

/// Ends, forks and drops captures in unusual ways while kernels are new, so that the shim would measure them.
fn open_captures(cuda: &CudaLibrary) {
    let stream = || {
        let mut stream = null_mut();
        ok!(cuda.cuStreamCreate(&mut stream, 1));
        stream
    };
    let (origin, other) = (stream(), stream());
    let kernels_of = |graph: CUgraph| {
        let mut count = 0;
        ok!(cuda.cuGraphGetNodes(graph, null_mut(), &mut count));
        count
    };
    let mut graph = null_mut();

    // The end of a capture that does not exist is an error of the program, and does not end the other capture.
    ok!(cuda.cuStreamBeginCapture_v2(origin, CU_STREAM_CAPTURE_MODE_RELAXED));
    // SAFETY: the pointer is to a local variable, which the driver may write during the call.
    let answer = unsafe { cuda.cuStreamEndCapture(other, &mut graph) };
    assert_eq!(answer, CUDA_ERROR_ILLEGAL_STATE);
    for function in functions(cuda, "11,12,13,14,15,16") {
        kernel(cuda, function, origin);
    }
    ok!(cuda.cuStreamEndCapture(origin, &mut graph));
    assert_eq!(kernels_of(graph), 6);

    // A forked stream is destroyed after it was joined, as NVIDIA's cuda.core does it.
    let (side, mut event) = (stream(), null_mut());
    ok!(cuda.cuEventCreate(&mut event, 0));
    ok!(cuda.cuStreamBeginCapture_v2(origin, CU_STREAM_CAPTURE_MODE_RELAXED));
    ok!(cuda.cuEventRecord(event, origin));
    ok!(cuda.cuStreamWaitEvent(side, event, 0));
    kernel(cuda, functions(cuda, "21")[0], side);
    ok!(cuda.cuEventRecord(event, side));
    ok!(cuda.cuStreamWaitEvent(origin, event, 0));
    ok!(cuda.cuStreamDestroy_v2(side));
    for function in functions(cuda, "22,23,24,25,26") {
        kernel(cuda, function, origin);
    }
    ok!(cuda.cuStreamEndCapture(origin, &mut graph));
    assert_eq!(kernels_of(graph), 6);

    // A capture that ends with its context does not keep later kernels from being measured.
    let mut context = null_mut();
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    ok!(cuda.cuStreamBeginCapture_v2(stream(), CU_STREAM_CAPTURE_MODE_RELAXED));
    ok!(cuda.cuCtxDestroy_v2(context));
    let before = charged();
    let function = functions(cuda, "30")[0];
    (0..200).for_each(|_| kernel(cuda, function, other));
    ok!(cuda.cuCtxSynchronize());
    let charged = charged() - before;
    assert!(charged < 2_000_000_000, "{charged} ns for 200 kernels of 30 us: they were not measured");
}

/// Copies once when resumed, reports that, and stays.
fn copy(cuda: &CudaLibrary) {
    let (mut memory, bytes) = (0, vec![7_u8; 4096]);
    ok!(cuda.cuMemAlloc_v2(&mut memory, 4096));
    print_line("ready");
    wait_for_resume();
    ok!(cuda.cuMemcpyHtoD_v2(memory, bytes.as_ptr().cast(), bytes.len()));
    print_line("copied");
    wait_for_resume();
}

/// Launches a kernel `count` times, between two lines.
fn launches(cuda: &CudaLibrary, count: u32, length: &str) {
    let function = functions(cuda, length)[0];
    (0..2000).for_each(|_| kernel(cuda, function, null_mut()));
    ok!(cuda.cuCtxSynchronize());
    print_line("ready");
    wait_for_resume();
    (0..count).for_each(|_| kernel(cuda, function, null_mut()));
    print_line("done");
    wait_for_resume();
}

/// Makes launches that the driver refuses: more threads than a block may have.
fn fail(cuda: &CudaLibrary, count: u32) {
    let function = functions(cuda, "20")[0];
    for _ in 0..count {
        // SAFETY: the kernel has no parameters, and the default stream is used.
        let code = unsafe {
            cuda.cuLaunchKernel(function, 1, 1, 1, 4096, 1, 1, 0, null_mut(), null_mut(), null_mut())
        };
        assert_ne!(code, CUDA_SUCCESS);
    }
}

/// Launches many kernels in one context, then as many in another.
fn contexts(cuda: &CudaLibrary) {
    for _ in 0..2 {
        let functions: Vec<CUfunction> = (0..20).map(|_| functions(cuda, "20")[0]).collect();
        for function in functions.iter().cycle().take(2000) {
            kernel(cuda, *function, null_mut());
        }
        let mut context = null_mut();
        ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    }
}
