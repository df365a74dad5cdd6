//! tkestack gpu-manager and gpu-admission, under any domain: `<domain>/predicate-*` and `<domain>/gpu-assigned`.

use super::environment::comma_list;
use super::{
    BindContext, EncodedGrant, GrantError, PlacedGrant, RecordReader, ShareOnGpu, memory_of, parse_position,
    quoted,
};
use crate::dialect::asks::vcuda as names;
use crate::model::{Bytes, Cores, Gpu, Grant, Share};
use crate::pod::ContainerManifest;
use crate::truncate;
use std::collections::BTreeMap;

/// Returns the domain of a container's resources. With several domains, which is a problem of the ask, returns the first.
pub fn domain(container: &ContainerManifest) -> Option<&str> {
    names::domains(container).first().copied()
}

/// Returns the annotation that lists the minor numbers of a container's GPUs. `container` is its index in
/// `spec.containers`.
pub fn index_key(domain: &str, container: usize) -> String {
    format!("{domain}/{INDEX}{container}")
}

const INDEX: &str = "predicate-gpu-idx-";

/// Returns whether an annotation lists minor numbers, under any domain.
pub(super) fn is_index_key(annotation: &str) -> bool {
    annotation.split_once('/').is_some_and(|(_, name)| name.starts_with(INDEX))
}

const ASSIGNED: &str = "gpu-assigned";

/// Returns whether an annotation records that the node has prepared the pod, under any domain.
pub(super) fn is_assigned_key(annotation: &str) -> bool {
    annotation.split_once('/').is_some_and(|(_, name)| name == ASSIGNED)
}

fn cores_resource(domain: &str) -> String {
    format!("{domain}/{}", names::CORE)
}

fn memory_resource(domain: &str) -> String {
    format!("{domain}/{}", names::MEMORY)
}

/// Adds the annotations of the pod and of its containers.
pub(super) fn write(
    placed: &[&PlacedGrant<'_>],
    bind: &BindContext<'_>,
    written: &mut EncodedGrant,
) -> Result<(), GrantError> {
    for placed in placed {
        let domain = placed.domain.ok_or_else(|| {
            GrantError::new(placed.container.as_str(), "uses the vcuda dialect without a vcuda resource")
        })?;
        let annotations = &mut written.annotations;
        // The format has indexes of spec.containers only. All other containers are in the native record only.
        if let Some(index) = placed.app_index {
            let minors = comma_list(placed.shares.iter().map(|on_gpu| on_gpu.gpu.minor));
            annotations.insert(index_key(domain, index), minors);
        }
        annotations.insert(format!("{domain}/predicate-node"), bind.node.name.to_string());
        annotations.insert(format!("{domain}/predicate-time"), bind.now.0.to_string());
        annotations.insert(format!("{domain}/{ASSIGNED}"), "false".into());
        written.container_annotations.insert(placed.container.clone(), runtime_annotations(placed, domain));
    }
    Ok(())
}

/// Decodes each container's minor numbers; the amounts come from its limits and the ceiling from the pod's annotation.
///
/// The record lacks the shares of init containers and sidecars. A memory limit on several whole GPUs applies to each.
pub(super) fn read(record: &RecordReader<'_>) -> Result<Option<Vec<Grant>>, GrantError> {
    let has_record = |(index, container): (usize, &ContainerManifest)| {
        domain(container).is_some_and(|domain| record.pod.annotations.contains_key(&index_key(domain, index)))
    };
    if !record.apps().enumerate().any(has_record) {
        return Ok(None);
    }
    let mut grants = Vec::new();
    let mut unrecorded = None;
    for (index, container) in record.apps().enumerate() {
        let Some(domain) = domain(container) else { continue };
        let Some(cores) = record.amount(container, &cores_resource(domain))? else { continue };
        let blocks = record.amount(container, &memory_resource(domain))?;
        // As upstream, a share without memory requests nothing.
        if cores < 100 && blocks.is_none() {
            continue;
        }
        let key = index_key(domain, index);
        let Some(text) = record.annotation(&key)? else {
            unrecorded = Some(key);
            continue;
        };
        record.check_node(&format!("{domain}/predicate-node"))?;
        let gpus = gpus_by_minor(record, &key, text)?;
        let ask = Amounts { domain, cores, blocks };
        let shares = shares(record, container, &key, &gpus, &ask)?;
        grants.push(Grant { container: container.name.clone(), init: false, shares });
    }
    match unrecorded {
        _ if grants.is_empty() => Ok(None),
        Some(key) => Err(GrantError::new(key, "is missing, but other containers of the pod have one")),
        None => Ok(Some(grants)),
    }
}

/// The limits of a container.
struct Amounts<'a> {
    domain: &'a str,
    cores: u64,
    blocks: Option<u64>,
}

/// Returns the annotations that gpu-manager passes to the container runtime.
fn runtime_annotations(placed: &PlacedGrant<'_>, domain: &str) -> BTreeMap<String, String> {
    let cores: u64 = placed.shares.iter().map(|on_gpu| u64::from(on_gpu.percent())).sum();
    let held = |on_gpu: &ShareOnGpu<'_>| on_gpu.share.memory_bytes.unwrap_or(on_gpu.gpu.memory_bytes).0;
    let memory = placed.shares.iter().map(held).fold(0, u64::saturating_add);
    let devices = comma_list(placed.shares.iter().map(|on_gpu| format!("/dev/nvidia{}", on_gpu.gpu.minor)));
    BTreeMap::from([
        (cores_resource(domain), cores.to_string()),
        (memory_resource(domain), memory.to_string()),
        (format!("{domain}/vcuda-device"), devices),
    ])
}

/// Returns the GPUs with the minor numbers of a list. Duplicates are an error.
fn gpus_by_minor<'a>(record: &RecordReader<'a>, key: &str, text: &str) -> Result<Vec<&'a Gpu>, GrantError> {
    let fail = |message: String| GrantError::new(key, message);
    let mut gpus: Vec<&Gpu> = Vec::new();
    for minor in text.split(',') {
        let number = parse_position(minor)
            .ok_or_else(|| fail(format!("{} is not the minor number of a GPU", quoted(minor))))?;
        let gpu = record.node.gpus.iter().find(|gpu| usize::try_from(gpu.minor) == Ok(number));
        let gpu = gpu.ok_or_else(|| {
            let minors = comma_list(record.node.gpus.iter().map(|gpu| gpu.minor));
            fail(format!("names minor {number}, but node {} has {minors}", record.node.name))
        })?;
        // Refusing duplicates bounds the list by the number of GPUs.
        if gpus.iter().any(|other| other.minor == gpu.minor) {
            return Err(fail(format!("names minor {number} twice")));
        }
        gpus.push(gpu);
    }
    Ok(gpus)
}

fn shares(
    record: &RecordReader<'_>,
    container: &ContainerManifest,
    key: &str,
    gpus: &[&Gpu],
    Amounts { domain, cores, blocks }: &Amounts<'_>,
) -> Result<Vec<Share>, GrantError> {
    let resource = cores_resource(domain);
    let fail = |message: String| GrantError::new(resource.as_str(), message);
    let whole = *cores >= 100;
    if whole && cores % 100 != 0 {
        let name = truncate::shorten(container.name.as_str());
        return Err(fail(format!(
            "container {name} requests {cores}: amounts above 100 must be multiples of 100"
        )));
    }
    let count = if whole { cores / 100 } else { 1 };
    if u64::try_from(gpus.len()) != Ok(count) {
        let message = format!("names {} GPUs, but {cores} {resource} are for {count}", gpus.len());
        return Err(GrantError::new(key, message));
    }
    let limit = match blocks {
        Some(blocks) => Some(memory_of(&memory_resource(domain), *blocks, names::BLOCK)?),
        None => None,
    };
    let guaranteed = percent(*cores);
    let ceiling = if whole { None } else { ceiling(record, domain, guaranteed)? };
    let memory = |gpu: &Gpu| -> Option<Bytes> {
        if whole { Some(limit.unwrap_or(gpu.memory_bytes).min(gpu.memory_bytes)) } else { limit }
    };
    let share = |gpu: &&Gpu| Share {
        gpu: gpu.uuid.clone(),
        memory_bytes: memory(gpu),
        cores: Some(guaranteed),
        ceiling,
        whole,
    };
    Ok(gpus.iter().map(share).collect())
}

/// Decodes the compute ceiling, an annotation of the whole pod. Upstream accepts a ceiling below the guaranteed compute; the
/// guarantee then takes precedence.
fn ceiling(record: &RecordReader<'_>, domain: &str, guaranteed: Cores) -> Result<Option<Cores>, GrantError> {
    let key = format!("{domain}/{}", names::CORE_LIMIT);
    let Some(text) = record.annotation(&key)? else { return Ok(None) };
    let limit: u64 = text.parse().map_err(|_| {
        GrantError::new(key, format!("{} is not a percentage: write one like \"50\"", quoted(text)))
    })?;
    Ok(Some(percent(limit).max(guaranteed)))
}

/// Converts a percentage; values above 100 mean one whole GPU.
fn percent(cores: u64) -> Cores {
    u32::try_from(cores).ok().and_then(Cores::percent).unwrap_or(Cores::WHOLE)
}
