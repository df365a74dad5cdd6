//! Tests of stream memory operations: words that the GPU writes in stream order, without a thread of the program.

use super::*;
use crate::node::{TestNode, print_line, wait_for_resume};
use partage_driver_api::exports::DriverVersion;
use partage_sim_node::state::GpuFault;
use std::ffi::c_void;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

fn node() -> TestNode {
    TestNode::new("A100-SXM4-40GB", 2, DriverVersion::R550)
}

macro_rules! role_tests {
    ($($name:ident),* $(,)?) => {
        $(#[test]
        fn $name() {
            node().run_role(concat!("words ", stringify!($name)));
        })*

        pub fn client(arguments: &[&str]) {
            match arguments {
                $([stringify!($name)] => roles::$name(),)*
                ["without-operations"] => roles::without_operations(),
                ["lost"] => roles::lost(),
                ["exit", path] => roles::exit(path),
                other => panic!("{other:?}"),
            }
        }
    };
}

role_tests! {
    word_is_written_while_program_is_outside_the_driver,
    many_pending_words_are_written_in_order,
    word_follows_the_work_before_it,
    work_after_the_word_sees_it,
    word_of_freed_memory_is_dropped,
    word_waits_for_turns_of_its_stream_only,
}

#[test]
fn disabled_operations_are_reported_and_refused() {
    let off = |config: &mut partage_sim_node::node::NodeConfig| {
        config.settings.stream_memory_operations = false;
    };
    let node = TestNode::with_config("A100-SXM4-40GB", 1, DriverVersion::R550, off);
    node.run_role("words without-operations");
}

#[test]
fn lost_gpu_writes_words_of_finished_work_only() {
    let node = node();
    let mut program = node.start("words lost");
    program.wait_for_line("written");
    node.state().inject(0, GpuFault::Lost);
    program.resume();
    program.end();
}

#[test]
fn words_of_finished_work_are_written_before_the_process_exits() {
    let node = node();
    let file = tempfile::NamedTempFile::new().unwrap();
    node.run_role(&format!("words exit {}", file.path().display()));
    let bytes = std::fs::read(file.path()).unwrap();
    assert_eq!(u64::from_ne_bytes(bytes[..8].try_into().unwrap()), 5);
}

mod roles {
    use super::*;

    const WORDS: usize = 512;

    /// A page of a file, mapped shared and registered with the driver, as words.
    fn register_file(cuda: &CudaLibrary, file: &std::fs::File) -> (&'static [AtomicU64; WORDS], CUdeviceptr) {
        file.set_len(4096).unwrap();
        // SAFETY: a new shared mapping of a file of this length.
        let page = unsafe {
            libc::mmap(
                null_mut(),
                4096,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(page, libc::MAP_FAILED);
        let mut device = 0;
        ok!(cuda.cuMemHostRegister_v2(page, 4096, 0));
        ok!(cuda.cuMemHostGetDevicePointer_v2(&mut device, page, 0));
        assert_eq!(device, page as u64);
        // SAFETY: mapped, page-aligned, and accessed only atomically.
        (unsafe { &*page.cast() }, device)
    }

    fn register(cuda: &CudaLibrary) -> (&'static [AtomicU64; WORDS], CUdeviceptr) {
        register_file(cuda, &tempfile::tempfile().unwrap())
    }

    fn write(cuda: &CudaLibrary, stream: CUstream, address: CUdeviceptr, value: u64) {
        ok!(cuda.cuStreamWriteValue64_v2(stream, address, value, 0));
    }

    /// Waits for a value without calling the driver and returns the time since `start`.
    fn wait(word: &AtomicU64, value: u64, start: Instant) -> Duration {
        while word.load(Ordering::Acquire) != value {
            assert!(start.elapsed() < Duration::from_secs(10), "word is {}", word.load(Ordering::Acquire));
            std::thread::sleep(Duration::from_micros(20));
        }
        start.elapsed()
    }

    pub fn word_is_written_while_program_is_outside_the_driver() {
        let (cuda, _) = start();
        let (words, device) = register(&cuda);
        let own = stream(&cuda, 1);
        let busy = function(&cuda, "busy_3000us");
        let mut late = Vec::new();
        for round in 1..=20 {
            let start = Instant::now();
            write(&cuda, own, device, round);
            // The GPU is idle: the word that precedes the kernel is there at once.
            wait(&words[0], round, start);
            launch(&cuda, busy, own);
            write(&cuda, own, device + 8, round);
            let took = wait(&words[1], round, start);
            assert!(took >= Duration::from_micros(3000), "{took:?}");
            late.push(took - Duration::from_micros(3000));
        }
        late.sort();
        print_line(&format!("late by {:?} (median), {:?} (worst)", late[10], late[19]));
        // A quiet machine needs less than a tenth of it.
        assert!(late[10] < Duration::from_millis(3), "{late:?}");
    }

    pub fn many_pending_words_are_written_in_order() {
        let (cuda, _) = start();
        let (words, device) = register(&cuda);
        let busy = function(&cuda, "busy_100us");
        let streams: Vec<CUstream> = (0..4).map(|_| stream(&cuda, 1)).collect();
        for value in 1..=100 {
            for (index, &own) in streams.iter().enumerate() {
                launch(&cuda, busy, own);
                write(&cuda, own, device + 8 * index as u64, value);
            }
        }
        let (mut last, start) = ([0; 4], Instant::now());
        while last != [100; 4] {
            assert!(start.elapsed() < Duration::from_secs(10), "{last:?}");
            let seen = [0, 1, 2, 3].map(|index: usize| words[index].load(Ordering::Acquire));
            assert!(seen.iter().zip(last).all(|(now, before)| *now >= before), "{last:?} {seen:?}");
            last = seen;
            std::thread::sleep(Duration::from_micros(200));
        }
        // More writes than launches fit the queue.
        for value in 0..10_000 {
            write(&cuda, streams[0], device, value);
        }
        ok!(cuda.cuStreamSynchronize(streams[0]));
        assert_eq!(words[0].load(Ordering::Acquire), 9999);
    }

    static GATE: AtomicBool = AtomicBool::new(false);

    extern "C" fn wait_for_gate(_: *mut c_void) {
        while !GATE.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    pub fn word_follows_the_work_before_it() {
        let (cuda, _) = start();
        let (words, device) = register(&cuda);
        let (own, other) = (stream(&cuda, 1), stream(&cuda, 1));
        let ready = event(&cuda);
        // A host function, then a word, an event and a word in another stream that waits for the event.
        ok!(cuda.cuLaunchHostFunc(own, Some(wait_for_gate), null_mut()));
        write(&cuda, own, device, 1);
        ok!(cuda.cuEventRecord(ready, own));
        ok!(cuda.cuStreamWaitEvent(other, ready, 0));
        write(&cuda, other, device + 8, 1);
        // A word of a third stream does not wait for them.
        let third = stream(&cuda, 1);
        write(&cuda, third, device + 16, 1);
        wait(&words[2], 1, Instant::now());
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!([0, 1].map(|index: usize| words[index].load(Ordering::Acquire)), [0, 0]);
        GATE.store(true, Ordering::Release);
        wait(&words[0], 1, Instant::now());
        wait(&words[1], 1, Instant::now());
        // A wait for a value, then a word: two streams play ping-pong, and the program does not take part.
        for round in 1..=20 {
            ok!(cuda.cuStreamWaitValue64_v2(own, device + 24, round, CU_STREAM_WAIT_VALUE_EQ));
            write(&cuda, own, device + 32, round);
            write(&cuda, other, device + 24, round);
            ok!(cuda.cuStreamWaitValue64_v2(other, device + 32, round, CU_STREAM_WAIT_VALUE_GEQ));
        }
        write(&cuda, other, device + 40, 1);
        wait(&words[5], 1, Instant::now());
        // A wait for a value that the same stream overwrites first does not see the old value.
        let busy = function(&cuda, "busy_2000us");
        words[6].store(7, Ordering::Release);
        launch(&cuda, busy, own);
        write(&cuda, own, device + 48, 8);
        ok!(cuda.cuStreamWaitValue64_v2(own, device + 48, 7, CU_STREAM_WAIT_VALUE_EQ));
        write(&cuda, own, device + 56, 1);
        std::thread::sleep(Duration::from_millis(10));
        assert_eq!([6, 7].map(|index: usize| words[index].load(Ordering::Acquire)), [8, 0]);
        words[6].store(7, Ordering::Release);
        ok!(cuda.cuStreamSynchronize(own));
        assert_eq!(words[7].load(Ordering::Acquire), 1);
    }

    pub fn work_after_the_word_sees_it() {
        let (cuda, _) = start();
        let (words, device) = register(&cuda);
        let own = stream(&cuda, 1);
        let busy = function(&cuda, "busy_50us");
        let done = event(&cuda);
        let mut copy = 0_u64;
        for round in 1..=200 {
            launch(&cuda, busy, own);
            write(&cuda, own, device, round);
            match round % 4 {
                0 => ok!(cuda.cuStreamSynchronize(own)),
                1 => {
                    ok!(cuda.cuEventRecord(done, own));
                    // SAFETY: an event of the test.
                    while unsafe { cuda.cuEventQuery(done) } != CUDA_SUCCESS {}
                }
                2 => {
                    // SAFETY: a stream of the test.
                    while unsafe { cuda.cuStreamQuery(own) } != CUDA_SUCCESS {}
                }
                _ => {
                    let to = (&raw mut copy).cast();
                    ok!(cuda.cuMemcpyDtoHAsync_v2(to, device, 8, own));
                    ok!(cuda.cuStreamSynchronize(own));
                    assert_eq!(copy, round);
                }
            }
            assert_eq!(words[0].load(Ordering::Acquire), round);
        }
        launch(&cuda, busy, own);
        write(&cuda, own, device, 1000);
        ok!(cuda.cuStreamDestroy_v2(own));
        ok!(cuda.cuCtxSynchronize());
        assert_eq!(words[0].load(Ordering::Acquire), 1000);
    }

    pub fn word_of_freed_memory_is_dropped() {
        let (cuda, context) = start();
        let busy = function(&cuda, "busy_1000us");
        for _ in 0..20 {
            let (words, device) = register(&cuda);
            launch(&cuda, busy, null_mut());
            write(&cuda, null_mut(), device, 1);
            let page = words.as_ptr().cast_mut().cast();
            // Unregistering waits for the GPU, like every function that frees memory.
            ok!(cuda.cuMemHostUnregister(page));
            assert_eq!(words[0].load(Ordering::Acquire), 1);
            // SAFETY: nothing refers to the mapping any more.
            unsafe { libc::munmap(page, 4096) };
        }
        // A word of another GPU: it is not waited for, and not written after the mapping is gone.
        let mut second = null_mut();
        ok!(cuda.cuCtxCreate_v2(&mut second, 0, 1));
        let (words, device) = register(&cuda);
        launch(&cuda, function(&cuda, "busy_5000us"), null_mut());
        write(&cuda, null_mut(), device, 1);
        ok!(cuda.cuCtxSetCurrent(context));
        let page = words.as_ptr().cast_mut().cast();
        ok!(cuda.cuMemHostUnregister(page));
        // SAFETY: nothing refers to the mapping any more.
        unsafe { libc::munmap(page, 4096) };
        std::thread::sleep(Duration::from_millis(10));
        fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuStreamWriteValue64_v2(null_mut(), device, 1, 0));
        ok!(cuda.cuCtxDestroy_v2(second));
        ok!(cuda.cuCtxDestroy_v2(context));
    }

    pub fn word_waits_for_turns_of_its_stream_only() {
        let (cuda, _) = start();
        let (words, device) = register(&cuda);
        let (own, other) = (stream(&cuda, 1), stream(&cuda, 1));
        launch(&cuda, function(&cuda, "busy_30000us"), other);
        write(&cuda, own, device, 1);
        assert!(wait(&words[0], 1, Instant::now()) < Duration::from_millis(25));
        fails!(CUDA_ERROR_NOT_READY, cuda.cuStreamQuery(other));
        ok!(cuda.cuCtxSynchronize());
    }

    fn attribute(cuda: &CudaLibrary, attribute: CUdevice_attribute) -> i32 {
        let mut value = -1;
        ok!(cuda.cuDeviceGetAttribute(&mut value, attribute, 0));
        value
    }

    pub fn without_operations() {
        let (cuda, _) = start();
        let (_, device) = register(&cuda);
        for off in [
            CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
            CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR,
            CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1,
        ] {
            assert_eq!(attribute(&cuda, off), 0);
        }
        assert_eq!(attribute(&cuda, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM), 1);
        fails!(CUDA_ERROR_NOT_SUPPORTED, cuda.cuStreamWriteValue64_v2(null_mut(), device, 1, 0));
        fails!(CUDA_ERROR_NOT_SUPPORTED, cuda.cuStreamWriteValue32_v2(null_mut(), device, 1, 0));
        fails!(CUDA_ERROR_NOT_SUPPORTED, cuda.cuStreamWaitValue32_v2(null_mut(), device, 1, 0));
        fails!(CUDA_ERROR_NOT_SUPPORTED, cuda.cuStreamBatchMemOp_v2(null_mut(), 0, null_mut(), 0));
    }

    pub fn lost() {
        let (cuda, context) = start();
        for (wanted, on) in [
            (1, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS),
            (1, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM),
            // Needs a parameter of the kernel module.
            (0, CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1),
        ] {
            assert_eq!(attribute(&cuda, on), wanted);
        }
        let (words, device) = register(&cuda);
        launch(&cuda, function(&cuda, "busy_1000us"), null_mut());
        write(&cuda, null_mut(), device, 1);
        launch(&cuda, function(&cuda, "busy_60000000us"), null_mut());
        write(&cuda, null_mut(), device + 8, 1);
        wait(&words[0], 1, Instant::now());
        print_line("written");
        assert!(wait_for_resume());
        std::thread::sleep(Duration::from_millis(100));
        fails!(CUDA_ERROR_UNKNOWN, cuda.cuCtxSynchronize());
        assert_eq!(words[1].load(Ordering::Acquire), 0);
        ok!(cuda.cuCtxDestroy_v2(context));
        assert_eq!(words[1].load(Ordering::Acquire), 0);
    }

    pub fn exit(path: &str) {
        let (cuda, _) = start();
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
        let (_, device) = register_file(&cuda, &file);
        for value in 1..=5 {
            write(&cuda, null_mut(), device, value);
        }
        launch(&cuda, function(&cuda, "busy_60000000us"), null_mut());
        write(&cuda, null_mut(), device, 6);
    }
}
