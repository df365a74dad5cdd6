//! Many processes against one limit.

use super::*;
use node::{say, wait_to_be_told};
use partage_region::UNIT;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const SIZE: usize = MIB as usize;

/// Contexts of eight processes, and what they fight for.
const LIMIT: u64 = 8 * CONTEXT + 1024 * MIB;

#[test]
fn many_processes_never_have_a_byte_too_much() {
    let node = node();
    let container = Container::with_memory(&node, LIMIT);
    let (state, over) = (node.state(), AtomicBool::new(false));
    let highest = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut highest = 0;
            while !over.load(Ordering::Relaxed) {
                highest = highest.max(state.used_memory(0) * UNIT);
            }
            highest
        });
        let end = Ending(&over);
        let mut players: Vec<_> =
            (0..8).map(|seed| container.start(&format!("processes random {seed}"))).collect();
        // Each has its context before any takes the rest.
        players.iter_mut().for_each(|player| drop(player.hear("random")));
        players.iter_mut().for_each(|player| player.tell());
        // They take and give back all the while; the benchmark does it for thirty seconds.
        std::thread::sleep(Duration::from_secs(4));
        // What the dead had, the simulated driver counts until somebody asks for more than there is.
        drop(end);
        let highest = watcher.join().unwrap();
        for player in &mut players[..4] {
            player.kill();
        }
        // What they had is free for the others at once, who go on taking for as long as this.
        std::thread::sleep(Duration::from_secs(1));
        for player in &mut players[4..] {
            player.tell();
            player.hear("empty");
        }
        let mut after = container.start("processes whole");
        after.hear("whole");
        after.end();
        for player in players.drain(4..) {
            player.end();
        }
        highest
    });
    assert!(highest <= LIMIT, "{highest} of {LIMIT}");
    // They did fight for it.
    assert!(highest > LIMIT - 64 * MIB, "{highest} of {LIMIT}");
    assert_eq!((container.used(0), container::truth(&node.state(), 0)), (0, 0));
}

/// The watcher ends, also when the test fails.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What fits is had: a lone process gets it at every try, however many others come and go beside it.
#[test]
fn what_fits_is_not_refused() {
    let node = node();
    let container = Container::with_memory(&node, LIMIT);
    let mut sure = container.start("processes sure");
    sure.hear("sure");
    let mut others: Vec<_> =
        (0..3).map(|seed| container.start(&format!("processes modest {seed}"))).collect();
    others.iter_mut().for_each(|player| drop(player.hear("modest")));
    for round in 0..10 {
        // At work for a while, then killed at whatever it does.
        std::thread::sleep(Duration::from_millis(200));
        others[round % 3].kill();
        others[round % 3] = container.start(&format!("processes modest {round}"));
        others[round % 3].hear("modest");
    }
    sure.tell();
    sure.hear("never refused");
    sure.end();
}

/// What another thread takes for a moment only is no reason to refuse.
#[test]
fn what_fits_is_not_refused_for_a_small_one_beside_it() {
    let node = node();
    let container = Container::with_memory(&node, CONTEXT + 66 * MIB);
    container.play("processes beside small");
    assert_eq!(container.reader().snapshot().unwrap().gpus[0].refusals, 0);
}

#[test]
fn what_fits_is_not_refused_for_a_small_one_of_another_process() {
    let node = node();
    let container = Container::with_memory(&node, 2 * CONTEXT + 66 * MIB);
    let mut other = container.start("processes small");
    other.hear("small");
    container.play("processes exactly");
    assert_eq!(container.reader().snapshot().unwrap().gpus[0].refusals, 0);
    other.kill();
}

/// A pool takes a step before it knows that it needs none. Who meets it in between waits.
#[test]
fn what_fits_is_rarely_refused_beside_a_pool() {
    let node = node();
    Container::with_memory(&node, CONTEXT + 96 * MIB).play("processes beside pool");
}

/// Threads that allocate and free side by side leave an exact account.
#[test]
fn many_threads_are_counted_exactly() {
    play("processes threads", 300 * MIB);
}

pub fn client(arguments: &[&str]) {
    match arguments {
        ["random", seed] => random(seed.parse().unwrap()),
        ["whole"] => whole(),
        ["sure"] => sure(),
        ["threads"] => threads(),
        ["beside", what] => beside(what),
        ["small"] => small_ones(&start().0, &AtomicBool::new(false)),
        ["exactly"] => assert_eq!(exactly(&start().0), Refused::default()),
        ["modest", seed] => modest(seed.parse().unwrap()),
        other => panic!("{other:?}"),
    }
}

/// Whether the test wants something, without waiting for it.
fn is_told() -> bool {
    let mut poll = libc::pollfd { fd: 0, events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry of ours.
    unsafe { libc::poll(&mut poll, 1, 0) > 0 }
}

fn next(random: &mut u64) -> u64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    *random >> 16
}

/// One of several ways to have memory.
#[derive(Clone, Copy)]
enum Had {
    Plain(CUdeviceptr),
    Handle(u64),
    Array(CUarray),
}

fn allocate(cuda: &Cuda, kind: u64, bytes: usize) -> Result<Had, CUresult> {
    let (mut pointer, mut handle, mut array) = (0, 0, null_mut());
    // SAFETY: variables of ours.
    unsafe {
        match kind % 4 {
            0 => {
                let properties = CUmemAllocationProp {
                    type_: CU_MEM_ALLOCATION_TYPE_PINNED,
                    location: CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id: 0 },
                    ..CUmemAllocationProp::default()
                };
                done(cuda.cuMemCreate(&mut handle, bytes.next_multiple_of(2 * SIZE), &properties, 0))?;
                Ok(Had::Handle(handle))
            }
            1 if bytes > 2 * SIZE => {
                let wanted = CUDA_ARRAY_DESCRIPTOR {
                    Width: 1024,
                    Height: bytes.div_ceil(4096),
                    Format: CU_AD_FORMAT_FLOAT,
                    NumChannels: 1,
                };
                done(cuda.cuArrayCreate_v2(&mut array, &wanted))?;
                Ok(Had::Array(array))
            }
            _ => {
                done(cuda.cuMemAlloc_v2(&mut pointer, bytes))?;
                Ok(Had::Plain(pointer))
            }
        }
    }
}

fn done(code: CUresult) -> Result<(), CUresult> {
    if code == CUDA_SUCCESS { Ok(()) } else { Err(code) }
}

fn free(cuda: &Cuda, had: Had) {
    match had {
        Had::Plain(pointer) => ok!(cuda.cuMemFree_v2(pointer)),
        Had::Handle(handle) => ok!(cuda.cuMemRelease(handle)),
        Had::Array(array) => ok!(cuda.cuArrayDestroy(array)),
    }
}

/// Takes all it can get and gives some back, until told to stop.
fn random(seed: u64) {
    let (cuda, context, _) = start();
    say("random");
    wait_to_be_told();
    let (mut random, mut held) = (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, Vec::new());
    while !is_told() {
        let size = match next(&mut random) % 4 {
            0 => next(&mut random) as usize % (300 << 10) + 1,
            1 => next(&mut random) as usize % (3 * SIZE) + 1,
            _ => next(&mut random) as usize % (60 * SIZE) + 1,
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
    wait_to_be_told();
    say("empty");
    wait_to_be_told();
}

/// Everything is there soon.
fn whole() {
    let (cuda, _, observer) = start();
    let rest = LIMIT - CONTEXT;
    let until = Instant::now() + Duration::from_secs(30);
    let mut pointer = 0;
    while says!(cuda.cuMemAlloc_v2(&mut pointer, rest as usize)) != CUDA_SUCCESS {
        assert!(Instant::now() < until, "{} are still used", observer.used(0));
    }
    observer.exact("whole");
    say("whole");
    wait_to_be_told();
}

/// Has always the same, which fits.
fn sure() {
    let (cuda, _, _) = start();
    say("sure");
    let mut random = 77;
    while !is_told() {
        let (mut large, mut small) = (0, 0);
        ok!(cuda.cuMemAlloc_v2(&mut large, 500 * SIZE));
        ok!(cuda.cuMemAlloc_v2(&mut small, next(&mut random) as usize % SIZE + 1));
        ok!(cuda.cuMemFree_v2(large));
        ok!(cuda.cuMemFree_v2(small));
    }
    wait_to_be_told();
    say("never refused");
    wait_to_be_told();
}

/// Has a third of what the other leaves, and no more.
fn modest(seed: u64) {
    let (cuda, _, _) = start();
    say("modest");
    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    loop {
        let mut pointer = 0;
        ok!(cuda.cuMemAlloc_v2(&mut pointer, next(&mut random) as usize % (150 * SIZE) + 1));
        ok!(cuda.cuMemFree_v2(pointer));
    }
}

/// Allocates and frees in a block that stays, again and again.
fn small_ones(cuda: &Cuda, over: &AtomicBool) {
    let (mut kept, mut pointer) = (0, 0);
    ok!(cuda.cuMemAlloc_v2(&mut kept, 4096));
    say("small");
    while !over.load(Ordering::Relaxed) {
        ok!(cuda.cuMemAlloc_v2(&mut pointer, 4096));
        ok!(cuda.cuMemFree_v2(pointer));
    }
}

/// The same in a pool, which has one step and needs no more.
fn pooled_ones(cuda: &Cuda, over: &AtomicBool) {
    let (mut kept, mut pointer) = (0, 0);
    ok!(cuda.cuMemAllocAsync(&mut kept, 4096, null_mut()));
    say("pooled");
    while !over.load(Ordering::Relaxed) {
        ok!(cuda.cuMemAllocAsync(&mut pointer, 4096, null_mut()));
        ok!(cuda.cuMemFreeAsync(pointer, null_mut()));
    }
}

/// How often of many times it did not get what is exactly there, and how often of those it was not even waited for.
#[derive(Debug, Default, PartialEq, Eq)]
struct Refused {
    times: usize,
    hasty: usize,
}

fn exactly(cuda: &Cuda) -> Refused {
    let mut refused = Refused::default();
    for _ in 0..TRIES {
        let (mut pointer, began) = (0, Instant::now());
        match says!(cuda.cuMemAlloc_v2(&mut pointer, 64 * SIZE)) {
            CUDA_SUCCESS => ok!(cuda.cuMemFree_v2(pointer)),
            code => {
                refused.times += 1;
                refused.hasty += usize::from(began.elapsed() < PATIENCE);
                assert_eq!(code, CUDA_ERROR_OUT_OF_MEMORY);
            }
        }
    }
    refused
}

const TRIES: usize = 10_000;
/// The least that is waited for what comes back in a moment: the sleeps of the shim's `patience`.
const PATIENCE: Duration = Duration::from_micros(8 * 20);

fn beside(what: &str) {
    let (cuda, context, observer) = start();
    let (over, shared, pool) = (AtomicBool::new(false), context.addr(), what == "pool");
    let refused = std::thread::scope(|scope| {
        let end = Ending(&over);
        scope.spawn(|| {
            ok!(cuda.cuCtxSetCurrent(std::ptr::with_exposed_provenance_mut(shared)));
            if pool { pooled_ones(&cuda, &over) } else { small_ones(&cuda, &over) }
        });
        while observer.used(0) == CONTEXT {
            std::thread::yield_now();
        }
        let refused = exactly(&cuda);
        drop(end);
        refused
    });
    // Who waits does not wait for a thread that does not run for long, and asks in vain as often as it asks meanwhile.
    assert_eq!(refused.hasty, 0, "{refused:?}");
    assert!(refused.times <= if pool { TRIES / 4 } else { 0 }, "{refused:?}");
}

fn threads() {
    let (cuda, context, observer) = start();
    let state = AtomicBool::new(false);
    let shared = context.addr();
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            while !state.load(Ordering::Relaxed) {
                assert!(observer.truth(0) <= CONTEXT + 300 * MIB);
            }
        });
        let end = Ending(&state);
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
    observer.exact("after all threads");
    assert_eq!(observer.used(0), CONTEXT);
}

/// Everything that a thread can have, again and again.
fn work(cuda: &Cuda, context: CUcontext, seed: u64) {
    ok!(cuda.cuCtxSetCurrent(context));
    let (mut random, mut held) = (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, Vec::new());
    for _ in 0..3000 {
        let size = match next(&mut random) % 3 {
            0 => next(&mut random) as usize % (30 * SIZE) + 1,
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
