//! Tests of the documented shares, in virtual time.

use super::model::{ForgedValue, LaunchPattern, Reporting, SimulatedTenant, Simulation};
use super::{ContainerView, MICRO, MILLI, PERCENT, TurnScheduler, WHOLE_GPU, tuning};

const SECOND: u64 = 1_000 * MILLI;
const SHORT_KERNELS: &[u64] = &[20 * MICRO];
const MIXED_KERNELS: &[u64] = &[20 * MICRO, 100 * MICRO, 500 * MICRO, 2 * MILLI, 5 * MILLI, 20 * MILLI];
const MOSTLY_SHORT_KERNELS: &[u64] = &[20 * MICRO, 30 * MICRO, 50 * MICRO, 50 * MICRO, 200 * MICRO, MILLI];
const LONG_KERNELS: &[u64] = &[20 * MILLI];

fn percent(had: u64, of: u64) -> f64 {
    had as f64 * 100.0 / of as f64
}

/// Compares the first second and all ten seconds with each container's guarantee.
fn shares(name: &str, seed: u64, tenants: Vec<SimulatedTenant>) -> Simulation {
    let guaranteed: Vec<f64> =
        tenants.iter().map(|it| f64::from(it.view.cores) / f64::from(PERCENT)).collect();
    let mut simulation = Simulation::new(seed, tenants);
    let first = simulation.run(SECOND);
    let rest = simulation.run(9 * SECOND);
    let mut line = format!("{name} seed {seed}:");
    let mut bad = false;
    for (index, guaranteed) in guaranteed.iter().enumerate() {
        let early = percent(first[index], SECOND);
        let all = percent(first[index] + rest[index], 10 * SECOND);
        line += &format!("  {guaranteed}: {early:.2} {all:.2}");
        bad |= (early - guaranteed).abs() > 5.0 || (all - guaranteed).abs() > 1.0;
    }
    line += &format!(
        "  total {:.2}, decisions/s {}",
        percent(simulation.busy, 10 * SECOND),
        simulation.decisions / 10
    );
    println!("{line}");
    assert!(!bad, "{line}");
    simulation
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
            let simulation = shares("together", 1, tenants);
            assert!(percent(simulation.busy, 10 * SECOND) >= 97.0);
        }
    }
}

#[test]
fn ten_containers_with_mixed_kernels_get_their_shares() {
    for seed in 1..4 {
        let simulation = shares("ten", seed, vec![SimulatedTenant::new(10, 10, MIXED_KERNELS); 10]);
        assert!(percent(simulation.busy, 10 * SECOND) >= 97.0);
    }
}

#[test]
fn shares_below_the_whole_gpu_are_kept() {
    for kernels in [MIXED_KERNELS, MOSTLY_SHORT_KERNELS] {
        shares(
            "30/30",
            1,
            vec![SimulatedTenant::new(30, 30, kernels), SimulatedTenant::new(30, 30, kernels)],
        );
        shares("5/15/45", 1, [5, 15, 45].map(|cores| SimulatedTenant::new(cores, cores, kernels)).to_vec());
    }
}

#[test]
fn shares_hold_for_long_kernels_beside_short_ones() {
    for (first, second) in [(LONG_KERNELS, SHORT_KERNELS), (SHORT_KERNELS, MIXED_KERNELS)] {
        for (a, b) in [(30, 70), (10, 90), (70, 30)] {
            let simulation = shares(
                "beside",
                5,
                vec![SimulatedTenant::new(a, a, first), SimulatedTenant::new(b, b, second)],
            );
            assert!(percent(simulation.busy, 10 * SECOND) >= 97.0);
        }
    }
}

/// Returns the percentage of the GPU that each container has over `span`, after `warm`.
fn percents(simulation: &mut Simulation, warm: u64, span: u64) -> Vec<f64> {
    simulation.run(warm);
    let had = simulation.run(span);
    let all: Vec<f64> = had.iter().map(|it| percent(*it, span)).collect();
    println!(
        "{all:.2?}, idle at most {} us, {} decisions",
        simulation.longest_idle / 1000,
        simulation.decisions
    );
    all
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
        let mut simulation = Simulation::new(
            1,
            vec![SimulatedTenant::new(20, 50, kernels), SimulatedTenant::new(80, 100, kernels)],
        );
        let all = percents(&mut simulation, SECOND, 10 * SECOND);
        assert!((all[0] - 20.0).abs() < 1.0 && (all[1] - 80.0).abs() < 1.0, "{all:?}");
    }
}

#[test]
fn idle_time_is_lent_by_weight() {
    let [a, b] = [10, 30].map(|cores| SimulatedTenant::new(cores, 100, MOSTLY_SHORT_KERNELS));
    let mut simulation = Simulation::new(1, vec![a, b]);
    let all = percents(&mut simulation, SECOND, 10 * SECOND);
    assert!((all[0] - 25.0).abs() < 1.5 && (all[1] - 75.0).abs() < 1.5, "{all:?}");
}

#[test]
fn containers_without_a_guarantee_share_the_remaining_time() {
    let free = || SimulatedTenant::new(0, 100, MOSTLY_SHORT_KERNELS);
    let mut simulation =
        Simulation::new(1, vec![free(), SimulatedTenant::new(40, 40, MOSTLY_SHORT_KERNELS), free()]);
    let all = percents(&mut simulation, SECOND, 10 * SECOND);
    assert!(
        (all[1] - 40.0).abs() < 1.0 && (all[0] - 30.0).abs() < 1.0 && (all[2] - 30.0).abs() < 1.0,
        "{all:?}"
    );
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
fn unlimited_sole_container_keeps_its_turn_open() {
    for (cores, ceiling) in [(100, 100), (30, 100), (0, 100)] {
        let mut simulation = Simulation::new(1, vec![SimulatedTenant::new(cores, ceiling, MIXED_KERNELS)]);
        let all = percents(&mut simulation, 100 * MILLI, 10 * SECOND);
        // Costs are learned with a small error, and time that is overcharged is not used.
        assert!(all[0] > 99.4, "{all:?}");
        assert!(simulation.longest_idle < MILLI, "{}", simulation.longest_idle);
        assert!(simulation.orders.iter().all(|(_, order)| order.close.is_none()));
        assert!(simulation.decisions < 10 * 700);
    }
}

/// Where CPUs are scarce, containers wake up late and some GPU time is lost. All lose in proportion: a small share is
/// not woken in vain again and again.
#[test]
fn shares_stay_proportional_when_wakeups_are_late() {
    for (soonest, latest) in [(0, 3 * MILLI), (0, 6 * MILLI), (2 * MILLI, 6 * MILLI), (8 * MILLI, 15 * MILLI)]
    {
        for (kernels, small) in
            [(SHORT_KERNELS, 30), (MOSTLY_SHORT_KERNELS, 30), (SHORT_KERNELS, 10), (MOSTLY_SHORT_KERNELS, 10)]
        {
            let tenants = [small, 100 - small]
                .map(|cores| SimulatedTenant::new(cores, cores, kernels).wakes(soonest, latest));
            let all = percents(&mut Simulation::new(1, tenants.to_vec()), SECOND, 10 * SECOND);
            let part = 100.0 * all[0] / (all[0] + all[1]) / f64::from(small);
            assert!((0.88..1.05).contains(&part), "{soonest} {latest} {small}: {all:?}, {part}");
            // The loss at each handover is small compared with a turn.
            assert!(all[0] + all[1] > 60.0, "{soonest} {latest} {small}: {all:?}");
        }
    }
}

/// A container that wakes up late pays for it, even if it does so to keep others waiting.
#[test]
fn slow_waker_takes_nothing_from_others() {
    for late in [MILLI, 3 * MILLI, 8 * MILLI, 15 * MILLI, 60 * MILLI] {
        for (cores, ceiling) in [(30, 30), (30, 100), (0, 100)] {
            let slow =
                SimulatedTenant::new(cores, ceiling, MOSTLY_SHORT_KERNELS).wakes(late, late + 1).priority(1);
            let mut simulation =
                Simulation::new(1, vec![slow, SimulatedTenant::new(70, 70, MOSTLY_SHORT_KERNELS)]);
            let all = percents(&mut simulation, SECOND, 10 * SECOND);
            assert!(all[1] > 68.0, "{late} {cores} {ceiling}: {all:?}");
        }
    }
}

/// The owner of lent time returns: it gets its first turn within 100 ms, and its share from then on.
#[test]
fn lent_time_is_returned_within_100_ms() {
    for kernels in [SHORT_KERNELS, MIXED_KERNELS, LONG_KERNELS] {
        for seed in 1..6 {
            let owner = SimulatedTenant::new(80, 80, kernels).pattern(LaunchPattern::From(2 * SECOND));
            let mut simulation = Simulation::new(seed, vec![SimulatedTenant::new(20, 100, kernels), owner]);
            let alone = percents(&mut simulation, SECOND, SECOND);
            assert!(alone[0] > 99.0);
            let back = percents(&mut simulation, 100 * MILLI, 5 * SECOND);
            assert!(
                simulation.tenant(1).first_wait.unwrap() < 60 * MILLI,
                "{:?}",
                simulation.tenant(1).first_wait
            );
            assert!((back[1] - 80.0).abs() < 2.5, "{back:?}");
        }
    }
}

#[test]
fn bursty_container_gets_its_share_beside_a_steady_one() {
    // The bursts need half of its guarantee; the steady container has the rest, lent.
    let bursty = SimulatedTenant::new(50, 50, MOSTLY_SHORT_KERNELS)
        .pattern(LaunchPattern::Bursts(8 * MILLI, 24 * MILLI));
    let mut simulation =
        Simulation::new(1, vec![bursty, SimulatedTenant::new(50, 100, MOSTLY_SHORT_KERNELS)]);
    let all = percents(&mut simulation, SECOND, 10 * SECOND);
    assert!(all[0] > 14.0, "{all:?}");
    assert!(all[0] + all[1] > 97.0, "{all:?}");
    assert!(simulation.tenant(0).longest_wait < 40 * MILLI);
}

/// A container that waits for each of its kernels does not lose its turn in between.
#[test]
fn synchronizing_container_keeps_its_turn_between_kernels() {
    let polite =
        SimulatedTenant::new(50, 50, &[200 * MICRO]).pattern(LaunchPattern::Synchronizes(20 * MICRO));
    let mut simulation = Simulation::new(1, vec![polite, SimulatedTenant::new(50, 50, MOSTLY_SHORT_KERNELS)]);
    let all = percents(&mut simulation, SECOND, 10 * SECOND);
    assert!(all[0] > 36.0 && (all[1] - 50.0).abs() < 1.5, "{all:?}");
}

/// Rare small requests cost the saturating neighbor little more than what they need.
#[test]
fn small_requests_cost_a_steady_neighbor_little() {
    let small = SimulatedTenant::new(30, 30, &[200 * MICRO]).pattern(LaunchPattern::Synchronizes(5 * MILLI));
    let mut simulation = Simulation::new(1, vec![small, SimulatedTenant::new(70, 100, MOSTLY_SHORT_KERNELS)]);
    let all = percents(&mut simulation, SECOND, 10 * SECOND);
    assert!(all[0] + all[1] > 97.0, "{all:?}");
    assert!(simulation.tenant(0).longest_wait < 40 * MILLI);
}

#[test]
fn holding_the_gpu_idle_is_charged() {
    // It uses a tenth of the time of its turns; its neighbor still gets its guarantee.
    let dribbler =
        SimulatedTenant::new(30, 30, &[30 * MICRO]).pattern(LaunchPattern::Synchronizes(270 * MICRO));
    let mut simulation =
        Simulation::new(1, vec![dribbler, SimulatedTenant::new(70, 70, MOSTLY_SHORT_KERNELS)]);
    let all = percents(&mut simulation, SECOND, 10 * SECOND);
    assert!(all[1] > 68.0, "{all:?}");
}

#[test]
fn forged_end_of_work_gains_nothing() {
    for reporting in [
        Reporting::NeverDrained(3600 * SECOND),
        Reporting::NeverDrained(50 * MILLI),
        Reporting::AlwaysDrained,
    ] {
        let liar = SimulatedTenant::new(30, 30, MIXED_KERNELS).reporting(reporting);
        let mut simulation = Simulation::new(1, vec![liar, SimulatedTenant::new(70, 70, MIXED_KERNELS)]);
        let all = percents(&mut simulation, SECOND, 10 * SECOND);
        assert!(all[1] > 67.0, "{reporting:?} {all:?}");
        assert!(all[0] < 32.0, "{reporting:?} {all:?}");
    }
}

#[test]
fn container_that_never_wakes_blocks_no_other() {
    for (cores, ceiling) in [(30, 30), (30, 100), (0, 100)] {
        let stopped = SimulatedTenant::new(cores, ceiling, SHORT_KERNELS).pattern(LaunchPattern::Stopped);
        let mut simulation =
            Simulation::new(1, vec![stopped, SimulatedTenant::new(70, 100, MOSTLY_SHORT_KERNELS)]);
        let all = percents(&mut simulation, SECOND, 10 * SECOND);
        assert!(all[1] > 97.0, "{all:?}");
    }
}

#[test]
fn priority_orders_lent_time_and_keeps_guarantees() {
    // The container of higher priority gets all lent time...
    let [low, high] = [1, 2].map(|it| SimulatedTenant::new(20, 100, MOSTLY_SHORT_KERNELS).priority(it));
    let mut simulation = Simulation::new(1, vec![low, high]);
    let all = percents(&mut simulation, SECOND, 10 * SECOND);
    assert!((all[0] - 20.0).abs() < 1.5 && all[1] > 77.0, "{all:?}");
    // ...and each gets its own guaranteed time.
    let [low, high] = [1, 2].map(|it| SimulatedTenant::new(50, 50, MIXED_KERNELS).priority(it));
    let mut simulation = Simulation::new(1, vec![low, high]);
    let all = percents(&mut simulation, SECOND, 10 * SECOND);
    assert!((all[0] - 50.0).abs() < 1.0 && (all[1] - 50.0).abs() < 1.0, "{all:?}");
}

#[test]
fn share_change_takes_effect_within_100_ms() {
    for kernels in [SHORT_KERNELS, MOSTLY_SHORT_KERNELS] {
        let mut simulation = Simulation::new(1, vec![SimulatedTenant::new(80, 80, kernels)]);
        simulation.run(2 * SECOND);
        simulation.tenant(0).view.cores = 20 * PERCENT;
        simulation.tenant(0).view.ceiling = 20 * PERCENT;
        let after = percents(&mut simulation, 100 * MILLI, 500 * MILLI);
        assert!((after[0] - 20.0).abs() < 3.0, "{after:?}");
        simulation.tenant(0).view.cores = 90 * PERCENT;
        simulation.tenant(0).view.ceiling = 90 * PERCENT;
        let after = percents(&mut simulation, 100 * MILLI, 500 * MILLI);
        assert!((after[0] - 90.0).abs() < 3.0, "{after:?}");
        simulation.tenant(0).view.ceiling = WHOLE_GPU;
        let after = percents(&mut simulation, 100 * MILLI, 500 * MILLI);
        assert!(after[0] > 99.0, "{after:?}");
    }
}

#[test]
fn long_kernel_is_paid_off_over_time() {
    let mut simulation = Simulation::new(
        1,
        vec![SimulatedTenant::new(20, 20, &[400 * MILLI]), SimulatedTenant::new(80, 80, MIXED_KERNELS)],
    );
    let all = percents(&mut simulation, 4 * SECOND, 40 * SECOND);
    assert!((all[0] - 20.0).abs() < 1.5 && (all[1] - 80.0).abs() < 1.5, "{all:?}");
}

#[test]
fn shares_adapt_when_containers_join_and_leave() {
    let mut simulation = Simulation::new(1, vec![SimulatedTenant::new(30, 30, MIXED_KERNELS)]);
    simulation.run(SECOND);
    let second = simulation.join(SimulatedTenant::new(70, 70, MIXED_KERNELS));
    let all = percents(&mut simulation, 100 * MILLI, 2 * SECOND);
    assert!((all[0] - 30.0).abs() < 2.0 && (all[1] - 70.0).abs() < 2.0, "{all:?}");
    // It usually leaves in the middle of its turn.
    assert!(simulation.leave(second).is_some());
    simulation.join(SimulatedTenant::new(60, 60, MOSTLY_SHORT_KERNELS));
    let all = percents(&mut simulation, 100 * MILLI, 2 * SECOND);
    assert!((all[0] - 30.0).abs() < 2.0 && (all[2] - 60.0).abs() < 2.0, "{all:?}");
    assert!(simulation.leave(0).is_some());
    let all = percents(&mut simulation, 100 * MILLI, 2 * SECOND);
    assert!((all[2] - 60.0).abs() < 2.0, "{all:?}");
}

#[test]
fn jumping_counter_is_counted_and_harmless() {
    let mut simulation = Simulation::new(
        1,
        vec![
            SimulatedTenant::new(30, 30, MOSTLY_SHORT_KERNELS),
            SimulatedTenant::new(70, 70, MOSTLY_SHORT_KERNELS),
        ],
    );
    simulation.run(SECOND);
    for _ in 0..2 {
        let spent = simulation.tenant(0).view.spent;
        simulation.tenant(0).view.spent = spent.wrapping_sub(5 * SECOND);
        simulation.run(100 * MILLI);
    }
    let all = percents(&mut simulation, 100 * MILLI, 2 * SECOND);
    assert_eq!(
        (simulation.scheduler.anomalies(0).backwards, simulation.scheduler.anomalies(1).backwards),
        (2, 0)
    );
    assert!((all[1] - 70.0).abs() < 2.0, "{all:?}");
    simulation.tenant(0).view.spent = 1 << 62;
    let all = percents(&mut simulation, SECOND, 2 * SECOND);
    assert_eq!(simulation.scheduler.anomalies(0).leaps, 1);
    assert!((all[1] - 70.0).abs() < 2.0, "{all:?}");
    // Ten seconds of debt at most, paid off at 30 % of the time.
    let all = percents(&mut simulation, 32 * SECOND, 2 * SECOND);
    assert!((all[0] - 30.0).abs() < 2.0, "{all:?}");
}

/// A container that claims to have used more lent time than has passed puts no other behind, not even those that join
/// and leave.
#[test]
fn forged_lent_time_disadvantages_only_its_container() {
    for spent in [
        ForgedValue::None,
        ForgedValue::Extremes,
        ForgedValue::Anything,
        ForgedValue::Always(0),
        ForgedValue::Part(100),
    ] {
        for seed in 1..4 {
            let free = || SimulatedTenant::new(0, 100, MOSTLY_SHORT_KERNELS);
            let bursty = free().pattern(LaunchPattern::Bursts(8 * MILLI, 4 * MILLI));
            let forger =
                free().reporting(Reporting::Forged { spent, busy_until: ForgedValue::None, waiting: None });
            let mut simulation = Simulation::new(seed, vec![free(), bursty, forger]);
            let all = percents(&mut simulation, SECOND, 10 * SECOND);
            // It may waste its own third.
            assert!(all[0] > 30.0 && all[1] > 15.0, "{spent:?} {all:?}");
        }
    }
}

/// More is guaranteed than there is: every container has less, in proportion to its guarantee.
#[test]
fn overcommitted_guarantees_shrink_in_proportion() {
    let mut simulation = Simulation::new(
        1,
        [90, 60].map(|cores| SimulatedTenant::new(cores, cores, MOSTLY_SHORT_KERNELS)).to_vec(),
    );
    let all = percents(&mut simulation, 2 * SECOND, 10 * SECOND);
    assert!((all[0] - 60.0).abs() < 2.0 && (all[1] - 40.0).abs() < 2.0, "{all:?}");
}

/// Two processes of one container that each assume to have the GPU alone do not run into the next container's turn,
/// once that has been observed for a while.
#[test]
fn processes_of_one_container_are_summed() {
    let share = ContainerView {
        cores: 50 * PERCENT,
        ceiling: 50 * PERCENT,
        waiting: true,
        ..ContainerView::default()
    };
    let mut views = [Some(share), Some(share)];
    let mut scheduler = TurnScheduler::new();
    let mut now = SECOND;
    let mut early = 0;
    let mut last = 0;
    for round in 0..60 {
        let start = now;
        now += 300 * MICRO;
        let open = loop {
            let order = scheduler.decide(now, &views);
            if let Some(open) = order.open {
                break open;
            }
            now = order.next;
        };
        if round >= 40 && now - start + tuning::HANDOVER_LEAD_NS < last {
            early += 1;
        }
        // All of it is spent at once: in the first container by two processes, half each.
        let view = views[open.index].as_mut().unwrap();
        last = open.allowed - view.spent;
        view.spent = open.allowed;
        view.busy_until = now + last / (2 - open.index as u64);
    }
    assert!(early <= 1, "{early}");
}

/// Returns the smallest fraction of its guarantee that a steady container of the lowest priority gets beside others,
/// over a time in which one turn does not matter.
fn guarantee_kept_beside(others: Vec<SimulatedTenant>, cores: u32) -> f64 {
    let kept = (1..4).map(|seed| {
        let mut all = vec![SimulatedTenant::new(cores, cores, &[50 * MICRO, 300 * MICRO])];
        all.extend(others.clone());
        percents(&mut Simulation::new(seed, all), SECOND, 20 * SECOND)[0] / f64::from(cores)
    });
    kept.fold(f64::MAX, f64::min)
}

/// The forger announces work, makes all others wait for it, and then reports that there was none, repeatedly and ahead
/// of others by its priority.
#[test]
fn refunded_charges_do_not_refund_held_time() {
    for work in [300 * MICRO, 5 * MILLI, 20 * MILLI] {
        for (priority, accomplice) in [(0, 1), (1, 1), (1, 7)] {
            let mut forger = SimulatedTenant::new(41, 41, SHORT_KERNELS)
                .pattern(LaunchPattern::Stopped)
                .priority(priority)
                .reporting(Reporting::Forged {
                    spent: ForgedValue::Extremes,
                    busy_until: ForgedValue::Anything,
                    waiting: Some(true),
                });
            forger.view.spent = work;
            let other = SimulatedTenant::new(accomplice, accomplice, SHORT_KERNELS)
                .pattern(LaunchPattern::Synchronizes(10 * MICRO))
                .priority(priority)
                .reporting(Reporting::Forged {
                    spent: ForgedValue::None,
                    busy_until: ForgedValue::Always(0),
                    waiting: None,
                });
            let kept = guarantee_kept_beside(vec![forger, other], 5);
            assert!(kept > 0.97, "{work} {priority} {accomplice}: {kept}");
        }
    }
}

/// Each takes a turn that costs almost nothing, and passes it to the other: both hold the GPU and hardly use it. With a
/// higher priority they need not even lie.
#[test]
fn colluding_containers_do_not_starve_others() {
    let polite = || {
        SimulatedTenant::new(20, 20, &[10 * MICRO])
            .pattern(LaunchPattern::Synchronizes(60 * MICRO))
            .priority(1)
    };
    let forges = |spent, busy_until, waiting| Reporting::Forged { spent, busy_until, waiting };
    let empty = forges(ForgedValue::Extremes, ForgedValue::Anything, Some(true));
    for (name, tenant) in [
        ("honest", polite()),
        ("never at work", polite().reporting(forges(ForgedValue::None, ForgedValue::Always(0), None))),
        ("hardly charged", polite().reporting(forges(ForgedValue::Part(10), ForgedValue::Always(0), None))),
        ("reports only", polite().pattern(LaunchPattern::Stopped).reporting(empty)),
    ] {
        for cores in [5, 50] {
            let kept = guarantee_kept_beside(vec![tenant.clone(), tenant.clone()], cores);
            assert!(kept > 0.97, "{name}: {kept} of {cores}");
        }
    }
}

/// A container can make its own `usage` unreadable, and readable again. It keeps its debt.
#[test]
fn unreadable_container_keeps_its_debt() {
    let share = ContainerView {
        cores: 10 * PERCENT,
        ceiling: 10 * PERCENT,
        waiting: true,
        ..ContainerView::default()
    };
    let mut scheduler = TurnScheduler::new();
    scheduler.decide(SECOND, &[Some(share), Some(share)]);
    let spent = ContainerView { spent: SECOND, ..share };
    scheduler.decide(SECOND + MILLI, &[Some(spent), Some(share)]);
    let debt = scheduler.credit(0);
    assert!(debt < 0, "{debt}");
    scheduler.decide(SECOND + 2 * MILLI, &[None, Some(share)]);
    scheduler.decide(SECOND + 3 * MILLI, &[Some(spent), Some(share)]);
    // Two milliseconds have passed, a tenth of which is its share.
    assert_eq!(scheduler.credit(0) - debt, 200_000);
    scheduler.remove(0);
    scheduler.decide(SECOND + 4 * MILLI, &[Some(spent), Some(share)]);
    assert!(scheduler.credit(0) > 0, "a new container has no debt");
}
