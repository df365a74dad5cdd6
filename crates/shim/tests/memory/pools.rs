//! Tests of stream-ordered memory and its pools.

use super::*;

const MIB_SIZE: usize = MIB as usize;

#[test]
fn pools_are_counted_by_what_they_have_reserved() {
    run_role("pools default", 256 * MIB);
}

#[test]
fn allocation_succeeds_when_the_pool_cannot_grow() {
    run_role("pools tight", 50 * MIB);
}

#[test]
fn destroyed_pool_is_counted_until_its_last_allocation() {
    run_role("pools own", 256 * MIB);
}

#[test]
fn linear_memory_can_be_freed_in_stream_order() {
    run_role("pools plain", 64 * MIB);
}

#[test]
fn capture_of_another_stream_is_not_invalidated() {
    run_role("pools captures", 64 * MIB);
}

pub fn client(arguments: &[&str]) {
    match arguments {
        ["default"] => default(),
        ["tight"] => tight(),
        ["own"] => own(),
        ["plain"] => plain(),
        ["captures"] => captures(),
        other => panic!("{other:?}"),
    }
}

fn stream(cuda: &CudaLibrary) -> CUstream {
    let mut stream = null_mut();
    ok!(cuda.cuStreamCreate(&mut stream, 1));
    stream
}

fn default() {
    let (cuda, _, observer) = start();
    let stream = stream(&cuda);
    for size in [1, 5 * MIB_SIZE, 33 * MIB_SIZE, 100_000] {
        let (mut held, mut pointer) = (Vec::new(), 0);
        while held.len() < 200 {
            match result_of!(cuda.cuMemAllocAsync(&mut pointer, size, stream)) {
                CUDA_SUCCESS => held.push(pointer),
                CUDA_ERROR_OUT_OF_MEMORY => break,
                other => panic!("{:?}", name(other)),
            }
            observer.assert_exact("after an allocation");
        }
        assert!(!held.is_empty() && observer.used(0) <= CONTEXT_BYTES + 256 * MIB);
        for pointer in held {
            ok!(cuda.cuMemFreeAsync(pointer, stream));
        }
        observer.assert_exact("freed and not yet synchronized");
        ok!(cuda.cuStreamSynchronize(stream));
        observer.assert_exact("synchronized");
        assert_eq!(observer.used(0), CONTEXT_BYTES);
    }
    // What a pool retains stays counted until it is trimmed.
    let (mut pool, mut pointer) = (null_mut(), 0);
    ok!(cuda.cuDeviceGetDefaultMemPool(&mut pool, 0));
    let mut keep = u64::MAX;
    ok!(cuda.cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, (&raw mut keep).cast()));
    ok!(cuda.cuMemAllocAsync(&mut pointer, 250 * MIB_SIZE, stream));
    ok!(cuda.cuMemFreeAsync(pointer, stream));
    ok!(cuda.cuCtxSynchronize());
    observer.assert_exact("kept");
    assert_eq!(observer.used(0), CONTEXT_BYTES + 256 * MIB);
    // It is reused although nothing else is left.
    ok!(cuda.cuMemAllocAsync(&mut pointer, 200 * MIB_SIZE, stream));
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAllocAsync(&mut 0, 100 * MIB_SIZE, stream));
    ok!(cuda.cuMemFree_v2(pointer));
    ok!(cuda.cuMemPoolTrimTo(pool, 0));
    observer.assert_exact("trimmed");
    assert_eq!(observer.used(0), CONTEXT_BYTES);
}

fn tight() {
    let (cuda, _, observer) = start();
    let stream = stream(&cuda);
    let (mut held, mut pointer) = (Vec::new(), 0);
    // A chunk of 32 MiB fits once.
    ok!(cuda.cuMemAllocAsync(&mut pointer, 30 * MIB_SIZE, stream));
    held.push(pointer);
    for _ in 0..4 {
        ok!(cuda.cuMemAllocAsync(&mut pointer, 4 * MIB_SIZE, stream));
        held.push(pointer);
        observer.assert_exact("beside the pool");
    }
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAllocAsync(&mut pointer, 4 * MIB_SIZE, stream));
    for pointer in held {
        ok!(cuda.cuMemFreeAsync(pointer, stream));
    }
    ok!(cuda.cuStreamSynchronize(stream));
    observer.assert_exact("at the end");
    assert_eq!(observer.used(0), CONTEXT_BYTES);
}

fn own() {
    let (cuda, context, observer) = start();
    let stream = stream(&cuda);
    let (mut pool, mut one, mut two) = (null_mut(), 0, 0);
    let properties = CUmemPoolProps {
        allocType: CU_MEM_ALLOCATION_TYPE_PINNED,
        location: CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id: 0 },
        ..CUmemPoolProps::default()
    };
    for _ in 0..3 {
        ok!(cuda.cuMemPoolCreate(&mut pool, &properties));
        ok!(cuda.cuMemAllocFromPoolAsync(&mut one, 40 * MIB_SIZE, pool, stream));
        ok!(cuda.cuMemAllocFromPoolAsync(&mut two, 3 * MIB_SIZE, pool, stream));
        observer.assert_exact("in a pool");
        fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAllocFromPoolAsync(&mut 0, 200 * MIB_SIZE, pool, stream));
        ok!(cuda.cuMemFreeAsync(one, stream));
        ok!(cuda.cuMemPoolDestroy(pool));
        ok!(cuda.cuMemFreeAsync(two, stream));
        ok!(cuda.cuCtxSynchronize());
        observer.assert_exact("after the pool");
        assert_eq!(observer.used(0), CONTEXT_BYTES);
    }
    // The device's pool may be one of the program's.
    ok!(cuda.cuMemPoolCreate(&mut pool, &properties));
    ok!(cuda.cuDeviceSetMemPool(0, pool));
    ok!(cuda.cuMemAllocAsync(&mut one, 40 * MIB_SIZE, stream));
    observer.assert_exact("in the device's pool");
    // It is freed with the context.
    ok!(cuda.cuCtxDestroy_v2(context));
    observer.assert_exact("nothing");
    assert_eq!(observer.used(0), 0);
}

fn plain() {
    let (cuda, _, observer) = start();
    let stream = stream(&cuda);
    let (mut large, mut small) = (0, 0);
    for _ in 0..3 {
        ok!(cuda.cuMemAlloc_v2(&mut large, 10 * MIB_SIZE));
        ok!(cuda.cuMemAlloc_v2(&mut small, 1000));
        ok!(cuda.cuMemFreeAsync(large, stream));
        ok!(cuda.cuMemFreeAsync(small, stream));
        ok!(cuda.cuStreamSynchronize(stream));
        observer.assert_exact("synchronized");
        assert_eq!(observer.used(0), CONTEXT_BYTES);
    }
    ok!(cuda.cuMemAlloc_v2(&mut large, 64 * MIB_SIZE));
    ok!(cuda.cuMemFreeAsync(large, stream));
    // Without synchronization, freed memory can be allocated again.
    while result_of!(cuda.cuStreamQuery(stream)) != CUDA_SUCCESS {}
    ok!(cuda.cuMemAlloc_v2(&mut large, 64 * MIB_SIZE));
    observer.assert_exact("again");
}

/// When memory runs short, the shim checks what is free by now, but not if that would invalidate the program's capture.
fn captures() {
    let (cuda, _, observer) = start();
    let (stream, other) = (stream(&cuda), stream(&cuda));
    let (mut pointer, mut graph) = (0, null_mut());
    for size in [60 * MIB_SIZE, 40 * MIB_SIZE] {
        ok!(cuda.cuMemAlloc_v2(&mut pointer, size));
        ok!(cuda.cuMemFreeAsync(pointer, stream));
        while result_of!(cuda.cuStreamQuery(stream)) != CUDA_SUCCESS {}
        ok!(cuda.cuStreamBeginCapture_v2(other, CU_STREAM_CAPTURE_MODE_GLOBAL));
        // Less than what is left, the second time; but a pool would take more.
        fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAllocAsync(&mut pointer, 20 * MIB_SIZE, stream));
        ok!(cuda.cuStreamEndCapture(other, &mut graph));
        assert!(!graph.is_null());
        ok!(cuda.cuMemAllocAsync(&mut pointer, 20 * MIB_SIZE, stream));
        ok!(cuda.cuMemFreeAsync(pointer, stream));
        ok!(cuda.cuStreamSynchronize(stream));
        observer.assert_exact("after the capture");
        assert_eq!(observer.used(0), CONTEXT_BYTES);
    }
}
