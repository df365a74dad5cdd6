//! One look at one GPU.

use super::{Seen, health, identity};
use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use partage_core::model::{Bytes, GpuUuid};
use std::collections::BTreeMap;

/// How a GPU is, and who uses it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Look {
    /// Which GPU.
    pub uuid: GpuUuid,
    /// What is wrong with it and what to do; `None` while it is well.
    pub health: Option<String>,
    /// Whether it is in MIG mode; `None` where it does not answer.
    pub mig: Option<bool>,
    /// Memory in use, without what the driver keeps for itself.
    pub memory_used: Option<Bytes>,
    /// Percent of the last moments during which anything ran.
    pub utilisation: Option<u32>,
    /// Degrees Celsius.
    pub temperature: Option<u32>,
    /// What it takes.
    pub power_milliwatts: Option<u32>,
    /// Who has a context on it, by pid.
    pub processes: Vec<Working>,
}

/// A process on a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Working {
    /// Its pid, as the machine counts them.
    pub pid: u32,
    /// What it holds, its contexts included.
    pub memory: Option<Bytes>,
    /// Percent of the time since the last look that its work ran; `None` where the driver does not tell.
    pub busy: Option<u32>,
}

/// A GPU, or why there is none to ask.
pub(super) type Found<'a> = Result<Device<'a>, NvmlError>;

/// Looks at a GPU; `None` if it never said which it is.
pub(super) fn at(seen: &mut Seen, device: Found<'_>) -> Option<Look> {
    let health = health::of(seen, &device);
    let uuid = seen.identity.as_ref()?.gpu.uuid.clone();
    let device = device.ok();
    let device = device.as_ref();
    Some(Look {
        uuid,
        health,
        mig: device.and_then(identity::is_split),
        memory_used: device.and_then(|gpu| gpu.memory_info().ok()).map(|memory| Bytes(memory.used)),
        utilisation: device.and_then(|gpu| gpu.utilization_rates().ok()).map(|rates| rates.gpu),
        temperature: device.and_then(|gpu| gpu.temperature(TemperatureSensor::Gpu).ok()),
        power_milliwatts: device.and_then(|gpu| gpu.power_usage().ok()),
        processes: device.map(|gpu| processes(seen, gpu)).unwrap_or_default(),
    })
}

/// Who has a context. A process that computes and draws is in both lists, with the same memory.
fn processes(seen: &mut Seen, device: &Device<'_>) -> Vec<Working> {
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
        return Vec::new();
    }
    let busy = seen.busy.ask(device);
    let busy = |pid: u32| busy.map(|percents| percents.get(&pid).copied().unwrap_or(0));
    held.into_iter().map(|(pid, memory)| Working { pid, memory, busy: busy(pid) }).collect()
}
