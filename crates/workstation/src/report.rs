//! What the keeper tells about the machine: one document, from which `ps`, `top`, `inspect` and the metrics are made.

use partage_core::model::{Bytes, Cores, GpuUuid};
use serde::{Deserialize, Serialize};

/// Everything at one time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// When: nanoseconds of the machine's monotonic clock. Rates are taken between two reports.
    pub at: u64,
    /// The machine's name.
    pub machine: String,
    /// Who made the report.
    pub keeper: KeeperReport,
    /// The driver in use.
    pub driver: DriverReport,
    /// The GPUs, in the driver's order.
    pub gpus: Vec<GpuReport>,
    /// The shares, oldest first.
    pub shares: Vec<ShareReport>,
    /// Who waits for a share, in the order of arrival.
    pub waiting: Vec<WaitingReport>,
}

/// The keeper itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KeeperReport {
    /// Its process.
    pub pid: u32,
    /// Its version.
    pub version: String,
    /// Seconds since 1970 at which it started.
    pub since: u64,
    /// Whether it is `partage up`; else it runs in the background and ends with the last share.
    pub foreground: bool,
    /// Where its metrics are, if they are served: `127.0.0.1:9464`.
    pub metrics: Option<String>,
    /// What is not as it should be with the machine as a whole, in words.
    pub warnings: Vec<String>,
}

/// The driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DriverReport {
    /// Its version: `550.163.01`.
    pub version: String,
    /// Whether it is Partage's simulated one.
    pub simulated: bool,
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuReport {
    /// Its number in the driver's order.
    pub index: u32,
    /// Its UUID.
    pub uuid: GpuUuid,
    /// Its model: `NVIDIA A100-SXM4-40GB`.
    pub model: String,
    /// Its memory.
    pub memory_bytes: Bytes,
    /// Memory that shares were given.
    pub promised_memory_bytes: Bytes,
    /// Compute that shares were promised.
    pub promised_cores: Cores,
    /// Memory that is kept for users by the settings and not in use by them.
    pub reserved_memory_bytes: Bytes,
    /// Memory in use, as the driver says.
    pub used_memory_bytes: Option<Bytes>,
    /// Percent of the last moments in which it worked, as the driver says.
    pub utilisation: Option<u32>,
    /// Degrees Celsius.
    pub temperature: Option<u32>,
    /// Thousandths of a watt.
    pub power_milliwatts: Option<u32>,
    /// Why it is not given to anybody; absent = it is well.
    pub unhealthy: Option<String>,
    /// Processes on it that belong to no share.
    pub strangers: Vec<u32>,
}

/// Where a share is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Stage {
    /// Its command is about to start.
    Starting,
    /// Its command runs.
    Running,
    /// Its command has ended, processes that it left behind have not.
    Lingering,
    /// It is being stopped.
    Stopping,
}

/// A share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareReport {
    /// Its name, the only one of the machine.
    pub name: String,
    /// Whose it is, by name or number.
    pub user: String,
    /// Whose it is.
    pub uid: u32,
    /// Where it is in its life.
    pub stage: Stage,
    /// Seconds since 1970 at which it was given.
    pub since: u64,
    /// The command's process.
    pub pid: u32,
    /// The command.
    pub command: Vec<String>,
    /// What ties its processes to it: `mount namespace`, `user namespace`, `library path`.
    pub binding: String,
    /// Whether a cgroup holds its processes.
    pub cgroup: bool,
    /// Whether device files of other GPUs are closed to it.
    pub device_gate: bool,
    /// Its processes that the keeper sees.
    pub members: usize,
    /// Its processes that use a GPU.
    pub processes: Vec<ProcessReport>,
    /// Whether memory beyond its limits is placed on the host.
    #[serde(default)]
    pub oversubscribe: bool,
    /// What it has of each GPU.
    pub parts: Vec<PartReport>,
    /// What looks like a way around its limits, in words.
    pub bypass_suspected: Vec<String>,
}

/// What a share has of one GPU, and what it made of it. Times and counts are sums since it was given.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PartReport {
    /// The GPU's number.
    pub gpu: u32,
    /// The GPU's UUID.
    pub uuid: GpuUuid,
    /// The memory limit.
    pub memory_bytes: Option<Bytes>,
    /// The compute promised.
    pub cores: Option<Cores>,
    /// How far the compute may go; absent = as far as promised, or without end where nothing was promised.
    pub ceiling: Option<Cores>,
    /// Nobody else is on the GPU.
    pub whole: bool,
    /// Memory in use.
    pub used_bytes: Bytes,
    /// The most memory that was ever in use.
    pub peak_bytes: Bytes,
    /// Allocations that its own limit refused.
    pub refusals: u64,
    /// Nanoseconds its processes were kept waiting for their turn.
    pub throttled_nanos: u64,
    /// Nanoseconds of the GPU's time it used.
    pub spent_nanos: u64,
    /// Whether somebody waits for a turn right now.
    pub waiting: bool,
}

/// A process that uses a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessReport {
    /// Its number on this machine.
    pub pid: u32,
    /// What it runs: the first word of its command line; empty where that cannot be read.
    pub command: String,
    /// What it holds of each part's GPU, in the order of the parts.
    pub held_bytes: Vec<Bytes>,
}

/// Somebody who waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WaitingReport {
    /// The name the share will have.
    pub name: String,
    /// Who.
    pub user: String,
    /// What was asked: `8 GiB and 30 % of 1 GPU`.
    pub asked: String,
    /// Why not now.
    pub why: String,
    /// Seconds since 1970.
    pub since: u64,
}
