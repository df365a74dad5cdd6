//! Tests of graph topology: nodes, edges, clones, and calls that must be rejected.

use super::*;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

const INVALID_VALUE: Result<(), CudaError> = Err(CudaError::INVALID_VALUE);

/// The number of nodes and the edges between them.
type EdgeList = (usize, Vec<(usize, usize)>);

/// Generates the edges of a random acyclic graph: each leads from an earlier to a later node.
fn dag() -> impl Strategy<Value = EdgeList> {
    (2..24usize).prop_flat_map(|count| {
        let edge = (1..count).prop_flat_map(|to| (0..to, Just(to)));
        (Just(count), prop::collection::btree_set(edge, 0..40).prop_map(|set| set.into_iter().collect()))
    })
}

#[test]
fn nodes_and_edges_are_read_back_from_graph_and_clone() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let mut runner =
            TestRunner::new(Config { cases: 64, failure_persistence: None, ..Config::default() });
        let check = |(count, pairs): EdgeList| {
            let graph = fixture.graph();
            let mut made: Vec<CUgraphNode> = Vec::new();
            for to in 0..count {
                let after: Vec<CUgraphNode> =
                    pairs.iter().filter(|edge| edge.1 == to).map(|edge| made[edge.0]).collect();
                made.push(if to % 3 == 0 {
                    host(graph, &after, to)
                } else {
                    fixture.kernel(graph, &after, "busy_1us", 1 + to as u32)
                });
            }
            let wanted: Vec<_> = {
                let mut pairs = pairs.clone();
                pairs.sort_by_key(|&(from, to)| (to, from));
                pairs.into_iter().map(|(from, to)| (made[from], made[to])).collect()
            };
            prop_assert_eq!(nodes(graph), made.clone());
            prop_assert_eq!(edges(graph), wanted.clone());
            let mut clone = null_mut();
            call!(cuGraphClone(&mut clone, graph)).unwrap();
            let copies = nodes(clone);
            prop_assert!(copies.iter().all(|copy| !made.contains(copy)));
            let back: Vec<_> = edges(clone)
                .into_iter()
                .map(|(from, to)| {
                    let index = |node| copies.iter().position(|copy| *copy == node).unwrap();
                    (made[index(from)], made[index(to)])
                })
                .collect();
            prop_assert_eq!(back, wanted);
            for (index, (&node, &copy)) in made.iter().zip(&copies).enumerate() {
                let mut found = null_mut();
                call!(cuGraphNodeFindInClone(&mut found, node, clone)).unwrap();
                prop_assert_eq!(found, copy);
                prop_assert_eq!(kind(node), kind(copy));
                if kind(copy) == CU_GRAPH_NODE_TYPE_KERNEL {
                    let mut params = CUDA_KERNEL_NODE_PARAMS::default();
                    call!(cuGraphKernelNodeGetParams_v2(copy, &mut params)).unwrap();
                    prop_assert_eq!(params.gridDimX as usize, 1 + index);
                }
            }
            call!(cuGraphDestroy(graph)).unwrap();
            call!(cuGraphDestroy(clone)).unwrap();
            Ok(())
        };
        runner.run(&dag(), check).unwrap();
    });
}

#[test]
fn kernels_start_after_their_dependencies() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let stream = fixture.stream();
        let device = super::super::super::session::device(0).unwrap();
        let shape = (dag(), prop::collection::vec((1..200u32, 1..300u32), 24));
        let mut runner =
            TestRunner::new(Config { cases: 48, failure_persistence: None, ..Config::default() });
        let check = |((count, pairs), kernels): (EdgeList, Vec<(u32, u32)>)| {
            let graph = fixture.graph();
            let mut made: Vec<CUgraphNode> = Vec::new();
            for (to, (micros, blocks)) in kernels.iter().copied().enumerate().take(count) {
                let after: Vec<CUgraphNode> =
                    pairs.iter().filter(|edge| edge.1 == to).map(|edge| made[edge.0]).collect();
                made.push(fixture.kernel(graph, &after, &format!("busy_{micros}us"), blocks));
            }
            let exec = fixture.exec(graph);
            device.engine().kernel_ends.clear();
            call!(cuGraphLaunch(exec, stream)).unwrap();
            let kernel_ends = std::mem::take(&mut device.engine().kernel_ends);
            prop_assert_eq!(kernel_ends.len(), 1);
            // Kernels are submitted in a topological order: find each kernel by its place in that order.
            let order = store().order(GraphKey(graph as usize)).unwrap();
            let at = |index: usize| order.iter().position(|node| node.handle() == made[index]).unwrap();
            let end = |index: usize| kernel_ends[0][at(index)];
            let start = |index: usize| end(index) - u64::from(kernels[index].0) * 1000;
            for &(from, to) in &pairs {
                prop_assert!(start(to) >= end(from), "{from} -> {to}");
            }
            call!(cuGraphExecDestroy(exec)).unwrap();
            call!(cuGraphDestroy(graph)).unwrap();
            Ok(())
        };
        runner.run(&shape, check).unwrap();
        call!(cuStreamSynchronize(stream)).unwrap();
    });
}

#[test]
fn cycles_and_invalid_edges_are_rejected() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let (graph, other) = (fixture.graph(), fixture.graph());
        let a = fixture.kernel(graph, &[], "busy_1us", 1);
        let b = fixture.kernel(graph, &[a], "busy_1us", 1);
        let c = fixture.kernel(graph, &[b], "busy_1us", 1);
        let foreign = fixture.kernel(other, &[], "busy_1us", 1);
        assert_eq!(call!(cuGraphAddDependencies(graph, &a, &a, 1)), INVALID_VALUE);
        assert_eq!(call!(cuGraphAddDependencies(graph, &a, &b, 1)), INVALID_VALUE, "known");
        assert_eq!(call!(cuGraphAddDependencies(graph, &a, &foreign, 1)), INVALID_VALUE);
        assert_eq!(call!(cuGraphAddDependencies(other, &a, &c, 1)), INVALID_VALUE);
        assert_eq!(call!(cuGraphRemoveDependencies(graph, &a, &c, 1)), INVALID_VALUE, "unknown");
        let mut node = null_mut();
        assert_eq!(call!(cuGraphAddEmptyNode(&mut node, graph, [a, a].as_ptr(), 2)), INVALID_VALUE, "twice");
        assert_eq!(call!(cuGraphAddEmptyNode(&mut node, graph, &foreign, 1)), INVALID_VALUE);
        assert_eq!(edges(graph).len(), 2);
        // A cycle is accepted here and detected at instantiation.
        call!(cuGraphAddDependencies(graph, &c, &a, 1)).unwrap();
        let (mut exec, mut log) = (null_mut(), [1 as c_char; 8]);
        assert_eq!(
            call!(cuGraphInstantiate_v2(&mut exec, graph, &mut node, log.as_mut_ptr(), log.len())),
            INVALID_VALUE
        );
        assert!([a, b, c].contains(&node) && log[7] == 0 && log[0] != 0);
        let mut params = CUDA_GRAPH_INSTANTIATE_PARAMS::default();
        assert_eq!(call!(cuGraphInstantiateWithParams(&mut exec, graph, &mut params)), INVALID_VALUE);
        assert_eq!(params.result_out, CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE);
        call!(cuGraphRemoveDependencies(graph, &c, &a, 1)).unwrap();
        fixture.exec(graph);
        call!(cuGraphDestroyNode(b)).unwrap();
        assert!(edges(graph).is_empty() && nodes(graph) == [a, c]);
        let mut roots = 0;
        call!(cuGraphGetRootNodes(graph, null_mut(), &mut roots)).unwrap();
        assert_eq!(roots, 2);
    });
}

#[test]
fn edge_data_requires_v2_functions() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let graph = fixture.graph();
        let a = fixture.kernel(graph, &[], "busy_1us", 1);
        let b = fixture.kernel(graph, &[], "busy_1us", 1);
        let data = CUgraphEdgeData { from_port: 1, type_: 1, ..Default::default() };
        let wrong = CUgraphEdgeData { from_port: 9, ..data };
        assert_eq!(call!(cuGraphAddDependencies_v2(graph, &a, &b, &wrong, 1)), INVALID_VALUE);
        call!(cuGraphAddDependencies_v2(graph, &a, &b, &data, 1)).unwrap();
        let (mut count, mut from, mut to) = (1, null_mut(), null_mut());
        let lossy = Err(CudaError::LOSSY_QUERY);
        assert_eq!(call!(cuGraphGetEdges(graph, &mut from, &mut to, &mut count)), lossy);
        assert_eq!(call!(cuGraphNodeGetDependencies(b, &mut from, &mut count)), lossy);
        let mut back = CUgraphEdgeData::default();
        call!(cuGraphGetEdges_v2(graph, &mut from, &mut to, &mut back, &mut count)).unwrap();
        assert_eq!((from, to, count, back.from_port, back.type_), (a, b, 1, 1, 1));
        call!(cuGraphNodeGetDependentNodes_v2(a, &mut to, &mut back, &mut count)).unwrap();
        assert_eq!((to, back.from_port), (b, 1));
        assert_eq!(call!(cuGraphRemoveDependencies(graph, &a, &b, 1)), INVALID_VALUE);
        call!(cuGraphRemoveDependencies_v2(graph, &a, &b, &data, 1)).unwrap();
    });
}

#[test]
fn debug_dot_print_writes_a_dot_file() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let (graph, child) = (fixture.graph(), fixture.graph());
        fixture.kernel(child, &[], "busy_2us", 1);
        let first = fixture.kernel(graph, &[], "busy_1us", 1);
        let mut node = null_mut();
        call!(cuGraphAddChildGraphNode(&mut node, graph, &first, 1, child)).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = CString::new(file.path().to_str().unwrap()).unwrap();
        call!(cuGraphDebugDotPrint(graph, path.as_ptr(), CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE)).unwrap();
        let text = std::fs::read_to_string(file.path()).unwrap();
        assert!(text.starts_with("digraph dot {") && text.ends_with("}\n"));
        assert_eq!(text.matches('{').count(), text.matches('}').count());
        for part in ["busy_1us", "busy_2us", "\"graph_1_node_0\" -> \"graph_1_node_1\"", "cluster_2"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    });
}

/// One call of a random sequence: the function and where its handles come from.
type RandomCall = (u8, usize, usize, bool);

#[test]
fn random_graph_calls_never_crash_or_leak() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let streams = [fixture.stream(), fixture.stream()];
        let mut runner =
            TestRunner::new(Config { cases: 40, failure_persistence: None, ..Config::default() });
        let sequence =
            prop::collection::vec((0..26u8, any::<usize>(), any::<usize>(), any::<bool>()), 1..120);
        let check = |calls: Vec<RandomCall>| {
            let (mut graphs, mut made, mut execs) =
                (vec![null_mut(); 1], vec![null_mut(); 1], vec![null_mut(); 1]);
            for (which, a, b, wild) in calls {
                // An invented handle, a corrupted one, or one from the list, which may be stale.
                let pick = |list: &[*mut c_void], index: usize| match (wild, index % 7) {
                    (true, 0) => index as *mut c_void,
                    (true, 1) => (list[index % list.len()] as usize ^ 8) as *mut c_void,
                    _ => list[index % list.len()],
                };
                let (graph, other): (CUgraph, CUgraph) = (pick(&graphs, a).cast(), pick(&graphs, b).cast());
                let (node, next): (CUgraphNode, CUgraphNode) = (pick(&made, a).cast(), pick(&made, b).cast());
                let exec: CUgraphExec = pick(&execs, b).cast();
                let stream = streams[a % 2];
                let params = fixture.params("busy_0us", 1);
                let host = CUDA_HOST_NODE_PARAMS { fn_: Some(record_call), userData: null_mut() };
                let (mut out_graph, mut out_node, mut out_exec) = (null_mut(), null_mut(), null_mut());
                let (mut count, mut enabled) = (0, 0);
                let mut info = CUgraphExecUpdateResultInfo::default();
                let after = if b % 2 == 0 { 0 } else { 1 };
                let _ = match which {
                    0 => call!(cuGraphCreate(&mut out_graph, 0)),
                    1 => call!(cuGraphDestroy(graph)),
                    2 => call!(cuGraphClone(&mut out_graph, graph)),
                    3 => call!(cuGraphAddKernelNode_v2(&mut out_node, graph, &next, after, &params)),
                    4 => call!(cuGraphAddEmptyNode(&mut out_node, graph, &next, after)),
                    5 => call!(cuGraphAddHostNode(&mut out_node, graph, &next, after, &host)),
                    6 => call!(cuGraphAddChildGraphNode(&mut out_node, graph, &next, after, other)),
                    7 => call!(cuGraphAddDependencies(graph, &node, &next, 1)),
                    8 => call!(cuGraphRemoveDependencies(graph, &node, &next, 1)),
                    9 => call!(cuGraphDestroyNode(node)),
                    10 => call!(cuGraphInstantiateWithFlags(&mut out_exec, graph, (b % 16) as u64)),
                    11 => call!(cuGraphLaunch(exec, stream)),
                    12 => call!(cuGraphExecDestroy(exec)),
                    13 => call!(cuGraphExecUpdate_v2(exec, graph, &mut info)),
                    14 => call!(cuGraphExecKernelNodeSetParams_v2(exec, node, &params)),
                    15 => call!(cuGraphNodeSetEnabled(exec, node, (a % 2) as u32)),
                    16 => call!(cuGraphNodeGetEnabled(exec, node, &mut enabled)),
                    17 => call!(cuGraphNodeFindInClone(&mut out_node, node, graph)),
                    18 => call!(cuGraphGetNodes(graph, null_mut(), &mut count)),
                    19 => call!(cuGraphChildGraphNodeGetGraph(node, &mut out_graph)),
                    20 => call!(cuStreamBeginCapture_v2(stream, (b % 4) as u32)),
                    21 => call!(cuStreamEndCapture(stream, &mut out_graph)),
                    22 => fixture.launch("busy_0us", stream),
                    23 => call!(cuGraphExecChildGraphNodeSetParams(exec, node, graph)),
                    24 => call!(cuGraphKernelNodeSetParams_v2(node, &params)),
                    _ => call!(cuStreamSynchronize(stream)),
                };
                graphs.extend((!out_graph.is_null()).then_some(out_graph.cast()));
                made.extend((!out_node.is_null()).then_some(out_node.cast()));
                execs.extend((!out_exec.is_null()).then_some(out_exec.cast()));
            }
            let mut ended = null_mut();
            for stream in streams {
                let _ = call!(cuStreamEndCapture(stream, &mut ended));
                graphs.push(ended.cast());
            }
            for stream in streams {
                call!(cuStreamSynchronize(stream)).unwrap();
            }
            for exec in execs {
                let _ = call!(cuGraphExecDestroy(exec.cast()));
            }
            for graph in graphs {
                let _ = call!(cuGraphDestroy(graph.cast()));
            }
            Ok(())
        };
        runner.run(&sequence, check).unwrap();
        let left = store();
        assert!(left.execs.is_empty() && left.pending_destructors.is_empty());
        assert!(left.graphs.is_empty() && left.nodes.is_empty(), "{} graphs", left.graphs.len());
    });
}
