//! tkestack gpu-manager and gpu-admission, under any domain: `<domain>/predicate-*` and `<domain>/gpu-assigned`.

use super::environment::comma_list;
use super::{Bind, GrantError, Placed, PlacedShare, Record, Written, memory_of, position, quoted};
use crate::dialect::asks::vcuda as names;
use crate::model::{Bytes, Cores, Gpu, Grant, Share};
use crate::pod::Container;
use crate::quote;
use std::collections::BTreeMap;

/// The domain under which a container asks; of several, which is an error of its ask, the first.
pub fn domain(container: &Container) -> Option<&str> {
    names::domains(container).first().copied()
}

/// The annotation that lists the minor numbers of one container's GPUs, by its index in `spec.containers`.
pub fn index_key(domain: &str, container: usize) -> String {
    format!("{domain}/{INDEX}{container}")
}

const INDEX: &str = "predicate-gpu-idx-";

/// Whether an annotation is such a list, under any domain.
pub(super) fn is_index_key(annotation: &str) -> bool {
    annotation.split_once('/').is_some_and(|(_, name)| name.starts_with(INDEX))
}

const ASSIGNED: &str = "gpu-assigned";

/// Whether an annotation says that the node has set the pod up, under any domain.
pub(super) fn is_assigned_key(annotation: &str) -> bool {
    annotation.split_once('/').is_some_and(|(_, name)| name == ASSIGNED)
}

fn cores_of(domain: &str) -> String {
    format!("{domain}/{}", names::CORE)
}

fn memory_of_domain(domain: &str) -> String {
    format!("{domain}/{}", names::MEMORY)
}

pub(super) fn write(
    placed: &[&Placed<'_>],
    bind: &Bind<'_>,
    written: &mut Written,
) -> Result<(), GrantError> {
    for placed in placed {
        let domain = placed.domain.ok_or_else(|| {
            GrantError::new(placed.container.as_str(), "asks in the vcuda dialect without a vcuda resource")
        })?;
        let annotations = &mut written.annotations;
        // The format has indexes of spec.containers only: the native record holds the others.
        if let Some(index) = placed.app_index {
            let minors = comma_list(placed.parts.iter().map(|part| part.gpu.minor));
            annotations.insert(index_key(domain, index), minors);
        }
        annotations.insert(format!("{domain}/predicate-node"), bind.node.name.to_string());
        annotations.insert(format!("{domain}/predicate-time"), bind.now.0.to_string());
        annotations.insert(format!("{domain}/{ASSIGNED}"), "false".into());
        written.container_annotations.insert(placed.container.clone(), for_runtime(placed, domain));
    }
    Ok(())
}

/// Reads each container's minor numbers, with the amounts from its limits and the ceiling from the pod.
///
/// Not in this record: the shares of init containers and sidecars. A memory limit on several whole GPUs is read as
/// a limit on each of them.
pub(super) fn read(record: &Record<'_>) -> Result<Option<Vec<Grant>>, GrantError> {
    let has_record = |(index, container): (usize, &Container)| {
        domain(container).is_some_and(|domain| record.pod.annotations.contains_key(&index_key(domain, index)))
    };
    if !record.apps().enumerate().any(has_record) {
        return Ok(None);
    }
    let mut grants = Vec::new();
    let mut unrecorded = None;
    for (index, container) in record.apps().enumerate() {
        let Some(domain) = domain(container) else { continue };
        let Some(cores) = record.amount(container, &cores_of(domain))? else { continue };
        let blocks = record.amount(container, &memory_of_domain(domain))?;
        // As upstream: a part of a GPU without memory is no ask.
        if cores < 100 && blocks.is_none() {
            continue;
        }
        let key = index_key(domain, index);
        let Some(text) = record.annotation(&key)? else {
            unrecorded = Some(key);
            continue;
        };
        record.made_for_this_node(&format!("{domain}/predicate-node"))?;
        let gpus = gpus(record, &key, text)?;
        let ask = Amounts { domain, cores, blocks };
        let shares = shares(record, container, &key, &gpus, &ask)?;
        grants.push(Grant { container: container.name.clone(), init: false, shares });
    }
    match unrecorded {
        _ if grants.is_empty() => Ok(None),
        Some(key) => Err(GrantError::new(key, "is missing, while other containers of the pod have theirs")),
        None => Ok(Some(grants)),
    }
}

/// What a container's limits say.
struct Amounts<'a> {
    domain: &'a str,
    cores: u64,
    blocks: Option<u64>,
}

/// The annotations that gpu-manager gives the container runtime.
fn for_runtime(placed: &Placed<'_>, domain: &str) -> BTreeMap<String, String> {
    let cores: u64 = placed.parts.iter().map(|part| u64::from(part.percent())).sum();
    let held = |part: &PlacedShare<'_>| part.share.memory_bytes.unwrap_or(part.gpu.memory_bytes).0;
    let memory = placed.parts.iter().map(held).fold(0, u64::saturating_add);
    let devices = comma_list(placed.parts.iter().map(|part| format!("/dev/nvidia{}", part.gpu.minor)));
    BTreeMap::from([
        (cores_of(domain), cores.to_string()),
        (memory_of_domain(domain), memory.to_string()),
        (format!("{domain}/vcuda-device"), devices),
    ])
}

/// The GPUs that a list of minor numbers names, each once.
fn gpus<'a>(record: &Record<'a>, key: &str, text: &str) -> Result<Vec<&'a Gpu>, GrantError> {
    let fail = |message: String| GrantError::new(key, message);
    let mut gpus: Vec<&Gpu> = Vec::new();
    for minor in text.split(',') {
        let number =
            position(minor).ok_or_else(|| fail(format!("{} is no minor number of a GPU", quoted(minor))))?;
        let gpu = record.node.gpus.iter().find(|gpu| usize::try_from(gpu.minor) == Ok(number));
        let gpu = gpu.ok_or_else(|| {
            let there = comma_list(record.node.gpus.iter().map(|gpu| gpu.minor));
            fail(format!("names minor {number}, but node {} has {there}", record.node.name))
        })?;
        // Each GPU once bounds the list by what the node has.
        if gpus.iter().any(|other| other.minor == gpu.minor) {
            return Err(fail(format!("names minor {number} twice")));
        }
        gpus.push(gpu);
    }
    Ok(gpus)
}

fn shares(
    record: &Record<'_>,
    container: &Container,
    key: &str,
    gpus: &[&Gpu],
    Amounts { domain, cores, blocks }: &Amounts<'_>,
) -> Result<Vec<Share>, GrantError> {
    let resource = cores_of(domain);
    let fail = |message: String| GrantError::new(resource.as_str(), message);
    let whole = *cores >= 100;
    if whole && cores % 100 != 0 {
        let name = quote::short(container.name.as_str());
        return Err(fail(format!("container {name} asks for {cores}: above 100 only multiples of it exist")));
    }
    let count = if whole { cores / 100 } else { 1 };
    if u64::try_from(gpus.len()) != Ok(count) {
        let message = format!("names {} GPUs for {cores} {resource}, which are {count}", gpus.len());
        return Err(GrantError::new(key, message));
    }
    let limit = match blocks {
        Some(blocks) => Some(memory_of(&memory_of_domain(domain), *blocks, names::BLOCK)?),
        None => None,
    };
    let promised = percent(*cores);
    let ceiling = if whole { None } else { ceiling(record, domain, promised)? };
    let memory = |gpu: &Gpu| -> Option<Bytes> {
        if whole { Some(limit.unwrap_or(gpu.memory_bytes).min(gpu.memory_bytes)) } else { limit }
    };
    let share = |gpu: &&Gpu| Share {
        gpu: gpu.uuid.clone(),
        memory_bytes: memory(gpu),
        cores: Some(promised),
        ceiling,
        whole,
    };
    Ok(gpus.iter().map(share).collect())
}

/// How far compute may stretch: an annotation of the whole pod. Upstream also runs pods whose ceiling is below what
/// they were promised: the promise stands.
fn ceiling(record: &Record<'_>, domain: &str, promised: Cores) -> Result<Option<Cores>, GrantError> {
    let key = format!("{domain}/{}", names::CORE_LIMIT);
    let Some(text) = record.annotation(&key)? else { return Ok(None) };
    let limit: u64 = text.parse().map_err(|_| {
        GrantError::new(key, format!("{} is no number of percent: write one like \"50\"", quoted(text)))
    })?;
    Ok(Some(percent(limit).max(promised)))
}

/// Anything above 100 is one GPU.
fn percent(cores: u64) -> Cores {
    u32::try_from(cores).ok().and_then(Cores::percent).unwrap_or(Cores::WHOLE)
}
