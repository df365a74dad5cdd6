//! Order and time: streams, events, callbacks, queues.

use super::*;
use crate::node::{Node, say, wait_to_be_told};
use partage_driver_api::exports::DriverVersion;
use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

fn node() -> Node {
    Node::new("A100-SXM4-40GB", 2, DriverVersion::R550)
}

macro_rules! trials {
    ($($name:ident => $role:literal),* $(,)?) => {
        $(#[test]
        fn $name() {
            node().play(concat!("stream ", $role));
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

trials! {
    kernels_take_their_time => "time-alone",
    streams_keep_their_order => "order",
    callbacks_hold_their_stream_and_no_other => "callbacks",
    small_grids_run_beside_each_other => "beside",
    the_queue_is_bounded => "queue",
    threads_have_default_streams_of_their_own => "threads",
    streams_wait_for_events => "waits",
    streams_wait_for_words_in_memory => "words",
    a_stream_may_be_destroyed_with_work_in_it => "destroy",
    an_event_may_be_recorded_and_waited_for_at_once => "threads-and-events",
    a_stream_waits_for_the_recording_it_was_told => "recorded-again",
    functions_of_the_program_may_not_wait_for_the_driver => "inside",
}

/// The interval between two events contains the turns of others, as on hardware.
#[test]
fn events_stamp_the_wall_clock() {
    let node = node();
    let mut other = node.start("stream saturate");
    other.hear("saturating");
    let took: f64 = node.start("stream time 20").hear("took").parse().unwrap();
    // Twenty milliseconds of work take forty while another process has as much to do; the first turn may be theirs.
    assert!((37.9..=44.1).contains(&took), "{took} ms");
    let mut third = node.start("stream saturate");
    third.hear("saturating");
    let took: f64 = node.start("stream time 20").hear("took").parse().unwrap();
    assert!((55.9..=66.1).contains(&took), "{took} ms");
    other.kill();
    third.kill();
    let took: f64 = node.start("stream time 20").hear("took").parse().unwrap();
    // What the dead had submitted is not done any more; that they are dead is noticed within some milliseconds.
    assert!((19.9..=36.0).contains(&took), "{took} ms");
}

mod roles {
    use super::*;

    /// Far more work than the test lasts; nearly as much as the queue takes.
    pub fn saturate() {
        let (cuda, _) = start();
        let busy = function(&cuda, "busy_50000us");
        for _ in 0..1000 {
            launch(&cuda, busy, null_mut());
        }
        say("saturating");
        wait_to_be_told();
    }

    /// Everything that is submitted to the stream from here on begins at once when the gate opens, however slowly this
    /// thread submits it: what lies between two events is then the GPU's doing alone.
    fn behind_a_gate(cuda: &Cuda, stream: CUstream) {
        OPEN.store(0, Ordering::Release);
        ok!(cuda.cuLaunchHostFunc(stream, Some(wait_for_the_gate), null_mut()));
        // The driver is at this while it comes to the rest.
        launch(cuda, function(cuda, "busy_100000us"), stream);
    }

    fn open_the_gate() {
        OPEN.store(1, Ordering::Release);
    }

    pub fn time(milliseconds: u32) {
        let (cuda, _) = start();
        let busy = function(&cuda, "busy_1000us");
        let (from, to) = (event(&cuda), event(&cuda));
        behind_a_gate(&cuda, null_mut());
        ok!(cuda.cuEventRecord(from, null_mut()));
        for _ in 0..milliseconds {
            launch(&cuda, busy, null_mut());
        }
        ok!(cuda.cuEventRecord(to, null_mut()));
        open_the_gate();
        say(&format!("took {}", elapsed(&cuda, from, to)));
    }

    pub fn kernels_take_their_time() {
        let (cuda, _) = start();
        for (name, count, asked) in [("busy_200us", 50, 10.0), ("busy_7us", 400, 2.8), ("other", 100, 1.0)] {
            let busy = function(&cuda, name);
            let (from, to) = (event(&cuda), event(&cuda));
            behind_a_gate(&cuda, null_mut());
            ok!(cuda.cuEventRecord(from, null_mut()));
            for _ in 0..count {
                launch(&cuda, busy, null_mut());
            }
            ok!(cuda.cuEventRecord(to, null_mut()));
            open_the_gate();
            let took = elapsed(&cuda, from, to);
            assert!((took - asked).abs() <= asked / 100.0, "{count} x {name}: {took} ms, not {asked}");
        }
        let nothing = function(&cuda, "busy_0us");
        launch(&cuda, nothing, null_mut());
        ok!(cuda.cuStreamQuery(null_mut()));
    }

    pub fn streams_keep_their_order() {
        let (cuda, _) = start();
        let busy = function(&cuda, "busy_2000us");
        let streams = [null_mut(), stream(&cuda, 0), stream(&cuda, 1)];
        for own in streams {
            let events: Vec<CUevent> = (0..5).map(|_| event(&cuda)).collect();
            behind_a_gate(&cuda, own);
            for &mark in &events {
                launch(&cuda, busy, own);
                ok!(cuda.cuEventRecord(mark, own));
            }
            fails!(CUDA_ERROR_NOT_READY, cuda.cuStreamQuery(own));
            fails!(CUDA_ERROR_NOT_READY, cuda.cuEventQuery(events[4]));
            let mut between = 0.0;
            fails!(CUDA_ERROR_NOT_READY, cuda.cuEventElapsedTime(&mut between, events[0], events[4]));
            open_the_gate();
            for pair in events.windows(2) {
                let took = elapsed(&cuda, pair[0], pair[1]);
                assert!((1.99..2.02).contains(&took), "{took}");
            }
            ok!(cuda.cuStreamSynchronize(own));
            ok!(cuda.cuStreamQuery(own));
        }
    }

    static ORDER: Mutex<Vec<u32>> = Mutex::new(Vec::new());
    static OPEN: AtomicU32 = AtomicU32::new(0);

    extern "C" fn note(number: *mut c_void) {
        ORDER.lock().unwrap().push(number as usize as u32);
    }

    extern "C" fn wait_for_the_gate(number: *mut c_void) {
        while OPEN.load(Ordering::Acquire) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        if !number.is_null() {
            note(number);
        }
    }

    extern "C" fn note_old(_: CUstream, code: CUresult, number: *mut c_void) {
        assert_eq!(code, CUDA_SUCCESS);
        note(number);
    }

    pub fn callbacks_hold_their_stream_and_no_other() {
        let (cuda, _) = start();
        let busy = function(&cuda, "busy_300us");
        let (held, free) = (stream(&cuda, 1), stream(&cuda, 1));
        let after = event(&cuda);
        launch(&cuda, busy, held);
        ok!(cuda.cuLaunchHostFunc(held, Some(wait_for_the_gate), 1 as *mut c_void));
        launch(&cuda, busy, held);
        ok!(cuda.cuStreamAddCallback(held, Some(note_old), 2 as *mut c_void, 0));
        ok!(cuda.cuEventRecord(after, held));
        // The other stream goes on.
        launch(&cuda, busy, free);
        ok!(cuda.cuStreamSynchronize(free));
        fails!(CUDA_ERROR_NOT_READY, cuda.cuEventQuery(after));
        fails!(CUDA_ERROR_NOT_READY, cuda.cuStreamQuery(held));
        assert!(ORDER.lock().unwrap().is_empty());
        OPEN.store(1, Ordering::Release);
        ok!(cuda.cuEventSynchronize(after));
        assert_eq!(*ORDER.lock().unwrap(), [1, 2]);
        ok!(cuda.cuCtxSynchronize());
        // The legacy stream comes after every blocking one, callbacks included.
        OPEN.store(0, Ordering::Release);
        let blocking = stream(&cuda, 0);
        ok!(cuda.cuLaunchHostFunc(blocking, Some(wait_for_the_gate), 3 as *mut c_void));
        ok!(cuda.cuLaunchHostFunc(null_mut(), Some(note), 4 as *mut c_void));
        ok!(cuda.cuLaunchHostFunc(blocking, Some(note), 5 as *mut c_void));
        fails!(CUDA_ERROR_NOT_READY, cuda.cuStreamQuery(null_mut()));
        OPEN.store(1, Ordering::Release);
        ok!(cuda.cuCtxSynchronize());
        assert_eq!(*ORDER.lock().unwrap(), [1, 2, 3, 4, 5]);
        fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuLaunchHostFunc(held, None, null_mut()));
    }

    pub fn small_grids_run_beside_each_other() {
        let (cuda, _) = start();
        let busy = function(&cuda, "busy_5000us");
        let (from, to) = (event(&cuda), event(&cuda));
        let streams: Vec<CUstream> = (0..4).map(|_| stream(&cuda, 1)).collect();
        behind_a_gate(&cuda, streams[0]);
        ok!(cuda.cuEventRecord(from, streams[0]));
        for &own in &streams {
            ok!(cuda.cuStreamWaitEvent(own, from, 0));
            // 32 blocks of 108 x 8.
            ok!(cuda.cuLaunchKernel(busy, 32, 1, 1, 256, 1, 1, 0, own, null_mut(), null_mut()));
        }
        let joined: Vec<CUevent> = streams.iter().map(|_| event(&cuda)).collect();
        for (&own, &end) in streams.iter().zip(&joined) {
            ok!(cuda.cuEventRecord(end, own));
            ok!(cuda.cuStreamWaitEvent(streams[0], end, 0));
        }
        ok!(cuda.cuEventRecord(to, streams[0]));
        open_the_gate();
        let took = elapsed(&cuda, from, to);
        assert!((4.99..5.1).contains(&took), "four at once took {took} ms");
    }

    pub fn the_queue_is_bounded() {
        let (cuda, _) = start();
        let busy = function(&cuda, "busy_100us");
        let start = Instant::now();
        for _ in 0..1024 + 300 {
            launch(&cuda, busy, null_mut());
        }
        // The last one could not be submitted before three hundred were done.
        assert!(start.elapsed() >= Duration::from_micros(299 * 100), "{:?}", start.elapsed());
        ok!(cuda.cuCtxSynchronize());
        assert!(start.elapsed() >= Duration::from_micros(1324 * 100), "{:?}", start.elapsed());
        // So is the queue behind a function of the program's.
        behind_a_gate(&cuda, null_mut());
        let submitted = AtomicU32::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while submitted.load(Ordering::Acquire) < 1000 {
                    std::thread::yield_now();
                }
                std::thread::sleep(Duration::from_millis(50));
                assert!(submitted.load(Ordering::Acquire) <= 1024, "the queue has no end");
                open_the_gate();
            });
            let nothing = function(&cuda, "busy_0us");
            for _ in 0..2000 {
                launch(&cuda, nothing, null_mut());
                submitted.fetch_add(1, Ordering::Release);
            }
        });
        ok!(cuda.cuCtxSynchronize());
    }

    pub fn threads_have_default_streams_of_their_own() {
        let (cuda, context) = start();
        let context = context as usize;
        let busy = function(&cuda, "busy_0us") as usize;
        let run = |cuda: &Cuda| {
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
        // The special handles mean the same.
        let (mut by_handle, mut by_legacy_handle) = (0, 0);
        ok!(cuda.cuStreamGetId(2 as CUstream, &mut by_handle));
        ok!(cuda.cuStreamGetId_ptsz(1 as CUstream, &mut by_legacy_handle));
        assert_eq!((by_handle, by_legacy_handle), (own, legacy));
        // One thread's stream is held; another thread's is not.
        OPEN.store(0, Ordering::Release);
        ok!(cuda.cuLaunchHostFunc_ptsz(null_mut(), Some(wait_for_the_gate), 1 as *mut c_void));
        fails!(CUDA_ERROR_NOT_READY, cuda.cuStreamQuery_ptsz(null_mut()));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                run(&cuda);
                ok!(cuda.cuStreamSynchronize_ptsz(null_mut()));
            });
        });
        OPEN.store(1, Ordering::Release);
        ok!(cuda.cuStreamSynchronize_ptsz(null_mut()));
    }

    pub fn streams_wait_for_events() {
        let (cuda, _) = start();
        let busy = function(&cuda, "busy_4000us");
        let (one, two) = (stream(&cuda, 1), stream(&cuda, 1));
        let (first, second) = (event(&cuda), event(&cuda));
        behind_a_gate(&cuda, one);
        launch(&cuda, busy, one);
        ok!(cuda.cuEventRecord(first, one));
        ok!(cuda.cuStreamWaitEvent(two, first, 0));
        ok!(cuda.cuEventRecord(second, two));
        open_the_gate();
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
        // One that was never recorded holds nobody.
        ok!(cuda.cuStreamWaitEvent(two, event(&cuda), 0));
        ok!(cuda.cuStreamSynchronize(two));
    }

    pub fn an_event_may_be_recorded_and_waited_for_at_once() {
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

    pub fn a_stream_waits_for_the_recording_it_was_told() {
        let (cuda, _) = start();
        let (one, two, three) = (stream(&cuda, 1), stream(&cuda, 1), stream(&cuda, 1));
        let mark = event(&cuda);
        behind_a_gate(&cuda, one);
        ok!(cuda.cuLaunchHostFunc(one, Some(note), 1 as *mut c_void));
        ok!(cuda.cuEventRecord(mark, one));
        ok!(cuda.cuStreamWaitEvent(two, mark, 0));
        ok!(cuda.cuLaunchHostFunc(two, Some(note), 2 as *mut c_void));
        // From here on the event means something else; not for the one that waits already.
        for _ in 0..3 {
            ok!(cuda.cuEventRecord(mark, three));
            ok!(cuda.cuStreamSynchronize(three));
        }
        ok!(cuda.cuEventQuery(mark));
        fails!(CUDA_ERROR_NOT_READY, cuda.cuStreamQuery(two));
        open_the_gate();
        ok!(cuda.cuStreamSynchronize(two));
        assert_eq!(*ORDER.lock().unwrap(), [1, 2]);
    }

    static ANSWERS: Mutex<Vec<CUresult>> = Mutex::new(Vec::new());

    extern "C" fn wait_for_the_driver(stream: *mut c_void) {
        let cuda = Cuda(crate::driver::Library::open("libcuda.so.1").unwrap());
        // SAFETY: a stream of the program's.
        ANSWERS.lock().unwrap().push(unsafe { cuda.cuStreamSynchronize(stream.cast()) });
    }

    pub fn functions_of_the_program_may_not_wait_for_the_driver() {
        let (cuda, _) = start();
        let own = stream(&cuda, 1);
        ok!(cuda.cuLaunchHostFunc(own, Some(wait_for_the_driver), own.cast()));
        ok!(cuda.cuStreamSynchronize(own));
        assert_eq!(*ANSWERS.lock().unwrap(), [CUDA_ERROR_NOT_PERMITTED]);
    }

    pub fn streams_wait_for_words_in_memory() {
        let (cuda, _) = start();
        let (mut host, mut device): (*mut c_void, CUdeviceptr) = (null_mut(), 0);
        ok!(cuda.cuMemHostAlloc(&mut host, 4096, 0));
        ok!(cuda.cuMemHostGetDevicePointer_v2(&mut device, host, 0));
        let own = stream(&cuda, 1);
        // SAFETY: aligned memory of ours that the driver only touches atomically.
        let word = unsafe { &*host.cast::<AtomicU32>() };
        ok!(cuda.cuStreamWaitValue32_v2(own, device, 7, CU_STREAM_WAIT_VALUE_EQ));
        ok!(cuda.cuStreamWriteValue32_v2(own, device, 9, 0));
        fails!(CUDA_ERROR_NOT_READY, cuda.cuStreamQuery(own));
        word.store(7, Ordering::Release);
        ok!(cuda.cuStreamSynchronize(own));
        assert_eq!(word.load(Ordering::Acquire), 9);
    }

    pub fn a_stream_may_be_destroyed_with_work_in_it() {
        let (cuda, _) = start();
        let busy = function(&cuda, "busy_1000us");
        for _ in 0..50 {
            let own = stream(&cuda, 1);
            launch(&cuda, busy, own);
            ok!(cuda.cuLaunchHostFunc(own, Some(note), 1 as *mut c_void));
            ok!(cuda.cuStreamDestroy_v2(own));
            fails!(CUDA_ERROR_INVALID_HANDLE, cuda.cuStreamSynchronize(own));
        }
        ok!(cuda.cuCtxSynchronize());
        assert_eq!(ORDER.lock().unwrap().len(), 50);
    }
}
