//! Tests of the errors that the driver returns for invalid calls.

use super::*;
use crate::node::TestNode;
use partage_driver_api::exports::DriverVersion;
use std::ffi::c_char;

#[test]
fn invalid_calls_return_documented_codes() {
    TestNode::new("A10", 2, DriverVersion::R535).run_role("misuse codes");
}

#[test]
fn init_without_node_reports_no_device() {
    let node = TestNode::new("T4", 1, DriverVersion::R550);
    let run = node.command("misuse no-device").env("PARTAGE_SIM_DIR", "/nonexistent").status().unwrap();
    assert!(run.success());
    let run = node.command("misuse no-device").env("CUDA_VISIBLE_DEVICES", "").status().unwrap();
    assert!(run.success());
    node.state().set_loaded(false);
    node.run_role("misuse no-device");
    node.state().set_loaded(true);
    node.run_role("misuse one-device");
}

#[test]
fn forked_child_is_not_initialized() {
    TestNode::new("T4", 1, DriverVersion::R550).run_role("misuse fork");
}

#[test]
fn lost_gpu_fails_every_call_permanently() {
    use partage_sim_node::state::GpuFault;
    let node = TestNode::new("T4", 2, DriverVersion::R550);
    let mut program = node.start("misuse lost");
    program.wait_for_line("ready");
    node.state().inject(0, GpuFault::Lost);
    program.resume();
    program.wait_for_line("failed");
    // A new process sees only the other GPU.
    node.run_role("misuse one-device");
    node.state().inject(0, GpuFault::Returned);
    program.resume();
    program.wait_for_line("still failed");
    program.end();
    node.run_role("misuse works");
}

pub fn client(arguments: &[&str]) {
    match arguments {
        ["codes"] => codes(),
        ["no-device"] => {
            let cuda = CudaLibrary(crate::driver::LoadedLibrary::open("libcuda.so.1").unwrap());
            fails!(CUDA_ERROR_NO_DEVICE, cuda.cuInit(0));
            let mut count = 0;
            fails!(CUDA_ERROR_NOT_INITIALIZED, cuda.cuDeviceGetCount(&mut count));
        }
        ["one-device"] => {
            let mut count = 0;
            ok!(CudaLibrary::started().cuDeviceGetCount(&mut count));
            assert_eq!(count, 1);
        }
        ["works"] => {
            let (cuda, _) = start();
            launch(&cuda, function(&cuda, "busy_10us"), null_mut());
            ok!(cuda.cuCtxSynchronize());
        }
        ["fork"] => fork(),
        ["lost"] => lost(),
        other => panic!("{other:?}"),
    }
}

fn lost() {
    use crate::node::{print_line, wait_for_resume};
    let (cuda, _) = start();
    let busy = function(&cuda, "busy_10000us");
    for _ in 0..500 {
        launch(&cuda, busy, null_mut());
    }
    print_line("ready");
    wait_for_resume();
    let all = || {
        fails!(CUDA_ERROR_UNKNOWN, cuda.cuCtxSynchronize());
        fails!(CUDA_ERROR_UNKNOWN, cuda.cuStreamQuery(null_mut()));
        let mut event = null_mut();
        ok!(cuda.cuEventCreate(&mut event, 0));
        fails!(CUDA_ERROR_UNKNOWN, cuda.cuEventRecord(event, null_mut()));
        let none = null_mut();
        fails!(
            CUDA_ERROR_UNKNOWN,
            cuda.cuLaunchKernel(busy, 1 << 20, 1, 1, 256, 1, 1, 0, none, none.cast(), none.cast())
        );
    };
    all();
    print_line("failed");
    wait_for_resume();
    all();
    print_line("still failed");
}

fn fork() {
    let (cuda, _) = start();
    // SAFETY: the child only calls the driver and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut count = 0;
        let mut context = null_mut();
        // SAFETY: the outputs are local variables.
        let codes = unsafe {
            [
                cuda.cuDeviceGetCount(&mut count),
                cuda.cuInit(0),
                cuda.cuCtxSynchronize(),
                cuda.cuCtxGetCurrent(&mut context),
            ]
        };
        // SAFETY: exits the child without running exit handlers of the parent.
        unsafe { libc::_exit(i32::from(codes != [CUDA_ERROR_NOT_INITIALIZED; 4])) };
    }
    let mut status = -1;
    // SAFETY: waits for the child forked above, with a local variable for the status.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    ok!(cuda.cuCtxSynchronize());
}

fn codes() {
    let cuda = CudaLibrary(crate::driver::LoadedLibrary::open("libcuda.so.1").unwrap());
    let (mut count, mut context, mut made) = (0, null_mut(), null_mut());
    // Before initialization.
    fails!(CUDA_ERROR_NOT_INITIALIZED, cuda.cuDeviceGetCount(&mut count));
    fails!(CUDA_ERROR_NOT_INITIALIZED, cuda.cuCtxSynchronize());
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuInit(1));
    ok!(cuda.cuInit(0));
    ok!(cuda.cuInit(0));
    // Devices.
    let mut device = 0;
    fails!(CUDA_ERROR_INVALID_DEVICE, cuda.cuDeviceGet(&mut device, 2));
    fails!(CUDA_ERROR_INVALID_DEVICE, cuda.cuDeviceGet(&mut device, -1));
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuDeviceGetCount(null_mut()));
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuDeviceGetAttribute(&mut device, 99_999, 0));
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuDeviceGetByPCIBusId(&mut device, c"ff:ff.0".as_ptr()));
    let mut name = [0 as c_char; 5];
    ok!(cuda.cuDeviceGetName(name.as_mut_ptr(), 5, 0));
    assert_eq!(name.map(|byte| byte as u8), *b"NVID\0");
    // Without a context.
    let mut module = null_mut();
    let mut pointer = 0;
    fails!(CUDA_ERROR_INVALID_CONTEXT, cuda.cuModuleLoadData(&mut module, c"x".as_ptr().cast()));
    fails!(CUDA_ERROR_INVALID_CONTEXT, cuda.cuMemAlloc_v2(&mut pointer, 1));
    fails!(CUDA_ERROR_INVALID_CONTEXT, cuda.cuCtxSynchronize());
    fails!(CUDA_ERROR_INVALID_CONTEXT, cuda.cuCtxPopCurrent_v2(&mut context));
    ok!(cuda.cuCtxGetCurrent(&mut context));
    assert!(context.is_null());
    // Texts that programs compare.
    for (code, expected) in [
        (CUDA_ERROR_INVALID_DEVICE, c"invalid device ordinal"),
        (CUDA_ERROR_NOT_INITIALIZED, c"initialization error"),
        (CUDA_ERROR_OUT_OF_MEMORY, c"out of memory"),
    ] {
        let mut text = std::ptr::null();
        ok!(cuda.cuGetErrorString(code, &mut text));
        // SAFETY: the driver returned a text that is never freed.
        assert_eq!(unsafe { std::ffi::CStr::from_ptr(text) }, expected);
    }
    // Contexts.
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuCtxCreate_v2(null_mut(), 0, 0));
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuCtxCreate_v2(&mut made, 0x1000, 0));
    fails!(CUDA_ERROR_INVALID_DEVICE, cuda.cuCtxCreate_v2(&mut made, 0, 7));
    ok!(cuda.cuCtxCreate_v2(&mut made, 0, 0));
    fails!(CUDA_ERROR_INVALID_CONTEXT, cuda.cuCtxPushCurrent_v2(8 as CUcontext));
    fails!(CUDA_ERROR_INVALID_CONTEXT, cuda.cuCtxSetCurrent((made as usize + 8) as CUcontext));
    fails!(CUDA_ERROR_INVALID_CONTEXT, cuda.cuDevicePrimaryCtxRelease_v2(0));
    // Functions.
    let (mut function, image) = (null_mut(), c".version 8.0\n.target sm_80\n.entry there() { ret; }");
    ok!(cuda.cuModuleLoadData(&mut module, image.as_ptr().cast()));
    fails!(CUDA_ERROR_NOT_FOUND, cuda.cuModuleGetFunction(&mut function, module, c"not_there".as_ptr()));
    fails!(
        CUDA_ERROR_INVALID_HANDLE,
        cuda.cuModuleGetFunction(&mut function, 64 as CUmodule, c"there".as_ptr())
    );
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuModuleLoadData(&mut module, null_mut()));
    fails!(CUDA_ERROR_FILE_NOT_FOUND, cuda.cuModuleLoad(&mut module, c"/nonexistent".as_ptr()));
    ok!(cuda.cuModuleGetFunction(&mut function, module, c"there".as_ptr()));
    let none = null_mut();
    let run = |function, grid: u32, block: u32, stream: CUstream| {
        // SAFETY: no pointer is passed.
        unsafe { cuda.cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, stream, none, none) }
    };
    assert_eq!(run(function, 1, 1, null_mut()), CUDA_SUCCESS);
    assert_eq!(run(function, 0, 1, null_mut()), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(run(function, 1, 1025, null_mut()), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(run(function, 1, 1, 4096 as CUstream), CUDA_ERROR_INVALID_HANDLE);
    assert_eq!(run(null_mut(), 1, 1, null_mut()), CUDA_ERROR_INVALID_HANDLE);
    assert_eq!(run(0xdead_beef as CUfunction, 1, 1, null_mut()), CUDA_ERROR_INVALID_HANDLE);
    // Streams and events.
    let (mut stream, mut event, mut took) = (null_mut(), null_mut(), 0.0);
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuStreamCreate(&mut stream, 8));
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuEventCreate(&mut event, 64));
    ok!(cuda.cuStreamCreate(&mut stream, 0));
    ok!(cuda.cuEventCreate(&mut event, CU_EVENT_DISABLE_TIMING));
    ok!(cuda.cuEventQuery(event));
    ok!(cuda.cuEventRecord(event, stream));
    fails!(CUDA_ERROR_INVALID_HANDLE, cuda.cuEventElapsedTime(&mut took, event, event));
    ok!(cuda.cuEventDestroy_v2(event));
    fails!(CUDA_ERROR_INVALID_HANDLE, cuda.cuEventDestroy_v2(event));
    fails!(CUDA_ERROR_INVALID_HANDLE, cuda.cuEventSynchronize(event));
    fails!(CUDA_ERROR_INVALID_HANDLE, cuda.cuStreamDestroy_v2(null_mut()));
    ok!(cuda.cuStreamDestroy_v2(stream));
    fails!(CUDA_ERROR_INVALID_HANDLE, cuda.cuStreamDestroy_v2(stream));
    // Memory.
    memory(&cuda);
    let wide = |bytes| {
        // SAFETY: no pointer is passed.
        unsafe { cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, bytes, null_mut(), none, none) }
    };
    assert_eq!(wide(48 << 10), CUDA_SUCCESS);
    assert_eq!(wide((48 << 10) + 1), CUDA_ERROR_INVALID_VALUE);
    ok!(cuda.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 60_000));
    assert_eq!(wide(60_000), CUDA_SUCCESS);
    // A function of another GPU's context cannot be launched here.
    let mut second = null_mut();
    ok!(cuda.cuCtxCreate_v2(&mut second, 0, 1));
    assert_eq!(run(function, 1, 1, null_mut()), CUDA_ERROR_INVALID_HANDLE);
    // Destroying a context destroys its objects.
    ok!(cuda.cuCtxDestroy_v2(second));
    fails!(CUDA_ERROR_CONTEXT_IS_DESTROYED, cuda.cuCtxDestroy_v2(second));
    ok!(cuda.cuCtxDestroy_v2(made));
    assert_eq!(run(function, 1, 1, null_mut()), CUDA_ERROR_INVALID_CONTEXT);
    fails!(CUDA_ERROR_INVALID_HANDLE, cuda.cuModuleUnload(module));
    // Error texts.
    let mut text = std::ptr::null();
    ok!(cuda.cuGetErrorName(CUDA_ERROR_OUT_OF_MEMORY, &mut text));
    // SAFETY: the driver returned a NUL-terminated string.
    assert_eq!(unsafe { std::ffi::CStr::from_ptr(text) }, c"CUDA_ERROR_OUT_OF_MEMORY");
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuGetErrorString(123_456, &mut text));
    assert!(text.is_null());
}

fn memory(cuda: &CudaLibrary) {
    let (mut pointer, mut free, mut total) = (0, 0, 0);
    ok!(cuda.cuMemGetInfo_v2(&mut free, &mut total));
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuMemAlloc_v2(&mut pointer, 0));
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuMemAlloc_v2(null_mut(), 1));
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAlloc_v2(&mut pointer, total));
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAlloc_v2(&mut pointer, usize::MAX - 4096));
    // Blocks are 2 MiB: the remainder below a block cannot be allocated.
    ok!(cuda.cuMemAlloc_v2(&mut pointer, free / (2 << 20) * (2 << 20)));
    let mut other = 0;
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAlloc_v2(&mut other, 1));
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuMemFree_v2(pointer + 512));
    ok!(cuda.cuMemFree_v2(pointer));
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuMemFree_v2(pointer));
    let mut bytes = [1u8; 64];
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 32));
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), 4096, 64));
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuMemcpyHtoD_v2(pointer, bytes.as_ptr().cast(), 4 << 20));
    ok!(cuda.cuMemFree_v2(pointer));
    let (mut left, mut size) = (0, 0);
    ok!(cuda.cuMemGetInfo_v2(&mut left, &mut size));
    assert_eq!((left, size), (free, total));
}
