//! Exported functions for libraries, kernels and function attributes.

use super::image::ModuleImage;
use super::module_functions::{read_image_file, read_text, write_global};
use super::*;
use crate::cuda::context::{self, write_out};
use crate::cuda::session::device;

fn load(to: *mut CUlibrary, image: Option<ModuleImage>) -> Result<(), CudaError> {
    session()?;
    let image = image.filter(|_| !to.is_null()).ok_or(CudaError::INVALID_VALUE)?;
    // SAFETY: non-null, and the program passes a pointer valid for writes.
    unsafe { write_out(to, handle_of(Module::load(image, None, true)?)) }
}

/// Resolves the handle of a function whose name is requested: a null handle is an invalid value there.
fn named(handle: CUfunction) -> Result<&'static Function, CudaError> {
    if handle.is_null() { Err(CudaError::INVALID_VALUE) } else { function(handle) }
}

impl Function {
    /// Returns an attribute that the compiler or the program would have set.
    fn attribute(&self, attribute: CUfunction_attribute) -> Result<i32, CudaError> {
        let load = |value: &AtomicI32| value.load(Ordering::Relaxed);
        Ok(match attribute {
            CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK => 1024,
            CU_FUNC_ATTRIBUTE_NUM_REGS => 32,
            CU_FUNC_ATTRIBUTE_PTX_VERSION | CU_FUNC_ATTRIBUTE_BINARY_VERSION => {
                let context = self.module.context();
                context.map_or(80, |context| context.device.profile.compute.capability as i32)
            }
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES => match load(&self.dynamic_shared) {
                0 => 48 << 10,
                set => set,
            },
            CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT => load(&self.carveout),
            CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH => load(&self.cluster[0]),
            CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT => load(&self.cluster[1]),
            CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH => load(&self.cluster[2]),
            other if other < CU_FUNC_ATTRIBUTE_MAX => 0,
            _ => return Err(CudaError::INVALID_VALUE),
        })
    }

    fn set_attribute(&self, attribute: CUfunction_attribute, value: i32) -> Result<(), CudaError> {
        let cell = match attribute {
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES => {
                let context = self.module.context().or_else(|| context::current().ok());
                let most =
                    context.map_or(48 << 10, |context| context.device.profile.compute.shared_per_block_optin);
                if !(0..=most as i32).contains(&value) {
                    return Err(CudaError::INVALID_VALUE);
                }
                &self.dynamic_shared
            }
            CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT if (-1..=100).contains(&value) => {
                &self.carveout
            }
            CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH => &self.cluster[0],
            CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT => &self.cluster[1],
            CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH => &self.cluster[2],
            CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            | CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE => return Ok(()),
            _ => return Err(CudaError::INVALID_VALUE),
        };
        cell.store(value, Ordering::Relaxed);
        Ok(())
    }
}

impl KernelApi for Library {
    unsafe fn cuFuncGetAttribute(
        value: *mut i32,
        attribute: CUfunction_attribute,
        handle: CUfunction,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(value, function(handle)?.attribute(attribute)?) }
    }

    unsafe fn cuFuncSetAttribute(
        handle: CUfunction,
        attribute: CUfunction_attribute,
        value: i32,
    ) -> Result<(), CudaError> {
        function(handle)?.set_attribute(attribute, value)
    }

    unsafe fn cuFuncSetCacheConfig(handle: CUfunction, _config: CUfunc_cache) -> Result<(), CudaError> {
        function(handle).map(|_| ())
    }

    unsafe fn cuFuncSetSharedMemConfig(handle: CUfunction, _config: CUsharedconfig) -> Result<(), CudaError> {
        function(handle).map(|_| ())
    }

    unsafe fn cuFuncGetModule(module: *mut CUmodule, handle: CUfunction) -> Result<(), CudaError> {
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(module, handle_of(function(handle)?.module)) }
    }

    unsafe fn cuFuncGetName(name: *mut *const c_char, handle: CUfunction) -> Result<(), CudaError> {
        // SAFETY: the output is null or valid for writes; functions and their names are never freed.
        unsafe { write_out(name, named(handle)?.name.as_ptr()) }
    }

    unsafe fn cuFuncIsLoaded(
        state: *mut CUfunctionLoadingState,
        handle: CUfunction,
    ) -> Result<(), CudaError> {
        let loaded = function(handle)?.module.context().is_some();
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe {
            write_out(
                state,
                if loaded { CU_FUNCTION_LOADING_STATE_LOADED } else { CU_FUNCTION_LOADING_STATE_UNLOADED },
            )
        }
    }

    unsafe fn cuFuncLoad(handle: CUfunction) -> Result<(), CudaError> {
        function(handle)?.load_into(context::current()?)
    }

    unsafe fn cuLibraryLoadData(
        library: *mut CUlibrary,
        code: *const c_void,
        _jit_options: *mut CUjit_option,
        _jit_options_values: *mut *mut c_void,
        _num_jit_options: u32,
        _library_options: *mut CUlibraryOption,
        _library_option_values: *mut *mut c_void,
        _num_library_options: u32,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires the image to be null or complete.
        load(library, unsafe { ModuleImage::at(code.cast()) })
    }

    unsafe fn cuLibraryLoadFromFile(
        library: *mut CUlibrary,
        file_name: *const c_char,
        _jit_options: *mut CUjit_option,
        _jit_options_values: *mut *mut c_void,
        _num_jit_options: u32,
        _library_options: *mut CUlibraryOption,
        _library_option_values: *mut *mut c_void,
        _num_library_options: u32,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires strings to be null or NUL-terminated.
        load(library, Some(unsafe { read_image_file(file_name) }?))
    }

    unsafe fn cuLibraryUnload(handle: CUlibrary) -> Result<(), CudaError> {
        if library(handle)?.unload() { Ok(()) } else { Err(CudaError::INVALID_HANDLE) }
    }

    unsafe fn cuLibraryGetKernel(
        kernel: *mut CUkernel,
        handle: CUlibrary,
        name: *const c_char,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires strings to be null or NUL-terminated.
        let found = library(handle)?.function(unsafe { read_text(name) }?)?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(kernel, handle_of(found)) }
    }

    unsafe fn cuLibraryGetKernelCount(count: *mut u32, handle: CUlibrary) -> Result<(), CudaError> {
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(count, library(handle)?.image.functions().len() as u32) }
    }

    unsafe fn cuLibraryEnumerateKernels(
        kernels: *mut CUkernel,
        num_kernels: u32,
        handle: CUlibrary,
    ) -> Result<(), CudaError> {
        let library = library(handle)?;
        for (index, name) in library.image.functions().iter().take(num_kernels as usize).enumerate() {
            let kernel = library.function(name)?;
            // SAFETY: the program passes an array with room for `num_kernels` handles.
            unsafe { write_out(kernels.wrapping_add(index), handle_of(kernel)) }?;
        }
        Ok(())
    }

    unsafe fn cuLibraryGetModule(module: *mut CUmodule, handle: CUlibrary) -> Result<(), CudaError> {
        let library = library(handle)?;
        library.load_into(context::current()?)?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(module, handle_of(library)) }
    }

    unsafe fn cuLibraryGetGlobal(
        pointer: *mut CUdeviceptr,
        bytes: *mut usize,
        handle: CUlibrary,
        name: *const c_char,
    ) -> Result<(), CudaError> {
        let library = library(handle)?;
        library.load_into(context::current()?)?;
        // SAFETY: CUDA requires strings to be null or NUL-terminated.
        let (address, size) = library.global(unsafe { read_text(name) }?)?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_global(pointer, bytes, address, size) }
    }

    unsafe fn cuKernelGetFunction(to: *mut CUfunction, kernel: CUkernel) -> Result<(), CudaError> {
        let own = function(kernel.cast())?;
        own.load_into(context::current()?)?;
        // SAFETY: the output is null or valid for writes. A kernel and its function are the same object here.
        unsafe { write_out(to, handle_of(own)) }
    }

    unsafe fn cuKernelGetName(name: *mut *const c_char, kernel: CUkernel) -> Result<(), CudaError> {
        // SAFETY: the output is null or valid for writes; functions and their names are never freed.
        unsafe { write_out(name, named(kernel.cast())?.name.as_ptr()) }
    }

    unsafe fn cuKernelGetAttribute(
        value: *mut i32,
        attribute: CUfunction_attribute,
        kernel: CUkernel,
        ordinal: CUdevice,
    ) -> Result<(), CudaError> {
        device(ordinal)?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(value, function(kernel.cast())?.attribute(attribute)?) }
    }

    unsafe fn cuKernelSetAttribute(
        attribute: CUfunction_attribute,
        val: i32,
        kernel: CUkernel,
        ordinal: CUdevice,
    ) -> Result<(), CudaError> {
        device(ordinal)?;
        function(kernel.cast())?.set_attribute(attribute, val)
    }

    unsafe fn cuKernelSetCacheConfig(
        kernel: CUkernel,
        _config: CUfunc_cache,
        ordinal: CUdevice,
    ) -> Result<(), CudaError> {
        device(ordinal)?;
        function(kernel.cast()).map(|_| ())
    }
}
