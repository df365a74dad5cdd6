//! Strategies for random clusters and asks, and helpers for the properties.

use partage_core::ledger::{Ledger, LedgerFinding, LedgerTime};
use partage_core::model::*;
use partage_core::place::{ClusterCapacity, Decision, GpuAllocation, HostUsage, PolicyEngine};
use proptest::collection::vec;
use proptest::prelude::*;

pub(crate) fn nodes() -> impl Strategy<Value = Vec<Node>> {
    let gpu = (prop_oneof![Just(16u64), Just(40), Just(80)], prop::bool::weighted(0.1));
    let node = (
        vec(gpu, 0..5),
        prop_oneof![Just(100u32), Just(150)],
        prop::option::of(1u32..4),
        prop::option::of(1000u64..64_000),
    );
    vec(node, 1..5).prop_map(|nodes| {
        type NodeParameters = (Vec<(u64, bool)>, u32, Option<u32>, Option<u64>);
        let build = |(at, (gpus, overcommit, max_shares, cpu)): (usize, NodeParameters)| {
            let gpus = gpus.into_iter().enumerate().map(|(index, (gib, withheld))| Gpu {
                uuid: format!("GPU-{at}-{index}").into(),
                minor: index as u32,
                model: format!("M{gib}"),
                memory_bytes: Bytes::gib(gib).unwrap(),
                numa: Some((index / 2) as u32),
                pci: None,
                withheld: withheld.then(|| "XID 79".to_string()),
            });
            let mut node = Node::new(format!("node-{at}"), gpus.collect());
            node.memory_overcommit_percent = Overcommit::percent(overcommit).unwrap();
            node.max_shares_per_gpu = max_shares;
            node.cpu_milli = cpu.map(MilliCpu);
            node
        };
        nodes.into_iter().enumerate().map(build).collect()
    })
}

pub(crate) fn wants() -> impl Strategy<Value = WantedGpus> {
    let memory = prop_oneof![
        1 => Just(MemoryAsk::Unlimited),
        1 => Just(MemoryAsk::All),
        4 => (1u64..90).prop_map(|gib| MemoryAsk::Exactly(Bytes::gib(gib).unwrap())),
        1 => (1u32..=100).prop_map(MemoryAsk::Percent),
    ];
    let cores = prop_oneof![
        Just(CoresAsk::Uncounted),
        (1u32..=100).prop_map(|percent| CoresAsk::Exactly(Cores::percent(percent).unwrap())),
        (1u32..=25).prop_map(CoresAsk::Slots),
    ];
    (1u32..4, memory, cores, prop::bool::weighted(0.15)).prop_map(|(count, memory, cores, whole)| {
        // Slots are always one request, as in their dialect.
        let count = if matches!(cores, CoresAsk::Slots(_)) { 1 } else { count };
        WantedGpus { count, share: ShareAsk { memory, cores, whole, ceiling: None } }
    })
}

pub(crate) fn asks() -> impl Strategy<Value = PodAsk> {
    let role = prop_oneof![Just(ContainerRole::Init), Just(ContainerRole::Sidecar), Just(ContainerRole::App)];
    let colocation = prop_oneof![4 => Just(Colocation::Anywhere), 1 => Just(Colocation::Preferred), 1 => Just(Colocation::Required)];
    let models = prop_oneof![4 => Just(vec![]), 1 => Just(vec!["M40".to_string()])];
    (vec((role, wants()), 0..4), colocation, models, 0u64..8000).prop_map(
        |(mut wants, colocation, models, cpu)| {
            // App containers are last in a spec.
            wants.sort_by_key(|(role, _)| *role == ContainerRole::App);
            let asks = wants.into_iter().enumerate().map(|(at, (role, want))| Ask {
                container: format!("c{at}").into(),
                role,
                want,
            });
            PodAsk {
                asks: asks.collect(),
                constraints: Constraints {
                    models: Selector { only: models, never: vec![] },
                    colocation,
                    ..Constraints::default()
                },
                cpu: MilliCpu(cpu),
                memory: Bytes::ZERO,
                oversubscribe: false,
                turns: TurnPreferences::default(),
            }
        },
    )
}

/// Grants on nodes and GPUs of [`nodes`], valid and invalid: unknown nodes and GPUs, shares larger than the card,
/// whole GPUs that are shared.
pub(crate) fn grants() -> impl Strategy<Value = PodGrant> {
    let memory = prop_oneof![
        1 => Just(None),
        6 => (1u64..30).prop_map(Some),
        2 => (30u64..90).prop_map(Some),
    ];
    let cores = prop::option::of(1u32..=60);
    let share = (0usize..5, memory, cores, prop::bool::weighted(0.1));
    let container = (vec(share, 1..3), prop::bool::weighted(0.2));
    (0usize..5, vec(container, 1..3)).prop_map(|(node, containers)| {
        let grants = containers.into_iter().enumerate().map(|(at, (mut shares, init))| {
            shares.sort_by_key(|(gpu, ..)| *gpu);
            shares.dedup_by_key(|(gpu, ..)| *gpu);
            let shares = shares.into_iter().map(|(gpu, gib, cores, whole)| Share {
                gpu: format!("GPU-{node}-{gpu}").into(),
                memory_bytes: gib.and_then(Bytes::gib),
                cores: cores.and_then(Cores::percent),
                ceiling: None,
                whole,
            });
            Grant { container: format!("c{at}").into(), init, shares: shares.collect() }
        });
        PodGrant { node: format!("node-{node}").into(), grants: grants.collect() }
    })
}

pub(crate) fn policies() -> impl Strategy<Value = PlacementPolicy> {
    prop::sample::select(PlacementPolicy::ALL.to_vec())
}

pub(crate) fn id(pod: usize) -> PodId {
    PodId { uid: format!("uid-{pod}").into(), namespace: "ns".into(), name: format!("pod-{pod}").into() }
}

/// Returns a policy that has learned from enough asks like this one, and from larger ones.
pub(crate) fn trained_policy(
    policy: PlacementPolicy,
    ask: &PodAsk,
    cluster: &ClusterCapacity,
) -> PolicyEngine {
    let mut larger = ask.clone();
    for ask in &mut larger.asks {
        (ask.want.count, ask.want.share.whole) = (2, true);
    }
    let mut policies = PolicyEngine::new(policy);
    policies.learn([ask, &larger].into_iter().cycle().take(60), cluster);
    policies
}

pub(crate) fn decide(ledger: &mut Ledger, ask: &PodAsk, policy: PlacementPolicy) -> Option<Decision> {
    let policies = trained_policy(policy, ask, ledger.cluster());
    ledger.best(&policies, ask)
}

pub(crate) fn place(ledger: &mut Ledger, pod: usize, ask: &PodAsk, policy: PlacementPolicy) -> bool {
    let Some(decision) = decide(ledger, ask, policy) else { return false };
    ledger.reserve(id(pod), ask, &decision, LedgerTime(10)).expect("a fresh decision is never refused");
    true
}

pub(crate) fn used(cluster: &ClusterCapacity) -> Vec<(Vec<GpuAllocation>, HostUsage)> {
    cluster.nodes().map(|(_, r)| (r.gpus.iter().map(|g| g.used).collect(), r.host_used)).collect()
}

/// Every limit of every GPU, recomputed from the grants alone.
pub(crate) fn within_capacity(ledger: &Ledger) -> Result<(), TestCaseError> {
    prop_assert_eq!(ledger.audit(), Vec::<LedgerFinding>::new());
    for (_, capacity) in ledger.cluster().nodes() {
        for (gpu, state) in capacity.node.gpus.iter().zip(&capacity.gpus) {
            let capacity_bytes = capacity.node.memory_overcommit_percent.of(gpu.memory_bytes).0;
            prop_assert!(state.used.memory <= capacity_bytes);
            prop_assert!(state.used.cores <= 100_000);
            prop_assert!(capacity.node.max_shares_per_gpu.is_none_or(|most| state.used.shares <= most));
            prop_assert!(state.used.limited == 0 || state.used.unlimited == 0);
            prop_assert!(state.used.whole == 0 || state.used.shares == 1);
            prop_assert!(gpu.withheld.is_none() || state.used.shares == 0);
        }
        if let Some(cpu) = capacity.node.cpu_milli {
            prop_assert!(capacity.host_used.cpu() <= cpu);
        }
    }
    Ok(())
}
