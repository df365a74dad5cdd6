//! The figures that are promised, in virtual time.

use super::model::{Habit, Lie, Tenant, Word, World};
use super::{ContainerView, MICRO, MILLI, PERCENT, TurnScheduler, WHOLE_GPU, tuning};

const SECOND: u64 = 1_000 * MILLI;
const SHORT: &[u64] = &[20 * MICRO];
const MIXED: &[u64] = &[20 * MICRO, 100 * MICRO, 500 * MICRO, 2 * MILLI, 5 * MILLI, 20 * MILLI];
const MOSTLY_SHORT: &[u64] = &[20 * MICRO, 30 * MICRO, 50 * MICRO, 50 * MICRO, 200 * MICRO, MILLI];
const LONG: &[u64] = &[20 * MILLI];

fn percent(had: u64, of: u64) -> f64 {
    had as f64 * 100.0 / of as f64
}

/// The first second, then all ten, against what each was promised.
fn shares(name: &str, seed: u64, tenants: Vec<Tenant>) -> World {
    let promised: Vec<f64> = tenants.iter().map(|it| f64::from(it.view.cores) / f64::from(PERCENT)).collect();
    let mut world = World::new(seed, tenants);
    let first = world.run(SECOND);
    let rest = world.run(9 * SECOND);
    let mut line = format!("{name} seed {seed}:");
    let mut bad = false;
    for (index, promised) in promised.iter().enumerate() {
        let early = percent(first[index], SECOND);
        let all = percent(first[index] + rest[index], 10 * SECOND);
        line += &format!("  {promised}: {early:.2} {all:.2}");
        bad |= (early - promised).abs() > 5.0 || (all - promised).abs() > 1.0;
    }
    line += &format!("  total {:.2}, decisions/s {}", percent(world.busy, 10 * SECOND), world.decisions / 10);
    println!("{line}");
    assert!(!bad, "{line}");
    world
}

#[test]
fn one_alone_gets_its_share() {
    for kernels in [SHORT, MIXED, LONG] {
        for cores in [1, 10, 30, 50, 90] {
            shares("alone", 1, vec![Tenant::new(cores, cores, kernels)]);
        }
    }
}

#[test]
fn several_get_theirs_and_little_is_lost() {
    for promised in [&[30, 70][..], &[10, 20, 70], &[25, 25, 25, 25]] {
        for kernels in [SHORT, MIXED, MOSTLY_SHORT, LONG] {
            let tenants = promised.iter().map(|cores| Tenant::new(*cores, *cores, kernels)).collect();
            let world = shares("together", 1, tenants);
            assert!(percent(world.busy, 10 * SECOND) >= 97.0);
        }
    }
}

#[test]
fn ten_with_long_kernels() {
    for seed in 1..4 {
        let world = shares("ten", seed, vec![Tenant::new(10, 10, MIXED); 10]);
        assert!(percent(world.busy, 10 * SECOND) >= 97.0);
    }
}

#[test]
fn shares_that_do_not_fill_the_gpu() {
    for kernels in [MIXED, MOSTLY_SHORT] {
        shares("30/30", 1, vec![Tenant::new(30, 30, kernels), Tenant::new(30, 30, kernels)]);
        shares("5/15/45", 1, [5, 15, 45].map(|cores| Tenant::new(cores, cores, kernels)).to_vec());
    }
}

#[test]
fn long_kernels_beside_short_ones() {
    for (first, second) in [(LONG, SHORT), (SHORT, MIXED)] {
        for (a, b) in [(30, 70), (10, 90), (70, 30)] {
            let world = shares("beside", 5, vec![Tenant::new(a, a, first), Tenant::new(b, b, second)]);
            assert!(percent(world.busy, 10 * SECOND) >= 97.0);
        }
    }
}

/// What each has of the GPU in percent over `span`, after `warm`.
fn percents(world: &mut World, warm: u64, span: u64) -> Vec<f64> {
    world.run(warm);
    let had = world.run(span);
    let all: Vec<f64> = had.iter().map(|it| percent(*it, span)).collect();
    println!("{all:.2?}, idle at most {} us, {} decisions", world.longest_idle / 1000, world.decisions);
    all
}

#[test]
fn a_ceiling_is_reached_beside_an_idle_neighbour_and_not_passed() {
    for kernels in [SHORT, MIXED] {
        let idle = Tenant::new(80, 100, kernels).habit(Habit::From(3600 * SECOND));
        let mut world = World::new(1, vec![Tenant::new(20, 50, kernels), idle]);
        let all = percents(&mut world, 0, 10 * SECOND);
        assert!((all[0] - 50.0).abs() < 1.0, "{all:?}");
    }
}

#[test]
fn a_neighbour_that_comes_leaves_the_elastic_one_its_promise() {
    for kernels in [MOSTLY_SHORT, MIXED] {
        let mut world = World::new(1, vec![Tenant::new(20, 50, kernels), Tenant::new(80, 100, kernels)]);
        let all = percents(&mut world, SECOND, 10 * SECOND);
        assert!((all[0] - 20.0).abs() < 1.0 && (all[1] - 80.0).abs() < 1.0, "{all:?}");
    }
}

#[test]
fn idle_time_is_lent_by_weight() {
    let [a, b] = [10, 30].map(|cores| Tenant::new(cores, 100, MOSTLY_SHORT));
    let mut world = World::new(1, vec![a, b]);
    let all = percents(&mut world, SECOND, 10 * SECOND);
    assert!((all[0] - 25.0).abs() < 1.5 && (all[1] - 75.0).abs() < 1.5, "{all:?}");
}

#[test]
fn those_without_a_promise_share_what_is_left() {
    let free = || Tenant::new(0, 100, MOSTLY_SHORT);
    let mut world = World::new(1, vec![free(), Tenant::new(40, 40, MOSTLY_SHORT), free()]);
    let all = percents(&mut world, SECOND, 10 * SECOND);
    assert!(
        (all[1] - 40.0).abs() < 1.0 && (all[0] - 30.0).abs() < 1.0 && (all[2] - 30.0).abs() < 1.0,
        "{all:?}"
    );
}

/// A newcomer to lent time has no arrears to collect.
#[test]
fn who_comes_late_does_not_get_the_past() {
    let free = || Tenant::new(0, 100, MOSTLY_SHORT);
    let mut world = World::new(1, vec![free(), free().habit(Habit::From(20 * SECOND))]);
    let all = percents(&mut world, 21 * SECOND, 2 * SECOND);
    assert!((all[0] - 50.0).abs() < 3.0, "{all:?}");
}

#[test]
fn alone_without_a_limit_the_turn_is_never_closed() {
    for (cores, ceiling) in [(100, 100), (30, 100), (0, 100)] {
        let mut world = World::new(1, vec![Tenant::new(cores, ceiling, MIXED)]);
        let all = percents(&mut world, 100 * MILLI, 10 * SECOND);
        // Costs are learned a little wrong: what is charged too much is not used.
        assert!(all[0] > 99.4, "{all:?}");
        assert!(world.longest_idle < MILLI, "{}", world.longest_idle);
        assert!(world.orders.iter().all(|(_, order)| order.close.is_none()));
        assert!(world.decisions < 10 * 700);
    }
}

/// Where processors are scarce, who is called wakes up late, and some of the GPU's time is lost. It is lost to all alike: a small
/// share is not called in vain again and again.
#[test]
fn on_a_machine_that_wakes_them_late_shares_are_kept_in_proportion() {
    for (soonest, latest) in [(0, 3 * MILLI), (0, 6 * MILLI), (2 * MILLI, 6 * MILLI), (8 * MILLI, 15 * MILLI)]
    {
        for (kernels, small) in [(SHORT, 30), (MOSTLY_SHORT, 30), (SHORT, 10), (MOSTLY_SHORT, 10)] {
            let tenants =
                [small, 100 - small].map(|cores| Tenant::new(cores, cores, kernels).wakes(soonest, latest));
            let all = percents(&mut World::new(1, tenants.to_vec()), SECOND, 10 * SECOND);
            let part = 100.0 * all[0] / (all[0] + all[1]) / f64::from(small);
            assert!((0.88..1.05).contains(&part), "{soonest} {latest} {small}: {all:?}, {part}");
            // What is lost at each handing over is little against a turn.
            assert!(all[0] + all[1] > 60.0, "{soonest} {latest} {small}: {all:?}");
        }
    }
}

/// Who takes its time pays for it: also if that is meant to keep others waiting.
#[test]
fn one_that_wakes_up_late_takes_nothing_from_others() {
    for late in [MILLI, 3 * MILLI, 8 * MILLI, 15 * MILLI, 60 * MILLI] {
        for (cores, ceiling) in [(30, 30), (30, 100), (0, 100)] {
            let slow = Tenant::new(cores, ceiling, MOSTLY_SHORT).wakes(late, late + 1).priority(1);
            let mut world = World::new(1, vec![slow, Tenant::new(70, 70, MOSTLY_SHORT)]);
            let all = percents(&mut world, SECOND, 10 * SECOND);
            assert!(all[1] > 68.0, "{late} {cores} {ceiling}: {all:?}");
        }
    }
}

/// The owner of lent time comes back: its first turn within 100 ms, its share from then on.
#[test]
fn lent_time_is_returned_at_once() {
    for kernels in [SHORT, MIXED, LONG] {
        for seed in 1..6 {
            let owner = Tenant::new(80, 80, kernels).habit(Habit::From(2 * SECOND));
            let mut world = World::new(seed, vec![Tenant::new(20, 100, kernels), owner]);
            let alone = percents(&mut world, SECOND, SECOND);
            assert!(alone[0] > 99.0);
            let back = percents(&mut world, 100 * MILLI, 5 * SECOND);
            assert!(world.tenant(1).first_wait.unwrap() < 60 * MILLI, "{:?}", world.tenant(1).first_wait);
            assert!((back[1] - 80.0).abs() < 2.5, "{back:?}");
        }
    }
}

#[test]
fn bursts_beside_a_steady_one() {
    // Half of its promise is what the bursts need; the steady one has the rest, lent.
    let bursty = Tenant::new(50, 50, MOSTLY_SHORT).habit(Habit::Bursts(8 * MILLI, 24 * MILLI));
    let mut world = World::new(1, vec![bursty, Tenant::new(50, 100, MOSTLY_SHORT)]);
    let all = percents(&mut world, SECOND, 10 * SECOND);
    assert!(all[0] > 14.0, "{all:?}");
    assert!(all[0] + all[1] > 97.0, "{all:?}");
    assert!(world.tenant(0).longest_wait < 40 * MILLI);
}

/// Who waits for each of its kernels loses no turn for the moments in between.
#[test]
fn one_that_synchronises_beside_a_steady_one() {
    let polite = Tenant::new(50, 50, &[200 * MICRO]).habit(Habit::Synchronises(20 * MICRO));
    let mut world = World::new(1, vec![polite, Tenant::new(50, 50, MOSTLY_SHORT)]);
    let all = percents(&mut world, SECOND, 10 * SECOND);
    assert!(all[0] > 36.0 && (all[1] - 50.0).abs() < 1.5, "{all:?}");
}

/// Rare small requests cost the saturating neighbour little more than what they need.
#[test]
fn small_requests_beside_a_steady_one() {
    let small = Tenant::new(30, 30, &[200 * MICRO]).habit(Habit::Synchronises(5 * MILLI));
    let mut world = World::new(1, vec![small, Tenant::new(70, 100, MOSTLY_SHORT)]);
    let all = percents(&mut world, SECOND, 10 * SECOND);
    assert!(all[0] + all[1] > 97.0, "{all:?}");
    assert!(world.tenant(0).longest_wait < 40 * MILLI);
}

#[test]
fn who_holds_the_gpu_without_using_it_pays() {
    // A tenth of the time of its turns is used; its neighbour's promise is kept all the same.
    let dribbler = Tenant::new(30, 30, &[30 * MICRO]).habit(Habit::Synchronises(270 * MICRO));
    let mut world = World::new(1, vec![dribbler, Tenant::new(70, 70, MOSTLY_SHORT)]);
    let all = percents(&mut world, SECOND, 10 * SECOND);
    assert!(all[1] > 68.0, "{all:?}");
}

#[test]
fn lies_about_the_end_of_work_help_nobody() {
    for word in [Word::NeverDrained(3600 * SECOND), Word::NeverDrained(50 * MILLI), Word::AlwaysDrained] {
        let liar = Tenant::new(30, 30, MIXED).word(word);
        let mut world = World::new(1, vec![liar, Tenant::new(70, 70, MIXED)]);
        let all = percents(&mut world, SECOND, 10 * SECOND);
        assert!(all[1] > 67.0, "{word:?} {all:?}");
        assert!(all[0] < 32.0, "{word:?} {all:?}");
    }
}

#[test]
fn one_that_never_comes_stops_nobody() {
    for (cores, ceiling) in [(30, 30), (30, 100), (0, 100)] {
        let stopped = Tenant::new(cores, ceiling, SHORT).habit(Habit::Stopped);
        let mut world = World::new(1, vec![stopped, Tenant::new(70, 100, MOSTLY_SHORT)]);
        let all = percents(&mut world, SECOND, 10 * SECOND);
        assert!(all[1] > 97.0, "{all:?}");
    }
}

#[test]
fn priority_goes_first_and_takes_no_promise() {
    // Of lent time the higher has all...
    let [low, high] = [1, 2].map(|it| Tenant::new(20, 100, MOSTLY_SHORT).priority(it));
    let mut world = World::new(1, vec![low, high]);
    let all = percents(&mut world, SECOND, 10 * SECOND);
    assert!((all[0] - 20.0).abs() < 1.5 && all[1] > 77.0, "{all:?}");
    // ...and of promised time each has its own.
    let [low, high] = [1, 2].map(|it| Tenant::new(50, 50, MIXED).priority(it));
    let mut world = World::new(1, vec![low, high]);
    let all = percents(&mut world, SECOND, 10 * SECOND);
    assert!((all[0] - 50.0).abs() < 1.0 && (all[1] - 50.0).abs() < 1.0, "{all:?}");
}

#[test]
fn a_change_is_felt_within_100_ms() {
    for kernels in [SHORT, MOSTLY_SHORT] {
        let mut world = World::new(1, vec![Tenant::new(80, 80, kernels)]);
        world.run(2 * SECOND);
        world.tenant(0).view.cores = 20 * PERCENT;
        world.tenant(0).view.ceiling = 20 * PERCENT;
        let after = percents(&mut world, 100 * MILLI, 500 * MILLI);
        assert!((after[0] - 20.0).abs() < 3.0, "{after:?}");
        world.tenant(0).view.cores = 90 * PERCENT;
        world.tenant(0).view.ceiling = 90 * PERCENT;
        let after = percents(&mut world, 100 * MILLI, 500 * MILLI);
        assert!((after[0] - 90.0).abs() < 3.0, "{after:?}");
        world.tenant(0).view.ceiling = WHOLE_GPU;
        let after = percents(&mut world, 100 * MILLI, 500 * MILLI);
        assert!(after[0] > 99.0, "{after:?}");
    }
}

#[test]
fn a_long_kernel_is_paid_off() {
    let mut world = World::new(1, vec![Tenant::new(20, 20, &[400 * MILLI]), Tenant::new(80, 80, MIXED)]);
    let all = percents(&mut world, 4 * SECOND, 40 * SECOND);
    assert!((all[0] - 20.0).abs() < 1.5 && (all[1] - 80.0).abs() < 1.5, "{all:?}");
}

#[test]
fn they_come_and_go() {
    let mut world = World::new(1, vec![Tenant::new(30, 30, MIXED)]);
    world.run(SECOND);
    let second = world.join(Tenant::new(70, 70, MIXED));
    let all = percents(&mut world, 100 * MILLI, 2 * SECOND);
    assert!((all[0] - 30.0).abs() < 2.0 && (all[1] - 70.0).abs() < 2.0, "{all:?}");
    // It goes in the middle of its turn, more often than not.
    assert!(world.leave(second).is_some());
    world.join(Tenant::new(60, 60, MOSTLY_SHORT));
    let all = percents(&mut world, 100 * MILLI, 2 * SECOND);
    assert!((all[0] - 30.0).abs() < 2.0 && (all[2] - 60.0).abs() < 2.0, "{all:?}");
    assert!(world.leave(0).is_some());
    let all = percents(&mut world, 100 * MILLI, 2 * SECOND);
    assert!((all[2] - 60.0).abs() < 2.0, "{all:?}");
}

#[test]
fn a_counter_that_jumps_is_noted_and_does_no_harm() {
    let mut world = World::new(1, vec![Tenant::new(30, 30, MOSTLY_SHORT), Tenant::new(70, 70, MOSTLY_SHORT)]);
    world.run(SECOND);
    for _ in 0..2 {
        let spent = world.tenant(0).view.spent;
        world.tenant(0).view.spent = spent.wrapping_sub(5 * SECOND);
        world.run(100 * MILLI);
    }
    let all = percents(&mut world, 100 * MILLI, 2 * SECOND);
    assert_eq!((world.scheduler.anomalies(0).backwards, world.scheduler.anomalies(1).backwards), (2, 0));
    assert!((all[1] - 70.0).abs() < 2.0, "{all:?}");
    world.tenant(0).view.spent = 1 << 62;
    let all = percents(&mut world, SECOND, 2 * SECOND);
    assert_eq!(world.scheduler.anomalies(0).leaps, 1);
    assert!((all[1] - 70.0).abs() < 2.0, "{all:?}");
    // Ten seconds of debt, and not more, at three tenths of the time.
    let all = percents(&mut world, 32 * SECOND, 2 * SECOND);
    assert!((all[0] - 30.0).abs() < 2.0, "{all:?}");
}

/// Who claims to have used more lent time than has passed puts nobody else behind: not those who come and go either.
#[test]
fn lent_time_cannot_be_forged_away() {
    for spent in [Lie::None, Lie::Extremes, Lie::Anything, Lie::Always(0), Lie::Part(100)] {
        for seed in 1..4 {
            let free = || Tenant::new(0, 100, MOSTLY_SHORT);
            let bursty = free().habit(Habit::Bursts(8 * MILLI, 4 * MILLI));
            let forger = free().word(Word::Forged { spent, busy_until: Lie::None, waiting: None });
            let mut world = World::new(seed, vec![free(), bursty, forger]);
            let all = percents(&mut world, SECOND, 10 * SECOND);
            // It may waste its own third.
            assert!(all[0] > 30.0 && all[1] > 15.0, "{spent:?} {all:?}");
        }
    }
}

/// More is promised than there is: everybody has less, by its weight.
#[test]
fn promises_beyond_the_gpu_shrink_together() {
    let mut world = World::new(1, [90, 60].map(|cores| Tenant::new(cores, cores, MOSTLY_SHORT)).to_vec());
    let all = percents(&mut world, 2 * SECOND, 10 * SECOND);
    assert!((all[0] - 60.0).abs() < 2.0 && (all[1] - 40.0).abs() < 2.0, "{all:?}");
}

/// Two processes of one container that each think they have the GPU alone do not run into the next one's turn: not
/// when that has been seen for a while.
#[test]
fn processes_of_one_container_are_added_up() {
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
        if round >= 40 && now - start + tuning::HANDOVER_LEAD < last {
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

/// How much of its promise a steady one of the lowest priority gets beside others, at least. Over so long that one turn more or
/// less does not count.
fn beside(others: Vec<Tenant>, cores: u32) -> f64 {
    let kept = (1..4).map(|seed| {
        let mut all = vec![Tenant::new(cores, cores, &[50 * MICRO, 300 * MICRO])];
        all.extend(others.clone());
        percents(&mut World::new(seed, all), SECOND, 20 * SECOND)[0] / f64::from(cores)
    });
    kept.fold(f64::MAX, f64::min)
}

/// Says that work will run, has all wait for it, and says afterwards that there was none: again and again, in front of
/// others because of its priority.
#[test]
fn who_takes_back_what_it_was_charged_has_paid_for_the_wait() {
    for work in [300 * MICRO, 5 * MILLI, 20 * MILLI] {
        for (priority, accomplice) in [(0, 1), (1, 1), (1, 7)] {
            let mut forger = Tenant::new(41, 41, SHORT)
                .habit(Habit::Stopped)
                .priority(priority)
                .word(Word::Forged { spent: Lie::Extremes, busy_until: Lie::Anything, waiting: Some(true) });
            forger.view.spent = work;
            let other = Tenant::new(accomplice, accomplice, SHORT)
                .habit(Habit::Synchronises(10 * MICRO))
                .priority(priority)
                .word(Word::Forged { spent: Lie::None, busy_until: Lie::Always(0), waiting: None });
            let kept = beside(vec![forger, other], 5);
            assert!(kept > 0.97, "{work} {priority} {accomplice}: {kept}");
        }
    }
}

/// A turn that costs next to nothing, and then the other's: both hold the GPU and hardly use it. Who goes first by its
/// priority need not even lie for that.
#[test]
fn two_that_pass_the_turn_to_each_other_keep_nobody_out() {
    let polite = || Tenant::new(20, 20, &[10 * MICRO]).habit(Habit::Synchronises(60 * MICRO)).priority(1);
    let forges = |spent, busy_until, waiting| Word::Forged { spent, busy_until, waiting };
    let empty = forges(Lie::Extremes, Lie::Anything, Some(true));
    for (name, tenant) in [
        ("honest", polite()),
        ("never at work", polite().word(forges(Lie::None, Lie::Always(0), None))),
        ("hardly charged", polite().word(forges(Lie::Part(10), Lie::Always(0), None))),
        ("nothing but words", polite().habit(Habit::Stopped).word(empty)),
    ] {
        for cores in [5, 50] {
            let kept = beside(vec![tenant.clone(), tenant.clone()], cores);
            assert!(kept > 0.97, "{name}: {kept} of {cores}");
        }
    }
}

/// A container can make its own words unreadable, and readable again. It has its debt afterwards.
#[test]
fn nobody_loses_its_debt_by_hiding() {
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
    // Two milliseconds have passed, a tenth of which is its own.
    assert_eq!(scheduler.credit(0) - debt, 200_000);
    scheduler.vacate(0);
    scheduler.decide(SECOND + 4 * MILLI, &[Some(spent), Some(share)]);
    assert!(scheduler.credit(0) > 0, "somebody else has no debt");
}
