//! Samples one GPU: health, memory, utilization and processes.

use super::process_utilization::ProcessUtilization;
use super::{TrackedGpu, health, identity};
use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use partage_core::model::{Bytes, GpuUuid};
use std::collections::BTreeMap;

/// The state of a GPU at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuSample {
    /// The UUID of the GPU.
    pub uuid: GpuUuid,
    /// Why the GPU is unhealthy and what to do; `None` while it is healthy.
    pub health: Option<String>,
    /// Whether the GPU is in MIG mode; `None` if it does not respond.
    pub mig: Option<bool>,
    /// The memory in use, without what the driver reserves.
    pub memory_used: Option<Bytes>,
    /// The utilization over the driver's last sampling period, in percent.
    pub utilization: Option<u32>,
    /// The temperature in degrees Celsius.
    pub temperature: Option<u32>,
    /// The power draw in milliwatts.
    pub power_milliwatts: Option<u32>,
    /// The processes with a context on the GPU, by pid.
    pub processes: Vec<GpuProcess>,
}

/// A process with a context on a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuProcess {
    /// The pid in the host's pid namespace.
    pub pid: u32,
    /// The memory that the process holds, including its contexts; `None` if the driver does not report it.
    pub memory: Option<Bytes>,
    /// The utilization by this process since the last sample, in percent; `None` if the driver does not report it.
    pub busy: Option<u32>,
    /// The GPU time of the process that the driver reported since the last sample, in nanoseconds. The driver reports it
    /// up to a second late and in whole percents.
    pub worked_ns: u64,
}

/// A device handle, or why NVML returned none.
pub(super) type DeviceResult<'a> = Result<Device<'a>, NvmlError>;

/// Samples a GPU. Returns `None` if its UUID is unknown.
pub(super) fn take(tracked: &mut TrackedGpu, device: DeviceResult<'_>) -> Option<GpuSample> {
    let health = health::of(tracked, &device);
    let uuid = tracked.identity.as_ref()?.gpu.uuid.clone();
    let device = device.ok();
    let device = device.as_ref();
    Some(GpuSample {
        uuid,
        health,
        mig: device.and_then(identity::is_split),
        memory_used: device.and_then(|gpu| gpu.memory_info().ok()).map(|memory| Bytes(memory.used)),
        utilization: device.and_then(|gpu| gpu.utilization_rates().ok()).map(|rates| rates.gpu),
        temperature: device.and_then(|gpu| gpu.temperature(TemperatureSensor::Gpu).ok()),
        power_milliwatts: device.and_then(|gpu| gpu.power_usage().ok()),
        processes: device.map(|gpu| processes(tracked, gpu)).unwrap_or_default(),
    })
}

/// Returns the processes with a context. A process that uses compute and graphics is in both of NVML's lists, with the
/// same memory.
fn processes(tracked: &mut TrackedGpu, device: &Device<'_>) -> Vec<GpuProcess> {
    let mut held: BTreeMap<u32, Option<Bytes>> = BTreeMap::new();
    let lists = [device.running_compute_processes(), device.running_graphics_processes()];
    for process in lists.into_iter().flatten().flatten() {
        let memory = match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(Bytes(bytes)),
            UsedGpuMemory::Unavailable => None,
        };
        let known = held.entry(process.pid).or_default();
        *known = (*known).max(memory);
    }
    if held.is_empty() {
        // What runs next has not run since the last query.
        tracked.utilization = ProcessUtilization::default();
        return Vec::new();
    }
    let percents = tracked.utilization.update(device).cloned();
    let process = |(pid, memory)| GpuProcess {
        pid,
        memory,
        busy: percents.as_ref().map(|percents| percents.get(&pid).copied().unwrap_or(0)),
        worked_ns: if percents.is_some() { tracked.utilization.worked_ns(pid) } else { 0 },
    };
    held.into_iter().map(process).collect()
}
