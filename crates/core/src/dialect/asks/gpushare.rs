//! Aliyun gpushare: `aliyun.com/gpu-mem`, and `aliyun.com/gpu-count` to split it over several GPUs.

use super::super::defaults::DialectDefaults;
use super::super::{Dialect, DialectSettings};
use super::WantResult;
use super::memory::MemoryCounter;
use super::resource_list::{ResourceList, UnclearAsk};
use crate::model::{MemoryAsk, ShareAsk, WantedGpus};
use crate::pod::PodManifest;
use crate::truncate::shorten;

/// The resource for memory, in the unit of the cluster.
pub(in crate::dialect) const MEMORY: &str = "aliyun.com/gpu-mem";
pub(super) const COUNT: &str = "aliyun.com/gpu-count";
pub(super) const RESOURCES: [&str; 2] = [MEMORY, COUNT];

/// Reads the request of one container.
pub(super) fn read(list: &mut ResourceList<'_>, pod: &PodManifest, settings: &DialectSettings) -> WantResult {
    let (units, count) = (list.count(MEMORY), read_count(list, pod));
    let (units, count) = (units?, count?);
    let Some(units @ 1..) = units else {
        let message =
            format!("splits memory over GPUs, but no memory is requested: add {MEMORY}, the total memory");
        return Err(list.problem(COUNT, message));
    };
    let spread = u64::from(count);
    let counter = MemoryCounter {
        resource: MEMORY,
        unit: settings.gpushare_unit.bytes(),
        gpus: spread,
        mib_advice: ", or pass --gpushare-unit MiB if that is the unit of your cluster",
    };
    let memory = MemoryAsk::Exactly(counter.bytes(units, list)?);
    if units % spread != 0 {
        let (less, more) = (units - units % spread, units.next_multiple_of(spread));
        let choice = if less > 0 { format!("{less} or {more}") } else { more.to_string() };
        let message = format!("{units} cannot be split evenly over {count} GPUs: write {choice}");
        return Err(list.problem(MEMORY, message));
    }
    let cores = DialectDefaults::of(Dialect::Gpushare).cores();
    Ok(cores
        .map(|cores| WantedGpus { count, share: ShareAsk { memory, cores, whole: false, ceiling: None } }))
}

/// Reads the number of GPUs: a resource of the container, or a label or annotation of the pod, as ACK (Alibaba's
/// Kubernetes service) uses it.
fn read_count(list: &mut ResourceList<'_>, pod: &PodManifest) -> Result<u32, UnclearAsk> {
    if let Some(count @ 1..) = list.gpu_count(COUNT)? {
        return Ok(count);
    }
    match pod.labels.get(COUNT).or_else(|| pod.annotations.get(COUNT)) {
        None => Ok(1),
        Some(text) => match text.parse::<u64>() {
            Ok(count) => list.check_gpu_count(COUNT, count.max(1)),
            Err(_) => {
                let text = shorten(text);
                let message = format!("\"{text}\" is not a number of GPUs: write a whole number, 1 or more");
                Err(list.problem(COUNT, message))
            }
        },
    }
}
