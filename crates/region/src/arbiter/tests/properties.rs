//! Properties that hold for all containers, whatever they do and report.

use proptest::prelude::*;

use super::model::{ForgedValue, LaunchPattern, Reporting, SimulatedTenant, Simulation};
use super::{
    ContainerView, HEARTBEAT_INTERVAL_NS, MICRO, MILLI, PERCENT, TurnDecision, TurnScheduler, WHOLE_GPU,
    tuning,
};
use crate::tests::fixed_cases;

/// Follows the turns as decisions open and close them.
#[derive(Debug, Default)]
struct TurnTracker {
    open: Option<usize>,
}

impl TurnTracker {
    fn follow(&mut self, order: &TurnDecision) -> Result<(), TestCaseError> {
        if let Some(index) = order.close {
            prop_assert_eq!(self.open, Some(index), "closes a turn that is not open");
            self.open = None;
        }
        if let Some(open) = order.open {
            prop_assert!(self.open.is_none_or(|index| index == open.index), "two turns are open at once");
            self.open = Some(open.index);
        }
        Ok(())
    }
}

fn arbitrary_view() -> impl Strategy<Value = ContainerView> {
    let number = prop_oneof![Just(0), Just(u64::MAX), any::<u64>(), 0..100_000_000_000u64];
    let share = || prop_oneof![Just(0), Just(WHOLE_GPU), 0..=WHOLE_GPU, any::<u32>()];
    (share(), share(), any::<u32>(), any::<bool>(), number.clone(), number).prop_map(
        |(cores, ceiling, priority, waiting, busy_until, spent)| ContainerView {
            cores,
            ceiling,
            priority,
            waiting,
            busy_until,
            spent,
        },
    )
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

fn forged_value() -> impl Strategy<Value = ForgedValue> {
    prop_oneof![
        Just(ForgedValue::None),
        Just(ForgedValue::Anything),
        Just(ForgedValue::Extremes),
        prop_oneof![Just(0), Just(u64::MAX), Just(i64::MAX as u64), any::<u64>()]
            .prop_map(ForgedValue::Always),
        prop_oneof![(1..1u64 << 32).prop_map(u64::wrapping_neg), any::<u64>()].prop_map(ForgedValue::Off),
        (2..1_000u64).prop_map(ForgedValue::Part),
    ]
}

fn forger() -> impl Strategy<Value = SimulatedTenant> {
    (tenant(), forged_value(), forged_value(), any::<Option<bool>>()).prop_map(
        |(tenant, spent, busy_until, waiting)| {
            // Work that is not charged is beyond what a scheduler can prevent: here only reports are tested.
            let tenant =
                if spent == ForgedValue::None { tenant } else { tenant.pattern(LaunchPattern::Stopped) };
            tenant.reporting(Reporting::Forged { spent, busy_until, waiting })
        },
    )
}

/// Up to four containers whose guarantees fit the GPU.
fn tenants() -> impl Strategy<Value = Vec<SimulatedTenant>> {
    prop::collection::vec(tenant(), 1..5).prop_filter("guarantees fit the GPU", |all| {
        all.iter().map(|it| it.view.cores).sum::<u32>() <= WHOLE_GPU
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever is reported: one turn at a time, for a container that exists, and a time of the next decision.
    #[test]
    fn arbitrary_views_yield_valid_decisions(steps in prop::collection::vec(
        (prop_oneof![0..10_000_000u64, any::<u64>()], prop::collection::vec(prop::option::of(arbitrary_view()), 0..5)),
        1..60,
    )) {
        let mut scheduler = TurnScheduler::new();
        let mut tracker = TurnTracker::default();
        let mut now = 1u64;
        for (passed, views) in steps {
            now = now.saturating_add(passed);
            if tracker.open.is_some_and(|index| views.get(index).is_none_or(Option::is_none)) {
                tracker.open = None;
            }
            let order = scheduler.decide(now, &views);
            tracker.follow(&order)?;
            prop_assert_eq!(scheduler.holder(), tracker.open);
            if let Some(open) = order.open {
                let view = views[open.index].unwrap();
                prop_assert!(open.allowed.wrapping_sub(view.spent) <= tuning::MAX_GUARANTEED_TURN_NS);
            }
            prop_assert!(order.next >= now && order.next <= now.saturating_add(HEARTBEAT_INTERVAL_NS));
        }
    }
}

proptest! {
    #![proptest_config(fixed_cases(40))]

    #[test]
    fn shares_hold_and_the_gpu_is_not_idle(seed in 1..u64::MAX, tenants in tenants()) {
        let span = 3_000 * MILLI;
        let all = tenants.clone();
        let mut simulation = Simulation::new(seed, tenants);
        simulation.run(span);
        let mut tracker = TurnTracker::default();
        for (_, order) in &simulation.orders {
            tracker.follow(order)?;
        }
        // No container with an unlimited ceiling waits beside an idle GPU, except during a handover.
        let longest = all.iter().flat_map(|it| &it.kernels).max().copied().unwrap_or(0);
        // A kernel of unknown length is charged when it has run, and may look like one that will run.
        prop_assert!(simulation.longest_idle < longest + tuning::MAX_GUARANTEED_TURN_NS, "idle for {} us", simulation.longest_idle / 1000);
        // No more is charged than time has passed, except for work in flight and the first kernels of unknown length.
        let charged: u64 = simulation.tenants.iter().flatten().map(|it| it.view.spent).sum();
        prop_assert!(charged <= span + tuning::MAX_GUARANTEED_TURN_NS + longest + span / 100 + 10 * MILLI, "charged {charged}");
        for (index, tenant) in all.iter().enumerate() {
            if tenant.view.ceiling != tenant.view.cores {
                continue;
            }
            let had: Vec<u64> =
                simulation.trace.iter().map(|milli| milli.get(index).copied().unwrap_or(0)).collect();
            let own = tenant.kernels.iter().max().copied().unwrap_or(0);
            let share = u64::from(tenant.view.cores) * MILLI / 100;
            // Containers of a higher priority may keep it waiting; it catches up.
            let behind = if all.iter().any(|it| it.view.priority > tenant.view.priority) {
                tuning::MAX_CREDIT_AGE_WAITING_NS / u64::from(WHOLE_GPU) * u64::from(tenant.view.cores)
            } else {
                0
            };
            // It starts with saved credit, or with credit that accrued while each of the others had a turn; its last
            // turn may be on debt.
            let waited = (tuning::MAX_GUARANTEED_TURN_NS + longest) * (all.len() as u64 - 1);
            let gathered = (waited * u64::from(tenant.view.cores) / u64::from(WHOLE_GPU)).max(tuning::MAX_IDLE_CREDIT_NS);
            for (start, window) in had.windows(1_000).enumerate() {
                let used: u64 = window.iter().sum();
                let most = share + own + longest + behind + gathered + tuning::MAX_GUARANTEED_TURN_NS + share / 50;
                prop_assert!(used <= most, "index {index} had {used} of {most} in the second from {start} ms");
            }
        }
    }

    /// A container that saturates gets its guarantee, whatever the others do and report.
    #[test]
    fn guarantees_are_kept(
        seed in 1..u64::MAX,
        cores in 5..60u32,
        others in prop::collection::vec((tenant(), prop_oneof![
            Just(Reporting::Honest), Just(Reporting::AlwaysDrained), (1..10_000u64).prop_map(|far| Reporting::NeverDrained(far * MILLI)),
        ]), 0..3),
    ) {
        prop_assume!(others.iter().map(|(it, _)| it.view.cores).sum::<u32>() + cores * PERCENT <= WHOLE_GPU);
        let span = 4_000 * MILLI;
        let mut all = vec![SimulatedTenant::new(cores, cores, &[50 * MICRO, 300 * MICRO])];
        all.extend(others.into_iter().map(|(tenant, word)| tenant.reporting(word)));
        let mut simulation = Simulation::new(seed, all);
        let had = simulation.run(span)[0];
        let guaranteed = span / 100 * u64::from(cores);
        // Tolerance: three percent, and two turns at the edges.
        prop_assert!(had + 2 * tuning::MAX_GUARANTEED_TURN_NS + guaranteed / 33 >= guaranteed, "had {had} of {guaranteed}");
    }

    /// Whatever other containers forge, a container that saturates gets its guarantee.
    #[test]
    fn forged_reports_take_nothing_from_others(
        seed in 1..u64::MAX,
        cores in 5..60u32,
        forgers in prop::collection::vec(forger(), 1..3),
    ) {
        prop_assume!(forgers.iter().map(|it| it.view.cores).sum::<u32>() + cores * PERCENT <= WHOLE_GPU);
        let span = 6_000 * MILLI;
        let count = forgers.len() as u64;
        let mut all = vec![SimulatedTenant::new(cores, cores, &[50 * MICRO, 300 * MICRO])];
        all.extend(forgers);
        let mut simulation = Simulation::new(seed, all);
        let had = simulation.run(span)[0];
        let mut tracker = TurnTracker::default();
        for (_, order) in &simulation.orders {
            tracker.follow(order)?;
        }
        let guaranteed = span / 100 * u64::from(cores);
        // As with honest containers; in addition, each forger can make all others wait for work that never comes, for
        // as long as any container can, before it is in debt for it.
        let kept = (1 + count) * tuning::MAX_CREDIT_AGE_WAITING_NS / 100 * u64::from(cores);
        prop_assert!(had + kept + 2 * tuning::MAX_GUARANTEED_TURN_NS + guaranteed / 33 >= guaranteed, "had {had} of {guaranteed}");
    }
}
