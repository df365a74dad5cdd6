//! tkestack gpu-manager: `<domain>/vcuda-core` (100 is one GPU) and `<domain>/vcuda-memory` (256 MiB blocks).
//!
//! Every fork uses its own domain: `tencent.com`, `inspur.com` or any other.

use super::super::Dialect;
use super::super::defaults::DialectDefaults;
use super::memory::MemoryCounter;
use super::resource_list::ResourceList;
use super::{WantResult, whole_gpu};
use crate::model::{Cores, CoresAsk, MemoryAsk, ShareAsk, WantedGpus};
use crate::pod::ContainerManifest;
use crate::truncate::shorten;

/// Size of one unit of `vcuda-memory` in bytes.
pub(in crate::dialect) const BLOCK: u64 = 256 << 20;
/// The resource for compute, under any domain.
pub(in crate::dialect) const CORE: &str = "vcuda-core";
/// The resource for memory, under the same domain.
pub(in crate::dialect) const MEMORY: &str = "vcuda-memory";
/// The annotation that sets the compute ceiling, under the same domain.
pub(in crate::dialect) const CORE_LIMIT: &str = "vcuda-core-limit";

/// Returns whether an annotation sets the compute ceiling, under any domain.
pub(super) fn is_core_limit(annotation: &str) -> bool {
    annotation.split_once('/').is_some_and(|(_, name)| name == CORE_LIMIT)
}

/// Returns the distinct domains of a container's resources. Amounts of zero request nothing.
pub(in crate::dialect) fn domains(container: &ContainerManifest) -> Vec<&str> {
    let asking = container.resources().filter(|resource| !matches!(container.count(resource), Some(Ok(0))));
    let mut domains: Vec<&str> = asking.filter_map(split_domain).map(|(domain, _)| domain).collect();
    domains.dedup();
    domains
}

/// Splits a vcuda resource into domain and name; `None` for other resources.
pub(super) fn split_domain(resource: &str) -> Option<(&str, &str)> {
    let (domain, name) = resource.split_once('/')?;
    (!domain.is_empty() && matches!(name, CORE | MEMORY)).then_some((domain, name))
}

/// Reads the request of one container.
pub(super) fn read(list: &mut ResourceList<'_>) -> WantResult {
    let domain = match domains(list.container())[..] {
        [domain] => domain,
        ref domains => {
            let domains: Vec<String> = domains.iter().map(|domain| shorten(domain)).collect();
            let message = format!("uses several domains, {}: keep one", domains.join(" and "));
            return Err(list.problem("resources.limits", message));
        }
    };
    let (core, memory) = (format!("{domain}/{CORE}"), format!("{domain}/{MEMORY}"));
    let (cores, blocks) = (list.count(&core), list.count(&memory));
    let (cores, blocks) = (cores?.unwrap_or(0), blocks?.unwrap_or(0));

    let whole = match cores {
        0 => {
            let message = format!(
                "requests memory without a GPU: add {core}, 1 to 99 for a share or 100 for a whole GPU"
            );
            return Err(list.problem(&memory, message));
        }
        1..=99 => false,
        whole if whole % 100 == 0 => true,
        odd => {
            let message = format!(
                "{odd} is neither a share of one GPU nor whole GPUs: write 1 to 99 for a share or a multiple of 100 for whole GPUs"
            );
            return Err(list.problem(&core, message));
        }
    };
    let asked = MemoryCounter::per_gpu(&memory, BLOCK).bytes(blocks, list)?;
    let memory_ask = match (blocks, whole) {
        (0, _) => DialectDefaults::of(Dialect::Vcuda).memory(whole),
        (_, false) => Some(MemoryAsk::Exactly(asked)),
        // Each GPU is limited to the number as written. The upstream library compares the number with the usage of each
        // device separately and ignores it for whole GPUs. Of the two possible interpretations, per GPU or divided among
        // the GPUs, the larger limit breaks no existing workload.
        (_, true) => Some(MemoryAsk::AtMost(asked)),
    };
    let Some(memory_ask) = memory_ask else {
        let message = format!(
            "{cores} % of a GPU needs memory, too, or nothing is granted: add {memory}, in blocks of 256 MiB"
        );
        return Err(list.problem(&core, message));
    };
    if !whole {
        let cores = u32::try_from(cores).ok().and_then(Cores::percent).unwrap_or(Cores::WHOLE);
        let share =
            ShareAsk { memory: memory_ask, cores: CoresAsk::Exactly(cores), whole: false, ceiling: None };
        return Ok(Some(WantedGpus { count: 1, share }));
    }
    let count = list.check_gpu_count(&core, cores / 100)?;
    Ok(Some(WantedGpus { count, share: whole_gpu(memory_ask) }))
}
