//! The daemon's report about the machine: one document, from which `ps`, `top`, `inspect` and the metrics are created.
//!
//! The serialized names are part of the protocol: commands of the version before parse them.

use partage_core::model::{Bytes, Cores, GpuUuid};
use serde::{Deserialize, Serialize};

/// The state of the machine at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineReport {
    /// The time, in nanoseconds of the monotonic clock. Rates are computed between two reports.
    pub at: u64,
    /// The host name of the machine.
    pub machine: String,
    /// The daemon that created the report.
    #[serde(alias = "keeper")]
    pub daemon: DaemonReport,
    /// The driver that is used.
    pub driver: DriverReport,
    /// The GPUs, in the driver's order.
    pub gpus: Vec<GpuReport>,
    /// The shares, oldest first.
    pub shares: Vec<ShareReport>,
    /// The requests that wait for capacity, in the order of arrival.
    pub waiting: Vec<WaitingReport>,
}

/// The state of the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DaemonReport {
    /// The pid of the daemon.
    pub pid: u32,
    /// The version of the daemon.
    pub version: String,
    /// The start time of the daemon, in seconds since 1970.
    pub since: u64,
    /// Whether it is `partage up`; else it runs in the background and exits after the last share.
    pub foreground: bool,
    /// The address where metrics are served, if they are: `127.0.0.1:9464`.
    pub metrics: Option<String>,
    /// Warnings about the machine as a whole.
    pub warnings: Vec<String>,
}

/// The driver of the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DriverReport {
    /// The version, such as `550.163.01`.
    pub version: String,
    /// Whether it is the simulated driver.
    pub simulated: bool,
}

/// The state of a GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuReport {
    /// The index in the driver's order.
    pub index: u32,
    /// The UUID of the GPU.
    pub uuid: GpuUuid,
    /// The model name, such as `NVIDIA A100-SXM4-40GB`.
    pub model: String,
    /// The memory that programs can allocate.
    pub memory_bytes: Bytes,
    /// The memory that is granted to shares.
    #[serde(alias = "promisedMemoryBytes")]
    pub granted_memory_bytes: Bytes,
    /// The compute that is guaranteed to shares.
    #[serde(alias = "promisedCores")]
    pub guaranteed_cores: Cores,
    /// The memory that the settings reserve for users and that these do not hold.
    pub reserved_memory_bytes: Bytes,
    /// The memory in use, from NVML.
    pub used_memory_bytes: Option<Bytes>,
    /// The utilization over the last sampling period, from NVML, in percent.
    #[serde(alias = "utilisation")]
    pub utilization: Option<u32>,
    /// The temperature in degrees Celsius.
    pub temperature: Option<u32>,
    /// The power draw in milliwatts.
    pub power_milliwatts: Option<u32>,
    /// Why no shares of the GPU are granted; absent while it is healthy.
    pub unhealthy: Option<String>,
    /// The pids of processes on the GPU that belong to no share.
    #[serde(alias = "strangers")]
    pub unowned_processes: Vec<u32>,
}

/// The lifecycle stage of a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ShareStage {
    /// The command is about to start.
    Starting,
    /// The command of the share runs.
    Running,
    /// The command has exited, but processes that it started still run.
    Lingering,
    /// The share is being stopped.
    Stopping,
}

/// The state of a share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareReport {
    /// The name, unique on the machine.
    pub name: String,
    /// The owner, by name, or by id if the user has no name.
    pub user: String,
    /// The user id of the owner.
    pub uid: u32,
    /// The lifecycle stage of the share.
    pub stage: ShareStage,
    /// When the share was granted, in seconds since 1970.
    pub since: u64,
    /// The pid of the command.
    pub pid: u32,
    /// The command with its arguments.
    pub command: Vec<String>,
    /// How its processes are confined: `mount namespace`, `user namespace`, `library path`.
    #[serde(alias = "binding")]
    pub confinement: String,
    /// Whether its processes are in a cgroup of their own.
    pub cgroup: bool,
    /// Whether the device filter denies the device files of other GPUs.
    pub device_filter: bool,
    /// The number of its processes.
    pub members: usize,
    /// The processes that use a GPU.
    pub processes: Vec<ProcessReport>,
    /// Whether memory above the limit is allocated on the host.
    #[serde(default)]
    pub oversubscribe: bool,
    /// Whether its launches start soon beside long kernels of others.
    #[serde(default)]
    pub low_latency: bool,
    /// Its priority among shares that want the same turn.
    #[serde(default)]
    pub priority: u32,
    /// The share of each GPU.
    #[serde(alias = "parts")]
    pub gpu_shares: Vec<GpuShareReport>,
    /// Findings of the bypass audit.
    pub bypass_suspected: Vec<String>,
}

/// The limits and the usage of a share on one GPU. Times and counts are totals since the share was granted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuShareReport {
    /// The index of the GPU.
    pub gpu: u32,
    /// The UUID of the GPU.
    pub uuid: GpuUuid,
    /// The memory limit; absent if there is none.
    pub memory_bytes: Option<Bytes>,
    /// The guaranteed compute; absent if none is guaranteed.
    pub cores: Option<Cores>,
    /// The compute limit; if absent, the guarantee is the limit, or there is none without a guarantee.
    pub ceiling: Option<Cores>,
    /// Whether the share has the GPU to itself.
    pub whole: bool,
    /// The memory in use.
    pub used_bytes: Bytes,
    /// The highest memory use so far.
    pub peak_bytes: Bytes,
    /// The number of allocations that the memory limit refused.
    pub refusals: u64,
    /// The time that its threads waited for their turn, in nanoseconds.
    pub throttled_nanos: u64,
    /// The GPU time that it used, in nanoseconds.
    pub spent_nanos: u64,
    /// Whether a process waits for its turn now.
    pub waiting: bool,
}

/// A process of a share that uses a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessReport {
    /// The pid on this machine.
    pub pid: u32,
    /// The first word of its command line; empty if it cannot be read.
    pub command: String,
    /// The memory that it holds on each GPU, in the order of the share's GPUs.
    pub held_bytes: Vec<Bytes>,
}

/// A request that waits for capacity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WaitingReport {
    /// The name that the share will have.
    pub name: String,
    /// The user, by name or id.
    pub user: String,
    /// The request, such as `8 GiB and 30 % of 1 GPU`.
    #[serde(alias = "asked")]
    pub requested: String,
    /// Why it does not fit now.
    pub why: String,
    /// When the request arrived, in seconds since 1970.
    pub since: u64,
}

#[cfg(test)]
mod tests {
    use super::{GpuReport, ShareReport};
    use partage_core::model::{Bytes, Cores};
    use serde_json::json;

    #[test]
    fn field_names_of_the_version_before_are_read() {
        let gpu: GpuReport = serde_json::from_value(json!({
            "index": 0, "uuid": "GPU-0", "model": "Tesla T4", "memoryBytes": 16, "promisedMemoryBytes": 8,
            "promisedCores": Cores::WHOLE, "reservedMemoryBytes": 0, "strangers": [7],
        }))
        .unwrap();
        assert_eq!((gpu.granted_memory_bytes, gpu.guaranteed_cores), (Bytes(8), Cores::WHOLE));
        assert_eq!(gpu.unowned_processes, [7]);
        let written = serde_json::to_value(&gpu).unwrap();
        assert_eq!(written["unownedProcesses"], json!([7]));

        let gpu_share = json!({
            "gpu": 0, "uuid": "GPU-0", "memoryBytes": 4, "cores": null, "ceiling": null, "whole": false, "usedBytes": 3,
            "peakBytes": 3, "refusals": 0, "throttledNanos": 0, "spentNanos": 0, "waiting": false,
        });
        let share: ShareReport = serde_json::from_value(json!({
            "name": "trainer", "user": "ada", "uid": 1000, "stage": "running", "since": 1, "pid": 7, "command": ["python"],
            "binding": "mount namespace", "cgroup": true, "deviceFilter": false, "members": 1, "processes": [],
            "parts": [gpu_share.clone()], "bypassSuspected": [],
        }))
        .unwrap();
        assert_eq!(
            (share.confinement.as_str(), share.gpu_shares[0].used_bytes),
            ("mount namespace", Bytes(3))
        );
        assert_eq!(serde_json::to_value(&share).unwrap()["gpuShares"], json!([gpu_share]));
    }
}
