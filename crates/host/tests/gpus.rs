//! What NVML tells of simulated GPUs, compared with what they are.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "support/node.rs"]
mod node;

use node::{Inside, Program, eventually, on};
use partage_core::model::Bytes;
use partage_driver_api::exports::DriverVersion;
use partage_host::driver::Driver;
use partage_host::gpus::{Fatal, Gpus, GpusError, Look, Working, uuid_bytes};
use partage_sim_node::state::Fault;
use partage_testkit::workload::Load;

const A100: &str = "A100-SXM4-40GB";
const TEST_DRIVER: DriverVersion = DriverVersion::R550;

/// Not a test: the program that uses a GPU.
#[test]
fn workload() {
    node::work();
}

/// The health of all GPUs.
fn health(gpus: &Gpus) -> Vec<Option<String>> {
    gpus.look().into_iter().map(|look| look.health).collect()
}

fn is_well(look: &Look) -> bool {
    look.health.is_none()
}

#[test]
fn the_inventory_is_the_truth() {
    for driver in DriverVersion::ALL {
        for (card, count) in [(A100, 8), (A100, 1), ("T4", 3), ("H100-SXM5-80GB", 8)] {
            on("the_inventory_is_the_truth", card, count, driver, |inside: Inside| {
                let gpus = Gpus::open(&inside.driver).unwrap();
                assert_eq!(gpus.node("here").unwrap(), inside.config.expected_inventory("here"));
                assert_eq!(gpus.driver_version(), inside.config.driver.version());
            });
            if node::is_inside() {
                return;
            }
        }
    }
}

#[test]
fn an_idle_gpu_is_looked_at() {
    on("an_idle_gpu_is_looked_at", "T4", 2, DriverVersion::R535, |inside| {
        let looks = Gpus::open(&inside.driver).unwrap().look();
        for (look, gpu) in looks.iter().zip(&inside.config.gpus) {
            assert_eq!(look.uuid.as_str(), gpu.uuid);
            assert!(uuid_bytes(&look.uuid).is_some());
            assert_eq!((&look.health, look.memory_used, look.utilisation), (&None, Some(Bytes(0)), Some(0)));
            assert!(look.processes.is_empty());
            assert!(look.temperature.is_some_and(|degrees| (15..80).contains(&degrees)), "{look:?}");
            assert!(look.power_milliwatts.is_some_and(|power| (1_000..70_000).contains(&power)), "{look:?}");
        }
        assert_eq!(looks.len(), 2);
    });
}

#[test]
fn programs_faults_leave_a_gpu_well_and_its_own_do_not() {
    on("programs_faults_leave_a_gpu_well_and_its_own_do_not", A100, 2, TEST_DRIVER, |inside| {
        let gpus = Gpus::open(&inside.driver).unwrap();
        for xid in [13, 31, 43, 45, 63, 94] {
            inside.state.inject(0, Fault::Xid(xid));
        }
        inside.state.inject(0, Fault::CorrectedErrors(7));
        inside.state.inject(0, Fault::Slow(2000));
        assert_eq!(health(&gpus), [None, None]);
        inside.state.inject(1, Fault::Xid(119));
        inside.state.inject(1, Fault::Xid(13));
        let seen = health(&gpus);
        assert_eq!(seen[0], None);
        let words = seen[1].as_deref().unwrap();
        assert!(words.starts_with("XID 119: ") && words.contains("reset"), "{words}");
        // It is told once and stays: nothing was reset.
        assert_eq!(health(&gpus), seen);
        assert_eq!(health(&gpus), seen);
        // What is ill now may be well later; what the machine has stays.
        assert_eq!(gpus.node("here").unwrap(), inside.config.expected_inventory("here"));
        // Who comes later has not seen it, and must be told.
        drop(gpus);
        assert_eq!(health(&Gpus::open(&inside.driver).unwrap()), [None, None]);
    });
}

#[test]
fn memory_errors_stay_until_the_card_is_reset() {
    on("memory_errors_stay_until_the_card_is_reset", A100, 1, TEST_DRIVER, |inside| {
        inside.state.inject(0, Fault::UncorrectedErrors(2));
        // Its XID was before this session; the counter is still there.
        let gpus = Gpus::open(&inside.driver).unwrap();
        let words = health(&gpus).remove(0).unwrap();
        assert!(words.starts_with("memory errors could not be corrected"), "{words}");
        inside.state.inject(0, Fault::UncorrectedErrors(1));
        let words = health(&gpus).remove(0).unwrap();
        assert!(words.starts_with("XID 48: "), "{words}");
        inside.state.inject(0, Fault::Lost);
        inside.state.inject(0, Fault::Returned);
        // For who saw it and for who did not.
        assert_eq!(health(&gpus), [None]);
        assert_eq!(health(&Gpus::open(&inside.driver).unwrap()), [None]);
    });
}

#[test]
fn memory_errors_that_were_contained_leave_a_card_well() {
    on("memory_errors_that_were_contained_leave_a_card_well", A100, 1, TEST_DRIVER, |inside| {
        // The XID that a simulated card reports with them is read by nobody: the counter is what is left of it.
        inside.state.inject(0, Fault::UncorrectedErrors(1));
        let gpus = Gpus::open(&inside.driver).unwrap();
        let alone = health(&gpus).remove(0).unwrap();
        inside.state.inject(0, Fault::Xid(94));
        assert_eq!(health(&gpus), [None]);
        assert_eq!(health(&gpus), [None]);
        // Who comes later is told.
        let kept = gpus.fatal();
        assert_eq!(kept.iter().map(|one| (one.xid, one.is_fatal())).collect::<Vec<_>>(), [(94, false)]);
        drop(gpus);
        let gpus = Gpus::open(&inside.driver).unwrap();
        assert_eq!(health(&gpus), [Some(alone)]);
        gpus.remember(kept);
        assert_eq!(health(&gpus), [None]);
        // One that was not contained is told as ever.
        inside.state.inject(0, Fault::UncorrectedErrors(1));
        assert!(health(&gpus).remove(0).unwrap().starts_with("XID 48: "));
    });
}

#[test]
fn a_gpu_that_falls_off_the_bus_is_told_and_well_when_it_is_back() {
    on("a_gpu_that_falls_off_the_bus_is_told_and_well_when_it_is_back", A100, 3, TEST_DRIVER, |inside| {
        let gpus = Gpus::open(&inside.driver).unwrap();
        assert_eq!(health(&gpus), [None, None, None]);
        // Nobody looks while it is gone: its energy tells. It had drawn some since the machine was started.
        inside.state.inject(1, Fault::Lost);
        inside.state.inject(1, Fault::Returned);
        assert_eq!(health(&gpus), [None, None, None]);
        for _ in 0..2 {
            inside.state.inject(1, Fault::Lost);
            let looks = gpus.look();
            assert!(is_well(&looks[0]) && is_well(&looks[2]));
            let lost = &looks[1];
            assert_eq!(lost.uuid.as_str(), inside.config.gpus[1].uuid);
            assert!(lost.health.as_deref().unwrap().starts_with("XID 79: the GPU has fallen off the bus"));
            assert_eq!((lost.memory_used, lost.temperature, &lost.processes), (None, None, &Vec::new()));
            assert_eq!((lost.mig, looks[0].mig), (None, Some(false)));
            // What it is stays known.
            assert_eq!(gpus.node("here").unwrap().gpus, inside.config.expected_inventory("here").gpus);
            // It comes back only by being set up anew: what it reported was of its life before.
            inside.state.inject(1, Fault::Returned);
            let back = gpus.look().remove(1);
            assert!(is_well(&back) && back.memory_used.is_some(), "{back:?}");
        }
        // Nothing is forgiven in advance.
        inside.state.inject(1, Fault::Xid(79));
        assert!(!is_well(&gpus.look()[1]) && !is_well(&gpus.look()[1]));
    });
}

#[test]
fn a_later_session_knows_what_it_is_told_until_a_reset() {
    on("a_later_session_knows_what_it_is_told_until_a_reset", A100, 3, TEST_DRIVER, |inside| {
        let begun = |fatal: &[Fatal]| {
            let gpus = Gpus::open(&inside.driver).unwrap();
            gpus.remember(fatal.to_vec());
            gpus
        };
        let gpus = begun(&[]);
        gpus.look();
        inside.state.inject(0, Fault::Xid(62));
        inside.state.inject(2, Fault::Lost);
        gpus.look();
        let fatal = gpus.fatal();
        let known: Vec<_> = fatal.iter().map(|one| (one.uuid.as_str(), one.xid, one.gone)).collect();
        let uuid = |at: usize| inside.config.gpus[at].uuid.as_str();
        assert_eq!(known, [(uuid(0), 62, false), (uuid(2), 79, true)]);
        assert!(fatal.iter().all(|one| one.energy.is_some()));
        drop(gpus);

        // One that is back is well; of the other nothing has changed.
        inside.state.inject(2, Fault::Returned);
        let gpus = begun(&fatal);
        let seen = health(&gpus);
        assert!(seen[0].as_deref().unwrap().starts_with("XID 62: "), "{seen:?}");
        assert_eq!(seen[1..], [None, None]);
        let fatal = gpus.fatal();
        assert_eq!(fatal.len(), 1);
        drop(gpus);

        // A reset needs that nobody has the GPU open: no session sees it happen.
        inside.state.inject(0, Fault::Lost);
        inside.state.inject(0, Fault::Returned);
        let gpus = begun(&fatal);
        assert_eq!((health(&gpus), gpus.fatal()), (vec![None, None, None], vec![]));
        // What is told of GPUs that are not here is nobody's.
        let other = Fatal { uuid: "GPU-other".into(), xid: 62, gone: false, energy: None };
        gpus.remember(vec![other]);
        assert_eq!((health(&gpus), gpus.fatal()), (vec![None, None, None], vec![]));
    });
}

#[test]
fn a_gpu_that_was_lost_before_is_well_when_it_is_back() {
    on("a_gpu_that_was_lost_before_is_well_when_it_is_back", A100, 2, TEST_DRIVER, |inside| {
        inside.state.inject(0, Fault::Lost);
        let gpus = Gpus::open(&inside.driver).unwrap();
        // It does not say which it is.
        let uuids =
            |gpus: &Gpus| gpus.look().into_iter().map(|look| look.uuid.to_string()).collect::<Vec<_>>();
        assert_eq!(uuids(&gpus), [inside.config.gpus[1].uuid.clone()]);
        assert_eq!(gpus.node("here").unwrap().gpus, inside.config.expected_inventory("here").gpus[1..]);
        inside.state.inject(0, Fault::Returned);
        assert_eq!(uuids(&gpus), inside.config.gpus.iter().map(|gpu| gpu.uuid.clone()).collect::<Vec<_>>());
        assert_eq!(health(&gpus), [None, None]);
        assert_eq!(gpus.node("here").unwrap(), inside.config.expected_inventory("here"));
        // From now on it is listened to.
        inside.state.inject(0, Fault::Xid(62));
        assert!(health(&gpus)[0].as_deref().unwrap().starts_with("XID 62"));
    });
}

#[test]
fn nothing_answers_when_all_are_lost() {
    on("nothing_answers_when_all_are_lost", "T4", 1, TEST_DRIVER, |inside| {
        inside.state.inject(0, Fault::Lost);
        let gpus = Gpus::open(&inside.driver).unwrap();
        assert!(gpus.look().is_empty());
        let words = gpus.node("here").unwrap_err().to_string();
        assert!(words.contains("none of them answers"), "{words}");
    });
}

#[test]
fn a_driver_that_goes_is_told_and_one_that_is_not_there_is_no_session() {
    on(
        "a_driver_that_goes_is_told_and_one_that_is_not_there_is_no_session",
        A100,
        2,
        TEST_DRIVER,
        |inside| {
            let gpus = Gpus::open(&inside.driver).unwrap();
            inside.state.set_loaded(false);
            for look in gpus.look() {
                assert!(look.health.as_deref().unwrap().contains("no longer loaded"), "{look:?}");
            }
            assert_eq!(gpus.look().len(), 2);
            let error = Gpus::open(&inside.driver).unwrap_err();
            assert!(
                matches!(error, GpusError::NotLoaded) && error.to_string().contains("modprobe"),
                "{error}"
            );
            inside.state.set_loaded(true);
            assert_eq!(health(&gpus), [None, None]);
        },
    );
}

#[test]
fn who_uses_a_gpu_is_seen_with_memory_and_time() {
    on("who_uses_a_gpu_is_seen_with_memory_and_time", A100, 2, TEST_DRIVER, |inside| {
        let gpus = Gpus::open(&inside.driver).unwrap();
        let idle = Program::start(&Load { gpu: 1, memory_mib: 300, busy: 0 });
        let busy = Program::start(&Load { gpu: 1, memory_mib: 512, busy: 100 });
        let look = eventually("the busy one is seen to be", || {
            let look = gpus.look().remove(1);
            let percent = look.processes.iter().find(|process| process.pid == busy.pid())?.busy;
            (percent > Some(80) && look.utilisation > Some(80)).then_some(look)
        });
        let of = |program: &Program| {
            look.processes.iter().find(|process| process.pid == program.pid()).cloned().unwrap()
        };
        assert_eq!(look.processes.len(), 2);
        let context = inside.config.profile(1).unwrap().memory.context;
        let rests = Working { pid: idle.pid(), memory: Some(Bytes(context + (300 << 20))), busy: Some(0) };
        assert_eq!(of(&idle), rests);
        // Its kernels take a little too.
        let held = of(&busy).memory.unwrap();
        assert!((0..1 << 20).contains(&(held.0 - context - (512 << 20))), "{look:?}");
        assert_eq!(look.memory_used, Some(Bytes(rests.memory.unwrap().0 + held.0)));
        assert!(gpus.look()[0].processes.is_empty());
        drop((idle, busy));
        eventually("both are gone", || {
            let look = gpus.look().remove(1);
            (look.processes.is_empty() && look.memory_used == Some(Bytes(0))).then_some(())
        });
    });
}

#[test]
fn a_text_is_no_nvml() {
    let folder = tempfile::tempdir().unwrap();
    let nvml = folder.path().join("libnvidia-ml.so.1");
    std::fs::write(&nvml, "not a library, but long enough to be looked at").unwrap();
    let error = Gpus::open(&Driver {
        cuda: "/cuda".into(),
        nvml: nvml.clone(),
        simulated: None,
        others: Default::default(),
    })
    .unwrap_err();
    assert!(matches!(&error, GpusError::NoLibrary { path, .. } if *path == nvml), "{error}");
}
