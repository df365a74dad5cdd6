//! The allocator: capacity, grants, rebuilds, explanations.

use crate::strategies::*;
use partage_core::explain::{explain, why_not};
use partage_core::ledger::{Ledger, LedgerFinding, LedgerTime};
use partage_core::model::*;
use partage_core::place::policies::StatelessPolicy;
use partage_core::place::{
    ClusterCapacity, GpuCapacity, HostUsage, NodeIndex, PolicyEngine, PreparedAsk, gpu_order,
};
use proptest::collection::vec;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn never_over_capacity_and_release_restores(
        nodes in nodes(),
        asks in vec(asks(), 1..25),
        policy in policies(),
        gone in vec(any::<prop::sample::Index>(), 0..15),
    ) {
        let mut ledger = Ledger::new(nodes);
        let empty = used(ledger.cluster());
        for (pod, ask) in asks.iter().enumerate() {
            let before = used(ledger.cluster());
            if place(&mut ledger, pod, ask, policy) {
                within_capacity(&ledger)?;
                // Releasing restores the state exactly. Then the pod is placed again and stays.
                let held = ledger.release(&id(pod).uid).unwrap();
                prop_assert_eq!(used(ledger.cluster()), before);
                ledger.confirm(held.pod, held.grant, held.host);
                within_capacity(&ledger)?;
            }
        }
        for index in gone {
            ledger.release(&id(index.index(asks.len())).uid);
            within_capacity(&ledger)?;
        }
        for pod in 0..asks.len() {
            ledger.release(&id(pod).uid);
        }
        prop_assert_eq!(used(ledger.cluster()), empty);
    }

    #[test]
    fn grant_equals_the_ask(nodes in nodes(), ask in asks(), policy in policies()) {
        let mut ledger = Ledger::new(nodes);
        if place(&mut ledger, 0, &ask, policy) {
            let grant = &ledger.held(&id(0).uid).unwrap().grant;
            prop_assert_eq!(grant.grants.len(), ask.asks.len());
            for (grant, asked) in grant.grants.iter().zip(&ask.asks) {
                prop_assert_eq!(&grant.container, &asked.container);
                let mut gpus: Vec<_> = grant.shares.iter().map(|share| &share.gpu).collect();
                gpus.dedup();
                prop_assert_eq!(gpus.len(), grant.shares.len(), "each share is on a different GPU");
                if let CoresAsk::Slots(_) = asked.want.share.cores {
                    continue;
                }
                prop_assert_eq!(grant.shares.len(), asked.want.count as usize);
                for share in &grant.shares {
                    prop_assert_eq!(share.whole, asked.want.share.whole);
                    if let MemoryAsk::Exactly(bytes) = asked.want.share.memory {
                        prop_assert_eq!(share.memory_bytes, Some(bytes));
                    }
                }
            }
        }
    }

    #[test]
    fn rebuild_does_not_depend_on_order(
        nodes in nodes(),
        asks in vec(asks(), 1..12),
        order in Just((0..12usize).collect::<Vec<_>>()).prop_shuffle(),
    ) {
        let mut ledger = Ledger::new(nodes.clone());
        for (pod, ask) in asks.iter().enumerate() {
            place(&mut ledger, pod, ask, PlacementPolicy::Binpack);
        }
        let held = |pod: &usize| {
            let held = ledger.held(&id(*pod).uid)?;
            Some((held.pod.clone(), held.grant.clone(), held.host))
        };
        // Every grant twice, in any order.
        let grants: Vec<_> = order.iter().chain(order.iter().rev()).filter_map(held).collect();
        let rebuilt = Ledger::rebuild(nodes, grants);
        prop_assert_eq!(used(rebuilt.cluster()), used(ledger.cluster()));
        prop_assert_eq!(rebuilt.audit(), Vec::<LedgerFinding>::new());
    }

    #[test]
    fn conflicting_grants_rebuild_the_same_in_any_order(
        nodes in nodes(),
        asks in vec(asks(), 2..8),
        order in Just((0..40usize).collect::<Vec<_>>()).prop_shuffle(),
    ) {
        let mut ledger = Ledger::new(nodes.clone());
        for (pod, ask) in asks.iter().enumerate() {
            place(&mut ledger, pod, ask, PlacementPolicy::Spread);
        }
        // Forged grants: every pod also claims the grants of the next two pods, and more CPU.
        let mut grants: Vec<_> = ledger.all_held().map(|h| (h.pod.clone(), h.grant.clone(), h.host)).collect();
        grants.sort_by(|a, b| a.0.uid.cmp(&b.0.uid));
        let forged = |skip: usize, cpu: u64| {
            let host = HostUsage::new(MilliCpu(cpu), Bytes::ZERO);
            let pairs = grants.iter().zip(grants.iter().skip(skip));
            pairs.map(move |(a, b)| (a.0.clone(), b.1.clone(), host)).collect::<Vec<_>>()
        };
        let forged = [forged(0, 5), forged(1, 7), forged(2, 0)].concat();
        grants.extend(forged);
        let straight = Ledger::rebuild(nodes.clone(), grants.clone());
        let shuffled = order.iter().filter_map(|&at| grants.get(at).cloned());
        let shuffled = Ledger::rebuild(nodes, shuffled);
        prop_assert_eq!(used(straight.cluster()), used(shuffled.cluster()));
        prop_assert_eq!(straight.audit(), shuffled.audit());
    }

    #[test]
    fn placement_is_a_function_of_the_capacity(
        nodes in nodes(),
        asks in vec(asks(), 1..12),
        probe in asks(),
        policy in policies(),
    ) {
        let mut ledger = Ledger::new(nodes.clone());
        for (pod, ask) in asks.iter().enumerate() {
            place(&mut ledger, pod, ask, policy);
            // Cached ranks must not affect the result.
            decide(&mut ledger, &probe, policy);
        }
        let grants: Vec<_> = ledger.all_held().map(|h| (h.pod.clone(), h.grant.clone(), h.host)).collect();
        let mut fresh = Ledger::rebuild(nodes, grants);
        let cached = decide(&mut ledger, &probe, policy);
        prop_assert_eq!(cached, decide(&mut fresh, &probe, policy));
    }

    #[test]
    fn explain_agrees_with_fit(
        nodes in nodes(),
        asks in vec(asks(), 0..12),
        probe in asks(),
        policy in policies(),
    ) {
        let mut ledger = Ledger::new(nodes);
        for (pod, ask) in asks.iter().enumerate() {
            place(&mut ledger, pod, ask, PlacementPolicy::Binpack);
        }
        let decision = decide(&mut ledger, &probe, policy);
        let cluster = ledger.cluster();
        let prepared = cluster.prepare(&probe);
        for node in (0..cluster.nodes().count()).map(NodeIndex) {
            let reason = why_not(cluster.node_capacity(node), cluster.classes(), &prepared);
            let placed = cluster.place_on(node, &probe, &StatelessPolicy(PlacementPolicy::Spread));
            prop_assert_eq!(reason.is_none(), placed.is_some(), "{:?}", reason);
        }
        let explanation = explain(cluster, &probe);
        prop_assert_eq!(explanation.fitting.is_empty(), decision.is_none());
        let refused: usize = explanation.reasons.iter().map(|reason| reason.nodes).sum();
        prop_assert_eq!(refused + explanation.fitting.len(), explanation.nodes);
        prop_assert_eq!(explanation.per_node.len(), refused);
    }

    /// Arriving asks change the tables and thereby the ranks of all nodes. Cached ranks must follow.
    #[test]
    fn learning_leaves_no_stale_ranks(nodes in nodes(), asks in vec(asks(), 1..6), probe in asks()) {
        let mut ledger = Ledger::new(nodes);
        let mut policies = PolicyEngine::new(PlacementPolicy::Fragmentation);
        for arrival in 0..120 {
            let ask = &asks[arrival % asks.len()];
            policies.arrived(ask, ledger.cluster());
            place(&mut ledger, arrival, ask, PlacementPolicy::Binpack);
            ledger.best(&policies, &probe);
        }
        let held: Vec<_> = ledger.all_held().map(|h| (h.pod.clone(), h.grant.clone(), h.host)).collect();
        let nodes: Vec<Node> = ledger.cluster().nodes().map(|(_, capacity)| (*capacity.node).clone()).collect();
        let mut fresh = Ledger::rebuild(nodes, held);
        prop_assert_eq!(ledger.best(&policies, &probe), fresh.best(&policies, &probe));
    }

    /// After any sequence of events, the ledger equals one rebuilt from the grants.
    #[test]
    fn ledger_equals_a_rebuild_after_any_events(
        nodes in nodes(),
        asks in vec(asks(), 1..8),
        events in vec((0u8..7, any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..40),
    ) {
        let mut ledger = Ledger::new(nodes.clone());
        let mut there: Vec<Node> = nodes.clone();
        let mut stale = None;
        for (time, (event, a, b)) in events.into_iter().enumerate() {
            let (pod, ask) = (a.index(10), &asks[b.index(asks.len())]);
            let node = &nodes[b.index(nodes.len())];
            match event {
                0 | 1 => {
                    let decision = decide(&mut ledger, ask, PlacementPolicy::Fragmentation);
                    if let Some(decision) = &decision {
                        let _ = ledger.reserve(id(pod), ask, decision, LedgerTime(time as u64 + 3));
                    }
                    stale = decision.map(|decision| (decision, ask)).or(stale);
                }
                // An old decision is refused or still valid; it never panics.
                2 => if let Some((decision, ask)) = &stale {
                    let _ = ledger.reserve(id(pod), ask, decision, LedgerTime(time as u64 + 3));
                },
                3 => { ledger.release(&id(pod).uid); }
                4 => { ledger.expire(LedgerTime(time as u64)); }
                // The node returns with one GPU fewer, or with a GPU of another node.
                5 => {
                    let mut changed = node.clone();
                    match a.index(3) {
                        0 => { changed.gpus.pop(); }
                        1 => changed.gpus.extend(nodes[0].gpus.first().cloned().filter(|_| changed.name != nodes[0].name)),
                        _ => {}
                    }
                    ledger.set_node(changed.clone());
                    there.retain(|known| known.name != changed.name);
                    there.push(changed);
                }
                _ => {
                    ledger.remove_node(&node.name);
                    there.retain(|known| known.name != node.name);
                }
            }
        }
        let held: Vec<_> = ledger.all_held().map(|h| (h.pod.clone(), h.grant.clone(), h.host)).collect();
        let rebuilt = Ledger::rebuild(there, held);
        let by_name = |ledger: &Ledger| {
            let mut nodes: Vec<_> = ledger.cluster().nodes().map(|(_, capacity)| {
                let used: Vec<_> = capacity.gpus.iter().map(|gpu| gpu.used).collect();
                (capacity.node.name.clone(), used, capacity.host_used)
            }).collect();
            nodes.sort_by(|a, b| a.0.cmp(&b.0));
            nodes
        };
        prop_assert_eq!(by_name(&ledger), by_name(&rebuilt));
        prop_assert_eq!(ledger.audit(), rebuilt.audit());
        for held in rebuilt.all_held().map(|held| held.pod.uid.clone()).collect::<Vec<_>>() {
            ledger.release(&held);
        }
        prop_assert!(ledger.cluster().nodes().all(|(_, capacity)| capacity.gpus.iter().all(|gpu| gpu.used == Default::default())));
    }

    /// An exhaustive search over all placements of a small pod finds one exactly if the allocator does.
    #[test]
    fn allocator_finds_a_placement_if_one_exists(
        nodes in nodes(),
        held in vec(asks(), 0..6),
        wants in vec(wants(), 1..4),
        policy in policies(),
    ) {
        let mut ledger = Ledger::new(nodes);
        for (pod, ask) in held.iter().enumerate() {
            place(&mut ledger, pod, ask, PlacementPolicy::Spread);
        }
        let asks = wants.iter().filter(|want| !matches!(want.share.cores, CoresAsk::Slots(_)));
        let asks = asks.enumerate().map(|(at, &want)| Ask { container: format!("c{at}").into(), role: ContainerRole::App, want });
        let ask = PodAsk { asks: asks.collect(), ..PodAsk::default() };
        let cluster = ledger.cluster();
        let prepared = cluster.prepare(&ask);
        let policies = trained_policy(policy, &ask, cluster);
        let possible: Vec<NodeIndex> =
            cluster.nodes().filter(|(_, capacity)| can_place(cluster, &prepared, &capacity.gpus, 0)).map(|(node, _)| node).collect();
        for (node, _) in cluster.nodes() {
            prop_assert_eq!(cluster.fits(node, &prepared), possible.contains(&node));
        }
        prop_assert_eq!(ledger.best(&policies, &ask).is_some(), !possible.is_empty());
    }
}

/// Returns whether the wants from `at` on can be placed in any way.
fn can_place(cluster: &ClusterCapacity, prepared: &PreparedAsk, gpus: &[GpuCapacity], at: usize) -> bool {
    let Some(wanted) = prepared.wants.get(at) else { return true };
    gpu_order::subsets((1 << gpus.len()) - 1, wanted.want.count).any(|set| {
        let mut after = gpus.to_vec();
        let fits = gpu_order::indexes(set).all(|gpu| {
            let class = usize::from(after[gpu].class);
            let need = wanted.needs[class].filter(|need| need.fits(&after[gpu], &cluster.classes()[class]));
            need.map(|need| after[gpu].used = after[gpu].used.plus(need.usage)).is_some()
        });
        fits && can_place(cluster, prepared, &after, at + 1)
    })
}
