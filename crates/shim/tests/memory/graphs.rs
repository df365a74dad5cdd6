//! Memory that graphs allocate.

use super::*;

const MIB_SIZE: usize = MIB as usize;

#[test]
fn graph_memory_is_counted_at_launch() {
    run_role("graphs nodes", 64 * MIB);
}

#[test]
fn captured_allocation_is_counted_at_launch() {
    run_role("graphs captured", 64 * MIB);
}

pub fn client(arguments: &[&str]) {
    match arguments {
        ["nodes"] => nodes(),
        ["captured"] => captured(),
        other => panic!("{other:?}"),
    }
}

fn allocation(bytes: usize) -> CUDA_MEM_ALLOC_NODE_PARAMS {
    let location = CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id: 0 };
    let pool =
        CUmemPoolProps { allocType: CU_MEM_ALLOCATION_TYPE_PINNED, location, ..CUmemPoolProps::default() };
    CUDA_MEM_ALLOC_NODE_PARAMS { poolProps: pool, bytesize: bytes, ..CUDA_MEM_ALLOC_NODE_PARAMS::default() }
}

/// Returns an executable graph that allocates and frees.
fn exec(cuda: &CudaLibrary, sizes: &[usize]) -> CUgraphExec {
    let (mut graph, mut exec) = (null_mut(), null_mut());
    ok!(cuda.cuGraphCreate(&mut graph, 0));
    let mut made = Vec::new();
    for &size in sizes {
        let (mut node, mut params) = (null_mut(), allocation(size));
        ok!(cuda.cuGraphAddMemAllocNode(&mut node, graph, std::ptr::null(), 0, &mut params));
        made.push((node, params.dptr));
    }
    let all: Vec<CUgraphNode> = made.iter().map(|(node, _)| *node).collect();
    for (_, pointer) in made {
        ok!(cuda.cuGraphAddMemFreeNode(&mut null_mut(), graph, all.as_ptr(), all.len(), pointer));
    }
    ok!(cuda.cuGraphInstantiateWithFlags(&mut exec, graph, 0));
    ok!(cuda.cuGraphDestroy(graph));
    exec
}

fn nodes() {
    let (cuda, _, observer) = start();
    let none = null_mut();
    let (small, large, third) = (
        exec(&cuda, &[MIB_SIZE, 100]),
        exec(&cuda, &[40 * MIB_SIZE]),
        exec(&cuda, &[MIB_SIZE, 39 * MIB_SIZE]),
    );
    observer.assert_exact("before the first launch");
    ok!(cuda.cuGraphLaunch(small, none));
    observer.assert_exact("a small one");
    ok!(cuda.cuGraphUpload(large, none));
    observer.assert_exact("a large one");
    ok!(cuda.cuGraphLaunch(large, none));
    ok!(cuda.cuGraphLaunch(small, none));
    observer.assert_exact("again");
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuGraphLaunch(third, none));
    observer.assert_exact("refused");
    ok!(cuda.cuCtxSynchronize());
    ok!(cuda.cuGraphExecDestroy(large));
    observer.assert_exact("without the large one");
    // What it had is available to others.
    ok!(cuda.cuGraphLaunch(third, none));
    observer.assert_exact("the third");
    ok!(cuda.cuCtxSynchronize());
    ok!(cuda.cuGraphExecDestroy(third));
    ok!(cuda.cuGraphExecDestroy(small));
    ok!(cuda.cuDeviceGraphMemTrim(0));
    observer.assert_exact("trimmed");
    assert_eq!(observer.used(0), CONTEXT_BYTES);
    let again = exec(&cuda, &[64 * MIB_SIZE]);
    ok!(cuda.cuGraphLaunch(again, none));
    ok!(cuda.cuCtxSynchronize());
    ok!(cuda.cuDeviceGraphMemTrim(0));
    assert_eq!(observer.used(0), CONTEXT_BYTES);
    ok!(cuda.cuGraphLaunch(again, none));
    observer.assert_exact("after it was trimmed");
    assert_eq!(observer.used(0), CONTEXT_BYTES + 64 * MIB);
}

fn captured() {
    let (cuda, _, observer) = start();
    let (mut stream, mut graph, mut exec, mut pointer) = (null_mut(), null_mut(), null_mut(), 0);
    ok!(cuda.cuStreamCreate(&mut stream, 1));
    ok!(cuda.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    ok!(cuda.cuMemAllocAsync(&mut pointer, 50 * MIB_SIZE, stream));
    ok!(cuda.cuMemFreeAsync(pointer, stream));
    ok!(cuda.cuStreamEndCapture(stream, &mut graph));
    observer.assert_exact("captured");
    assert_eq!(observer.used(0), CONTEXT_BYTES);
    let mut params = CUDA_GRAPH_INSTANTIATE_PARAMS {
        flags: CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD.into(),
        hUploadStream: stream,
        ..CUDA_GRAPH_INSTANTIATE_PARAMS::default()
    };
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 20 * MIB_SIZE));
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuGraphInstantiateWithParams(&mut exec, graph, &mut params));
    ok!(cuda.cuMemFree_v2(pointer));
    ok!(cuda.cuGraphInstantiateWithParams(&mut exec, graph, &mut params));
    observer.assert_exact("uploaded");
    assert_eq!(observer.used(0), CONTEXT_BYTES + 50 * MIB);
    ok!(cuda.cuGraphLaunch(exec, stream));
    ok!(cuda.cuStreamSynchronize(stream));
    observer.assert_exact("launched");
}
