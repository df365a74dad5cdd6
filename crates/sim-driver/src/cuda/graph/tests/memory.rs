//! Tests of graphs that copy memory and graphs that allocate it.

use super::*;

const MIB: usize = 1 << 20;
const INVALID_VALUE: Result<(), CudaError> = Err(CudaError::INVALID_VALUE);

fn device_memory(bytes: usize) -> CUdeviceptr {
    let mut pointer = 0;
    call!(cuMemAlloc_v2(&mut pointer, bytes)).unwrap();
    pointer
}

/// Describes a copy from the device to the host (`out`) or from the host to the device.
fn copy(to: u64, from: u64, bytes: usize, out: bool) -> CUDA_MEMCPY3D {
    let kinds = [CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST];
    CUDA_MEMCPY3D {
        srcMemoryType: kinds[usize::from(!out)],
        srcHost: from as *const c_void,
        srcDevice: from,
        dstMemoryType: kinds[usize::from(out)],
        dstHost: to as *mut c_void,
        dstDevice: to,
        WidthInBytes: bytes,
        Height: 1,
        Depth: 1,
        ..Default::default()
    }
}

fn attribute(which: CUgraphMem_attribute) -> u64 {
    let mut value = 0u64;
    call!(cuDeviceGetGraphMemAttribute(0, which, (&raw mut value).cast())).unwrap();
    value
}

/// Returns the used and reserved graph memory in bytes.
fn usage() -> (u64, u64) {
    (attribute(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT), attribute(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT))
}

fn free_memory() -> usize {
    let (mut free, mut all) = (0, 0);
    call!(cuMemGetInfo_v2(&mut free, &mut all)).unwrap();
    free
}

fn alloc(graph: CUgraph, after: &[CUgraphNode], bytes: usize) -> (CUgraphNode, CUdeviceptr) {
    let mut params = CUDA_MEM_ALLOC_NODE_PARAMS { bytesize: bytes, ..Default::default() };
    params.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    params.poolProps.location = CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id: 0 };
    let mut node = null_mut();
    call!(cuGraphAddMemAllocNode(&mut node, graph, after.as_ptr(), after.len(), &mut params)).unwrap();
    (node, params.dptr)
}

fn free(graph: CUgraph, after: &[CUgraphNode], pointer: CUdeviceptr) -> CUgraphNode {
    let mut node = null_mut();
    call!(cuGraphAddMemFreeNode(&mut node, graph, after.as_ptr(), after.len(), pointer)).unwrap();
    node
}

#[test]
fn memcpy_and_memset_nodes_run_at_every_launch() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let (graph, stream, pointer) = (fixture.graph(), fixture.stream(), device_memory(64));
        let (mut node, mut out) = (null_mut(), [0u8; 64]);
        let fill = CUDA_MEMSET_NODE_PARAMS {
            dst: pointer,
            value: 0x0102,
            elementSize: 2,
            width: 32,
            height: 1,
            ..Default::default()
        };
        call!(cuGraphAddMemsetNode(&mut node, graph, null(), 0, &fill, fixture.context)).unwrap();
        let first = node;
        let kernel = fixture.kernel(graph, &[node], "busy_100us", 4096);
        let params = copy(out.as_mut_ptr() as u64, pointer, 64, true);
        call!(cuGraphAddMemcpyNode(&mut node, graph, &kernel, 1, &params, fixture.context)).unwrap();
        let exec = fixture.exec(graph);
        call!(cuGraphLaunch(exec, stream)).unwrap();
        call!(cuStreamSynchronize(stream)).unwrap();
        assert_eq!(out, [[2, 1]; 32].concat()[..]);
        // The same node with other parameters.
        call!(cuGraphExecMemsetNodeSetParams(
            exec,
            first,
            &CUDA_MEMSET_NODE_PARAMS { value: 7, elementSize: 1, width: 64, ..fill },
            fixture.context
        ))
        .unwrap();
        call!(cuGraphLaunch(exec, stream)).unwrap();
        call!(cuStreamSynchronize(stream)).unwrap();
        assert_eq!(out, [7; 64]);
        // A copy in the other direction is not a valid parameter change.
        let back = copy(pointer, out.as_ptr() as u64, 64, false);
        assert_eq!(call!(cuGraphExecMemcpyNodeSetParams(exec, node, &back, fixture.context)), INVALID_VALUE);
        // The parameters are read back as they were set.
        let mut read = CUDA_MEMCPY3D::default();
        call!(cuGraphMemcpyNodeGetParams(node, &mut read)).unwrap();
        assert_eq!(
            (read.srcDevice, read.dstHost as u64, read.WidthInBytes),
            (pointer, params.dstHost as u64, 64)
        );
        // A disabled node does nothing.
        call!(cuGraphNodeSetEnabled(exec, node, 0)).unwrap();
        out = [9; 64];
        call!(cuGraphLaunch(exec, stream)).unwrap();
        call!(cuStreamSynchronize(stream)).unwrap();
        assert_eq!(out, [9; 64]);
    });
}

#[test]
fn captured_copies_run_at_launch() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let (stream, pointer) = (fixture.stream(), device_memory(16));
        let (source, mut target) = ([3u8; 16], [0u8; 16]);
        call!(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL)).unwrap();
        call!(cuMemcpyHtoDAsync_v2(pointer, source.as_ptr().cast(), 16, stream)).unwrap();
        call!(cuMemsetD8Async(pointer, 8, 4, stream)).unwrap();
        call!(cuMemcpyDtoHAsync_v2(target.as_mut_ptr().cast(), pointer, 16, stream)).unwrap();
        let mut graph = null_mut();
        call!(cuStreamEndCapture(stream, &mut graph)).unwrap();
        let kinds: Vec<_> = nodes(graph).into_iter().map(kind).collect();
        assert_eq!(kinds, [1, 2, 1]);
        assert_eq!(target, [0; 16]);
        let exec = fixture.exec(graph);
        call!(cuGraphLaunch(exec, stream)).unwrap();
        call!(cuStreamSynchronize(stream)).unwrap();
        assert_eq!(target[..5], [8, 8, 8, 8, 3]);
        // An allocation during a capture might wait for captured work.
        call!(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL)).unwrap();
        let mut other = 0;
        assert_eq!(call!(cuMemAlloc_v2(&mut other, 16)), Err(CudaError::STREAM_CAPTURE_UNSUPPORTED));
        call!(cuStreamEndCapture(stream, &mut graph)).unwrap_err();
    });
}

#[test]
fn graph_memory_is_reserved_at_first_launch_until_trimmed() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let (graph, stream) = (fixture.graph(), fixture.stream());
        let (made, pointer) = alloc(graph, &[], 100 * MIB);
        let kernel = fixture.kernel(graph, &[made], "busy_100us", 1);
        let gone = free(graph, &[kernel], pointer);
        // The second allocation follows the free of the first: the peak is the larger one.
        let (made, second) = alloc(graph, &[gone], 60 * MIB);
        free(graph, &[made], second);
        assert!(pointer != 0 && second != 0);
        let mut node = null_mut();
        assert_eq!(
            call!(cuGraphAddMemFreeNode(&mut node, graph, null(), 0, pointer)),
            INVALID_VALUE,
            "twice"
        );
        assert_eq!(call!(cuGraphAddMemFreeNode(&mut node, graph, null(), 0, pointer + 1)), INVALID_VALUE);
        let mut clone = null_mut();
        assert_eq!(call!(cuGraphClone(&mut clone, graph)), Err(CudaError::NOT_SUPPORTED));
        assert_eq!(call!(cuGraphDestroyNode(kernel)), Err(CudaError::NOT_SUPPORTED));
        let before = free_memory();
        let exec = fixture.exec(graph);
        let mut twice = null_mut();
        assert_eq!(call!(cuGraphInstantiateWithFlags(&mut twice, graph, 0)), Err(CudaError::NOT_SUPPORTED));
        assert_eq!((usage(), free_memory()), ((0, 0), before));
        let all = 100 * MIB as u64;
        for _ in 0..3 {
            call!(cuGraphLaunch(exec, stream)).unwrap();
            assert_eq!((usage(), free_memory()), ((all, all), before - 100 * MIB));
        }
        call!(cuStreamSynchronize(stream)).unwrap();
        call!(cuDeviceGraphMemTrim(0)).unwrap();
        assert_eq!((usage(), free_memory()), ((0, 0), before));
        call!(cuGraphUpload(exec, stream)).unwrap();
        assert_eq!(usage(), (all, all));
        call!(cuGraphExecDestroy(exec)).unwrap();
        // The memory stays reserved for other graphs of the device.
        assert_eq!(usage(), (0, all));
        assert_eq!(attribute(CU_GRAPH_MEM_ATTR_USED_MEM_HIGH), all);
        let mut zero = 0u64;
        call!(cuDeviceSetGraphMemAttribute(0, CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, (&raw mut zero).cast()))
            .unwrap();
        assert_eq!(attribute(CU_GRAPH_MEM_ATTR_USED_MEM_HIGH), 0);
        call!(cuDeviceGraphMemTrim(0)).unwrap();
        assert_eq!(free_memory(), before);
    });
}

#[test]
fn unfreed_graph_allocation_blocks_relaunch() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let (graph, stream) = (fixture.graph(), fixture.stream());
        let (_, pointer) = alloc(graph, &[], 4 * MIB);
        let exec = fixture.exec(graph);
        call!(cuGraphLaunch(exec, stream)).unwrap();
        // The allocation is usable memory.
        call!(cuMemsetD8Async(pointer, 1, 4 * MIB, stream)).unwrap();
        assert_eq!(call!(cuGraphLaunch(exec, stream)), INVALID_VALUE);
        call!(cuMemFreeAsync(pointer, stream)).unwrap();
        assert_eq!(call!(cuMemFreeAsync(pointer, stream)), INVALID_VALUE);
        call!(cuGraphLaunch(exec, stream)).unwrap();
        // Another graph can free it.
        let other = fixture.graph();
        free(other, &[], pointer);
        let freeing = fixture.exec(other);
        call!(cuGraphLaunch(freeing, stream)).unwrap();
        assert_eq!(call!(cuGraphLaunch(freeing, stream)), INVALID_VALUE);
        call!(cuGraphLaunch(exec, stream)).unwrap();
        call!(cuGraphExecDestroy(exec)).unwrap();
        call!(cuGraphDestroy(graph)).unwrap();
        // It outlives its graph until it is freed.
        assert_eq!(usage().0, 4 * MIB as u64);
        call!(cuMemFree_v2(pointer)).unwrap();
        assert_eq!(usage().0, 0);

        let graph = fixture.graph();
        alloc(graph, &[], MIB);
        let (mut exec, flag) = (null_mut(), u64::from(CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH));
        call!(cuGraphInstantiateWithFlags(&mut exec, graph, flag)).unwrap();
        for _ in 0..3 {
            call!(cuGraphLaunch(exec, stream)).unwrap();
        }
    });
}

#[test]
fn launch_without_enough_memory_is_rejected() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let (graph, stream) = (fixture.graph(), fixture.stream());
        let (made, pointer) = alloc(graph, &[], 30 << 30);
        free(graph, &[made], pointer);
        let exec = fixture.exec(graph);
        let taken = device_memory(20 << 30);
        assert_eq!(call!(cuGraphLaunch(exec, stream)), Err(CudaError::OUT_OF_MEMORY));
        assert_eq!(call!(cuGraphUpload(exec, stream)), Err(CudaError::OUT_OF_MEMORY));
        call!(cuMemFree_v2(taken)).unwrap();
        call!(cuGraphLaunch(exec, stream)).unwrap();
        call!(cuStreamSynchronize(stream)).unwrap();
    });
}

#[test]
fn captured_allocations_become_nodes() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let stream = fixture.stream();
        call!(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL)).unwrap();
        let mut pointer = 0;
        call!(cuMemAllocAsync(&mut pointer, 3 * MIB, stream)).unwrap();
        call!(cuMemsetD8Async(pointer, 1, MIB, stream)).unwrap();
        call!(cuMemFreeAsync(pointer, stream)).unwrap();
        let mut graph = null_mut();
        call!(cuStreamEndCapture(stream, &mut graph)).unwrap();
        let kinds: Vec<_> = nodes(graph).into_iter().map(kind).collect();
        assert_eq!(kinds, [10, 2, 11]);
        let exec = fixture.exec(graph);
        for _ in 0..2 {
            call!(cuGraphLaunch(exec, stream)).unwrap();
        }
        call!(cuStreamSynchronize(stream)).unwrap();
        assert_eq!(usage().0, 4 * MIB as u64);
    });
}
