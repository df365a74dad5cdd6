//! Device code and its variables.
//!
//! How much of the card an image takes is the driver's to decide, and it may decide later, when a function of it is first
//! used. So what an image may take at most ([`images`]) is taken before the driver loads it, and given back as far as the card
//! did not get fuller. What is packed in an image cannot be seen before: if the card got fuller than that, the rest is taken
//! afterwards, or the module goes.
//! What the driver loads at the first launch of a function is not seen: it shows where the agent compares.
#![allow(unsafe_code)]

use super::allocations::Table;
use super::{
    Reserved, answer, checked, contexts, granted, here, linear, locked, module_images, refused_here,
};
use crate::driver::cuda as real;
use crate::hook::hooks;
use crate::process::{self, Process};
use partage_driver_api::cuda::*;
use partage_region::UNIT;
use std::cell::Cell;
use std::sync::Mutex;

/// How often an image that took more than it should is loaded again.
const AGAIN: u32 = 2;

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
    /// What its image takes at most.
    most: u64,
    /// Where it is loaded: the GPU, and the context. Nowhere yet, if it is a library.
    place: Option<(usize, u64)>,
    /// What it is charged.
    bytes: u64,
}

/// What is free on the card.
fn free() -> Option<u64> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: numbers to fill in.
    let answer = unsafe { real::cuMemGetInfo_v2(&mut free, &mut total) };
    (answer == CUDA_SUCCESS).then_some(free as u64)
}

/// Does what loads an image; by how much the card got fuller, if that can be told.
fn filled(call: impl FnOnce() -> CUresult) -> Result<Option<u64>, CUresult> {
    let before = free();
    checked(call())?;
    // If there is more, somebody else gave something back meanwhile.
    Ok(before.zip(free()).and_then(|(before, after)| before.checked_sub(after)))
}

/// Loads an image that takes so much at most, with the driver's call; what it takes of the card. `again` unloads it and
/// loads it once more, for images that may take more.
fn load(
    process: &Process,
    most: u64,
    call: impl FnOnce() -> CUresult,
    again: Option<&dyn Fn() -> CUresult>,
    unload: &dyn Fn(),
) -> Result<Module, CUresult> {
    let gpu = here(process)?;
    let context = contexts::current()?.addr() as u64;
    let reserved = most.max(1).checked_next_multiple_of(UNIT).unwrap_or(u64::MAX);
    let reserved = Reserved::take(process, gpu, reserved).map_err(refused_here)?;
    let mut taken = filled(call)?.unwrap_or(reserved.bytes);
    // What others take meanwhile looks the same, but not every time.
    for _ in 0..AGAIN {
        let Some(again) = again.filter(|_| taken > reserved.bytes) else { break };
        taken = taken.min(filled(again)?.unwrap_or(reserved.bytes));
    }
    let bytes = taken.checked_next_multiple_of(UNIT).unwrap_or(u64::MAX);
    let bytes = if again.is_some() { bytes } else { bytes.min(reserved.bytes) };
    if bytes > reserved.bytes {
        let rest = Reserved::take(process, gpu, bytes - reserved.bytes).inspect_err(|_| unload())?;
        rest.keep();
    }
    let had = reserved.keep();
    if bytes < had {
        process.region.release(gpu, had - bytes);
    }
    Ok(Module { most, place: Some((gpu, context)), bytes })
}

/// Loads a module where the program wants it.
fn load_module(module: *mut CUmodule, most: u64, call: impl Fn(*mut CUmodule) -> CUresult) -> CUresult {
    if module.is_null() || most == 0 {
        return call(module);
    }
    granted(|process| {
        let made = Cell::new(std::ptr::null_mut());
        let unload = || {
            // SAFETY: just loaded, and nobody knows of it.
            let _ = unsafe { real::cuModuleUnload(made.get()) };
        };
        let first = || call(made.as_ptr());
        let again = || {
            unload();
            call(made.as_ptr())
        };
        let loaded = load(process, most, first, Some(&again), &unload)?;
        locked(&process.memory.modules.modules).insert(made.get().addr() as u64, loaded);
        // SAFETY: not null, and the program's to write.
        unsafe { answer(module, made.get()) };
        Ok(())
    })
}

/// Loads a library: what it takes, it takes when it is first used.
fn load_library(library: *mut CUlibrary, most: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    let answer = call();
    if answer == CUDA_SUCCESS
        && !library.is_null()
        && let Some(process) = process::attached()
    {
        // SAFETY: not null, and the driver has just written there.
        let made = unsafe { *library }.addr() as u64;
        locked(&process.memory.modules.libraries).insert(made, Module { most, ..Module::default() });
    }
    answer
}

/// Uses a library, with the driver's call: the first use may load it.
fn used(library: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    let libraries = &process.memory.modules.libraries;
    let unused = locked(libraries).get(&library).copied().filter(|own| own.place.is_none());
    let (Some(own), Ok(_)) = (unused, here(process)) else { return call() };
    // It cannot be loaded once more.
    match load(process, own.most, call, None, &|| ()) {
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
            *library = Module { most: library.most, ..Module::default() };
        }
    }
}

hooks! { cuda;
    fn cuModuleLoad(module: *mut CUmodule, path: *const c_char) |next, _variant| {
        // SAFETY: the program's promise.
        let most = unsafe { module_images::most_of_path(path) };
        // SAFETY: likewise.
        load_module(module, most, |module| unsafe { next(module, path) })
    }

    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) |next, _variant| {
        // SAFETY: the program's promise.
        let most = unsafe { module_images::most(image) };
        // SAFETY: likewise.
        load_module(module, most, |module| unsafe { next(module, image) })
    }

    fn cuModuleLoadDataEx(
        module: *mut CUmodule,
        image: *const c_void,
        num_options: u32,
        options: *mut CUjit_option,
        option_values: *mut *mut c_void,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        let most = unsafe { module_images::most(image) };
        // SAFETY: likewise.
        load_module(module, most, |module| unsafe { next(module, image, num_options, options, option_values) })
    }

    fn cuModuleLoadFatBinary(module: *mut CUmodule, fat_cubin: *const c_void) |next, _variant| {
        // SAFETY: the program's promise.
        let most = unsafe { module_images::most(fat_cubin) };
        // SAFETY: likewise.
        load_module(module, most, |module| unsafe { next(module, fat_cubin) })
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
        linear::variable(pointer, bytes, |pointer, bytes| unsafe { next(pointer, bytes, module, name) })
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
        linear::variable(pointer, bytes, |pointer, bytes| unsafe { next(pointer, bytes, library, name) })
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
        let most = unsafe { module_images::most(code) };
        // SAFETY: likewise.
        load_library(library, most, || unsafe {
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
        let most = unsafe { module_images::most_of_path(file_name) };
        // SAFETY: likewise.
        load_library(library, most, || unsafe {
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
