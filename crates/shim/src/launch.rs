//! Every way to submit work.
#![allow(unsafe_code)]

use crate::hook::{Variant, hooks};
use crate::memory;
use crate::throttle::{Key, Work, needed, submit};
use partage_driver_api::cuda::*;

/// What stands for a graph among the kinds of work.
const GRAPH: u64 = 1;

/// The legacy default stream, as a program means it that names none.
const NO_STREAM: CUstream = std::ptr::null_mut();

fn kernel(
    function: CUfunction,
    blocks: [u32; 3],
    threads: [u32; 3],
    stream: CUstream,
    variant: Variant,
) -> Work {
    Work { key: Key::kernel(function.addr(), blocks, threads), stream, variant }
}

/// The old calls set a kernel's threads beforehand; two shapes of one function are told apart by its blocks alone.
fn grid(function: CUfunction, width: i32, height: i32, stream: CUstream, variant: Variant) -> Work {
    kernel(function, [width.cast_unsigned(), height.cast_unsigned(), 1], [1; 3], stream, variant)
}

/// Whether launches of graphs have to be looked at, be it for the memory that they take.
#[inline]
fn graphs_needed() -> bool {
    needed() || memory::graphs::any()
}

/// What a graph is among the kinds of work.
pub(crate) fn graph(exec: CUgraphExec) -> Key {
    Key::other(GRAPH, exec.addr() as u64)
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
            || kernel(function, blocks, threads, stream, variant),
            // SAFETY: the program's promise.
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
                // SAFETY: null, or the program's configuration; the driver refuses null.
                match unsafe { config.as_ref() } {
                    Some(shape) => kernel(
                        function,
                        [shape.gridDimX, shape.gridDimY, shape.gridDimZ],
                        [shape.blockDimX, shape.blockDimY, shape.blockDimZ],
                        shape.hStream,
                        variant,
                    ),
                    None => kernel(function, [1; 3], [1; 3], NO_STREAM, variant),
                }
            },
            // SAFETY: the program's promise.
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
            || kernel(function, blocks, threads, stream, variant),
            // SAFETY: the program's promise.
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
            // A turn on several GPUs at once cannot be had; CUDA itself has given this call up.
            return CUDA_ERROR_NOT_SUPPORTED;
        }
        submit(
            || {
                // SAFETY: null, or the program's list; the driver refuses null.
                match unsafe { launch_params_list.as_ref() }.filter(|_| num_devices > 0) {
                    Some(shape) => kernel(
                        shape.function,
                        [shape.gridDimX, shape.gridDimY, shape.gridDimZ],
                        [shape.blockDimX, shape.blockDimY, shape.blockDimZ],
                        shape.hStream,
                        variant,
                    ),
                    None => kernel(std::ptr::null_mut(), [1; 3], [1; 3], NO_STREAM, variant),
                }
            },
            // SAFETY: the program's promise.
            || unsafe { next(launch_params_list, num_devices, flags) },
        )
    }

    fn cuLaunch(function: CUfunction) |next, variant| if needed {
        // SAFETY: the program's promise.
        submit(|| grid(function, 1, 1, NO_STREAM, variant), || unsafe { next(function) })
    }

    fn cuLaunchGrid(function: CUfunction, grid_width: i32, grid_height: i32) |next, variant| if needed {
        submit(
            || grid(function, grid_width, grid_height, NO_STREAM, variant),
            // SAFETY: the program's promise.
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
            || grid(function, grid_width, grid_height, stream, variant),
            // SAFETY: the program's promise.
            || unsafe { next(function, grid_width, grid_height, stream) },
        )
    }

    fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream) twin cuGraphLaunch_ptsz |next, variant| if graphs_needed {
        submit(
            || Work { key: graph(exec), stream, variant },
            // SAFETY: the program's promise.
            || memory::graphs::launched(exec, || unsafe { next(exec, stream) }),
        )
    }
}
