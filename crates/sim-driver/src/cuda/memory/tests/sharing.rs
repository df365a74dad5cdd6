//! Tests of memory shared between processes: each test runs itself again as the other process.

use super::*;
use crate::cuda::session::session;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Command, Stdio};

/// Carries a message to the other process; unset in the first one.
const MESSAGE_VARIABLE: &str = "PARTAGE_SIM_TEST_MESSAGE";

fn received_message() -> Option<Vec<u8>> {
    let text = std::env::var(MESSAGE_VARIABLE).ok()?;
    Some(
        text.as_bytes()
            .chunks(2)
            .map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap())
            .collect(),
    )
}

/// Runs the test again as the other process; returns whether it succeeded.
fn run_other_process(name: &str, message: &[u8]) -> bool {
    let text: String = message.iter().map(|byte| format!("{byte:02x}")).collect();
    let run = Command::new(std::env::current_exe().unwrap())
        .args([
            &format!("cuda::memory::tests::sharing::{name}"),
            "--exact",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(MESSAGE_VARIABLE, text)
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
    std::fs::read_dir(session().unwrap().node.shared_dir()).unwrap().count()
}

#[test]
fn ipc_handle_opens_in_other_process() {
    test_node::run(|| {
        open_context();
        if let Some(message) = received_message() {
            for bytes in message.chunks(64) {
                let mut handle = CUipcMemHandle::default();
                handle.reserved.iter_mut().zip(bytes).for_each(|(to, &byte)| *to = byte as c_char);
                let (mut pointer, mut again) = (0, 0);
                let before = free_bytes();
                assert_eq!(call!(cuIpcOpenMemHandle_v2(&mut pointer, handle, 1)), 0);
                assert_eq!(call!(cuIpcOpenMemHandle_v2(&mut again, handle, 1)), 0);
                assert_eq!((pointer, free_bytes()), (again, before));
                assert_eq!(read(pointer, 3), [5, 5, 5]);
                assert_eq!(call!(cuMemsetD8_v2(pointer, 6, 3)), 0);
                assert_eq!(call!(cuMemFree_v2(pointer)), INVALID_VALUE);
                assert_eq!(call!(cuIpcCloseMemHandle(pointer)), 0);
                assert_eq!(call!(cuIpcCloseMemHandle(pointer)), 0);
                assert_eq!(call!(cuIpcCloseMemHandle(pointer)), INVALID_VALUE);
            }
            return;
        }
        let (small, neighbor, large) = (allocate(1000), allocate(1000), allocate(8 * MIB));
        for pointer in [small, neighbor, large] {
            assert_eq!(call!(cuMemsetD8_v2(pointer, 5, 1000)), 0);
        }
        let mut message = Vec::new();
        for pointer in [small, large] {
            let mut handle = CUipcMemHandle::default();
            assert_eq!(call!(cuIpcGetMemHandle(&mut handle, pointer)), 0);
            let mut opened = 0;
            assert_eq!(call!(cuIpcOpenMemHandle_v2(&mut opened, handle, 1)), CUDA_ERROR_INVALID_CONTEXT);
            message.extend(handle.reserved.map(|byte| byte as u8));
        }
        assert!(run_other_process("ipc_handle_opens_in_other_process", &message));
        for pointer in [small, large] {
            assert_eq!(read(pointer, 5), [6, 6, 6, 5, 5]);
        }
        assert_eq!(files(), 2);
        assert_eq!(call!(cuMemFree_v2(small)), 0);
        assert_eq!(call!(cuMemFree_v2(large)), 0);
        // The neighboring allocation keeps its bytes, and the file is gone.
        assert_eq!((read(neighbor, 1000), files()), (vec![5; 1000], 0));
        let fresh = allocate(8 * MIB);
        assert!(read(fresh, 8 * MIB).iter().all(|&byte| byte == 0));
        // The handle of a freed allocation cannot be opened.
        assert!(!run_other_process("ipc_handle_opens_in_other_process", &message));
    });
}

#[test]
fn files_of_dead_processes_are_removed() {
    test_node::run(|| {
        open_context();
        let pointer = allocate(1000);
        let mut handle = CUipcMemHandle::default();
        if received_message().is_some() {
            assert_eq!(call!(cuIpcGetMemHandle(&mut handle, pointer)), 0);
            std::process::abort();
        }
        assert!(!run_other_process("files_of_dead_processes_are_removed", &[1]));
        assert_eq!(files(), 1);
        assert_eq!(call!(cuIpcGetMemHandle(&mut handle, pointer)), 0);
        assert_eq!(files(), 1);
    });
}

/// Makes a descriptor inheritable by child processes.
fn inherit(number: i32) {
    // SAFETY: a descriptor that the test owns.
    assert_eq!(unsafe { libc::fcntl(number, libc::F_SETFD, 0) }, 0);
}

#[test]
fn handles_and_pools_are_shared_as_file_descriptors() {
    test_node::run(|| {
        open_context();
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
        if let Some(message) = received_message() {
            let numbers: Vec<i32> =
                message[..8].chunks(4).map(|word| i32::from_ne_bytes(word.try_into().unwrap())).collect();
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
            data.reserved.copy_from_slice(&message[8..72]);
            assert_eq!(call!(cuMemPoolImportPointer(&mut pointer, pool, &mut data)), 0);
            assert_eq!(read(pointer, 2), [7, 7]);
            assert_eq!(call!(cuMemsetD8_v2(pointer, 8, 1)), 0);
            assert_eq!(call!(cuMemFreeAsync(pointer, null_mut())), 0);
            // The same file can also be imported as external memory.
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
        // SAFETY: the driver has just created the descriptors for the test.
        let files = [first, second].map(|number| unsafe { OwnedFd::from_raw_fd(number) });
        files.iter().for_each(|file| inherit(file.as_raw_fd()));
        let mut message: Vec<u8> = [first, second].iter().flat_map(|number| number.to_ne_bytes()).collect();
        message.extend(data.reserved);
        assert!(run_other_process("handles_and_pools_are_shared_as_file_descriptors", &message));
        assert_eq!((read(base, 2), read(pointer, 2)), (vec![6, 5], vec![8, 7]));
    });
}
