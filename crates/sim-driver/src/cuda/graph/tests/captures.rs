//! Tests of stream capture: the resulting graphs and the calls that are rejected meanwhile.

use super::*;

fn begin(stream: CUstream) {
    call!(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED)).unwrap();
}

fn end(stream: CUstream) -> Result<CUgraph, CudaError> {
    let mut graph = 1 as CUgraph;
    let ended = call!(cuStreamEndCapture(stream, &mut graph));
    assert_eq!(ended.is_err(), graph.is_null());
    ended.map(|()| graph)
}

fn status(stream: CUstream) -> CUstreamCaptureStatus {
    let mut status = u32::MAX;
    call!(cuStreamIsCapturing(stream, &mut status)).unwrap();
    status
}

/// Creates a stream that is ordered with the legacy default stream.
fn blocking() -> CUstream {
    let mut stream = null_mut();
    call!(cuStreamCreate(&mut stream, 0)).unwrap();
    stream
}

#[test]
fn captured_operations_become_nodes_and_forks_become_branches() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let (stream, side) = (fixture.stream(), fixture.stream());
        let (fork, join) = (fixture.event(), fixture.event());
        begin(stream);
        assert_eq!(status(stream), CU_STREAM_CAPTURE_STATUS_ACTIVE);
        fixture.launch("busy_100us", stream).unwrap();
        call!(cuEventRecord(fork, stream)).unwrap();
        call!(cuStreamWaitEvent(side, fork, 0)).unwrap();
        assert_eq!(status(side), CU_STREAM_CAPTURE_STATUS_ACTIVE);
        fixture.launch("busy_200us", side).unwrap();
        call!(cuLaunchHostFunc(stream, Some(record_call), 5 as *mut c_void)).unwrap();
        call!(cuEventRecord(join, side)).unwrap();
        call!(cuStreamWaitEvent(stream, join, 0)).unwrap();
        fixture.launch("busy_300us", stream).unwrap();
        let graph = end(stream).unwrap();
        assert_eq!([status(stream), status(side)], [CU_STREAM_CAPTURE_STATUS_NONE; 2]);
        assert!(locked(&CALLED).is_empty(), "a captured host function ran");
        let made = nodes(graph);
        let kinds: Vec<_> = made.iter().map(|&node| kind(node)).collect();
        assert_eq!(kinds, [0, 0, 3, 0]);
        let mut found = edges(graph);
        found.sort();
        let mut wanted = [(made[0], made[1]), (made[0], made[2]), (made[2], made[3]), (made[1], made[3])];
        wanted.sort();
        assert_eq!(found, wanted);
        let exec = fixture.exec(graph);
        let time = fixture.time(stream, || call!(cuGraphLaunch(exec, stream)).unwrap());
        assert!(time >= 600.0, "{time}");
        assert_eq!(*locked(&CALLED), [5]);
    });
}

#[test]
fn forbidden_call_invalidates_capture() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let (stream, side, event) = (fixture.stream(), fixture.stream(), fixture.event());
        let invalidated = Err(CudaError::STREAM_CAPTURE_INVALIDATED);
        let unsupported = Err(CudaError::STREAM_CAPTURE_UNSUPPORTED);
        let assert_invalidates = |act: &dyn Fn() -> Result<(), CudaError>, error: CudaError| {
            begin(stream);
            fixture.launch("busy_1us", stream).unwrap();
            assert_eq!(act(), Err(error));
            assert_eq!(status(stream), CU_STREAM_CAPTURE_STATUS_INVALIDATED, "{error:?}");
            assert_eq!(fixture.launch("busy_1us", stream), invalidated);
            assert_eq!(end(stream), Err(CudaError::STREAM_CAPTURE_INVALIDATED));
            assert_eq!(status(stream), CU_STREAM_CAPTURE_STATUS_NONE);
        };
        assert_invalidates(&|| call!(cuStreamSynchronize(stream)), CudaError::STREAM_CAPTURE_UNSUPPORTED);
        assert_invalidates(&|| call!(cuStreamQuery(stream)), CudaError::STREAM_CAPTURE_UNSUPPORTED);
        assert_invalidates(&|| call!(cuCtxSynchronize()), CudaError::STREAM_CAPTURE_UNSUPPORTED);
        assert_invalidates(
            &|| {
                call!(cuEventRecord(event, stream))?;
                call!(cuEventSynchronize(event))
            },
            CudaError::CAPTURED_EVENT,
        );
        assert_invalidates(
            &|| {
                // Recorded outside the capture, waited for inside.
                call!(cuEventRecord(event, side))?;
                call!(cuStreamWaitEvent(stream, event, 0))
            },
            CudaError::STREAM_CAPTURE_ISOLATION,
        );
        assert_invalidates(
            &|| {
                call!(cuEventRecord(event, stream))?;
                call!(cuStreamWaitEvent(CU_STREAM_LEGACY as CUstream, event, 0))
            },
            CudaError::STREAM_CAPTURE_IMPLICIT,
        );

        let legacy = null_mut();
        assert_eq!(call!(cuStreamBeginCapture_v2(legacy, 0)), unsupported);
        begin(stream);
        assert_eq!(call!(cuStreamBeginCapture_v2(stream, 0)), Err(CudaError::ILLEGAL_STATE));
        end(stream).unwrap();
        assert_eq!(end(stream), Err(CudaError::ILLEGAL_STATE));
    });
}

#[test]
fn capture_goes_on_without_a_destroyed_branch_stream() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let (stream, event) = (fixture.stream(), fixture.event());
        for is_joined in [true, false] {
            let side = fixture.stream();
            begin(stream);
            fixture.launch("busy_1us", stream).unwrap();
            call!(cuEventRecord(event, stream)).unwrap();
            call!(cuStreamWaitEvent(side, event, 0)).unwrap();
            fixture.launch("busy_1us", side).unwrap();
            if is_joined {
                call!(cuEventRecord(event, side)).unwrap();
                call!(cuStreamWaitEvent(stream, event, 0)).unwrap();
            }
            call!(cuStreamDestroy_v2(side)).unwrap();
            assert_eq!(status(stream), CU_STREAM_CAPTURE_STATUS_ACTIVE);
            fixture.launch("busy_1us", stream).unwrap();
            match end(stream) {
                Ok(graph) => assert!(is_joined && nodes(graph).len() == 3),
                Err(error) => assert!(!is_joined && error == CudaError::STREAM_CAPTURE_UNJOINED, "{error:?}"),
            }
        }
    });
}

#[test]
fn capture_must_end_on_origin_stream_with_branches_joined() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let (stream, side, event) = (fixture.stream(), fixture.stream(), fixture.event());
        let fork = || {
            begin(stream);
            fixture.launch("busy_1us", stream).unwrap();
            call!(cuEventRecord(event, stream)).unwrap();
            call!(cuStreamWaitEvent(side, event, 0)).unwrap();
        };
        fork();
        fixture.launch("busy_1us", side).unwrap();
        assert_eq!(end(stream), Err(CudaError::STREAM_CAPTURE_UNJOINED));
        assert_eq!(status(side), CU_STREAM_CAPTURE_STATUS_NONE);
        // An event of an ended capture cannot be waited for.
        assert_eq!(call!(cuStreamWaitEvent(side, event, 0)), Err(CudaError::CAPTURED_EVENT));
        assert_eq!(call!(cuEventQuery(event)), Err(CudaError::CAPTURED_EVENT));

        // A branch without operations needs no join.
        fork();
        end(stream).unwrap();

        fork();
        assert_eq!(end(side), Err(CudaError::STREAM_CAPTURE_UNMATCHED));
        assert_eq!(end(stream), Err(CudaError::STREAM_CAPTURE_INVALIDATED));

        // Two captures cannot be merged.
        let third = fixture.stream();
        fork();
        begin(third);
        assert_eq!(call!(cuStreamWaitEvent(third, event, 0)), Err(CudaError::STREAM_CAPTURE_MERGE));
        assert_eq!(end(third), Err(CudaError::STREAM_CAPTURE_INVALIDATED));
        assert_eq!(end(stream), Err(CudaError::STREAM_CAPTURE_INVALIDATED));

        // Unless it is relaxed, a capture can be ended only by the thread that began it.
        call!(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)).unwrap();
        let handle = stream as usize;
        let elsewhere = std::thread::spawn(move || end(handle as CUstream).map(|_| ())).join().unwrap();
        assert_eq!(elsewhere, Err(CudaError::STREAM_CAPTURE_WRONG_THREAD));
        end(stream).unwrap();
    });
}

#[test]
fn legacy_stream_is_rejected_during_blocking_stream_capture() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let (stream, legacy) = (blocking(), null_mut());
        let implicit = Err(CudaError::STREAM_CAPTURE_IMPLICIT);
        begin(stream);
        let mut found = 0;
        // The query itself does not invalidate the capture.
        assert_eq!(call!(cuStreamIsCapturing(legacy, &mut found)), implicit);
        assert_eq!(status(stream), CU_STREAM_CAPTURE_STATUS_ACTIVE);
        assert_eq!(fixture.launch("busy_1us", legacy), implicit);
        assert_eq!(status(stream), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
        end(stream).unwrap_err();
        fixture.launch("busy_1us", legacy).unwrap();
        let alone = fixture.stream();
        begin(alone);
        fixture.launch("busy_1us", legacy).unwrap();
        end(alone).unwrap();
    });
}

#[test]
fn capture_mode_decides_which_threads_are_restricted() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let (stream, event) = (fixture.stream(), fixture.event());
        call!(cuEventRecord(event, null_mut())).unwrap();
        let (handle, context) = (event as usize, fixture.context as usize);
        let elsewhere = move |mut mode: CUstreamCaptureMode| {
            let ask = move || {
                call!(cuCtxSetCurrent(context as CUcontext))?;
                call!(cuThreadExchangeStreamCaptureMode(&mut mode))?;
                assert_eq!(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
                call!(cuEventSynchronize(handle as CUevent))
            };
            std::thread::spawn(ask).join().unwrap()
        };
        let unsupported = Err(CudaError::STREAM_CAPTURE_UNSUPPORTED);
        // Mode of the capture, mode of the other thread, and whether a potentially unsafe call of that thread is
        // allowed.
        for (own, other, allowed) in [(0, 0, false), (0, 1, true), (0, 2, true), (1, 0, true), (2, 0, true)] {
            call!(cuStreamBeginCapture_v2(stream, own)).unwrap();
            assert_eq!(elsewhere(other), if allowed { Ok(()) } else { unsupported }, "{own} {other}");
            assert_eq!(end(stream).is_ok(), allowed);
        }
        for (own, allowed) in [(0, false), (1, false), (2, true)] {
            call!(cuStreamBeginCapture_v2(stream, own)).unwrap();
            assert_eq!(call!(cuEventSynchronize(event)), if allowed { Ok(()) } else { unsupported });
            assert_eq!(end(stream).is_ok(), allowed);
        }
        let mut wrong = 3;
        assert_eq!(call!(cuThreadExchangeStreamCaptureMode(&mut wrong)), Err(CudaError::INVALID_VALUE));
    });
}

#[test]
fn capture_dependencies_can_be_queried_and_updated() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let stream = fixture.stream();
        begin(stream);
        fixture.launch("busy_1us", stream).unwrap();
        let (mut found, mut id, mut graph, mut count) = (0, 0, null_mut(), 9);
        let mut after: *const CUgraphNode = null();
        call!(cuStreamGetCaptureInfo_v2(stream, &mut found, &mut id, &mut graph, &mut after, &mut count))
            .unwrap();
        assert_eq!((found, count), (CU_STREAM_CAPTURE_STATUS_ACTIVE, 1));
        assert!(id > 0);
        // SAFETY: the returned count says that there is one node.
        let first = unsafe { after.read() };
        assert_eq!(nodes(graph), [first]);
        let mut own = fixture.kernel(graph, &[], "busy_7us", 1);
        call!(cuStreamUpdateCaptureDependencies(stream, &mut own, 1, CU_STREAM_ADD_CAPTURE_DEPENDENCIES))
            .unwrap();
        fixture.launch("busy_1us", stream).unwrap();
        call!(cuStreamUpdateCaptureDependencies(stream, null_mut(), 0, CU_STREAM_SET_CAPTURE_DEPENDENCIES))
            .unwrap();
        fixture.launch("busy_1us", stream).unwrap();
        assert_eq!(end(stream), Ok(graph));
        let made = nodes(graph);
        assert_eq!(edges(graph), [(first, made[2]), (own, made[2])]);
        assert_eq!(made.len(), 4);
        call!(cuStreamGetCaptureInfo(stream, &mut found, &mut id)).unwrap();
        assert_eq!(found, CU_STREAM_CAPTURE_STATUS_NONE);

        // Capture into an existing graph.
        let last = made[3];
        call!(cuStreamBeginCaptureToGraph(stream, graph, &last, null(), 1, 2)).unwrap();
        fixture.launch("busy_1us", stream).unwrap();
        assert_eq!(end(stream), Ok(graph));
        assert_eq!(edges(graph).last(), Some(&(last, nodes(graph)[4])));
    });
}

#[test]
fn captured_graph_launch_becomes_child_graph() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let (stream, inside, event) = (fixture.stream(), fixture.graph(), fixture.event());
        fixture.kernel(inside, &[], "busy_100us", 4096);
        let exec = fixture.exec(inside);
        begin(stream);
        call!(cuGraphLaunch(exec, stream)).unwrap();
        call!(cuEventRecordWithFlags(event, stream, CU_EVENT_RECORD_EXTERNAL)).unwrap();
        call!(cuStreamWaitEvent(stream, event, CU_EVENT_WAIT_EXTERNAL)).unwrap();
        call!(cuGraphLaunch(exec, stream)).unwrap();
        let graph = end(stream).unwrap();
        let kinds: Vec<_> = nodes(graph).into_iter().map(kind).collect();
        assert_eq!(kinds, [4, 7, 6, 4]);
        let outer = fixture.exec(graph);
        assert_close(fixture.time(stream, || call!(cuGraphLaunch(outer, stream)).unwrap()), 200.0);
        call!(cuEventSynchronize(event)).unwrap();
    });
}

/// The next graph gets the same handle: it must not be mistaken for the destroyed one, nor be added to itself.
#[test]
fn destroying_the_graph_invalidates_its_capture() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let (stream, inside) = (fixture.stream(), fixture.graph());
        fixture.kernel(inside, &[], "busy_1us", 1);
        let exec = fixture.exec(inside);
        let graphs = store().graphs.len();
        let invalid = Err(CudaError::STREAM_CAPTURE_INVALIDATED);
        let destroyed = || {
            begin(stream);
            let (mut found, mut graph) = (0, null_mut());
            let nothing = (null_mut(), null_mut(), null_mut());
            call!(cuStreamGetCaptureInfo_v2(stream, &mut found, nothing.0, &mut graph, nothing.1, nothing.2))
                .unwrap();
            call!(cuGraphDestroy(graph)).unwrap();
            graph
        };
        destroyed();
        assert_eq!(call!(cuGraphLaunch(exec, stream)), invalid);
        assert_eq!(end(stream).map(|_| ()), invalid);
        let gone = destroyed();
        let other = fixture.graph();
        assert_eq!(other, gone);
        assert_eq!(fixture.launch("busy_1us", stream), invalid);
        assert_eq!(status(stream), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
        assert_eq!(end(stream).map(|_| ()), invalid);
        assert_eq!(nodes(other), []);
        call!(cuGraphDestroy(other)).unwrap();
        assert_eq!(store().graphs.len(), graphs);
    });
}
