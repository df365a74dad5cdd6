//! Snapshots decide as the ledger did when they were taken, whatever happens to it afterwards.

use crate::strategies::*;
use partage_core::ledger::{Ledger, LedgerTime, Snapshot};
use partage_core::model::*;
use partage_core::place::{Decision, GpuAllocation, HostUsage, NodeIndex, PolicyEngine, RankCache};
use proptest::collection::vec;
use proptest::prelude::*;

/// A change of a ledger.
#[derive(Clone, Debug)]
enum LedgerEvent {
    Place(usize, PodAsk),
    Confirm(usize, PodGrant),
    Release(usize),
    /// A statement that is rolled back.
    Try(usize, PodAsk),
    /// The node loses a GPU or gets it back.
    SetNode(prop::sample::Index, bool),
    RemoveNode(prop::sample::Index),
}

fn events() -> impl Strategy<Value = LedgerEvent> {
    let pod = 0usize..6;
    prop_oneof![
        4 => (pod.clone(), asks()).prop_map(|(pod, ask)| LedgerEvent::Place(pod, ask)),
        2 => (pod.clone(), grants()).prop_map(|(pod, grant)| LedgerEvent::Confirm(pod, grant)),
        2 => pod.clone().prop_map(LedgerEvent::Release),
        2 => (pod, asks()).prop_map(|(pod, ask)| LedgerEvent::Try(pod, ask)),
        1 => any::<(prop::sample::Index, bool)>().prop_map(|(node, fewer)| LedgerEvent::SetNode(node, fewer)),
        1 => any::<prop::sample::Index>().prop_map(LedgerEvent::RemoveNode),
    ]
}

fn apply(ledger: &mut Ledger, event: &LedgerEvent, nodes: &[Node], policies: &PolicyEngine) {
    match event.clone() {
        LedgerEvent::Place(pod, ask) => {
            let mut statement = ledger.statement();
            if statement.place(id(pod), &ask, policies, LedgerTime(10)).is_ok() {
                statement.commit();
            }
        }
        LedgerEvent::Confirm(pod, grant) => drop(ledger.confirm(id(pod), grant, HostUsage::default())),
        LedgerEvent::Release(pod) => drop(ledger.release(&id(pod).uid)),
        LedgerEvent::Try(pod, ask) => drop(ledger.statement().place(id(pod), &ask, policies, LedgerTime(10))),
        LedgerEvent::SetNode(node, fewer) => {
            let mut node = nodes[node.index(nodes.len())].clone();
            if fewer {
                node.gpus.pop();
            }
            ledger.set_node(node);
        }
        LedgerEvent::RemoveNode(node) => ledger.remove_node(&nodes[node.index(nodes.len())].name),
    }
}

/// Everything that a reader can observe.
#[derive(Debug, PartialEq)]
struct ReaderView {
    used: Vec<(Vec<GpuAllocation>, HostUsage)>,
    decision: Option<Decision>,
    ranks: Vec<(NodeIndex, i64)>,
    fitting: Vec<NodeName>,
    explained: String,
}

fn reader_view(
    snapshot: &Snapshot,
    policies: &PolicyEngine,
    probe: &PodAsk,
    cache: &mut RankCache,
) -> ReaderView {
    let names: Vec<NodeName> = snapshot.cluster().nodes().map(|(_, node)| node.node.name.clone()).collect();
    ReaderView {
        used: used(snapshot.cluster()),
        decision: snapshot.best(policies, probe, cache),
        ranks: snapshot.ranks(policies, probe, cache),
        fitting: snapshot.filter(probe, &names).into_iter().cloned().collect(),
        explained: snapshot.explain(probe).summary(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn snapshot_decides_as_the_ledger_did_when_it_was_taken(
        nodes in nodes(),
        events in vec(events(), 1..20),
        probe in asks(),
        policy in policies(),
        order in Just((0..20usize).collect::<Vec<_>>()).prop_shuffle(),
    ) {
        let mut ledger = Ledger::new(nodes.clone());
        let policies = trained_policy(policy, &probe, ledger.cluster());
        let mut taken = Vec::new();
        for event in &events {
            apply(&mut ledger, event, &nodes, &policies);
            let snapshot = ledger.snapshot();
            let decision = ledger.best(&policies, &probe);
            let seen = reader_view(&snapshot, &policies, &probe, &mut RankCache::default());
            prop_assert_eq!(&seen.decision, &decision);
            prop_assert_eq!(&seen.used, &used(ledger.cluster()));
            taken.push((snapshot, seen));
        }
        // All snapshots share one cache, older and newer in any order.
        let mut cache = RankCache::default();
        for (snapshot, expected) in order.iter().filter_map(|&at| taken.get(at)) {
            prop_assert_eq!(&reader_view(snapshot, &policies, &probe, &mut cache), expected);
        }
    }
}

/// Readers on other threads get the same results while the ledger is written.
#[test]
fn readers_are_unaffected_by_a_concurrent_writer() {
    let gpu = |node: usize, index: u32| Gpu {
        uuid: format!("GPU-{node}-{index}").into(),
        minor: index,
        model: "M40".into(),
        memory_bytes: Bytes(40 << 30),
        numa: None,
        pci: None,
        withheld: None,
    };
    let nodes =
        (0..200).map(|node| Node::new(format!("node-{node}"), (0..4).map(|at| gpu(node, at)).collect()));
    let mut ledger = Ledger::new(nodes);
    let share = ShareAsk {
        memory: MemoryAsk::Exactly(Bytes(10 << 30)),
        cores: CoresAsk::Uncounted,
        whole: false,
        ceiling: None,
    };
    let want = WantedGpus { count: 1, share };
    let ask = PodAsk {
        asks: vec![Ask { container: "main".into(), role: ContainerRole::App, want }],
        ..PodAsk::default()
    };
    let policies = PolicyEngine::new(PlacementPolicy::Spread);
    std::thread::scope(|scope| {
        let mut readers = Vec::new();
        for pod in 0..400 {
            if pod % 100 == 0 {
                let (snapshot, policies, ask) = (ledger.snapshot(), &policies, &ask);
                let expected = ledger.best(policies, ask);
                readers.push(scope.spawn(move || {
                    let mut cache = RankCache::default();
                    (0..200).all(|_| snapshot.best(policies, ask, &mut cache) == expected)
                }));
            }
            let mut statement = ledger.statement();
            statement.place(id(pod), &ask, &policies, LedgerTime(10)).unwrap();
            statement.commit();
        }
        assert!(readers.into_iter().all(|reader| reader.join().unwrap()));
    });
    assert_eq!(ledger.all_held().count(), 400);
}
