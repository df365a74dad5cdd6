//! The programs of the rows: each is the smallest one that shows a defect of an earlier throttle.

use crate::driver::cuda::*;
use crate::programs::*;
use std::ffi::c_void;
use std::io::Write;
use std::process::{Child, Stdio};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Runs a program by its words.
pub fn run(words: &[&str]) {
    match words {
        ["zoo", name] => return crate::programs::run(named(name).unwrap()),
        ["collective", micros] => {
            return kernel_and_collective(&CudaLibrary::started(), 2, number(micros));
        }
        ["churn", micros] => return churn(micros),
        ["cpu"] => loop {
            std::hint::spin_loop();
        },
        _ => {}
    }
    let cuda = CudaLibrary::started();
    create_context(&cuda, 0);
    match words {
        ["many", kernels, shapes] => many_kernels(&cuda, number(kernels) as usize, number(shapes) as usize),
        ["distinct", kernels, micros] => distinct(&cuda, number(kernels), number(micros)),
        ["sync-every", launches, micros] => repeat(&cuda, number(micros), number(launches) as u32),
        ["streams", count, micros] => streams(&cuda, number(count), number(micros)),
        ["threads", count, micros] => threads(&cuda, number(count), number(micros)),
        ["overlap"] => overlap(&cuda),
        ["capture-open", micros] => capture_open(&cuda, number(micros)),
        ["capture-thread"] => capture_thread(&cuda),
        ["capture-intact"] => capture_intact(&cuda),
        ["once", micros] => once(&cuda, number(micros)),
        ["graph-reuse"] => graph_reuse(&cuda),
        ["blocked-stream"] => blocked_stream(&cuda),
        ["host-callback"] => host_callback(&cuda),
        ["own-flag"] => own_flag(&cuda),
        ["requests", micros, count] => requests(&cuda, number(micros), number(count)),
        other => panic!("{other:?}"),
    }
}

fn number(text: &str) -> u64 {
    text.parse().unwrap()
}

/// Launches this many different kernels of one length in a loop, and waits after each round.
fn distinct(cuda: &CudaLibrary, kernels: u64, micros: u64) {
    let functions = functions(cuda, (0..kernels).map(|at| format!("layer{at}_busy_{micros}us")));
    let (stream, steps) = (create_stream(cuda), steps());
    wait_for_start();
    loop {
        functions.iter().for_each(|function| launch(cuda, *function, FULL_GRID, stream));
        ok!(cuda.cuStreamSynchronize(stream));
        steps.fetch_add(1, Relaxed);
    }
}

/// One thread that launches into several streams in turn.
fn streams(cuda: &CudaLibrary, count: u64, micros: u64) {
    let kernel = busy(cuda, micros);
    let streams: Vec<CUstream> = (0..count).map(|_| create_stream(cuda)).collect();
    wait_for_start();
    for &stream in streams.iter().cycle() {
        launch(cuda, kernel, FULL_GRID, stream);
    }
}

/// Several threads with a stream each.
fn threads(cuda: &CudaLibrary, count: u64, micros: u64) {
    let kernel = busy(cuda, micros) as usize;
    let mut context = null_mut();
    ok!(cuda.cuCtxGetCurrent(&mut context));
    let context = context as usize;
    wait_for_start();
    std::thread::scope(|scope| {
        for _ in 0..count {
            scope.spawn(|| {
                ok!(cuda.cuCtxSetCurrent(context as CUcontext));
                let stream = create_stream(cuda);
                loop {
                    launch(cuda, kernel as CUfunction, FULL_GRID, stream);
                }
            });
        }
    });
}

/// A communication stream with one kernel of 2 ms in 8 blocks, beside four compute kernels of 0.5 ms.
fn overlap(cuda: &CudaLibrary) {
    let (compute, reduce) = (busy(cuda, 500), busy(cuda, 2_000));
    let (layers, communication) = (create_stream(cuda), create_stream(cuda));
    let steps = steps();
    wait_for_start();
    loop {
        launch(cuda, reduce, 8, communication);
        (0..4).for_each(|_| launch(cuda, compute, 640, layers));
        ok!(cuda.cuStreamSynchronize(communication));
        ok!(cuda.cuStreamSynchronize(layers));
        steps.fetch_add(1, Relaxed);
    }
}

/// Saturates the GPU while a relaxed capture is open on another stream.
fn capture_open(cuda: &CudaLibrary, micros: u64) {
    let (kernel, stream, captured) = (busy(cuda, micros), create_stream(cuda), create_stream(cuda));
    ok!(cuda.cuStreamBeginCapture_v2(captured, CU_STREAM_CAPTURE_MODE_RELAXED));
    wait_for_start();
    loop {
        launch(cuda, kernel, FULL_GRID, stream);
    }
}

/// Launches 50 kernels while another thread captures graphs, 10 ms each.
fn capture_thread(cuda: &CudaLibrary) {
    let functions = functions(cuda, (0..50).map(|at| format!("layer{at}_busy_200us")));
    let other = busy(cuda, 10) as usize;
    let mut context = null_mut();
    ok!(cuda.cuCtxGetCurrent(&mut context));
    let context = context as usize;
    let stream = create_stream(cuda);
    wait_for_start();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            ok!(cuda.cuCtxSetCurrent(context as CUcontext));
            let (stream, mut graph) = (create_stream(cuda), null_mut());
            loop {
                ok!(cuda.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
                (0..10).for_each(|_| launch(cuda, other as CUfunction, FULL_GRID, stream));
                std::thread::sleep(Duration::from_millis(10));
                ok!(cuda.cuStreamEndCapture(stream, &mut graph));
                ok!(cuda.cuGraphDestroy(graph));
            }
        });
        for function in functions.iter().cycle() {
            launch(cuda, *function, FULL_GRID, stream);
        }
    });
}

/// Ends a capture that does not exist, and destroys a joined stream in the middle of a capture. Counts a step for each
/// capture that has all its kernels afterwards.
fn capture_intact(cuda: &CudaLibrary) {
    let steps = steps();
    let kernels = functions(cuda, (11..17).map(|micros| format!("busy_{micros}us")));
    let (origin, other, event) = (create_stream(cuda), create_stream(cuda), create_event(cuda));
    wait_for_start();
    for forked in [false, true] {
        let (mut graph, mut nodes) = (null_mut(), 0);
        ok!(cuda.cuStreamBeginCapture_v2(origin, CU_STREAM_CAPTURE_MODE_RELAXED));
        if forked {
            let side = create_stream(cuda);
            order(cuda, origin, side, event);
            launch(cuda, kernels[0], FULL_GRID, side);
            order(cuda, side, origin, event);
            ok!(cuda.cuStreamDestroy_v2(side));
        } else {
            // SAFETY: the pointer is to a local variable.
            assert_ne!(unsafe { cuda.cuStreamEndCapture(other, &mut graph) }, CUDA_SUCCESS);
        }
        for &kernel in &kernels {
            let none: *mut c_void = null_mut();
            // SAFETY: the kernel has no parameters.
            unsafe {
                cuda.cuLaunchKernel(kernel, FULL_GRID, 1, 1, 256, 1, 1, 0, origin, none.cast(), none.cast())
            };
        }
        // SAFETY: the pointers are to local variables.
        let ended = unsafe { cuda.cuStreamEndCapture(origin, &mut graph) };
        if ended == CUDA_SUCCESS {
            ok!(cuda.cuGraphGetNodes(graph, null_mut(), &mut nodes));
        }
        steps.fetch_add(u64::from(nodes == kernels.len() + usize::from(forked)), Relaxed);
    }
    loop {
        std::thread::park();
    }
}

/// Runs three short-lived processes at a time, each with one kernel.
fn churn(micros: &str) {
    let start = || -> Child {
        let mut command = crate::tenant_command(&["once", micros]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(b"go\n").unwrap();
        child
    };
    let steps = steps();
    wait_for_start();
    let mut children: Vec<Child> = (0..3).map(|_| start()).collect();
    loop {
        for child in &mut children {
            if child.try_wait().unwrap().is_some() {
                steps.fetch_add(1, Relaxed);
                *child = start();
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Launches one kernel, waits for it by copying its result, and exits. Ends early with the process that started it.
fn once(cuda: &CudaLibrary, micros: u64) {
    // SAFETY: the call has no pointers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let (mut device, mut host) = (0, [0_u8; 64]);
    ok!(cuda.cuMemAlloc_v2(&mut device, 64));
    launch(cuda, busy(cuda, micros), FULL_GRID, null_mut());
    ok!(cuda.cuMemcpyDtoH_v2(host.as_mut_ptr().cast(), device, host.len()));
}

/// Graphs whose handles the driver uses again: 300 launches of 1 us, then 40 of 5 ms, and so on.
fn graph_reuse(cuda: &CudaLibrary) {
    let (short, long) = (busy(cuda, 1), busy(cuda, 5_000));
    let (stream, steps) = (create_stream(cuda), steps());
    wait_for_start();
    loop {
        for (kernel, launches) in [(short, 300), (long, 40)] {
            let graph = chain(cuda, &[kernel]);
            (0..launches).for_each(|_| ok!(cuda.cuGraphLaunch(graph, stream)));
            ok!(cuda.cuStreamSynchronize(stream));
            ok!(cuda.cuGraphExecDestroy(graph));
        }
        steps.fetch_add(1, Relaxed);
    }
}

/// Returns a word in pinned memory, with its device address.
fn pinned_word(cuda: &CudaLibrary) -> (&'static AtomicU32, CUdeviceptr) {
    let (mut host, mut device) = (null_mut(), 0);
    ok!(cuda.cuMemAllocHost_v2(&mut host, 4096));
    ok!(cuda.cuMemHostGetDevicePointer_v2(&mut device, host, 0));
    // SAFETY: the page is aligned, zeroed and never freed.
    (unsafe { &*host.cast::<AtomicU32>() }, device)
}

const WAIT_EQUAL: u32 = 1;

/// Well-behaved launches, then 20 new kernels behind a word that is never written, then kernels of 20 ms in ever new
/// grid sizes.
fn blocked_stream(cuda: &CudaLibrary) {
    let (short, long) = (busy(cuda, 20), busy(cuda, 20_000));
    let blocked = functions(cuda, (0..20).map(|at| format!("layer{at}_busy_20us")));
    let (stream, waiting) = (create_stream(cuda), create_stream(cuda));
    let (_, word) = pinned_word(cuda);
    wait_for_start();
    (0..3000).for_each(|_| launch(cuda, short, FULL_GRID, stream));
    launch(cuda, long, FULL_GRID, stream);
    ok!(cuda.cuStreamSynchronize(stream));
    ok!(cuda.cuStreamWaitValue32_v2(waiting, word, 1, WAIT_EQUAL));
    blocked.iter().for_each(|kernel| launch(cuda, *kernel, FULL_GRID, waiting));
    for shape in 1.. {
        launch(cuda, long, FULL_GRID + shape, stream);
    }
}

extern "C" fn callback(_: *mut c_void) {
    std::thread::sleep(Duration::from_millis(5));
}

/// A kernel of 0.2 ms and a host callback of 5 ms.
fn host_callback(cuda: &CudaLibrary) {
    let (kernel, stream, steps) = (busy(cuda, 200), create_stream(cuda), steps());
    wait_for_start();
    loop {
        launch(cuda, kernel, FULL_GRID, stream);
        ok!(cuda.cuLaunchHostFunc(stream, Some(callback), null_mut()));
        ok!(cuda.cuStreamSynchronize(stream));
        steps.fetch_add(1, Relaxed);
    }
}

/// Queues 20 new kernels behind a word that the same thread writes afterwards; adds the microseconds of queuing.
fn own_flag(cuda: &CudaLibrary) {
    let kernels = functions(cuda, (0..20).map(|at| format!("layer{at}_busy_20us")));
    let (stream, steps) = (create_stream(cuda), steps());
    let (host, device) = pinned_word(cuda);
    wait_for_start();
    let began = Instant::now();
    ok!(cuda.cuStreamWaitValue32_v2(stream, device, 1, WAIT_EQUAL));
    kernels.iter().for_each(|kernel| launch(cuda, *kernel, FULL_GRID, stream));
    let queued = began.elapsed();
    host.store(1, Relaxed);
    ok!(cuda.cuStreamSynchronize(stream));
    steps.fetch_add(queued.as_micros() as u64 + 1, Relaxed);
    loop {
        std::thread::park();
    }
}

/// Serves a request every 5 ms or so; prints the microseconds from each launch to the kernel's end, beyond its length.
fn requests(cuda: &CudaLibrary, micros: u64, count: u64) {
    let (kernel, stream, mut random) = (busy(cuda, micros), create_stream(cuda), Random::new());
    launch(cuda, kernel, FULL_GRID, stream);
    ok!(cuda.cuStreamSynchronize(stream));
    wait_for_start();
    for _ in 0..count {
        std::thread::sleep(Duration::from_micros(3_000 + random.below(4_000) as u64));
        let began = Instant::now();
        launch(cuda, kernel, FULL_GRID, stream);
        ok!(cuda.cuStreamSynchronize(stream));
        println!("{}", (began.elapsed().as_micros() as u64).saturating_sub(micros));
    }
    println!("end");
}
