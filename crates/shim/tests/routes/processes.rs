//! Processes: forked, started without an environment, many at once, with many threads.

use super::*;
use container::{Observer, REGION_VARIABLE, shares};
use driver::cuda::*;
use partage_region::{RegionPolicy, UsageReader};
use program::{ProgramBuilder, stdout_of};
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::ptr::null_mut;

const MIB_SIZE: usize = MIB as usize;

fn run_role(role: &str) {
    let node = node();
    // Contexts of two processes.
    let container = TestContainer::with_memory(&node, 2 * CONTEXT_BYTES + FREE_BYTES);
    container.run_role(&format!("processes {role}"));
    assert_eq!(container.used(0), 0, "{role}");
}

#[test]
fn child_forked_before_use_has_its_own_slot() {
    run_role("fork_before");
}

#[test]
fn child_forked_after_use_leaves_the_parents_account_alone() {
    run_role("fork_after");
}

#[test]
fn child_forked_from_many_threads_does_not_hang() {
    run_role("fork_storm");
}

#[test]
fn threads_share_the_limit_of_their_process() {
    run_role("threads");
}

/// A program that is started without an environment, from a login shell, or from another program: the files contain the
/// configuration.
#[test]
fn empty_environment_does_not_lift_limits() {
    let (node, folder) = (node(), tempfile::tempdir().unwrap());
    let container = TestContainer::with_memory(&node, CONTEXT_BYTES + FREE_BYTES);
    let program = linker::linked_program(folder.path(), &node, Some(&container.libraries()));
    // The simulated node stands for device files.
    let devices = format!("{}={}", partage_sim_node::node::NODE_DIR_VARIABLE, node.0.path().display());
    let text = format!("{} linked", program.display());
    for arguments in [
        vec![program.to_str().unwrap(), "linked"],
        vec!["/bin/sh", "-lc", &text],
        vec!["/bin/sh", "-c", &format!("( setsid {text} )")],
    ] {
        let mut command = Command::new("env");
        let output = command.args(["-i", &devices]).args(&arguments).output().unwrap();
        assert_eq!(stdout_of(&output), expected_output(), "{arguments:?}");
    }
    assert_eq!(container.used(0), 0);
}

/// Environment variables that similar libraries read, and those of Partage.
#[test]
fn environment_variables_do_not_lift_limits() {
    let (node, folder) = (node(), tempfile::tempdir().unwrap());
    let container = TestContainer::with_memory(&node, CONTEXT_BYTES + FREE_BYTES);
    let program = linker::linked_program(folder.path(), &node, None);
    let mut command = linker::run(&container, &[], &program);
    for variable in [
        "PARTAGE_SHIM_LIBRARY",
        "PARTAGE_DISABLE",
        "PARTAGE_REGION",
        "CUDA_DISABLE_CONTROL",
        "CUDA_REDIRECT",
        "DISABLE_VGPU",
        "CUDA_DEVICE_MEMORY_LIMIT",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE",
    ] {
        command.env(variable, "/nowhere");
    }
    assert_eq!(stdout_of(&command.arg("linked").output().unwrap()), expected_output());
}

#[test]
fn three_hundred_processes_share_one_limit() {
    const PROCESSES: u64 = 300;
    const GPUS: u64 = 8;
    let (node, folder) =
        (TestNode::new(GPU_MODEL, GPUS as usize, DriverVersion::R550), tempfile::tempdir().unwrap());
    // Exactly a context and a block for each process on a GPU.
    let each = |gpu: u64| (PROCESSES / GPUS + u64::from(gpu < PROCESSES % GPUS)) * (CONTEXT_BYTES + 2 * MIB);
    let mut all = shares(&node, 0);
    (0..).zip(&mut all).for_each(|(gpu, share)| share.memory = each(gpu));
    let container = TestContainer::new(&node, &all, RegionPolicy::default());
    let mut arguments = vec![format!("-L{}", node.0.libraries().display()), "-lcuda".into()];
    arguments.insert(0, "-Wl,--no-as-needed".into());
    let program =
        ProgramBuilder { folder: folder.path() }.build_program("one", include_str!("one.c"), &arguments);
    let start = |gpu: u64| {
        let mut command = Command::new(&program);
        container.env(&mut command);
        let mut child =
            command.arg(gpu.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        (child, output)
    };
    let heard = |output: &mut BufReader<_>| {
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        line.trim().to_string()
    };
    let mut processes: Vec<_> = (0..PROCESSES).map(|number| start(number % GPUS)).collect();
    for (number, (_, output)) in processes.iter_mut().enumerate() {
        assert_eq!(heard(output), "0", "process {number}");
    }
    let snapshot = container.reader().snapshot().unwrap();
    assert_eq!(snapshot.forged, []);
    assert_eq!(snapshot.processes.len() as u64, PROCESSES);
    let state = node.state();
    for gpu in 0..GPUS {
        assert_eq!(snapshot.gpus[gpu as usize].used, each(gpu), "GPU {gpu}");
        assert_eq!(state.used_memory(gpu as usize) * partage_region::MEMORY_UNIT, each(gpu), "GPU {gpu}");
    }
    let (mut more, mut output) = start(3);
    assert_eq!(heard(&mut output), CUDA_ERROR_OUT_OF_MEMORY.to_string());
    more.kill().unwrap();
    more.wait().unwrap();
    // Half of them are killed, half exit.
    for (number, (child, _)) in processes.iter_mut().enumerate() {
        if number % 2 == 0 {
            child.kill().unwrap();
        }
        drop(child.stdin.take());
    }
    for (child, _) in &mut processes {
        child.wait().unwrap();
    }
    assert!((0..GPUS).all(|gpu| container.used(gpu as usize) == 0));
}

pub fn client(arguments: &[&str]) {
    match arguments {
        ["fork_before"] => fork_before(),
        ["fork_after"] => fork_after(),
        ["fork_storm"] => fork_storm(),
        ["threads"] => threads(),
        other => panic!("{other:?}"),
    }
}

/// Runs a child that reports success by its exit code. Nothing in it may panic: it has only one of the process's
/// threads.
fn in_child(work: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child does its work and exits without returning.
    match unsafe { libc::fork() } {
        0 => {
            let code = work();
            // SAFETY: ends only this process.
            unsafe { libc::_exit(code) }
        }
        child => {
            assert!(child > 0);
            let mut status = 0;
            // SAFETY: the pointer is to a local variable.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert!(libc::WIFEXITED(status), "{status:#x}");
            libc::WEXITSTATUS(status)
        }
    }
}

fn reader() -> UsageReader {
    UsageReader::open(Path::new(&std::env::var_os(REGION_VARIABLE).unwrap())).unwrap()
}

fn used() -> u64 {
    reader().snapshot().unwrap().gpus[0].used
}

/// Creates a context and allocates memory. Returns the number of the first step that failed.
fn takes(cuda: &CudaLibrary, bytes: usize) -> i32 {
    let (mut context, mut pointer) = (null_mut(), 0);
    // SAFETY: the pointers are to local variables.
    unsafe {
        if cuda.cuInit(0) != 0 {
            return 1;
        }
        if cuda.cuCtxCreate_v2(&mut context, 0, 0) != 0 {
            return 2;
        }
        if cuda.cuMemAlloc_v2(&mut pointer, bytes) != 0 { 3 } else { 0 }
    }
}

fn fork_before() {
    let cuda = CudaLibrary(driver::LoadedLibrary::open("libcuda.so.1").unwrap());
    // A child that initializes the driver by itself, before its parent did.
    let code = in_child(|| {
        let own = std::process::id();
        match takes(&cuda, 10 * MIB_SIZE) {
            0 if used() != CONTEXT_BYTES + 10 * MIB => 10,
            0 if reader().snapshot().unwrap().processes.iter().all(|process| process.pid != own) => 11,
            other => other,
        }
    });
    assert_eq!(code, 0);
    assert_eq!(used(), 0, "what the child had is given back");
    // Both at once, each with its own memory.
    assert_eq!(takes(&cuda, 30 * MIB_SIZE), 0);
    Observer::new().assert_exact("the parent alone");
}

fn fork_after() {
    let cuda = CudaLibrary::started();
    let (mut context, mut pointer) = (null_mut(), 0);
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 30 * MIB_SIZE));
    let before = used();
    for _ in 0..20 {
        let code = in_child(|| {
            let mut more = 0;
            // A driver does not work in a forked child, and returns an error. What matters is whose account is changed.
            // SAFETY: the pointers are to local variables; the driver rejects the calls here.
            unsafe {
                cuda.cuMemAlloc_v2(&mut more, MIB_SIZE);
                cuda.cuMemFree_v2(pointer);
                cuda.cuCtxDestroy_v2(context);
                cuda.cuDevicePrimaryCtxReset_v2(0);
            }
            if used() < before { 12 } else { 0 }
        });
        assert_eq!(code, 0);
        // The child is gone, and so is what it may have reserved.
        assert_eq!(used(), before);
        Observer::new().assert_exact("after a child");
    }
    // The parent's own memory is unchanged.
    ok!(cuda.cuMemFree_v2(pointer));
    Observer::new().assert_exact("freed");
    assert_eq!(used(), CONTEXT_BYTES);
    ok!(cuda.cuMemAlloc_v2(&mut pointer, FREE_BYTES as usize));
    ok!(cuda.cuMemFree_v2(pointer));
}

/// Children are forked at arbitrary times, and make calls at once.
fn fork_storm() {
    let cuda = CudaLibrary::started();
    let mut context = null_mut();
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    // All functions are looked up before: a child that is forked while a thread does so would wait for that thread.
    let (mut pointer, mut free, mut total) = (0, 0, 0);
    ok!(cuda.cuMemGetInfo_v2(&mut free, &mut total));
    ok!(cuda.cuMemAlloc_v2(&mut pointer, MIB_SIZE));
    ok!(cuda.cuMemFree_v2(pointer));
    let (context, over) = (context as usize, std::sync::atomic::AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                ok!(cuda.cuCtxSetCurrent(context as CUcontext));
                while !over.load(std::sync::atomic::Ordering::Relaxed) {
                    let mut pointer = 0;
                    ok!(cuda.cuMemAlloc_v2(&mut pointer, MIB_SIZE));
                    ok!(cuda.cuMemFree_v2(pointer));
                }
            });
        }
        for _ in 0..150 {
            let code = in_child(|| {
                // Ends a child that is stuck, with an error.
                // SAFETY: the call takes no pointers; its signal ends this process.
                unsafe { libc::alarm(60) };
                let (mut pointer, mut free, mut total) = (0, 0, 0);
                // SAFETY: the pointers are to local variables.
                unsafe {
                    cuda.cuMemGetInfo_v2(&mut free, &mut total);
                    cuda.cuMemAlloc_v2(&mut pointer, MIB_SIZE);
                }
                0
            });
            assert_eq!(code, 0);
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert_eq!(used(), CONTEXT_BYTES);
    Observer::new().assert_exact("at the end");
}

fn threads() {
    let cuda = CudaLibrary::started();
    let mut context = null_mut();
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    let (mut module, mut function) = (null_mut(), null_mut());
    ok!(cuda.cuModuleLoadData(&mut module, c"any image".as_ptr().cast()));
    ok!(cuda.cuModuleGetFunction(&mut function, module, c"busy_1us".as_ptr()));
    let function = function as usize;
    let observer = Observer::new();
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let cuda = &cuda;
            let context = context as usize;
            scope.spawn(move || {
                ok!(cuda.cuCtxSetCurrent(context as CUcontext));
                let (mut held, mut refused, mut random) = (Vec::new(), 0, thread * 77 + 1);
                for _ in 0..600 {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let (mut pointer, size) = (0, (random >> 33) as usize % (12 * MIB_SIZE) + 1);
                    // SAFETY: the pointer is to a local variable.
                    match unsafe { cuda.cuMemAlloc_v2(&mut pointer, size) } {
                        CUDA_SUCCESS => held.push(pointer),
                        CUDA_ERROR_OUT_OF_MEMORY => {
                            refused += 1;
                            held.drain(..).for_each(|pointer| ok!(cuda.cuMemFree_v2(pointer)));
                        }
                        other => panic!("{:?}", name(other)),
                    }
                    ok!(cuda.cuLaunchKernel(
                        function as CUfunction,
                        1,
                        1,
                        1,
                        32,
                        1,
                        1,
                        0,
                        null_mut(),
                        null_mut(),
                        null_mut()
                    ));
                }
                held.drain(..).for_each(|pointer| ok!(cuda.cuMemFree_v2(pointer)));
                assert!(refused > 0, "there was no contention");
            });
        }
    });
    ok!(cuda.cuModuleUnload(module));
    observer.assert_exact("at the end");
    assert_eq!(observer.used(0), CONTEXT_BYTES);
}
