//! The functions on modules and linking.

use super::image::Image;
use super::*;
use crate::cuda::context::{self, answer};
use std::os::unix::ffi::OsStrExt;

/// Objects that are being linked: their bytes, one after the other.
#[derive(Default)]
struct Link {
    bytes: Mutex<Vec<u8>>,
}

static LINKS: Arena<Link> = Arena::new();

/// # Safety
/// The program's text, or null.
pub(super) unsafe fn text<'a>(name: *const c_char) -> Result<&'a CStr, CudaError> {
    if name.is_null() {
        return Err(CudaError::INVALID_VALUE);
    }
    // SAFETY: not null, and the caller's promise.
    Ok(unsafe { CStr::from_ptr(name) })
}

/// # Safety
/// The program's path, or null.
pub(super) unsafe fn file(path: *const c_char) -> Result<Image, CudaError> {
    // SAFETY: the caller's promise.
    let path = unsafe { text(path) }?;
    let bytes =
        std::fs::read(std::ffi::OsStr::from_bytes(path.to_bytes())).map_err(|_| CudaError::FILE_NOT_FOUND)?;
    Ok(Image::read(&bytes))
}

fn load(to: *mut CUmodule, image: Option<Image>) -> Result<(), CudaError> {
    let context = context::current()?;
    let image = image.filter(|_| !to.is_null()).ok_or(CudaError::INVALID_VALUE)?;
    let module = Module::load(image, Some(context), false)?;
    // SAFETY: not null, and the program's to write.
    unsafe { answer(to, handle_of(module)) }
}

fn link(handle: CUlinkState) -> Result<&'static Link, CudaError> {
    LINKS.get(handle).ok_or(CudaError::INVALID_HANDLE)
}

impl Modules for Library {
    unsafe fn cuModuleLoad(module: *mut CUmodule, path: *const c_char) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        load(module, Some(unsafe { file(path) }?))
    }

    unsafe fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        load(module, unsafe { Image::at(image.cast()) })
    }

    unsafe fn cuModuleLoadDataEx(
        module: *mut CUmodule,
        image: *const c_void,
        _num_options: u32,
        _options: *mut CUjit_option,
        _option_values: *mut *mut c_void,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        load(module, unsafe { Image::at(image.cast()) })
    }

    unsafe fn cuModuleLoadFatBinary(
        module: *mut CUmodule,
        fat_cubin: *const c_void,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        load(module, unsafe { Image::at(fat_cubin.cast()) })
    }

    unsafe fn cuModuleUnload(handle: CUmodule) -> Result<(), CudaError> {
        let module = module(handle)?;
        if module.library || !module.unload() { Err(CudaError::INVALID_HANDLE) } else { Ok(()) }
    }

    unsafe fn cuModuleGetLoadingMode(mode: *mut CUmoduleLoadingMode) -> Result<(), CudaError> {
        session()?;
        let eager = std::env::var_os("CUDA_MODULE_LOADING").is_some_and(|mode| mode == "EAGER");
        // SAFETY: the caller's promise.
        unsafe { answer(mode, if eager { CU_MODULE_EAGER_LOADING } else { CU_MODULE_LAZY_LOADING }) }
    }

    unsafe fn cuModuleGetFunction(
        function: *mut CUfunction,
        handle: CUmodule,
        name: *const c_char,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let found = module(handle)?.function(unsafe { text(name) }?)?;
        // SAFETY: likewise.
        unsafe { answer(function, handle_of(found)) }
    }

    unsafe fn cuModuleGetFunctionCount(count: *mut u32, handle: CUmodule) -> Result<(), CudaError> {
        let functions = module(handle)?.image.functions().len() as u32;
        // SAFETY: the caller's promise.
        unsafe { answer(count, functions) }
    }

    unsafe fn cuModuleEnumerateFunctions(
        functions: *mut CUfunction,
        num_functions: u32,
        handle: CUmodule,
    ) -> Result<(), CudaError> {
        let module = module(handle)?;
        for (index, name) in module.image.functions().iter().take(num_functions as usize).enumerate() {
            let function = module.function(name)?;
            // SAFETY: the caller has room for as many as it says.
            unsafe { answer(functions.wrapping_add(index), handle_of(function)) }?;
        }
        Ok(())
    }

    unsafe fn cuModuleGetGlobal_v2(
        pointer: *mut CUdeviceptr,
        bytes: *mut usize,
        handle: CUmodule,
        name: *const c_char,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let (address, size) = module(handle)?.global(unsafe { text(name) }?)?;
        // SAFETY: not null.
        unsafe { give_global(pointer, bytes, address, size) }
    }

    unsafe fn cuLinkCreate(
        _num_options: u32,
        _options: *mut CUjit_option,
        _option_values: *mut *mut c_void,
        state_out: *mut CUlinkState,
    ) -> Result<(), CudaError> {
        context::current()?;
        let link =
            LINKS.make(Link::default, |old| locked(&old.bytes).clear()).ok_or(CudaError::OUT_OF_MEMORY)?;
        // SAFETY: the caller's promise.
        unsafe { answer(state_out, handle_of(link)) }
    }

    unsafe fn cuLinkCreate_v2(
        num_options: u32,
        options: *mut CUjit_option,
        option_values: *mut *mut c_void,
        state_out: *mut CUlinkState,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise is the same.
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
        // SAFETY: not null, and as long as the caller says.
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
        // SAFETY: the caller's promise is the same.
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
        // SAFETY: the caller's promise.
        let path = unsafe { text(path) }?;
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
        // SAFETY: the caller's promise is the same.
        unsafe { Self::cuLinkAddFile(state, kind, path, num_options, options, option_values) }
    }

    unsafe fn cuLinkComplete(
        state: CUlinkState,
        cubin_out: *mut *mut c_void,
        size_out: *mut usize,
    ) -> Result<(), CudaError> {
        let mut bytes = locked(&link(state)?.bytes);
        // Texts stay texts: they end in zero.
        bytes.push(0);
        let size = bytes.len() - 1;
        // SAFETY: the caller's promise; the bytes live until the link state is destroyed.
        unsafe { answer(cubin_out, bytes.as_mut_ptr().cast()) }?;
        if size_out.is_null() {
            return Ok(());
        }
        // SAFETY: likewise.
        unsafe { answer(size_out, size) }
    }

    unsafe fn cuLinkDestroy(state: CUlinkState) -> Result<(), CudaError> {
        if LINKS.drop(state) { Ok(()) } else { Err(CudaError::INVALID_HANDLE) }
    }
}

/// # Safety
/// Both null or the program's to write.
pub(super) unsafe fn give_global(
    pointer: *mut CUdeviceptr,
    bytes: *mut usize,
    address: CUdeviceptr,
    size: usize,
) -> Result<(), CudaError> {
    if !pointer.is_null() {
        // SAFETY: not null, and the caller's promise.
        unsafe { pointer.write(address) };
    }
    if !bytes.is_null() {
        // SAFETY: likewise.
        unsafe { bytes.write(size) };
    }
    Ok(())
}
