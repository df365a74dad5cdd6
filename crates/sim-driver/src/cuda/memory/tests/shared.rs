//! Memory that goes from one process to another: each test starts itself once more as the other process.

use super::*;
use crate::cuda::session::session;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Command, Stdio};

/// What the other process is told, where there is one.
const OTHER: &str = "PARTAGE_SIM_OTHER";

fn told() -> Option<Vec<u8>> {
    let text = std::env::var(OTHER).ok()?;
    Some(
        text.as_bytes()
            .chunks(2)
            .map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap())
            .collect(),
    )
}

/// Runs the test as the other process.
fn other(name: &str, tell: &[u8]) -> bool {
    let text: String = tell.iter().map(|byte| format!("{byte:02x}")).collect();
    let run = Command::new(std::env::current_exe().unwrap())
        .args([&format!("cuda::memory::tests::shared::{name}"), "--exact", "--nocapture", "--test-threads=1"])
        .env(OTHER, text)
        .stdout(Stdio::null())
        .status();
    run.unwrap().success()
}

fn read(pointer: CUdeviceptr, bytes: usize) -> Vec<u8> {
    let mut read = vec![0u8; bytes];
    assert_eq!(call!(cuMemcpyDtoH_v2(read.as_mut_ptr().cast(), pointer, bytes)), 0);
    read
}

fn files() -> usize {
    std::fs::read_dir(session().unwrap().node.shared()).unwrap().count()
}

#[test]
fn handles_of_memory_reach_other_processes() {
    trial::on_node(|| {
        begin();
        if let Some(told) = told() {
            for bytes in told.chunks(64) {
                let mut handle = CUipcMemHandle::default();
                handle.reserved.iter_mut().zip(bytes).for_each(|(to, &byte)| *to = byte as c_char);
                let (mut pointer, mut again) = (0, 0);
                let before = free_bytes();
                assert_eq!(call!(cuIpcOpenMemHandle_v2(&mut pointer, handle, 1)), 0);
                assert_eq!(call!(cuIpcOpenMemHandle_v2(&mut again, handle, 1)), 0);
                assert_eq!((pointer, free_bytes()), (again, before));
                assert_eq!(read(pointer, 3), [5, 5, 5]);
                assert_eq!(call!(cuMemsetD8_v2(pointer, 6, 3)), 0);
                assert_eq!(call!(cuMemFree_v2(pointer)), BAD);
                assert_eq!(call!(cuIpcCloseMemHandle(pointer)), 0);
                assert_eq!(call!(cuIpcCloseMemHandle(pointer)), 0);
                assert_eq!(call!(cuIpcCloseMemHandle(pointer)), BAD);
            }
            return;
        }
        let (small, neighbour, large) = (allocate(1000), allocate(1000), allocate(8 * MIB));
        for pointer in [small, neighbour, large] {
            assert_eq!(call!(cuMemsetD8_v2(pointer, 5, 1000)), 0);
        }
        let mut tell = Vec::new();
        for pointer in [small, large] {
            let mut handle = CUipcMemHandle::default();
            assert_eq!(call!(cuIpcGetMemHandle(&mut handle, pointer)), 0);
            let mut opened = 0;
            assert_eq!(call!(cuIpcOpenMemHandle_v2(&mut opened, handle, 1)), CUDA_ERROR_INVALID_CONTEXT);
            tell.extend(handle.reserved.map(|byte| byte as u8));
        }
        assert!(other("handles_of_memory_reach_other_processes", &tell));
        for pointer in [small, large] {
            assert_eq!(read(pointer, 5), [6, 6, 6, 5, 5]);
        }
        assert_eq!(files(), 2);
        assert_eq!(call!(cuMemFree_v2(small)), 0);
        assert_eq!(call!(cuMemFree_v2(large)), 0);
        // What lay beside it has its bytes, and the file is gone.
        assert_eq!((read(neighbour, 1000), files()), (vec![5; 1000], 0));
        let fresh = allocate(8 * MIB);
        assert!(read(fresh, 8 * MIB).iter().all(|&byte| byte == 0));
        // A handle of what was freed opens nothing.
        assert!(!other("handles_of_memory_reach_other_processes", &tell));
    });
}

#[test]
fn files_of_the_dead_are_swept() {
    trial::on_node(|| {
        begin();
        let pointer = allocate(1000);
        let mut handle = CUipcMemHandle::default();
        if told().is_some() {
            assert_eq!(call!(cuIpcGetMemHandle(&mut handle, pointer)), 0);
            std::process::abort();
        }
        assert!(!other("files_of_the_dead_are_swept", &[1]));
        assert_eq!(files(), 1);
        assert_eq!(call!(cuIpcGetMemHandle(&mut handle, pointer)), 0);
        assert_eq!(files(), 1);
    });
}

/// Lets a descriptor be inherited.
fn inherit(number: i32) {
    // SAFETY: a descriptor of the test's.
    assert_eq!(unsafe { libc::fcntl(number, libc::F_SETFD, 0) }, 0);
}

#[test]
fn handles_and_pools_go_as_descriptors() {
    trial::on_node(|| {
        begin();
        let location = CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id: 0 };
        let access = CUmemAccessDesc { location, flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        let mapped = |handle| {
            let mut base = 0;
            assert_eq!(call!(cuMemAddressReserve(&mut base, 2 * MIB, 0, 0, 0)), 0);
            assert_eq!(call!(cuMemMap(base, 2 * MIB, 0, handle, 0)), 0);
            assert_eq!(call!(cuMemSetAccess(base, 2 * MIB, &access, 1)), 0);
            base
        };
        let by_descriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        if let Some(told) = told() {
            let numbers: Vec<i32> =
                told[..8].chunks(4).map(|word| i32::from_ne_bytes(word.try_into().unwrap())).collect();
            let before = free_bytes();
            let mut handle = 0;
            let sent = numbers[0] as usize as *mut c_void;
            assert_eq!(call!(cuMemImportFromShareableHandle(&mut handle, sent, by_descriptor)), 0);
            let base = mapped(handle);
            assert_eq!(read(base, 2), [5, 5]);
            assert_eq!(call!(cuMemsetD8_v2(base, 6, 1)), 0);
            let (mut pool, mut pointer) = (null_mut(), 0);
            let sent = numbers[1] as usize as *mut c_void;
            assert_eq!(call!(cuMemPoolImportFromShareableHandle(&mut pool, sent, by_descriptor, 0)), 0);
            let mut data = CUmemPoolPtrExportData::default();
            data.reserved.copy_from_slice(&told[8..72]);
            assert_eq!(call!(cuMemPoolImportPointer(&mut pointer, pool, &mut data)), 0);
            assert_eq!(read(pointer, 2), [7, 7]);
            assert_eq!(call!(cuMemsetD8_v2(pointer, 8, 1)), 0);
            assert_eq!(call!(cuMemFreeAsync(pointer, null_mut())), 0);
            // The file of a handle is memory for those who know no handles, too.
            let mut described = CUDA_EXTERNAL_MEMORY_HANDLE_DESC {
                type_: CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD,
                size: 2 * MIB as u64,
                ..CUDA_EXTERNAL_MEMORY_HANDLE_DESC::default()
            };
            described.handle.fd = numbers[0];
            let mut external = null_mut();
            assert_eq!(call!(cuImportExternalMemory(&mut external, &described)), 0);
            let part = CUDA_EXTERNAL_MEMORY_BUFFER_DESC {
                offset: 0,
                size: 100,
                ..CUDA_EXTERNAL_MEMORY_BUFFER_DESC::default()
            };
            assert_eq!(call!(cuExternalMemoryGetMappedBuffer(&mut pointer, external, &part)), 0);
            assert_eq!(read(pointer, 2), [6, 5]);
            assert_eq!(call!(cuMemFree_v2(pointer)), 0);
            assert_eq!(call!(cuDestroyExternalMemory(external)), 0);
            assert_eq!(free_bytes(), before);
            return;
        }
        let properties = CUmemAllocationProp {
            type_: CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: by_descriptor,
            location,
            ..CUmemAllocationProp::default()
        };
        let (mut handle, mut first, mut second) = (0, -1, -1);
        assert_eq!(call!(cuMemCreate(&mut handle, 2 * MIB, &properties, 0)), 0);
        let base = mapped(handle);
        assert_eq!(call!(cuMemsetD8_v2(base, 5, 100)), 0);
        let to = (&raw mut first).cast();
        assert_eq!(call!(cuMemExportToShareableHandle(to, handle, by_descriptor, 0)), 0);
        let of_pool = CUmemPoolProps {
            allocType: CU_MEM_ALLOCATION_TYPE_PINNED,
            handleTypes: by_descriptor,
            location,
            ..CUmemPoolProps::default()
        };
        let (mut pool, mut pointer) = (null_mut(), 0);
        assert_eq!(call!(cuMemPoolCreate(&mut pool, &of_pool)), 0);
        assert_eq!(call!(cuMemAllocFromPoolAsync(&mut pointer, 5000, pool, null_mut())), 0);
        assert_eq!(call!(cuMemAllocFromPoolAsync(&mut pointer, 5000, pool, null_mut())), 0);
        assert_eq!(call!(cuMemsetD8_v2(pointer, 7, 5000)), 0);
        let to = (&raw mut second).cast();
        assert_eq!(call!(cuMemPoolExportToShareableHandle(to, pool, by_descriptor, 0)), 0);
        let mut data = CUmemPoolPtrExportData::default();
        assert_eq!(call!(cuMemPoolExportPointer(&mut data, pointer)), 0);
        // SAFETY: the descriptors that the driver has just made for the test.
        let files = [first, second].map(|number| unsafe { OwnedFd::from_raw_fd(number) });
        files.iter().for_each(|file| inherit(file.as_raw_fd()));
        let mut tell: Vec<u8> = [first, second].iter().flat_map(|number| number.to_ne_bytes()).collect();
        tell.extend(data.reserved);
        assert!(other("handles_and_pools_go_as_descriptors", &tell));
        assert_eq!((read(base, 2), read(pointer, 2)), (vec![6, 5], vec![8, 7]));
    });
}
