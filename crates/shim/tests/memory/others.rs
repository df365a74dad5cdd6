//! Handles, arrays, modules, and what others made.

use super::*;
use node::{say, wait_to_be_told};
use std::os::fd::AsRawFd;

const SIZE: usize = MIB as usize;

#[test]
fn handles_count_to_their_last_reference_and_mapping() {
    play("others handles", 64 * MIB);
}

/// Who has a handle's shareable counterpart has its memory: it counts until its maker's process ends.
#[test]
fn exported_handles_count_as_long_as_their_maker_lives() {
    let node = node();
    let container = Container::with_memory(&node, CONTEXT + 64 * MIB);
    container.play("others shareable");
    assert_eq!((container.used(0), container::truth(&node.state(), 0)), (0, 0));
}

#[test]
fn arrays_count_by_their_elements() {
    play("others arrays", 64 * MIB);
}

#[test]
fn small_arrays_count_a_block_each() {
    play("others small", 8 * MIB);
}

/// A block that one small array is left in is a block.
#[test]
fn single_arrays_in_many_blocks_are_not_forgotten() {
    play("others scattered", 64 * MIB);
}

#[test]
fn modules_count_by_what_the_driver_takes() {
    play("others modules", 64 * MIB);
}

#[test]
fn external_memory_counts_from_its_import_on() {
    play("others external", 64 * MIB);
}

/// What one process of a container exports and another opens is there once.
#[test]
fn opened_memory_counts_where_it_was_made() {
    let node = node();
    let container = Container::with_memory(&node, 2 * CONTEXT + 64 * MIB);
    let mut maker = container.start("others export");
    let handle = maker.hear("handle");
    container.play(&format!("others open {handle}"));
    maker.tell();
    maker.end();
    assert_eq!((container.used(0), container::truth(&node.state(), 0)), (0, 0));
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
    ok!(cuda.cuMemCreate(&mut one, 40 * SIZE, &properties(0), 0));
    observer.exact("one handle");
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemCreate(&mut two, 26 * SIZE, &properties(0), 0));
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuMemCreate(&mut two, SIZE, &properties(0), 0));
    fails!(CUDA_ERROR_INVALID_DEVICE, cuda.cuMemCreate(&mut two, SIZE, &properties(7), 0));
    // The device that is named counts, not the thread's.
    ok!(cuda.cuMemCreate(&mut two, 26 * SIZE, &properties(1), 0));
    observer.exact("two handles");
    ok!(cuda.cuMemAddressReserve(&mut address, 80 * SIZE, 0, 0, 0));
    ok!(cuda.cuMemMap(address, 40 * SIZE, 0, one, 0));
    ok!(cuda.cuMemMap(address + 40 * MIB, 26 * SIZE, 0, two, 0));
    ok!(cuda.cuMemRelease(one));
    ok!(cuda.cuMemRetainAllocationHandle(&mut same, address as *mut c_void));
    ok!(cuda.cuMemRelease(two));
    observer.exact("mapped");
    ok!(cuda.cuMemUnmap(address, 66 * SIZE));
    observer.exact("unmapped");
    assert_eq!((observer.used(0), observer.used(1)), (CONTEXT + 40 * MIB, 0));
    ok!(cuda.cuMemRelease(same));
    observer.exact("released");
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuMemRelease(same));
    for _ in 0..3 {
        ok!(cuda.cuMemCreate(&mut one, 64 * SIZE, &properties(0), 0));
        ok!(cuda.cuMemRelease(one));
    }
    observer.exact("at the end");
}

fn shareable() {
    let (cuda, _, observer) = start();
    let kind = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    let (mut own, mut imported, mut same, mut address, mut descriptor) = (0, 0, 0, 0, -1i32);
    ok!(cuda.cuMemAddressReserve(&mut address, 64 * SIZE, 0, 0, 0));
    // An export that fails is none.
    ok!(cuda.cuMemCreate(&mut own, 64 * SIZE, &properties(0), 0));
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuMemExportToShareableHandle(null_mut(), own, kind, 0));
    ok!(cuda.cuMemRelease(own));
    observer.exact("nothing was exported");
    ok!(cuda.cuMemCreate(&mut own, 40 * SIZE, &properties(0), 0));
    ok!(cuda.cuMemExportToShareableHandle((&raw mut descriptor).cast(), own, kind, 0));
    ok!(cuda.cuMemImportFromShareableHandle(&mut imported, descriptor as usize as *mut c_void, kind));
    observer.exact("a second handle is no second memory");
    ok!(cuda.cuMemMap(address, 40 * SIZE, 0, imported, 0));
    ok!(cuda.cuMemRelease(own));
    ok!(cuda.cuMemRelease(imported));
    observer.exact("mapped, without a handle");
    assert_eq!(observer.used(0), CONTEXT + 40 * MIB);
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemCreate(&mut own, 26 * SIZE, &properties(0), 0));
    ok!(cuda.cuMemUnmap(address, 40 * SIZE));
    // Somebody else could still have it.
    assert_eq!((observer.used(0), observer.truth(0)), (CONTEXT + 40 * MIB, CONTEXT));
    // A handle that uses the number again is another.
    for _ in 0..3 {
        ok!(cuda.cuMemCreate(&mut own, 24 * SIZE, &properties(0), 0));
        ok!(cuda.cuMemMap(address, 24 * SIZE, 0, own, 0));
        ok!(cuda.cuMemRetainAllocationHandle(&mut same, address as *mut c_void));
        ok!(cuda.cuMemUnmap(address, 24 * SIZE));
        ok!(cuda.cuMemRelease(same));
        assert_eq!(observer.used(0), CONTEXT + 64 * MIB);
        ok!(cuda.cuMemRelease(own));
        assert_eq!(observer.used(0), CONTEXT + 40 * MIB);
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
        while says!(cuda.cuArray3DCreate_v2(&mut array, &shape)) == CUDA_SUCCESS {
            held.push(array);
            observer.exact("after an array");
        }
        assert!(held.len() > 2 && held.len() < 64, "{}", held.len());
        fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuArray3DCreate_v2(&mut array, &shape));
        for array in held.drain(..) {
            ok!(cuda.cuArrayDestroy(array));
            observer.exact("without it");
        }
    }
    ok!(cuda.cuMipmappedArrayCreate(&mut mipmap, &wanted(1000, 1000, 0, 0), 4));
    observer.exact("levels");
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMipmappedArrayCreate(&mut mipmap, &wanted(2000, 2000, 0, 0), 1));
    ok!(cuda.cuMipmappedArrayDestroy(mipmap));
    let plane =
        CUDA_ARRAY_DESCRIPTOR { Width: 2048, Height: 2048, Format: CU_AD_FORMAT_HALF, NumChannels: 2 };
    ok!(cuda.cuArrayCreate_v2(&mut array, &plane));
    ok!(cuda.cuMipmappedArrayCreate(&mut mipmap, &wanted(1000, 1000, 0, 0), 99));
    observer.exact("both");
    // They go with their context.
    ok!(cuda.cuCtxDestroy_v2(context));
    observer.exact("nothing");
    assert_eq!(observer.used(0), 0);
}

fn small() {
    let (cuda, _, observer) = start();
    let (mut array, mut pointer) = (null_mut(), 0);
    let plane = CUDA_ARRAY_DESCRIPTOR { Width: 100, Height: 100, Format: CU_AD_FORMAT_FLOAT, NumChannels: 4 };
    for _ in 0..2 {
        let mut held = Vec::new();
        while says!(cuda.cuArrayCreate_v2(&mut array, &plane)) == CUDA_SUCCESS {
            held.push(array);
            assert!(observer.used(0) >= observer.truth(0));
        }
        // The driver puts all of them into one block; nobody can see that.
        assert_eq!(held.len(), 4);
        assert_eq!(observer.used(0), CONTEXT + 8 * MIB);
        for array in held {
            ok!(cuda.cuArrayDestroy(array));
            assert!(observer.used(0) >= observer.truth(0));
        }
        observer.exact("without arrays");
    }
    // Beside an allocation in the same block, whichever goes first.
    for array_first in [true, false] {
        ok!(cuda.cuMemAlloc_v2(&mut pointer, 1000));
        ok!(cuda.cuArrayCreate_v2(&mut array, &plane));
        if array_first {
            ok!(cuda.cuArrayDestroy(array));
            observer.exact("without the array");
            ok!(cuda.cuMemFree_v2(pointer));
        } else {
            ok!(cuda.cuMemFree_v2(pointer));
            observer.exact("without the allocation");
            ok!(cuda.cuArrayDestroy(array));
        }
        observer.exact("without both");
    }
}

fn scattered() {
    let (cuda, context, observer) = start();
    let (mut pieces, mut arrays) = (Vec::new(), Vec::new());
    let line =
        CUDA_ARRAY_DESCRIPTOR { Width: 64, Height: 0, Format: CU_AD_FORMAT_UNSIGNED_INT8, NumChannels: 1 };
    // Every block is filled by halves of halves, and the last piece of it is an array.
    'all: loop {
        for half in 1..=12 {
            let (mut pointer, size) = (0, ((2 * SIZE) >> half).min(SIZE - 512));
            if says!(cuda.cuMemAlloc_v2(&mut pointer, size)) != CUDA_SUCCESS {
                break 'all;
            }
            pieces.push(pointer);
        }
        let mut array = null_mut();
        if says!(cuda.cuArrayCreate_v2(&mut array, &line)) != CUDA_SUCCESS {
            break;
        }
        arrays.push(array);
        assert!(observer.used(0) >= observer.truth(0));
    }
    assert!(arrays.len() > 10, "{}", arrays.len());
    pieces.into_iter().for_each(|pointer| ok!(cuda.cuMemFree_v2(pointer)));
    let (account, truth) = (observer.used(0), observer.truth(0));
    assert!(truth > CONTEXT + 20 * MIB, "arrays are in blocks of their own now: {truth}");
    assert!(account >= truth, "{account} of {truth}");
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAlloc_v2(&mut 0, 58 * SIZE));
    ok!(cuda.cuCtxDestroy_v2(context));
    observer.exact("nothing");
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
        observer.exact("loaded");
        ok!(cuda.cuModuleGetGlobal_v2(&mut pointer, &mut size, module, c"small".as_ptr()));
        observer.exact("a variable");
        ok!(cuda.cuModuleGetGlobal_v2(&mut pointer, &mut size, module, c"small".as_ptr()));
        observer.exact("the same");
        ok!(cuda.cuModuleGetGlobal_v2(null_mut(), &mut size, module, c"large".as_ptr()));
        assert_eq!(size, 4_000_000);
        observer.exact("another");
        ok!(cuda.cuModuleUnload(module));
        observer.exact("unloaded");
        assert_eq!(observer.used(0), CONTEXT);
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
    observer.exact("a library");
    ok!(cuda.cuLibraryGetKernel(&mut kernel, library, c"any".as_ptr()));
    ok!(cuda.cuKernelGetFunction(&mut function, kernel));
    observer.exact("in use");
    assert!(observer.used(0) > CONTEXT);
    ok!(cuda.cuLibraryGetGlobal(&mut pointer, &mut size, library, c"any".as_ptr()));
    observer.exact("with a variable");
    ok!(cuda.cuLibraryUnload(library));
    observer.exact("unloaded");
    ok!(cuda.cuModuleLoadData(&mut module, image.as_ptr().cast()));
    ok!(cuda.cuModuleGetGlobal_v2(&mut pointer, &mut size, module, c"small".as_ptr()));
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 60 * SIZE));
    let image = image.as_ptr().cast();
    let loaded =
        (0..9).take_while(|_| says!(cuda.cuModuleLoadData(&mut module, image)) == CUDA_SUCCESS).count();
    // Two mebibytes are left for them.
    assert_eq!(loaded, 2);
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuModuleLoadData(&mut module, image));
    observer.exact("full");
    ok!(cuda.cuCtxDestroy_v2(context));
    observer.exact("nothing");
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
    assert_eq!(observer.used(0), CONTEXT + 60 * MIB);
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAlloc_v2(&mut 0, 5 * SIZE));
    ok!(cuda.cuDestroyExternalMemory(memory));
    observer.exact("destroyed");
}

fn export() {
    let (cuda, _, observer) = start();
    let (mut pointer, mut handle) = (0, CUipcMemHandle::default());
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 60 * SIZE));
    ok!(cuda.cuIpcGetMemHandle(&mut handle, pointer));
    observer.exact("exported");
    let text: String = handle.reserved.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
    say(&format!("handle {text}"));
    wait_to_be_told();
}

fn open(text: &str) {
    let (cuda, _, observer) = start();
    let mut handle = CUipcMemHandle::default();
    for (index, byte) in handle.reserved.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16).unwrap() as _;
    }
    let mut pointer = 0;
    ok!(cuda.cuIpcOpenMemHandle_v2(&mut pointer, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    observer.exact("opened");
    assert_eq!(observer.used(0), 2 * CONTEXT + 60 * MIB);
    ok!(cuda.cuIpcCloseMemHandle(pointer));
    observer.exact("closed");
}
