//! Aliyun gpushare: `ALIYUN_COM_GPU_MEM_*` and the allocation per container that `kubectl inspect gpushare` prefers.

use super::environment::comma_list;
use super::{Bind, GrantError, Placed, PlacedShare, Record, Written, memory_of, position, quoted};
use crate::model::{ContainerRole, Gpu, Grant, Share};
use crate::pod::Container;
use std::collections::BTreeMap;

/// The resource.
pub const MEMORY: &str = crate::dialect::asks::gpushare::MEMORY;
/// The index of the pod's GPU; absent where it has several.
pub const INDEX: &str = "ALIYUN_COM_GPU_MEM_IDX";
/// The units of that GPU.
pub const DEVICE: &str = "ALIYUN_COM_GPU_MEM_DEV";
/// The units of the pod.
pub const POD: &str = "ALIYUN_COM_GPU_MEM_POD";
/// The units of the container; environment only.
pub const CONTAINER: &str = "ALIYUN_COM_GPU_MEM_CONTAINER";
/// `false` until the node has set the pod up.
pub const ASSIGNED: &str = "ALIYUN_COM_GPU_MEM_ASSIGNED";
/// When the pod was bound, in nanoseconds.
pub const ASSUME_TIME: &str = "ALIYUN_COM_GPU_MEM_ASSUME_TIME";
/// `{"<container index>":{"<GPU index>":<units>}}`.
pub const ALLOCATION: &str = "scheduler.framework.gpushare.allocation";

type Allocation<N> = BTreeMap<N, BTreeMap<N, i64>>;

pub(super) fn write(placed: &[&Placed<'_>], bind: &Bind<'_>, written: &mut Written) {
    let unit = bind.settings.gpushare_unit.bytes();
    let units_of = |placed: &Placed<'_>| placed.parts.iter().map(|part| part.units(unit)).sum::<u64>();
    let running: u64 = placed.iter().filter(|placed| !placed.init).map(|placed| units_of(placed)).sum();
    let largest_init = placed.iter().filter(|placed| placed.init).map(|placed| units_of(placed)).max();
    // As Kubernetes counts: an init container never runs beside the others.
    let pod = running.max(largest_init.unwrap_or(0)).to_string();

    let mut gpus: Vec<&PlacedShare<'_>> = placed.iter().flat_map(|placed| &placed.parts).collect();
    gpus.sort_by_key(|part| part.index);
    gpus.dedup_by_key(|part| part.index);
    let annotations = &mut written.annotations;
    // A tool that knows only the index would count a pod of several GPUs on one of them.
    if let [only] = gpus[..] {
        annotations.insert(INDEX.into(), only.index.to_string());
        annotations.insert(DEVICE.into(), (only.gpu.memory_bytes.0 / unit).to_string());
    }
    annotations.insert(POD.into(), pod.clone());
    annotations.insert(ASSIGNED.into(), "false".into());
    annotations.insert(ASSUME_TIME.into(), bind.now.0.to_string());
    let allocation = allocation(placed, unit);
    if !allocation.is_empty() {
        annotations.insert(ALLOCATION.into(), json(&allocation));
    }

    for placed in placed {
        let env = written.env_of(placed);
        env.insert(INDEX.into(), comma_list(placed.parts.iter().map(|part| part.index)));
        env.insert(POD.into(), pod.clone());
        env.insert(CONTAINER.into(), units_of(placed).to_string());
        let device_units = placed.parts.iter().map(|part| part.gpu.memory_bytes.0 / unit);
        env.insert(DEVICE.into(), comma_list(device_units));
    }
}

/// Reads the allocation per container, or else the index with each container's amount from its limits.
///
/// Not in these records: compute, its ceiling and exclusivity, which this dialect does not have; the shares of
/// init containers and sidecars of a pod on several GPUs.
pub(super) fn read(record: &Record<'_>) -> Result<Option<Vec<Grant>>, GrantError> {
    let (index_text, allocation_text) = (record.annotation(INDEX)?, record.annotation(ALLOCATION)?);
    if index_text.is_none() && allocation_text.is_none() {
        return Ok(None);
    }
    let mut asking = Vec::new();
    for container in &record.pod.containers {
        if let Some(units) = record.amount(container, MEMORY)? {
            asking.push((container, units));
        }
    }
    if asking.is_empty() {
        return Ok(None);
    }
    // A tool cannot see what it cannot parse, so broken JSON leaves the index to decide, as it does upstream.
    let allocation = allocation_text
        .and_then(|text| serde_json::from_str::<Allocation<String>>(text).ok())
        .filter(|allocation| !allocation.is_empty());
    let mut allocated = match &allocation {
        Some(allocation) => read_allocation(record, allocation)?,
        None => BTreeMap::new(),
    };
    let unit = record.settings.gpushare_unit.bytes();
    let mut grants = Vec::new();
    for (container, units) in asking {
        let shares = match (allocated.remove(container.name.as_str()), index_text) {
            (Some(shares), _) => {
                let given: u64 =
                    shares.iter().filter_map(|share| share.memory_bytes).map(|m| m.0 / unit).sum();
                if given < units {
                    let name = quoted(container.name.as_str());
                    let message =
                        format!("gives container {name} {given} units, and its limits ask for {units}");
                    return Err(GrantError::new(ALLOCATION, message));
                }
                shares
            }
            // The allocation lists only spec.containers: the index speaks for the others.
            (None, Some(index)) if allocation.is_none() || container.role != ContainerRole::App => {
                vec![share(only_gpu(record, index)?, INDEX, units, unit)?]
            }
            (None, None) if allocation.is_none() => {
                let text = quoted(allocation_text.unwrap_or_default());
                let message = format!("{text} is no allocation, and there is no {INDEX} either");
                return Err(GrantError::new(ALLOCATION, message));
            }
            // What is not recorded here is held all the same: read as free, it would be given away twice.
            (None, _) if container.role == ContainerRole::App => {
                let name = quoted(container.name.as_str());
                let message = format!("gives nothing to container {name}, which asks for {units} {MEMORY}");
                return Err(GrantError::new(ALLOCATION, message));
            }
            _ => continue,
        };
        let init = container.role == ContainerRole::Init;
        grants.push(Grant { container: container.name.clone(), init, shares });
    }
    if let Some(container) = allocated.keys().next() {
        let message = format!("gives a share to container {}, which asks for no {MEMORY}", quoted(container));
        return Err(GrantError::new(ALLOCATION, message));
    }
    if grants.is_empty() {
        return Err(GrantError::new(
            ALLOCATION,
            format!("gives nothing to any container that asks for {MEMORY}"),
        ));
    }
    Ok(Some(grants))
}

fn allocation(placed: &[&Placed<'_>], unit: u64) -> Allocation<usize> {
    let mut allocation = Allocation::new();
    for placed in placed {
        // The format has indexes of spec.containers only: the native record holds the others.
        let Some(index) = placed.app_index else { continue };
        let units = placed.parts.iter().map(|part| {
            let units = i64::try_from(part.units(unit)).unwrap_or(i64::MAX);
            (part.index, units)
        });
        allocation.insert(index, units.collect());
    }
    allocation
}

fn json(allocation: &Allocation<usize>) -> String {
    // Numbers and nothing else: no character needs escaping.
    let object = |items: Vec<String>| format!("{{{}}}", items.join(","));
    object(
        allocation
            .iter()
            .map(|(container, gpus)| {
                let gpus = gpus.iter().map(|(gpu, units)| format!("\"{gpu}\":{units}")).collect();
                format!("\"{container}\":{}", object(gpus))
            })
            .collect(),
    )
}

/// The shares of each container that the allocation gives something to.
fn read_allocation<'a>(
    record: &Record<'a>,
    allocation: &Allocation<String>,
) -> Result<BTreeMap<&'a str, Vec<Share>>, GrantError> {
    let fail = |message: String| GrantError::new(ALLOCATION, message);
    let unit = record.settings.gpushare_unit.bytes();
    let apps: Vec<&Container> = record.apps().collect();
    let mut read = BTreeMap::new();
    for (container, gpus) in allocation {
        let found = position(container).and_then(|index| apps.get(index));
        let found = found.ok_or_else(|| {
            let count = apps.len();
            fail(format!("names container {}, but the pod has {count}, from 0 on", quoted(container)))
        })?;
        let mut by_index = BTreeMap::new();
        for (gpu, &units) in gpus {
            let index = position(gpu).ok_or_else(|| fail(format!("{} is no GPU index", quoted(gpu))))?;
            let units = u64::try_from(units).map_err(|_| {
                fail(format!("gives {units} units of GPU {index}: an amount is not negative"))
            })?;
            by_index.insert(index, units);
        }
        let mut shares = Vec::new();
        for (index, units) in by_index.into_iter().filter(|&(_, units)| units > 0) {
            shares.push(share(record.gpu_at(ALLOCATION, index)?, ALLOCATION, units, unit)?);
        }
        if !shares.is_empty() {
            read.insert(found.name.as_str(), shares);
        }
    }
    Ok(read)
}

fn only_gpu<'a>(record: &Record<'a>, index: &str) -> Result<&'a Gpu, GrantError> {
    let found = position(index);
    let found = found.ok_or_else(|| GrantError::new(INDEX, format!("{} is no GPU index", quoted(index))))?;
    record.gpu_at(INDEX, found)
}

fn share(gpu: &Gpu, field: &str, units: u64, unit: u64) -> Result<Share, GrantError> {
    let memory_bytes = Some(memory_of(field, units, unit)?);
    Ok(Share { gpu: gpu.uuid.clone(), memory_bytes, cores: None, ceiling: None, whole: false })
}
