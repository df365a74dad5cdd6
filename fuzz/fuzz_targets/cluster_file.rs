//! Cluster files and traces: any text is parsed or refused, and every ask on a parsed cluster can be explained.
#![no_main]

use libfuzzer_sys::fuzz_target;
use partage_core::cluster_file::ClusterFile;
use partage_core::ledger::Ledger;
use partage_core::place::HostUsage;
use partage_core::replay::trace;

fuzz_target!(|text: &str| {
    let _ = trace::read_nodes(text);
    let _ = trace::read_pods(text);
    let Ok(cluster) = ClusterFile::from_json(text) else { return };
    let again = cluster.to_json().expect("a cluster file is JSON");
    assert_eq!(ClusterFile::from_json(&again).as_ref(), Ok(&cluster));
    let held = cluster
        .grants
        .into_iter()
        .map(|held| (held.pod, held.grant, HostUsage::new(held.cpu_milli, held.memory_bytes)));
    let ledger = Ledger::rebuild(cluster.nodes, held);
    let _ = ledger.audit();
    let snapshot = ledger.snapshot();
    for held in ledger.all_held() {
        let _ = snapshot.explain(&held.to_ask()).summary();
    }
});
