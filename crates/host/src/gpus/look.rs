//! One look at one GPU.

use super::{Seen, words, xid};
use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError, TemperatureSensor};
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
type Found<'a> = Result<Device<'a>, NvmlError>;

/// Looks at a GPU; `None` if it never said which it is.
pub(super) fn at(seen: &mut Seen, device: Found<'_>) -> Option<Look> {
    let health = health(seen, &device);
    let uuid = seen.identity.as_ref()?.gpu.uuid.clone();
    let device = device.ok();
    let device = device.as_ref();
    Some(Look {
        uuid,
        health,
        memory_used: device.and_then(|gpu| gpu.memory_info().ok()).map(|memory| Bytes(memory.used)),
        utilisation: device.and_then(|gpu| gpu.utilization_rates().ok()).map(|rates| rates.gpu),
        temperature: device.and_then(|gpu| gpu.temperature(TemperatureSensor::Gpu).ok()),
        power_milliwatts: device.and_then(|gpu| gpu.power_usage().ok()),
        processes: device.map(|gpu| processes(seen, gpu)).unwrap_or_default(),
    })
}

/// What is wrong with a GPU. What it reported is taken in, and what was not known of it is asked for.
fn health(seen: &mut Seen, device: &Found<'_>) -> Option<String> {
    let now = match device {
        Ok(device) => {
            seen.meet(device);
            ill(device)
        }
        Err(error) => words::ill(error),
    };
    for xid in seen.events.xids() {
        if seen.fatal.is_none() && xid::fatal(xid).is_some() {
            seen.fatal = Some(xid);
        }
    }
    // The XID says why; what is seen now may be all there is.
    seen.fatal.and_then(xid::fatal).or(now)
}

/// What can be seen to be wrong.
fn ill(device: &Device<'_>) -> Option<String> {
    // Something that only a GPU that is there can answer.
    if let Some(words) = device.uuid().err().and_then(|error| words::ill(&error)) {
        return Some(words);
    }
    match device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile) {
        Ok(0) => None,
        Ok(errors) => Some(format!(
            "{errors} memory error{} could not be corrected: {}",
            if errors == 1 { "" } else { "s" },
            xid::RESET
        )),
        Err(error) => words::ill(&error),
    }
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
