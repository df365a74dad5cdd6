//! What launches do, and when.

use super::*;

#[test]
fn a_chain_takes_as_long_as_its_kernels() {
    trial::on_node(|| {
        let bench = Bench::new();
        let (graph, stream) = (bench.graph(), bench.stream());
        let mut last: Vec<CUgraphNode> = Vec::new();
        for _ in 0..40 {
            last = vec![bench.kernel(graph, &last, "busy_50us", 4096)];
        }
        let exec = bench.exec(graph);
        let time = bench.time(stream, || {
            for _ in 0..5 {
                call!(cuGraphLaunch(exec, stream)).unwrap();
            }
        });
        close(time, 5.0 * 40.0 * 50.0);
    });
}

#[test]
fn small_grids_lie_side_by_side_where_no_edge_forbids_it() {
    trial::on_node(|| {
        let bench = Bench::new();
        let (graph, stream) = (bench.graph(), bench.stream());
        // Two blocks of 1024 threads to each of an A100's 108 multiprocessors: 54 blocks are a quarter of it.
        let first = bench.kernel(graph, &[], "busy_100us", 54);
        let middle: Vec<CUgraphNode> =
            (0..4).map(|_| bench.kernel(graph, &[first], "busy_200us", 54)).collect();
        bench.kernel(graph, &middle, "busy_100us", 54);
        let exec = bench.exec(graph);
        close(bench.time(stream, || call!(cuGraphLaunch(exec, stream)).unwrap()), 400.0);
    });
}

#[test]
fn launches_of_one_graph_come_one_after_the_other() {
    trial::on_node(|| {
        let bench = Bench::new();
        let (graph, one, other) = (bench.graph(), bench.stream(), bench.stream());
        bench.kernel(graph, &[], "busy_300us", 1);
        let (exec, twin) = (bench.exec(graph), bench.exec(graph));
        let joined = |second: CUgraphExec| {
            let end = bench.event();
            bench.time(one, || {
                let start = bench.event();
                call!(cuEventRecord(start, one)).unwrap();
                call!(cuStreamWaitEvent(other, start, 0)).unwrap();
                call!(cuGraphLaunch(exec, one)).unwrap();
                call!(cuGraphLaunch(second, other)).unwrap();
                call!(cuEventRecord(end, other)).unwrap();
                call!(cuStreamWaitEvent(one, end, 0)).unwrap();
            })
        };
        close(joined(twin), 300.0);
        close(joined(exec), 600.0);
    });
}

#[test]
fn host_functions_and_kernels_keep_their_order() {
    trial::on_node(|| {
        let bench = Bench::new();
        let (graph, stream) = (bench.graph(), bench.stream());
        let (begin, end) = (bench.event(), bench.event());
        let mut node = null_mut();
        call!(cuGraphAddEventRecordNode(&mut node, graph, null(), 0, begin)).unwrap();
        let first = host(graph, &[node], 1);
        let kernel = bench.kernel(graph, &[first], "busy_500us", 4096);
        let left = host(graph, &[kernel], 2);
        let right = host(graph, &[left], 3);
        call!(cuGraphAddEventRecordNode(&mut node, graph, &right, 1, end)).unwrap();
        let exec = bench.exec(graph);
        for _ in 0..3 {
            call!(cuGraphLaunch(exec, stream)).unwrap();
        }
        call!(cuStreamSynchronize(stream)).unwrap();
        assert_eq!(*locked(&SEEN), [1, 2, 3, 1, 2, 3, 1, 2, 3]);
        let mut milliseconds = 0.0;
        call!(cuEventElapsedTime(&mut milliseconds, begin, end)).unwrap();
        assert!(milliseconds >= 0.5);
    });
}

#[test]
fn children_run_inside_and_can_be_given_other_parameters() {
    trial::on_node(|| {
        let bench = Bench::new();
        let (graph, child, stream) = (bench.graph(), bench.graph(), bench.stream());
        let inner = bench.kernel(child, &[], "busy_100us", 4096);
        bench.kernel(child, &[inner], "busy_100us", 4096);
        let first = bench.kernel(graph, &[], "busy_100us", 4096);
        let (mut node, mut own) = (null_mut(), null_mut());
        call!(cuGraphAddChildGraphNode(&mut node, graph, &first, 1, child)).unwrap();
        bench.kernel(graph, &[node], "busy_100us", 4096);
        assert_eq!(kind(node), CU_GRAPH_NODE_TYPE_GRAPH);
        // The node's graph is its own, and not the program's to destroy.
        call!(cuGraphChildGraphNodeGetGraph(node, &mut own)).unwrap();
        assert!(own != child && nodes(own).len() == 2);
        assert_eq!(call!(cuGraphDestroy(own)), Err(CudaError::INVALID_VALUE));
        let exec = bench.exec(graph);
        let launch = || call!(cuGraphLaunch(exec, stream)).unwrap();
        close(bench.time(stream, launch), 400.0);
        let longer = bench.graph();
        let inner = bench.kernel(longer, &[], "busy_300us", 4096);
        assert_eq!(
            call!(cuGraphExecChildGraphNodeSetParams(exec, node, longer)),
            Err(CudaError::INVALID_VALUE)
        );
        bench.kernel(longer, &[inner], "busy_300us", 4096);
        call!(cuGraphExecChildGraphNodeSetParams(exec, node, longer)).unwrap();
        close(bench.time(stream, launch), 800.0);
        // Nodes of the graph inside can be changed and left out one by one.
        let params = bench.params("busy_50us", 4096);
        call!(cuGraphExecKernelNodeSetParams_v2(exec, nodes(own)[0], &params)).unwrap();
        call!(cuGraphNodeSetEnabled(exec, nodes(own)[1], 0)).unwrap();
        close(bench.time(stream, launch), 250.0);
    });
}

#[test]
fn an_update_changes_what_can_be_changed_and_names_what_cannot() {
    trial::on_node(|| {
        let bench = Bench::new();
        let stream = bench.stream();
        let chain = |names: &[&str]| {
            let graph = bench.graph();
            let mut last: Vec<CUgraphNode> = Vec::new();
            for name in names {
                last = vec![bench.kernel(graph, &last, name, 4096)];
            }
            graph
        };
        let exec = bench.exec(chain(&["busy_100us", "busy_100us"]));
        let mut info = CUgraphExecUpdateResultInfo::default();
        call!(cuGraphExecUpdate_v2(exec, chain(&["busy_100us", "busy_400us"]), &mut info)).unwrap();
        close(bench.time(stream, || call!(cuGraphLaunch(exec, stream)).unwrap()), 500.0);

        let failed = Err(CudaError::GRAPH_EXEC_UPDATE_FAILURE);
        let longer = chain(&["busy_1us", "busy_1us", "busy_1us"]);
        assert_eq!(call!(cuGraphExecUpdate_v2(exec, longer, &mut info)), failed);
        assert_eq!(info.result, CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED);
        assert_eq!(info.errorNode, nodes(longer)[2]);

        let apart = bench.graph();
        bench.kernel(apart, &[], "busy_1us", 1);
        let second = bench.kernel(apart, &[], "busy_1us", 1);
        let (mut node, mut result) = (null_mut(), 0);
        assert_eq!(call!(cuGraphExecUpdate(exec, apart, &mut node, &mut result)), failed);
        assert_eq!((node, result), (second, CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED));

        let other = bench.graph();
        let before = bench.kernel(other, &[], "busy_1us", 1);
        let second = host(other, &[before], 0);
        assert_eq!(call!(cuGraphExecUpdate_v2(exec, other, &mut info)), failed);
        assert_eq!((info.result, info.errorNode), (CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED, second));
        // Nothing of it was taken.
        close(bench.time(stream, || call!(cuGraphLaunch(exec, stream)).unwrap()), 500.0);
    });
}

#[test]
fn a_graph_over_two_gpus_keeps_its_order() {
    trial::on_node(|| {
        let bench = Bench::new();
        let (graph, stream) = (bench.graph(), bench.stream());
        let (mut there, mut module, mut function) = (null_mut(), null_mut(), null_mut());
        call!(cuDevicePrimaryCtxRetain(&mut there, 1)).unwrap();
        call!(cuCtxPushCurrent_v2(there)).unwrap();
        call!(cuModuleLoadData(&mut module, c"// code".as_ptr().cast())).unwrap();
        call!(cuModuleGetFunction(&mut function, module, c"busy_3000us".as_ptr())).unwrap();
        call!(cuCtxPopCurrent_v2(null_mut())).unwrap();
        let first = bench.kernel(graph, &[], "busy_1000us", 4096);
        let mut params = bench.params("busy_1us", 4096);
        params.func = function;
        let mut middle = null_mut();
        call!(cuGraphAddKernelNode_v2(&mut middle, graph, &first, 1, &params)).unwrap();
        let beside = bench.kernel(graph, &[first], "busy_500us", 4096);
        bench.kernel(graph, &[middle, beside], "busy_1000us", 4096);
        let exec = bench.exec(graph);
        for _ in 0..3 {
            let time = bench.time(stream, || call!(cuGraphLaunch(exec, stream)).unwrap());
            // Between GPUs the host looks now and then, so it may take longer, never shorter.
            assert!(time >= 5000.0, "{time}");
        }
        call!(cuGraphExecDestroy(exec)).unwrap();
    });
}

#[test]
fn objects_are_destroyed_when_nobody_holds_them() {
    trial::on_node(|| {
        let bench = Bench::new();
        let (graph, stream) = (bench.graph(), bench.stream());
        let mut object = null_mut();
        let bad = Err(CudaError::INVALID_VALUE);
        assert_eq!(call!(cuUserObjectCreate(&mut object, 7 as *mut c_void, Some(note), 1, 0)), bad);
        assert_eq!(call!(cuUserObjectCreate(&mut object, 7 as *mut c_void, Some(note), 0, 1)), bad);
        call!(cuUserObjectCreate(&mut object, 7 as *mut c_void, Some(note), 1, 1)).unwrap();
        call!(cuUserObjectRetain(object, 2)).unwrap();
        assert_eq!(call!(cuUserObjectRelease(object, 4)), bad);
        call!(cuUserObjectRelease(object, 2)).unwrap();
        call!(cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE)).unwrap();
        bench.kernel(graph, &[], "busy_20000us", 4096);
        let exec = bench.exec(graph);
        call!(cuGraphDestroy(graph)).unwrap();
        call!(cuGraphLaunch(exec, stream)).unwrap();
        let end = bench.event();
        call!(cuEventRecord(end, stream)).unwrap();
        call!(cuGraphExecDestroy(exec)).unwrap();
        if call!(cuEventQuery(end)).is_err() {
            // The launch still runs, and with it the object is needed.
            assert!(locked(&SEEN).is_empty() || call!(cuEventQuery(end)).is_ok());
        }
        call!(cuStreamSynchronize(stream)).unwrap();
        while locked(&SEEN).is_empty() {
            std::thread::yield_now();
        }
        assert_eq!(*locked(&SEEN), [7]);
        assert_eq!(call!(cuUserObjectRelease(object, 1)), bad);
    });
}
