//! Programs whose work is shaped like that of common frameworks.

use crate::driver::cuda::*;
use crate::node::{print_line, wait_for_resume};
use crate::tenant::{functions, kernel, ok};
use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Runs a role; returns false if there is no such role.
pub fn run_role(cuda: &CudaLibrary, words: &[&str]) -> bool {
    match words {
        ["streams", count, micros] => streams(cuda, count.parse().unwrap(), micros),
        ["threads", count, micros] => threads(cuda, count.parse().unwrap(), micros),
        ["mixed", kernels, shapes, micros] => {
            mixed(cuda, kernels.parse().unwrap(), shapes.parse().unwrap(), micros);
        }
        ["capture-beside", micros] => capture_beside(cuda, micros),
        ["open-capture-beside", micros] => open_capture_beside(cuda, micros),
        ["once-copy", micros] => once_copy(cuda, micros),
        ["recreated-graphs", lengths] => recreated_graphs(cuda, lengths),
        ["callback-loops", milliseconds] => callback_loops(cuda, milliseconds.parse().unwrap()),
        ["behind-flag", count] => behind_flag(cuda, count.parse().unwrap()),
        ["overlap"] => overlap(cuda),
        ["bursts", short, long] => {
            bursts(cuda, short, long, |stream| ok!(cuda.cuStreamSynchronize(stream)));
        }
        ["bursts-and-frees", short, long] => bursts(cuda, short, long, |_| {
            let mut memory = 0;
            ok!(cuda.cuMemAlloc_v2(&mut memory, 4096));
            ok!(cuda.cuMemFree_v2(memory));
        }),
        ["steps", group, milliseconds] => steps(group, milliseconds.parse().unwrap()),
        ["destroy"] => destroy(cuda),
        _ => return false,
    }
    true
}

fn stream(cuda: &CudaLibrary) -> CUstream {
    let mut stream = null_mut();
    ok!(cuda.cuStreamCreate(&mut stream, CU_STREAM_NON_BLOCKING));
    stream
}

fn event(cuda: &CudaLibrary) -> CUevent {
    let mut event = null_mut();
    ok!(cuda.cuEventCreate(&mut event, CU_EVENT_DISABLE_TIMING));
    event
}

/// Runs `work` in another thread, with the calling thread's context.
fn in_thread(cuda: &CudaLibrary, work: impl FnOnce(&CudaLibrary) + Send + 'static) {
    let mut context = null_mut();
    ok!(cuda.cuCtxGetCurrent(&mut context));
    let context = context as usize;
    std::thread::spawn(move || {
        let cuda = CudaLibrary::started();
        ok!(cuda.cuCtxSetCurrent(context as CUcontext));
        work(&cuda);
    });
}

/// Launches kernels that fill the GPU into several streams in turn.
fn streams(cuda: &CudaLibrary, count: usize, micros: &str) {
    let function = functions(cuda, micros)[0];
    let streams: Vec<CUstream> = (0..count).map(|_| stream(cuda)).collect();
    print_line("ready");
    for &stream in streams.iter().cycle() {
        kernel(cuda, function, stream);
    }
}

/// Launches kernels from several threads, each into its own default stream.
fn threads(cuda: &CudaLibrary, count: usize, micros: &str) {
    let function = functions(cuda, micros)[0] as usize;
    for _ in 0..count {
        in_thread(cuda, move |cuda| {
            loop {
                ok!(cuda.cuLaunchKernel_ptsz(
                    function as CUfunction,
                    1 << 20,
                    1,
                    1,
                    256,
                    1,
                    1,
                    0,
                    null_mut(),
                    null_mut(),
                    null_mut()
                ));
            }
        });
    }
    print_line("ready");
    wait_for_resume();
}

/// Launches many kernels with many grid sizes at random, as a framework in eager mode does.
fn mixed(cuda: &CudaLibrary, kernels: u32, shapes: u32, micros: &str) {
    let mut module = null_mut();
    ok!(cuda.cuModuleLoadData(&mut module, c"any".as_ptr().cast()));
    let one = |number: u32| {
        let (mut function, name) = (null_mut(), CString::new(format!("k{number}_busy_{micros}us")).unwrap());
        ok!(cuda.cuModuleGetFunction(&mut function, module, name.as_ptr()));
        function
    };
    let functions: Vec<CUfunction> = (0..kernels).map(one).collect();
    print_line("ready");
    let mut random = 1_u32;
    let mut next = |end: u32| {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (random >> 12) % end
    };
    loop {
        let (function, grid) = (functions[next(kernels) as usize], (1 << 20) + next(shapes));
        ok!(cuda.cuLaunchKernel(function, grid, 1, 1, 256, 1, 1, 0, null_mut(), null_mut(), null_mut()));
    }
}

/// Launches kernels while another thread captures one graph after the other.
fn capture_beside(cuda: &CudaLibrary, micros: &str) {
    let function = functions(cuda, micros)[0];
    let captured = function as usize;
    in_thread(cuda, move |cuda| {
        let stream = stream(cuda);
        loop {
            let (mut graph, mut exec) = (null_mut(), null_mut());
            ok!(cuda.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
            (0..20).for_each(|_| kernel(cuda, captured as CUfunction, stream));
            std::thread::sleep(Duration::from_millis(2));
            ok!(cuda.cuStreamEndCapture(stream, &mut graph));
            ok!(cuda.cuGraphInstantiateWithFlags(&mut exec, graph, 0));
            ok!(cuda.cuGraphExecDestroy(exec));
            ok!(cuda.cuGraphDestroy(graph));
        }
    });
    let own = stream(cuda);
    print_line("ready");
    loop {
        kernel(cuda, function, own);
    }
}

/// Launches kernels while another thread keeps a capture open.
fn open_capture_beside(cuda: &CudaLibrary, micros: &str) {
    let function = functions(cuda, micros)[0];
    in_thread(cuda, |cuda| {
        ok!(cuda.cuStreamBeginCapture_v2(stream(cuda), CU_STREAM_CAPTURE_MODE_RELAXED));
        print_line("ready");
        std::thread::park();
    });
    let own = stream(cuda);
    loop {
        kernel(cuda, function, own);
    }
}

/// Runs one kernel, waits for it by a copy, and exits.
fn once_copy(cuda: &CudaLibrary, micros: &str) {
    let (mut memory, mut bytes) = (0, [0_u8; 64]);
    ok!(cuda.cuMemAlloc_v2(&mut memory, bytes.len()));
    kernel(cuda, functions(cuda, micros)[0], null_mut());
    ok!(cuda.cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), memory, bytes.len()));
}

/// Creates, launches and destroys graphs of different lengths: the driver uses their handles again.
fn recreated_graphs(cuda: &CudaLibrary, lengths: &str) {
    let functions = functions(cuda, lengths);
    let stream = stream(cuda);
    print_line("ready");
    for &function in functions.iter().cycle() {
        let (mut graph, mut exec) = (null_mut(), null_mut());
        ok!(cuda.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        (0..4).for_each(|_| kernel(cuda, function, stream));
        ok!(cuda.cuStreamEndCapture(stream, &mut graph));
        ok!(cuda.cuGraphInstantiateWithFlags(&mut exec, graph, 0));
        ok!(cuda.cuGraphDestroy(graph));
        ok!(cuda.cuGraphLaunch(exec, stream));
        ok!(cuda.cuGraphExecDestroy(exec));
    }
}

unsafe extern "C" fn sleep_5_ms(_: *mut c_void) {
    std::thread::sleep(Duration::from_millis(5));
}

/// Runs a kernel and a host function of 5 ms in a loop, and reports the number of loops.
fn callback_loops(cuda: &CudaLibrary, milliseconds: u64) {
    let (function, stream) = (functions(cuda, "200")[0], stream(cuda));
    let one = || {
        kernel(cuda, function, stream);
        ok!(cuda.cuLaunchHostFunc(stream, Some(sleep_5_ms), null_mut()));
    };
    let (began, mut loops) = (Instant::now(), 0);
    one();
    while began.elapsed() < Duration::from_millis(milliseconds) {
        one();
        ok!(cuda.cuStreamSynchronize(stream));
        loops += 2;
        one();
    }
    ok!(cuda.cuStreamSynchronize(stream));
    print_line(&format!("loops {loops}"));
}

/// Queues kernels behind a flag, and sets the flag afterwards.
fn behind_flag(cuda: &CudaLibrary, count: usize) {
    let kernels: Vec<CUfunction> = (0..count).map(|_| functions(cuda, "50")[0]).collect();
    let (stream, mut host, mut device) = (stream(cuda), null_mut(), 0);
    ok!(cuda.cuMemHostAlloc(&mut host, 64, CU_MEMHOSTALLOC_DEVICEMAP));
    ok!(cuda.cuMemHostGetDevicePointer_v2(&mut device, host, 0));
    // SAFETY: the driver just allocated the memory, which is aligned and not freed.
    let flag = unsafe { &*host.cast::<AtomicU32>() };
    for round in 1..=5 {
        let began = Instant::now();
        ok!(cuda.cuStreamWaitValue32_v2(stream, device, round, 0));
        kernels.iter().for_each(|&function| kernel(cuda, function, stream));
        let queued = began.elapsed();
        flag.store(round, Relaxed);
        ok!(cuda.cuStreamSynchronize(stream));
        print_line(&format!("queued {}", queued.as_millis()));
    }
}

/// Runs a long small kernel beside several short ones, as training with overlapped communication does.
fn overlap(cuda: &CudaLibrary) {
    let (long, short) = (functions(cuda, "2000")[0], functions(cuda, "500")[0]);
    let (compute, communication) = (stream(cuda), stream(cuda));
    let (forked, joined) = (event(cuda), event(cuda));
    print_line("ready");
    loop {
        ok!(cuda.cuEventRecord(forked, compute));
        ok!(cuda.cuStreamWaitEvent(communication, forked, 0));
        ok!(cuda.cuLaunchKernel(long, 8, 1, 1, 256, 1, 1, 0, communication, null_mut(), null_mut()));
        for _ in 0..4 {
            ok!(cuda.cuLaunchKernel(short, 64, 1, 1, 256, 1, 1, 0, compute, null_mut(), null_mut()));
        }
        ok!(cuda.cuEventRecord(joined, communication));
        ok!(cuda.cuStreamWaitEvent(compute, joined, 0));
    }
}

/// Launches twenty short kernels and a long one, and waits.
fn bursts(cuda: &CudaLibrary, short: &str, long: &str, wait: impl Fn(CUstream)) {
    let (short, long) = (functions(cuda, short)[0], functions(cuda, long)[0]);
    let stream = stream(cuda);
    print_line("ready");
    loop {
        (0..20).for_each(|_| kernel(cuda, short, stream));
        kernel(cuda, long, stream);
        wait(stream);
    }
}

/// Runs two ranks on two GPUs, each with a kernel and a collective per step, and reports their steps in a time.
fn steps(group: &str, milliseconds: u64) {
    static STEPS: AtomicU64 = AtomicU64::new(0);
    for gpu in [0, 1] {
        let group = group.to_string();
        std::thread::spawn(move || {
            let (cuda, mut context) = (CudaLibrary::started(), null_mut());
            ok!(cuda.cuCtxCreate_v2(&mut context, 0, gpu));
            let compute = functions(&cuda, "1000")[0];
            let (mut module, mut collective) = (null_mut(), null_mut());
            ok!(cuda.cuModuleLoadData(&mut module, c"any".as_ptr().cast()));
            let name = CString::new(format!("busy_until_peer_{group}_of_2_30us")).unwrap();
            ok!(cuda.cuModuleGetFunction(&mut collective, module, name.as_ptr()));
            let stream = stream(&cuda);
            loop {
                kernel(&cuda, compute, stream);
                kernel(&cuda, collective, stream);
                ok!(cuda.cuStreamSynchronize(stream));
                STEPS.fetch_add(1, Relaxed);
            }
        });
    }
    while STEPS.load(Relaxed) < 4 {
        std::thread::sleep(Duration::from_millis(1));
    }
    print_line("ready");
    wait_for_resume();
    let before = STEPS.load(Relaxed);
    std::thread::sleep(Duration::from_millis(milliseconds));
    print_line(&format!("steps {}", (STEPS.load(Relaxed) - before) / 2));
    wait_for_resume();
}

/// Destroys streams and contexts while they have work, and forks.
fn destroy(cuda: &CudaLibrary) {
    let mut own = null_mut();
    ok!(cuda.cuCtxGetCurrent(&mut own));
    for round in 0..20 {
        let function = functions(cuda, "300")[0];
        // More than the markers of one page.
        let streams: Vec<CUstream> = (0..if round == 0 { 150 } else { 10 }).map(|_| stream(cuda)).collect();
        streams.iter().for_each(|&stream| kernel(cuda, function, stream));
        streams.iter().for_each(|&stream| ok!(cuda.cuStreamDestroy_v2(stream)));
        let mut context = null_mut();
        ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
        let function = functions(cuda, "300")[0];
        let stream = stream(cuda);
        (0..5).for_each(|_| kernel(cuda, function, stream));
        (0..5).for_each(|_| kernel(cuda, function, null_mut()));
        ok!(cuda.cuCtxDestroy_v2(context));
        ok!(cuda.cuCtxSetCurrent(own));
    }
    let (function, stream) = (functions(cuda, "300")[0], stream(cuda));
    kernel(cuda, function, stream);
    // SAFETY: the child uses only what a forked child may, and exits at once.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut device = 0;
        // SAFETY: the pointer is to a local variable. A forked child cannot use the driver of its parent.
        unsafe { cuda.cuCtxGetDevice(&mut device) };
        // SAFETY: the handles are the parent's, which the driver refuses.
        unsafe { cuda.cuStreamDestroy_v2(stream) };
        // SAFETY: ends the child without running the parent's handlers.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    for _ in 0..100 {
        kernel(cuda, function, stream);
    }
    ok!(cuda.cuCtxSynchronize());
}
