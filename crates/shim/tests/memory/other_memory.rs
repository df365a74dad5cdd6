//! Handles, arrays, modules, and imported memory.

use super::*;
use node::{print_line, wait_for_resume};
use std::os::fd::AsRawFd;

const MIB_SIZE: usize = MIB as usize;

#[test]
fn handle_is_counted_until_its_last_reference_and_mapping() {
    run_role("other_memory handles", 64 * MIB);
}

/// A process with a handle's shareable counterpart keeps its memory: it is counted until its creator's process ends.
#[test]
fn exported_handle_is_counted_while_its_process_lives() {
    let node = node();
    let container = TestContainer::with_memory(&node, CONTEXT_BYTES + 64 * MIB);
    container.run_role("other_memory shareable");
    assert_eq!((container.used(0), container::true_usage(&node.state(), 0)), (0, 0));
}

#[test]
fn arrays_are_counted_by_their_elements() {
    run_role("other_memory arrays", 64 * MIB);
}

#[test]
fn small_array_is_counted_as_a_block() {
    run_role("other_memory small", 8 * MIB);
}

/// A block with a single small array left in it still counts as a block.
#[test]
fn scattered_arrays_stay_counted() {
    run_role("other_memory scattered", 64 * MIB);
}

#[test]
fn modules_are_counted_by_what_the_driver_takes() {
    run_role("other_memory modules", 64 * MIB);
}

#[test]
fn external_memory_is_counted_from_its_import() {
    run_role("other_memory external", 64 * MIB);
}

/// Memory that one process of a container exports and another opens is counted once.
#[test]
fn opened_memory_is_counted_where_it_was_created() {
    let node = node();
    let container = TestContainer::with_memory(&node, 2 * CONTEXT_BYTES + 64 * MIB);
    let mut maker = container.start("other_memory export");
    let handle = maker.wait_for_line("handle");
    container.run_role(&format!("other_memory open {handle}"));
    maker.resume();
    maker.end();
    assert_eq!((container.used(0), container::true_usage(&node.state(), 0)), (0, 0));
}

pub fn client(arguments: &[&str]) {
    match arguments {
        ["handles"] => handles(),
        ["arrays"] => arrays(),
        ["shareable"] => shareable(),
        ["small"] => small(),
        ["scattered"] => scattered(),
        ["modules"] => modules(),
        ["external"] => external(),
        ["export"] => export(),
        ["open", handle] => open(handle),
        other => panic!("{other:?}"),
    }
}

fn properties(device: i32) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id: device },
        ..CUmemAllocationProp::default()
    }
}

fn handles() {
    let (cuda, _, observer) = start();
    let (mut one, mut two, mut address, mut same) = (0, 0, 0, 0);
    ok!(cuda.cuMemCreate(&mut one, 40 * MIB_SIZE, &properties(0), 0));
    observer.assert_exact("one handle");
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemCreate(&mut two, 26 * MIB_SIZE, &properties(0), 0));
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuMemCreate(&mut two, MIB_SIZE, &properties(0), 0));
    fails!(CUDA_ERROR_INVALID_DEVICE, cuda.cuMemCreate(&mut two, MIB_SIZE, &properties(7), 0));
    // The named device counts, not the thread's.
    ok!(cuda.cuMemCreate(&mut two, 26 * MIB_SIZE, &properties(1), 0));
    observer.assert_exact("two handles");
    ok!(cuda.cuMemAddressReserve(&mut address, 80 * MIB_SIZE, 0, 0, 0));
    ok!(cuda.cuMemMap(address, 40 * MIB_SIZE, 0, one, 0));
    ok!(cuda.cuMemMap(address + 40 * MIB, 26 * MIB_SIZE, 0, two, 0));
    ok!(cuda.cuMemRelease(one));
    ok!(cuda.cuMemRetainAllocationHandle(&mut same, address as *mut c_void));
    ok!(cuda.cuMemRelease(two));
    observer.assert_exact("mapped");
    ok!(cuda.cuMemUnmap(address, 66 * MIB_SIZE));
    observer.assert_exact("unmapped");
    assert_eq!((observer.used(0), observer.used(1)), (CONTEXT_BYTES + 40 * MIB, 0));
    ok!(cuda.cuMemRelease(same));
    observer.assert_exact("released");
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuMemRelease(same));
    for _ in 0..3 {
        ok!(cuda.cuMemCreate(&mut one, 64 * MIB_SIZE, &properties(0), 0));
        ok!(cuda.cuMemRelease(one));
    }
    observer.assert_exact("at the end");
}

fn shareable() {
    let (cuda, _, observer) = start();
    let kind = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    let (mut own, mut imported, mut same, mut address, mut descriptor) = (0, 0, 0, 0, -1i32);
    ok!(cuda.cuMemAddressReserve(&mut address, 64 * MIB_SIZE, 0, 0, 0));
    // A failed export has no effect.
    ok!(cuda.cuMemCreate(&mut own, 64 * MIB_SIZE, &properties(0), 0));
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuMemExportToShareableHandle(null_mut(), own, kind, 0));
    ok!(cuda.cuMemRelease(own));
    observer.assert_exact("nothing was exported");
    ok!(cuda.cuMemCreate(&mut own, 40 * MIB_SIZE, &properties(0), 0));
    ok!(cuda.cuMemExportToShareableHandle((&raw mut descriptor).cast(), own, kind, 0));
    ok!(cuda.cuMemImportFromShareableHandle(&mut imported, descriptor as usize as *mut c_void, kind));
    observer.assert_exact("a second handle is no second memory");
    ok!(cuda.cuMemMap(address, 40 * MIB_SIZE, 0, imported, 0));
    ok!(cuda.cuMemRelease(own));
    ok!(cuda.cuMemRelease(imported));
    observer.assert_exact("mapped, without a handle");
    assert_eq!(observer.used(0), CONTEXT_BYTES + 40 * MIB);
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemCreate(&mut own, 26 * MIB_SIZE, &properties(0), 0));
    ok!(cuda.cuMemUnmap(address, 40 * MIB_SIZE));
    // Another process could still hold it.
    assert_eq!((observer.used(0), observer.true_usage(0)), (CONTEXT_BYTES + 40 * MIB, CONTEXT_BYTES));
    // A handle that reuses the number is a different one.
    for _ in 0..3 {
        ok!(cuda.cuMemCreate(&mut own, 24 * MIB_SIZE, &properties(0), 0));
        ok!(cuda.cuMemMap(address, 24 * MIB_SIZE, 0, own, 0));
        ok!(cuda.cuMemRetainAllocationHandle(&mut same, address as *mut c_void));
        ok!(cuda.cuMemUnmap(address, 24 * MIB_SIZE));
        ok!(cuda.cuMemRelease(same));
        assert_eq!(observer.used(0), CONTEXT_BYTES + 64 * MIB);
        ok!(cuda.cuMemRelease(own));
        assert_eq!(observer.used(0), CONTEXT_BYTES + 40 * MIB);
    }
}

fn arrays() {
    let (cuda, context, observer) = start();
    let (mut array, mut mipmap, mut held) = (null_mut(), null_mut(), Vec::new());
    // A line, a plane, a box, layers.
    let wanted = |width, height, depth, flags| CUDA_ARRAY3D_DESCRIPTOR {
        Width: width,
        Height: height,
        Depth: depth,
        Format: CU_AD_FORMAT_FLOAT,
        NumChannels: 4,
        Flags: flags,
    };
    for shape in [
        wanted(100_000, 0, 0, 0),
        wanted(600, 600, 0, 0),
        wanted(100, 100, 20, 0),
        wanted(256, 256, 6, CUDA_ARRAY3D_CUBEMAP),
        wanted(300, 300, 5, CUDA_ARRAY3D_LAYERED),
    ] {
        while result_of!(cuda.cuArray3DCreate_v2(&mut array, &shape)) == CUDA_SUCCESS {
            held.push(array);
            observer.assert_exact("after an array");
        }
        assert!(held.len() > 2 && held.len() < 64, "{}", held.len());
        fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuArray3DCreate_v2(&mut array, &shape));
        for array in held.drain(..) {
            ok!(cuda.cuArrayDestroy(array));
            observer.assert_exact("without it");
        }
    }
    ok!(cuda.cuMipmappedArrayCreate(&mut mipmap, &wanted(1000, 1000, 0, 0), 4));
    observer.assert_exact("levels");
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMipmappedArrayCreate(&mut mipmap, &wanted(2000, 2000, 0, 0), 1));
    ok!(cuda.cuMipmappedArrayDestroy(mipmap));
    let plane =
        CUDA_ARRAY_DESCRIPTOR { Width: 2048, Height: 2048, Format: CU_AD_FORMAT_HALF, NumChannels: 2 };
    ok!(cuda.cuArrayCreate_v2(&mut array, &plane));
    ok!(cuda.cuMipmappedArrayCreate(&mut mipmap, &wanted(1000, 1000, 0, 0), 99));
    observer.assert_exact("both");
    // They are freed with their context.
    ok!(cuda.cuCtxDestroy_v2(context));
    observer.assert_exact("nothing");
    assert_eq!(observer.used(0), 0);
}

fn small() {
    let (cuda, _, observer) = start();
    let (mut array, mut pointer) = (null_mut(), 0);
    let plane = CUDA_ARRAY_DESCRIPTOR { Width: 100, Height: 100, Format: CU_AD_FORMAT_FLOAT, NumChannels: 4 };
    for _ in 0..2 {
        let mut held = Vec::new();
        while result_of!(cuda.cuArrayCreate_v2(&mut array, &plane)) == CUDA_SUCCESS {
            held.push(array);
            assert!(observer.used(0) >= observer.true_usage(0));
        }
        // The driver puts all of them into one block; the shim cannot see that.
        assert_eq!(held.len(), 4);
        assert_eq!(observer.used(0), CONTEXT_BYTES + 8 * MIB);
        for array in held {
            ok!(cuda.cuArrayDestroy(array));
            assert!(observer.used(0) >= observer.true_usage(0));
        }
        observer.assert_exact("without arrays");
    }
    // Beside an allocation in the same block, whichever is freed first.
    for array_first in [true, false] {
        ok!(cuda.cuMemAlloc_v2(&mut pointer, 1000));
        ok!(cuda.cuArrayCreate_v2(&mut array, &plane));
        if array_first {
            ok!(cuda.cuArrayDestroy(array));
            observer.assert_exact("without the array");
            ok!(cuda.cuMemFree_v2(pointer));
        } else {
            ok!(cuda.cuMemFree_v2(pointer));
            observer.assert_exact("without the allocation");
            ok!(cuda.cuArrayDestroy(array));
        }
        observer.assert_exact("without both");
    }
}

fn scattered() {
    let (cuda, context, observer) = start();
    let (mut pieces, mut arrays) = (Vec::new(), Vec::new());
    let line =
        CUDA_ARRAY_DESCRIPTOR { Width: 64, Height: 0, Format: CU_AD_FORMAT_UNSIGNED_INT8, NumChannels: 1 };
    // Every block is filled with halves of halves, and its last piece is an array.
    'all: loop {
        for half in 1..=12 {
            let (mut pointer, size) = (0, ((2 * MIB_SIZE) >> half).min(MIB_SIZE - 512));
            if result_of!(cuda.cuMemAlloc_v2(&mut pointer, size)) != CUDA_SUCCESS {
                break 'all;
            }
            pieces.push(pointer);
        }
        let mut array = null_mut();
        if result_of!(cuda.cuArrayCreate_v2(&mut array, &line)) != CUDA_SUCCESS {
            break;
        }
        arrays.push(array);
        assert!(observer.used(0) >= observer.true_usage(0));
    }
    assert!(arrays.len() > 10, "{}", arrays.len());
    pieces.into_iter().for_each(|pointer| ok!(cuda.cuMemFree_v2(pointer)));
    let (account, true_usage) = (observer.used(0), observer.true_usage(0));
    assert!(true_usage > CONTEXT_BYTES + 20 * MIB, "arrays are in blocks of their own now: {true_usage}");
    assert!(account >= true_usage, "{account} of {true_usage}");
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAlloc_v2(&mut 0, 58 * MIB_SIZE));
    ok!(cuda.cuCtxDestroy_v2(context));
    observer.assert_exact("nothing");
}

fn modules() {
    let (cuda, context, observer) = start();
    let (mut module, mut library, mut kernel, mut function) =
        (null_mut(), null_mut(), null_mut(), null_mut());
    let (mut pointer, mut size) = (0, 0);
    let mut text =
        ".version 8.0\n.target sm_80\n.global .b32 small[16];\n.global .b32 large[1000000];\n".to_owned();
    text.push_str(&"// a comment\n".repeat(50_000));
    let image = std::ffi::CString::new(text).unwrap();
    for _ in 0..3 {
        ok!(cuda.cuModuleLoadData(&mut module, image.as_ptr().cast()));
        observer.assert_exact("loaded");
        ok!(cuda.cuModuleGetGlobal_v2(&mut pointer, &mut size, module, c"small".as_ptr()));
        observer.assert_exact("a variable");
        ok!(cuda.cuModuleGetGlobal_v2(&mut pointer, &mut size, module, c"small".as_ptr()));
        observer.assert_exact("the same");
        ok!(cuda.cuModuleGetGlobal_v2(null_mut(), &mut size, module, c"large".as_ptr()));
        assert_eq!(size, 4_000_000);
        observer.assert_exact("another");
        ok!(cuda.cuModuleUnload(module));
        observer.assert_exact("unloaded");
        assert_eq!(observer.used(0), CONTEXT_BYTES);
    }
    ok!(cuda.cuLibraryLoadData(
        &mut library,
        c"any image".as_ptr().cast(),
        null_mut(),
        null_mut(),
        0,
        null_mut(),
        null_mut(),
        0
    ));
    observer.assert_exact("a library");
    ok!(cuda.cuLibraryGetKernel(&mut kernel, library, c"any".as_ptr()));
    ok!(cuda.cuKernelGetFunction(&mut function, kernel));
    observer.assert_exact("in use");
    assert!(observer.used(0) > CONTEXT_BYTES);
    ok!(cuda.cuLibraryGetGlobal(&mut pointer, &mut size, library, c"any".as_ptr()));
    observer.assert_exact("with a variable");
    ok!(cuda.cuLibraryUnload(library));
    observer.assert_exact("unloaded");
    ok!(cuda.cuModuleLoadData(&mut module, image.as_ptr().cast()));
    ok!(cuda.cuModuleGetGlobal_v2(&mut pointer, &mut size, module, c"small".as_ptr()));
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 60 * MIB_SIZE));
    let image = image.as_ptr().cast();
    let loaded =
        (0..9).take_while(|_| result_of!(cuda.cuModuleLoadData(&mut module, image)) == CUDA_SUCCESS).count();
    // Two MiB are left for them.
    assert_eq!(loaded, 2);
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuModuleLoadData(&mut module, image));
    observer.assert_exact("full");
    ok!(cuda.cuCtxDestroy_v2(context));
    observer.assert_exact("nothing");
    assert_eq!(observer.used(0), 0);
}

fn external() {
    let (cuda, _, observer) = start();
    let file = tempfile::tempfile().unwrap();
    file.set_len(100 * MIB).unwrap();
    let mut wanted = CUDA_EXTERNAL_MEMORY_HANDLE_DESC {
        type_: CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD,
        size: 65 * MIB,
        ..CUDA_EXTERNAL_MEMORY_HANDLE_DESC::default()
    };
    wanted.handle.fd = file.try_clone().unwrap().as_raw_fd();
    let mut memory = null_mut();
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuImportExternalMemory(&mut memory, &wanted));
    wanted.size = 60 * MIB;
    wanted.handle.fd = std::os::fd::IntoRawFd::into_raw_fd(file);
    ok!(cuda.cuImportExternalMemory(&mut memory, &wanted));
    assert_eq!(observer.used(0), CONTEXT_BYTES + 60 * MIB);
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAlloc_v2(&mut 0, 5 * MIB_SIZE));
    ok!(cuda.cuDestroyExternalMemory(memory));
    observer.assert_exact("destroyed");
}

fn export() {
    let (cuda, _, observer) = start();
    let (mut pointer, mut handle) = (0, CUipcMemHandle::default());
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 60 * MIB_SIZE));
    ok!(cuda.cuIpcGetMemHandle(&mut handle, pointer));
    observer.assert_exact("exported");
    let text: String = handle.reserved.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
    print_line(&format!("handle {text}"));
    wait_for_resume();
}

fn open(text: &str) {
    let (cuda, _, observer) = start();
    let mut handle = CUipcMemHandle::default();
    for (index, byte) in handle.reserved.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16).unwrap() as _;
    }
    let mut pointer = 0;
    ok!(cuda.cuIpcOpenMemHandle_v2(&mut pointer, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    observer.assert_exact("opened");
    assert_eq!(observer.used(0), 2 * CONTEXT_BYTES + 60 * MIB);
    ok!(cuda.cuIpcCloseMemHandle(pointer));
    observer.assert_exact("closed");
}
