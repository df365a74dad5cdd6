//! Random call sequences decoded from bytes: valid and invalid calls in any order, with live, stale and invented
//! handles. None may crash or hang, and after all objects are released the card must be empty.
#![allow(unsafe_code, dead_code, unreachable_pub, clippy::multiple_unsafe_ops_per_block)]

use super::driver::cuda::*;
use std::ffi::c_void;
use std::ptr::null_mut;

/// Size of the host buffer that copies use.
const HOST_BUFFER_BYTES: usize = 64 << 10;

/// The bytes that determine the sequence; zeros after their end.
struct Choices<'a>(std::slice::Iter<'a, u8>);

impl Choices<'_> {
    fn byte(&mut self) -> u8 {
        self.0.next().copied().unwrap_or(0)
    }

    fn below(&mut self, end: usize) -> usize {
        usize::from(self.byte()) % end.max(1)
    }

    fn size(&mut self) -> usize {
        let sizes =
            [0, 1, 255, 4096, 100_000, 1 << 20, 3 << 20, 200 << 20, 30 << 30, 60 << 30, usize::MAX - 3];
        sizes[self.below(sizes.len())]
    }

    /// Returns a handle from the list, which may be stale, or an invented one.
    fn pick(&mut self, handles: &[usize]) -> usize {
        let invented = [0, 1, 2, 3, 8, 4096, 0xdead_beef, usize::MAX];
        let choice = self.below(handles.len() + invented.len());
        match handles.get(choice) {
            Some(&handle) => handle,
            None => invented[choice - handles.len()],
        }
    }
}

/// Handles of all objects that were created.
#[derive(Default)]
struct LiveHandles {
    contexts: Vec<usize>,
    streams: Vec<usize>,
    events: Vec<usize>,
    modules: Vec<usize>,
    functions: Vec<usize>,
    memory: Vec<usize>,
    host: Vec<usize>,
    pools: Vec<usize>,
    physical: Vec<usize>,
    reserved: Vec<(usize, usize)>,
    arrays: Vec<usize>,
    graphs: Vec<usize>,
    nodes: Vec<usize>,
    execs: Vec<usize>,
}

extern "C" fn nothing(_: *mut c_void) {}

/// Ignores a status code: any is acceptable.
fn ignore(_: CUresult) {}

fn keep<T>(code: CUresult, handles: &mut Vec<usize>, handle: *mut T) {
    if code == CUDA_SUCCESS {
        handles.push(handle as usize);
    }
}

/// Runs the calls that the bytes describe, then releases everything.
///
/// # Safety
/// The driver is initialized, and no other thread uses it.
pub unsafe fn run(cuda: &CudaLibrary, bytes: &[u8]) {
    let mut choices = Choices(bytes.iter());
    let mut held = LiveHandles::default();
    let mut host = vec![7u8; HOST_BUFFER_BYTES];
    let mut context = null_mut();
    // SAFETY: the output is a local variable, valid for writes during the call.
    let code = unsafe { cuda.cuCtxCreate_v2(&mut context, 0, 0) };
    keep(code, &mut held.contexts, context);
    while !choices.0.as_slice().is_empty() {
        // SAFETY: the caller guarantees exclusive use of the driver; pointers refer to local variables.
        unsafe { run_one_call(cuda, &mut choices, &mut held, &mut host) };
    }
    // SAFETY: stale handles are rejected by the driver.
    unsafe { release_all(cuda, held) };
}

unsafe fn run_one_call(
    cuda: &CudaLibrary,
    choices: &mut Choices<'_>,
    held: &mut LiveHandles,
    host: &mut [u8],
) {
    let stream = choices.pick(&held.streams) as CUstream;
    let pointer = (choices.pick(&held.memory) as CUdeviceptr).wrapping_add(choices.below(3) as u64 * 64);
    let size = choices.size();
    let small = size.min(HOST_BUFFER_BYTES);
    let bytes: *mut c_void = host.as_mut_ptr().cast();
    let (mut handle, mut address): (*mut c_void, CUdeviceptr) = (null_mut(), 0);
    // SAFETY: the caller guarantees exclusive use of the driver; pointers refer to local variables, and handles are
    // validated.
    unsafe {
        match choices.below(48) {
            0 => {
                let mut made = null_mut();
                keep(cuda.cuCtxCreate_v2(&mut made, 0, choices.below(3) as i32), &mut held.contexts, made);
            }
            1 => ignore(cuda.cuCtxDestroy_v2(choices.pick(&held.contexts) as CUcontext)),
            2 => ignore(cuda.cuCtxSetCurrent(choices.pick(&held.contexts) as CUcontext)),
            3 => ignore(cuda.cuCtxPushCurrent_v2(choices.pick(&held.contexts) as CUcontext)),
            4 => ignore(cuda.cuCtxPopCurrent_v2(&mut null_mut())),
            5 => ignore(cuda.cuCtxSynchronize()),
            6 => {
                let mut made = null_mut();
                let flags = choices.below(3) as u32;
                keep(cuda.cuStreamCreate(&mut made, flags), &mut held.streams, made);
            }
            7 => ignore(cuda.cuStreamDestroy_v2(stream)),
            8 => ignore(cuda.cuStreamSynchronize(stream)),
            9 => ignore(cuda.cuStreamQuery(stream)),
            10 | 11 => {
                let mut made = null_mut();
                keep(cuda.cuEventCreate(&mut made, choices.below(4) as u32), &mut held.events, made);
            }
            12 | 13 => ignore(cuda.cuEventRecord(choices.pick(&held.events) as CUevent, stream)),
            14 => ignore(cuda.cuEventSynchronize(choices.pick(&held.events) as CUevent)),
            15 => ignore(cuda.cuEventDestroy_v2(choices.pick(&held.events) as CUevent)),
            16 | 17 => ignore(cuda.cuStreamWaitEvent(stream, choices.pick(&held.events) as CUevent, 0)),
            18 => {
                let (from, to) = (choices.pick(&held.events), choices.pick(&held.events));
                ignore(cuda.cuEventElapsedTime(&mut 0.0, from as CUevent, to as CUevent));
            }
            19 => {
                let mut made = null_mut();
                keep(cuda.cuModuleLoadData(&mut made, c"image".as_ptr().cast()), &mut held.modules, made);
            }
            20 => ignore(cuda.cuModuleUnload(choices.pick(&held.modules) as CUmodule)),
            21 => {
                let name = [c"busy_0us", c"busy_20us", c"busy_300us", c"any"][choices.below(4)];
                let mut made = null_mut();
                let module = choices.pick(&held.modules) as CUmodule;
                keep(cuda.cuModuleGetFunction(&mut made, module, name.as_ptr()), &mut held.functions, made);
            }
            22..=26 => {
                let function = choices.pick(&held.functions) as CUfunction;
                let (grid, block) =
                    ([1, 40, 100_000, 0][choices.below(4)], [32, 256, 1024, 2000][choices.below(4)]);
                ignore(cuda.cuLaunchKernel(
                    function,
                    grid,
                    1,
                    1,
                    block,
                    1,
                    1,
                    0,
                    stream,
                    null_mut(),
                    null_mut(),
                ));
            }
            27 => ignore(cuda.cuLaunchHostFunc(stream, Some(nothing), null_mut())),
            28 | 29 => keep(cuda.cuMemAlloc_v2(&mut address, size), &mut held.memory, address as *mut u8),
            30 => ignore(cuda.cuMemFree_v2(pointer)),
            31 => ignore(cuda.cuMemcpyHtoD_v2(pointer, bytes, small)),
            32 => ignore(cuda.cuMemcpyDtoHAsync_v2(bytes, pointer, small, stream)),
            33 => ignore(cuda.cuMemcpyDtoDAsync_v2(
                pointer,
                choices.pick(&held.memory) as CUdeviceptr,
                // Limited, because the bytes are really copied.
                size.min(4 << 20),
                stream,
            )),
            34 => ignore(cuda.cuMemsetD8Async(pointer, 9, small, stream)),
            35 => {
                keep(cuda.cuMemAllocAsync(&mut address, size, stream), &mut held.memory, address as *mut u8)
            }
            36 => ignore(cuda.cuMemFreeAsync(pointer, stream)),
            37 => {
                // Limited, because host memory is really allocated.
                keep(cuda.cuMemHostAlloc(&mut handle, small, 0), &mut held.host, handle);
                ignore(cuda.cuMemFreeHost(choices.pick(&held.host) as *mut c_void));
            }
            38 => {
                let mut made = 0;
                let properties = CUmemAllocationProp {
                    type_: CU_MEM_ALLOCATION_TYPE_PINNED,
                    location: CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id: 0 },
                    ..CUmemAllocationProp::default()
                };
                let rounded = (size.min(1 << 40)).next_multiple_of(2 << 20);
                keep(
                    cuda.cuMemCreate(&mut made, rounded, &properties, 0),
                    &mut held.physical,
                    made as *mut u8,
                );
                if cuda.cuMemAddressReserve(&mut address, rounded, 0, 0, 0) == CUDA_SUCCESS {
                    held.reserved.push((address as usize, rounded));
                    ignore(cuda.cuMemMap(address, rounded, 0, made, 0));
                }
            }
            39 => ignore(cuda.cuMemRelease(choices.pick(&held.physical) as u64)),
            40 => {
                let (start, length) =
                    held.reserved.get(choices.below(held.reserved.len())).copied().unwrap_or_default();
                ignore(cuda.cuMemUnmap(start as CUdeviceptr, length));
            }
            41 => {
                let mut made = null_mut();
                let side = [0, 1, 100, 70_000][choices.below(4)];
                let format = CU_AD_FORMAT_FLOAT;
                let wanted =
                    CUDA_ARRAY_DESCRIPTOR { Width: side, Height: side, Format: format, NumChannels: 4 };
                keep(cuda.cuArrayCreate_v2(&mut made, &wanted), &mut held.arrays, made);
                ignore(cuda.cuArrayDestroy(choices.pick(&held.arrays) as CUarray));
            }
            42 => {
                let mut made = null_mut();
                keep(cuda.cuGraphCreate(&mut made, 0), &mut held.graphs, made);
            }
            43 => {
                let mut made = null_mut();
                let graph = choices.pick(&held.graphs) as CUgraph;
                let after = [choices.pick(&held.nodes) as CUgraphNode];
                let count = choices.below(2);
                keep(
                    cuda.cuGraphAddEmptyNode(&mut made, graph, after.as_ptr(), count),
                    &mut held.nodes,
                    made,
                );
            }
            44 => {
                let mut made = null_mut();
                let graph = choices.pick(&held.graphs) as CUgraph;
                keep(cuda.cuGraphInstantiateWithFlags(&mut made, graph, 0), &mut held.execs, made);
                ignore(cuda.cuGraphLaunch(choices.pick(&held.execs) as CUgraphExec, stream));
            }
            45 => {
                ignore(cuda.cuGraphDestroy(choices.pick(&held.graphs) as CUgraph));
                ignore(cuda.cuGraphExecDestroy(choices.pick(&held.execs) as CUgraphExec));
            }
            46 => ignore(cuda.cuStreamBeginCapture_v2(stream, choices.below(3) as u32)),
            _ => {
                let mut made = null_mut();
                keep(cuda.cuStreamEndCapture(stream, &mut made), &mut held.graphs, made);
                let mut pool = null_mut();
                ignore(cuda.cuDeviceGetMemPool(&mut pool, 0));
                ignore(cuda.cuMemPoolTrimTo(pool, small));
            }
        }
    }
}

unsafe fn release_all(cuda: &CudaLibrary, held: LiveHandles) {
    // SAFETY: the caller guarantees exclusive use of the driver, which validates handles.
    unsafe {
        for &stream in &held.streams {
            ignore(cuda.cuStreamEndCapture(stream as CUstream, &mut null_mut()));
        }
        // Per-thread default streams may be captured too.
        for &context in &held.contexts {
            if cuda.cuCtxSetCurrent(context as CUcontext) == CUDA_SUCCESS {
                ignore(cuda.cuStreamEndCapture(2 as CUstream, &mut null_mut()));
            }
        }
        for &context in &held.contexts {
            if cuda.cuCtxSetCurrent(context as CUcontext) == CUDA_SUCCESS {
                let code = cuda.cuCtxSynchronize();
                assert_eq!(code, CUDA_SUCCESS, "{:?}", name(code));
            }
        }
        held.execs.iter().for_each(|&exec| ignore(cuda.cuGraphExecDestroy(exec as CUgraphExec)));
        held.graphs.iter().for_each(|&graph| ignore(cuda.cuGraphDestroy(graph as CUgraph)));
        for &(start, length) in &held.reserved {
            ignore(cuda.cuMemUnmap(start as CUdeviceptr, length));
            ignore(cuda.cuMemAddressFree(start as CUdeviceptr, length));
        }
        held.physical.iter().for_each(|&handle| ignore(cuda.cuMemRelease(handle as u64)));
        held.arrays.iter().for_each(|&array| ignore(cuda.cuArrayDestroy(array as CUarray)));
        held.memory.iter().for_each(|&pointer| ignore(cuda.cuMemFree_v2(pointer as CUdeviceptr)));
        held.host.iter().for_each(|&pointer| ignore(cuda.cuMemFreeHost(pointer as *mut c_void)));
        held.contexts.iter().for_each(|&context| ignore(cuda.cuCtxDestroy_v2(context as CUcontext)));
        while cuda.cuCtxPopCurrent_v2(&mut null_mut()) == CUDA_SUCCESS {}
        for device in 0..2 {
            ignore(cuda.cuDeviceGraphMemTrim(device));
            let mut pool = null_mut();
            if cuda.cuDeviceGetDefaultMemPool(&mut pool, device) == CUDA_SUCCESS {
                ignore(cuda.cuMemPoolTrimTo(pool, 0));
            }
        }
    }
}
