//! Hooks on every call that submits kernels and graphs.
#![allow(unsafe_code)]

use crate::hook::{StreamVariant, hooks};
use crate::memory;
use crate::throttle::{LAUNCHES_PER_GRAPH, Submission, needed, submit};
use partage_driver_api::cuda::*;

/// The default stream, for calls without a stream argument.
const NO_STREAM: CUstream = std::ptr::null_mut();

fn kernel_in(stream: CUstream, variant: StreamVariant) -> Submission {
    Submission { stream, variant, launches: 1 }
}

/// Returns whether launches of graphs need a hook, if only for the memory that they take.
#[inline]
fn graphs_needed() -> bool {
    needed() || memory::graphs::any_allocates()
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
        submit(
            || kernel_in(stream, variant),
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
                let stream = unsafe { config.as_ref() }.map_or(NO_STREAM, |config| config.hStream);
                kernel_in(stream, variant)
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
        submit(
            || kernel_in(stream, variant),
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
            // CUDA has deprecated launches on several devices, and newer versions lack them.
            return CUDA_ERROR_NOT_SUPPORTED;
        }
        submit(
            || {
                // SAFETY: null, or a list that the application passed for the driver to read; the driver rejects null.
                // Only its first entry is read, and only if it has one.
                let first = unsafe { launch_params_list.as_ref() }.filter(|_| num_devices > 0);
                kernel_in(first.map_or(NO_STREAM, |launch| launch.hStream), variant)
            },
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            || unsafe { next(launch_params_list, num_devices, flags) },
        )
    }

    fn cuLaunch(function: CUfunction) |next, variant| if needed {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        submit(|| kernel_in(NO_STREAM, variant), || unsafe { next(function) })
    }

    fn cuLaunchGrid(function: CUfunction, grid_width: i32, grid_height: i32) |next, variant| if needed {
        submit(
            || kernel_in(NO_STREAM, variant),
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
            || kernel_in(stream, variant),
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            || unsafe { next(function, grid_width, grid_height, stream) },
        )
    }

    fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream) twin cuGraphLaunch_ptsz |next, variant| if graphs_needed {
        submit(
            || Submission { stream, variant, launches: LAUNCHES_PER_GRAPH },
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            || memory::graphs::launch_graph(exec, || unsafe { next(exec, stream) }),
        )
    }
}
