//! Contexts, and what is freed with them.

use super::*;

const MIB_SIZE: usize = MIB as usize;

#[test]
fn contexts_are_counted() {
    run_role("contexts made", CONTEXT_BYTES);
}

#[test]
fn primary_context_is_counted_once() {
    run_role("contexts primary", 64 * MIB);
}

#[test]
fn green_context_retains_the_primary_one() {
    run_role("contexts green", 64 * MIB);
}

#[test]
fn destroyed_context_releases_its_contents() {
    run_role("contexts contents", CONTEXT_BYTES + 64 * MIB);
}

#[test]
fn context_beyond_the_limit_is_refused() {
    let node = node();
    TestContainer::with_memory(&node, CONTEXT_BYTES - 1).run_role("contexts none");
}

#[test]
fn heaps_are_counted_with_their_context() {
    run_role("contexts heaps", 64 * MIB);
}

pub fn client(arguments: &[&str]) {
    match arguments {
        ["made"] => made(),
        ["primary"] => primary(),
        ["green"] => green(),
        ["contents"] => contents(),
        ["none"] => none(),
        ["heaps"] => heaps(),
        other => panic!("{other:?}"),
    }
}

fn made() {
    let (cuda, first, observer) = start();
    let (mut second, mut third) = (null_mut(), null_mut());
    for _ in 0..3 {
        ok!(cuda.cuCtxCreate_v3(&mut second, null_mut(), 0, 0, 0));
        observer.assert_exact("two contexts");
        fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuCtxCreate_v2(&mut third, 0, 0));
        // Each GPU has its own limit.
        ok!(cuda.cuCtxCreate_v2(&mut third, 0, 1));
        observer.assert_exact("three contexts");
        ok!(cuda.cuCtxAttach(&mut third, 0));
        ok!(cuda.cuCtxDetach(third));
        observer.assert_exact("attached and detached");
        ok!(cuda.cuCtxDetach(third));
        observer.assert_exact("detached again");
        ok!(cuda.cuCtxDestroy_v2(second));
        observer.assert_exact("one context");
        fails!(CUDA_ERROR_CONTEXT_IS_DESTROYED, cuda.cuCtxDestroy_v2(second));
    }
    ok!(cuda.cuCtxDestroy_v2(first));
    assert_eq!(observer.true_usage(0), 0);
    observer.assert_exact("none");
}

fn primary() {
    let cuda = CudaLibrary::started();
    let observer = Observer::new();
    let (mut one, mut two, mut pointer) = (null_mut(), null_mut(), 0);
    for _ in 0..2 {
        ok!(cuda.cuDevicePrimaryCtxRetain(&mut one, 0));
        observer.assert_exact("retained");
        ok!(cuda.cuDevicePrimaryCtxRetain(&mut two, 0));
        observer.assert_exact("twice");
        assert_eq!((one, observer.used(0)), (two, CONTEXT_BYTES));
        ok!(cuda.cuCtxSetCurrent(one));
        ok!(cuda.cuMemAlloc_v2(&mut pointer, 64 * MIB_SIZE));
        ok!(cuda.cuDevicePrimaryCtxRelease_v2(0));
        observer.assert_exact("released once");
        ok!(cuda.cuDevicePrimaryCtxRelease_v2(0));
        observer.assert_exact("released");
        assert_eq!(observer.used(0), 0);
        fails!(CUDA_ERROR_INVALID_CONTEXT, cuda.cuDevicePrimaryCtxRelease_v2(0));
    }
    ok!(cuda.cuDevicePrimaryCtxRetain(&mut one, 1));
    ok!(cuda.cuDevicePrimaryCtxRetain(&mut one, 1));
    ok!(cuda.cuCtxSetCurrent(one));
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 1));
    observer.assert_exact("before the reset");
    ok!(cuda.cuDevicePrimaryCtxReset_v2(1));
    observer.assert_exact("reset");
    assert_eq!(observer.used(1), 0);
}

fn green() {
    let cuda = CudaLibrary::started();
    let observer = Observer::new();
    let (mut all, mut descriptor, mut green) = (CUdevResource::default(), null_mut(), null_mut());
    ok!(cuda.cuDeviceGetDevResource(0, &mut all, CU_DEV_RESOURCE_TYPE_SM));
    ok!(cuda.cuDevResourceGenerateDesc(&mut descriptor, &mut all, 1));
    ok!(cuda.cuGreenCtxCreate(&mut green, descriptor, 0, CU_GREEN_CTX_DEFAULT_STREAM));
    observer.assert_exact("green");
    assert_eq!(observer.used(0), CONTEXT_BYTES);
    let mut context = null_mut();
    ok!(cuda.cuDevicePrimaryCtxRetain(&mut context, 0));
    observer.assert_exact("green and retained");
    ok!(cuda.cuGreenCtxDestroy(green));
    observer.assert_exact("retained");
    fails!(CUDA_ERROR_INVALID_CONTEXT, cuda.cuGreenCtxDestroy(green));
    ok!(cuda.cuDevicePrimaryCtxRelease_v2(0));
    observer.assert_exact("none");
    assert_eq!(observer.used(0), 0);
}

fn contents() {
    let (cuda, first, observer) = start();
    let (mut second, mut kept, mut pointer) = (null_mut(), 0, 0);
    ok!(cuda.cuMemAlloc_v2(&mut kept, 3 * MIB_SIZE));
    ok!(cuda.cuMemAlloc_v2(&mut kept, 1000));
    for _ in 0..3 {
        ok!(cuda.cuCtxCreate_v2(&mut second, 0, 0));
        for size in [20 * MIB_SIZE, MIB_SIZE, 5000, 1, 300_000] {
            ok!(cuda.cuMemAlloc_v2(&mut pointer, size));
        }
        ok!(cuda.cuMemAllocManaged(&mut pointer, 2 * MIB_SIZE, CU_MEM_ATTACH_GLOBAL));
        ok!(cuda.cuCtxDestroy_v2(second));
        observer.assert_exact("after the second context");
    }
    ok!(cuda.cuCtxSetCurrent(first));
    ok!(cuda.cuMemFree_v2(kept));
    observer.assert_exact("at the end");
}

fn none() {
    let cuda = CudaLibrary::started();
    let mut context = null_mut();
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuCtxCreate_v2(&mut context, 0, 0));
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuDevicePrimaryCtxRetain(&mut context, 0));
    let observer = Observer::new();
    observer.assert_exact("nothing");
    assert_eq!(observer.true_usage(0), 0);
}

fn heaps() {
    let (cuda, context, observer) = start();
    let (heap, buffer) = (CU_LIMIT_MALLOC_HEAP_SIZE, CU_LIMIT_PRINTF_FIFO_SIZE);
    // The size that every context has initially.
    let (mut initial, mut value) = (0, 0);
    ok!(cuda.cuCtxGetLimit(&mut initial, heap));
    ok!(cuda.cuCtxSetLimit(heap, initial));
    ok!(cuda.cuCtxSetLimit(heap, 1));
    ok!(cuda.cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 4096));
    observer.assert_exact("as before");
    assert_eq!(observer.used(0), CONTEXT_BYTES);
    for _ in 0..2 {
        ok!(cuda.cuCtxSetLimit(buffer, MIB_SIZE));
        ok!(cuda.cuCtxSetLimit(heap, initial + 60 * MIB_SIZE));
        observer.assert_exact("a large heap");
        assert_eq!(observer.used(0), CONTEXT_BYTES + 60 * MIB);
        fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuCtxSetLimit(heap, initial + 65 * MIB_SIZE));
        fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuCtxSetLimit(heap, usize::MAX));
        fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuCtxSetLimit(buffer, 10 * MIB_SIZE));
        ok!(cuda.cuCtxGetLimit(&mut value, heap));
        assert_eq!(value, initial + 60 * MIB_SIZE);
        observer.assert_exact("not larger");
        ok!(cuda.cuCtxSetLimit(heap, initial + 10 * MIB_SIZE + 1));
        ok!(cuda.cuCtxSetLimit(buffer, 10 * MIB_SIZE));
        observer.assert_exact("both");
    }
    assert!(observer.used(0) > CONTEXT_BYTES + 18 * MIB);
    ok!(cuda.cuCtxDestroy_v2(context));
    observer.assert_exact("gone");
    assert_eq!(observer.true_usage(0), 0);
    let mut primary = null_mut();
    for _ in 0..2 {
        ok!(cuda.cuDevicePrimaryCtxRetain(&mut primary, 0));
        ok!(cuda.cuCtxSetCurrent(primary));
        ok!(cuda.cuCtxSetLimit(heap, initial + 60 * MIB_SIZE));
        observer.assert_exact("a primary context's");
        ok!(cuda.cuDevicePrimaryCtxRelease_v2(0));
        observer.assert_exact("released");
        assert_eq!(observer.true_usage(0), 0);
    }
}
