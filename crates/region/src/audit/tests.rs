#![allow(clippy::unwrap_used)]

use super::*;
use crate::reader::{GpuUsage, ProcessUsage};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;
const SECOND: u64 = 1_000_000_000;
const GPU: [u8; 16] = [7; 16];
const OTHER_GPU: [u8; 16] = [8; 16];

fn granted() -> GrantedGpu {
    GrantedGpu { uuid: GPU, memory: 4096 * MIB, context: 400 * MIB, waits_for_turns: true }
}

fn process(pid: u32, held: u64) -> ProcessUsage {
    let mut all = [0; MAX_GPUS];
    all[0] = held;
    ProcessUsage {
        slot: 0,
        pid_here: Some(pid),
        pid: 1,
        started: 1,
        namespace: 1,
        held: all,
        spent: [0; MAX_GPUS],
        waiting: [0; MAX_GPUS],
        busy_until: [0; MAX_GPUS],
    }
}

fn observed(pid: u32, memory: u64, busy: u32) -> ObservedProcess {
    ObservedProcess { pid, memory, busy, container: Some("a".into()) }
}

/// A round with one container on one GPU.
fn round(now: u64, seen: Vec<ObservedProcess>, processes: Vec<ProcessUsage>, spent: u64) -> AuditRound {
    let mut gpus = [GpuUsage::default(); MAX_GPUS];
    gpus[0].spent = spent;
    let snapshot = UsageSnapshot { gpus, processes, forged: Vec::new() };
    AuditRound {
        now,
        gpus: vec![ObservedGpu { uuid: GPU, processes: seen }],
        containers: vec![AuditedContainer {
            id: "a".into(),
            granted: vec![granted()],
            before: snapshot.clone(),
            after: snapshot,
        }],
        unmanaged: Vec::new(),
    }
}

/// Returns the findings after the same observation once a second, from the second `from` on.
fn findings_of(
    audit: &mut BypassAudit,
    from: u64,
    seconds: u64,
    of: impl Fn(u64) -> AuditRound,
) -> Vec<(BypassKind, Option<u32>)> {
    let mut found = Vec::new();
    for second in from..from + seconds {
        found = audit.examine(&of(second * SECOND));
    }
    found.into_iter().map(|finding| (finding.kind, finding.pid)).collect()
}

#[test]
fn honest_process_is_not_reported() {
    let mut audit = BypassAudit::default();
    let found = findings_of(&mut audit, 0, 60, |now| {
        round(now, vec![observed(5, 1000 * MIB, 80)], vec![process(5, 1000 * MIB)], now / 10 * 8)
    });
    assert_eq!(found, []);
}

#[test]
fn unregistered_process_is_reported_after_the_grace_period() {
    let mut audit = BypassAudit::default();
    let bypass = |now| round(now, vec![observed(6, 500 * MIB, 0)], vec![process(5, 0)], 0);
    assert_eq!(
        findings_of(&mut audit, 0, 3, bypass),
        [],
        "a context exists before its process is registered"
    );
    let found = audit.examine(&bypass(3 * SECOND));
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].kind, found[0].pid), (BypassKind::UnaccountedMemory, Some(6)));
    assert_eq!((found[0].amount, found[0].since), (500 * MIB, 0));
    // The process starts to account for its memory: an earlier bypass is not held against it.
    let honest = |now| round(now, vec![observed(6, 500 * MIB, 0)], vec![process(6, 500 * MIB)], 0);
    assert_eq!(audit.examine(&honest(4 * SECOND)), []);
    assert_eq!(audit.examine(&bypass(5 * SECOND)), [], "the grace period starts again");
}

#[test]
fn unaccounted_memory_is_reported() {
    let mut audit = BypassAudit::default();
    let honest = |now| round(now, vec![observed(5, 1000 * MIB, 0)], vec![process(5, 1000 * MIB)], 0);
    assert_eq!(findings_of(&mut audit, 0, 2, honest), []);
    // The driver's value grows, the account's does not.
    let more = |now| round(now, vec![observed(5, 1500 * MIB, 0)], vec![process(5, 1000 * MIB)], 0);
    assert_eq!(findings_of(&mut audit, 2, 5, more), [(BypassKind::UnaccountedMemory, Some(5))]);
    // The account's value falls, the driver's does not.
    let mut audit = BypassAudit::default();
    assert_eq!(findings_of(&mut audit, 0, 2, honest), []);
    let less = |now| round(now, vec![observed(5, 1000 * MIB, 0)], vec![process(5, 100 * MIB)], 0);
    assert_eq!(findings_of(&mut audit, 2, 5, less), [(BypassKind::ForgedUsage, Some(5))]);
}

#[test]
fn change_between_the_two_readings_is_not_reported() {
    let mut audit = BypassAudit::default();
    let found = findings_of(&mut audit, 0, 20, |now| {
        // It allocates after the first reading, or frees before the second.
        let mut round = round(now, vec![observed(5, 1000 * MIB, 0)], vec![process(5, 1000 * MIB)], 0);
        let container = &mut round.containers[0];
        let other =
            if (now / SECOND).is_multiple_of(2) { &mut container.before } else { &mut container.after };
        other.processes[0].held[0] = 0;
        round
    });
    assert_eq!(found, []);
}

#[test]
fn enlarged_file_is_reported_at_once_and_once() {
    let mut audit = BypassAudit::default();
    let mut grew = round(0, vec![], vec![], 0);
    grew.containers[0].granted.push(GrantedGpu { uuid: OTHER_GPU, ..granted() });
    let mut after = grew.clone();
    after.now = SECOND;
    grew.containers[0].after.forged = vec![Forgery::Grown { bytes: 4096 }];
    let found = audit.examine(&grew);
    assert_eq!(found.len(), 1, "one finding per container: {found:?}");
    assert_eq!((found[0].kind, found[0].pid, found[0].amount), (BypassKind::ForgedUsage, None, 4096));
    assert_eq!(audit.examine(&after), [], "it was truncated");
}

#[test]
fn contradicting_accounts_are_reported_as_forged() {
    let mut audit = BypassAudit::default();
    let found = findings_of(&mut audit, 0, 5, |now| {
        let mut round = round(now, vec![], vec![], 0);
        round.containers[0].after.forged = vec![
            Forgery::Accounts { gpu: 0, word: 1, slots: 2 },
            Forgery::Slot { slot: 3, gpu: 0 },
            Forgery::Slot { slot: 3, gpu: 9 },
        ];
        round
    });
    assert_eq!(found, [(BypassKind::ForgedUsage, None)]);
}

#[test]
fn unaccounted_work_is_reported() {
    let works = |now| round(now, vec![observed(5, MIB, 90)], vec![process(5, MIB)], 0);
    let mut audit = BypassAudit::default();
    assert_eq!(findings_of(&mut audit, 0, 10, works), [(BypassKind::UnaccountedWork, None)]);
    // Without turns, work is not accounted for.
    let mut audit = BypassAudit::default();
    let found = findings_of(&mut audit, 0, 10, |now| {
        let mut round = works(now);
        round.containers[0].granted[0].waits_for_turns = false;
        round
    });
    assert_eq!(found, []);
    // Short work is not reported.
    let mut audit = BypassAudit::default();
    let found =
        findings_of(&mut audit, 0, 10, |now| round(now, vec![observed(5, MIB, 5)], vec![process(5, MIB)], 0));
    assert_eq!(found, []);
}

#[test]
fn change_of_the_gate_causes_no_finding() {
    // A container works all the time, and is counted only while it has a neighbor.
    let works = |now: u64, counted: bool, spent| {
        let mut round = round(now, vec![observed(5, MIB, 100)], vec![process(5, MIB)], spent);
        round.containers[0].granted[0].waits_for_turns = counted;
        round
    };
    for period in [1, 2, 5, 20] {
        let mut audit = BypassAudit::default();
        let mut spent = 0;
        let mut since = 0;
        for second in 0..100 {
            let counted = (second / period) % 2 == 1;
            since = if counted { since + 1 } else { 0 };
            // The first round after a change is not counted as a whole.
            spent += if since > 1 { SECOND / 2 } else { 0 };
            // Two containers share the GPU then, but the driver reports that a second late.
            let mut round = works(second * SECOND, since > 1, spent);
            round.gpus[0].processes[0].busy = if since > 2 { 50 } else { 100 };
            assert_eq!(audit.examine(&round), [], "second {second} of period {period}");
        }
    }
}

#[test]
fn consistent_account_over_the_limit_is_reported() {
    let limit = granted().memory;
    let mut audit = BypassAudit::default();
    let holds = |bytes| move |now| round(now, vec![observed(5, bytes, 0)], vec![process(5, bytes)], 0);
    assert_eq!(findings_of(&mut audit, 0, 2, holds(limit)), []);
    assert_eq!(findings_of(&mut audit, 2, 5, holds(2 * limit)), [(BypassKind::OverLimit, None)]);
    // Lowering a limit takes nothing away, but nothing may be added.
    let mut audit = BypassAudit::default();
    let lowered = |bytes| {
        move |now| {
            let mut round = holds(bytes)(now);
            round.containers[0].granted[0].memory = limit / 4;
            round
        }
    };
    assert_eq!(findings_of(&mut audit, 0, 5, holds(limit)), []);
    assert_eq!(findings_of(&mut audit, 5, 5, lowered(limit)), []);
    assert_eq!(findings_of(&mut audit, 10, 5, lowered(limit / 2)), []);
    assert_eq!(
        findings_of(&mut audit, 15, 5, lowered(limit)),
        [(BypassKind::OverLimit, None)],
        "it had been freed"
    );
}

#[test]
fn use_of_an_ungranted_gpu_is_reported() {
    let mut audit = BypassAudit::default();
    let found = findings_of(&mut audit, 0, 5, |now| {
        let mut round = round(now, vec![], vec![process(5, 0)], 0);
        let of_the_machine = ObservedProcess { container: None, ..observed(9, MIB, 50) };
        round
            .gpus
            .push(ObservedGpu { uuid: OTHER_GPU, processes: vec![observed(5, MIB, 0), of_the_machine] });
        round
    });
    assert_eq!(found, [(BypassKind::UngrantedGpu, Some(5))]);
}

#[test]
fn container_without_a_readable_region_is_not_reported() {
    let mut audit = BypassAudit::default();
    let found = findings_of(&mut audit, 0, 60, |now| {
        let mut round = round(now, vec![observed(5, 8192 * MIB, 100)], vec![], 0);
        round.containers.clear();
        round.unmanaged.push("a".into());
        round
    });
    assert_eq!(found, []);
}

#[test]
fn truncated_usage_is_reported_as_forged_only() {
    let mut audit = BypassAudit::default();
    let found = findings_of(&mut audit, 0, 10, |now| {
        let mut round = round(now, vec![observed(5, 8192 * MIB, 100)], vec![], 0);
        round.containers[0].after = UsageSnapshot::of_truncated_file();
        round
    });
    assert_eq!(
        found,
        [(BypassKind::ForgedUsage, None)],
        "the GPU was granted, whatever its account contains"
    );
}

#[test]
fn two_slots_of_one_process_are_summed() {
    let mut audit = BypassAudit::default();
    let found = findings_of(&mut audit, 0, 10, |now| {
        let slots = vec![process(5, 700 * MIB), process(5, 300 * MIB)];
        round(now, vec![observed(5, 1000 * MIB, 0)], slots, 0)
    });
    assert_eq!(found, []);
}

/// One step of an honest process: memory in steps, work at costs that are wrong by up to a quarter, charged up to half
/// a second before it is done.
#[derive(Clone, Debug)]
struct UsageStep {
    memory: u64,
    busy: u32,
    price: u64,
    moment: u64,
    early: u64,
    overhead: u64,
}

fn steps() -> impl Strategy<Value = Vec<UsageStep>> {
    let step = (0..3600u64, 0..=100u32, 75..125u64, 100..2000u64, 0..500u64, 0..64u64);
    let step = step.prop_map(|(memory, busy, price, moment, early, overhead)| UsageStep {
        memory: memory * MIB,
        busy,
        price,
        moment: moment * 1_000_000,
        early: early * 1_000_000,
        overhead: overhead * MIB,
    });
    proptest::collection::vec(step, 1..60)
}

proptest! {
    // About one case in 700,000 is reported: when work is no longer charged early while all costs are a quarter too
    // low.
    #![proptest_config(crate::tests::fixed_cases(256))]

    #[test]
    fn honest_processes_are_never_reported(steps in steps()) {
        let mut audit = BypassAudit::default();
        let (mut now, mut done) = (0, 0);
        for step in steps {
            now += step.moment;
            done += step.moment / 100 * u64::from(step.busy) / 100 * step.price;
            let round = round(
                now,
                vec![observed(5, step.memory + step.overhead, step.busy)],
                vec![process(5, step.memory)],
                done + step.early,
            );
            prop_assert_eq!(audit.examine(&round), vec![]);
        }
    }
}

proptest! {
    /// Whatever a region contains, and however the clock runs, a round terminates and reports only what it observed.
    #[test]
    fn findings_name_only_observed_processes(
        numbers in proptest::collection::vec((any::<u64>(), any::<u64>(), any::<u64>(), any::<u32>(), any::<u32>()), 1..20)
    ) {
        let mut audit = BypassAudit::default();
        for (now, held, memory, busy, pid) in numbers {
            let round = round(now, vec![observed(pid, memory, busy)], vec![process(pid, held)], held);
            for finding in audit.examine(&round) {
                prop_assert!(finding.pid.is_none_or(|found| found == pid));
                prop_assert!(finding.container == "a" && finding.gpu == GPU);
            }
        }
    }

    /// A process that holds more than the tolerance allows for longer than the grace period is reported, whatever it
    /// does next.
    #[test]
    fn bypass_is_always_reported(held in 0..3000u64, beyond in 200..1000u64, rounds in 5..50u64) {
        let mut audit = BypassAudit::default();
        let found = findings_of(&mut audit, 0, rounds, |now| {
            round(now, vec![observed(5, (held + beyond) * MIB, 0)], vec![process(5, held * MIB)], 0)
        });
        prop_assert_eq!(found, [(BypassKind::UnaccountedMemory, Some(5))]);
    }
}
