//! Tests of what launches of graphs do, and when.

use super::*;

#[test]
fn chain_takes_sum_of_kernel_durations() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let (graph, stream) = (fixture.graph(), fixture.stream());
        let mut last: Vec<CUgraphNode> = Vec::new();
        for _ in 0..40 {
            last = vec![fixture.kernel(graph, &last, "busy_50us", 4096)];
        }
        let exec = fixture.exec(graph);
        let time = fixture.time(stream, || {
            for _ in 0..5 {
                call!(cuGraphLaunch(exec, stream)).unwrap();
            }
        });
        assert_close(time, 5.0 * 40.0 * 50.0);
    });
}

#[test]
fn independent_small_grids_overlap() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let (graph, stream) = (fixture.graph(), fixture.stream());
        // Each of the A100's 108 multiprocessors holds two blocks of 1024 threads: 54 blocks are a quarter of the
        // GPU.
        let first = fixture.kernel(graph, &[], "busy_100us", 54);
        let middle: Vec<CUgraphNode> =
            (0..4).map(|_| fixture.kernel(graph, &[first], "busy_200us", 54)).collect();
        fixture.kernel(graph, &middle, "busy_100us", 54);
        let exec = fixture.exec(graph);
        assert_close(fixture.time(stream, || call!(cuGraphLaunch(exec, stream)).unwrap()), 400.0);
    });
}

#[test]
fn launches_of_one_executable_are_serialized() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let (graph, one, other) = (fixture.graph(), fixture.stream(), fixture.stream());
        fixture.kernel(graph, &[], "busy_300us", 1);
        let (exec, second_exec) = (fixture.exec(graph), fixture.exec(graph));
        let joined = |second: CUgraphExec| {
            let end = fixture.event();
            fixture.time(one, || {
                let start = fixture.event();
                call!(cuEventRecord(start, one)).unwrap();
                call!(cuStreamWaitEvent(other, start, 0)).unwrap();
                call!(cuGraphLaunch(exec, one)).unwrap();
                call!(cuGraphLaunch(second, other)).unwrap();
                call!(cuEventRecord(end, other)).unwrap();
                call!(cuStreamWaitEvent(one, end, 0)).unwrap();
            })
        };
        assert_close(joined(second_exec), 300.0);
        assert_close(joined(exec), 600.0);
    });
}

#[test]
fn host_nodes_and_kernels_keep_dependency_order() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let (graph, stream) = (fixture.graph(), fixture.stream());
        let (begin, end) = (fixture.event(), fixture.event());
        let mut node = null_mut();
        call!(cuGraphAddEventRecordNode(&mut node, graph, null(), 0, begin)).unwrap();
        let first = host(graph, &[node], 1);
        let kernel = fixture.kernel(graph, &[first], "busy_500us", 4096);
        let left = host(graph, &[kernel], 2);
        let right = host(graph, &[left], 3);
        call!(cuGraphAddEventRecordNode(&mut node, graph, &right, 1, end)).unwrap();
        let exec = fixture.exec(graph);
        for _ in 0..3 {
            call!(cuGraphLaunch(exec, stream)).unwrap();
        }
        call!(cuStreamSynchronize(stream)).unwrap();
        assert_eq!(*locked(&CALLED), [1, 2, 3, 1, 2, 3, 1, 2, 3]);
        let mut milliseconds = 0.0;
        call!(cuEventElapsedTime(&mut milliseconds, begin, end)).unwrap();
        assert!(milliseconds >= 0.5);
    });
}

#[test]
fn child_graph_runs_and_accepts_new_parameters() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let (graph, child, stream) = (fixture.graph(), fixture.graph(), fixture.stream());
        let inner = fixture.kernel(child, &[], "busy_100us", 4096);
        fixture.kernel(child, &[inner], "busy_100us", 4096);
        let first = fixture.kernel(graph, &[], "busy_100us", 4096);
        let (mut node, mut own) = (null_mut(), null_mut());
        call!(cuGraphAddChildGraphNode(&mut node, graph, &first, 1, child)).unwrap();
        fixture.kernel(graph, &[node], "busy_100us", 4096);
        assert_eq!(kind(node), CU_GRAPH_NODE_TYPE_GRAPH);
        // The child graph belongs to the node, and the program must not destroy it.
        call!(cuGraphChildGraphNodeGetGraph(node, &mut own)).unwrap();
        assert!(own != child && nodes(own).len() == 2);
        assert_eq!(call!(cuGraphDestroy(own)), Err(CudaError::INVALID_VALUE));
        let exec = fixture.exec(graph);
        let launch = || call!(cuGraphLaunch(exec, stream)).unwrap();
        assert_close(fixture.time(stream, launch), 400.0);
        let longer = fixture.graph();
        let inner = fixture.kernel(longer, &[], "busy_300us", 4096);
        assert_eq!(
            call!(cuGraphExecChildGraphNodeSetParams(exec, node, longer)),
            Err(CudaError::INVALID_VALUE)
        );
        fixture.kernel(longer, &[inner], "busy_300us", 4096);
        call!(cuGraphExecChildGraphNodeSetParams(exec, node, longer)).unwrap();
        assert_close(fixture.time(stream, launch), 800.0);
        // Nodes of the child graph can be changed and disabled one by one.
        let params = fixture.params("busy_50us", 4096);
        call!(cuGraphExecKernelNodeSetParams_v2(exec, nodes(own)[0], &params)).unwrap();
        call!(cuGraphNodeSetEnabled(exec, nodes(own)[1], 0)).unwrap();
        assert_close(fixture.time(stream, launch), 250.0);
    });
}

#[test]
fn exec_update_applies_or_reports_the_mismatch() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let stream = fixture.stream();
        let chain = |names: &[&str]| {
            let graph = fixture.graph();
            let mut last: Vec<CUgraphNode> = Vec::new();
            for name in names {
                last = vec![fixture.kernel(graph, &last, name, 4096)];
            }
            graph
        };
        let exec = fixture.exec(chain(&["busy_100us", "busy_100us"]));
        let mut info = CUgraphExecUpdateResultInfo::default();
        call!(cuGraphExecUpdate_v2(exec, chain(&["busy_100us", "busy_400us"]), &mut info)).unwrap();
        assert_close(fixture.time(stream, || call!(cuGraphLaunch(exec, stream)).unwrap()), 500.0);

        let failed = Err(CudaError::GRAPH_EXEC_UPDATE_FAILURE);
        let longer = chain(&["busy_1us", "busy_1us", "busy_1us"]);
        assert_eq!(call!(cuGraphExecUpdate_v2(exec, longer, &mut info)), failed);
        assert_eq!(info.result, CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED);
        assert_eq!(info.errorNode, nodes(longer)[2]);

        let apart = fixture.graph();
        fixture.kernel(apart, &[], "busy_1us", 1);
        let second = fixture.kernel(apart, &[], "busy_1us", 1);
        let (mut node, mut result) = (null_mut(), 0);
        assert_eq!(call!(cuGraphExecUpdate(exec, apart, &mut node, &mut result)), failed);
        assert_eq!((node, result), (second, CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED));

        let other = fixture.graph();
        let before = fixture.kernel(other, &[], "busy_1us", 1);
        let second = host(other, &[before], 0);
        assert_eq!(call!(cuGraphExecUpdate_v2(exec, other, &mut info)), failed);
        assert_eq!((info.result, info.errorNode), (CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED, second));
        // The failed updates changed nothing.
        assert_close(fixture.time(stream, || call!(cuGraphLaunch(exec, stream)).unwrap()), 500.0);
    });
}

#[test]
fn graph_across_two_gpus_keeps_dependency_order() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let (graph, stream) = (fixture.graph(), fixture.stream());
        let (mut there, mut module, mut function) = (null_mut(), null_mut(), null_mut());
        call!(cuDevicePrimaryCtxRetain(&mut there, 1)).unwrap();
        call!(cuCtxPushCurrent_v2(there)).unwrap();
        call!(cuModuleLoadData(&mut module, c"// code".as_ptr().cast())).unwrap();
        call!(cuModuleGetFunction(&mut function, module, c"busy_3000us".as_ptr())).unwrap();
        call!(cuCtxPopCurrent_v2(null_mut())).unwrap();
        let first = fixture.kernel(graph, &[], "busy_1000us", 4096);
        let mut params = fixture.params("busy_1us", 4096);
        params.func = function;
        let mut middle = null_mut();
        call!(cuGraphAddKernelNode_v2(&mut middle, graph, &first, 1, &params)).unwrap();
        let beside = fixture.kernel(graph, &[first], "busy_500us", 4096);
        fixture.kernel(graph, &[middle, beside], "busy_1000us", 4096);
        let exec = fixture.exec(graph);
        for _ in 0..3 {
            let time = fixture.time(stream, || call!(cuGraphLaunch(exec, stream)).unwrap());
            // Between GPUs the host polls, so it may take longer but never shorter.
            assert!(time >= 5000.0, "{time}");
        }
        call!(cuGraphExecDestroy(exec)).unwrap();
    });
}

#[test]
fn user_object_is_destroyed_at_last_release() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let (graph, stream) = (fixture.graph(), fixture.stream());
        let mut object = null_mut();
        let bad = Err(CudaError::INVALID_VALUE);
        assert_eq!(call!(cuUserObjectCreate(&mut object, 7 as *mut c_void, Some(record_call), 1, 0)), bad);
        assert_eq!(call!(cuUserObjectCreate(&mut object, 7 as *mut c_void, Some(record_call), 0, 1)), bad);
        call!(cuUserObjectCreate(&mut object, 7 as *mut c_void, Some(record_call), 1, 1)).unwrap();
        call!(cuUserObjectRetain(object, 2)).unwrap();
        assert_eq!(call!(cuUserObjectRelease(object, 4)), bad);
        call!(cuUserObjectRelease(object, 2)).unwrap();
        call!(cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE)).unwrap();
        fixture.kernel(graph, &[], "busy_20000us", 4096);
        let exec = fixture.exec(graph);
        call!(cuGraphDestroy(graph)).unwrap();
        call!(cuGraphLaunch(exec, stream)).unwrap();
        let end = fixture.event();
        call!(cuEventRecord(end, stream)).unwrap();
        call!(cuGraphExecDestroy(exec)).unwrap();
        if call!(cuEventQuery(end)).is_err() {
            // The launch still runs and needs the object.
            assert!(locked(&CALLED).is_empty() || call!(cuEventQuery(end)).is_ok());
        }
        call!(cuStreamSynchronize(stream)).unwrap();
        while locked(&CALLED).is_empty() {
            std::thread::yield_now();
        }
        assert_eq!(*locked(&CALLED), [7]);
        assert_eq!(call!(cuUserObjectRelease(object, 1)), bad);
    });
}
