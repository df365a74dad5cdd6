//! What holds whoever comes, whatever it does and says.

use proptest::prelude::*;

use super::model::{Habit, Lie, Tenant, Word, World};
use super::{
    ContainerView, HEARTBEAT_INTERVAL_NS, MICRO, MILLI, PERCENT, TurnDecision, TurnScheduler, WHOLE_GPU,
    tuning,
};
use crate::tests::same_cases;

/// Follows the gates as the orders open and close them.
#[derive(Debug, Default)]
struct Gates {
    open: Option<usize>,
}

impl Gates {
    fn follow(&mut self, order: &TurnDecision) -> Result<(), TestCaseError> {
        if let Some(index) = order.close {
            prop_assert_eq!(self.open, Some(index), "closes what is not open");
            self.open = None;
        }
        if let Some(open) = order.open {
            prop_assert!(self.open.is_none_or(|index| index == open.index), "two are open at once");
            self.open = Some(open.index);
        }
        Ok(())
    }
}

fn anything() -> impl Strategy<Value = ContainerView> {
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

fn tenant() -> impl Strategy<Value = Tenant> {
    let kernel = prop_oneof![20..200u64, 200..2_000u64, 2_000..20_000u64].prop_map(|micros| micros * MICRO);
    let habit = prop_oneof![
        3 => Just(Habit::Saturates),
        1 => (10..500u64).prop_map(|micros| Habit::Synchronises(micros * MICRO)),
        1 => (1..50u64, 1..100u64).prop_map(|(work, sleep)| Habit::Bursts(work * MILLI, sleep * MILLI)),
        1 => (0..1_500u64).prop_map(|millis| Habit::From(millis * MILLI)),
    ];
    let ceiling = prop_oneof![Just(0), 0..100u32, Just(100)];
    (1..60u32, ceiling, prop::collection::vec(kernel, 1..4), habit, 0..3u32).prop_map(
        |(cores, ceiling, kernels, habit, priority)| {
            Tenant::new(cores, ceiling.max(cores), &kernels).habit(habit).priority(priority)
        },
    )
}

fn lie() -> impl Strategy<Value = Lie> {
    prop_oneof![
        Just(Lie::None),
        Just(Lie::Anything),
        Just(Lie::Extremes),
        prop_oneof![Just(0), Just(u64::MAX), Just(i64::MAX as u64), any::<u64>()].prop_map(Lie::Always),
        prop_oneof![(1..1u64 << 32).prop_map(u64::wrapping_neg), any::<u64>()].prop_map(Lie::Off),
        (2..1_000u64).prop_map(Lie::Part),
    ]
}

fn forger() -> impl Strategy<Value = Tenant> {
    (tenant(), lie(), lie(), any::<Option<bool>>()).prop_map(|(tenant, spent, busy_until, waiting)| {
        // Work that is not charged is beyond what any scheduler can prevent: here words alone are tried.
        let tenant = if spent == Lie::None { tenant } else { tenant.habit(Habit::Stopped) };
        tenant.word(Word::Forged { spent, busy_until, waiting })
    })
}

/// Up to four whose promises fit the GPU.
fn tenants() -> impl Strategy<Value = Vec<Tenant>> {
    prop::collection::vec(tenant(), 1..5).prop_filter("no more is promised than there is", |all| {
        all.iter().map(|it| it.view.cores).sum::<u32>() <= WHOLE_GPU
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever is said: one turn at a time, for somebody who is there, and a time to look again.
    #[test]
    fn nonsense_does_no_harm(steps in prop::collection::vec(
        (prop_oneof![0..10_000_000u64, any::<u64>()], prop::collection::vec(prop::option::of(anything()), 0..5)),
        1..60,
    )) {
        let mut scheduler = TurnScheduler::new();
        let mut gates = Gates::default();
        let mut now = 1u64;
        for (passed, views) in steps {
            now = now.saturating_add(passed);
            if gates.open.is_some_and(|index| views.get(index).is_none_or(Option::is_none)) {
                gates.open = None;
            }
            let order = scheduler.decide(now, &views);
            gates.follow(&order)?;
            prop_assert_eq!(scheduler.holder(), gates.open);
            if let Some(open) = order.open {
                let view = views[open.index].unwrap();
                prop_assert!(open.allowed.wrapping_sub(view.spent) <= tuning::MAX_GUARANTEED_TURN);
            }
            prop_assert!(order.next >= now && order.next <= now.saturating_add(HEARTBEAT_INTERVAL_NS));
        }
    }
}

proptest! {
    #![proptest_config(same_cases(40))]

    #[test]
    fn shares_hold_and_time_is_used(seed in 1..u64::MAX, tenants in tenants()) {
        let span = 3_000 * MILLI;
        let all = tenants.clone();
        let mut world = World::new(seed, tenants);
        world.run(span);
        let mut gates = Gates::default();
        for (_, order) in &world.orders {
            gates.follow(order)?;
        }
        // Nobody with a ceiling of everything waits beside a GPU that has nothing to do, but for the moments of handing over.
        let longest = all.iter().flat_map(|it| &it.kernels).max().copied().unwrap_or(0);
        // A kernel whose length nobody knew is charged when it has run, and may look like one that will.
        prop_assert!(world.longest_idle < longest + tuning::MAX_GUARANTEED_TURN, "idle for {} us", world.longest_idle / 1000);
        // No more is charged than there is time, but for what is in flight and the first kernels of unknown length.
        let charged: u64 = world.tenants.iter().flatten().map(|it| it.view.spent).sum();
        prop_assert!(charged <= span + tuning::MAX_GUARANTEED_TURN + longest + span / 100 + 10 * MILLI, "charged {charged}");
        for (index, tenant) in all.iter().enumerate() {
            if tenant.view.ceiling != tenant.view.cores {
                continue;
            }
            let had: Vec<u64> =
                world.trace.iter().map(|milli| milli.get(index).copied().unwrap_or(0)).collect();
            let own = tenant.kernels.iter().max().copied().unwrap_or(0);
            let share = u64::from(tenant.view.cores) * MILLI / 100;
            // Others of a higher priority may keep it waiting; it catches up.
            let behind = if all.iter().any(|it| it.view.priority > tenant.view.priority) {
                tuning::MAX_CREDIT_AGE_WAITING / u64::from(WHOLE_GPU) * u64::from(tenant.view.cores)
            } else {
                0
            };
            // It comes with what it saved, or gathered while each of the others had a turn; and its last turn may be on debt.
            let waited = (tuning::MAX_GUARANTEED_TURN + longest) * (all.len() as u64 - 1);
            let gathered = (waited * u64::from(tenant.view.cores) / u64::from(WHOLE_GPU)).max(tuning::MAX_IDLE_CREDIT);
            for (start, window) in had.windows(1_000).enumerate() {
                let used: u64 = window.iter().sum();
                let most = share + own + longest + behind + gathered + tuning::MAX_GUARANTEED_TURN + share / 50;
                prop_assert!(used <= most, "index {index} had {used} of {most} in the second from {start} ms");
            }
        }
    }

    /// Whoever saturates gets what it was promised, whatever the others do and say.
    #[test]
    fn promises_are_kept(
        seed in 1..u64::MAX,
        cores in 5..60u32,
        others in prop::collection::vec((tenant(), prop_oneof![
            Just(Word::Honest), Just(Word::AlwaysDrained), (1..10_000u64).prop_map(|far| Word::NeverDrained(far * MILLI)),
        ]), 0..3),
    ) {
        prop_assume!(others.iter().map(|(it, _)| it.view.cores).sum::<u32>() + cores * PERCENT <= WHOLE_GPU);
        let span = 4_000 * MILLI;
        let mut all = vec![Tenant::new(cores, cores, &[50 * MICRO, 300 * MICRO])];
        all.extend(others.into_iter().map(|(tenant, word)| tenant.word(word)));
        let mut world = World::new(seed, all);
        let had = world.run(span)[0];
        let promised = span / 100 * u64::from(cores);
        // Three hundredths of it, and two turns at the edges.
        prop_assert!(had + 2 * tuning::MAX_GUARANTEED_TURN + promised / 33 >= promised, "had {had} of {promised}");
    }

    /// Whatever words somebody forges, who saturates beside it gets what it was promised.
    #[test]
    fn forged_words_take_nothing_from_others(
        seed in 1..u64::MAX,
        cores in 5..60u32,
        forgers in prop::collection::vec(forger(), 1..3),
    ) {
        prop_assume!(forgers.iter().map(|it| it.view.cores).sum::<u32>() + cores * PERCENT <= WHOLE_GPU);
        let span = 6_000 * MILLI;
        let count = forgers.len() as u64;
        let mut all = vec![Tenant::new(cores, cores, &[50 * MICRO, 300 * MICRO])];
        all.extend(forgers);
        let mut world = World::new(seed, all);
        let had = world.run(span)[0];
        let mut gates = Gates::default();
        for (_, order) in &world.orders {
            gates.follow(order)?;
        }
        let promised = span / 100 * u64::from(cores);
        // As with honest ones; and each can make all wait for work that never comes, as long as anybody can, before it is
        // in debt for it.
        let kept = (1 + count) * tuning::MAX_CREDIT_AGE_WAITING / 100 * u64::from(cores);
        prop_assert!(had + kept + 2 * tuning::MAX_GUARANTEED_TURN + promised / 33 >= promised, "had {had} of {promised}");
    }
}
