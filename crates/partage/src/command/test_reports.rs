//! Reports for unit tests of the views.

use partage_core::model::{Bytes, Cores};
use partage_workstation::report::{
    DaemonReport, DriverReport, GpuReport, GpuShareReport, MachineReport, ProcessReport, ShareReport,
    ShareStage, WaitingReport,
};

/// Returns a report with two GPUs, two shares on the first GPU, one on both, and one queued request.
pub(super) fn report() -> MachineReport {
    let mut trainer = share("trainer", "ada", &[0], 16, 30);
    trainer.gpu_shares[0].used_bytes = Bytes(12 << 30);
    trainer.gpu_shares[0].peak_bytes = Bytes(13 << 30);
    trainer.command = vec!["python".into(), "train.py".into(), "--epochs".into(), "90".into()];
    trainer.processes =
        vec![ProcessReport { pid: 4242, command: "python".into(), held_bytes: vec![Bytes(12 << 30)] }];
    let mut notebook = share("notebook", "bob", &[0], 8, 20);
    notebook.gpu_shares[0].ceiling = Cores::percent(100);
    notebook.gpu_shares[0].used_bytes = Bytes((8 << 30) - (100 << 20));
    notebook.gpu_shares[0].refusals = 3;
    notebook.confinement = "library path".into();
    notebook.bypass_suspected = vec!["process 77 holds 2 GiB of GPU 0 that the shim did not allocate".into()];
    let mut pair = share("pair", "ada", &[0, 1], 4, 0);
    pair.stage = ShareStage::Stopping;
    MachineReport {
        at: 5_000_000_000,
        machine: "box".into(),
        daemon: DaemonReport {
            pid: 99,
            version: "0.1.0".into(),
            since: 1_000_000,
            foreground: false,
            metrics: None,
            warnings: Vec::new(),
        },
        driver: DriverReport { version: "550.163.01".into(), simulated: true },
        gpus: vec![gpu(0, 28, 50), gpu(1, 4, 0)],
        shares: vec![trainer, notebook, pair],
        waiting: vec![WaitingReport {
            name: "late".into(),
            user: "eve".into(),
            requested: "20 GiB of 1 GPU".into(),
            why: "the largest free share is 12 GiB".into(),
            since: 1_000_090,
        }],
    }
}

fn gpu(index: u32, granted: u64, cores: u32) -> GpuReport {
    GpuReport {
        index,
        uuid: uuid(index).as_str().into(),
        model: "NVIDIA A100-SXM4-40GB".into(),
        memory_bytes: Bytes(40 << 30),
        granted_memory_bytes: Bytes(granted << 30),
        guaranteed_cores: Cores::percent(cores).unwrap(),
        reserved_memory_bytes: Bytes::ZERO,
        used_memory_bytes: Some(Bytes(u64::from(20 - 20 * index) << 30)),
        utilization: Some(70),
        temperature: Some(54),
        power_milliwatts: Some(120_500),
        unhealthy: None,
        unowned_processes: Vec::new(),
    }
}

pub(super) fn uuid(index: u32) -> String {
    format!("GPU-00000000-0000-0000-0000-00000000000{index}")
}

/// Returns a share with this memory in GiB and compute in percent; 0 percent is no guarantee.
pub(super) fn share(name: &str, user: &str, gpus: &[u32], memory: u64, cores: u32) -> ShareReport {
    let gpu_share = |&gpu: &u32| GpuShareReport {
        gpu,
        uuid: uuid(gpu).as_str().into(),
        memory_bytes: Bytes::gib(memory),
        cores: Cores::percent(cores).filter(|cores| *cores != Cores::NONE),
        ceiling: None,
        whole: false,
        used_bytes: Bytes::ZERO,
        peak_bytes: Bytes::ZERO,
        refusals: 0,
        throttled_nanos: 0,
        spent_nanos: 0,
        waiting: false,
    };
    ShareReport {
        name: name.into(),
        user: user.into(),
        uid: 1000,
        stage: ShareStage::Running,
        since: 1_000_000,
        pid: 4242,
        command: vec!["work".into()],
        confinement: "mount namespace".into(),
        cgroup: true,
        device_filter: true,
        members: 1,
        processes: Vec::new(),
        oversubscribe: false,
        low_latency: false,
        priority: 0,
        gpu_shares: gpus.iter().map(gpu_share).collect(),
        bypass_suspected: Vec::new(),
    }
}

/// Returns the lines without styles.
pub(super) fn texts(lines: &[crate::terminal::StyledLine]) -> Vec<String> {
    lines.iter().map(|line| line.text().to_string()).collect()
}
