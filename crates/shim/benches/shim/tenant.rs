//! The programs that containers run.

use crate::driver::cuda::*;

pub fn play(arguments: &[String]) {
    if arguments == ["start"] {
        return start();
    }
    let cuda = Cuda::started();
    let mut context = std::ptr::null_mut();
    // SAFETY: a handle to fill in.
    assert_eq!(unsafe { cuda.cuCtxCreate_v2(&mut context, 0, 0) }, CUDA_SUCCESS);
    match arguments {
        [kind, lengths] if kind == "saturate" => saturate(&cuda, lengths),
        [kind] if kind == "restless" => restless(&cuda),
        [kind, call] if kind == "cost" => cost(&cuda, call),
        [kind, call, count] if kind == "step" => step(&cuda, call, count.parse().unwrap()),
        other => panic!("{other:?}"),
    }
}

/// The one who started this process says when.
fn go() {
    println!("ready");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
}

fn function(cuda: &Cuda, module: CUmodule, name: &str) -> CUfunction {
    let mut function = std::ptr::null_mut();
    let name = std::ffi::CString::new(name).unwrap();
    // SAFETY: pointers to variables that live through the call.
    assert_eq!(unsafe { cuda.cuModuleGetFunction(&mut function, module, name.as_ptr()) }, CUDA_SUCCESS);
    function
}

fn functions(cuda: &Cuda, lengths: &str) -> Vec<CUfunction> {
    let mut module = std::ptr::null_mut();
    // SAFETY: as above.
    assert_eq!(unsafe { cuda.cuModuleLoadData(&mut module, c"any".as_ptr().cast()) }, CUDA_SUCCESS);
    lengths.split(',').map(|micros| function(cuda, module, &format!("busy_{micros}us"))).collect()
}

fn launch(cuda: &Cuda, function: CUfunction) {
    let none = std::ptr::null_mut();
    // SAFETY: no arguments, no stream.
    let code =
        unsafe { cuda.cuLaunchKernel(function, 1 << 20, 1, 1, 256, 1, 1, 0, none, none.cast(), none.cast()) };
    assert_eq!(code, CUDA_SUCCESS);
}

/// Always has work, until killed: kernels of these lengths in microseconds, in any order.
fn saturate(cuda: &Cuda, lengths: &str) {
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

fn processor_time() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a struct to fill in.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

fn call(cuda: &Cuda, call: &str, nothing: CUfunction) {
    match call {
        "launch" => launch(cuda, nothing),
        "mem-get-info" => {
            let (mut free, mut total) = (0, 0);
            // SAFETY: as above.
            assert_eq!(unsafe { cuda.cuMemGetInfo_v2(&mut free, &mut total) }, CUDA_SUCCESS);
        }
        "alloc-free" => {
            let mut pointer = 0;
            // SAFETY: as above.
            assert_eq!(unsafe { cuda.cuMemAlloc_v2(&mut pointer, 1 << 20) }, CUDA_SUCCESS);
            // SAFETY: as above.
            assert_eq!(unsafe { cuda.cuMemFree_v2(pointer) }, CUDA_SUCCESS);
        }
        other => panic!("{other}"),
    }
}

/// A round of calls whenever told to; prints nanoseconds of processor time per call.
fn cost(cuda: &Cuda, what: &str) {
    const CALLS: u32 = 50_000;
    let nothing = functions(cuda, "0")[0];
    let round = || {
        let start = processor_time();
        (0..CALLS).for_each(|_| call(cuda, what, nothing));
        (processor_time() - start) / f64::from(CALLS)
    };
    round();
    println!("ready");
    for _ in std::io::stdin().lines() {
        println!("{}", round());
    }
}

/// Makes so many calls between stopping and ending, for one who counts its instructions.
fn step(cuda: &Cuda, what: &str, count: u32) {
    let nothing = functions(cuda, "0")[0];
    (0..1000).for_each(|_| call(cuda, what, nothing));
    println!("ready");
    // SAFETY: the parent waits for this.
    unsafe {
        libc::ptrace(libc::PTRACE_TRACEME);
        libc::raise(libc::SIGSTOP);
    }
    (0..count).for_each(|_| call(cuda, what, nothing));
    // SAFETY: nothing is left to do.
    unsafe { libc::_exit(0) };
}

/// From nothing to the first answer that knows the limit; prints milliseconds of processor time.
fn start() {
    go();
    let began = processor_time();
    let cuda = Cuda::started();
    let mut bytes = 0;
    // SAFETY: a number to fill in.
    assert_eq!(unsafe { cuda.cuDeviceTotalMem_v2(&mut bytes, 0) }, CUDA_SUCCESS);
    println!("{}", (processor_time() - began) / 1e6);
}

/// Allocates and frees at random until killed.
fn restless(cuda: &Cuda) {
    go();
    let mut held = Vec::new();
    let mut random = u64::from(std::process::id()) * 0x9e37_79b9 + 1;
    loop {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        if random.is_multiple_of(3) && !held.is_empty() {
            let pointer = held.swap_remove(random as usize / 3 % held.len());
            // SAFETY: it was given out and not yet freed.
            assert_eq!(unsafe { cuda.cuMemFree_v2(pointer) }, CUDA_SUCCESS);
        } else {
            let mut pointer = 0;
            // SAFETY: a number to fill in.
            match unsafe { cuda.cuMemAlloc_v2(&mut pointer, random as usize % (256 << 20) + 1) } {
                CUDA_SUCCESS => held.push(pointer),
                code => assert_eq!(code, CUDA_ERROR_OUT_OF_MEMORY),
            }
        }
    }
}
