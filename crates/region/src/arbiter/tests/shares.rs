//! Tests of the documented shares, in virtual time.

use super::model::{LaunchPattern, Reporting, SimulatedTenant, Simulation};
use super::{
    ContenderView, GateState, MICRO, MILLI, PERCENT, SchedulerDecision, TurnScheduler, WHOLE_GPU, tuning,
};

const SECOND: u64 = 1_000 * MILLI;
const SHORT_KERNELS: &[u64] = &[40 * MICRO];
const MIXED_KERNELS: &[u64] = &[20 * MICRO, 100 * MICRO, 500 * MICRO, 2 * MILLI, 5 * MILLI, 20 * MILLI];
const MOSTLY_SHORT_KERNELS: &[u64] = &[20 * MICRO, 30 * MICRO, 50 * MICRO, 50 * MICRO, 200 * MICRO, MILLI];
const LONG_KERNELS: &[u64] = &[20 * MILLI];

fn percent(had: u64, of: u64) -> f64 {
    had as f64 * 100.0 / of as f64
}

/// Returns the percentage of its GPU that each rank has over `span`, after `warm`.
fn percents(simulation: &mut Simulation, warm: u64, span: u64) -> Vec<f64> {
    simulation.run(warm);
    let decisions = simulation.decisions;
    let had = simulation.run(span);
    let all: Vec<f64> = had.iter().map(|it| percent(*it, span)).collect();
    let idle: Vec<u64> = simulation.gpus.iter().map(|gpu| gpu.longest_idle / MICRO).collect();
    let waits: Vec<u64> = simulation.ranks.iter().flatten().map(|it| it.longest_wait / MICRO).collect();
    let decisions = (simulation.decisions - decisions) * SECOND / span;
    println!("{all:.2?}, idle at most {idle:?} us, waits {waits:?} us, {decisions} decisions/s");
    assert!(simulation.overcharged < 10, "{} ns more were charged than passed", simulation.overcharged);
    all
}

/// Compares the first second and all ten seconds with each container's guarantee. Returns the total.
fn shares(name: &str, seed: u64, tenants: Vec<SimulatedTenant>) -> f64 {
    shares_within(1.0, name, seed, tenants)
}

fn shares_within(points: f64, name: &str, seed: u64, tenants: Vec<SimulatedTenant>) -> f64 {
    let guaranteed: Vec<f64> =
        tenants.iter().map(|it| f64::from(it.view.cores) / f64::from(PERCENT)).collect();
    println!("{name}, guaranteed {guaranteed:?}:");
    let mut simulation = Simulation::new(seed, tenants);
    let first = percents(&mut simulation, 0, SECOND);
    let rest = percents(&mut simulation, 0, 9 * SECOND);
    for (index, guaranteed) in guaranteed.iter().enumerate() {
        let all = (first[index] + 9.0 * rest[index]) / 10.0;
        assert!((first[index] - guaranteed).abs() < 6.0, "{name}: {first:.2?} in the first second");
        assert!((all - guaranteed).abs() < points, "{name}: {all:.2} of {guaranteed}");
    }
    percent(simulation.gpus[0].busy, 10 * SECOND)
}

#[test]
fn single_container_gets_its_share() {
    for kernels in [SHORT_KERNELS, MIXED_KERNELS, LONG_KERNELS] {
        for cores in [1, 10, 30, 50, 90] {
            shares("alone", 1, vec![SimulatedTenant::new(cores, cores, kernels)]);
        }
    }
}

#[test]
fn several_containers_get_their_shares_with_little_loss() {
    for guaranteed in [&[30, 70][..], &[10, 20, 70], &[25, 25, 25, 25]] {
        for kernels in [SHORT_KERNELS, MIXED_KERNELS, MOSTLY_SHORT_KERNELS, LONG_KERNELS] {
            let tenants =
                guaranteed.iter().map(|cores| SimulatedTenant::new(*cores, *cores, kernels)).collect();
            assert!(shares("together", 1, tenants) >= 97.0);
        }
    }
}

#[test]
fn ten_containers_with_mixed_kernels_get_their_shares() {
    for seed in 1..3 {
        assert!(shares("ten", seed, vec![SimulatedTenant::new(10, 10, MIXED_KERNELS); 10]) >= 97.0);
    }
}

#[test]
fn shares_below_the_whole_gpu_are_kept() {
    for guaranteed in [&[30, 30][..], &[5, 15, 45]] {
        for kernels in [MIXED_KERNELS, MOSTLY_SHORT_KERNELS] {
            let tenants =
                guaranteed.iter().map(|&cores| SimulatedTenant::new(cores, cores, kernels)).collect();
            // Occupancy is sampled; where the driver interleaves containers, they are charged 2 to 3 % too little.
            shares_within(1.5, "below", 1, tenants);
        }
    }
}

#[test]
fn shares_hold_for_long_kernels_beside_short_ones() {
    for (first, second) in [(LONG_KERNELS, SHORT_KERNELS), (SHORT_KERNELS, MIXED_KERNELS)] {
        for (a, b) in [(30, 70), (10, 90), (70, 30)] {
            let tenants = vec![SimulatedTenant::new(a, a, first), SimulatedTenant::new(b, b, second)];
            assert!(shares("beside", 5, tenants) >= 97.0);
        }
    }
}

/// While a kernel runs beyond its turn and the time for which it is waited for, the driver interleaves it with others.
/// It is charged for all of that time: it has less than its share then, and others have theirs.
#[test]
fn kernels_longer_than_any_turn_are_slowed_and_not_banned() {
    for (length, cores) in [(400 * MILLI, 20), (SECOND, 10), (SECOND, 30), (SECOND, 50)] {
        let long = SimulatedTenant::new(cores, cores, &[length]);
        let short = SimulatedTenant::new(100 - cores, 100 - cores, MOSTLY_SHORT_KERNELS);
        let mut simulation = Simulation::new(1, vec![long, short]);
        let all = percents(&mut simulation, 10 * SECOND, 60 * SECOND);
        let cores = f64::from(cores);
        assert!(all[0] > cores * 0.45 && all[0] < cores + 2.0, "{length} at {cores}: {all:?}");
        assert!(all[1] > 98.0 - cores, "{length} at {cores}: {all:?}");
    }
}

#[test]
fn kernel_that_never_ends_slows_others_by_the_bound_only() {
    let persistent = SimulatedTenant::new(30, 30, &[3600 * SECOND]);
    let mut simulation =
        Simulation::new(1, vec![persistent, SimulatedTenant::new(70, 70, MOSTLY_SHORT_KERNELS)]);
    let all = percents(&mut simulation, SECOND, 10 * SECOND);
    // The driver gives each half of the time, and the turns of the other one are open nearly always.
    assert!(all[1] > 47.0, "{all:?}");
    assert!(simulation.rank(1).longest_wait < tuning::MAX_OVERRUN_NS + 50 * MILLI);
    // Its debt is bounded: when its kernel has ended at last, it has its share again after a few seconds.
    assert!(simulation.scheduler.credit(0) >= -60_000_000_000, "{}", simulation.scheduler.credit(0));
}

#[test]
fn ceiling_is_reached_beside_an_idle_neighbor_and_not_exceeded() {
    for kernels in [SHORT_KERNELS, MIXED_KERNELS] {
        let idle = SimulatedTenant::new(80, 100, kernels).pattern(LaunchPattern::From(3600 * SECOND));
        let mut simulation = Simulation::new(1, vec![SimulatedTenant::new(20, 50, kernels), idle]);
        let all = percents(&mut simulation, 0, 10 * SECOND);
        assert!((all[0] - 50.0).abs() < 1.0, "{all:?}");
    }
}

#[test]
fn elastic_container_keeps_its_guarantee_beside_a_busy_neighbor() {
    for kernels in [MOSTLY_SHORT_KERNELS, MIXED_KERNELS] {
        let tenants = vec![SimulatedTenant::new(20, 50, kernels), SimulatedTenant::new(80, 100, kernels)];
        let all = percents(&mut Simulation::new(1, tenants), SECOND, 10 * SECOND);
        assert!((all[0] - 20.0).abs() < 1.0 && (all[1] - 80.0).abs() < 1.0, "{all:?}");
    }
}

#[test]
fn idle_time_is_lent_by_weight() {
    let [a, b] = [10, 30].map(|cores| SimulatedTenant::new(cores, 100, MOSTLY_SHORT_KERNELS));
    let all = percents(&mut Simulation::new(1, vec![a, b]), SECOND, 10 * SECOND);
    assert!((all[0] - 25.0).abs() < 1.5 && (all[1] - 75.0).abs() < 1.5, "{all:?}");
}

#[test]
fn containers_without_a_guarantee_share_the_remaining_time() {
    let free = || SimulatedTenant::new(0, 100, MOSTLY_SHORT_KERNELS);
    let tenants = vec![free(), SimulatedTenant::new(40, 40, MOSTLY_SHORT_KERNELS), free()];
    let all = percents(&mut Simulation::new(1, tenants), SECOND, 10 * SECOND);
    assert!((all[1] - 40.0).abs() < 1.0, "{all:?}");
    assert!((all[0] - 30.0).abs() < 1.0 && (all[2] - 30.0).abs() < 1.0, "{all:?}");
}

/// A container that is new to lent time has no arrears to collect.
#[test]
fn late_container_has_no_claim_on_past_lent_time() {
    let free = || SimulatedTenant::new(0, 100, MOSTLY_SHORT_KERNELS);
    let mut simulation = Simulation::new(1, vec![free(), free().pattern(LaunchPattern::From(20 * SECOND))]);
    let all = percents(&mut simulation, 21 * SECOND, 2 * SECOND);
    assert!((all[0] - 50.0).abs() < 3.0, "{all:?}");
}

#[test]
fn unlimited_sole_container_is_never_held_back() {
    for (cores, ceiling) in [(100, 100), (30, 100), (0, 100)] {
        let mut simulation = Simulation::new(1, vec![SimulatedTenant::new(cores, ceiling, MIXED_KERNELS)]);
        let all = percents(&mut simulation, 100 * MILLI, 10 * SECOND);
        // Long kernels are queued one at a time.
        assert!(all[0] > 99.0, "{all:?}");
        assert!(simulation.rank(0).longest_wait < MILLI && simulation.decisions < 10 * 1_200);
    }
}

/// Where CPUs are scarce, containers wake up late and some GPU time is lost. All lose in proportion: a small share is
/// not woken in vain again and again.
#[test]
fn shares_stay_proportional_when_wakeups_are_late() {
    for (soonest, latest) in [(0, 3 * MILLI), (0, 6 * MILLI), (2 * MILLI, 6 * MILLI), (8 * MILLI, 15 * MILLI)]
    {
        for (kernels, small) in [(SHORT_KERNELS, 30), (MOSTLY_SHORT_KERNELS, 30), (MOSTLY_SHORT_KERNELS, 10)]
        {
            let tenants = [small, 100 - small]
                .map(|cores| SimulatedTenant::new(cores, cores, kernels).wakes(soonest, latest));
            let all = percents(&mut Simulation::new(1, tenants.to_vec()), SECOND, 10 * SECOND);
            let part = 100.0 * all[0] / (all[0] + all[1]) / f64::from(small);
            assert!((0.88..1.12).contains(&part), "{soonest} {latest} {small}: {all:?}, {part}");
            // The loss at each handover is small compared with a turn.
            assert!(all[0] + all[1] > 75.0, "{soonest} {latest} {small}: {all:?}");
        }
    }
}

/// A container that wakes up late pays for it, even if it does so to keep others waiting.
#[test]
fn slow_waker_takes_nothing_from_others() {
    for late in [MILLI, 3 * MILLI, 8 * MILLI, 15 * MILLI, 60 * MILLI] {
        for (cores, ceiling) in [(30, 30), (30, 100), (0, 100)] {
            let slow = SimulatedTenant::new(cores, ceiling, MOSTLY_SHORT_KERNELS).wakes(late, late + 1);
            let other = SimulatedTenant::new(70, 70, MOSTLY_SHORT_KERNELS);
            let all = percents(&mut Simulation::new(1, vec![slow.priority(1), other]), SECOND, 10 * SECOND);
            // The time until it begins is charged to neither.
            assert!(all[1] > 62.0, "{late} {cores} {ceiling}: {all:?}");
        }
    }
}

/// The owner of lent time returns: it gets its first turn within 100 ms, and its share from then on.
#[test]
fn lent_time_is_returned_within_100_ms() {
    for kernels in [SHORT_KERNELS, MIXED_KERNELS, LONG_KERNELS] {
        for seed in 1..4 {
            let owner = SimulatedTenant::new(80, 80, kernels).pattern(LaunchPattern::From(2 * SECOND));
            let mut simulation = Simulation::new(seed, vec![SimulatedTenant::new(20, 100, kernels), owner]);
            let alone = percents(&mut simulation, SECOND, SECOND);
            assert!(alone[0] > 99.0);
            let back = percents(&mut simulation, 100 * MILLI, 5 * SECOND);
            assert!((back[1] - 80.0).abs() < 2.5, "{back:?}");
            // It may launch at once. Turns begin when the GPU is saturated.
            assert!(simulation.rank(1).longest_wait < 100 * MILLI, "{}", simulation.rank(1).longest_wait);
        }
    }
}

#[test]
fn bursty_container_gets_its_share_beside_a_steady_one() {
    // The bursts need half of its guarantee; the steady container has the rest, lent.
    let bursty = SimulatedTenant::new(50, 50, MOSTLY_SHORT_KERNELS)
        .pattern(LaunchPattern::Bursts(8 * MILLI, 24 * MILLI));
    let steady = SimulatedTenant::new(50, 100, MOSTLY_SHORT_KERNELS);
    let mut simulation = Simulation::new(1, vec![bursty, steady]);
    let all = percents(&mut simulation, SECOND, 10 * SECOND);
    assert!(all[0] > 14.0 && all[0] + all[1] > 97.0, "{all:?}");
    assert!(simulation.rank(0).longest_wait < 40 * MILLI);
}

/// A container that waits for each of its kernels does not lose its turn in between: no other could use the gap.
#[test]
fn synchronizing_container_keeps_its_turn_between_kernels() {
    let polite =
        SimulatedTenant::new(50, 50, &[200 * MICRO]).pattern(LaunchPattern::Synchronizes(20 * MICRO));
    let busy = SimulatedTenant::new(50, 50, MOSTLY_SHORT_KERNELS);
    let all = percents(&mut Simulation::new(1, vec![polite, busy]), SECOND, 10 * SECOND);
    assert!(all[0] > 36.0 && (all[1] - 50.0).abs() < 1.5, "{all:?}");
}

/// Rare small requests cost the saturating neighbor little more than what they need.
#[test]
fn small_requests_cost_a_steady_neighbor_little() {
    let small = SimulatedTenant::new(30, 30, &[200 * MICRO]).pattern(LaunchPattern::Synchronizes(5 * MILLI));
    let steady = SimulatedTenant::new(70, 100, MOSTLY_SHORT_KERNELS);
    let mut simulation = Simulation::new(1, vec![small, steady]);
    let all = percents(&mut simulation, SECOND, 10 * SECOND);
    assert!(all[1] > 86.0, "{all:?}");
    assert!(simulation.rank(0).longest_wait < 40 * MILLI);
}

/// A container that uses a tenth of the time of its turns loses them, and keeps its credit.
#[test]
fn container_that_leaves_the_gpu_idle_costs_others_little() {
    let idle = SimulatedTenant::new(30, 30, &[30 * MICRO]).pattern(LaunchPattern::Synchronizes(270 * MICRO));
    let busy = SimulatedTenant::new(70, 70, MOSTLY_SHORT_KERNELS);
    let all = percents(&mut Simulation::new(1, vec![idle, busy]), SECOND, 10 * SECOND);
    assert!(all[1] > 68.0, "{all:?}");
}

#[test]
fn container_that_never_wakes_blocks_no_other() {
    for (cores, ceiling) in [(30, 30), (30, 100), (0, 100)] {
        let stopped = SimulatedTenant::new(cores, ceiling, SHORT_KERNELS).pattern(LaunchPattern::Stopped);
        let busy = SimulatedTenant::new(70, 100, MOSTLY_SHORT_KERNELS);
        let all = percents(&mut Simulation::new(1, vec![stopped, busy]), SECOND, 10 * SECOND);
        assert!(all[1] > 97.0, "{all:?}");
    }
}

#[test]
fn priority_orders_lent_time_and_keeps_guarantees() {
    // The container of higher priority gets all lent time...
    let [low, high] = [1, 2].map(|it| SimulatedTenant::new(20, 100, MOSTLY_SHORT_KERNELS).priority(it));
    let all = percents(&mut Simulation::new(1, vec![low, high]), SECOND, 10 * SECOND);
    assert!((all[0] - 20.0).abs() < 1.5 && all[1] > 77.0, "{all:?}");
    // ...and each gets its own guaranteed time.
    let [low, high] = [1, 2].map(|it| SimulatedTenant::new(50, 50, MIXED_KERNELS).priority(it));
    let all = percents(&mut Simulation::new(1, vec![low, high]), SECOND, 10 * SECOND);
    assert!((all[0] - 50.0).abs() < 1.0 && (all[1] - 50.0).abs() < 1.0, "{all:?}");
}

#[test]
fn share_change_takes_effect_within_100_ms() {
    for kernels in [SHORT_KERNELS, MOSTLY_SHORT_KERNELS] {
        let mut simulation = Simulation::new(1, vec![SimulatedTenant::new(80, 80, kernels)]);
        simulation.run(2 * SECOND);
        for (cores, ceiling) in [(20, 20), (90, 90), (90, 100)] {
            simulation.tenants[0].view.cores = cores * PERCENT;
            simulation.tenants[0].view.ceiling = ceiling * PERCENT;
            let after = percents(&mut simulation, 100 * MILLI, 500 * MILLI);
            assert!((after[0] - f64::from(ceiling)).abs() < 3.0, "{after:?}");
        }
    }
}

#[test]
fn shares_adapt_when_containers_join_and_leave() {
    let mut simulation = Simulation::new(1, vec![SimulatedTenant::new(30, 30, MIXED_KERNELS)]);
    simulation.run(SECOND);
    let second = simulation.join(SimulatedTenant::new(70, 70, MIXED_KERNELS));
    let all = percents(&mut simulation, 200 * MILLI, 2 * SECOND);
    assert!((all[0] - 30.0).abs() < 2.0 && (all[1] - 70.0).abs() < 2.0, "{all:?}");
    // It usually leaves in the middle of its turn.
    simulation.leave(second);
    simulation.join(SimulatedTenant::new(60, 60, MOSTLY_SHORT_KERNELS));
    let all = percents(&mut simulation, 200 * MILLI, 2 * SECOND);
    assert!((all[0] - 30.0).abs() < 2.0 && (all[2] - 60.0).abs() < 3.0, "{all:?}");
    simulation.leave(0);
    let all = percents(&mut simulation, 200 * MILLI, 2 * SECOND);
    assert!((all[2] - 60.0).abs() < 2.0, "{all:?}");
}

/// Reports of a container harm it, or no container at all.
#[test]
fn forged_views_take_nothing_from_others() {
    let forged = |occupied, waiting| Reporting::Forged { occupied, waiting };
    for reporting in [
        forged(Some(true), None),
        forged(None, Some(true)),
        forged(Some(true), Some(true)),
        forged(None, Some(false)),
        Reporting::Random,
    ] {
        for kernels in [MOSTLY_SHORT_KERNELS, MIXED_KERNELS] {
            for ceiling in [30, 100] {
                let forger = SimulatedTenant::new(30, ceiling, kernels).reporting(reporting);
                let tenants = vec![forger, SimulatedTenant::new(70, 70, kernels)];
                let all = percents(&mut Simulation::new(1, tenants), SECOND, 10 * SECOND);
                println!("^ {reporting:?} {ceiling}");
                assert!(all[1] > 66.0, "{reporting:?} {ceiling}: {all:?}");
            }
        }
    }
}

/// Work that overran, or is forged, for ever: the others still take turns.
#[test]
fn endless_overrun_lets_all_others_take_turns() {
    let forged = Reporting::Forged { occupied: Some(true), waiting: None };
    let idle = LaunchPattern::From(3600 * SECOND);
    for endless in [
        SimulatedTenant::new(40, 40, SHORT_KERNELS).pattern(idle).reporting(forged),
        SimulatedTenant::new(40, 40, &[3600 * SECOND]),
    ] {
        let others =
            [30, 30].map(|cores| SimulatedTenant::new(cores, cores, MOSTLY_SHORT_KERNELS).priority(1));
        let mut simulation = Simulation::new(1, [vec![endless], others.to_vec()].concat());
        let all = percents(&mut simulation, SECOND, 10 * SECOND);
        assert!(all[1] > 20.0 && all[2] > 20.0, "{all:?}");
    }
}

/// Work that a container hides is not charged, but it is limited to what it can queue while its gate is open. The audit
/// finds it by other means.
#[test]
fn hidden_work_is_limited() {
    for waiting in [None, Some(true)] {
        let reporting = Reporting::Forged { occupied: Some(false), waiting };
        let forger = SimulatedTenant::new(30, 30, MOSTLY_SHORT_KERNELS).reporting(reporting);
        let tenants = vec![forger, SimulatedTenant::new(70, 70, MOSTLY_SHORT_KERNELS)];
        let all = percents(&mut Simulation::new(1, tenants), SECOND, 10 * SECOND);
        println!("^ {waiting:?}");
        assert!(all[1] > 33.0, "{all:?}");
    }
}

/// More is guaranteed than there is: every container has less, in proportion to its guarantee.
#[test]
fn overcommitted_guarantees_shrink_in_proportion() {
    let tenants = [90, 60].map(|cores| SimulatedTenant::new(cores, cores, MOSTLY_SHORT_KERNELS));
    let all = percents(&mut Simulation::new(1, tenants.to_vec()), 2 * SECOND, 10 * SECOND);
    assert!((all[0] - 60.0).abs() < 2.0 && (all[1] - 40.0).abs() < 2.0, "{all:?}");
}

/// Several containers with gaps between their kernels fit a GPU together: none of them waits for a turn.
#[test]
fn containers_that_do_not_saturate_the_gpu_are_not_slowed() {
    // 600 us of work in 1.5 ms: a density of 40 %.
    let pause = 900 * MICRO - 27 * MICRO;
    let sparse = || SimulatedTenant::new(50, 100, &[600 * MICRO]).pattern(LaunchPattern::Synchronizes(pause));
    let alone = percents(&mut Simulation::new(1, vec![sparse()]), SECOND, 5 * SECOND);
    let mut simulation = Simulation::new(1, vec![sparse(), sparse()]);
    let both = percents(&mut simulation, SECOND, 10 * SECOND);
    assert!(!simulation.scheduler.takes_turns(0));
    // The driver itself makes some kernels wait for the other container's.
    assert!(both.iter().all(|it| *it > alone[0] * 0.80), "{both:?} of {alone:?}");
    // Turns may begin for a moment, because 80 % is not far from saturation.
    assert!(simulation.ranks.iter().flatten().all(|rank| rank.longest_wait < 10 * MILLI));
}

/// Two jobs with a GPU pair each, whose ranks wait for each other in every step.
#[test]
fn gang_turns_keep_collectives_together() {
    for kernel in [300 * MICRO, MILLI, 5 * MILLI] {
        let job = || SimulatedTenant::new(50, 50, &[kernel]).collective(100 * MICRO).on(&[0, 1]);
        let steps = |simulation: &mut Simulation| -> Vec<u64> {
            simulation.run(SECOND);
            let before: Vec<u64> = simulation.ranks.iter().flatten().map(|it| it.steps).collect();
            percents(simulation, 0, 10 * SECOND);
            simulation.ranks.iter().flatten().zip(before).map(|(it, before)| it.steps - before).collect()
        };
        let ungated = 10 * SECOND / (kernel + 100 * MICRO);
        let both = steps(&mut Simulation::new(1, vec![job(), job()]));
        println!("steps {both:?} of {ungated}");
        let total = percent(both[0] + both[2], ungated);
        assert!(total > 90.0, "{kernel}: {both:?} of {ungated}");
        let first = percent(both[0], both[0] + both[2]);
        assert!((first - 50.0).abs() < 2.0, "{kernel}: {both:?}");
    }
}

#[test]
fn single_gpu_containers_fill_what_a_gang_leaves() {
    let gang = SimulatedTenant::new(50, 50, &[MILLI]).collective(100 * MICRO).on(&[0, 1]);
    let single = |gpu| SimulatedTenant::new(50, 100, MOSTLY_SHORT_KERNELS).on(&[gpu]);
    let mut simulation = Simulation::new(1, vec![gang, single(0), single(1)]);
    let all = percents(&mut simulation, SECOND, 10 * SECOND);
    assert!(all.iter().all(|it| (it - 50.0).abs() < 3.0), "{all:?}");
    // Only one of the two GPUs is shared. The turns there and the ceiling on the other one are not aligned, so that the
    // gang spins for much of its share; the other container loses nothing by that.
    let gang = SimulatedTenant::new(40, 40, &[MILLI]).collective(100 * MICRO).on(&[0, 1]);
    let mut simulation = Simulation::new(1, vec![gang, single(0)]);
    let all = percents(&mut simulation, SECOND, 10 * SECOND);
    assert!((all[0] - 40.0).abs() < 3.0 && all[1] > 5.0 && all[2] > 55.0, "{all:?}");
}

/// Containers whose GPUs overlap in a ring all get turns.
#[test]
fn overlapping_gangs_starve_no_container() {
    let gang = |gpus: &[usize]| SimulatedTenant::new(50, 50, &[MILLI]).collective(100 * MICRO).on(gpus);
    let tenants = vec![gang(&[0, 1]), gang(&[1, 2]), gang(&[2, 3]), gang(&[3, 0])];
    let all = percents(&mut Simulation::new(1, tenants), SECOND, 10 * SECOND);
    assert!(all.iter().all(|it| *it > 40.0), "{all:?}");
}

/// A container that asked for short waits does not wait for a whole turn of another one.
#[test]
fn low_latency_container_waits_briefly() {
    let request =
        SimulatedTenant::new(20, 20, &[200 * MICRO]).pattern(LaunchPattern::Synchronizes(10 * MILLI));
    let batch = || SimulatedTenant::new(40, 100, MOSTLY_SHORT_KERNELS);
    let mut longest = Vec::new();
    for request in [request.clone().low_latency(), request] {
        let mut simulation = Simulation::new(1, vec![request, batch(), batch()]);
        simulation.run(SECOND);
        simulation.rank(0).longest_wait = 0;
        let all = percents(&mut simulation, 0, 10 * SECOND);
        assert!(all.iter().sum::<f64>() > 75.0, "{all:?}");
        longest.push(simulation.rank(0).longest_wait);
    }
    assert!(longest[0] < 5 * MILLI && longest[0] * 2 < longest[1], "{longest:?}");
}

/// A view of one container, whose share is 50 %.
fn view(waiting: bool, occupied: bool, progress: u64) -> Option<ContenderView> {
    let (cores, ceiling) = (50 * PERCENT, WHOLE_GPU);
    Some(ContenderView { cores, ceiling, waiting, occupied, progress, ..ContenderView::default() })
}

/// A container's queued kernel waits for one that its closed gate holds back.
#[test]
fn gate_of_a_stalled_container_opens_for_streams_without_work() {
    let (mut scheduler, mut decision) = (TurnScheduler::new(), SchedulerDecision::default());
    scheduler.add(0, 0, 0);
    scheduler.add(1, 1, 0);
    let mut gates = [GateState::Closed; 2];
    let mut seen = Vec::new();
    let mut now = SECOND;
    while now < 2 * SECOND {
        // The first container makes progress at first, and then its kernel waits for its own next launch.
        let progress = now.min(SECOND + 200 * MILLI);
        scheduler.decide(now, &[view(true, true, progress), view(true, false, 0)], &mut decision);
        for &(index, gate) in &decision.gates {
            gates[index] = gate;
            seen.push((now - SECOND, index, gate));
        }
        now = decision.next;
    }
    let drained = seen
        .iter()
        .find(|(at, index, gate)| *at > 200 * MILLI && *index == 0 && *gate == GateState::Draining);
    let (at, ..) = *drained.unwrap_or_else(|| panic!("{seen:?}"));
    assert!(at < 400 * MILLI, "{seen:?}");
    let other =
        seen.iter().find(|(after, index, gate)| *after > at && *index == 1 && *gate == GateState::Open);
    assert!(other.is_some_and(|(after, ..)| after - at <= tuning::MAX_OVERRUN_NS + MILLI), "{seen:?}");
}

/// A container can make its own `usage` unreadable, and readable again. It keeps its debt.
#[test]
fn unreadable_container_keeps_its_debt() {
    let share = |waiting, occupied| {
        let (cores, ceiling) = (10 * PERCENT, 10 * PERCENT);
        view(waiting, occupied, 0).map(|view| ContenderView { cores, ceiling, ..view })
    };
    let (mut scheduler, mut decision) = (TurnScheduler::new(), SchedulerDecision::default());
    let mut decide = |scheduler: &mut TurnScheduler, millis: u64, view| {
        scheduler.decide(SECOND + millis * MILLI, &[view, share(true, true)], &mut decision);
    };
    scheduler.add(0, 0, 0);
    scheduler.add(1, 1, 0);
    (0..300).for_each(|millis| decide(&mut scheduler, millis, share(true, true)));
    let debt = scheduler.credit(0);
    assert!(debt < 0, "{debt}");
    decide(&mut scheduler, 300, None);
    decide(&mut scheduler, 301, None);
    let kept = scheduler.credit(0);
    // Two milliseconds have passed, a tenth of which is its share.
    assert!(kept < 0 && kept - debt <= 200_000, "{kept} {debt}");
    scheduler.remove(0);
    scheduler.add(0, 0, 0);
    decide(&mut scheduler, 302, share(false, false));
    assert!(scheduler.credit(0) > 0, "a new container has no debt");
}
