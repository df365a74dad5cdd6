//! Tests of memory through the C functions, each in its own process and on its own node.

use super::super::context;
use super::super::exports::*;
use super::super::test_node;
use super::*;
use crate::state::UNIT;
use std::collections::BTreeSet;
use std::ptr::null_mut;

mod accounting;
mod copies;
mod sharing;

const MIB: usize = 1 << 20;
const INVALID_VALUE: u32 = CUDA_ERROR_INVALID_VALUE;

/// Calls a C function in an unsafe block and returns its status code.
macro_rules! call {
    ($call:expr) => {{
        // SAFETY: every pointer refers to a variable of the test that outlives the call.
        unsafe { $call }
    }};
}
use call;

/// Initializes the driver and opens a context on the first device.
fn open_context() -> CUcontext {
    assert_eq!(call!(cuInit(0)), 0);
    let mut context = null_mut();
    assert_eq!(call!(cuCtxCreate_v2(&mut context, 0, 0)), 0);
    context
}

fn free_bytes() -> usize {
    let (mut free, mut total) = (0, 0);
    assert_eq!(call!(cuMemGetInfo_v2(&mut free, &mut total)), 0);
    assert!(free <= total);
    free
}

fn allocate(bytes: usize) -> CUdeviceptr {
    let mut pointer = 0;
    assert_eq!(call!(cuMemAlloc_v2(&mut pointer, bytes)), 0);
    pointer
}

#[test]
fn misuse_returns_documented_errors() {
    test_node::run(|| {
        let mut pointer = 0;
        assert_eq!(call!(cuMemAlloc_v2(&mut pointer, 1)), CUDA_ERROR_NOT_INITIALIZED);
        assert_eq!(call!(cuInit(0)), 0);
        assert_eq!(call!(cuMemAlloc_v2(&mut pointer, 1)), CUDA_ERROR_INVALID_CONTEXT);
        let context = open_context();
        assert_eq!(call!(cuMemAlloc_v2(&mut pointer, 0)), INVALID_VALUE);
        assert_eq!(call!(cuMemAlloc_v2(null_mut(), 1)), INVALID_VALUE);
        assert_eq!(call!(cuMemAlloc_v2(&mut pointer, 41 << 30)), CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!(call!(cuMemAlloc_v2(&mut pointer, usize::MAX)), CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!(call!(cuMemAlloc_v2(&mut pointer, 1000)), 0);
        assert_eq!(pointer % 512, 0);
        for wrong in [0, 1, pointer + 1, pointer + 512, pointer - 512, u64::MAX] {
            assert_eq!(call!(cuMemFree_v2(wrong)), INVALID_VALUE, "{wrong:x}");
        }
        let (mut base, mut size) = (0, 0);
        assert_eq!(call!(cuMemGetAddressRange_v2(&mut base, &mut size, pointer + 999)), 0);
        assert_eq!((base, size), (pointer, 1000));
        assert_eq!(
            call!(cuMemGetAddressRange_v2(&mut base, &mut size, pointer + 1000)),
            CUDA_ERROR_NOT_FOUND
        );
        assert_eq!(call!(cuMemsetD8_v2(pointer, 1, 1001)), INVALID_VALUE);
        assert_eq!(call!(cuMemsetD32_v2(pointer + 2, 1, 1)), INVALID_VALUE);
        assert_eq!(call!(cuMemsetD8_v2(0x1000, 1, 1)), INVALID_VALUE);
        assert_eq!(call!(cuMemsetD8_v2(0x1000, 1, 0)), 0);
        // Freed from another context of the same device.
        let mut other = null_mut();
        assert_eq!(call!(cuCtxCreate_v2(&mut other, 0, 0)), 0);
        assert_eq!(call!(cuMemFree_v2(pointer)), 0);
        assert_eq!(call!(cuMemFree_v2(pointer)), INVALID_VALUE);
        // Destroying a context frees its memory.
        let kept = allocate(3 * MIB);
        assert_eq!(call!(cuCtxDestroy_v2(other)), 0);
        assert_eq!(call!(cuCtxSetCurrent(context)), 0);
        assert_eq!(call!(cuMemFree_v2(kept)), INVALID_VALUE);
    });
}

/// Programs query one of two values with null for the other.
#[test]
fn mem_get_info_accepts_null_outputs() {
    test_node::run(|| {
        open_context();
        let (mut free, mut total, mut left, mut all) = (0, 0, 0, 0);
        assert_eq!(call!(cuMemGetInfo_v2(&mut free, &mut total)), 0);
        assert_eq!(call!(cuMemGetInfo_v2(&mut left, null_mut())), 0);
        assert_eq!(call!(cuMemGetInfo_v2(null_mut(), &mut all)), 0);
        assert_eq!((left, all), (free, total));
        assert!(free > 0 && total > free);
        let (mut left, mut all) = (0, 0);
        assert_eq!(call!(cuMemGetInfo(&mut left, null_mut())), 0);
        assert_eq!(call!(cuMemGetInfo(null_mut(), &mut all)), 0);
        assert_eq!((left, all), (u32::MAX, u32::MAX));
        assert_eq!(call!(cuMemGetInfo_v2(null_mut(), null_mut())), 0);
    });
}

#[test]
fn free_memory_changes_in_blocks_up_to_capacity() {
    test_node::run(|| {
        open_context();
        let start = free_bytes();
        let small: Vec<_> = (0..100).map(|_| allocate(1000)).collect();
        assert_eq!(start - free_bytes(), 2 * MIB);
        let large = allocate(2 * MIB + 1);
        assert_eq!(start - free_bytes(), 6 * MIB);
        for pointer in small.into_iter().chain([large]) {
            assert_eq!(call!(cuMemFree_v2(pointer)), 0);
        }
        assert_eq!(free_bytes(), start);
        // The whole card, to the last block.
        let blocks = start / (2 * MIB);
        let most = allocate(blocks * 2 * MIB);
        assert!(free_bytes() < 2 * MIB);
        let mut one = 0;
        assert_eq!(call!(cuMemAlloc_v2(&mut one, 1)), CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!(call!(cuMemFree_v2(most)), 0);
        assert_eq!(free_bytes(), start);
        let (mut pitched, mut pitch) = (0, 0);
        assert_eq!(call!(cuMemAllocPitch_v2(&mut pitched, &mut pitch, 1000, 10, 4)), 0);
        assert_eq!(pitch, 1024);
        assert_eq!(call!(cuMemAllocPitch_v2(&mut pitched, &mut pitch, 1000, 10, 5)), INVALID_VALUE);
    });
}

#[test]
fn pinned_host_memory_is_not_charged_to_the_card() {
    test_node::run(|| {
        open_context();
        let start = free_bytes();
        let mut host = null_mut();
        assert_eq!(call!(cuMemHostAlloc(&mut host, 0, 0)), INVALID_VALUE);
        assert_eq!(call!(cuMemHostAlloc(&mut host, 100, 64)), INVALID_VALUE);
        assert_eq!(call!(cuMemHostAlloc(&mut host, 10 * MIB, CU_MEMHOSTALLOC_PORTABLE)), 0);
        let (mut flags, mut pointer) = (9, 0);
        assert_eq!(call!(cuMemHostGetFlags(&mut flags, host)), 0);
        assert_eq!(flags, CU_MEMHOSTALLOC_PORTABLE);
        assert_eq!(call!(cuMemHostGetDevicePointer_v2(&mut pointer, host, 0)), 0);
        assert_eq!(pointer, host as u64);
        let mut kind = 0u32;
        let data = (&raw mut kind).cast();
        assert_eq!(call!(cuPointerGetAttribute(data, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer)), 0);
        assert_eq!((kind, free_bytes()), (CU_MEMORYTYPE_HOST, start));
        assert_eq!(call!(cuMemHostUnregister(host)), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
        assert_eq!(call!(cuMemFree_v2(pointer)), INVALID_VALUE);
        assert_eq!(call!(cuMemFreeHost(host)), 0);
        assert_eq!(call!(cuMemFreeHost(host)), INVALID_VALUE);
        let mut own = vec![0u8; 3 * 4096];
        let own = own.as_mut_ptr().cast::<c_void>();
        assert_eq!(call!(cuMemHostRegister_v2(own, 8192, 0)), 0);
        assert_eq!(call!(cuMemHostRegister_v2(own, 8192, 0)), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        assert_eq!(call!(cuMemHostRegister_v2(4096 as *mut c_void, 8192, 0)), INVALID_VALUE);
        assert_eq!(call!(cuMemHostRegister_v2(own, 0, 0)), INVALID_VALUE);
        assert_eq!(call!(cuMemFreeHost(own)), INVALID_VALUE);
        assert_eq!(call!(cuMemHostUnregister(own)), 0);
        assert_eq!(call!(cuMemHostUnregister(own)), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    });
}

#[test]
fn managed_memory_is_charged_where_it_was_prefetched() {
    test_node::run(|| {
        open_context();
        let start = free_bytes();
        let mut pointer = 0;
        assert_eq!(call!(cuMemAllocManaged(&mut pointer, MIB, 7)), INVALID_VALUE);
        assert_eq!(call!(cuMemAllocManaged(&mut pointer, 100 << 30, CU_MEM_ATTACH_GLOBAL)), 0);
        assert_eq!(free_bytes(), start);
        assert_eq!(call!(cuMemPrefetchAsync(pointer, 64 * MIB, 0, null_mut())), 0);
        assert_eq!(call!(cuCtxSynchronize()), 0);
        let sent = start - free_bytes();
        assert!((64 * MIB..=66 * MIB).contains(&sent), "{sent}");
        let mut last = 9i32;
        let attribute = CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION;
        assert_eq!(call!(cuMemRangeGetAttribute((&raw mut last).cast(), 4, attribute, pointer, MIB)), 0);
        assert_eq!(last, 0);
        assert_eq!(call!(cuMemPrefetchAsync(pointer, 64 * MIB, -1, null_mut())), 0);
        assert_eq!(call!(cuCtxSynchronize()), 0);
        assert_eq!(free_bytes(), start);
        // More than the card has: it takes as much as fits.
        assert_eq!(call!(cuMemPrefetchAsync(pointer, 100 << 30, 0, null_mut())), 0);
        assert_eq!(call!(cuCtxSynchronize()), 0);
        assert!(free_bytes() < 2 * MIB);
        assert_eq!(call!(cuMemAdvise(pointer, MIB, CU_MEM_ADVISE_SET_READ_MOSTLY, 0)), 0);
        assert_eq!(
            call!(cuMemAdvise(pointer, MIB, CU_MEM_ADVISE_SET_ACCESSED_BY, 7)),
            CUDA_ERROR_INVALID_DEVICE
        );
        assert_eq!(call!(cuMemFree_v2(pointer)), 0);
        assert_eq!(free_bytes(), start);
    });
}

#[test]
fn pointer_attributes_describe_the_allocation() {
    test_node::run(|| {
        let context = open_context();
        let pointer = allocate(5000);
        let long = |attribute, pointer| {
            let mut value = 0u64;
            let code = call!(cuPointerGetAttribute((&raw mut value).cast(), attribute, pointer));
            (code, value)
        };
        assert_eq!(long(CU_POINTER_ATTRIBUTE_CONTEXT, pointer + 7), (0, context as u64));
        assert_eq!(long(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer), (0, 2));
        assert_eq!(long(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, pointer + 4999), (0, pointer));
        assert_eq!(long(CU_POINTER_ATTRIBUTE_RANGE_SIZE, pointer), (0, 5000));
        assert_eq!(long(CU_POINTER_ATTRIBUTE_HOST_POINTER, pointer).0, INVALID_VALUE);
        assert_eq!(long(CU_POINTER_ATTRIBUTE_IS_MANAGED, pointer), (0, 0));
        assert_eq!(long(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer + 5000).0, INVALID_VALUE);
        assert_eq!(long(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, pointer), (0, 1));
        let other = allocate(5000);
        assert_ne!(
            long(CU_POINTER_ATTRIBUTE_BUFFER_ID, pointer),
            long(CU_POINTER_ATTRIBUTE_BUFFER_ID, other)
        );
        let on = 1u32;
        let set =
            call!(cuPointerSetAttribute((&raw const on).cast(), CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, pointer));
        assert_eq!((set, long(CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, pointer)), (0, (0, 1)));
        // Attributes of an unknown pointer are zero.
        let (mut kind, mut size) = (9u32, 9u64);
        let mut wanted = [CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_RANGE_SIZE];
        let mut data: [*mut c_void; 2] = [(&raw mut kind).cast(), (&raw mut size).cast()];
        let stack = &raw const on as u64;
        assert_eq!(call!(cuPointerGetAttributes(2, wanted.as_mut_ptr(), data.as_mut_ptr(), stack)), 0);
        assert_eq!((kind, size), (0, 0));
    });
}

#[test]
fn lost_gpu_rejects_allocation_and_free() {
    test_node::run(|| {
        open_context();
        let pointer = allocate(MIB);
        let device = context::current().unwrap().device;
        device.state.inject(device.gpu, crate::state::GpuFault::Lost);
        let mut other = 0;
        let lost = CUDA_ERROR_UNKNOWN;
        for _ in 0..2 {
            assert_eq!(call!(cuMemAlloc_v2(&mut other, MIB)), lost);
            assert_eq!(call!(cuMemAllocAsync(&mut other, MIB, null_mut())), lost);
            assert_eq!(call!(cuMemFree_v2(pointer)), lost);
            assert_eq!(call!(cuMemsetD8_v2(pointer, 1, 1)), lost);
            // Its memory is gone even if the GPU returns.
            device.state.inject(device.gpu, crate::state::GpuFault::Returned);
        }
    });
}

#[test]
fn threads_allocate_copy_and_export_concurrently() {
    test_node::run(|| {
        let current = open_context() as usize;
        let start = free_bytes();
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                scope.spawn(move || {
                    assert_eq!(call!(cuCtxSetCurrent(current as CUcontext)), 0);
                    let mut pool = Vec::new();
                    for round in 0..100usize {
                        let bytes = 1 + (round * 7919 * (usize::from(thread) + 1)) % (3 * MIB);
                        let pointer = allocate(bytes);
                        let value = thread.wrapping_mul(61).wrapping_add(round as u8);
                        let length = bytes.min(10_000);
                        assert_eq!(call!(cuMemsetD8_v2(pointer, value, length)), 0);
                        if round % 7 == 0 {
                            let mut handle = CUipcMemHandle::default();
                            assert_eq!(call!(cuIpcGetMemHandle(&mut handle, pointer)), 0);
                        }
                        pool.push((pointer, value, length));
                        if pool.len() > 20 {
                            let (pointer, value, length) = pool.remove(round % 20);
                            let mut read = vec![0u8; length];
                            assert_eq!(call!(cuMemcpyDtoH_v2(read.as_mut_ptr().cast(), pointer, length)), 0);
                            assert!(read.iter().all(|&byte| byte == value), "{thread} {round}");
                            assert_eq!(call!(cuMemFree_v2(pointer)), 0);
                        }
                    }
                    for (pointer, ..) in pool {
                        assert_eq!(call!(cuMemFree_v2(pointer)), 0);
                    }
                });
            }
        });
        assert_eq!(free_bytes(), start);
    });
}

/// Returns the resident memory of this process, in bytes.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[test]
fn only_written_pages_use_host_memory() {
    test_node::run(|| {
        open_context();
        let before = resident();
        // Fills of device memory are asynchronous.
        let resident = || {
            assert_eq!(call!(cuCtxSynchronize()), 0);
            resident()
        };
        let pointer = allocate(30 << 30);
        assert_eq!(call!(cuMemsetD8_v2(pointer + 5, 0, (30 << 30) - 10)), 0);
        assert!(resident() < before + 8 * MIB);
        assert_eq!(call!(cuMemsetD8_v2(pointer, 1, 64 * MIB)), 0);
        assert!(resident() > before + 60 * MIB);
        assert_eq!(call!(cuMemsetD32_v2(pointer, 0, 16 * MIB)), 0);
        assert!(resident() < before + 8 * MIB);
        assert_eq!(call!(cuMemsetD8_v2(pointer, 1, 64 * MIB)), 0);
        assert_eq!(call!(cuMemFree_v2(pointer)), 0);
        assert!(resident() < before + 8 * MIB);
    });
}
