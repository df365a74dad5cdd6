//! Properties that hold for all containers, whatever they do and report.

use proptest::prelude::*;

use super::model::{LaunchPattern, Reporting, SimulatedTenant, Simulation};
use super::{
    ContenderView, HEARTBEAT_INTERVAL_NS, MICRO, MILLI, PERCENT, SchedulerDecision, TurnScheduler, WHOLE_GPU,
    tuning,
};
use crate::tests::fixed_cases;

const SECOND: u64 = 1_000 * MILLI;

fn arbitrary_view() -> impl Strategy<Value = ContenderView> {
    let number = || prop_oneof![Just(0), Just(u64::MAX), any::<u64>(), 0..100_000_000_000u64];
    let share = || prop_oneof![Just(0), Just(WHOLE_GPU), 0..=WHOLE_GPU, any::<u32>()];
    (share(), share(), any::<u32>(), any::<[bool; 3]>(), number(), number()).prop_map(
        |(cores, ceiling, priority, [low_latency, waiting, occupied], since, progress)| ContenderView {
            cores,
            ceiling,
            priority,
            low_latency,
            waiting,
            occupied,
            since,
            progress,
        },
    )
}

/// What happens before a decision.
#[derive(Clone, Debug)]
enum Change {
    Add { index: usize, container: u64, gpu: usize },
    Remove { index: usize },
    None,
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        3 => (0..6usize, 0..3u64, prop_oneof![0..3usize, any::<usize>()])
            .prop_map(|(index, container, gpu)| Change::Add { index, container, gpu }),
        1 => (0..8usize).prop_map(|index| Change::Remove { index }),
        8 => Just(Change::None),
    ]
}

fn tenant() -> impl Strategy<Value = SimulatedTenant> {
    let kernel = prop_oneof![20..200u64, 200..2_000u64, 2_000..20_000u64].prop_map(|micros| micros * MICRO);
    let pattern = prop_oneof![
        3 => Just(LaunchPattern::Saturates),
        1 => (10..500u64).prop_map(|micros| LaunchPattern::Synchronizes(micros * MICRO)),
        1 => (1..50u64, 1..100u64).prop_map(|(work, sleep)| LaunchPattern::Bursts(work * MILLI, sleep * MILLI)),
        1 => (0..1_500u64).prop_map(|millis| LaunchPattern::From(millis * MILLI)),
    ];
    let ceiling = prop_oneof![Just(0), 0..100u32, Just(100)];
    (1..60u32, ceiling, prop::collection::vec(kernel, 1..4), pattern, 0..3u32).prop_map(
        |(cores, ceiling, kernels, pattern, priority)| {
            SimulatedTenant::new(cores, ceiling.max(cores), &kernels).pattern(pattern).priority(priority)
        },
    )
}

/// Up to four containers whose guarantees fit the GPU.
fn tenants() -> impl Strategy<Value = Vec<SimulatedTenant>> {
    prop::collection::vec(tenant(), 1..5).prop_filter("guarantees fit the GPU", |all| {
        all.iter().map(|it| it.view.cores).sum::<u32>() <= WHOLE_GPU
    })
}

fn forged() -> impl Strategy<Value = Reporting> {
    // Hidden work is beyond what a scheduler can prevent, so nothing is forged that hides work.
    prop_oneof![
        (Just(Some(true)), any::<Option<bool>>())
            .prop_map(|(occupied, waiting)| Reporting::Forged { occupied, waiting }),
        any::<Option<bool>>().prop_map(|waiting| Reporting::Forged { occupied: None, waiting }),
    ]
}

fn longest_kernel(tenants: &[SimulatedTenant]) -> u64 {
    tenants.iter().flat_map(|it| &it.kernels).max().copied().unwrap_or(0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever is reported, and whenever: no panic, a next decision in time, gates of contenders that exist, bounded
    /// charges and bounded debt.
    #[test]
    fn arbitrary_views_yield_valid_decisions(steps in prop::collection::vec(
        (
            prop_oneof![0..10_000_000u64, any::<u64>()],
            change(),
            prop::collection::vec(prop::option::of(arbitrary_view()), 0..7),
        ),
        1..60,
    )) {
        let (mut scheduler, mut decision) = (TurnScheduler::new(), SchedulerDecision::default());
        let mut gpus: [Option<usize>; 8] = [None; 8];
        let mut now = 1u64;
        for (passed, change, views) in steps {
            match change {
                Change::Add { index, container, gpu } => {
                    scheduler.remove(index);
                    scheduler.add(index, container, gpu);
                    gpus[index] = Some(gpu.min(crate::MAX_GPUS - 1));
                }
                Change::Remove { index } => {
                    scheduler.remove(index);
                    gpus[index] = None;
                }
                Change::None => {}
            }
            let last = now;
            now = now.saturating_add(passed);
            scheduler.decide(now, &views, &mut decision);
            prop_assert!(decision.next <= now.saturating_add(HEARTBEAT_INTERVAL_NS));
            prop_assert!(decision.next > now || now == u64::MAX);
            prop_assert!(decision.gates.iter().all(|&(index, _)| gpus[index].is_some()));
            for gpu in 0..crate::MAX_GPUS {
                let on_it = (0..gpus.len()).filter(|&index| gpus[index] == Some(gpu));
                let charged: u64 = on_it.map(|index| scheduler.take_charge(index)).sum();
                prop_assert!(charged <= now - last, "{charged} in {}", now - last);
            }
            for index in 0..gpus.len() {
                prop_assert!(scheduler.run_ahead(index) <= tuning::MAX_RUN_AHEAD_NS);
                prop_assert!(scheduler.credit(index) <= i64::try_from(tuning::MAX_CREDIT_AGE_WAITING_NS).unwrap());
            }
        }
    }
}

proptest! {
    #![proptest_config(fixed_cases(24))]

    #[test]
    fn shares_hold_and_the_gpu_is_not_idle(seed in 1..u64::MAX, tenants in tenants()) {
        let span = 3 * SECOND;
        let all = tenants.clone();
        let mut simulation = Simulation::new(seed, tenants);
        let had = simulation.run(span);
        prop_assert!(simulation.overcharged < 10, "{} ns more were charged than passed", simulation.overcharged);
        // No container with an unlimited ceiling waits beside an idle GPU, except during a handover.
        let longest = longest_kernel(&all);
        let idle = simulation.gpus[0].longest_idle;
        prop_assert!(idle < 5 * MILLI, "idle for {idle} ns");
        // A turn may end with a kernel, and with the turn's worth of run-ahead.
        let deepest = tuning::MAX_DEBT_NS.max(tuning::MAX_DEBT_TURNS * 2 * (longest + tuning::MAX_OVERRUN_NS));
        prop_assert!(simulation.deepest_debt.unsigned_abs() <= deepest, "{}", simulation.deepest_debt);
        for (index, tenant) in all.iter().enumerate() {
            let most = u64::from(tenant.view.ceiling) * span / u64::from(WHOLE_GPU);
            // It starts with saved credit; its last turn may be on debt, and kernels are interleaved before turns begin.
            let slack = tuning::MAX_IDLE_CREDIT_NS + 4 * longest + 4 * tuning::MAX_GUARANTEED_TURN_NS + most / 20;
            prop_assert!(had[index] <= most + slack, "index {index} had {} of {most}", had[index]);
        }
    }

    /// Honest containers that saturate get their guarantees, whatever others do and report, and none waits for long.
    #[test]
    fn guarantees_are_kept(
        seed in 1..u64::MAX,
        cores in 5..60u32,
        others in prop::collection::vec((tenant(), prop_oneof![Just(Reporting::Honest), forged()]), 0..3),
    ) {
        prop_assume!(others.iter().map(|(it, _)| it.view.cores).sum::<u32>() + cores * PERCENT <= WHOLE_GPU);
        let span = 5 * SECOND;
        let mut all = vec![SimulatedTenant::new(cores, cores, &[50 * MICRO, 300 * MICRO])];
        let forgers = others.iter().filter(|(_, reporting)| *reporting != Reporting::Honest).count() as u64;
        all.extend(others.into_iter().map(|(tenant, reporting)| tenant.reporting(reporting)));
        let slack = 2 * tuning::MAX_GUARANTEED_TURN_NS + forgers * 2 * tuning::MAX_OVERRUN_NS + longest_kernel(&all);
        let mut simulation = Simulation::new(seed, all);
        let had = simulation.run(span)[0];
        prop_assert!(simulation.overcharged < 10);
        let guaranteed = span / 100 * u64::from(cores);
        // Each forger can make others wait for work that does not exist, until it is in debt for it.
        let tolerance = guaranteed / 20 * (1 + 2 * forgers);
        prop_assert!(had + slack + tolerance >= guaranteed, "had {had} of {guaranteed}");
        let waited = simulation.rank(0).longest_wait;
        prop_assert!(waited < 2 * SECOND * (1 + forgers), "waited {waited}");
    }

    /// Containers with equal weights have equal time, guaranteed or lent.
    #[test]
    fn equal_weights_have_equal_time(seed in 1..u64::MAX, count in 2..5u32, guaranteed in any::<bool>(), kernel in 20..3_000u64) {
        let cores = if guaranteed { 100 / count } else { 0 };
        let tenant = SimulatedTenant::new(cores, 100, &[kernel * MICRO]);
        let had = Simulation::new(seed, vec![tenant; count as usize]).run(5 * SECOND);
        let mean = had.iter().sum::<u64>() / u64::from(count);
        prop_assert!(mean * u64::from(count) > 95 * 5 * SECOND / 100, "{had:?}");
        prop_assert!(had.iter().all(|it| it.abs_diff(mean) < mean / 50 + tuning::MAX_GUARANTEED_TURN_NS), "{had:?}");
    }

    /// Jobs on random sets of GPUs, whose kernels spin until all ranks have begun, all make progress.
    #[test]
    fn gangs_make_progress(
        seed in 1..u64::MAX,
        sets in prop::collection::vec((1..16u32, 100..5_000u64, any::<bool>()), 2..4),
    ) {
        let cores = 100 / sets.len() as u32;
        let tenants = sets.iter().map(|&(set, kernel, hard)| {
            let gpus: Vec<usize> = (0..4).filter(|gpu| set >> gpu & 1 == 1).collect();
            let ceiling = if hard { cores } else { 100 };
            SimulatedTenant::new(cores, ceiling, &[kernel * MICRO]).collective(50 * MICRO).on(&gpus)
        });
        let mut simulation = Simulation::new(seed, tenants.collect());
        simulation.run(2 * SECOND);
        let before: Vec<u64> = simulation.ranks.iter().flatten().map(|it| it.steps).collect();
        simulation.run(2 * SECOND);
        for (rank, before) in simulation.ranks.iter().flatten().zip(before) {
            let kernel = sets[rank.tenant].1 * MICRO;
            let least = 2 * SECOND / kernel * u64::from(cores) / 100 / 100;
            prop_assert!(rank.steps - before >= least.max(1), "{} of {least} steps", rank.steps - before);
        }
    }
}
