//! Many processes against one limit.

use super::*;
use node::{print_line, wait_for_resume};
use partage_region::MEMORY_UNIT;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const MIB_SIZE: usize = MIB as usize;

/// Contexts of eight processes, and the memory that they compete for.
const MEMORY_LIMIT: u64 = 8 * CONTEXT_BYTES + 1024 * MIB;

#[test]
fn processes_never_exceed_the_limit() {
    let node = node();
    let container = TestContainer::with_memory(&node, MEMORY_LIMIT);
    let (state, over) = (node.state(), AtomicBool::new(false));
    let highest = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut highest = 0;
            while !over.load(Ordering::Relaxed) {
                highest = highest.max(state.used_memory(0) * MEMORY_UNIT);
            }
            highest
        });
        let end = StopOnDrop(&over);
        let mut processes: Vec<_> =
            (0..8).map(|seed| container.start(&format!("processes random {seed}"))).collect();
        // Each has its context before any takes the rest.
        processes.iter_mut().for_each(|process| drop(process.wait_for_line("random")));
        processes.iter_mut().for_each(|process| process.resume());
        // They allocate and free all the time; the benchmark does it for thirty seconds.
        std::thread::sleep(Duration::from_secs(4));
        // The simulated driver counts memory of dead processes until a request exceeds what is free.
        drop(end);
        let highest = watcher.join().unwrap();
        for process in &mut processes[..4] {
            process.kill();
        }
        // Their memory is available at once to the others, which continue to allocate for this long.
        std::thread::sleep(Duration::from_secs(1));
        for process in &mut processes[4..] {
            process.resume();
            process.wait_for_line("empty");
        }
        let mut after = container.start("processes whole");
        after.wait_for_line("whole");
        after.end();
        for process in processes.drain(4..) {
            process.end();
        }
        highest
    });
    assert!(highest <= MEMORY_LIMIT, "{highest} of {MEMORY_LIMIT}");
    // They did compete for it.
    assert!(highest > MEMORY_LIMIT - 64 * MIB, "{highest} of {MEMORY_LIMIT}");
    assert_eq!((container.used(0), container::true_usage(&node.state(), 0)), (0, 0));
}

/// Ends the watcher, also if the test fails.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A request that fits is granted at every attempt, however many other processes come and go.
#[test]
fn fitting_request_is_granted_beside_killed_processes() {
    let node = node();
    let container = TestContainer::with_memory(&node, MEMORY_LIMIT);
    let mut sure = container.start("processes sure");
    sure.wait_for_line("sure");
    let mut others: Vec<_> =
        (0..3).map(|seed| container.start(&format!("processes modest {seed}"))).collect();
    others.iter_mut().for_each(|process| drop(process.wait_for_line("modest")));
    for round in 0..10 {
        // At work for a while, then killed at an arbitrary point.
        std::thread::sleep(Duration::from_millis(200));
        others[round % 3].kill();
        others[round % 3] = container.start(&format!("processes modest {round}"));
        others[round % 3].wait_for_line("modest");
    }
    sure.resume();
    sure.wait_for_line("never refused");
    sure.end();
}

/// A short-lived reservation of another thread is no reason to refuse.
#[test]
fn fitting_request_is_granted_beside_small_allocations() {
    let node = node();
    let container = TestContainer::with_memory(&node, CONTEXT_BYTES + 66 * MIB);
    container.run_role("processes beside small");
    assert_eq!(container.reader().snapshot().unwrap().gpus[0].refusals, 0);
}

#[test]
fn fitting_request_is_granted_beside_another_process() {
    let node = node();
    let container = TestContainer::with_memory(&node, 2 * CONTEXT_BYTES + 66 * MIB);
    let mut other = container.start("processes small");
    other.wait_for_line("small");
    container.run_role("processes exactly");
    assert_eq!(container.reader().snapshot().unwrap().gpus[0].refusals, 0);
    other.kill();
}

/// A pool reserves its growth before it knows that it needs none. A request in between waits.
#[test]
fn fitting_request_is_rarely_refused_beside_a_pool() {
    let node = node();
    TestContainer::with_memory(&node, CONTEXT_BYTES + 96 * MIB).run_role("processes beside pool");
}

/// Threads that allocate and free concurrently leave an exact account.
#[test]
fn concurrent_threads_are_counted_exactly() {
    run_role("processes threads", 300 * MIB);
}

pub fn client(arguments: &[&str]) {
    match arguments {
        ["random", seed] => random(seed.parse().unwrap()),
        ["whole"] => whole(),
        ["sure"] => sure(),
        ["threads"] => threads(),
        ["beside", what] => beside(what),
        ["small"] => small_ones(&start().0, &AtomicBool::new(false)),
        ["exactly"] => assert_eq!(exactly(&start().0), RefusalCount::default()),
        ["modest", seed] => modest(seed.parse().unwrap()),
        other => panic!("{other:?}"),
    }
}

/// Returns whether the test has sent a line, without waiting for it.
fn is_told() -> bool {
    let mut poll = libc::pollfd { fd: 0, events: libc::POLLIN, revents: 0 };
    // SAFETY: the pointer is to one local entry.
    unsafe { libc::poll(&mut poll, 1, 0) > 0 }
}

fn next(random: &mut u64) -> u64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    *random >> 16
}

/// An allocation by one of several functions.
#[derive(Clone, Copy)]
enum Allocation {
    Plain(CUdeviceptr),
    Handle(u64),
    Array(CUarray),
}

fn allocate(cuda: &CudaLibrary, kind: u64, bytes: usize) -> Result<Allocation, CUresult> {
    let (mut pointer, mut handle, mut array) = (0, 0, null_mut());
    // SAFETY: the pointers are to local variables.
    unsafe {
        match kind % 4 {
            0 => {
                let properties = CUmemAllocationProp {
                    type_: CU_MEM_ALLOCATION_TYPE_PINNED,
                    location: CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id: 0 },
                    ..CUmemAllocationProp::default()
                };
                to_result(cuda.cuMemCreate(
                    &mut handle,
                    bytes.next_multiple_of(2 * MIB_SIZE),
                    &properties,
                    0,
                ))?;
                Ok(Allocation::Handle(handle))
            }
            1 if bytes > 2 * MIB_SIZE => {
                let wanted = CUDA_ARRAY_DESCRIPTOR {
                    Width: 1024,
                    Height: bytes.div_ceil(4096),
                    Format: CU_AD_FORMAT_FLOAT,
                    NumChannels: 1,
                };
                to_result(cuda.cuArrayCreate_v2(&mut array, &wanted))?;
                Ok(Allocation::Array(array))
            }
            _ => {
                to_result(cuda.cuMemAlloc_v2(&mut pointer, bytes))?;
                Ok(Allocation::Plain(pointer))
            }
        }
    }
}

fn to_result(code: CUresult) -> Result<(), CUresult> {
    if code == CUDA_SUCCESS { Ok(()) } else { Err(code) }
}

fn free(cuda: &CudaLibrary, had: Allocation) {
    match had {
        Allocation::Plain(pointer) => ok!(cuda.cuMemFree_v2(pointer)),
        Allocation::Handle(handle) => ok!(cuda.cuMemRelease(handle)),
        Allocation::Array(array) => ok!(cuda.cuArrayDestroy(array)),
    }
}

/// Allocates all it can get and frees some, until stopped.
fn random(seed: u64) {
    let (cuda, context, _) = start();
    print_line("random");
    wait_for_resume();
    let (mut random, mut held) = (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, Vec::new());
    while !is_told() {
        let size = match next(&mut random) % 4 {
            0 => next(&mut random) as usize % (300 << 10) + 1,
            1 => next(&mut random) as usize % (3 * MIB_SIZE) + 1,
            _ => next(&mut random) as usize % (60 * MIB_SIZE) + 1,
        };
        match allocate(&cuda, next(&mut random), size) {
            Ok(had) => held.push(had),
            Err(CUDA_ERROR_OUT_OF_MEMORY) => {
                for _ in 0..=next(&mut random) as usize % (held.len() + 1) {
                    if !held.is_empty() {
                        free(&cuda, held.swap_remove(next(&mut random) as usize % held.len()));
                    }
                }
            }
            Err(other) => panic!("{:?}", name(other)),
        }
    }
    held.into_iter().for_each(|had| free(&cuda, had));
    ok!(cuda.cuCtxDestroy_v2(context));
    wait_for_resume();
    print_line("empty");
    wait_for_resume();
}

/// Waits until everything is free.
fn whole() {
    let (cuda, _, observer) = start();
    let rest = MEMORY_LIMIT - CONTEXT_BYTES;
    let until = Instant::now() + Duration::from_secs(30);
    let mut pointer = 0;
    while result_of!(cuda.cuMemAlloc_v2(&mut pointer, rest as usize)) != CUDA_SUCCESS {
        assert!(Instant::now() < until, "{} are still used", observer.used(0));
    }
    observer.assert_exact("whole");
    print_line("whole");
    wait_for_resume();
}

/// Allocates the same amount repeatedly, which always fits.
fn sure() {
    let (cuda, _, _) = start();
    print_line("sure");
    let mut random = 77;
    while !is_told() {
        let (mut large, mut small) = (0, 0);
        ok!(cuda.cuMemAlloc_v2(&mut large, 500 * MIB_SIZE));
        ok!(cuda.cuMemAlloc_v2(&mut small, next(&mut random) as usize % MIB_SIZE + 1));
        ok!(cuda.cuMemFree_v2(large));
        ok!(cuda.cuMemFree_v2(small));
    }
    wait_for_resume();
    print_line("never refused");
    wait_for_resume();
}

/// Holds at most a third of what the other process leaves.
fn modest(seed: u64) {
    let (cuda, _, _) = start();
    print_line("modest");
    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    loop {
        let mut pointer = 0;
        ok!(cuda.cuMemAlloc_v2(&mut pointer, next(&mut random) as usize % (150 * MIB_SIZE) + 1));
        ok!(cuda.cuMemFree_v2(pointer));
    }
}

/// Allocates and frees repeatedly in a block that stays.
fn small_ones(cuda: &CudaLibrary, over: &AtomicBool) {
    let (mut kept, mut pointer) = (0, 0);
    ok!(cuda.cuMemAlloc_v2(&mut kept, 4096));
    print_line("small");
    while !over.load(Ordering::Relaxed) {
        ok!(cuda.cuMemAlloc_v2(&mut pointer, 4096));
        ok!(cuda.cuMemFree_v2(pointer));
    }
}

/// Allocates and frees repeatedly in a pool, which has one chunk and needs no more.
fn pooled_ones(cuda: &CudaLibrary, over: &AtomicBool) {
    let (mut kept, mut pointer) = (0, 0);
    ok!(cuda.cuMemAllocAsync(&mut kept, 4096, null_mut()));
    print_line("pooled");
    while !over.load(Ordering::Relaxed) {
        ok!(cuda.cuMemAllocAsync(&mut pointer, 4096, null_mut()));
        ok!(cuda.cuMemFreeAsync(pointer, null_mut()));
    }
}

/// Counts how often a request for exactly what is free was refused, and how often without any wait.
#[derive(Debug, Default, PartialEq, Eq)]
struct RefusalCount {
    times: usize,
    without_wait: usize,
}

fn exactly(cuda: &CudaLibrary) -> RefusalCount {
    let mut refused = RefusalCount::default();
    for _ in 0..ATTEMPTS {
        let (mut pointer, began) = (0, Instant::now());
        match result_of!(cuda.cuMemAlloc_v2(&mut pointer, 64 * MIB_SIZE)) {
            CUDA_SUCCESS => ok!(cuda.cuMemFree_v2(pointer)),
            code => {
                refused.times += 1;
                refused.without_wait += usize::from(began.elapsed() < MIN_RETRY_TIME);
                assert_eq!(code, CUDA_ERROR_OUT_OF_MEMORY);
            }
        }
    }
    refused
}

const ATTEMPTS: usize = 10_000;
/// Shortest wait for memory that is about to be released: the sleeps of the shim's `retry`.
const MIN_RETRY_TIME: Duration = Duration::from_micros(8 * 20);

fn beside(what: &str) {
    let (cuda, context, observer) = start();
    let (over, shared, pool) = (AtomicBool::new(false), context.addr(), what == "pool");
    let refused = std::thread::scope(|scope| {
        let end = StopOnDrop(&over);
        scope.spawn(|| {
            ok!(cuda.cuCtxSetCurrent(std::ptr::with_exposed_provenance_mut(shared)));
            if pool { pooled_ones(&cuda, &over) } else { small_ones(&cuda, &over) }
        });
        while observer.used(0) == CONTEXT_BYTES {
            std::thread::yield_now();
        }
        let refused = exactly(&cuda);
        drop(end);
        refused
    });
    // The retry does not wait for a thread that gets no CPU for long, and is refused as often as it requests meanwhile.
    assert_eq!(refused.without_wait, 0, "{refused:?}");
    assert!(refused.times <= if pool { ATTEMPTS / 4 } else { 0 }, "{refused:?}");
}

fn threads() {
    let (cuda, context, observer) = start();
    let state = AtomicBool::new(false);
    let shared = context.addr();
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            while !state.load(Ordering::Relaxed) {
                assert!(observer.true_usage(0) <= CONTEXT_BYTES + 300 * MIB);
            }
        });
        let end = StopOnDrop(&state);
        let workers: Vec<_> = (1..=4u64)
            .map(|seed| {
                let cuda = &cuda;
                scope.spawn(move || work(cuda, std::ptr::with_exposed_provenance_mut(shared), seed))
            })
            .collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        drop(end);
        watcher.join().unwrap();
    });
    ok!(cuda.cuCtxSynchronize());
    observer.assert_exact("after all threads");
    assert_eq!(observer.used(0), CONTEXT_BYTES);
}

/// Allocates and frees in every way that a thread can, repeatedly.
fn work(cuda: &CudaLibrary, context: CUcontext, seed: u64) {
    ok!(cuda.cuCtxSetCurrent(context));
    let (mut random, mut held) = (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, Vec::new());
    for _ in 0..3000 {
        let size = match next(&mut random) % 3 {
            0 => next(&mut random) as usize % (30 * MIB_SIZE) + 1,
            _ => next(&mut random) as usize % (200 << 10) + 1,
        };
        match allocate(cuda, next(&mut random), size) {
            Ok(had) => held.push(had),
            Err(code) => assert_eq!(code, CUDA_ERROR_OUT_OF_MEMORY),
        }
        while held.len() > 20 || !held.is_empty() && next(&mut random).is_multiple_of(3) {
            free(cuda, held.swap_remove(next(&mut random) as usize % held.len()));
        }
    }
    held.into_iter().for_each(|had| free(cuda, had));
}
