//! Aliyun gpushare: `aliyun.com/gpu-mem`, and `aliyun.com/gpu-count` to spread it over several GPUs.

use super::super::absent::Absent;
use super::super::{Dialect, Settings};
use super::Read;
use super::lines::{Lines, Unclear};
use super::memory::Counter;
use crate::model::{MemoryAsk, ShareAsk, WantedGpus};
use crate::pod::Pod;
use crate::quote::short;

/// Memory.
pub(in crate::dialect) const MEMORY: &str = "aliyun.com/gpu-mem";
pub(super) const COUNT: &str = "aliyun.com/gpu-count";
pub(super) const RESOURCES: [&str; 2] = [MEMORY, COUNT];

pub(super) fn read(lines: &mut Lines<'_>, pod: &Pod, settings: &Settings) -> Read {
    let (units, count) = (lines.count(MEMORY), count(lines, pod));
    let (units, count) = (units?, count?);
    let Some(units @ 1..) = units else {
        let message =
            format!("says over how many GPUs to spread, but not what: add {MEMORY}, the memory in all");
        return Err(lines.problem(COUNT, message));
    };
    let spread = u64::from(count);
    let counter = Counter {
        resource: MEMORY,
        unit: settings.gpushare_unit.bytes(),
        spread,
        or: ", or pass --gpushare-unit MiB if your cluster counts so",
    };
    let memory = MemoryAsk::Exactly(counter.bytes(units, lines)?);
    if units % spread != 0 {
        let (less, more) = (units - units % spread, units.next_multiple_of(spread));
        let choice = if less > 0 { format!("{less} or {more}") } else { more.to_string() };
        let message = format!("{units} cannot be split evenly over {count} GPUs: write {choice}");
        return Err(lines.problem(MEMORY, message));
    }
    let cores = Absent::of(Dialect::Gpushare).cores();
    Ok(cores.map(|cores| WantedGpus { count, part: ShareAsk { memory, cores, whole: false, ceiling: None } }))
}

/// Over how many GPUs: a resource of the container, or a label or annotation of the pod as ACK writes it.
fn count(lines: &mut Lines<'_>, pod: &Pod) -> Result<u32, Unclear> {
    if let Some(count @ 1..) = lines.gpus(COUNT)? {
        return Ok(count);
    }
    match pod.labels.get(COUNT).or_else(|| pod.annotations.get(COUNT)) {
        None => Ok(1),
        Some(text) => match text.parse::<u64>() {
            Ok(count) => lines.few_enough(COUNT, count.max(1)),
            Err(_) => {
                let text = short(text);
                let message = format!("\"{text}\" is no number of GPUs: write a whole number, 1 or more");
                Err(lines.problem(COUNT, message))
            }
        },
    }
}
