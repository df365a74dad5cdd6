//! Tests of kernels that spin until their peers have begun, as those of collective operations do.

use super::*;
use crate::node::{TestNode, print_line, wait_for_resume};
use partage_driver_api::exports::DriverVersion;
use partage_sim_node::state::GpuFault;
use std::time::{Duration, Instant};

fn node() -> TestNode {
    TestNode::new("A100-SXM4-40GB", 2, DriverVersion::R550)
}

#[test]
fn ranks_of_one_process_meet_in_every_round() {
    node().run_role("peers one-process");
}

#[test]
fn spinning_kernel_fills_the_gpu_as_its_grid_does() {
    node().run_role("peers grids");
}

#[test]
fn queued_kernels_of_a_higher_priority_begin_first() {
    node().run_role("peers priorities");
}

#[test]
fn captured_peer_kernels_meet() {
    node().run_role("peers graph");
}

#[test]
fn ranks_of_two_processes_meet_on_one_gpu() {
    let node = node();
    let (mut one, mut two) = (node.start("peers rounds 0 50"), node.start("peers rounds 0 50"));
    one.wait_for_line("done");
    two.wait_for_line("done");
    one.end();
    two.end();
}

#[test]
fn process_without_peer_can_be_killed_or_exit() {
    let node = node();
    let mut killed = node.start("peers rounds 0 1");
    killed.wait_for_line("started");
    std::thread::sleep(Duration::from_millis(20));
    killed.kill();
    // Its kernel had begun, and this one meets it. A process that exits with a spinning kernel ends as well.
    node.run_role("peers rounds 1 1");
    node.run_role("peers exit");
    // The GPU is free again.
    node.run_role("peers time");
}

#[test]
fn spinning_process_has_its_time_slices_only() {
    let node = node();
    let mut spinning = node.start("peers rounds 0 1");
    spinning.wait_for_line("started");
    let mut busy = node.start("stream saturate");
    busy.wait_for_line("saturating");
    let state = node.state();
    std::thread::sleep(Duration::from_millis(300));
    let served = || state.usage(0).processes.iter().map(|(_, served)| *served).collect::<Vec<u64>>();
    let before = served();
    std::thread::sleep(Duration::from_millis(500));
    let gained: Vec<u64> = served().into_iter().zip(before).map(|(after, before)| after - before).collect();
    let share = gained[0] as f64 / (gained[0] + gained[1]) as f64;
    // A spinning kernel takes as much as any other, unless its thread is late on a busy machine.
    assert!((0.2..=0.52).contains(&share), "{gained:?}");
    busy.kill();
    node.state().inject(0, GpuFault::Lost);
    spinning.wait_for_line("lost");
    spinning.end();
}

pub fn client(arguments: &[&str]) {
    match arguments {
        ["one-process"] => one_process(),
        ["grids"] => grids(),
        ["graph"] => graph(),
        ["priorities"] => priorities(),
        ["rounds", gpu, rounds] => run_rounds(gpu.parse().unwrap(), rounds.parse().unwrap()),
        ["exit"] => {
            let (cuda, _) = start();
            launch(&cuda, function(&cuda, "busy_until_peer_nobody_of_2_10us"), null_mut());
            std::thread::sleep(Duration::from_millis(5));
        }
        ["time"] => {
            let (cuda, _) = start();
            let (first, last) = (event(&cuda), event(&cuda));
            ok!(cuda.cuEventRecord(first, null_mut()));
            launch(&cuda, function(&cuda, "busy_1000us"), null_mut());
            ok!(cuda.cuEventRecord(last, null_mut()));
            assert!(elapsed(&cuda, first, last) < 10.0);
        }
        other => panic!("{other:?}"),
    }
}

fn contexts(cuda: &CudaLibrary) -> [CUcontext; 2] {
    [0, 1].map(|gpu| {
        let mut context = null_mut();
        ok!(cuda.cuCtxCreate_v2(&mut context, 0, gpu));
        context
    })
}

fn is_done(cuda: &CudaLibrary, stream: CUstream) -> bool {
    // SAFETY: a stream of the test.
    match unsafe { cuda.cuStreamQuery(stream) } {
        CUDA_SUCCESS => true,
        CUDA_ERROR_NOT_READY => false,
        other => panic!("{other}"),
    }
}

fn one_process() {
    let cuda = CudaLibrary::started();
    let contexts = contexts(&cuda);
    let ranks = contexts.map(|context| {
        ok!(cuda.cuCtxSetCurrent(context));
        (context, function(&cuda, "busy_until_peer_pair_of_2_100us"))
    });
    // A rank alone spins.
    ok!(cuda.cuCtxSetCurrent(ranks[0].0));
    launch(&cuda, ranks[0].1, null_mut());
    let after = event(&cuda);
    ok!(cuda.cuEventRecord(after, null_mut()));
    std::thread::sleep(Duration::from_millis(20));
    assert!(!is_done(&cuda, null_mut()));
    fails!(CUDA_ERROR_NOT_READY, cuda.cuEventQuery(after));
    ok!(cuda.cuCtxSetCurrent(ranks[1].0));
    launch(&cuda, ranks[1].1, null_mut());
    for (context, _) in ranks {
        ok!(cuda.cuCtxSetCurrent(context));
        ok!(cuda.cuCtxSynchronize());
    }
    ok!(cuda.cuEventQuery(after));
    // Many rounds, queued ahead.
    let start = Instant::now();
    for _ in 0..100 {
        for (context, kernel) in ranks {
            ok!(cuda.cuCtxSetCurrent(context));
            launch(&cuda, kernel, null_mut());
        }
    }
    for (context, _) in ranks {
        ok!(cuda.cuCtxSetCurrent(context));
        ok!(cuda.cuCtxSynchronize());
    }
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(10), "{took:?}");
    print_line(&format!("100 rounds of 100 us took {took:?}"));
    // A context with a spinning kernel can be destroyed; the other context can as well.
    launch(&cuda, ranks[1].1, null_mut());
    launch(&cuda, ranks[1].1, null_mut());
    std::thread::sleep(Duration::from_millis(2));
    ok!(cuda.cuCtxDestroy_v2(ranks[1].0));
    ok!(cuda.cuCtxDestroy_v2(ranks[0].0));
}

fn grids() {
    let (cuda, _) = start();
    let (first, second) = (stream(&cuda, 1), stream(&cuda, 1));
    let busy = function(&cuda, "busy_1000us");
    let spin = function(&cuda, "busy_until_peer_grids_of_2_10us");
    let small = |function, stream| {
        ok!(cuda.cuLaunchKernel(function, 8, 1, 1, 256, 1, 1, 0, stream, null_mut(), null_mut()));
    };
    // Small grids: the other stream goes on, whatever the size of its kernels.
    small(spin, first);
    std::thread::sleep(Duration::from_millis(2));
    small(busy, second);
    launch(&cuda, busy, second);
    ok!(cuda.cuStreamSynchronize(second));
    assert!(!is_done(&cuda, first));
    // Both ranks fit the GPU at once.
    small(spin, second);
    ok!(cuda.cuCtxSynchronize());
    // A grid that fills the GPU keeps the kernels of other streams waiting, and nothing else.
    launch(&cuda, spin, first);
    std::thread::sleep(Duration::from_millis(2));
    let mut byte = 0;
    ok!(cuda.cuMemAlloc_v2(&mut byte, 1));
    ok!(cuda.cuMemsetD8Async(byte, 1, 1, second));
    ok!(cuda.cuStreamSynchronize(second));
    small(busy, second);
    std::thread::sleep(Duration::from_millis(20));
    assert!(!is_done(&cuda, second) && !is_done(&cuda, first));
    // The peer is a kernel of another GPU.
    let mut context = null_mut();
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, 1));
    launch(&cuda, function(&cuda, "busy_until_peer_grids_of_2_10us"), null_mut());
    ok!(cuda.cuCtxSynchronize());
    ok!(cuda.cuStreamSynchronize(first));
    ok!(cuda.cuStreamSynchronize(second));
}

fn priorities() {
    let (cuda, context) = start();
    let streams = [0, -1, -5].map(|priority| {
        let (mut own, mut seen) = (null_mut(), 1);
        ok!(cuda.cuStreamCreateWithPriority(&mut own, 1, priority));
        ok!(cuda.cuStreamGetPriority(own, &mut seen));
        assert_eq!(seen, priority);
        own
    });
    let busy = function(&cuda, "busy_3000us");
    // All kernels wait for the one that fills the GPU.
    launch(&cuda, function(&cuda, "busy_until_peer_priorities_of_2_10us"), stream(&cuda, 1));
    std::thread::sleep(Duration::from_millis(2));
    let begun = event(&cuda);
    ok!(cuda.cuEventRecord(begun, stream(&cuda, 1)));
    let ends = streams.map(|own| {
        let end = event(&cuda);
        launch(&cuda, busy, own);
        ok!(cuda.cuEventRecord(end, own));
        end
    });
    let mut other = null_mut();
    ok!(cuda.cuCtxCreate_v2(&mut other, 0, 1));
    launch(&cuda, function(&cuda, "busy_until_peer_priorities_of_2_10us"), null_mut());
    ok!(cuda.cuCtxSetCurrent(context));
    let [last, second, first] = ends.map(|end| elapsed(&cuda, begun, end));
    assert!(first < second && second < last, "{first} {second} {last}");
}

fn graph() {
    let cuda = CudaLibrary::started();
    let contexts = contexts(&cuda);
    let launches = contexts.map(|context| {
        ok!(cuda.cuCtxSetCurrent(context));
        let own = stream(&cuda, 1);
        let (mut graph, mut exec) = (null_mut(), null_mut());
        ok!(cuda.cuStreamBeginCapture_v2(own, CU_STREAM_CAPTURE_MODE_GLOBAL));
        launch(&cuda, function(&cuda, "busy_100us"), own);
        launch(&cuda, function(&cuda, "busy_until_peer_graph_of_2_50us"), own);
        launch(&cuda, function(&cuda, "busy_100us"), own);
        ok!(cuda.cuStreamEndCapture(own, &mut graph));
        ok!(cuda.cuGraphInstantiateWithFlags(&mut exec, graph, 0));
        (context, own, exec)
    });
    for round in 0..10 {
        for (index, (context, own, exec)) in launches.into_iter().enumerate() {
            ok!(cuda.cuCtxSetCurrent(context));
            ok!(cuda.cuGraphLaunch(exec, own));
            if index == 0 && round == 0 {
                std::thread::sleep(Duration::from_millis(5));
                assert!(!is_done(&cuda, own));
            }
        }
    }
    for (context, own, _) in launches {
        ok!(cuda.cuCtxSetCurrent(context));
        ok!(cuda.cuStreamSynchronize(own));
    }
}

/// Runs rounds with another process. Ends when the GPU is lost.
fn run_rounds(gpu: i32, rounds: u32) {
    let cuda = CudaLibrary::started();
    let mut context = null_mut();
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, gpu));
    let spin = function(&cuda, "busy_until_peer_processes_of_2_50us");
    for _ in 0..rounds {
        launch(&cuda, spin, null_mut());
        print_line("started");
        // SAFETY: no pointer is passed.
        match unsafe { cuda.cuCtxSynchronize() } {
            CUDA_SUCCESS => {}
            CUDA_ERROR_UNKNOWN => return print_line("lost"),
            other => panic!("{other}"),
        }
    }
    print_line("done");
    if rounds > 1 {
        wait_for_resume();
    }
}
