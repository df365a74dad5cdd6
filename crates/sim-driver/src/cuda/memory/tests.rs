//! Memory through the C functions, each test in a process and on a node of its own.

use super::super::context;
use super::super::exports::*;
use super::super::trial;
use super::*;
use crate::state::UNIT;
use std::collections::BTreeSet;
use std::ptr::null_mut;

mod books;
mod bytes;
mod shared;

const MIB: usize = 1 << 20;
const BAD: u32 = CUDA_ERROR_INVALID_VALUE;

/// What a call answers, without the word.
macro_rules! call {
    ($call:expr) => {{
        // SAFETY: every pointer is to something of the test's that lives through the call.
        unsafe { $call }
    }};
}
use call;

/// Opens the driver and a context on the first device.
fn begin() -> CUcontext {
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
fn misuse_is_answered_as_the_driver_does() {
    trial::on_node(|| {
        let mut pointer = 0;
        assert_eq!(call!(cuMemAlloc_v2(&mut pointer, 1)), CUDA_ERROR_NOT_INITIALIZED);
        assert_eq!(call!(cuInit(0)), 0);
        assert_eq!(call!(cuMemAlloc_v2(&mut pointer, 1)), CUDA_ERROR_INVALID_CONTEXT);
        let context = begin();
        assert_eq!(call!(cuMemAlloc_v2(&mut pointer, 0)), BAD);
        assert_eq!(call!(cuMemAlloc_v2(null_mut(), 1)), BAD);
        assert_eq!(call!(cuMemAlloc_v2(&mut pointer, 41 << 30)), CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!(call!(cuMemAlloc_v2(&mut pointer, usize::MAX)), CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!(call!(cuMemAlloc_v2(&mut pointer, 1000)), 0);
        assert_eq!(pointer % 512, 0);
        for wrong in [0, 1, pointer + 1, pointer + 512, pointer - 512, u64::MAX] {
            assert_eq!(call!(cuMemFree_v2(wrong)), BAD, "{wrong:x}");
        }
        let (mut base, mut size) = (0, 0);
        assert_eq!(call!(cuMemGetAddressRange_v2(&mut base, &mut size, pointer + 999)), 0);
        assert_eq!((base, size), (pointer, 1000));
        assert_eq!(
            call!(cuMemGetAddressRange_v2(&mut base, &mut size, pointer + 1000)),
            CUDA_ERROR_NOT_FOUND
        );
        assert_eq!(call!(cuMemsetD8_v2(pointer, 1, 1001)), BAD);
        assert_eq!(call!(cuMemsetD32_v2(pointer + 2, 1, 1)), BAD);
        assert_eq!(call!(cuMemsetD8_v2(0x1000, 1, 1)), BAD);
        assert_eq!(call!(cuMemsetD8_v2(0x1000, 1, 0)), 0);
        // From another context of the same device.
        let mut other = null_mut();
        assert_eq!(call!(cuCtxCreate_v2(&mut other, 0, 0)), 0);
        assert_eq!(call!(cuMemFree_v2(pointer)), 0);
        assert_eq!(call!(cuMemFree_v2(pointer)), BAD);
        // What a context had goes with it.
        let kept = allocate(3 * MIB);
        assert_eq!(call!(cuCtxDestroy_v2(other)), 0);
        assert_eq!(call!(cuCtxSetCurrent(context)), 0);
        assert_eq!(call!(cuMemFree_v2(kept)), BAD);
    });
}

/// Programs ask for one of two figures with null for the other.
#[test]
fn free_and_total_are_told_where_they_are_wanted() {
    trial::on_node(|| {
        begin();
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
fn free_memory_moves_in_steps_and_ends_where_the_card_does() {
    trial::on_node(|| {
        begin();
        let start = free_bytes();
        let small: Vec<_> = (0..100).map(|_| allocate(1000)).collect();
        assert_eq!(start - free_bytes(), 2 * MIB);
        let large = allocate(2 * MIB + 1);
        assert_eq!(start - free_bytes(), 6 * MIB);
        for pointer in small.into_iter().chain([large]) {
            assert_eq!(call!(cuMemFree_v2(pointer)), 0);
        }
        assert_eq!(free_bytes(), start);
        // All of it, to the last block.
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
        assert_eq!(call!(cuMemAllocPitch_v2(&mut pitched, &mut pitch, 1000, 10, 5)), BAD);
    });
}

#[test]
fn host_memory_is_known_but_not_on_the_card() {
    trial::on_node(|| {
        begin();
        let start = free_bytes();
        let mut host = null_mut();
        assert_eq!(call!(cuMemHostAlloc(&mut host, 0, 0)), BAD);
        assert_eq!(call!(cuMemHostAlloc(&mut host, 100, 64)), BAD);
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
        assert_eq!(call!(cuMemFree_v2(pointer)), BAD);
        assert_eq!(call!(cuMemFreeHost(host)), 0);
        assert_eq!(call!(cuMemFreeHost(host)), BAD);
        let mut own = vec![0u8; 3 * 4096];
        let own = own.as_mut_ptr().cast::<c_void>();
        assert_eq!(call!(cuMemHostRegister_v2(own, 8192, 0)), 0);
        assert_eq!(call!(cuMemHostRegister_v2(own, 8192, 0)), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        assert_eq!(call!(cuMemHostRegister_v2(4096 as *mut c_void, 8192, 0)), BAD);
        assert_eq!(call!(cuMemHostRegister_v2(own, 0, 0)), BAD);
        assert_eq!(call!(cuMemFreeHost(own)), BAD);
        assert_eq!(call!(cuMemHostUnregister(own)), 0);
        assert_eq!(call!(cuMemHostUnregister(own)), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    });
}

#[test]
fn managed_memory_counts_where_it_was_sent() {
    trial::on_node(|| {
        begin();
        let start = free_bytes();
        let mut pointer = 0;
        assert_eq!(call!(cuMemAllocManaged(&mut pointer, MIB, 7)), BAD);
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
        // More than the card has: it takes what it can.
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
fn pointers_tell_what_they_are() {
    trial::on_node(|| {
        let context = begin();
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
        assert_eq!(long(CU_POINTER_ATTRIBUTE_HOST_POINTER, pointer).0, BAD);
        assert_eq!(long(CU_POINTER_ATTRIBUTE_IS_MANAGED, pointer), (0, 0));
        assert_eq!(long(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer + 5000).0, BAD);
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
        // Of a pointer that is none, all is zero.
        let (mut kind, mut size) = (9u32, 9u64);
        let mut wanted = [CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_RANGE_SIZE];
        let mut data: [*mut c_void; 2] = [(&raw mut kind).cast(), (&raw mut size).cast()];
        let stack = &raw const on as u64;
        assert_eq!(call!(cuPointerGetAttributes(2, wanted.as_mut_ptr(), data.as_mut_ptr(), stack)), 0);
        assert_eq!((kind, size), (0, 0));
    });
}

#[test]
fn a_lost_card_takes_and_gives_nothing() {
    trial::on_node(|| {
        begin();
        let pointer = allocate(MIB);
        let device = context::current().unwrap().device;
        device.state.inject(device.gpu, crate::state::Fault::Lost);
        let mut other = 0;
        let lost = CUDA_ERROR_UNKNOWN;
        for _ in 0..2 {
            assert_eq!(call!(cuMemAlloc_v2(&mut other, MIB)), lost);
            assert_eq!(call!(cuMemAllocAsync(&mut other, MIB, null_mut())), lost);
            assert_eq!(call!(cuMemFree_v2(pointer)), lost);
            assert_eq!(call!(cuMemsetD8_v2(pointer, 1, 1)), lost);
            // What was on it is gone, also if it comes back.
            device.state.inject(device.gpu, crate::state::Fault::Returned);
        }
    });
}

#[test]
fn threads_allocate_copy_and_export_at_once() {
    trial::on_node(|| {
        let current = begin() as usize;
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

/// Pages of the host that this process has, in bytes.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[test]
fn the_host_has_pages_only_for_what_was_written() {
    trial::on_node(|| {
        begin();
        let before = resident();
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
