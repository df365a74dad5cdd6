//! What simulated GPUs' driver says of programs, beside what their regions say.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "support/node.rs"]
mod node;

use node::{Inside, Program, eventually, on};
use partage_core::model::{Bytes, GpuUuid};
use partage_driver_api::exports::DriverVersion;
use partage_host::gpus::{Gpus, uuid_bytes};
use partage_host::truth::{Auditor, Truth, Watched};
use partage_region::{GpuShare, RegionHandle, RegionPolicy};
use partage_sim_node::state::Fault;
use partage_testkit::workload::Load;
use std::cell::RefCell;
use std::sync::Arc;
use tempfile::TempDir;

const A100: &str = "A100-SXM4-40GB";
const DRIVER: DriverVersion = DriverVersion::R550;

/// Not a test: the program that uses a GPU.
#[test]
fn workload() {
    node::work();
}

/// A region with a share of one GPU.
struct Region {
    watched: Watched<String>,
    folder: TempDir,
}

fn region(name: &str, uuid: &GpuUuid, memory: u64) -> Region {
    let folder = tempfile::tempdir().unwrap();
    let share = GpuShare { uuid: uuid_bytes(uuid).unwrap(), memory, ..GpuShare::default() };
    let region = RegionHandle::create(folder.path(), &[share], RegionPolicy::default()).unwrap();
    Region { watched: Watched { key: name.into(), region: Some(Arc::new(region)) }, folder }
}

fn uuid(inside: &Inside, gpu: usize) -> GpuUuid {
    inside.config.gpus[gpu].uuid.as_str().into()
}

#[test]
fn who_uses_a_gpu_past_its_region_is_told_of_once() {
    on("who_uses_a_gpu_past_its_region_is_told_of_once", A100, 2, DRIVER, |inside| {
        let gpus = Gpus::open(&inside.driver).unwrap();
        let mut auditor = Auditor::new(&gpus.node("here").unwrap());
        let greedy = Program::start(&Load { gpu: 0, memory_mib: 2048, busy: 50 });
        let lost = Program::start(&Load { gpu: 1, memory_mib: 64, busy: 0 });
        let stranger = Program::start(&Load { gpu: 1, memory_mib: 64, busy: 0 });
        let own = region("own", &uuid(&inside, 0), 1 << 30);
        let owner =
            |pid: u32| [&greedy, &lost].iter().any(|own| own.pid() == pid).then(|| String::from("own"));
        let raised = RefCell::new(Vec::new());
        let mut round = || {
            let truth: Truth<String> = auditor.round(&gpus, std::slice::from_ref(&own.watched), &owner);
            raised.borrow_mut().extend(truth.raised.iter().cloned());
            truth
        };
        let first = round();
        assert_eq!(first.strangers, [vec![], vec![stranger.pid()]]);
        assert!(first.suspicions.is_empty(), "not at once: {:?}", first.suspicions);
        let used = first.used["own"][&uuid(&inside, 0)];
        assert!((Bytes(2 << 30)..Bytes(4 << 30)).contains(&used.memory), "{used:?}");
        let busy = eventually("it is seen at work", || {
            let used = round().used["own"][&uuid(&inside, 0)];
            (used.busy > 0).then_some(used)
        });
        assert!(busy.worked.is_some());
        let words = eventually("both are suspected", || {
            let words = round().suspicions.remove("own")?;
            (words.len() == 2).then_some(words)
        });
        let (asked, elsewhere) = (
            format!("process {} holds ", greedy.pid()),
            format!("process {} uses GPU 1, which is not", lost.pid()),
        );
        assert!(words.iter().any(|word| word.starts_with(&asked) && word.contains("on GPU 0")), "{words:?}");
        assert!(words.iter().any(|word| word.starts_with(&elsewhere)), "{words:?}");
        // Its amount changes from round to round, and it is still the same.
        drop(stranger);
        eventually("the stranger is gone", || round().strangers[1].is_empty().then_some(()));
        let raised = raised.borrow().clone();
        assert_eq!(raised.len(), 2, "{raised:?}");
        assert!(raised.iter().all(|(key, _)| key == "own"));
        let worked = round().used["own"][&uuid(&inside, 0)].worked;
        drop((greedy, lost));
        let last = auditor.round(&gpus, std::slice::from_ref(&own.watched), &|_| None);
        let after = last.used["own"][&uuid(&inside, 0)];
        assert_eq!((after.memory, after.busy), (Bytes(0), 0));
        assert_eq!(after.worked, worked, "what it did is remembered while it is watched");
        assert!(last.suspicions.is_empty());
    });
}

#[test]
fn who_cuts_its_account_short_is_no_stranger_on_its_own_gpu() {
    on("who_cuts_its_account_short_is_no_stranger_on_its_own_gpu", A100, 1, DRIVER, |inside| {
        let gpus = Gpus::open(&inside.driver).unwrap();
        let mut auditor = Auditor::new(&gpus.node("here").unwrap());
        let program = Program::start(&Load { gpu: 0, memory_mib: 64, busy: 0 });
        let own = region("own", &uuid(&inside, 0), 1 << 30);
        std::fs::File::create(own.folder.path().join(partage_region::USAGE)).unwrap();
        let owner = |pid: u32| (pid == program.pid()).then(|| String::from("own"));
        let words = eventually("it is suspected", || {
            auditor.round(&gpus, std::slice::from_ref(&own.watched), &owner).suspicions.remove("own")
        });
        assert_eq!(words, ["its processes wrote over their account of GPU 0"]);
    });
}

/// Its limits go on holding in files that this daemon cannot read: nothing is known that could be held against it.
#[test]
fn container_with_an_unmanaged_region_is_reported_and_never_suspected() {
    on("container_with_an_unmanaged_region_is_reported_and_never_suspected", A100, 2, DRIVER, |inside| {
        let gpus = Gpus::open(&inside.driver).unwrap();
        let mut auditor = Auditor::new(&gpus.node("here").unwrap());
        // One that is managed and uses a GPU that it was not granted: when it is suspected, so would be the other.
        let own = region("own", &uuid(&inside, 0), 1 << 30);
        let watched = [own.watched.clone(), Watched { key: "unmanaged".into(), region: None }];
        let (one, other) = (
            Program::start(&Load { gpu: 1, memory_mib: 64, busy: 0 }),
            Program::start(&Load { gpu: 1, memory_mib: 2048, busy: 50 }),
        );
        let owner = |pid: u32| match pid {
            _ if pid == one.pid() => Some(String::from("own")),
            _ if pid == other.pid() => Some(String::from("unmanaged")),
            _ => None,
        };
        let truth = eventually("the managed one is suspected", || {
            let truth = auditor.round(&gpus, &watched, &owner);
            truth.suspicions.contains_key("own").then_some(truth)
        });
        assert_eq!(truth.suspicions.keys().collect::<Vec<_>>(), ["own"]);
        assert!(truth.strangers.iter().all(Vec::is_empty), "{:?}", truth.strangers);
        assert!(truth.used["unmanaged"][&uuid(&inside, 1)].memory >= Bytes(2 << 30));
    });
}

#[test]
fn health_is_told_when_it_changes() {
    on("health_is_told_when_it_changes", A100, 2, DRIVER, |inside| {
        let gpus = Gpus::open(&inside.driver).unwrap();
        let mut auditor = Auditor::<String>::new(&gpus.node("here").unwrap());
        let mut round = || auditor.round(&gpus, &[], &|_| None).health_changes;
        assert_eq!(round(), []);
        inside.state.inject(1, Fault::Xid(119));
        let changes = round();
        assert_eq!(changes.len(), 1);
        assert_eq!(changes[0].0, uuid(&inside, 1));
        assert!(changes[0].1.as_deref().unwrap().starts_with("XID 119: "), "{changes:?}");
        assert_eq!(round(), []);
        inside.state.inject(1, Fault::Lost);
        inside.state.inject(1, Fault::Returned);
        assert_eq!(round(), [(uuid(&inside, 1), None)]);
        // Who comes after somebody who said that it is ill takes that back, once, and nothing that nobody said.
        let mut later = Auditor::<String>::new(&gpus.node("here").unwrap()).after([uuid(&inside, 0)]);
        let mut round = || later.round(&gpus, &[], &|_| None).health_changes;
        assert_eq!((round(), round()), (vec![(uuid(&inside, 0), None)], vec![]));
    });
}
