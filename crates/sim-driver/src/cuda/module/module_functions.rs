//! Exported functions for modules and the linker.

use super::image::ModuleImage;
use super::*;
use crate::cuda::context::{self, write_out};
use std::os::unix::ffi::OsStrExt;

/// A linker invocation: the concatenated bytes of its inputs.
#[derive(Default)]
struct LinkState {
    bytes: Mutex<Vec<u8>>,
}

static LINKS: HandleArena<LinkState> = HandleArena::new();

/// Borrows a string of the program; fails if it is null.
///
/// # Safety
/// `name` is null or points to a NUL-terminated string.
pub(super) unsafe fn read_text<'a>(name: *const c_char) -> Result<&'a CStr, CudaError> {
    if name.is_null() {
        return Err(CudaError::INVALID_VALUE);
    }
    // SAFETY: non-null, and the caller guarantees a NUL-terminated string.
    Ok(unsafe { CStr::from_ptr(name) })
}

/// Reads an image from a file.
///
/// # Safety
/// `path` is null or points to a NUL-terminated string.
pub(super) unsafe fn read_image_file(path: *const c_char) -> Result<ModuleImage, CudaError> {
    // SAFETY: this function's contract requires the same of its caller, and the arguments are passed on unchanged.
    let path = unsafe { read_text(path) }?;
    let bytes =
        std::fs::read(std::ffi::OsStr::from_bytes(path.to_bytes())).map_err(|_| CudaError::FILE_NOT_FOUND)?;
    Ok(ModuleImage::read(&bytes))
}

fn load(to: *mut CUmodule, image: Option<ModuleImage>) -> Result<(), CudaError> {
    let context = context::current()?;
    let image = image.filter(|_| !to.is_null()).ok_or(CudaError::INVALID_VALUE)?;
    let module = Module::load(image, Some(context), false)?;
    // SAFETY: non-null, and the program passes a pointer valid for writes.
    unsafe { write_out(to, handle_of(module)) }
}

fn link(handle: CUlinkState) -> Result<&'static LinkState, CudaError> {
    LINKS.get(handle).ok_or(CudaError::INVALID_HANDLE)
}

impl ModuleApi for Library {
    unsafe fn cuModuleLoad(module: *mut CUmodule, path: *const c_char) -> Result<(), CudaError> {
        // SAFETY: CUDA requires strings to be null or NUL-terminated.
        load(module, Some(unsafe { read_image_file(path) }?))
    }

    unsafe fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) -> Result<(), CudaError> {
        // SAFETY: CUDA requires the image to be null or complete.
        load(module, unsafe { ModuleImage::at(image.cast()) })
    }

    unsafe fn cuModuleLoadDataEx(
        module: *mut CUmodule,
        image: *const c_void,
        _num_options: u32,
        _options: *mut CUjit_option,
        _option_values: *mut *mut c_void,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires the image to be null or complete.
        load(module, unsafe { ModuleImage::at(image.cast()) })
    }

    unsafe fn cuModuleLoadFatBinary(
        module: *mut CUmodule,
        fat_cubin: *const c_void,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires the image to be null or complete.
        load(module, unsafe { ModuleImage::at(fat_cubin.cast()) })
    }

    unsafe fn cuModuleUnload(handle: CUmodule) -> Result<(), CudaError> {
        let module = module(handle)?;
        if module.library || !module.unload() { Err(CudaError::INVALID_HANDLE) } else { Ok(()) }
    }

    unsafe fn cuModuleGetLoadingMode(mode: *mut CUmoduleLoadingMode) -> Result<(), CudaError> {
        session()?;
        let eager = std::env::var_os("CUDA_MODULE_LOADING").is_some_and(|mode| mode == "EAGER");
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(mode, if eager { CU_MODULE_EAGER_LOADING } else { CU_MODULE_LAZY_LOADING }) }
    }

    unsafe fn cuModuleGetFunction(
        function: *mut CUfunction,
        handle: CUmodule,
        name: *const c_char,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires strings to be null or NUL-terminated.
        let found = module(handle)?.function(unsafe { read_text(name) }?)?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(function, handle_of(found)) }
    }

    unsafe fn cuModuleGetFunctionCount(count: *mut u32, handle: CUmodule) -> Result<(), CudaError> {
        let functions = module(handle)?.image.functions().len() as u32;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(count, functions) }
    }

    unsafe fn cuModuleEnumerateFunctions(
        functions: *mut CUfunction,
        num_functions: u32,
        handle: CUmodule,
    ) -> Result<(), CudaError> {
        let module = module(handle)?;
        for (index, name) in module.image.functions().iter().take(num_functions as usize).enumerate() {
            let function = module.function(name)?;
            // SAFETY: the program passes an array with room for `num_functions` handles.
            unsafe { write_out(functions.wrapping_add(index), handle_of(function)) }?;
        }
        Ok(())
    }

    unsafe fn cuModuleGetGlobal_v2(
        pointer: *mut CUdeviceptr,
        bytes: *mut usize,
        handle: CUmodule,
        name: *const c_char,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires strings to be null or NUL-terminated.
        let (address, size) = module(handle)?.global(unsafe { read_text(name) }?)?;
        // SAFETY: both outputs are null or valid for writes.
        unsafe { write_global(pointer, bytes, address, size) }
    }

    unsafe fn cuLinkCreate(
        _num_options: u32,
        _options: *mut CUjit_option,
        _option_values: *mut *mut c_void,
        state_out: *mut CUlinkState,
    ) -> Result<(), CudaError> {
        context::current()?;
        let link = LINKS
            .make(LinkState::default, |old| locked(&old.bytes).clear())
            .ok_or(CudaError::OUT_OF_MEMORY)?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(state_out, handle_of(link)) }
    }

    unsafe fn cuLinkCreate_v2(
        num_options: u32,
        options: *mut CUjit_option,
        option_values: *mut *mut c_void,
        state_out: *mut CUlinkState,
    ) -> Result<(), CudaError> {
        // SAFETY: this function's contract requires the same of its caller, and the arguments are passed on unchanged.
        unsafe { Self::cuLinkCreate(num_options, options, option_values, state_out) }
    }

    unsafe fn cuLinkAddData(
        state: CUlinkState,
        _kind: CUjitInputType,
        data: *mut c_void,
        size: usize,
        _name: *const c_char,
        _num_options: u32,
        _options: *mut CUjit_option,
        _option_values: *mut *mut c_void,
    ) -> Result<(), CudaError> {
        let link = link(state)?;
        if data.is_null() || size == 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: non-null, and the program passes `size` readable bytes.
        let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), size) };
        locked(&link.bytes).extend_from_slice(bytes);
        Ok(())
    }

    unsafe fn cuLinkAddData_v2(
        state: CUlinkState,
        kind: CUjitInputType,
        data: *mut c_void,
        size: usize,
        name: *const c_char,
        num_options: u32,
        options: *mut CUjit_option,
        option_values: *mut *mut c_void,
    ) -> Result<(), CudaError> {
        // SAFETY: this function's contract requires the same of its caller, and the arguments are passed on unchanged.
        unsafe { Self::cuLinkAddData(state, kind, data, size, name, num_options, options, option_values) }
    }

    unsafe fn cuLinkAddFile(
        state: CUlinkState,
        _kind: CUjitInputType,
        path: *const c_char,
        _num_options: u32,
        _options: *mut CUjit_option,
        _option_values: *mut *mut c_void,
    ) -> Result<(), CudaError> {
        let link = link(state)?;
        // SAFETY: CUDA requires strings to be null or NUL-terminated.
        let path = unsafe { read_text(path) }?;
        let bytes = std::fs::read(std::ffi::OsStr::from_bytes(path.to_bytes()))
            .map_err(|_| CudaError::FILE_NOT_FOUND)?;
        locked(&link.bytes).extend_from_slice(&bytes);
        Ok(())
    }

    unsafe fn cuLinkAddFile_v2(
        state: CUlinkState,
        kind: CUjitInputType,
        path: *const c_char,
        num_options: u32,
        options: *mut CUjit_option,
        option_values: *mut *mut c_void,
    ) -> Result<(), CudaError> {
        // SAFETY: this function's contract requires the same of its caller, and the arguments are passed on unchanged.
        unsafe { Self::cuLinkAddFile(state, kind, path, num_options, options, option_values) }
    }

    unsafe fn cuLinkComplete(
        state: CUlinkState,
        cubin_out: *mut *mut c_void,
        size_out: *mut usize,
    ) -> Result<(), CudaError> {
        let mut bytes = locked(&link(state)?.bytes);
        // A text stays NUL-terminated.
        bytes.push(0);
        let size = bytes.len() - 1;
        // SAFETY: the output is null or valid for writes; the bytes live until the link state is destroyed.
        unsafe { write_out(cubin_out, bytes.as_mut_ptr().cast()) }?;
        if size_out.is_null() {
            return Ok(());
        }
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(size_out, size) }
    }

    unsafe fn cuLinkDestroy(state: CUlinkState) -> Result<(), CudaError> {
        if LINKS.drop(state) { Ok(()) } else { Err(CudaError::INVALID_HANDLE) }
    }
}

/// Writes the address and size of a global variable, each unless its pointer is null.
///
/// # Safety
/// Both pointers are null or valid for writes.
pub(super) unsafe fn write_global(
    pointer: *mut CUdeviceptr,
    bytes: *mut usize,
    address: CUdeviceptr,
    size: usize,
) -> Result<(), CudaError> {
    if !pointer.is_null() {
        // SAFETY: non-null, and the caller guarantees that it is valid for writes.
        unsafe { pointer.write(address) };
    }
    if !bytes.is_null() {
        // SAFETY: non-null, and the caller guarantees that it is valid for writes.
        unsafe { bytes.write(size) };
    }
    Ok(())
}
