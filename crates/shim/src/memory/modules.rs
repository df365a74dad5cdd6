//! Device code and its variables.
//!
//! The driver decides how much GPU memory an image takes, and may decide later, when a function of it is first used. So
//! the upper bound of an image (`module_images`) is reserved before the driver loads it, and the part by which the
//! GPU's free memory did not shrink is released. Packed contents of an image are not visible before: if free memory
//! shrank by more, the rest is reserved afterwards, or the module is unloaded. What the driver loads at the first
//! launch of a function is not noticed here: the bypass audit reports it.
#![allow(unsafe_code)]

use super::allocations::HandleMap;
use super::{
    Reservation, checked, contexts, current_gpu, linear, lock, module_images, refusal_code, with_grant,
    write_result,
};
use crate::driver::cuda as driver;
use crate::hook::hooks;
use crate::process::{self, Process};
use partage_driver_api::cuda::*;
use partage_region::MEMORY_UNIT;
use std::cell::Cell;
use std::sync::Mutex;

/// Number of times that an image is loaded again if it took more than its upper bound.
const MAX_RELOADS: u32 = 2;

/// Loaded modules and libraries, in separate tables because their handles may be equal.
#[derive(Default)]
pub(super) struct Modules {
    modules: Mutex<HandleMap<LoadedModule>>,
    libraries: Mutex<HandleMap<LoadedModule>>,
    /// Libraries of kernels, by kernel.
    kernels: Mutex<HandleMap<u64>>,
}

#[derive(Clone, Copy, Default)]
struct LoadedModule {
    /// Upper bound of what its image takes.
    max_bytes: u64,
    /// GPU and context that it is loaded in. `None` for a library that has not been used yet.
    location: Option<(usize, u64)>,
    /// Bytes that are charged for it.
    bytes: u64,
}

/// Returns the free memory of the GPU.
fn free_device_memory() -> Option<u64> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the pointers are to local variables, which the driver fills in.
    let answer = unsafe { driver::cuMemGetInfo_v2(&mut free, &mut total) };
    (answer == CUDA_SUCCESS).then_some(free as u64)
}

/// Runs a call that loads an image. Returns by how much the GPU's free memory shrank, if that can be determined.
fn measure_growth(call: impl FnOnce() -> CUresult) -> Result<Option<u64>, CUresult> {
    let before = free_device_memory();
    checked(call())?;
    // If there is more than before, memory was freed elsewhere meanwhile.
    Ok(before.zip(free_device_memory()).and_then(|(before, after)| before.checked_sub(after)))
}

/// Loads an image with the given upper bound, with the driver's call. Returns what it takes of the GPU.
///
/// `again` unloads the image and loads it again; it is given for images that may take more than the upper bound.
fn load(
    process: &Process,
    max_bytes: u64,
    call: impl FnOnce() -> CUresult,
    again: Option<&dyn Fn() -> CUresult>,
    unload: &dyn Fn(),
) -> Result<LoadedModule, CUresult> {
    let gpu = current_gpu(process)?;
    let context = contexts::current_context()?.addr() as u64;
    let reserved = max_bytes.max(1).checked_next_multiple_of(MEMORY_UNIT).unwrap_or(u64::MAX);
    let reserved = Reservation::take(process, gpu, reserved).map_err(refusal_code)?;
    let mut taken = measure_growth(call)?.unwrap_or(reserved.bytes);
    // Allocations of other processes meanwhile look the same, but do not repeat every time.
    for _ in 0..MAX_RELOADS {
        let Some(again) = again.filter(|_| taken > reserved.bytes) else { break };
        taken = taken.min(measure_growth(again)?.unwrap_or(reserved.bytes));
    }
    let bytes = taken.checked_next_multiple_of(MEMORY_UNIT).unwrap_or(u64::MAX);
    let bytes = if again.is_some() { bytes } else { bytes.min(reserved.bytes) };
    if bytes > reserved.bytes {
        let rest = Reservation::take(process, gpu, bytes - reserved.bytes).inspect_err(|_| unload())?;
        rest.keep();
    }
    let had = reserved.keep();
    if bytes < had {
        process.region.release(gpu, had - bytes);
    }
    Ok(LoadedModule { max_bytes, location: Some((gpu, context)), bytes })
}

/// Loads a module and writes its handle for the application.
fn load_module(module: *mut CUmodule, max_bytes: u64, call: impl Fn(*mut CUmodule) -> CUresult) -> CUresult {
    if module.is_null() || max_bytes == 0 {
        return call(module);
    }
    with_grant(|process| {
        let made = Cell::new(std::ptr::null_mut());
        let unload = || {
            // SAFETY: the module was just loaded, and its handle was not handed out.
            let _ = unsafe { driver::cuModuleUnload(made.get()) };
        };
        let first = || call(made.as_ptr());
        let again = || {
            unload();
            call(made.as_ptr())
        };
        let loaded = load(process, max_bytes, first, Some(&again), &unload)?;
        lock(&process.memory.modules.modules).insert(made.get().addr() as u64, loaded);
        // SAFETY: not null, and the application passed it for the driver to write the result to.
        unsafe { write_result(module, made.get()) };
        Ok(())
    })
}

/// Loads a library, which takes memory when it is first used.
fn load_library(library: *mut CUlibrary, max_bytes: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    let answer = call();
    if answer == CUDA_SUCCESS
        && !library.is_null()
        && let Some(process) = process::attached()
    {
        // SAFETY: not null, and the call succeeded, so the driver has written a handle there.
        let made = unsafe { *library }.addr() as u64;
        lock(&process.memory.modules.libraries)
            .insert(made, LoadedModule { max_bytes, ..LoadedModule::default() });
    }
    answer
}

/// Uses a library, with the driver's call: the first use may load it.
fn with_library_loaded(library: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    let libraries = &process.memory.modules.libraries;
    let unused = lock(libraries).get(&library).copied().filter(|own| own.location.is_none());
    let (Some(own), Ok(_)) = (unused, current_gpu(process)) else { return call() };
    // A library cannot be reloaded.
    match load(process, own.max_bytes, call, None, &|| ()) {
        Ok(loaded) => {
            if let Some(first) = lock(libraries).insert(library, loaded) {
                // Another thread was first, and the memory was taken once.
                release_module(process, &first);
            }
            CUDA_SUCCESS
        }
        Err(refused) => refused,
    }
}

fn release_module(process: &Process, gone: &LoadedModule) {
    if let Some((gpu, _)) = gone.location.filter(|_| gone.bytes > 0) {
        process.region.release(gpu, gone.bytes);
    }
}

/// Unloads a module or a library, with the driver's call.
fn unload(handle: u64, is_library: bool, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    let modules = &process.memory.modules;
    let mut table = lock(if is_library { &modules.libraries } else { &modules.modules });
    let answer = call();
    if answer == CUDA_SUCCESS
        && let Some(gone) = table.remove(&handle)
    {
        drop(table);
        release_module(process, &gone);
        if let Some((gpu, _)) = gone.location {
            // Its variables were freed with it.
            process.memory.forget_unknown(process, gpu);
        }
        if is_library {
            lock(&modules.kernels).retain(|_, library| *library != handle);
        }
    }
    answer
}

impl Modules {
    /// Releases what was loaded into a context that has been destroyed.
    pub(super) fn forget_context(&self, process: &Process, context: CUcontext) {
        let there =
            |module: &LoadedModule| module.location.is_some_and(|(_, own)| own == context.addr() as u64);
        lock(&self.modules).retain(|_, module| {
            let gone = there(module);
            if gone {
                release_module(process, module);
            }
            !gone
        });
        // Libraries stay, and are loaded again where they are used next.
        for library in lock(&self.libraries).values_mut().filter(|library| there(library)) {
            release_module(process, library);
            *library = LoadedModule { max_bytes: library.max_bytes, ..LoadedModule::default() };
        }
    }
}

hooks! { cuda;
    fn cuModuleLoad(module: *mut CUmodule, path: *const c_char) |next, _variant| {
        // SAFETY: null, or a path that the application passed for the driver to read.
        let max_bytes = unsafe { module_images::max_device_bytes_of_path(path) };
        // SAFETY: the output pointer is valid for writes; the other arguments are the application's, passed on
        // unchanged.
        load_module(module, max_bytes, |module| unsafe { next(module, path) })
    }

    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) |next, _variant| {
        // SAFETY: null, or an image that the application passed for the driver to read.
        let max_bytes = unsafe { module_images::max_device_bytes(image) };
        // SAFETY: the output pointer is valid for writes; the other arguments are the application's, passed on
        // unchanged.
        load_module(module, max_bytes, |module| unsafe { next(module, image) })
    }

    fn cuModuleLoadDataEx(
        module: *mut CUmodule,
        image: *const c_void,
        num_options: u32,
        options: *mut CUjit_option,
        option_values: *mut *mut c_void,
    ) |next, _variant| {
        // SAFETY: null, or an image that the application passed for the driver to read.
        let max_bytes = unsafe { module_images::max_device_bytes(image) };
        // SAFETY: the output pointer is valid for writes; the other arguments are the application's, passed on
        // unchanged.
        load_module(module, max_bytes, |module| unsafe { next(module, image, num_options, options, option_values) })
    }

    fn cuModuleLoadFatBinary(module: *mut CUmodule, fat_cubin: *const c_void) |next, _variant| {
        // SAFETY: null, or an image that the application passed for the driver to read.
        let max_bytes = unsafe { module_images::max_device_bytes(fat_cubin) };
        // SAFETY: the output pointer is valid for writes; the other arguments are the application's, passed on
        // unchanged.
        load_module(module, max_bytes, |module| unsafe { next(module, fat_cubin) })
    }

    fn cuModuleUnload(module: CUmodule) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        unload(module.addr() as u64, false, || unsafe { next(module) })
    }

    fn cuModuleGetGlobal_v2(
        pointer: *mut CUdeviceptr,
        bytes: *mut usize,
        module: CUmodule,
        name: *const c_char,
    ) |next, _variant| {
        // SAFETY: the output pointers are valid for writes; the other arguments are the application's, unchanged.
        linear::module_variable(pointer, bytes, |pointer, bytes| unsafe { next(pointer, bytes, module, name) })
    }

    fn cuLibraryGetGlobal(
        pointer: *mut CUdeviceptr,
        bytes: *mut usize,
        library: CUlibrary,
        name: *const c_char,
    ) |next, _variant| {
        // The library is loaded first, so that its memory can be distinguished from its variable's.
        let mut module = std::ptr::null_mut();
        // SAFETY: the library is the application's, and the pointer is to a local variable. If the call fails, so does
        // the next one.
        with_library_loaded(library.addr() as u64, || unsafe { driver::cuLibraryGetModule(&mut module, library) });
        // SAFETY: the output pointers are valid for writes; the other arguments are the application's, unchanged.
        linear::module_variable(pointer, bytes, |pointer, bytes| unsafe { next(pointer, bytes, library, name) })
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
        // SAFETY: null, or an image that the application passed for the driver to read.
        let max_bytes = unsafe { module_images::max_device_bytes(code) };
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        load_library(library, max_bytes, || unsafe {
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
        // SAFETY: null, or a path that the application passed for the driver to read.
        let max_bytes = unsafe { module_images::max_device_bytes_of_path(file_name) };
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        load_library(library, max_bytes, || unsafe {
            next(
                library, file_name, jit_options, jit_options_values, num_jit_options, library_options,
                library_option_values, num_library_options,
            )
        })
    }

    fn cuLibraryUnload(library: CUlibrary) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        unload(library.addr() as u64, true, || unsafe { next(library) })
    }

    fn cuLibraryGetModule(module: *mut CUmodule, library: CUlibrary) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        with_library_loaded(library.addr() as u64, || unsafe { next(module, library) })
    }

    fn cuLibraryGetKernel(kernel: *mut CUkernel, library: CUlibrary, name: *const c_char) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let answer = unsafe { next(kernel, library, name) };
        if answer == CUDA_SUCCESS
            && !kernel.is_null()
            && let Some(process) = process::attached()
        {
            // SAFETY: not null, and the call succeeded, so the driver has written a handle there.
            let made = unsafe { *kernel }.addr() as u64;
            lock(&process.memory.modules.kernels).insert(made, library.addr() as u64);
        }
        answer
    }

    fn cuKernelGetFunction(function: *mut CUfunction, kernel: CUkernel) |next, _variant| {
        let library = process::attached()
            .and_then(|process| lock(&process.memory.modules.kernels).get(&(kernel.addr() as u64)).copied());
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        with_library_loaded(library.unwrap_or(0), || unsafe { next(function, kernel) })
    }
}
