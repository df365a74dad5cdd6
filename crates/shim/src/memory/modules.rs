//! Device code and its variables.
//!
//! How much of the card an image takes is the driver's to decide, and it may decide later, when a function of it is first
//! used. So an image's length is taken before the driver loads it, and given back as far as the card did not get fuller.
//! What the driver loads at the first launch of a function is not seen: it shows where the agent compares.
#![allow(unsafe_code)]

use super::allocations::Table;
use super::{Reserved, answer, checked, contexts, granted, here, locked, plain, refused_here};
use crate::hook::hooks;
use crate::process::{self, Process};
use crate::real::cuda as real;
use partage_driver_api::cuda::*;
use partage_region::UNIT;
use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::sync::Mutex;

/// What was loaded. Modules and libraries have handles of their own, which may be the same.
#[derive(Default)]
pub(super) struct Modules {
    modules: Mutex<Table<Module>>,
    libraries: Mutex<Table<Module>>,
    /// The libraries of kernels.
    kernels: Mutex<Table<u64>>,
}

#[derive(Clone, Copy, Default)]
struct Module {
    /// The length of its image.
    length: u64,
    /// Where it is loaded: the GPU, and the context. Nowhere yet, if it is a library.
    place: Option<(usize, u64)>,
    /// What it is charged.
    bytes: u64,
}

/// No image is longer.
const LONGEST: u64 = 256 << 20;

/// Bytes of an image: a cubin, a fat binary or a text.
///
/// # Safety
///
/// Null, or an image that the program gives to the driver.
unsafe fn length(image: *const c_void) -> u64 {
    const FAT_BINARY: u32 = 0xba55_ed50;
    const FAT_WRAPPER: u32 = 0x4662_43b1;
    if image.is_null() {
        return 0;
    }
    // SAFETY: the shortest image is a text's end.
    let first = unsafe { image.cast::<u8>().read() };
    if first == 0x7f {
        // SAFETY: no text begins with this byte: it is an ELF file, which has a header.
        let header = unsafe { image.cast::<[u8; 64]>().read_unaligned() };
        let field = |at: usize, bytes: usize| {
            header[at..at + bytes].iter().rev().fold(0u64, |sum, &byte| sum << 8 | u64::from(byte))
        };
        // Its sections' headers come last.
        return field(40, 8).saturating_add(field(58, 2) * field(60, 2)).min(LONGEST);
    }
    if first == 0x50 || first == 0xb1 {
        // SAFETY: a text that begins like this is longer than four bytes or ends before; the words are read one by one.
        let word = unsafe { image.cast::<u32>().read_unaligned() };
        if word == FAT_BINARY || word == FAT_WRAPPER {
            // SAFETY: a fat binary begins with sixteen bytes at least.
            let rest = unsafe { image.cast::<[u64; 2]>().read_unaligned() }[1];
            if word == FAT_BINARY {
                return rest.saturating_add(16).min(LONGEST);
            }
            // SAFETY: the wrapper's third field is the address of the fat binary.
            return unsafe { length(std::ptr::with_exposed_provenance(rest as usize)) };
        }
    }
    // SAFETY: the program's promise: then it is a text.
    unsafe { libc::strnlen(image.cast(), LONGEST as usize) as u64 }
}

/// Bytes of an image in a file.
///
/// # Safety
///
/// Null, or a text that ends in zero.
unsafe fn length_of_file(path: *const c_char) -> u64 {
    if path.is_null() {
        return 0;
    }
    // SAFETY: the caller's promise.
    let path = unsafe { CStr::from_ptr(path) };
    let data = std::fs::metadata(OsStr::from_bytes(path.to_bytes()));
    data.map_or(0, |data| data.len().min(LONGEST))
}

/// What is free on the card.
fn free() -> Option<u64> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: numbers to fill in.
    let answer = unsafe { real::cuMemGetInfo_v2(&mut free, &mut total) };
    (answer == CUDA_SUCCESS).then_some(free as u64)
}

/// Loads an image of that length, with the driver's call; what it takes of the card.
fn load(process: &Process, length: u64, call: impl FnOnce() -> CUresult) -> Result<Module, CUresult> {
    let gpu = here(process)?;
    let context = contexts::current()?.addr() as u64;
    let most = length.max(1).next_multiple_of(UNIT);
    let reserved = Reserved::take(process, gpu, most).map_err(refused_here)?;
    let before = free();
    checked(call())?;
    let taken = match (before, free()) {
        (Some(before), Some(after)) if after <= before => before - after,
        // Somebody else gave something back meanwhile, or nobody can tell.
        _ => most,
    };
    let bytes = taken.next_multiple_of(UNIT).min(most);
    let most = reserved.keep();
    if bytes < most {
        process.region.release(gpu, most - bytes);
    }
    Ok(Module { length, place: Some((gpu, context)), bytes })
}

/// Loads a module where the program wants it.
fn load_module(module: *mut CUmodule, length: u64, call: impl Fn(*mut CUmodule) -> CUresult) -> CUresult {
    if module.is_null() || length == 0 {
        return call(module);
    }
    granted(
        |process| {
            let mut made = std::ptr::null_mut();
            let loaded = load(process, length, || call(&mut made))?;
            locked(&process.memory.modules.modules).insert(made.addr() as u64, loaded);
            // SAFETY: not null, and the program's to write.
            unsafe { answer(module, made) };
            Ok(())
        },
        || call(module),
    )
}

/// Loads a library: what it takes, it takes when it is first used.
fn load_library(library: *mut CUlibrary, length: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    let answer = call();
    if answer == CUDA_SUCCESS
        && !library.is_null()
        && let Some(process) = process::attached()
    {
        // SAFETY: not null, and the driver has just written there.
        let made = unsafe { *library }.addr() as u64;
        locked(&process.memory.modules.libraries).insert(made, Module { length, ..Module::default() });
    }
    answer
}

/// Uses a library, with the driver's call: the first use may load it.
fn used(library: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    let libraries = &process.memory.modules.libraries;
    let unused = locked(libraries).get(&library).copied().filter(|own| own.place.is_none());
    let (Some(own), Ok(_)) = (unused, here(process)) else { return call() };
    match load(process, own.length, call) {
        Ok(loaded) => {
            if let Some(first) = locked(libraries).insert(library, loaded) {
                // Another thread was first, and the card got fuller once.
                give_back(process, &first);
            }
            CUDA_SUCCESS
        }
        Err(refused) => refused,
    }
}

fn give_back(process: &Process, gone: &Module) {
    if let Some((gpu, _)) = gone.place.filter(|_| gone.bytes > 0) {
        process.region.release(gpu, gone.bytes);
    }
}

/// Unloads, with the driver's call.
fn unload(handle: u64, is_library: bool, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    let modules = &process.memory.modules;
    let mut table = locked(if is_library { &modules.libraries } else { &modules.modules });
    let answer = call();
    if answer == CUDA_SUCCESS
        && let Some(gone) = table.remove(&handle)
    {
        drop(table);
        give_back(process, &gone);
        if let Some((gpu, _)) = gone.place {
            // Its variables have gone with it.
            process.memory.forget_gone(process, gpu);
        }
        if is_library {
            locked(&modules.kernels).retain(|_, library| *library != handle);
        }
    }
    answer
}

impl Modules {
    /// The context is gone, and what was loaded into it.
    pub(super) fn forget_context(&self, process: &Process, context: CUcontext) {
        let there = |module: &Module| module.place.is_some_and(|(_, own)| own == context.addr() as u64);
        locked(&self.modules).retain(|_, module| {
            let gone = there(module);
            if gone {
                give_back(process, module);
            }
            !gone
        });
        // Libraries stay, and are loaded again where they are used next.
        for library in locked(&self.libraries).values_mut().filter(|library| there(library)) {
            give_back(process, library);
            *library = Module { length: library.length, ..Module::default() };
        }
    }
}

hooks! { cuda;
    fn cuModuleLoad(module: *mut CUmodule, path: *const c_char) |next, _variant| {
        // SAFETY: the program's promise.
        let length = unsafe { length_of_file(path) };
        // SAFETY: likewise.
        load_module(module, length, |module| unsafe { next(module, path) })
    }

    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) |next, _variant| {
        // SAFETY: the program's promise.
        let length = unsafe { length(image) };
        // SAFETY: likewise.
        load_module(module, length, |module| unsafe { next(module, image) })
    }

    fn cuModuleLoadDataEx(
        module: *mut CUmodule,
        image: *const c_void,
        num_options: u32,
        options: *mut CUjit_option,
        option_values: *mut *mut c_void,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        let length = unsafe { length(image) };
        // SAFETY: likewise.
        load_module(module, length, |module| unsafe { next(module, image, num_options, options, option_values) })
    }

    fn cuModuleLoadFatBinary(module: *mut CUmodule, fat_cubin: *const c_void) |next, _variant| {
        // SAFETY: the program's promise.
        let length = unsafe { length(fat_cubin) };
        // SAFETY: likewise.
        load_module(module, length, |module| unsafe { next(module, fat_cubin) })
    }

    fn cuModuleUnload(module: CUmodule) |next, _variant| {
        // SAFETY: the program's promise.
        unload(module.addr() as u64, false, || unsafe { next(module) })
    }

    fn cuModuleGetGlobal_v2(
        pointer: *mut CUdeviceptr,
        bytes: *mut usize,
        module: CUmodule,
        name: *const c_char,
    ) |next, _variant| {
        // SAFETY: numbers to fill in, and the program's promise.
        plain::variable(pointer, bytes, |pointer, bytes| unsafe { next(pointer, bytes, module, name) })
    }

    fn cuLibraryGetGlobal(
        pointer: *mut CUdeviceptr,
        bytes: *mut usize,
        library: CUlibrary,
        name: *const c_char,
    ) |next, _variant| {
        // It is loaded first, so that its variable can be told from it.
        let mut module = std::ptr::null_mut();
        // SAFETY: the program's library, and a handle to fill in. If that fails, so will what follows.
        used(library.addr() as u64, || unsafe { real::cuLibraryGetModule(&mut module, library) });
        // SAFETY: numbers to fill in, and the program's promise.
        plain::variable(pointer, bytes, |pointer, bytes| unsafe { next(pointer, bytes, library, name) })
    }

    fn cuLibraryLoadData(
        library: *mut CUlibrary,
        code: *const c_void,
        jit_options: *mut CUjit_option,
        jit_options_values: *mut *mut c_void,
        num_jit_options: u32,
        library_options: *mut CUlibraryOption,
        library_option_values: *mut *mut c_void,
        num_library_options: u32,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        let length = unsafe { length(code) };
        // SAFETY: likewise.
        load_library(library, length, || unsafe {
            next(
                library, code, jit_options, jit_options_values, num_jit_options, library_options,
                library_option_values, num_library_options,
            )
        })
    }

    fn cuLibraryLoadFromFile(
        library: *mut CUlibrary,
        file_name: *const c_char,
        jit_options: *mut CUjit_option,
        jit_options_values: *mut *mut c_void,
        num_jit_options: u32,
        library_options: *mut CUlibraryOption,
        library_option_values: *mut *mut c_void,
        num_library_options: u32,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        let length = unsafe { length_of_file(file_name) };
        // SAFETY: likewise.
        load_library(library, length, || unsafe {
            next(
                library, file_name, jit_options, jit_options_values, num_jit_options, library_options,
                library_option_values, num_library_options,
            )
        })
    }

    fn cuLibraryUnload(library: CUlibrary) |next, _variant| {
        // SAFETY: the program's promise.
        unload(library.addr() as u64, true, || unsafe { next(library) })
    }

    fn cuLibraryGetModule(module: *mut CUmodule, library: CUlibrary) |next, _variant| {
        // SAFETY: the program's promise.
        used(library.addr() as u64, || unsafe { next(module, library) })
    }

    fn cuLibraryGetKernel(kernel: *mut CUkernel, library: CUlibrary, name: *const c_char) |next, _variant| {
        // SAFETY: the program's promise.
        let answer = unsafe { next(kernel, library, name) };
        if answer == CUDA_SUCCESS
            && !kernel.is_null()
            && let Some(process) = process::attached()
        {
            // SAFETY: not null, and the driver has just written there.
            let made = unsafe { *kernel }.addr() as u64;
            locked(&process.memory.modules.kernels).insert(made, library.addr() as u64);
        }
        answer
    }

    fn cuKernelGetFunction(function: *mut CUfunction, kernel: CUkernel) |next, _variant| {
        let library = process::attached()
            .and_then(|process| locked(&process.memory.modules.kernels).get(&(kernel.addr() as u64)).copied());
        // SAFETY: the program's promise.
        used(library.unwrap_or(0), || unsafe { next(function, kernel) })
    }
}
