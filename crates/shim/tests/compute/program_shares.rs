//! Shares of programs whose work is shaped like that of common frameworks.

use super::*;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Checks the share of a program that is alone in a container with a hard share.
#[track_caller]
fn assert_hard_share(percent: u32, role: &str) {
    let node = exclusive_node();
    let container = container_with_share(&node, percent, percent);
    let _arbiter = start_arbiter(&[&container]);
    let process = start_working(&container, role);
    std::thread::sleep(Duration::from_millis(200));
    let bounds = (f64::from(percent) - 6.0, f64::from(percent) + 5.0, role);
    assert_shares(&node, &[&process], 1000, &[bounds]);
}

#[test]
fn several_streams_and_threads_share_one_share() {
    for role in ["streams 2 500", "streams 4 500", "streams 8 500", "streams 80 200", "threads 8 500"] {
        assert_hard_share(30, role);
    }
}

#[test]
fn many_kernels_and_shapes_get_their_share() {
    assert_hard_share(10, "mixed 100 50 20");
    assert_hard_share(30, "mixed 100 50 20");
    assert_hard_share(30, "mixed 500 1 50");
}

#[test]
fn captures_of_other_threads_change_nothing() {
    assert_hard_share(30, "capture-beside 500");
    assert_hard_share(30, "open-capture-beside 50");
}

#[test]
fn long_kernels_beside_an_open_capture_are_charged() {
    let node = exclusive_node();
    let container = container_with_share(&node, 30, 30);
    let _arbiter = start_arbiter(&[&container]);
    let process = start_working(&container, "open-capture-beside 200000");
    assert_shares(&node, &[&process], 3000, &[(12.0, 40.0, "kernels of 200 ms beside a capture")]);
}

#[test]
fn four_processes_share_one_share() {
    let node = exclusive_node();
    let container = container_with_share(&node, 30, 30);
    let _arbiter = start_arbiter(&[&container]);
    let processes = [(); 4].map(|()| start_working(&container, "work kernel 500"));
    std::thread::sleep(Duration::from_millis(200));
    let mut seen: Vec<f64> = Vec::new();
    let mean = |seen: &[f64]| seen.iter().sum::<f64>() / seen.len().max(1) as f64;
    while !(seen.last().is_some_and(|got| *got >= 15.0) && mean(&seen) <= 35.0) {
        assert!(seen.len() < 10, "all together: {seen:.1?}");
        seen.push(measure_shares(&node, &processes.iter().collect::<Vec<_>>(), 1000).iter().sum());
    }
}

#[test]
fn recreated_graphs_are_charged() {
    assert_hard_share(30, "recreated-graphs 20,500");
}

#[test]
fn long_kernel_after_short_ones_is_charged() {
    assert_hard_share(30, "bursts 10 20000");
    assert_hard_share(30, "bursts-and-frees 10 20000");
}

#[test]
fn overlapping_streams_are_charged_once() {
    assert_hard_share(30, "overlap");
}

#[test]
fn short_lived_processes_are_charged() {
    let node = exclusive_node();
    let (short_lived, neighbor) = (container_with_share(&node, 30, 30), container_with_share(&node, 70, 70));
    let _arbiter = start_arbiter(&[&short_lived, &neighbor]);
    let steady = start_working(&neighbor, "work kernel 500");
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Relaxed) {
                short_lived.run_role("once-copy 200000");
            }
        });
        std::thread::sleep(Duration::from_millis(500));
        let result = std::panic::catch_unwind(|| {
            assert_shares(&node, &[&steady], 3000, &[(55.0, 101.0, "beside short-lived processes")]);
        });
        ended.store(true, Relaxed);
        assert!(result.is_ok());
    });
}

#[test]
fn host_functions_do_not_slow_a_program_down() {
    let node = exclusive_node();
    let container = container_with_share(&node, 30, 30);
    let _arbiter = start_arbiter(&[&container]);
    let loops = |mut process: RoleProcess| process.wait_for_line("loops").parse::<f64>().unwrap();
    let mut seen = Vec::new();
    // On a busy machine either of the two may get less CPU time: one pair of several is enough.
    let holds = (0..6).any(|_| {
        let bare = loops(RoleProcess::spawn(node.command("callback-loops 1000")));
        let held = loops(container.start("callback-loops 1000"));
        seen.push((held, bare));
        held >= 0.8 * bare
    });
    assert!(holds, "loops held and bare: {seen:?}");
}

#[test]
fn kernels_behind_a_flag_are_queued_at_once() {
    let node = exclusive_node();
    let container = container_with_share(&node, 30, 30);
    let _arbiter = start_arbiter(&[&container]);
    let mut process = container.start("behind-flag 20");
    let queued = [(); 5].map(|()| process.wait_for_line("queued").parse::<u64>().unwrap());
    // It was three seconds for each.
    assert!(queued.iter().sum::<u64>() < 3000, "{queued:?} ms");
}

#[test]
fn several_streams_alone_have_the_gpu() {
    let node = exclusive_node();
    for (cores, ceiling) in [(100, 100), (30, 100)] {
        let container = container_with_share(&node, cores, ceiling);
        let _arbiter = start_arbiter(&[&container]);
        let process = start_working(&container, "streams 8 500");
        std::thread::sleep(Duration::from_millis(200));
        assert!(!container.owner.limits(0).unwrap().is_gated());
        // Half of the least is enough: more than 90 %.
        assert_shares(&node, &[&process], 1000, &[(180.0, 101.0, "eight streams alone")]);
    }
}

#[test]
fn short_kernels_of_two_containers_get_their_shares() {
    let node = exclusive_node();
    let containers = [container_with_share(&node, 30, 30), container_with_share(&node, 70, 70)];
    let _arbiter = start_arbiter(&[&containers[0], &containers[1]]);
    let processes = containers.each_ref().map(|container| start_working(container, "work kernel 200"));
    std::thread::sleep(Duration::from_millis(300));
    let bounds = [(24.0, 35.0, "30 %"), (56.0, 75.0, "70 %")];
    assert_shares(&node, &processes.iter().collect::<Vec<_>>(), 1500, &bounds);
}

#[test]
fn share_holds_without_stream_memory_operations() {
    let node = exclusive_node_with(1, |config| config.settings.stream_memory_operations = false);
    let container = container_with_share(&node, 30, 30);
    let _arbiter = start_arbiter(&[&container]);
    for role in ["work kernel 500", "streams 4 500"] {
        let process = start_working(&container, role);
        std::thread::sleep(Duration::from_millis(200));
        assert_shares(&node, &[&process], 1000, &[(20.0, 36.0, role)]);
    }
}

#[test]
fn destroyed_streams_and_contexts_and_forks_disturb_nothing() {
    let node = exclusive_node();
    let container = container_with_share(&node, 60, 60);
    let _arbiter = start_arbiter(&[&container]);
    container.run_role("destroy");
    let before = container.charged(0);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(container.charged(0), before, "charged after its end");
}

#[test]
fn collectives_over_two_gpus_proceed_beside_another_job() {
    let node = exclusive_node_with(2, |_| ());
    let share = |cores: u32| -> Vec<GpuShare> {
        let all = shares(&node, u64::MAX);
        let with_cores = |share: GpuShare| GpuShare {
            cores: cores * 1_000,
            ceiling: 100_000,
            waits_for_turns: true,
            ..share
        };
        all.into_iter().map(with_cores).collect()
    };
    let containers = [(); 2].map(|()| TestContainer::new(&node, &share(50), RegionPolicy::default()));
    let run = |mut jobs: [RoleProcess; 2]| {
        jobs.iter_mut().for_each(|job| drop(job.wait_for_line("ready")));
        jobs.iter_mut().for_each(RoleProcess::resume);
        jobs.map(|mut job| job.wait_for_line("steps").parse::<f64>().unwrap())
    };
    let _arbiter = start_arbiter(&[&containers[0], &containers[1]]);
    let mut seen = Vec::new();
    // On a busy machine either of the two may get less CPU time: one pair of several is enough.
    let holds = (0..4).any(|round| {
        let bare =
            run([1, 2].map(|job| RoleProcess::spawn(node.command(&format!("steps bare{round}{job} 1500")))));
        let held = run([1, 2].map(|job| containers[job - 1].start(&format!("steps held{round}{job} 1500"))));
        seen.push((held, bare));
        held[0] + held[1] >= (bare[0] + bare[1]) / 2.0
    });
    assert!(holds, "steps held and bare: {seen:?}");
}
