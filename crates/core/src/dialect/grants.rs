//! From a grant to everything a dialect's users and tools read, and back.
//!
//! The native annotation is always written and, where present, is the only record read: it is exact. The records
//! of the other dialects exist for their tools, and are read to take over a cluster that still runs one of
//! the systems replaced. Every record is text that a tenant may have forged: it is bounded, and never trusted to
//! name a GPU, an index or an amount that exists.
//!
//! What a foreign record cannot say is lost on the way back: see the `read` of each dialect.

pub mod aws;
pub mod device_list;
mod environment;
pub mod gpushare;
pub mod hami;
pub mod native;
pub mod node_register;
#[cfg(test)]
mod tests;
pub mod vcuda;
pub mod volcano;

use super::{Dialect, Settings};
use crate::cluster_file::MAX_MEMORY;
use crate::model::{Bytes, ContainerName, ContainerRole, Gpu, Grant, Node, NodeName, PodGrant, Share};
use crate::pod::{Container, Pod};
use crate::quote;
use std::collections::BTreeMap;

/// The longest record read or written: Kubernetes takes no more annotations than this on one object.
pub const MOST_TEXT: usize = 256 << 10;

/// A grant as its dialects' users and tools read it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Annotations of the pod.
    pub annotations: BTreeMap<String, String>,
    /// Environment of each container that has a grant.
    pub env: BTreeMap<ContainerName, BTreeMap<String, String>>,
    /// Annotations that the container runtime gets, per container.
    pub container_annotations: BTreeMap<ContainerName, BTreeMap<String, String>>,
}

/// In which dialect each container of a pod asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spelling {
    /// Every container in the order of the spec, those without a GPU too: records count positions.
    pub containers: Vec<SpeltContainer>,
}

/// In which dialect one container asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpeltContainer {
    /// The container.
    pub name: ContainerName,
    /// When it runs.
    pub role: ContainerRole,
    /// Its dialect; absent where it asks for no GPU.
    pub dialect: Option<Dialect>,
    /// The domain of its `vcuda-*` resources, where it has any.
    pub domain: Option<String>,
}

impl Spelling {
    /// The spelling of a pod whose asks were read in these dialects.
    pub fn of(pod: &Pod, dialects: &BTreeMap<ContainerName, Dialect>) -> Spelling {
        let spelt = |container: &Container| SpeltContainer {
            name: container.name.clone(),
            role: container.role,
            dialect: dialects.get(&container.name).copied(),
            domain: vcuda::domain(container).map(str::to_string),
        };
        Spelling { containers: pod.containers.iter().map(spelt).collect() }
    }

    /// Each container with its index in `spec.containers`, which init containers and sidecars do not have.
    fn places(&self) -> BTreeMap<&str, Place<'_>> {
        let mut app_indexes = 0..;
        let mut places = BTreeMap::new();
        for spelt in &self.containers {
            let app_index = if spelt.role == ContainerRole::App { app_indexes.next() } else { None };
            places.insert(spelt.name.as_str(), (spelt, app_index));
        }
        places
    }
}

/// A moment, in nanoseconds since 1970. Core has no clock: the caller brings the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnixNanos(pub u64);

impl UnixNanos {
    fn seconds(self) -> u64 {
        self.0 / 1_000_000_000
    }
}

/// Why a grant cannot be written or read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct GrantError {
    /// The annotation, resource or container it is about.
    pub field: String,
    /// What is there and what is wrong with it.
    pub message: String,
}

impl GrantError {
    /// Messages end up in logs and events, and may quote a tenant at any length: they are cut, and have no line
    /// breaks or other control characters.
    fn new(field: impl Into<String>, message: impl Into<String>) -> GrantError {
        let plain = |text: String| text.replace(char::is_control, " ");
        let (field, message) = (plain(field.into()), plain(message.into()));
        GrantError { field: quote::field(&field), message: quote::message(&message) }
    }
}

/// Writes a grant: the native annotation, and what the dialects of its containers add.
pub fn write(
    grant: &PodGrant,
    node: &Node,
    spelling: &Spelling,
    settings: &Settings,
    now: UnixNanos,
) -> Result<Written, GrantError> {
    if grant.node != node.name {
        let message = format!("the grant is on node {}, not on {}", grant.node, node.name);
        return Err(GrantError::new(native::ANNOTATION, message));
    }
    let places = spelling.places();
    let placed: Vec<Placed<'_>> =
        grant.grants.iter().map(|grant| Placed::of(grant, node, &places)).collect::<Result<_, _>>()?;
    let mut written = Written::default();
    written.annotations.insert(native::ANNOTATION.into(), native::encode(grant)?);
    for container in &placed {
        environment::visible_devices(container, written.env_of(container));
    }
    let bind = Bind { node, settings, now };
    for dialect in Dialect::ALL {
        let mine: Vec<&Placed<'_>> = placed.iter().filter(|placed| placed.dialect == dialect).collect();
        if mine.is_empty() {
            continue;
        }
        match dialect {
            Dialect::Native => {}
            Dialect::Gpushare => gpushare::write(&mine, &bind, &mut written),
            Dialect::Volcano => volcano::write(&mine, &bind, &mut written),
            Dialect::Vcuda => vcuda::write(&mine, &bind, &mut written)?,
            Dialect::Aws => aws::write(&mine, &mut written),
            Dialect::Hami => hami::write(&mine, &mut written),
        }
    }
    Ok(written)
}

/// Reads the grant a pod carries, with the dialect of its record; `None` where it carries none.
///
/// `bound_to` is the node in the pod's spec, `node` the one whose GPUs the record is read against. The native
/// record wins. Two foreign records are an error, because nothing says which of them is obeyed. An AWS grant is
/// never found here: only the kubelet knows it (see [`aws::read`]).
pub fn read(
    pod: &Pod,
    bound_to: Option<&NodeName>,
    node: &Node,
    settings: &Settings,
) -> Result<Option<(Dialect, PodGrant)>, GrantError> {
    if let Some(bound_to) = bound_to.filter(|&bound_to| *bound_to != node.name) {
        let message = format!("the pod runs on node {bound_to}: its grant cannot be on {}", node.name);
        return Err(GrantError::new("spec.nodeName", message));
    }
    let record = Record { pod, node, settings };
    if let Some(text) = record.annotation(native::ANNOTATION)? {
        return native::read(text, &record).map(|grant| Some((Dialect::Native, grant)));
    }
    let readers: [(Dialect, Reader); 4] = [
        (Dialect::Gpushare, gpushare::read),
        (Dialect::Volcano, volcano::read),
        (Dialect::Vcuda, vcuda::read),
        (Dialect::Hami, hami::read),
    ];
    let mut found: Option<(Dialect, PodGrant)> = None;
    for (dialect, reader) in readers {
        let Some(grants) = reader(&record)? else { continue };
        if let Some((other, _)) = found {
            let message = format!(
                "the pod carries a grant of {other} and one of {dialect}, and nothing says which is obeyed: \
                 remove the annotations of one"
            );
            return Err(GrantError::new("metadata.annotations", message));
        }
        found = Some((dialect, PodGrant { node: node.name.clone(), grants }));
    }
    Ok(found)
}

/// The node has set the pod up: records that wait for it say so, as the systems replaced let them say it.
pub fn set_up(annotations: &mut BTreeMap<String, String>) {
    for (key, value) in annotations {
        let done = match key.as_str() {
            gpushare::ASSIGNED => "true",
            volcano::BIND_PHASE => "success",
            // Erased container by container.
            volcano::TO_ALLOCATE => "",
            key if vcuda::is_assigned_key(key) => "true",
            _ => continue,
        };
        *value = done.into();
    }
}

/// Whether an annotation is a decision of some scheduler, never of a manifest's author.
pub fn is_record(annotation: &str) -> bool {
    const RECORDS: [&str; 9] = [
        native::ANNOTATION,
        gpushare::INDEX,
        gpushare::ASSIGNED,
        gpushare::ASSUME_TIME,
        gpushare::ALLOCATION,
        volcano::IDS,
        volcano::TO_ALLOCATE,
        hami::IDS,
        hami::NODE,
    ];
    RECORDS.contains(&annotation) || vcuda::is_index_key(annotation)
}

type Reader = fn(&Record<'_>) -> Result<Option<Vec<Grant>>, GrantError>;

impl Written {
    fn env_of(&mut self, placed: &Placed<'_>) -> &mut BTreeMap<String, String> {
        self.env.entry(placed.container.clone()).or_default()
    }
}

type Place<'a> = (&'a SpeltContainer, Option<usize>);

/// When and where a grant is bound.
struct Bind<'a> {
    node: &'a Node,
    settings: &'a Settings,
    now: UnixNanos,
}

/// One container's grant, with its place in the spec and its GPUs found on the node.
struct Placed<'a> {
    container: &'a ContainerName,
    dialect: Dialect,
    domain: Option<&'a str>,
    /// Its index in `spec.containers`; absent for init containers and sidecars, which are in another list.
    app_index: Option<usize>,
    init: bool,
    parts: Vec<PlacedShare<'a>>,
}

/// A share and the GPU it is of.
struct PlacedShare<'a> {
    index: usize,
    gpu: &'a Gpu,
    share: &'a Share,
}

impl<'a> Placed<'a> {
    fn of(
        grant: &'a Grant,
        node: &'a Node,
        places: &BTreeMap<&str, Place<'a>>,
    ) -> Result<Placed<'a>, GrantError> {
        let name = &grant.container;
        let fail = |message: String| GrantError::new(name.as_str(), message);
        let &(spelt, app_index) = places
            .get(name.as_str())
            .ok_or_else(|| fail("the grant names a container that the pod does not have".into()))?;
        let dialect =
            spelt.dialect.ok_or_else(|| fail("the grant names a container that asks for no GPU".into()))?;
        if grant.init != (spelt.role == ContainerRole::Init) {
            let (says, is) = if grant.init { ("an", "none") } else { ("no", "one") };
            return Err(fail(format!("the grant says this is {says} init container, and it is {is}")));
        }
        let part = |share: &'a Share| {
            let index = node.gpu_index(&share.gpu).ok_or_else(|| {
                fail(format!("node {} has no GPU {}: place the pod again", node.name, share.gpu))
            })?;
            Ok(PlacedShare { index, gpu: &node.gpus[index], share })
        };
        Ok(Placed {
            container: name,
            dialect,
            domain: spelt.domain.as_deref(),
            app_index,
            init: spelt.role == ContainerRole::Init,
            parts: grant.shares.iter().map(part).collect::<Result<_, _>>()?,
        })
    }
}

impl PlacedShare<'_> {
    /// The share's memory in a tool's units, rounded up: a tool never sees as free what is held. The last,
    /// partial unit of a GPU is one no tool counts; without a limit the share holds all the units there are.
    fn units(&self, unit: u64) -> u64 {
        let all = self.gpu.memory_bytes.0 / unit;
        match self.share.memory_bytes {
            None => all,
            Some(memory) if memory <= self.gpu.memory_bytes => memory.0.div_ceil(unit).min(all),
            Some(memory) => memory.0.div_ceil(unit),
        }
    }

    /// The share's compute in whole percents, rounded up; 0 = nothing promised.
    fn percent(&self) -> u32 {
        self.share.cores.map_or(0, |cores| cores.as_millipercent().div_ceil(1000))
    }
}

/// A pod whose records are read, and the node they must fit.
struct Record<'a> {
    pod: &'a Pod,
    node: &'a Node,
    settings: &'a Settings,
}

impl<'a> Record<'a> {
    /// An annotation, unless it is too long to be one.
    fn annotation(&self, key: &str) -> Result<Option<&'a str>, GrantError> {
        let Some(text) = self.pod.annotations.get(key) else { return Ok(None) };
        if text.len() > MOST_TEXT {
            let message = format!("is {} bytes long, more than the {MOST_TEXT} Kubernetes takes", text.len());
            return Err(GrantError::new(key, message));
        }
        Ok(Some(text))
    }

    /// Refuses a record that says it was made for another node. One that says nothing passes.
    fn made_for_this_node(&self, key: &str) -> Result<(), GrantError> {
        match self.annotation(key)? {
            Some(name) if name != self.node.name.as_str() => {
                let message = format!("says node {}, but this is {}", quoted(name), self.node.name);
                Err(GrantError::new(key, message))
            }
            _ => Ok(()),
        }
    }

    /// The containers of `spec.containers`; their positions are the indexes that records use.
    fn apps(&self) -> impl Iterator<Item = &'a Container> {
        self.pod.containers.iter().filter(|container| container.role == ContainerRole::App)
    }

    /// A GPU by its index on the node.
    fn gpu_at(&self, field: &str, index: usize) -> Result<&'a Gpu, GrantError> {
        self.node.gpus.get(index).ok_or_else(|| {
            let (node, count) = (&self.node.name, self.node.gpus.len());
            GrantError::new(field, format!("names GPU {index}, but node {node} has {count} GPUs, from 0 on"))
        })
    }

    /// A container's amount of a resource as a whole number; zero is the same as none.
    fn amount(&self, container: &Container, resource: &str) -> Result<Option<u64>, GrantError> {
        let Some(count) = container.count(resource) else { return Ok(None) };
        let count = count.map_err(|e| {
            GrantError::new(resource, format!("container {}: {e}", quote::short(container.name.as_str())))
        })?;
        Ok(Some(count).filter(|&count| count > 0))
    }

    /// The containers of `spec.containers` that ask for more than zero of any of these resources.
    fn asking(&self, resources: &[&str]) -> Result<Vec<&'a Container>, GrantError> {
        let mut asking = Vec::new();
        for container in self.apps() {
            for resource in resources {
                if self.amount(container, resource)?.is_some() {
                    asking.push(container);
                    break;
                }
            }
        }
        Ok(asking)
    }
}

/// So many units of memory in bytes, unless no GPU has as much.
fn memory_of(field: &str, units: u64, unit: u64) -> Result<Bytes, GrantError> {
    let bytes = units.checked_mul(unit).map(Bytes).filter(|&bytes| bytes <= MAX_MEMORY);
    bytes.ok_or_else(|| {
        GrantError::new(field, format!("says {units} units of {}, more memory than any GPU has", Bytes(unit)))
    })
}

/// A position, in the one way Kubernetes tools write it: `01` and `+1` would be second names for `1`.
fn position(text: &str) -> Option<usize> {
    text.parse::<usize>().ok().filter(|index| index.to_string() == text)
}

/// A tenant's text, short and without control characters.
fn quoted(text: &str) -> String {
    format!("{:?}", quote::short(text))
}
