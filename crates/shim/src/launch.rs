//! Hooks on every call that submits kernels and graphs.
#![allow(unsafe_code)]

use crate::hook::{StreamVariant, hooks};
use crate::memory;
use crate::throttle::{SubmittedWork, WorkKey, needed, submit};
use partage_driver_api::cuda::*;

/// Kind of work in a [`WorkKey`] that stands for graphs.
const GRAPH_KIND: u64 = 1;

/// The default stream, for calls without a stream argument.
const NO_STREAM: CUstream = std::ptr::null_mut();

fn kernel_work(
    function: CUfunction,
    blocks: [u32; 3],
    threads: [u32; 3],
    stream: CUstream,
    variant: StreamVariant,
) -> SubmittedWork {
    SubmittedWork { key: WorkKey::kernel(function.addr(), blocks, threads), stream, variant }
}

/// Describes a launch by the old calls, which set a kernel's threads beforehand: shapes of one function differ by their
/// blocks only.
fn grid_work(
    function: CUfunction,
    width: i32,
    height: i32,
    stream: CUstream,
    variant: StreamVariant,
) -> SubmittedWork {
    kernel_work(function, [width.cast_unsigned(), height.cast_unsigned(), 1], [1; 3], stream, variant)
}

/// Returns whether launches of graphs need a hook, if only for the memory that they take.
#[inline]
fn graphs_needed() -> bool {
    needed() || memory::graphs::any_allocates()
}

/// Returns the key of a graph's launches.
pub(crate) fn graph_key(exec: CUgraphExec) -> WorkKey {
    WorkKey::other(GRAPH_KIND, exec.addr() as u64)
}

hooks! { cuda;
    fn cuLaunchKernel(
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
    ) twin cuLaunchKernel_ptsz |next, variant| if needed {
        let (blocks, threads) = ([grid_dim_x, grid_dim_y, grid_dim_z], [block_dim_x, block_dim_y, block_dim_z]);
        submit(
            || kernel_work(function, blocks, threads, stream, variant),
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            || unsafe {
                next(
                    function, grid_dim_x, grid_dim_y, grid_dim_z, block_dim_x, block_dim_y, block_dim_z,
                    shared_mem_bytes, stream, kernel_params, extra,
                )
            },
        )
    }

    fn cuLaunchKernelEx(
        config: *const CUlaunchConfig,
        function: CUfunction,
        kernel_params: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) twin cuLaunchKernelEx_ptsz |next, variant| if needed {
        submit(
            || {
                // SAFETY: null, or a configuration that the application passed for the driver to read; the driver
                // rejects null.
                match unsafe { config.as_ref() } {
                    Some(shape) => kernel_work(
                        function,
                        [shape.gridDimX, shape.gridDimY, shape.gridDimZ],
                        [shape.blockDimX, shape.blockDimY, shape.blockDimZ],
                        shape.hStream,
                        variant,
                    ),
                    None => kernel_work(function, [1; 3], [1; 3], NO_STREAM, variant),
                }
            },
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            || unsafe { next(config, function, kernel_params, extra) },
        )
    }

    fn cuLaunchCooperativeKernel(
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
    ) twin cuLaunchCooperativeKernel_ptsz |next, variant| if needed {
        let (blocks, threads) = ([grid_dim_x, grid_dim_y, grid_dim_z], [block_dim_x, block_dim_y, block_dim_z]);
        submit(
            || kernel_work(function, blocks, threads, stream, variant),
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            || unsafe {
                next(
                    function, grid_dim_x, grid_dim_y, grid_dim_z, block_dim_x, block_dim_y, block_dim_z,
                    shared_mem_bytes, stream, kernel_params,
                )
            },
        )
    }

    fn cuLaunchCooperativeKernelMultiDevice(
        launch_params_list: *mut CUDA_LAUNCH_PARAMS,
        num_devices: u32,
        flags: u32,
    ) |next, variant| if needed {
        if num_devices > 1 {
            // A container cannot have the turn on several GPUs at once; CUDA itself has deprecated this call.
            return CUDA_ERROR_NOT_SUPPORTED;
        }
        submit(
            || {
                // SAFETY: null, or a list that the application passed for the driver to read; the driver rejects null.
                // Only its first entry is read, and only if it has one.
                match unsafe { launch_params_list.as_ref() }.filter(|_| num_devices > 0) {
                    Some(shape) => kernel_work(
                        shape.function,
                        [shape.gridDimX, shape.gridDimY, shape.gridDimZ],
                        [shape.blockDimX, shape.blockDimY, shape.blockDimZ],
                        shape.hStream,
                        variant,
                    ),
                    None => kernel_work(std::ptr::null_mut(), [1; 3], [1; 3], NO_STREAM, variant),
                }
            },
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            || unsafe { next(launch_params_list, num_devices, flags) },
        )
    }

    fn cuLaunch(function: CUfunction) |next, variant| if needed {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        submit(|| grid_work(function, 1, 1, NO_STREAM, variant), || unsafe { next(function) })
    }

    fn cuLaunchGrid(function: CUfunction, grid_width: i32, grid_height: i32) |next, variant| if needed {
        submit(
            || grid_work(function, grid_width, grid_height, NO_STREAM, variant),
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            || unsafe { next(function, grid_width, grid_height) },
        )
    }

    fn cuLaunchGridAsync(
        function: CUfunction,
        grid_width: i32,
        grid_height: i32,
        stream: CUstream,
    ) |next, variant| if needed {
        submit(
            || grid_work(function, grid_width, grid_height, stream, variant),
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            || unsafe { next(function, grid_width, grid_height, stream) },
        )
    }

    fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream) twin cuGraphLaunch_ptsz |next, variant| if graphs_needed {
        submit(
            || SubmittedWork { key: graph_key(exec), stream, variant },
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            || memory::graphs::launch_graph(exec, || unsafe { next(exec, stream) }),
        )
    }
}
