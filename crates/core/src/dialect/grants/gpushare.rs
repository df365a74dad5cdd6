//! Aliyun gpushare: `ALIYUN_COM_GPU_MEM_*` and the allocation per container that `kubectl inspect gpushare` prefers.

use super::environment::comma_list;
use super::{
    BindContext, EncodedGrant, GrantError, PlacedGrant, RecordReader, ShareOnGpu, memory_of, parse_position,
    quoted,
};
use crate::model::{ContainerRole, Gpu, Grant, Share};
use crate::pod::ContainerManifest;
use std::collections::BTreeMap;

/// The resource for memory.
pub const MEMORY: &str = crate::dialect::asks::gpushare::MEMORY;
/// The index of the pod's GPU; absent if the pod has several GPUs.
pub const INDEX: &str = "ALIYUN_COM_GPU_MEM_IDX";
/// The memory of that GPU in units.
pub const DEVICE: &str = "ALIYUN_COM_GPU_MEM_DEV";
/// The memory of the pod in units.
pub const POD: &str = "ALIYUN_COM_GPU_MEM_POD";
/// The memory of the container in units. Only in the environment.
pub const CONTAINER: &str = "ALIYUN_COM_GPU_MEM_CONTAINER";
/// `false` until the node has prepared the pod, then `true`.
pub const ASSIGNED: &str = "ALIYUN_COM_GPU_MEM_ASSIGNED";
/// The time of the binding, in nanoseconds since the Unix epoch.
pub const ASSUME_TIME: &str = "ALIYUN_COM_GPU_MEM_ASSUME_TIME";
/// The allocation per container as JSON: `{"<container index>":{"<GPU index>":<units>}}`.
pub const ALLOCATION: &str = "scheduler.framework.gpushare.allocation";

type Allocation<N> = BTreeMap<N, BTreeMap<N, i64>>;

/// Adds the annotations of the pod and the environment of its containers.
pub(super) fn write(placed: &[&PlacedGrant<'_>], bind: &BindContext<'_>, written: &mut EncodedGrant) {
    let unit = bind.settings.gpushare_unit.bytes();
    let units_of =
        |placed: &PlacedGrant<'_>| placed.shares.iter().map(|on_gpu| on_gpu.units(unit)).sum::<u64>();
    let running: u64 = placed.iter().filter(|placed| !placed.init).map(|placed| units_of(placed)).sum();
    let largest_init = placed.iter().filter(|placed| placed.init).map(|placed| units_of(placed)).max();
    // As in Kubernetes, an init container does not run at the same time as the others.
    let pod = running.max(largest_init.unwrap_or(0)).to_string();

    let mut gpus: Vec<&ShareOnGpu<'_>> = placed.iter().flat_map(|placed| &placed.shares).collect();
    gpus.sort_by_key(|on_gpu| on_gpu.index);
    gpus.dedup_by_key(|on_gpu| on_gpu.index);
    let annotations = &mut written.annotations;
    // The index is omitted for several GPUs: tools that read only the index would count the pod on one GPU.
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
        env.insert(INDEX.into(), comma_list(placed.shares.iter().map(|on_gpu| on_gpu.index)));
        env.insert(POD.into(), pod.clone());
        env.insert(CONTAINER.into(), units_of(placed).to_string());
        let device_units = placed.shares.iter().map(|on_gpu| on_gpu.gpu.memory_bytes.0 / unit);
        env.insert(DEVICE.into(), comma_list(device_units));
    }
}

/// Decodes the allocation per container or, without one, the index with each container's amount from its limits.
///
/// The records lack compute, its ceiling and exclusivity, which this dialect does not have, and the shares of init
/// containers and sidecars of a pod on several GPUs.
pub(super) fn read(record: &RecordReader<'_>) -> Result<Option<Vec<Grant>>, GrantError> {
    let (index_text, allocation_text) = (record.annotation(INDEX)?, record.annotation(ALLOCATION)?);
    if index_text.is_none() && allocation_text.is_none() {
        return Ok(None);
    }
    let mut requesting = Vec::new();
    for container in &record.pod.containers {
        if let Some(units) = record.amount(container, MEMORY)? {
            requesting.push((container, units));
        }
    }
    if requesting.is_empty() {
        return Ok(None);
    }
    // As upstream, the index is used if the JSON of the allocation is invalid.
    let allocation = allocation_text
        .and_then(|text| serde_json::from_str::<Allocation<String>>(text).ok())
        .filter(|allocation| !allocation.is_empty());
    let mut allocated = match &allocation {
        Some(allocation) => read_allocation(record, allocation)?,
        None => BTreeMap::new(),
    };
    let unit = record.settings.gpushare_unit.bytes();
    let mut grants = Vec::new();
    for (container, units) in requesting {
        let shares = match (allocated.remove(container.name.as_str()), index_text) {
            (Some(shares), _) => {
                let given: u64 =
                    shares.iter().filter_map(|share| share.memory_bytes).map(|m| m.0 / unit).sum();
                if given < units {
                    let name = quoted(container.name.as_str());
                    let message = format!(
                        "allocates {given} units to container {name}, but its limits request {units}"
                    );
                    return Err(GrantError::new(ALLOCATION, message));
                }
                shares
            }
            // The allocation lists spec.containers only. For other containers, the index is used.
            (None, Some(index)) if allocation.is_none() || container.role != ContainerRole::App => {
                vec![share(only_gpu(record, index)?, INDEX, units, unit)?]
            }
            (None, None) if allocation.is_none() => {
                let text = quoted(allocation_text.unwrap_or_default());
                let message = format!("{text} is not a valid allocation, and {INDEX} is missing");
                return Err(GrantError::new(ALLOCATION, message));
            }
            // A container that is missing in the record still holds its share: counted as free, it would be granted twice.
            (None, _) if container.role == ContainerRole::App => {
                let name = quoted(container.name.as_str());
                let message =
                    format!("allocates nothing to container {name}, which requests {units} {MEMORY}");
                return Err(GrantError::new(ALLOCATION, message));
            }
            _ => continue,
        };
        let init = container.role == ContainerRole::Init;
        grants.push(Grant { container: container.name.clone(), init, shares });
    }
    if let Some(container) = allocated.keys().next() {
        let message =
            format!("allocates a share to container {}, which requests no {MEMORY}", quoted(container));
        return Err(GrantError::new(ALLOCATION, message));
    }
    if grants.is_empty() {
        return Err(GrantError::new(
            ALLOCATION,
            format!("allocates nothing to any container that requests {MEMORY}"),
        ));
    }
    Ok(Some(grants))
}

fn allocation(placed: &[&PlacedGrant<'_>], unit: u64) -> Allocation<usize> {
    let mut allocation = Allocation::new();
    for placed in placed {
        // The format has indexes of spec.containers only. All other containers are in the native record only.
        let Some(index) = placed.app_index else { continue };
        let units = placed.shares.iter().map(|on_gpu| {
            let units = i64::try_from(on_gpu.units(unit)).unwrap_or(i64::MAX);
            (on_gpu.index, units)
        });
        allocation.insert(index, units.collect());
    }
    allocation
}

fn json(allocation: &Allocation<usize>) -> String {
    // There are only numbers, so no character needs escaping.
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

/// Decodes the shares of each container in the allocation.
fn read_allocation<'a>(
    record: &RecordReader<'a>,
    allocation: &Allocation<String>,
) -> Result<BTreeMap<&'a str, Vec<Share>>, GrantError> {
    let fail = |message: String| GrantError::new(ALLOCATION, message);
    let unit = record.settings.gpushare_unit.bytes();
    let apps: Vec<&ContainerManifest> = record.apps().collect();
    let mut read = BTreeMap::new();
    for (container, gpus) in allocation {
        let found = parse_position(container).and_then(|index| apps.get(index));
        let found = found.ok_or_else(|| {
            let count = apps.len();
            fail(format!("names container {}, but the pod has {count}, counted from 0", quoted(container)))
        })?;
        let mut by_index = BTreeMap::new();
        for (gpu, &units) in gpus {
            let index =
                parse_position(gpu).ok_or_else(|| fail(format!("{} is not a GPU index", quoted(gpu))))?;
            let units = u64::try_from(units).map_err(|_| {
                fail(format!("allocates {units} units of GPU {index}: amounts cannot be negative"))
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

fn only_gpu<'a>(record: &RecordReader<'a>, index: &str) -> Result<&'a Gpu, GrantError> {
    let found = parse_position(index);
    let found =
        found.ok_or_else(|| GrantError::new(INDEX, format!("{} is not a GPU index", quoted(index))))?;
    record.gpu_at(INDEX, found)
}

fn share(gpu: &Gpu, field: &str, units: u64, unit: u64) -> Result<Share, GrantError> {
    let memory_bytes = Some(memory_of(field, units, unit)?);
    Ok(Share { gpu: gpu.uuid.clone(), memory_bytes, cores: None, ceiling: None, whole: false })
}
