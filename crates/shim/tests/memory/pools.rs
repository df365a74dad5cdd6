//! Memory in stream order.

use super::*;

const SIZE: usize = MIB as usize;

#[test]
fn pools_are_counted_by_what_they_have_reserved() {
    play("pools default", 256 * MIB);
}

#[test]
fn what_the_pool_cannot_take_is_had_all_the_same() {
    play("pools tight", 50 * MIB);
}

#[test]
fn pools_of_programs_count_until_their_last_piece() {
    play("pools own", 256 * MIB);
}

#[test]
fn plain_memory_can_be_freed_in_a_streams_order() {
    play("pools plain", 64 * MIB);
}

#[test]
fn a_capture_elsewhere_is_not_disturbed() {
    play("pools captures", 64 * MIB);
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

fn stream(cuda: &Cuda) -> CUstream {
    let mut stream = null_mut();
    ok!(cuda.cuStreamCreate(&mut stream, 1));
    stream
}

fn default() {
    let (cuda, _, observer) = start();
    let stream = stream(&cuda);
    for size in [1, 5 * SIZE, 33 * SIZE, 100_000] {
        let (mut held, mut pointer) = (Vec::new(), 0);
        while held.len() < 200 {
            match says!(cuda.cuMemAllocAsync(&mut pointer, size, stream)) {
                CUDA_SUCCESS => held.push(pointer),
                CUDA_ERROR_OUT_OF_MEMORY => break,
                other => panic!("{:?}", name(other)),
            }
            observer.exact("after an allocation");
        }
        assert!(!held.is_empty() && observer.used(0) <= CONTEXT + 256 * MIB);
        for pointer in held {
            ok!(cuda.cuMemFreeAsync(pointer, stream));
        }
        observer.exact("freed and not yet synchronised");
        ok!(cuda.cuStreamSynchronize(stream));
        observer.exact("synchronised");
        assert_eq!(observer.used(0), CONTEXT);
    }
    // What a pool was told to keep counts on, until it is told to give it up.
    let (mut pool, mut pointer) = (null_mut(), 0);
    ok!(cuda.cuDeviceGetDefaultMemPool(&mut pool, 0));
    let mut keep = u64::MAX;
    ok!(cuda.cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, (&raw mut keep).cast()));
    ok!(cuda.cuMemAllocAsync(&mut pointer, 250 * SIZE, stream));
    ok!(cuda.cuMemFreeAsync(pointer, stream));
    ok!(cuda.cuCtxSynchronize());
    observer.exact("kept");
    assert_eq!(observer.used(0), CONTEXT + 256 * MIB);
    // It is used again although nothing is left.
    ok!(cuda.cuMemAllocAsync(&mut pointer, 200 * SIZE, stream));
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAllocAsync(&mut 0, 100 * SIZE, stream));
    ok!(cuda.cuMemFree_v2(pointer));
    ok!(cuda.cuMemPoolTrimTo(pool, 0));
    observer.exact("trimmed");
    assert_eq!(observer.used(0), CONTEXT);
}

fn tight() {
    let (cuda, _, observer) = start();
    let stream = stream(&cuda);
    let (mut held, mut pointer) = (Vec::new(), 0);
    // A chunk of 32 MiB fits once.
    ok!(cuda.cuMemAllocAsync(&mut pointer, 30 * SIZE, stream));
    held.push(pointer);
    for _ in 0..4 {
        ok!(cuda.cuMemAllocAsync(&mut pointer, 4 * SIZE, stream));
        held.push(pointer);
        observer.exact("beside the pool");
    }
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAllocAsync(&mut pointer, 4 * SIZE, stream));
    for pointer in held {
        ok!(cuda.cuMemFreeAsync(pointer, stream));
    }
    ok!(cuda.cuStreamSynchronize(stream));
    observer.exact("at the end");
    assert_eq!(observer.used(0), CONTEXT);
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
        ok!(cuda.cuMemAllocFromPoolAsync(&mut one, 40 * SIZE, pool, stream));
        ok!(cuda.cuMemAllocFromPoolAsync(&mut two, 3 * SIZE, pool, stream));
        observer.exact("in a pool");
        fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAllocFromPoolAsync(&mut 0, 200 * SIZE, pool, stream));
        ok!(cuda.cuMemFreeAsync(one, stream));
        ok!(cuda.cuMemPoolDestroy(pool));
        ok!(cuda.cuMemFreeAsync(two, stream));
        ok!(cuda.cuCtxSynchronize());
        observer.exact("after the pool");
        assert_eq!(observer.used(0), CONTEXT);
    }
    // The device's pool may be one of the program's.
    ok!(cuda.cuMemPoolCreate(&mut pool, &properties));
    ok!(cuda.cuDeviceSetMemPool(0, pool));
    ok!(cuda.cuMemAllocAsync(&mut one, 40 * SIZE, stream));
    observer.exact("in the device's pool");
    // It goes with the context.
    ok!(cuda.cuCtxDestroy_v2(context));
    observer.exact("nothing");
    assert_eq!(observer.used(0), 0);
}

fn plain() {
    let (cuda, _, observer) = start();
    let stream = stream(&cuda);
    let (mut large, mut small) = (0, 0);
    for _ in 0..3 {
        ok!(cuda.cuMemAlloc_v2(&mut large, 10 * SIZE));
        ok!(cuda.cuMemAlloc_v2(&mut small, 1000));
        ok!(cuda.cuMemFreeAsync(large, stream));
        ok!(cuda.cuMemFreeAsync(small, stream));
        ok!(cuda.cuStreamSynchronize(stream));
        observer.exact("synchronised");
        assert_eq!(observer.used(0), CONTEXT);
    }
    ok!(cuda.cuMemAlloc_v2(&mut large, 64 * SIZE));
    ok!(cuda.cuMemFreeAsync(large, stream));
    // Nobody has synchronised, and what is free can be had.
    while says!(cuda.cuStreamQuery(stream)) != CUDA_SUCCESS {}
    ok!(cuda.cuMemAlloc_v2(&mut large, 64 * SIZE));
    observer.exact("again");
}

/// Where memory runs short, the shim looks what is free by now: but not where that spoils what the program captures.
fn captures() {
    let (cuda, _, observer) = start();
    let (stream, other) = (stream(&cuda), stream(&cuda));
    let (mut pointer, mut graph) = (0, null_mut());
    for size in [60 * SIZE, 40 * SIZE] {
        ok!(cuda.cuMemAlloc_v2(&mut pointer, size));
        ok!(cuda.cuMemFreeAsync(pointer, stream));
        while says!(cuda.cuStreamQuery(stream)) != CUDA_SUCCESS {}
        ok!(cuda.cuStreamBeginCapture_v2(other, CU_STREAM_CAPTURE_MODE_GLOBAL));
        // Less than what is left, the second time; but a pool would take more.
        fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAllocAsync(&mut pointer, 20 * SIZE, stream));
        ok!(cuda.cuStreamEndCapture(other, &mut graph));
        assert!(!graph.is_null());
        ok!(cuda.cuMemAllocAsync(&mut pointer, 20 * SIZE, stream));
        ok!(cuda.cuMemFreeAsync(pointer, stream));
        ok!(cuda.cuStreamSynchronize(stream));
        observer.exact("after the capture");
        assert_eq!(observer.used(0), CONTEXT);
    }
}
