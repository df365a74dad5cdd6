//! Compares what NVML reports about simulated GPUs with their configuration.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "support/sim_node.rs"]
mod node;

use node::{NodeTest, TestWorkload, eventually, on};
use partage_core::model::Bytes;
use partage_driver_api::exports::DriverVersion;
use partage_host::driver::InstalledDriver;
use partage_host::gpus::{FatalGpuError, GpuProcess, GpuSample, NvmlSession, NvmlSessionError, uuid_bytes};
use partage_sim_node::state::GpuFault;
use partage_testkit::workload::WorkloadOptions;

const A100: &str = "A100-SXM4-40GB";
const TEST_DRIVER: DriverVersion = DriverVersion::R550;

/// Not a test: a program that uses a GPU.
#[test]
fn workload() {
    node::work();
}

/// Samples all GPUs and returns their health.
fn health(gpus: &NvmlSession) -> Vec<Option<String>> {
    gpus.sample().into_iter().map(|sample| sample.health).collect()
}

fn is_healthy(sample: &GpuSample) -> bool {
    sample.health.is_none()
}

#[test]
fn node_matches_the_configuration() {
    for driver in DriverVersion::ALL {
        for (card, count) in [(A100, 8), (A100, 1), ("T4", 3), ("H100-SXM5-80GB", 8)] {
            on("node_matches_the_configuration", card, count, driver, |inside: NodeTest| {
                let gpus = NvmlSession::open(&inside.driver).unwrap();
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
fn idle_gpu_is_sampled() {
    on("idle_gpu_is_sampled", "T4", 2, DriverVersion::R535, |inside| {
        let samples = NvmlSession::open(&inside.driver).unwrap().sample();
        for (sample, gpu) in samples.iter().zip(&inside.config.gpus) {
            assert_eq!(sample.uuid.as_str(), gpu.uuid);
            assert!(uuid_bytes(&sample.uuid).is_some());
            assert_eq!(
                (&sample.health, sample.memory_used, sample.utilization),
                (&None, Some(Bytes(0)), Some(0))
            );
            assert!(sample.processes.is_empty());
            assert!(sample.temperature.is_some_and(|degrees| (15..80).contains(&degrees)), "{sample:?}");
            assert!(
                sample.power_milliwatts.is_some_and(|power| (1_000..70_000).contains(&power)),
                "{sample:?}"
            );
        }
        assert_eq!(samples.len(), 2);
    });
}

#[test]
fn only_fatal_xids_make_a_gpu_unhealthy() {
    on("only_fatal_xids_make_a_gpu_unhealthy", A100, 2, TEST_DRIVER, |inside| {
        let gpus = NvmlSession::open(&inside.driver).unwrap();
        for xid in [13, 31, 43, 45, 63, 94] {
            inside.state.inject(0, GpuFault::Xid(xid));
        }
        inside.state.inject(0, GpuFault::CorrectedErrors(7));
        inside.state.inject(0, GpuFault::Slow(2000));
        assert_eq!(health(&gpus), [None, None]);
        inside.state.inject(1, GpuFault::Xid(119));
        inside.state.inject(1, GpuFault::Xid(13));
        let seen = health(&gpus);
        assert_eq!(seen[0], None);
        let message = seen[1].as_deref().unwrap();
        assert!(message.starts_with("XID 119: ") && message.contains("reset"), "{message}");
        // The XID was reported once, and stays because no GPU was reset.
        assert_eq!(health(&gpus), seen);
        assert_eq!(health(&gpus), seen);
        // Health does not change the inventory.
        assert_eq!(gpus.node("here").unwrap(), inside.config.expected_inventory("here"));
        // A later session did not see the XID, and needs the restored error.
        drop(gpus);
        assert_eq!(health(&NvmlSession::open(&inside.driver).unwrap()), [None, None]);
    });
}

#[test]
fn uncorrectable_errors_stay_until_a_reset() {
    on("uncorrectable_errors_stay_until_a_reset", A100, 1, TEST_DRIVER, |inside| {
        inside.state.inject(0, GpuFault::UncorrectedErrors(2));
        // The XID was reported before this session; the counter remains.
        let gpus = NvmlSession::open(&inside.driver).unwrap();
        let message = health(&gpus).remove(0).unwrap();
        assert!(message.starts_with("uncorrectable memory errors"), "{message}");
        inside.state.inject(0, GpuFault::UncorrectedErrors(1));
        let message = health(&gpus).remove(0).unwrap();
        assert!(message.starts_with("XID 48: "), "{message}");
        inside.state.inject(0, GpuFault::Lost);
        inside.state.inject(0, GpuFault::Returned);
        // In the session that saw it, and in a new one.
        assert_eq!(health(&gpus), [None]);
        assert_eq!(health(&NvmlSession::open(&inside.driver).unwrap()), [None]);
    });
}

#[test]
fn contained_memory_errors_leave_a_gpu_healthy() {
    on("contained_memory_errors_leave_a_gpu_healthy", A100, 1, TEST_DRIVER, |inside| {
        // No session reads the XID that the simulated card reports with them: only the counter remains.
        inside.state.inject(0, GpuFault::UncorrectedErrors(1));
        let gpus = NvmlSession::open(&inside.driver).unwrap();
        let alone = health(&gpus).remove(0).unwrap();
        inside.state.inject(0, GpuFault::Xid(94));
        assert_eq!(health(&gpus), [None]);
        assert_eq!(health(&gpus), [None]);
        // A later session gets the contained error.
        let kept = gpus.fatal_errors();
        assert_eq!(kept.iter().map(|one| (one.xid, one.is_fatal())).collect::<Vec<_>>(), [(94, false)]);
        drop(gpus);
        let gpus = NvmlSession::open(&inside.driver).unwrap();
        assert_eq!(health(&gpus), [Some(alone)]);
        gpus.restore_fatal_errors(kept);
        assert_eq!(health(&gpus), [None]);
        // An error that was not contained is still reported.
        inside.state.inject(0, GpuFault::UncorrectedErrors(1));
        assert!(health(&gpus).remove(0).unwrap().starts_with("XID 48: "));
    });
}

#[test]
fn lost_gpu_is_unhealthy_until_it_returns() {
    on("lost_gpu_is_unhealthy_until_it_returns", A100, 3, TEST_DRIVER, |inside| {
        let gpus = NvmlSession::open(&inside.driver).unwrap();
        assert_eq!(health(&gpus), [None, None, None]);
        // No sample is taken while it is gone: its energy counter shows the reset.
        inside.state.inject(1, GpuFault::Lost);
        inside.state.inject(1, GpuFault::Returned);
        assert_eq!(health(&gpus), [None, None, None]);
        for _ in 0..2 {
            inside.state.inject(1, GpuFault::Lost);
            let samples = gpus.sample();
            assert!(is_healthy(&samples[0]) && is_healthy(&samples[2]));
            let lost = &samples[1];
            assert_eq!(lost.uuid.as_str(), inside.config.gpus[1].uuid);
            assert!(lost.health.as_deref().unwrap().starts_with("XID 79: the GPU has fallen off the bus"));
            assert_eq!((lost.memory_used, lost.temperature, &lost.processes), (None, None, &Vec::new()));
            assert_eq!((lost.mig, samples[0].mig), (None, Some(false)));
            // Its identity stays known.
            assert_eq!(gpus.node("here").unwrap().gpus, inside.config.expected_inventory("here").gpus);
            // It comes back only after a reset, which clears the XID.
            inside.state.inject(1, GpuFault::Returned);
            let back = gpus.sample().remove(1);
            assert!(is_healthy(&back) && back.memory_used.is_some(), "{back:?}");
        }
        // A later report of the same XID counts.
        inside.state.inject(1, GpuFault::Xid(79));
        assert!(!is_healthy(&gpus.sample()[1]) && !is_healthy(&gpus.sample()[1]));
    });
}

#[test]
fn restored_errors_stay_until_a_reset() {
    on("restored_errors_stay_until_a_reset", A100, 3, TEST_DRIVER, |inside| {
        let begun = |fatal: &[FatalGpuError]| {
            let gpus = NvmlSession::open(&inside.driver).unwrap();
            gpus.restore_fatal_errors(fatal.to_vec());
            gpus
        };
        let gpus = begun(&[]);
        gpus.sample();
        inside.state.inject(0, GpuFault::Xid(62));
        inside.state.inject(2, GpuFault::Lost);
        gpus.sample();
        let fatal = gpus.fatal_errors();
        let known: Vec<_> = fatal.iter().map(|one| (one.uuid.as_str(), one.xid, one.gone)).collect();
        let uuid = |at: usize| inside.config.gpus[at].uuid.as_str();
        assert_eq!(known, [(uuid(0), 62, false), (uuid(2), 79, true)]);
        assert!(fatal.iter().all(|one| one.energy.is_some()));
        drop(gpus);

        // The returned GPU has recovered; the other one is unchanged.
        inside.state.inject(2, GpuFault::Returned);
        let gpus = begun(&fatal);
        let seen = health(&gpus);
        assert!(seen[0].as_deref().unwrap().starts_with("XID 62: "), "{seen:?}");
        assert_eq!(seen[1..], [None, None]);
        let fatal = gpus.fatal_errors();
        assert_eq!(fatal.len(), 1);
        drop(gpus);

        // A reset requires that no process has the GPU open, so no session observes it.
        inside.state.inject(0, GpuFault::Lost);
        inside.state.inject(0, GpuFault::Returned);
        let gpus = begun(&fatal);
        assert_eq!((health(&gpus), gpus.fatal_errors()), (vec![None, None, None], vec![]));
        // Errors of unknown GPUs are ignored.
        let other = FatalGpuError { uuid: "GPU-other".into(), xid: 62, gone: false, energy: None };
        gpus.restore_fatal_errors(vec![other]);
        assert_eq!((health(&gpus), gpus.fatal_errors()), (vec![None, None, None], vec![]));
    });
}

#[test]
fn gpu_lost_before_the_session_recovers_when_it_returns() {
    on("gpu_lost_before_the_session_recovers_when_it_returns", A100, 2, TEST_DRIVER, |inside| {
        inside.state.inject(0, GpuFault::Lost);
        let gpus = NvmlSession::open(&inside.driver).unwrap();
        // Its UUID is unknown.
        let uuids = |gpus: &NvmlSession| {
            gpus.sample().into_iter().map(|sample| sample.uuid.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(uuids(&gpus), [inside.config.gpus[1].uuid.clone()]);
        assert_eq!(gpus.node("here").unwrap().gpus, inside.config.expected_inventory("here").gpus[1..]);
        inside.state.inject(0, GpuFault::Returned);
        assert_eq!(uuids(&gpus), inside.config.gpus.iter().map(|gpu| gpu.uuid.clone()).collect::<Vec<_>>());
        assert_eq!(health(&gpus), [None, None]);
        assert_eq!(gpus.node("here").unwrap(), inside.config.expected_inventory("here"));
        // Its events are collected from now on.
        inside.state.inject(0, GpuFault::Xid(62));
        assert!(health(&gpus)[0].as_deref().unwrap().starts_with("XID 62"));
    });
}

#[test]
fn no_sample_when_all_gpus_are_lost() {
    on("no_sample_when_all_gpus_are_lost", "T4", 1, TEST_DRIVER, |inside| {
        inside.state.inject(0, GpuFault::Lost);
        let gpus = NvmlSession::open(&inside.driver).unwrap();
        assert!(gpus.sample().is_empty());
        let message = gpus.node("here").unwrap_err().to_string();
        assert!(message.contains("no GPU responds"), "{message}");
    });
}

#[test]
fn unloaded_driver_makes_gpus_unhealthy_and_prevents_a_session() {
    on("unloaded_driver_makes_gpus_unhealthy_and_prevents_a_session", A100, 2, TEST_DRIVER, |inside| {
        let gpus = NvmlSession::open(&inside.driver).unwrap();
        inside.state.set_loaded(false);
        for sample in gpus.sample() {
            assert!(sample.health.as_deref().unwrap().contains("no longer loaded"), "{sample:?}");
        }
        assert_eq!(gpus.sample().len(), 2);
        let error = NvmlSession::open(&inside.driver).unwrap_err();
        assert!(
            matches!(error, NvmlSessionError::KernelModuleNotLoaded)
                && error.to_string().contains("modprobe"),
            "{error}"
        );
        inside.state.set_loaded(true);
        assert_eq!(health(&gpus), [None, None]);
    });
}

#[test]
fn processes_are_sampled_with_memory_and_utilization() {
    on("processes_are_sampled_with_memory_and_utilization", A100, 2, TEST_DRIVER, |inside| {
        let gpus = NvmlSession::open(&inside.driver).unwrap();
        let idle = TestWorkload::start(&WorkloadOptions { gpu: 1, memory_mib: 300, busy: 0 });
        let busy = TestWorkload::start(&WorkloadOptions { gpu: 1, memory_mib: 512, busy: 100 });
        let sample = eventually("the utilization of the busy process is reported", || {
            let sample = gpus.sample().remove(1);
            let percent = sample.processes.iter().find(|process| process.pid == busy.pid())?.busy;
            (percent > Some(80) && sample.utilization > Some(80)).then_some(sample)
        });
        let of = |program: &TestWorkload| {
            sample.processes.iter().find(|process| process.pid == program.pid()).cloned().unwrap()
        };
        assert_eq!(sample.processes.len(), 2);
        let context = inside.config.profile(1).unwrap().memory.context;
        let rests = GpuProcess {
            pid: idle.pid(),
            memory: Some(Bytes(context + (300 << 20))),
            busy: Some(0),
            worked_ns: 0,
        };
        assert_eq!(of(&idle), rests);
        // Its kernels take some memory, too.
        let held = of(&busy).memory.unwrap();
        assert!((0..1 << 20).contains(&(held.0 - context - (512 << 20))), "{sample:?}");
        assert_eq!(sample.memory_used, Some(Bytes(rests.memory.unwrap().0 + held.0)));
        assert!(gpus.sample()[0].processes.is_empty());
        drop((idle, busy));
        eventually("both processes are gone", || {
            let sample = gpus.sample().remove(1);
            (sample.processes.is_empty() && sample.memory_used == Some(Bytes(0))).then_some(())
        });
    });
}

#[test]
fn text_file_is_not_loaded_as_nvml() {
    let folder = tempfile::tempdir().unwrap();
    let nvml = folder.path().join("libnvidia-ml.so.1");
    std::fs::write(&nvml, "not a library, but long enough to be looked at").unwrap();
    let error = NvmlSession::open(&InstalledDriver {
        cuda: "/cuda".into(),
        nvml: nvml.clone(),
        simulated: None,
        others: Default::default(),
    })
    .unwrap_err();
    assert!(matches!(&error, NvmlSessionError::LoadFailed { path, .. } if *path == nvml), "{error}");
}
