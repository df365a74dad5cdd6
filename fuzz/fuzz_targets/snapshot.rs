//! Snapshots and traces: any text is read or refused, and a snapshot that is read explains every ask.
#![no_main]

use libfuzzer_sys::fuzz_target;
use partage_core::explain::explain;
use partage_core::ledger::Ledger;
use partage_core::place::HostUse;
use partage_core::simulate::trace;
use partage_core::snapshot::Snapshot;

fuzz_target!(|text: &str| {
    let _ = trace::read_nodes(text);
    let _ = trace::read_pods(text);
    let Ok(snapshot) = Snapshot::from_json(text) else { return };
    let again = snapshot.to_json().expect("a snapshot is JSON");
    assert_eq!(Snapshot::from_json(&again).as_ref(), Ok(&snapshot));
    let held = snapshot
        .grants
        .into_iter()
        .map(|held| (held.pod, held.grant, HostUse::new(held.cpu_milli, held.memory_bytes)));
    let ledger = Ledger::rebuild(snapshot.nodes, held);
    let _ = ledger.audit();
    for held in ledger.all_held() {
        let _ = explain(ledger.cluster(), &held.ask()).summary();
    }
});
