//! Kernel launches. A kernel only takes time: its name determines how long, its grid how much of the GPU.

use super::context::{self, Context, write_out};
use super::device::Device;
use super::engine::{FULL_GPU_SHARE, StreamOp};
use super::module::{Function, PeerGroup, function};
use super::stream::{self, Stream};
use super::*;
use std::sync::atomic::Ordering;

/// Grid, block and dynamic shared memory of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaunchShape {
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) shared: u32,
}

impl LaunchShape {
    /// Checks that the device can run a launch of this shape.
    #[inline]
    pub(super) fn check(&self, device: &Device) -> Result<(), CudaError> {
        let LaunchShape { grid: [x, y, z], block: [bx, by, bz], shared } = *self;
        let compute = &device.profile.compute;
        let threads = u64::from(bx) * u64::from(by) * u64::from(bz);
        let fits = (1..1 << 31).contains(&x)
            && (1..1 << 16).contains(&y)
            && (1..1 << 16).contains(&z)
            && bx <= 1024
            && by <= 1024
            && bz <= 64
            && threads >= 1
            && threads <= u64::from(compute.threads_per_block)
            && shared <= compute.shared_per_block_optin;
        if fits { Ok(()) } else { Err(CudaError::INVALID_VALUE) }
    }

    /// Returns the share of the GPU that the grid occupies.
    pub(super) fn share(&self, device: &Device) -> u32 {
        let blocks = self.grid.iter().map(|&n| u64::from(n)).product::<u64>();
        if blocks >= device.max_resident_blocks {
            return FULL_GPU_SHARE;
        }
        let at_once = u64::from(device.profile.compute.multiprocessors) * resident_blocks(device, self);
        u32::try_from(blocks.saturating_mul(u64::from(FULL_GPU_SHARE)).div_ceil(at_once.max(1)))
            .map_or(FULL_GPU_SHARE, |share| share.min(FULL_GPU_SHARE))
    }
}

/// Returns how many blocks of this shape fit on a multiprocessor at a time.
fn resident_blocks(device: &Device, shape: &LaunchShape) -> u64 {
    let compute = &device.profile.compute;
    let threads = shape.block.iter().map(|&n| u64::from(n)).product::<u64>().max(1);
    // Threads are allocated in whole warps.
    let threads = threads.next_multiple_of(u64::from(compute.warp.max(1)));
    let by_threads = u64::from(compute.threads_per_multiprocessor) / threads;
    let by_shared = match u64::from(shape.shared) {
        0 => u64::MAX,
        shared => u64::from(compute.shared_per_multiprocessor) / shared,
    };
    by_threads.min(by_shared).min(u64::from(compute.blocks_per_multiprocessor))
}

/// Launches a function in a stream, or captures the launch.
#[inline]
pub(super) fn launch(
    function: &'static Function,
    shape: LaunchShape,
    stream: &'static Stream,
) -> Result<(), CudaError> {
    let (context, timeline) = stream.context_and_timeline();
    function.prepare_launch(context)?;
    let device = context.device;
    shape.check(device)?;
    if shape.shared > function.max_dynamic_shared() {
        return Err(CudaError::INVALID_VALUE);
    }
    if let Some(capture) = stream.capture() {
        return capture.add_kernel(function, shape);
    }
    device.check()?;
    let duration = function.duration;
    if duration == 0 {
        return submit_special_kernel(function, shape, device, timeline);
    }
    device.submit(timeline, StreamOp::Kernel { duration, share: shape.share(device) })
}

/// Submits a kernel that takes no time or waits for peers.
fn submit_special_kernel(
    function: &Function,
    shape: LaunchShape,
    device: &'static Device,
    timeline: usize,
) -> Result<(), CudaError> {
    match function.peers {
        None => device.submit_empty_kernel(timeline),
        Some(PeerGroup { key, count, duration }) => {
            let kernel = device.peer_kernel(key, count, duration, shape.share(device))?;
            device.submit(timeline, StreamOp::PeerKernel(kernel))
        }
    }
}

/// Launches a function in the current context.
#[inline]
fn launch_by_handle(handle: CUfunction, shape: LaunchShape, stream: CUstream) -> Result<(), CudaError> {
    let (context, per_thread) = context::current_and_mode()?;
    let function = function(handle)?;
    launch(function, shape, stream::resolve_in(context, stream, per_thread)?)
}

/// Launches with the deprecated API: an earlier call set the block shape, this one launches the grid.
fn launch_legacy(handle: CUfunction, width: i32, height: i32, stream: CUstream) -> Result<(), CudaError> {
    let own = function(handle)?;
    let block = [0, 1, 2].map(|axis: usize| own.block[axis].load(Ordering::Relaxed));
    let side = |length: i32| u32::try_from(length).map_err(|_| CudaError::INVALID_VALUE);
    launch_by_handle(handle, LaunchShape { grid: [side(width)?, side(height)?, 1], block, shared: 0 }, stream)
}

fn blocks_per_multiprocessor(handle: CUfunction, block_size: i32, shared: usize) -> Result<i32, CudaError> {
    function(handle)?;
    let context: &Context = context::current()?;
    let (Ok(threads), Ok(shared)) = (u32::try_from(block_size), u32::try_from(shared)) else {
        return Err(CudaError::INVALID_VALUE);
    };
    if threads == 0 {
        return Err(CudaError::INVALID_VALUE);
    }
    if threads > context.device.profile.compute.threads_per_block {
        return Ok(0);
    }
    let shape = LaunchShape { grid: [1; 3], block: [threads, 1, 1], shared };
    Ok(resident_blocks(context.device, &shape) as i32)
}

impl LaunchApi for Library {
    #[inline]
    unsafe fn cuLaunchKernel(
        function: CUfunction,
        grid_dim_x: u32,
        grid_dim_y: u32,
        grid_dim_z: u32,
        block_dim_x: u32,
        block_dim_y: u32,
        block_dim_z: u32,
        shared_mem_bytes: u32,
        stream: CUstream,
        kernel_params: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> Result<(), CudaError> {
        if !kernel_params.is_null() && !extra.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        let shape = LaunchShape {
            grid: [grid_dim_x, grid_dim_y, grid_dim_z],
            block: [block_dim_x, block_dim_y, block_dim_z],
            shared: shared_mem_bytes,
        };
        launch_by_handle(function, shape, stream)
    }

    unsafe fn cuLaunchKernelEx(
        config: *const CUlaunchConfig,
        function: CUfunction,
        _kernel_params: *mut *mut c_void,
        _extra: *mut *mut c_void,
    ) -> Result<(), CudaError> {
        if config.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: non-null, and the program passes a pointer valid for reads.
        let config = unsafe { config.read() };
        let shape = LaunchShape {
            grid: [config.gridDimX, config.gridDimY, config.gridDimZ],
            block: [config.blockDimX, config.blockDimY, config.blockDimZ],
            shared: config.sharedMemBytes,
        };
        launch_by_handle(function, shape, config.hStream)
    }

    unsafe fn cuLaunchCooperativeKernel(
        handle: CUfunction,
        grid_dim_x: u32,
        grid_dim_y: u32,
        grid_dim_z: u32,
        block_dim_x: u32,
        block_dim_y: u32,
        block_dim_z: u32,
        shared_mem_bytes: u32,
        stream: CUstream,
        _kernel_params: *mut *mut c_void,
    ) -> Result<(), CudaError> {
        let shape = LaunchShape {
            grid: [grid_dim_x, grid_dim_y, grid_dim_z],
            block: [block_dim_x, block_dim_y, block_dim_z],
            shared: shared_mem_bytes,
        };
        let device = context::current()?.device;
        shape.check(device)?;
        // All blocks of a cooperative launch must be resident at once.
        let blocks = shape.grid.iter().map(|&n| u64::from(n)).product::<u64>();
        if blocks > u64::from(device.profile.compute.multiprocessors) * resident_blocks(device, &shape) {
            return Err(CudaError::COOPERATIVE_LAUNCH_TOO_LARGE);
        }
        launch_by_handle(handle, shape, stream)
    }

    unsafe fn cuLaunchCooperativeKernelMultiDevice(
        launch_params_list: *mut CUDA_LAUNCH_PARAMS,
        num_devices: u32,
        _flags: u32,
    ) -> Result<(), CudaError> {
        if launch_params_list.is_null() || num_devices == 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        for index in 0..num_devices as usize {
            // SAFETY: the program passes an array of `num_devices` entries.
            let params = unsafe { launch_params_list.wrapping_add(index).read() };
            let shape = LaunchShape {
                grid: [params.gridDimX, params.gridDimY, params.gridDimZ],
                block: [params.blockDimX, params.blockDimY, params.blockDimZ],
                shared: params.sharedMemBytes,
            };
            launch(function(params.function)?, shape, stream::resolve(params.hStream)?)?;
        }
        Ok(())
    }

    unsafe fn cuFuncSetBlockShape(handle: CUfunction, x: i32, y: i32, z: i32) -> Result<(), CudaError> {
        let own = function(handle)?;
        for (axis, length) in [x, y, z].into_iter().enumerate() {
            let length = u32::try_from(length).ok().filter(|&n| n > 0).ok_or(CudaError::INVALID_VALUE)?;
            own.block[axis].store(length, Ordering::Relaxed);
        }
        Ok(())
    }

    unsafe fn cuFuncSetSharedSize(handle: CUfunction, _bytes: u32) -> Result<(), CudaError> {
        function(handle).map(|_| ())
    }

    unsafe fn cuParamSetSize(handle: CUfunction, _numbytes: u32) -> Result<(), CudaError> {
        function(handle).map(|_| ())
    }

    unsafe fn cuParamSeti(handle: CUfunction, _offset: i32, _value: u32) -> Result<(), CudaError> {
        function(handle).map(|_| ())
    }

    unsafe fn cuParamSetf(handle: CUfunction, _offset: i32, _value: f32) -> Result<(), CudaError> {
        function(handle).map(|_| ())
    }

    unsafe fn cuParamSetv(
        handle: CUfunction,
        _offset: i32,
        _pointer: *mut c_void,
        _numbytes: u32,
    ) -> Result<(), CudaError> {
        function(handle).map(|_| ())
    }

    unsafe fn cuLaunch(handle: CUfunction) -> Result<(), CudaError> {
        launch_legacy(handle, 1, 1, std::ptr::null_mut())
    }

    unsafe fn cuLaunchGrid(handle: CUfunction, grid_width: i32, grid_height: i32) -> Result<(), CudaError> {
        launch_legacy(handle, grid_width, grid_height, std::ptr::null_mut())
    }

    unsafe fn cuLaunchGridAsync(
        handle: CUfunction,
        grid_width: i32,
        grid_height: i32,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        launch_legacy(handle, grid_width, grid_height, stream)
    }

    unsafe fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        num_blocks: *mut i32,
        handle: CUfunction,
        block_size: i32,
        dynamic_shared_size: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(num_blocks, blocks_per_multiprocessor(handle, block_size, dynamic_shared_size)?) }
    }

    unsafe fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        num_blocks: *mut i32,
        handle: CUfunction,
        block_size: i32,
        dynamic_shared_size: usize,
        _flags: u32,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(num_blocks, blocks_per_multiprocessor(handle, block_size, dynamic_shared_size)?) }
    }

    unsafe fn cuOccupancyMaxPotentialBlockSize(
        min_grid_size: *mut i32,
        block_size: *mut i32,
        handle: CUfunction,
        _block_size_to_dynamic_shared_size: CUoccupancyB2DSize,
        dynamic_shared_size: usize,
        block_size_limit: i32,
    ) -> Result<(), CudaError> {
        let most = context::current()?.device.profile.compute.threads_per_block as i32;
        let size = if block_size_limit > 0 { block_size_limit.min(most) } else { most };
        let blocks = blocks_per_multiprocessor(handle, size, dynamic_shared_size)?;
        let multiprocessors = context::current()?.device.profile.compute.multiprocessors as i32;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(min_grid_size, blocks * multiprocessors) }?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(block_size, size) }
    }

    unsafe fn cuOccupancyMaxPotentialBlockSizeWithFlags(
        min_grid_size: *mut i32,
        block_size: *mut i32,
        function: CUfunction,
        block_size_to_dynamic_shared_size: CUoccupancyB2DSize,
        dynamic_shared_size: usize,
        block_size_limit: i32,
        _flags: u32,
    ) -> Result<(), CudaError> {
        // SAFETY: this function's contract requires the same of its caller, and the arguments are passed on unchanged.
        unsafe {
            Self::cuOccupancyMaxPotentialBlockSize(
                min_grid_size,
                block_size,
                function,
                block_size_to_dynamic_shared_size,
                dynamic_shared_size,
                block_size_limit,
            )
        }
    }

    unsafe fn cuOccupancyAvailableDynamicSMemPerBlock(
        dynamic_shared_size: *mut usize,
        handle: CUfunction,
        num_blocks: i32,
        _block_size: i32,
    ) -> Result<(), CudaError> {
        let function = function(handle)?;
        let compute = &context::current()?.device.profile.compute;
        let blocks = u32::try_from(num_blocks).ok().filter(|&n| n > 0).ok_or(CudaError::INVALID_VALUE)?;
        let each = (compute.shared_per_multiprocessor / blocks).min(function.max_dynamic_shared());
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(dynamic_shared_size, each as usize) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::exports::*;
    use super::super::test_node;
    use super::*;
    use std::ffi::CStr;

    #[test]
    fn function_queries_follow_the_function() {
        test_node::run(|| {
            let (mut context, mut module, mut function) =
                (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
            let (mut bytes, mut name) = (0, std::ptr::null());
            // SAFETY: no pointer is passed.
            assert_eq!(unsafe { cuInit(0) }, 0);
            // SAFETY: the output is a local variable, as in the calls below.
            assert_eq!(unsafe { cuCtxCreate_v2(&mut context, 0, 0) }, 0);
            // SAFETY: the image is a NUL-terminated text.
            assert_eq!(unsafe { cuModuleLoadData(&mut module, c"any".as_ptr().cast()) }, 0);
            // SAFETY: the name is a NUL-terminated text.
            assert_eq!(unsafe { cuModuleGetFunction(&mut function, module, c"one".as_ptr()) }, 0);
            let mut available = |blocks| {
                // SAFETY: the output is a local variable.
                let code =
                    unsafe { cuOccupancyAvailableDynamicSMemPerBlock(&mut bytes, function, blocks, 256) };
                assert_eq!(code, 0);
                bytes
            };
            assert_eq!(available(1), 48 << 10);
            assert_eq!(available(8), (164 << 10) / 8);
            let attribute = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: no pointer is passed except a valid handle.
            assert_eq!(unsafe { cuFuncSetAttribute(function, attribute, 100 << 10) }, 0);
            assert_eq!(available(1), 100 << 10);
            // SAFETY: the output is a local variable, and a null handle is rejected.
            assert_eq!(unsafe { cuFuncGetName(&mut name, std::ptr::null_mut()) }, CUDA_ERROR_INVALID_VALUE);
            // SAFETY: the output is a local variable, and a null handle is rejected.
            assert_eq!(unsafe { cuKernelGetName(&mut name, std::ptr::null_mut()) }, CUDA_ERROR_INVALID_VALUE);
        });
    }

    fn used_mebibytes() -> usize {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the outputs are local variables.
        assert_eq!(unsafe { cuMemGetInfo_v2(&mut free, &mut total) }, 0);
        (total - free) >> 20
    }

    /// Launches a function of the module in the default stream.
    fn launch(module: CUmodule, name: &CStr) {
        let (mut function, none) = (std::ptr::null_mut(), std::ptr::null_mut::<*mut c_void>());
        // SAFETY: the name is a NUL-terminated text, and the output is a local variable.
        assert_eq!(unsafe { cuModuleGetFunction(&mut function, module, name.as_ptr()) }, 0);
        let stream = std::ptr::null_mut();
        // SAFETY: the function takes no arguments.
        assert_eq!(unsafe { cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, none, none) }, 0);
    }

    #[test]
    fn options_charge_kernels_at_their_first_launch_and_graphs() {
        let change = |config: &mut crate::node::NodeConfig| {
            config.settings.kernel_mebibytes = 6;
            config.settings.graph_mebibytes = 10;
        };
        test_node::run_with_config(change, || {
            let (mut context, mut module) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: no pointer is passed.
            assert_eq!(unsafe { cuInit(0) }, 0);
            // SAFETY: the output is a local variable, as in the calls below.
            assert_eq!(unsafe { cuCtxCreate_v2(&mut context, 0, 0) }, 0);
            let start = used_mebibytes();
            // SAFETY: the image is a NUL-terminated text.
            assert_eq!(unsafe { cuModuleLoadData(&mut module, c"any".as_ptr().cast()) }, 0);
            let loaded = used_mebibytes();
            for (name, expected) in
                [(c"one", 6), (c"one", 6), (c"two_loads_20mib", 26), (c"three_loads_0mib", 26)]
            {
                launch(module, name);
                assert_eq!(used_mebibytes() - loaded, expected, "{name:?}");
            }
            // SAFETY: a valid handle.
            assert_eq!(unsafe { cuModuleUnload(module) }, 0);
            assert_eq!(used_mebibytes(), start);
            let (mut graph, mut execs) = (std::ptr::null_mut(), [std::ptr::null_mut(); 2]);
            // SAFETY: the output is a local variable.
            assert_eq!(unsafe { cuGraphCreate(&mut graph, 0) }, 0);
            for exec in &mut execs {
                // SAFETY: the output is a local variable.
                assert_eq!(unsafe { cuGraphInstantiateWithFlags(exec, graph, 0) }, 0);
            }
            assert_eq!(used_mebibytes() - start, 20);
            for exec in execs {
                // SAFETY: a valid handle.
                assert_eq!(unsafe { cuGraphExecDestroy(exec) }, 0);
            }
            assert_eq!(used_mebibytes(), start);
        });
    }
}
