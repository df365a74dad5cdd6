//! Runs the monitor on simulated GPUs: compares the driver's data about programs with their regions.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../../host/tests/support/sim_node.rs"]
mod node;

use node::{NodeTest, TestWorkload, eventually, on};
use partage_core::model::{Bytes, Cores, GpuUuid, Share, TurnPreferences};
use partage_driver_api::exports::DriverVersion;
use partage_enforce::context_sizes::ContextSizes;
use partage_enforce::monitor::{AuditedShare, Monitor, MonitorReport};
use partage_enforce::shares::{ManagedShares, ShareSpec};
use partage_host::gpus::{NvmlSession, uuid_bytes};
use partage_region::{GpuShare, RegionHandle, RegionPolicy};
use partage_sim_node::state::GpuFault;
use partage_testkit::workload::WorkloadOptions;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;
use tempfile::TempDir;

const A100: &str = "A100-SXM4-40GB";
const DRIVER: DriverVersion = DriverVersion::R550;

/// Not a test: a program that uses a GPU.
#[test]
fn workload() {
    node::work();
}

/// A region with a share of one GPU.
struct TestRegion {
    audited: AuditedShare<String>,
    folder: TempDir,
}

fn region(name: &str, uuid: &GpuUuid, memory: u64) -> TestRegion {
    let folder = tempfile::tempdir().unwrap();
    let share = GpuShare { uuid: uuid_bytes(uuid).unwrap(), memory, ..GpuShare::default() };
    let region = RegionHandle::create(folder.path(), &[share], RegionPolicy::default()).unwrap();
    TestRegion { audited: AuditedShare { key: name.into(), region: Some(Arc::new(region)) }, folder }
}

fn uuid(inside: &NodeTest, gpu: usize) -> GpuUuid {
    inside.config.gpus[gpu].uuid.as_str().into()
}

#[test]
fn bypass_of_a_region_is_reported_once() {
    on("bypass_of_a_region_is_reported_once", A100, 2, DRIVER, |inside| {
        let gpus = NvmlSession::open(&inside.driver).unwrap();
        let mut monitor = Monitor::new(&gpus.node("here").unwrap(), []);
        let greedy = TestWorkload::start(&WorkloadOptions { gpu: 0, memory_mib: 2048, busy: 50 });
        let lost = TestWorkload::start(&WorkloadOptions { gpu: 1, memory_mib: 64, busy: 0 });
        let unowned = TestWorkload::start(&WorkloadOptions { gpu: 1, memory_mib: 64, busy: 0 });
        let own = region("own", &uuid(&inside, 0), 1 << 30);
        let owner =
            |pid: u32| [&greedy, &lost].iter().any(|own| own.pid() == pid).then(|| String::from("own"));
        let new = RefCell::new(Vec::new());
        let mut poll = || {
            let report: MonitorReport<String> =
                monitor.poll(&gpus, std::slice::from_ref(&own.audited), &owner);
            new.borrow_mut().extend(report.new_findings.iter().cloned());
            report
        };
        let first = poll();
        assert_eq!(first.unowned, [vec![], vec![unowned.pid()]]);
        assert!(first.findings.is_empty(), "not at once: {:?}", first.findings);
        let used = first.usage["own"][&uuid(&inside, 0)];
        assert!((Bytes(2 << 30)..Bytes(4 << 30)).contains(&used.memory), "{used:?}");
        let busy = eventually("its utilization is reported", || {
            let used = poll().usage["own"][&uuid(&inside, 0)];
            (used.busy > 0).then_some(used)
        });
        assert!(busy.worked.is_some());
        let words = eventually("both are suspected", || {
            let words = poll().findings.remove("own")?;
            (words.len() == 2).then_some(words)
        });
        let (asked, elsewhere) = (
            format!("process {} holds ", greedy.pid()),
            format!("process {} uses GPU 1, which was not granted", lost.pid()),
        );
        assert!(words.iter().any(|word| word.starts_with(&asked) && word.contains("on GPU 0")), "{words:?}");
        assert!(words.iter().any(|word| word.starts_with(&elsewhere)), "{words:?}");
        // The amount changes from poll to poll, but it is the same finding.
        drop(unowned);
        eventually("the unowned process is gone", || poll().unowned[1].is_empty().then_some(()));
        let new = new.borrow().clone();
        assert_eq!(new.len(), 2, "{new:?}");
        assert!(new.iter().all(|(key, _)| key == "own"));
        let worked = poll().usage["own"][&uuid(&inside, 0)].worked;
        drop((greedy, lost));
        let last = monitor.poll(&gpus, std::slice::from_ref(&own.audited), &|_| None);
        let after = last.usage["own"][&uuid(&inside, 0)];
        assert_eq!((after.memory, after.busy), (Bytes(0), 0));
        assert_eq!(after.worked, worked, "the time of the last compute is kept");
        assert!(last.findings.is_empty());
    });
}

#[test]
fn work_of_a_share_that_is_not_gated_is_counted_by_the_driver() {
    on("work_of_a_share_that_is_not_gated_is_counted_by_the_driver", A100, 1, DRIVER, |inside| {
        let gpus = NvmlSession::open(&inside.driver).unwrap();
        let mut monitor = Monitor::new(&gpus.node("here").unwrap(), []);
        let program = TestWorkload::start(&WorkloadOptions { gpu: 0, memory_mib: 64, busy: 100 });
        let own = region("own", &uuid(&inside, 0), 1 << 30);
        let region = own.audited.region.clone().unwrap();
        let owner = |pid: u32| (pid == program.pid()).then(|| String::from("own"));
        let mut poll = || monitor.poll(&gpus, std::slice::from_ref(&own.audited), &owner);
        let begin = std::time::Instant::now();
        poll();
        let spent = eventually("a second of work is counted", || {
            poll();
            let spent = region.snapshot().unwrap().gpus[0].spent;
            (spent >= 1_000_000_000).then_some(spent)
        });
        let passed = u64::try_from(begin.elapsed().as_nanos()).unwrap();
        assert!(spent <= passed + 1_000_000_000, "{spent} of {passed} ns");
    });
}

#[test]
fn gated_tenant_is_charged_for_work_that_it_does_not_mark() {
    on("gated_tenant_is_charged_for_work_that_it_does_not_mark", A100, 1, DRIVER, |inside| {
        let gpus = NvmlSession::open(&inside.driver).unwrap();
        let mut monitor = Monitor::new(&gpus.node("here").unwrap(), []);
        let folder = tempfile::tempdir().unwrap();
        let shares = ManagedShares::<String>::new(ContextSizes::read(folder.path().join("contexts"), "550"));
        // It has a ceiling, so its launches look at turns although it is alone.
        let (gpu, cores) = (uuid(&inside, 0), Cores::percent(30));
        let share = Share {
            gpu: gpu.clone(),
            memory_bytes: Some(Bytes(1 << 30)),
            cores,
            ceiling: None,
            whole: false,
        };
        let spec = ShareSpec {
            directory: &folder.path().join("region"),
            usage_owner: rustix::process::geteuid().as_raw(),
            shares: &[share],
            throttled: &BTreeSet::from([gpu.clone()]),
            turns: TurnPreferences::default(),
            policy: RegionPolicy::default(),
        };
        shares.prepare(&"own".into(), (), &spec).unwrap();
        let region = shares.region(&"own".into()).unwrap();
        // It works without markers.
        let program = TestWorkload::start(&WorkloadOptions { gpu: 0, memory_mib: 64, busy: 100 });
        let owner = |pid: u32| (pid == program.pid()).then(|| String::from("own"));
        let findings = eventually("two seconds of its work are charged, and found", || {
            let report: MonitorReport<String> = monitor.poll(&gpus, &shares.audited(), &owner);
            assert!(report.unaccounted.iter().all(|found| found.key == "own" && found.gpu == gpu));
            shares.charge_unaccounted(&report.unaccounted);
            let findings = report.findings.get("own").cloned().unwrap_or_default();
            let is_found = findings.iter().any(|finding| finding.contains("outside their turns"));
            (is_found && region.snapshot().unwrap().gpus[0].spent > 2_000_000_000).then_some(findings)
        });
        assert!(!findings.is_empty());
    });
}

#[test]
fn truncated_usage_is_a_forgery_and_not_an_ungranted_gpu() {
    on("truncated_usage_is_a_forgery_and_not_an_ungranted_gpu", A100, 1, DRIVER, |inside| {
        let gpus = NvmlSession::open(&inside.driver).unwrap();
        let mut monitor = Monitor::new(&gpus.node("here").unwrap(), []);
        let program = TestWorkload::start(&WorkloadOptions { gpu: 0, memory_mib: 64, busy: 0 });
        let own = region("own", &uuid(&inside, 0), 1 << 30);
        std::fs::File::create(own.folder.path().join(partage_region::USAGE_FILE)).unwrap();
        let owner = |pid: u32| (pid == program.pid()).then(|| String::from("own"));
        let words = eventually("it is suspected", || {
            monitor.poll(&gpus, std::slice::from_ref(&own.audited), &owner).findings.remove("own")
        });
        assert_eq!(words, ["its processes overwrote their usage record of GPU 0"]);
    });
}

/// Its limits stay in force in files that this daemon cannot read, so its usage cannot be compared with anything.
#[test]
fn container_with_an_unmanaged_region_is_reported_and_never_suspected() {
    on("container_with_an_unmanaged_region_is_reported_and_never_suspected", A100, 2, DRIVER, |inside| {
        let gpus = NvmlSession::open(&inside.driver).unwrap();
        let mut monitor = Monitor::new(&gpus.node("here").unwrap(), []);
        // A managed share uses a GPU that it was not granted: once it is suspected, the other one would be, too.
        let own = region("own", &uuid(&inside, 0), 1 << 30);
        let audited = [own.audited.clone(), AuditedShare { key: "unmanaged".into(), region: None }];
        let (one, other) = (
            TestWorkload::start(&WorkloadOptions { gpu: 1, memory_mib: 64, busy: 0 }),
            TestWorkload::start(&WorkloadOptions { gpu: 1, memory_mib: 2048, busy: 50 }),
        );
        let owner = |pid: u32| match pid {
            _ if pid == one.pid() => Some(String::from("own")),
            _ if pid == other.pid() => Some(String::from("unmanaged")),
            _ => None,
        };
        let report = eventually("the managed one is suspected", || {
            let report = monitor.poll(&gpus, &audited, &owner);
            report.findings.contains_key("own").then_some(report)
        });
        assert_eq!(report.findings.keys().collect::<Vec<_>>(), ["own"]);
        assert!(report.unowned.iter().all(Vec::is_empty), "{:?}", report.unowned);
        assert!(report.usage["unmanaged"][&uuid(&inside, 1)].memory >= Bytes(2 << 30));
    });
}

#[test]
fn health_is_reported_when_it_changes() {
    on("health_is_reported_when_it_changes", A100, 2, DRIVER, |inside| {
        let gpus = NvmlSession::open(&inside.driver).unwrap();
        let mut monitor = Monitor::<String>::new(&gpus.node("here").unwrap(), []);
        let mut poll = || monitor.poll(&gpus, &[], &|_| None).health_changes;
        assert_eq!(poll(), []);
        inside.state.inject(1, GpuFault::Xid(119));
        let changes = poll();
        assert_eq!(changes.len(), 1);
        assert_eq!(changes[0].0, uuid(&inside, 1));
        assert!(changes[0].1.as_deref().unwrap().starts_with("XID 119: "), "{changes:?}");
        assert_eq!(poll(), []);
        inside.state.inject(1, GpuFault::Lost);
        inside.state.inject(1, GpuFault::Returned);
        assert_eq!(poll(), [(uuid(&inside, 1), None)]);
        // A GPU that an earlier monitor reported as unhealthy is reported as recovered, once.
        let mut later = Monitor::<String>::new(&gpus.node("here").unwrap(), [uuid(&inside, 0)]);
        let mut poll = || later.poll(&gpus, &[], &|_| None).health_changes;
        assert_eq!((poll(), poll()), (vec![(uuid(&inside, 0), None)], vec![]));
    });
}
