//! Memory with an address.

use super::*;
use partage_region::RegionPolicy;

const MIB_SIZE: usize = MIB as usize;

#[test]
fn linear_memory_is_granted_up_to_the_limit() {
    run_role("linear linear", 64 * MIB);
}

#[test]
fn small_allocations_share_blocks() {
    run_role("linear small", 6 * MIB);
}

#[test]
fn pitched_memory_is_counted_with_its_gaps() {
    run_role("linear pitched", 64 * MIB);
}

#[test]
fn managed_memory_is_counted_as_a_whole() {
    run_role("linear managed", 64 * MIB);
}

#[test]
fn invalid_requests_get_the_drivers_answer() {
    run_role("linear misuse", 64 * MIB);
}

#[test]
fn program_sees_the_limit_as_total_memory() {
    run_role("linear info", 64 * MIB);
}

#[test]
fn program_without_a_limit_sees_the_whole_gpu() {
    let node = node();
    TestContainer::with_memory(&node, u64::MAX).run_role("linear whole");
}

#[test]
fn oversubscribed_memory_is_placed_on_the_host() {
    let node = node();
    let policy = RegionPolicy { oversubscribe: true, ..RegionPolicy::default() };
    TestContainer::new(&node, &container::shares(&node, CONTEXT_BYTES + 64 * MIB), policy)
        .run_role("linear beyond");
}

#[test]
fn ungranted_gpu_is_refused() {
    let node = node();
    let shares = &container::shares(&node, 1 << 30)[..1];
    TestContainer::new(&node, shares, RegionPolicy::default()).run_role("linear foreign");
}

#[test]
fn missing_region_refuses_memory() {
    let node = node();
    let container = TestContainer::with_memory(&node, 1 << 30);
    std::fs::remove_file(container.region().join("limits")).unwrap();
    container.run_role("linear refused");
}

pub fn client(arguments: &[&str]) {
    match arguments {
        ["linear"] => linear(),
        ["small"] => small(),
        ["pitched"] => pitched(),
        ["managed"] => managed(),
        ["misuse"] => misuse(),
        ["info"] => info(),
        ["whole"] => whole(),
        ["beyond"] => beyond(),
        ["foreign"] => foreign(),
        ["refused"] => refused(),
        other => panic!("{other:?}"),
    }
}

fn linear() {
    let (cuda, _, observer) = start();
    observer.assert_exact("with a context");
    // Sizes that the driver rounds up to two MiB count as two MiB.
    for size in [MIB_SIZE, MIB_SIZE + 1, 2 * MIB_SIZE, 2 * MIB_SIZE + 1, 31 * MIB_SIZE] {
        let (mut held, mut pointer) = (Vec::new(), 0);
        while result_of!(cuda.cuMemAlloc_v2(&mut pointer, size)) == CUDA_SUCCESS {
            held.push(pointer);
            observer.assert_exact("after an allocation");
        }
        assert_eq!(held.len(), 64 / (size.div_ceil(2 * MIB_SIZE) * 2));
        fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAlloc_v2(&mut pointer, size));
        for pointer in held {
            ok!(cuda.cuMemFree_v2(pointer));
            observer.assert_exact("after a free");
        }
    }
    let mut pointer = 0;
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAlloc_v2(&mut pointer, 64 * MIB_SIZE + 1));
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 64 * MIB_SIZE));
    observer.assert_exact("full");
    ok!(cuda.cuMemFree_v2(pointer));
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuMemFree_v2(pointer));
    observer.assert_exact("empty");
}

fn small() {
    let (cuda, _, observer) = start();
    let (mut held, mut pointer) = (Vec::new(), 0);
    let sizes = [1, 512, 513, 4096, 100_000, 300_000, MIB_SIZE - 512];
    let mut random = 7u64;
    for round in 0..1500 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        if random >> 62 == 0 && !held.is_empty() {
            ok!(cuda.cuMemFree_v2(held.swap_remove((random >> 20) as usize % held.len())));
        } else if round % 300 == 299 {
            held.drain(..).for_each(|pointer| ok!(cuda.cuMemFree_v2(pointer)));
        } else {
            let size = sizes[(random >> 40) as usize % sizes.len()];
            match result_of!(cuda.cuMemAlloc_v2(&mut pointer, size)) {
                CUDA_SUCCESS => held.push(pointer),
                CUDA_ERROR_OUT_OF_MEMORY => assert_eq!(observer.used(0), CONTEXT_BYTES + 6 * MIB),
                other => panic!("{:?}", name(other)),
            }
        }
        observer.assert_exact("in between");
    }
    held.drain(..).for_each(|pointer| ok!(cuda.cuMemFree_v2(pointer)));
    assert_eq!(observer.true_usage(0), CONTEXT_BYTES);
    // If only full blocks are left, the smallest piece is refused; if one has room, it is not.
    for _ in 0..3 {
        ok!(cuda.cuMemAlloc_v2(&mut pointer, MIB_SIZE - 512));
        held.push(pointer);
        ok!(cuda.cuMemAlloc_v2(&mut pointer, MIB_SIZE - 512));
        held.push(pointer);
    }
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAlloc_v2(&mut pointer, 1));
    ok!(cuda.cuMemFree_v2(held[0]));
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 1));
    observer.assert_exact("full");
}

fn pitched() {
    let (cuda, _, observer) = start();
    let (mut held, mut pointer, mut pitch) = (Vec::new(), 0, 0);
    for (width, height) in [(1, 5000), (513, 4096), (4000, 700), (100, 3)] {
        while held.len() < 100
            && result_of!(cuda.cuMemAllocPitch_v2(&mut pointer, &mut pitch, width, height, 4)) == CUDA_SUCCESS
        {
            assert_eq!(pitch, width.next_multiple_of(512));
            held.push(pointer);
            observer.assert_exact("after an allocation");
        }
        for pointer in held.drain(..) {
            ok!(cuda.cuMemFree_v2(pointer));
            observer.assert_exact("after a free");
        }
    }
    fails!(
        CUDA_ERROR_OUT_OF_MEMORY,
        cuda.cuMemAllocPitch_v2(&mut pointer, &mut pitch, 1, 64 * MIB_SIZE / 512 + 1, 4)
    );
    ok!(cuda.cuMemAllocPitch_v2(&mut pointer, &mut pitch, 1, 64 * MIB_SIZE / 512, 4));
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAlloc_v2(&mut pointer, 1));
}

fn managed() {
    let (cuda, _, observer) = start();
    let (mut one, mut two) = (0, 0);
    let none = null_mut();
    ok!(cuda.cuMemAllocManaged(&mut one, 50 * MIB_SIZE, CU_MEM_ATTACH_GLOBAL));
    assert_eq!(observer.used(0), CONTEXT_BYTES + 50 * MIB);
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAllocManaged(&mut two, 15 * MIB_SIZE, CU_MEM_ATTACH_GLOBAL));
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAlloc_v2(&mut two, 15 * MIB_SIZE));
    ok!(cuda.cuMemAllocManaged(&mut two, 14 * MIB_SIZE, CU_MEM_ATTACH_GLOBAL));
    // All of it may be moved to the GPU.
    ok!(cuda.cuMemPrefetchAsync(one, 50 * MIB_SIZE, 0, none));
    ok!(cuda.cuMemPrefetchAsync(two, 14 * MIB_SIZE, 0, none));
    ok!(cuda.cuCtxSynchronize());
    observer.assert_exact("on the card");
    ok!(cuda.cuMemFree_v2(one));
    ok!(cuda.cuMemFree_v2(two));
    observer.assert_exact("empty");
}

fn misuse() {
    let cuda = CudaLibrary::started();
    let (mut pointer, mut context) = (0, null_mut());
    fails!(CUDA_ERROR_INVALID_CONTEXT, cuda.cuMemAlloc_v2(&mut pointer, MIB_SIZE));
    fails!(CUDA_ERROR_INVALID_CONTEXT, cuda.cuMemAlloc_v2(&mut pointer, 1 << 40));
    fails!(CUDA_ERROR_INVALID_CONTEXT, cuda.cuMemGetInfo_v2(&mut 0, &mut 0));
    fails!(CUDA_ERROR_INVALID_CONTEXT, cuda.cuMemGetInfo_v2(&mut 0, null_mut()));
    let observer = Observer::new();
    observer.assert_exact("at the beginning");
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuMemAlloc_v2(null_mut(), MIB_SIZE));
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuMemAlloc_v2(&mut pointer, 0));
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAlloc_v2(&mut pointer, usize::MAX));
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuMemAllocPitch_v2(&mut pointer, &mut 0, 1, 1, 5));
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAllocPitch_v2(&mut pointer, &mut 0, usize::MAX, 2, 4));
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuMemAllocManaged(&mut pointer, MIB_SIZE, 77));
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuMemAlloc(&mut 0, 1 << 20));
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuMemFree_v2(0));
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuMemFree_v2(0xdead_0000));
    fails!(CUDA_ERROR_INVALID_DEVICE, cuda.cuDeviceTotalMem_v2(&mut 0, 2));
    fails!(CUDA_ERROR_INVALID_DEVICE, cuda.cuCtxCreate_v2(&mut context, 0, 9));
    observer.assert_exact("after nothing");
}

fn read(cuda: &CudaLibrary) -> (u64, u64) {
    let (mut free, mut total) = (0, 0);
    ok!(cuda.cuMemGetInfo_v2(&mut free, &mut total));
    (free as u64, total as u64)
}

fn info() {
    let (cuda, _, _) = start();
    let limit = CONTEXT_BYTES + 64 * MIB;
    let mut total = 0;
    ok!(cuda.cuDeviceTotalMem_v2(&mut total, 1));
    assert_eq!(total as u64, limit);
    let initially = read(&cuda);
    assert_eq!(initially, (64 * MIB, limit));
    let mut pointer = 0;
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 10 * MIB_SIZE));
    assert_eq!(read(&cuda), (54 * MIB, limit));
    let (mut free, mut all) = (0, 0);
    ok!(cuda.cuMemGetInfo(&mut free, &mut all));
    assert_eq!((u64::from(free), u64::from(all)), (54 * MIB, limit));
    // Only one of the two values, as some programs request it.
    (free, all, total) = (0, 0, 0);
    ok!(cuda.cuMemGetInfo(&mut free, null_mut()));
    ok!(cuda.cuMemGetInfo(null_mut(), &mut all));
    assert_eq!((u64::from(free), u64::from(all)), (54 * MIB, limit));
    let mut left = 0;
    ok!(cuda.cuMemGetInfo_v2(&mut left, null_mut()));
    ok!(cuda.cuMemGetInfo_v2(null_mut(), &mut total));
    ok!(cuda.cuMemGetInfo_v2(null_mut(), null_mut()));
    assert_eq!((left as u64, total as u64), (54 * MIB, limit));
    ok!(cuda.cuMemFree_v2(pointer));
    // Free memory is the initial value again after everything was freed.
    assert_eq!(read(&cuda), initially);
}

fn whole() {
    let (cuda, _, observer) = start();
    let (free, total) = read(&cuda);
    assert!(total > 39 << 30 && free < total);
    let mut pointer = 0;
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 10 << 30));
    observer.assert_exact("without a limit");
    assert_eq!(read(&cuda), (free - (10 << 30), total));
}

fn beyond() {
    let (cuda, _, observer) = start();
    let (mut pointer, mut held) = (0, Vec::new());
    for _ in 0..5 {
        ok!(cuda.cuMemAlloc_v2(&mut pointer, 30 * MIB_SIZE));
        held.push(pointer);
        observer.assert_exact("in between");
    }
    assert_eq!(observer.true_usage(0), CONTEXT_BYTES + 60 * MIB);
    // It stays on the host.
    let (last, none) = (held[4], null_mut());
    let device = CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id: 0 };
    let host = CUmemLocation { type_: CU_MEM_LOCATION_TYPE_HOST, id: 0 };
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemPrefetchAsync(last, 30 * MIB_SIZE, 0, none));
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemPrefetchAsync_ptsz(last + 5, 1, 0, none));
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemPrefetchAsync_v2(last, MIB_SIZE, device, 0, none));
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemPrefetchAsync_v2_ptsz(last, MIB_SIZE, device, 0, none));
    ok!(cuda.cuMemPrefetchAsync(last, 30 * MIB_SIZE, -1, none));
    ok!(cuda.cuMemPrefetchAsync_v2(last, MIB_SIZE, host, 0, none));
    ok!(cuda.cuCtxSynchronize());
    observer.assert_exact("not prefetched");
    // The driver may not be advised to move it to the GPU, or to copy it there, either.
    for advice in [
        CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
        CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION,
        CU_MEM_ADVISE_SET_READ_MOSTLY,
    ] {
        fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAdvise(last + 5, 1, advice, 0));
        fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAdvise_v2(last, 30 * MIB_SIZE, advice, device));
    }
    ok!(cuda.cuMemAdvise(last, MIB_SIZE, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, -1));
    ok!(cuda.cuMemAdvise_v2(last, MIB_SIZE, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, host));
    ok!(cuda.cuMemAdvise(last, MIB_SIZE, CU_MEM_ADVISE_SET_ACCESSED_BY, 0));
    // Managed memory within the limit is counted, and may be moved by the program.
    let mut managed = 0;
    ok!(cuda.cuMemAllocManaged(&mut managed, 2 * MIB_SIZE, CU_MEM_ATTACH_GLOBAL));
    ok!(cuda.cuMemAdvise(managed, MIB_SIZE, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, 0));
    ok!(cuda.cuMemFree_v2(managed));
    held.into_iter().for_each(|pointer| ok!(cuda.cuMemFree_v2(pointer)));
    observer.assert_exact("empty");
}

fn foreign() {
    let (cuda, _, observer) = start();
    let (mut context, mut pointer) = (null_mut(), 0);
    fails!(CUDA_ERROR_NOT_PERMITTED, cuda.cuCtxCreate_v2(&mut context, 0, 1));
    fails!(CUDA_ERROR_NOT_PERMITTED, cuda.cuDevicePrimaryCtxRetain(&mut context, 1));
    fails!(CUDA_ERROR_NOT_PERMITTED, cuda.cuDeviceTotalMem_v2(&mut 0, 1));
    ok!(cuda.cuMemAlloc_v2(&mut pointer, MIB_SIZE));
    observer.assert_exact("with one card");
}

fn refused() {
    let cuda = CudaLibrary::started();
    let (mut context, mut pointer) = (null_mut(), 0);
    fails!(CUDA_ERROR_NOT_PERMITTED, cuda.cuCtxCreate_v2(&mut context, 0, 0));
    fails!(CUDA_ERROR_NOT_PERMITTED, cuda.cuDevicePrimaryCtxRetain(&mut context, 0));
    fails!(CUDA_ERROR_NOT_PERMITTED, cuda.cuMemAlloc_v2(&mut pointer, MIB_SIZE));
    fails!(CUDA_ERROR_NOT_PERMITTED, cuda.cuMemGetInfo_v2(&mut 0, &mut 0));
    // Calls that allocate nothing work as usual.
    let mut count = 0;
    ok!(cuda.cuDeviceGetCount(&mut count));
    assert_eq!(count, 2);
}
