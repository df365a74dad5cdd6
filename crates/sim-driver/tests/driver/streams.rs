//! Tests of order and time: streams, events, callbacks, queues.

use super::*;
use crate::node::{TestNode, print_line, wait_for_resume};
use partage_driver_api::exports::DriverVersion;
use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

fn node() -> TestNode {
    TestNode::new("A100-SXM4-40GB", 2, DriverVersion::R550)
}

macro_rules! role_tests {
    ($($name:ident => $role:literal),* $(,)?) => {
        $(#[test]
        fn $name() {
            node().run_role(concat!("stream ", $role));
        })*

        pub fn client(arguments: &[&str]) {
            match arguments {
                $([$role] => roles::$name(),)*
                ["saturate"] => roles::saturate(),
                ["time", count] => roles::time(count.parse().unwrap()),
                other => panic!("{other:?}"),
            }
        }
    };
}

role_tests! {
    kernels_take_their_declared_duration => "time-alone",
    stream_operations_run_in_order => "order",
    callback_blocks_only_its_stream => "callbacks",
    small_grids_run_concurrently => "beside",
    launch_queue_is_bounded => "queue",
    per_thread_default_streams_are_separate => "threads",
    stream_waits_for_event => "waits",
    stream_waits_for_memory_value => "words",
    destroyed_stream_finishes_its_work => "destroy",
    event_is_recorded_and_waited_for_concurrently => "threads-and-events",
    stream_waits_for_the_recording_at_call_time => "recorded-again",
    host_function_must_not_synchronize => "inside",
}

/// As on hardware, the interval between two events includes the turns of other processes.
#[test]
fn event_interval_includes_turns_of_other_processes() {
    let node = node();
    let mut other = node.start("stream saturate");
    other.wait_for_line("saturating");
    let took: f64 = node.start("stream time 20").wait_for_line("took").parse().unwrap();
    // 20 ms of work take 40 ms next to another busy process, which may have the first turn.
    assert!((37.9..=44.1).contains(&took), "{took} ms");
    let mut third = node.start("stream saturate");
    third.wait_for_line("saturating");
    let took: f64 = node.start("stream time 20").wait_for_line("took").parse().unwrap();
    assert!((55.9..=66.1).contains(&took), "{took} ms");
    other.kill();
    third.kill();
    let took: f64 = node.start("stream time 20").wait_for_line("took").parse().unwrap();
    // The work of dead processes is dropped, but their death is noticed only after some milliseconds.
    assert!((19.9..=36.0).contains(&took), "{took} ms");
}

mod roles {
    use super::*;

    /// Submits far more work than the test lasts, nearly as much as the queue holds.
    pub fn saturate() {
        let (cuda, _) = start();
        let busy = function(&cuda, "busy_50000us");
        for _ in 0..1000 {
            launch(&cuda, busy, null_mut());
        }
        print_line("saturating");
        wait_for_resume();
    }

    /// Holds back everything submitted to the stream from now on until the gate opens, however slowly this thread
    /// submits: the time between two events then depends on the GPU alone.
    fn close_gate(cuda: &CudaLibrary, stream: CUstream) {
        GATE_OPEN.store(0, Ordering::Release);
        ok!(cuda.cuLaunchHostFunc(stream, Some(wait_for_gate), null_mut()));
        // Keeps the GPU busy while the driver places the rest.
        launch(cuda, function(cuda, "busy_100000us"), stream);
    }

    fn open_gate() {
        GATE_OPEN.store(1, Ordering::Release);
    }

    pub fn time(milliseconds: u32) {
        let (cuda, _) = start();
        let busy = function(&cuda, "busy_1000us");
        let (from, to) = (event(&cuda), event(&cuda));
        close_gate(&cuda, null_mut());
        ok!(cuda.cuEventRecord(from, null_mut()));
        for _ in 0..milliseconds {
            launch(&cuda, busy, null_mut());
        }
        ok!(cuda.cuEventRecord(to, null_mut()));
        open_gate();
        print_line(&format!("took {}", elapsed(&cuda, from, to)));
    }

    pub fn kernels_take_their_declared_duration() {
        let (cuda, _) = start();
        for (name, count, asked) in [("busy_200us", 50, 10.0), ("busy_7us", 400, 2.8), ("other", 100, 1.0)] {
            let busy = function(&cuda, name);
            let (from, to) = (event(&cuda), event(&cuda));
            close_gate(&cuda, null_mut());
            ok!(cuda.cuEventRecord(from, null_mut()));
            for _ in 0..count {
                launch(&cuda, busy, null_mut());
            }
            ok!(cuda.cuEventRecord(to, null_mut()));
            open_gate();
            let took = elapsed(&cuda, from, to);
            assert!((took - asked).abs() <= asked / 100.0, "{count} x {name}: {took} ms, not {asked}");
        }
        let nothing = function(&cuda, "busy_0us");
        launch(&cuda, nothing, null_mut());
        ok!(cuda.cuStreamQuery(null_mut()));
    }

    pub fn stream_operations_run_in_order() {
        let (cuda, _) = start();
        let busy = function(&cuda, "busy_2000us");
        let streams = [null_mut(), stream(&cuda, 0), stream(&cuda, 1)];
        for own in streams {
            let events: Vec<CUevent> = (0..5).map(|_| event(&cuda)).collect();
            close_gate(&cuda, own);
            for &mark in &events {
                launch(&cuda, busy, own);
                ok!(cuda.cuEventRecord(mark, own));
            }
            fails!(CUDA_ERROR_NOT_READY, cuda.cuStreamQuery(own));
            fails!(CUDA_ERROR_NOT_READY, cuda.cuEventQuery(events[4]));
            let mut between = 0.0;
            fails!(CUDA_ERROR_NOT_READY, cuda.cuEventElapsedTime(&mut between, events[0], events[4]));
            open_gate();
            for pair in events.windows(2) {
                let took = elapsed(&cuda, pair[0], pair[1]);
                assert!((1.99..2.02).contains(&took), "{took}");
            }
            ok!(cuda.cuStreamSynchronize(own));
            ok!(cuda.cuStreamQuery(own));
        }
    }

    static CALL_ORDER: Mutex<Vec<u32>> = Mutex::new(Vec::new());
    static GATE_OPEN: AtomicU32 = AtomicU32::new(0);

    extern "C" fn record_call(number: *mut c_void) {
        CALL_ORDER.lock().unwrap().push(number as usize as u32);
    }

    extern "C" fn wait_for_gate(number: *mut c_void) {
        while GATE_OPEN.load(Ordering::Acquire) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        if !number.is_null() {
            record_call(number);
        }
    }

    extern "C" fn record_callback(_: CUstream, code: CUresult, number: *mut c_void) {
        assert_eq!(code, CUDA_SUCCESS);
        record_call(number);
    }

    pub fn callback_blocks_only_its_stream() {
        let (cuda, _) = start();
        let busy = function(&cuda, "busy_300us");
        let (held, free) = (stream(&cuda, 1), stream(&cuda, 1));
        let after = event(&cuda);
        launch(&cuda, busy, held);
        ok!(cuda.cuLaunchHostFunc(held, Some(wait_for_gate), 1 as *mut c_void));
        launch(&cuda, busy, held);
        ok!(cuda.cuStreamAddCallback(held, Some(record_callback), 2 as *mut c_void, 0));
        ok!(cuda.cuEventRecord(after, held));
        // The other stream continues.
        launch(&cuda, busy, free);
        ok!(cuda.cuStreamSynchronize(free));
        fails!(CUDA_ERROR_NOT_READY, cuda.cuEventQuery(after));
        fails!(CUDA_ERROR_NOT_READY, cuda.cuStreamQuery(held));
        assert!(CALL_ORDER.lock().unwrap().is_empty());
        GATE_OPEN.store(1, Ordering::Release);
        ok!(cuda.cuEventSynchronize(after));
        assert_eq!(*CALL_ORDER.lock().unwrap(), [1, 2]);
        ok!(cuda.cuCtxSynchronize());
        // The legacy stream follows all blocking streams, their callbacks included.
        GATE_OPEN.store(0, Ordering::Release);
        let blocking = stream(&cuda, 0);
        ok!(cuda.cuLaunchHostFunc(blocking, Some(wait_for_gate), 3 as *mut c_void));
        ok!(cuda.cuLaunchHostFunc(null_mut(), Some(record_call), 4 as *mut c_void));
        ok!(cuda.cuLaunchHostFunc(blocking, Some(record_call), 5 as *mut c_void));
        fails!(CUDA_ERROR_NOT_READY, cuda.cuStreamQuery(null_mut()));
        GATE_OPEN.store(1, Ordering::Release);
        ok!(cuda.cuCtxSynchronize());
        assert_eq!(*CALL_ORDER.lock().unwrap(), [1, 2, 3, 4, 5]);
        fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuLaunchHostFunc(held, None, null_mut()));
    }

    pub fn small_grids_run_concurrently() {
        let (cuda, _) = start();
        let busy = function(&cuda, "busy_5000us");
        let (from, to) = (event(&cuda), event(&cuda));
        let streams: Vec<CUstream> = (0..4).map(|_| stream(&cuda, 1)).collect();
        close_gate(&cuda, streams[0]);
        ok!(cuda.cuEventRecord(from, streams[0]));
        for &own in &streams {
            ok!(cuda.cuStreamWaitEvent(own, from, 0));
            // 32 blocks on 108 multiprocessors with 8 blocks each.
            ok!(cuda.cuLaunchKernel(busy, 32, 1, 1, 256, 1, 1, 0, own, null_mut(), null_mut()));
        }
        let joined: Vec<CUevent> = streams.iter().map(|_| event(&cuda)).collect();
        for (&own, &end) in streams.iter().zip(&joined) {
            ok!(cuda.cuEventRecord(end, own));
            ok!(cuda.cuStreamWaitEvent(streams[0], end, 0));
        }
        ok!(cuda.cuEventRecord(to, streams[0]));
        open_gate();
        let took = elapsed(&cuda, from, to);
        assert!((4.99..5.1).contains(&took), "four concurrent kernels took {took} ms");
    }

    pub fn launch_queue_is_bounded() {
        let (cuda, _) = start();
        let busy = function(&cuda, "busy_100us");
        let start = Instant::now();
        for _ in 0..1024 + 300 {
            launch(&cuda, busy, null_mut());
        }
        // The last launch had to wait until 300 were done.
        assert!(start.elapsed() >= Duration::from_micros(299 * 100), "{:?}", start.elapsed());
        ok!(cuda.cuCtxSynchronize());
        assert!(start.elapsed() >= Duration::from_micros(1324 * 100), "{:?}", start.elapsed());
        // The queue behind a host function is bounded too.
        close_gate(&cuda, null_mut());
        let submitted = AtomicU32::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while submitted.load(Ordering::Acquire) < 1000 {
                    std::thread::yield_now();
                }
                std::thread::sleep(Duration::from_millis(50));
                assert!(submitted.load(Ordering::Acquire) <= 1024, "the queue is not bounded");
                open_gate();
            });
            let nothing = function(&cuda, "busy_0us");
            for _ in 0..2000 {
                launch(&cuda, nothing, null_mut());
                submitted.fetch_add(1, Ordering::Release);
            }
        });
        ok!(cuda.cuCtxSynchronize());
    }

    pub fn per_thread_default_streams_are_separate() {
        let (cuda, context) = start();
        let context = context as usize;
        let busy = function(&cuda, "busy_0us") as usize;
        let run = |cuda: &CudaLibrary| {
            ok!(cuda.cuCtxSetCurrent(context as CUcontext));
            let none = null_mut();
            ok!(cuda.cuLaunchKernel_ptsz(
                busy as CUfunction,
                1,
                1,
                1,
                1,
                1,
                1,
                0,
                none,
                none.cast(),
                none.cast()
            ));
            let mut own = 0;
            ok!(cuda.cuStreamGetId_ptsz(none, &mut own));
            own
        };
        let mut legacy = 0;
        ok!(cuda.cuStreamGetId(null_mut(), &mut legacy));
        let ids: Vec<u64> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3).map(|_| scope.spawn(|| run(&cuda))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let own = run(&cuda);
        assert_eq!(own, run(&cuda));
        let mut all = ids;
        all.extend([own, legacy]);
        let distinct: std::collections::BTreeSet<u64> = all.iter().copied().collect();
        assert_eq!(distinct.len(), 5, "{all:?}");
        // The special handles refer to the same streams.
        let (mut by_handle, mut by_legacy_handle) = (0, 0);
        ok!(cuda.cuStreamGetId(2 as CUstream, &mut by_handle));
        ok!(cuda.cuStreamGetId_ptsz(1 as CUstream, &mut by_legacy_handle));
        assert_eq!((by_handle, by_legacy_handle), (own, legacy));
        // A callback blocks one thread's stream but not another's.
        GATE_OPEN.store(0, Ordering::Release);
        ok!(cuda.cuLaunchHostFunc_ptsz(null_mut(), Some(wait_for_gate), 1 as *mut c_void));
        fails!(CUDA_ERROR_NOT_READY, cuda.cuStreamQuery_ptsz(null_mut()));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                run(&cuda);
                ok!(cuda.cuStreamSynchronize_ptsz(null_mut()));
            });
        });
        GATE_OPEN.store(1, Ordering::Release);
        ok!(cuda.cuStreamSynchronize_ptsz(null_mut()));
    }

    pub fn stream_waits_for_event() {
        let (cuda, _) = start();
        let busy = function(&cuda, "busy_4000us");
        let (one, two) = (stream(&cuda, 1), stream(&cuda, 1));
        let (first, second) = (event(&cuda), event(&cuda));
        close_gate(&cuda, one);
        launch(&cuda, busy, one);
        ok!(cuda.cuEventRecord(first, one));
        ok!(cuda.cuStreamWaitEvent(two, first, 0));
        ok!(cuda.cuEventRecord(second, two));
        open_gate();
        assert!((0.0..0.1).contains(&elapsed(&cuda, first, second)));
        // An event of another GPU.
        let mut other = null_mut();
        ok!(cuda.cuCtxCreate_v2(&mut other, 0, 1));
        let far = function(&cuda, "busy_3000us");
        let (there, mark) = (stream(&cuda, 1), event(&cuda));
        launch(&cuda, far, there);
        ok!(cuda.cuEventRecord(mark, there));
        ok!(cuda.cuCtxPopCurrent_v2(&mut other));
        ok!(cuda.cuStreamWaitEvent(two, mark, 0));
        let after = event(&cuda);
        ok!(cuda.cuEventRecord(after, two));
        ok!(cuda.cuEventSynchronize(after));
        ok!(cuda.cuEventQuery(mark));
        // An event that was never recorded does not block.
        ok!(cuda.cuStreamWaitEvent(two, event(&cuda), 0));
        ok!(cuda.cuStreamSynchronize(two));
    }

    pub fn event_is_recorded_and_waited_for_concurrently() {
        let (cuda, context) = start();
        let (context, own, mark) = (context as usize, stream(&cuda, 0) as usize, event(&cuda) as usize);
        std::thread::scope(|scope| {
            for records in [true, false] {
                let cuda = &cuda;
                scope.spawn(move || {
                    ok!(cuda.cuCtxSetCurrent(context as CUcontext));
                    for _ in 0..20_000 {
                        if records {
                            ok!(cuda.cuEventRecord(mark as CUevent, own as CUstream));
                        } else {
                            ok!(cuda.cuStreamWaitEvent(own as CUstream, mark as CUevent, 0));
                        }
                    }
                });
            }
        });
        ok!(cuda.cuStreamSynchronize(own as CUstream));
    }

    pub fn stream_waits_for_the_recording_at_call_time() {
        let (cuda, _) = start();
        let (one, two, three) = (stream(&cuda, 1), stream(&cuda, 1), stream(&cuda, 1));
        let mark = event(&cuda);
        close_gate(&cuda, one);
        ok!(cuda.cuLaunchHostFunc(one, Some(record_call), 1 as *mut c_void));
        ok!(cuda.cuEventRecord(mark, one));
        ok!(cuda.cuStreamWaitEvent(two, mark, 0));
        ok!(cuda.cuLaunchHostFunc(two, Some(record_call), 2 as *mut c_void));
        // The event is recorded again; a stream that already waits still waits for the first recording.
        for _ in 0..3 {
            ok!(cuda.cuEventRecord(mark, three));
            ok!(cuda.cuStreamSynchronize(three));
        }
        ok!(cuda.cuEventQuery(mark));
        fails!(CUDA_ERROR_NOT_READY, cuda.cuStreamQuery(two));
        open_gate();
        ok!(cuda.cuStreamSynchronize(two));
        assert_eq!(*CALL_ORDER.lock().unwrap(), [1, 2]);
    }

    static RESULTS: Mutex<Vec<CUresult>> = Mutex::new(Vec::new());

    extern "C" fn synchronize_in_callback(stream: *mut c_void) {
        let cuda = CudaLibrary(crate::driver::LoadedLibrary::open("libcuda.so.1").unwrap());
        // SAFETY: a stream of the test.
        RESULTS.lock().unwrap().push(unsafe { cuda.cuStreamSynchronize(stream.cast()) });
    }

    pub fn host_function_must_not_synchronize() {
        let (cuda, _) = start();
        let own = stream(&cuda, 1);
        ok!(cuda.cuLaunchHostFunc(own, Some(synchronize_in_callback), own.cast()));
        ok!(cuda.cuStreamSynchronize(own));
        assert_eq!(*RESULTS.lock().unwrap(), [CUDA_ERROR_NOT_PERMITTED]);
    }

    pub fn stream_waits_for_memory_value() {
        let (cuda, _) = start();
        let (mut host, mut device): (*mut c_void, CUdeviceptr) = (null_mut(), 0);
        ok!(cuda.cuMemHostAlloc(&mut host, 4096, 0));
        ok!(cuda.cuMemHostGetDevicePointer_v2(&mut device, host, 0));
        let own = stream(&cuda, 1);
        // SAFETY: aligned memory of the test that the driver accesses only atomically.
        let word = unsafe { &*host.cast::<AtomicU32>() };
        ok!(cuda.cuStreamWaitValue32_v2(own, device, 7, CU_STREAM_WAIT_VALUE_EQ));
        ok!(cuda.cuStreamWriteValue32_v2(own, device, 9, 0));
        fails!(CUDA_ERROR_NOT_READY, cuda.cuStreamQuery(own));
        word.store(7, Ordering::Release);
        ok!(cuda.cuStreamSynchronize(own));
        assert_eq!(word.load(Ordering::Acquire), 9);
    }

    pub fn destroyed_stream_finishes_its_work() {
        let (cuda, _) = start();
        let busy = function(&cuda, "busy_1000us");
        for _ in 0..50 {
            let own = stream(&cuda, 1);
            launch(&cuda, busy, own);
            ok!(cuda.cuLaunchHostFunc(own, Some(record_call), 1 as *mut c_void));
            ok!(cuda.cuStreamDestroy_v2(own));
            fails!(CUDA_ERROR_INVALID_HANDLE, cuda.cuStreamSynchronize(own));
        }
        ok!(cuda.cuCtxSynchronize());
        assert_eq!(CALL_ORDER.lock().unwrap().len(), 50);
    }
}
