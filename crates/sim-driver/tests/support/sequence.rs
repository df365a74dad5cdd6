//! Any sequence of calls, read from bytes: right ones, wrong ones, in any order, with handles that are good, stale or
//! invented. None may crash or hang, and when everything was given back the card is empty.
#![allow(unsafe_code, dead_code, unreachable_pub, clippy::multiple_unsafe_ops_per_block)]

use super::driver::cuda::*;
use std::ffi::c_void;
use std::ptr::null_mut;

/// Host memory that copies go to and come from.
const HOST: usize = 64 << 10;

/// Bytes that decide; zeros when they are used up.
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

    /// One of the handles that there were, or one that never was.
    fn pick(&mut self, handles: &[usize]) -> usize {
        let invented = [0, 1, 2, 3, 8, 4096, 0xdead_beef, usize::MAX];
        let choice = self.below(handles.len() + invented.len());
        match handles.get(choice) {
            Some(&handle) => handle,
            None => invented[choice - handles.len()],
        }
    }
}

/// Everything that was handed out.
#[derive(Default)]
struct Held {
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

/// Whatever the driver says to it.
fn whatever(_: CUresult) {}

fn keep<T>(code: CUresult, handles: &mut Vec<usize>, handle: *mut T) {
    if code == CUDA_SUCCESS {
        handles.push(handle as usize);
    }
}

/// Does what the bytes say, and then gives everything back.
///
/// # Safety
/// The driver was started, and nobody else uses it.
pub unsafe fn run(cuda: &Cuda, bytes: &[u8]) {
    let mut choices = Choices(bytes.iter());
    let mut held = Held::default();
    let mut host = vec![7u8; HOST];
    let mut context = null_mut();
    // SAFETY: variables of ours.
    let code = unsafe { cuda.cuCtxCreate_v2(&mut context, 0, 0) };
    keep(code, &mut held.contexts, context);
    while !choices.0.as_slice().is_empty() {
        // SAFETY: the caller's promise, and pointers to variables of ours.
        unsafe { one(cuda, &mut choices, &mut held, &mut host) };
    }
    // SAFETY: what is not there any more is refused.
    unsafe { give_back(cuda, held) };
}

unsafe fn one(cuda: &Cuda, choices: &mut Choices<'_>, held: &mut Held, host: &mut [u8]) {
    let stream = choices.pick(&held.streams) as CUstream;
    let pointer = (choices.pick(&held.memory) as CUdeviceptr).wrapping_add(choices.below(3) as u64 * 64);
    let size = choices.size();
    let small = size.min(HOST);
    let bytes: *mut c_void = host.as_mut_ptr().cast();
    let (mut handle, mut address): (*mut c_void, CUdeviceptr) = (null_mut(), 0);
    // SAFETY: the caller's promise.
    unsafe {
        match choices.below(48) {
            0 => {
                let mut made = null_mut();
                keep(cuda.cuCtxCreate_v2(&mut made, 0, choices.below(3) as i32), &mut held.contexts, made);
            }
            1 => whatever(cuda.cuCtxDestroy_v2(choices.pick(&held.contexts) as CUcontext)),
            2 => whatever(cuda.cuCtxSetCurrent(choices.pick(&held.contexts) as CUcontext)),
            3 => whatever(cuda.cuCtxPushCurrent_v2(choices.pick(&held.contexts) as CUcontext)),
            4 => whatever(cuda.cuCtxPopCurrent_v2(&mut null_mut())),
            5 => whatever(cuda.cuCtxSynchronize()),
            6 => {
                let mut made = null_mut();
                let flags = choices.below(3) as u32;
                keep(cuda.cuStreamCreate(&mut made, flags), &mut held.streams, made);
            }
            7 => whatever(cuda.cuStreamDestroy_v2(stream)),
            8 => whatever(cuda.cuStreamSynchronize(stream)),
            9 => whatever(cuda.cuStreamQuery(stream)),
            10 | 11 => {
                let mut made = null_mut();
                keep(cuda.cuEventCreate(&mut made, choices.below(4) as u32), &mut held.events, made);
            }
            12 | 13 => whatever(cuda.cuEventRecord(choices.pick(&held.events) as CUevent, stream)),
            14 => whatever(cuda.cuEventSynchronize(choices.pick(&held.events) as CUevent)),
            15 => whatever(cuda.cuEventDestroy_v2(choices.pick(&held.events) as CUevent)),
            16 | 17 => whatever(cuda.cuStreamWaitEvent(stream, choices.pick(&held.events) as CUevent, 0)),
            18 => {
                let (from, to) = (choices.pick(&held.events), choices.pick(&held.events));
                whatever(cuda.cuEventElapsedTime(&mut 0.0, from as CUevent, to as CUevent));
            }
            19 => {
                let mut made = null_mut();
                keep(cuda.cuModuleLoadData(&mut made, c"image".as_ptr().cast()), &mut held.modules, made);
            }
            20 => whatever(cuda.cuModuleUnload(choices.pick(&held.modules) as CUmodule)),
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
                whatever(cuda.cuLaunchKernel(
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
            27 => whatever(cuda.cuLaunchHostFunc(stream, Some(nothing), null_mut())),
            28 | 29 => keep(cuda.cuMemAlloc_v2(&mut address, size), &mut held.memory, address as *mut u8),
            30 => whatever(cuda.cuMemFree_v2(pointer)),
            31 => whatever(cuda.cuMemcpyHtoD_v2(pointer, bytes, small)),
            32 => whatever(cuda.cuMemcpyDtoHAsync_v2(bytes, pointer, small, stream)),
            33 => whatever(cuda.cuMemcpyDtoDAsync_v2(
                pointer,
                choices.pick(&held.memory) as CUdeviceptr,
                // A copy of gigabytes would be made.
                size.min(4 << 20),
                stream,
            )),
            34 => whatever(cuda.cuMemsetD8Async(pointer, 9, small, stream)),
            35 => {
                keep(cuda.cuMemAllocAsync(&mut address, size, stream), &mut held.memory, address as *mut u8)
            }
            36 => whatever(cuda.cuMemFreeAsync(pointer, stream)),
            37 => {
                // Host memory that nobody has must not be asked for: it would be given.
                keep(cuda.cuMemHostAlloc(&mut handle, small, 0), &mut held.host, handle);
                whatever(cuda.cuMemFreeHost(choices.pick(&held.host) as *mut c_void));
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
                    whatever(cuda.cuMemMap(address, rounded, 0, made, 0));
                }
            }
            39 => whatever(cuda.cuMemRelease(choices.pick(&held.physical) as u64)),
            40 => {
                let (start, length) =
                    held.reserved.get(choices.below(held.reserved.len())).copied().unwrap_or_default();
                whatever(cuda.cuMemUnmap(start as CUdeviceptr, length));
            }
            41 => {
                let mut made = null_mut();
                let side = [0, 1, 100, 70_000][choices.below(4)];
                let format = CU_AD_FORMAT_FLOAT;
                let wanted =
                    CUDA_ARRAY_DESCRIPTOR { Width: side, Height: side, Format: format, NumChannels: 4 };
                keep(cuda.cuArrayCreate_v2(&mut made, &wanted), &mut held.arrays, made);
                whatever(cuda.cuArrayDestroy(choices.pick(&held.arrays) as CUarray));
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
                whatever(cuda.cuGraphLaunch(choices.pick(&held.execs) as CUgraphExec, stream));
            }
            45 => {
                whatever(cuda.cuGraphDestroy(choices.pick(&held.graphs) as CUgraph));
                whatever(cuda.cuGraphExecDestroy(choices.pick(&held.execs) as CUgraphExec));
            }
            46 => whatever(cuda.cuStreamBeginCapture_v2(stream, choices.below(3) as u32)),
            _ => {
                let mut made = null_mut();
                keep(cuda.cuStreamEndCapture(stream, &mut made), &mut held.graphs, made);
                let mut pool = null_mut();
                whatever(cuda.cuDeviceGetMemPool(&mut pool, 0));
                whatever(cuda.cuMemPoolTrimTo(pool, small));
            }
        }
    }
}

unsafe fn give_back(cuda: &Cuda, held: Held) {
    // SAFETY: the caller's promise.
    unsafe {
        for &stream in &held.streams {
            whatever(cuda.cuStreamEndCapture(stream as CUstream, &mut null_mut()));
        }
        // This thread's own default streams may be in captures too.
        for &context in &held.contexts {
            if cuda.cuCtxSetCurrent(context as CUcontext) == CUDA_SUCCESS {
                whatever(cuda.cuStreamEndCapture(2 as CUstream, &mut null_mut()));
            }
        }
        for &context in &held.contexts {
            if cuda.cuCtxSetCurrent(context as CUcontext) == CUDA_SUCCESS {
                let code = cuda.cuCtxSynchronize();
                assert_eq!(code, CUDA_SUCCESS, "{:?}", name(code));
            }
        }
        held.execs.iter().for_each(|&exec| whatever(cuda.cuGraphExecDestroy(exec as CUgraphExec)));
        held.graphs.iter().for_each(|&graph| whatever(cuda.cuGraphDestroy(graph as CUgraph)));
        for &(start, length) in &held.reserved {
            whatever(cuda.cuMemUnmap(start as CUdeviceptr, length));
            whatever(cuda.cuMemAddressFree(start as CUdeviceptr, length));
        }
        held.physical.iter().for_each(|&handle| whatever(cuda.cuMemRelease(handle as u64)));
        held.arrays.iter().for_each(|&array| whatever(cuda.cuArrayDestroy(array as CUarray)));
        held.memory.iter().for_each(|&pointer| whatever(cuda.cuMemFree_v2(pointer as CUdeviceptr)));
        held.host.iter().for_each(|&pointer| whatever(cuda.cuMemFreeHost(pointer as *mut c_void)));
        held.contexts.iter().for_each(|&context| whatever(cuda.cuCtxDestroy_v2(context as CUcontext)));
        while cuda.cuCtxPopCurrent_v2(&mut null_mut()) == CUDA_SUCCESS {}
        for device in 0..2 {
            whatever(cuda.cuDeviceGraphMemTrim(device));
            let mut pool = null_mut();
            if cuda.cuDeviceGetDefaultMemPool(&mut pool, device) == CUDA_SUCCESS {
                whatever(cuda.cuMemPoolTrimTo(pool, 0));
            }
        }
    }
}
