//! Contexts, and what goes with them.

use super::*;

const SIZE: usize = MIB as usize;

#[test]
fn contexts_count() {
    play("contexts made", CONTEXT);
}

#[test]
fn primary_contexts_count_once() {
    play("contexts primary", 64 * MIB);
}

#[test]
fn green_contexts_stand_on_the_primary_one() {
    play("contexts green", 64 * MIB);
}

#[test]
fn what_is_in_a_context_goes_with_it() {
    play("contexts contents", CONTEXT + 64 * MIB);
}

#[test]
fn a_context_beyond_the_limit_is_refused() {
    let node = node();
    Container::with_memory(&node, CONTEXT - 1).play("contexts none");
}

#[test]
fn heaps_count_with_their_context() {
    play("contexts heaps", 64 * MIB);
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
        observer.exact("two contexts");
        fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuCtxCreate_v2(&mut third, 0, 0));
        // Each card has its own limit.
        ok!(cuda.cuCtxCreate_v2(&mut third, 0, 1));
        observer.exact("three contexts");
        ok!(cuda.cuCtxAttach(&mut third, 0));
        ok!(cuda.cuCtxDetach(third));
        observer.exact("attached and detached");
        ok!(cuda.cuCtxDetach(third));
        observer.exact("detached again");
        ok!(cuda.cuCtxDestroy_v2(second));
        observer.exact("one context");
        fails!(CUDA_ERROR_CONTEXT_IS_DESTROYED, cuda.cuCtxDestroy_v2(second));
    }
    ok!(cuda.cuCtxDestroy_v2(first));
    assert_eq!(observer.truth(0), 0);
    observer.exact("none");
}

fn primary() {
    let cuda = Cuda::started();
    let observer = Observer::new();
    let (mut one, mut two, mut pointer) = (null_mut(), null_mut(), 0);
    for _ in 0..2 {
        ok!(cuda.cuDevicePrimaryCtxRetain(&mut one, 0));
        observer.exact("retained");
        ok!(cuda.cuDevicePrimaryCtxRetain(&mut two, 0));
        observer.exact("twice");
        assert_eq!((one, observer.used(0)), (two, CONTEXT));
        ok!(cuda.cuCtxSetCurrent(one));
        ok!(cuda.cuMemAlloc_v2(&mut pointer, 64 * SIZE));
        ok!(cuda.cuDevicePrimaryCtxRelease_v2(0));
        observer.exact("released once");
        ok!(cuda.cuDevicePrimaryCtxRelease_v2(0));
        observer.exact("released");
        assert_eq!(observer.used(0), 0);
        fails!(CUDA_ERROR_INVALID_CONTEXT, cuda.cuDevicePrimaryCtxRelease_v2(0));
    }
    ok!(cuda.cuDevicePrimaryCtxRetain(&mut one, 1));
    ok!(cuda.cuDevicePrimaryCtxRetain(&mut one, 1));
    ok!(cuda.cuCtxSetCurrent(one));
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 1));
    observer.exact("before the reset");
    ok!(cuda.cuDevicePrimaryCtxReset_v2(1));
    observer.exact("reset");
    assert_eq!(observer.used(1), 0);
}

fn green() {
    let cuda = Cuda::started();
    let observer = Observer::new();
    let (mut all, mut descriptor, mut green) = (CUdevResource::default(), null_mut(), null_mut());
    ok!(cuda.cuDeviceGetDevResource(0, &mut all, CU_DEV_RESOURCE_TYPE_SM));
    ok!(cuda.cuDevResourceGenerateDesc(&mut descriptor, &mut all, 1));
    ok!(cuda.cuGreenCtxCreate(&mut green, descriptor, 0, CU_GREEN_CTX_DEFAULT_STREAM));
    observer.exact("green");
    assert_eq!(observer.used(0), CONTEXT);
    let mut context = null_mut();
    ok!(cuda.cuDevicePrimaryCtxRetain(&mut context, 0));
    observer.exact("green and retained");
    ok!(cuda.cuGreenCtxDestroy(green));
    observer.exact("retained");
    fails!(CUDA_ERROR_INVALID_CONTEXT, cuda.cuGreenCtxDestroy(green));
    ok!(cuda.cuDevicePrimaryCtxRelease_v2(0));
    observer.exact("none");
    assert_eq!(observer.used(0), 0);
}

fn contents() {
    let (cuda, first, observer) = start();
    let (mut second, mut kept, mut pointer) = (null_mut(), 0, 0);
    ok!(cuda.cuMemAlloc_v2(&mut kept, 3 * SIZE));
    ok!(cuda.cuMemAlloc_v2(&mut kept, 1000));
    for _ in 0..3 {
        ok!(cuda.cuCtxCreate_v2(&mut second, 0, 0));
        for size in [20 * SIZE, SIZE, 5000, 1, 300_000] {
            ok!(cuda.cuMemAlloc_v2(&mut pointer, size));
        }
        ok!(cuda.cuMemAllocManaged(&mut pointer, 2 * SIZE, CU_MEM_ATTACH_GLOBAL));
        ok!(cuda.cuCtxDestroy_v2(second));
        observer.exact("after the second context");
    }
    ok!(cuda.cuCtxSetCurrent(first));
    ok!(cuda.cuMemFree_v2(kept));
    observer.exact("at the end");
}

fn none() {
    let cuda = Cuda::started();
    let mut context = null_mut();
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuCtxCreate_v2(&mut context, 0, 0));
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuDevicePrimaryCtxRetain(&mut context, 0));
    let observer = Observer::new();
    observer.exact("nothing");
    assert_eq!(observer.truth(0), 0);
}

fn heaps() {
    let (cuda, context, observer) = start();
    let (heap, buffer) = (CU_LIMIT_MALLOC_HEAP_SIZE, CU_LIMIT_PRINTF_FIFO_SIZE);
    // As every context has it.
    let (mut initial, mut value) = (0, 0);
    ok!(cuda.cuCtxGetLimit(&mut initial, heap));
    ok!(cuda.cuCtxSetLimit(heap, initial));
    ok!(cuda.cuCtxSetLimit(heap, 1));
    ok!(cuda.cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 4096));
    observer.exact("as before");
    assert_eq!(observer.used(0), CONTEXT);
    for _ in 0..2 {
        ok!(cuda.cuCtxSetLimit(buffer, SIZE));
        ok!(cuda.cuCtxSetLimit(heap, initial + 60 * SIZE));
        observer.exact("a large heap");
        assert_eq!(observer.used(0), CONTEXT + 60 * MIB);
        fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuCtxSetLimit(heap, initial + 65 * SIZE));
        fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuCtxSetLimit(heap, usize::MAX));
        fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuCtxSetLimit(buffer, 10 * SIZE));
        ok!(cuda.cuCtxGetLimit(&mut value, heap));
        assert_eq!(value, initial + 60 * SIZE);
        observer.exact("not larger");
        ok!(cuda.cuCtxSetLimit(heap, initial + 10 * SIZE + 1));
        ok!(cuda.cuCtxSetLimit(buffer, 10 * SIZE));
        observer.exact("both");
    }
    assert!(observer.used(0) > CONTEXT + 18 * MIB);
    ok!(cuda.cuCtxDestroy_v2(context));
    observer.exact("gone");
    assert_eq!(observer.truth(0), 0);
    let mut primary = null_mut();
    for _ in 0..2 {
        ok!(cuda.cuDevicePrimaryCtxRetain(&mut primary, 0));
        ok!(cuda.cuCtxSetCurrent(primary));
        ok!(cuda.cuCtxSetLimit(heap, initial + 60 * SIZE));
        observer.exact("a primary context's");
        ok!(cuda.cuDevicePrimaryCtxRelease_v2(0));
        observer.exact("released");
        assert_eq!(observer.truth(0), 0);
    }
}
