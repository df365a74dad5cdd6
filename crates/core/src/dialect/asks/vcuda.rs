//! tkestack gpu-manager: `<domain>/vcuda-core` (100 is one GPU) and `<domain>/vcuda-memory` (256 MiB blocks).
//!
//! The domain is whatever a fork chose: `tencent.com`, `inspur.com`, any other.

use super::super::Dialect;
use super::super::absent::Absent;
use super::lines::Lines;
use super::memory::Counter;
use super::{Read, whole_gpu};
use crate::model::{Cores, CoresAsk, MemoryAsk, ShareAsk, WantedGpus};
use crate::pod::Container;
use crate::quote::short;

/// One `vcuda-memory` in bytes.
pub(in crate::dialect) const BLOCK: u64 = 256 << 20;
/// Compute, under any domain.
pub(in crate::dialect) const CORE: &str = "vcuda-core";
/// Memory, under the same domain.
pub(in crate::dialect) const MEMORY: &str = "vcuda-memory";
/// The annotation, under the same domain, that says how far the cores may stretch.
pub(in crate::dialect) const CORE_LIMIT: &str = "vcuda-core-limit";

/// Whether an annotation is such a limit, under any domain.
pub(super) fn is_core_limit(annotation: &str) -> bool {
    annotation.split_once('/').is_some_and(|(_, name)| name == CORE_LIMIT)
}

/// The domains a container asks under, each once: amounts of zero ask nothing.
pub(in crate::dialect) fn domains(container: &Container) -> Vec<&str> {
    let asking = container.resources().filter(|resource| !matches!(container.count(resource), Some(Ok(0))));
    let mut domains: Vec<&str> = asking.filter_map(split).map(|(domain, _)| domain).collect();
    domains.dedup();
    domains
}

/// The domain and name of a vcuda resource.
pub(super) fn split(resource: &str) -> Option<(&str, &str)> {
    let (domain, name) = resource.split_once('/')?;
    (!domain.is_empty() && matches!(name, CORE | MEMORY)).then_some((domain, name))
}

pub(super) fn read(lines: &mut Lines<'_>) -> Read {
    let domain = match domains(lines.container())[..] {
        [domain] => domain,
        ref domains => {
            let domains: Vec<String> = domains.iter().map(|domain| short(domain)).collect();
            let message = format!("asks under several domains, {}: keep one", domains.join(" and "));
            return Err(lines.problem("resources.limits", message));
        }
    };
    let (core, memory) = (format!("{domain}/{CORE}"), format!("{domain}/{MEMORY}"));
    let (cores, blocks) = (lines.count(&core), lines.count(&memory));
    let (cores, blocks) = (cores?.unwrap_or(0), blocks?.unwrap_or(0));

    let whole = match cores {
        0 => {
            let message =
                format!("asks for memory of no GPU: add {core}, 1 to 99 for a part or 100 for a whole GPU");
            return Err(lines.problem(&memory, message));
        }
        1..=99 => false,
        whole if whole % 100 == 0 => true,
        odd => {
            let message = format!(
                "{odd} is neither a part of a GPU nor whole ones: write 1 to 99 for a part of one GPU or a multiple of 100 for whole GPUs"
            );
            return Err(lines.problem(&core, message));
        }
    };
    let asked = Counter::of_each(&memory, BLOCK).bytes(blocks, lines)?;
    let memory_ask = match (blocks, whole) {
        (0, _) => Absent::of(Dialect::Vcuda).memory(whole),
        (_, false) => Some(MemoryAsk::Exactly(asked)),
        // Each card is held to the number as written. Upstream's library compares that number with what is
        // used on each device by itself, and did not look at it at all for whole cards: of the two possible
        // readings, per card or shared out among them, the larger one breaks nobody.
        (_, true) => Some(MemoryAsk::AtMost(asked)),
    };
    let Some(memory_ask) = memory_ask else {
        let message = format!(
            "{cores} % of a GPU needs memory too, or nothing is given: add {memory}, in blocks of 256 MiB"
        );
        return Err(lines.problem(&core, message));
    };
    if !whole {
        let cores = u32::try_from(cores).ok().and_then(Cores::percent).unwrap_or(Cores::WHOLE);
        let part =
            ShareAsk { memory: memory_ask, cores: CoresAsk::Exactly(cores), whole: false, ceiling: None };
        return Ok(Some(WantedGpus { count: 1, part }));
    }
    let count = lines.few_enough(&core, cores / 100)?;
    Ok(Some(WantedGpus { count, part: whole_gpu(memory_ask) }))
}
