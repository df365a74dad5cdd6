//! The programs that containers run.

use crate::driver::cuda::*;

pub fn play(arguments: &[String]) {
    if arguments == ["start"] {
        return start();
    }
    let cuda = CudaLibrary::started();
    let mut context = std::ptr::null_mut();
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { cuda.cuCtxCreate_v2(&mut context, 0, 0) }, CUDA_SUCCESS);
    match arguments {
        [kind, lengths] if kind == "saturate" => saturate(&cuda, lengths),
        [kind, lengths] if kind == "now-and-then" => now_and_then(&cuda, lengths),
        [kind] if kind == "restless" => allocate_randomly(&cuda),
        [kind, call] if kind == "cost" => cost(&cuda, call),
        [kind, call, count] if kind == "step" => step(&cuda, call, count.parse().unwrap()),
        other => panic!("{other:?}"),
    }
}

/// Waits until the process that started this one sends a line.
fn go() {
    println!("ready");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
}

fn function(cuda: &CudaLibrary, module: CUmodule, name: &str) -> CUfunction {
    let mut function = std::ptr::null_mut();
    let name = std::ffi::CString::new(name).unwrap();
    // SAFETY: the pointers are to variables that live through the call.
    assert_eq!(unsafe { cuda.cuModuleGetFunction(&mut function, module, name.as_ptr()) }, CUDA_SUCCESS);
    function
}

fn functions(cuda: &CudaLibrary, lengths: &str) -> Vec<CUfunction> {
    let mut module = std::ptr::null_mut();
    // SAFETY: the pointers are to variables that live through the call.
    assert_eq!(unsafe { cuda.cuModuleLoadData(&mut module, c"any".as_ptr().cast()) }, CUDA_SUCCESS);
    lengths.split(',').map(|micros| function(cuda, module, &format!("busy_{micros}us"))).collect()
}

fn launch(cuda: &CudaLibrary, function: CUfunction) {
    let none = std::ptr::null_mut();
    // SAFETY: the kernel has no parameters, and the default stream is used.
    let code =
        unsafe { cuda.cuLaunchKernel(function, 1 << 20, 1, 1, 256, 1, 1, 0, none, none.cast(), none.cast()) };
    assert_eq!(code, CUDA_SUCCESS);
}

/// Submits work all the time, until killed: kernels of these lengths in microseconds, in random order.
fn saturate(cuda: &CudaLibrary, lengths: &str) {
    let kernels = functions(cuda, lengths);
    go();
    let mut random = u64::from(std::process::id()) * 0x9e37_79b9 + 1;
    loop {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        launch(cuda, kernels[random as usize % kernels.len()]);
    }
}

fn cpu_time() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a local structure.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

fn call(cuda: &CudaLibrary, call: &str, nothing: CUfunction) {
    match call {
        "launch" => launch(cuda, nothing),
        "mem-get-info" => {
            let (mut free, mut total) = (0, 0);
            // SAFETY: the pointers are to variables that live through the call.
            assert_eq!(unsafe { cuda.cuMemGetInfo_v2(&mut free, &mut total) }, CUDA_SUCCESS);
        }
        "alloc-free" => {
            let mut pointer = 0;
            // SAFETY: the pointer is to a variable that lives through the call.
            assert_eq!(unsafe { cuda.cuMemAlloc_v2(&mut pointer, 1 << 20) }, CUDA_SUCCESS);
            // SAFETY: the pointer was just allocated.
            assert_eq!(unsafe { cuda.cuMemFree_v2(pointer) }, CUDA_SUCCESS);
        }
        other => panic!("{other}"),
    }
}

/// Makes a round of calls for every line that it receives; prints nanoseconds of CPU time per call.
fn cost(cuda: &CudaLibrary, what: &str) {
    const CALLS: u32 = 50_000;
    let nothing = functions(cuda, "0")[0];
    let round = || {
        let start = cpu_time();
        (0..CALLS).for_each(|_| call(cuda, what, nothing));
        (cpu_time() - start) / f64::from(CALLS)
    };
    round();
    println!("ready");
    for _ in std::io::stdin().lines() {
        println!("{}", round());
    }
}

/// Makes `count` calls between stopping and exiting, for a tracer that counts its instructions.
fn step(cuda: &CudaLibrary, what: &str, count: u32) {
    let nothing = functions(cuda, "0")[0];
    (0..1000).for_each(|_| call(cuda, what, nothing));
    println!("ready");
    // SAFETY: no pointers are passed; the parent waits for the stop.
    unsafe {
        libc::ptrace(libc::PTRACE_TRACEME);
        libc::raise(libc::SIGSTOP);
    }
    (0..count).for_each(|_| call(cuda, what, nothing));
    // SAFETY: ends this process, with nothing left to do.
    unsafe { libc::_exit(0) };
}

/// Measures from nothing to the first answer that depends on the limit; prints milliseconds of CPU time.
fn start() {
    go();
    let began = cpu_time();
    let cuda = CudaLibrary::started();
    let mut bytes = 0;
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { cuda.cuDeviceTotalMem_v2(&mut bytes, 0) }, CUDA_SUCCESS);
    println!("{}", (cpu_time() - began) / 1e6);
}

/// Allocates and frees at random until killed.
fn allocate_randomly(cuda: &CudaLibrary) {
    go();
    let mut held = Vec::new();
    let mut random = u64::from(std::process::id()) * 0x9e37_79b9 + 1;
    loop {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        if random.is_multiple_of(3) && !held.is_empty() {
            let pointer = held.swap_remove(random as usize / 3 % held.len());
            // SAFETY: the pointer was allocated here and not freed yet.
            assert_eq!(unsafe { cuda.cuMemFree_v2(pointer) }, CUDA_SUCCESS);
        } else {
            let mut pointer = 0;
            // SAFETY: the pointer is to a local variable.
            match unsafe { cuda.cuMemAlloc_v2(&mut pointer, random as usize % (256 << 20) + 1) } {
                CUDA_SUCCESS => held.push(pointer),
                code => assert_eq!(code, CUDA_ERROR_OUT_OF_MEMORY),
            }
        }
    }
}

/// Uses the GPU three times a second; prints the milliseconds from a launch to its end.
fn now_and_then(cuda: &CudaLibrary, lengths: &str) {
    let kernel = functions(cuda, lengths)[0];
    launch(cuda, kernel);
    go();
    loop {
        std::thread::sleep(std::time::Duration::from_millis(300));
        let began = std::time::Instant::now();
        launch(cuda, kernel);
        // SAFETY: the call takes no arguments.
        assert_eq!(unsafe { cuda.cuCtxSynchronize() }, CUDA_SUCCESS);
        println!("{}", began.elapsed().as_secs_f64() * 1e3);
    }
}
