//! Encodes a grant into the annotations and environment of each dialect, and decodes it again.
//!
//! The native annotation is always written. It is exact and, if present, the only record that is read. The records of the
//! other dialects are written for the tools of those projects, and read to take over a cluster that one of those projects
//! still schedules. A tenant may have forged any record: its length is bounded, and every GPU, index and amount in it is
//! verified.
//!
//! Details that the record of another dialect cannot express are lost when it is decoded: see `read` of each dialect.

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

use super::{Dialect, DialectSettings};
use crate::cluster_file::MAX_MEMORY;
use crate::model::{Bytes, ContainerName, ContainerRole, Gpu, Grant, Node, NodeName, PodGrant, Share};
use crate::pod::{ContainerManifest, PodManifest};
use crate::truncate;
use std::collections::BTreeMap;

/// Maximum length of a record: Kubernetes allows no more annotations on one object.
pub const MAX_RECORD_BYTES: usize = 256 << 10;

/// A grant, encoded for the users and tools of its dialects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EncodedGrant {
    /// Annotations of the pod.
    pub annotations: BTreeMap<String, String>,
    /// Environment of each container that has a grant.
    pub env: BTreeMap<ContainerName, BTreeMap<String, String>>,
    /// Annotations for the container runtime, per container.
    pub container_annotations: BTreeMap<ContainerName, BTreeMap<String, String>>,
}

/// The dialect of each container of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodDialects {
    /// All containers in the order of the spec, including those without a GPU, because records use positions.
    pub containers: Vec<ContainerDialect>,
}

/// The dialect of one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerDialect {
    /// The name of the container.
    pub name: ContainerName,
    /// When the container runs.
    pub role: ContainerRole,
    /// Its dialect; `None` if it requests no GPU.
    pub dialect: Option<Dialect>,
    /// The domain of its `vcuda-*` resources, if it has any.
    pub domain: Option<String>,
}

impl PodDialects {
    /// Combines the containers of a pod with the dialects in which their asks were read.
    pub fn of(pod: &PodManifest, dialects: &BTreeMap<ContainerName, Dialect>) -> PodDialects {
        let with_dialect = |container: &ContainerManifest| ContainerDialect {
            name: container.name.clone(),
            role: container.role,
            dialect: dialects.get(&container.name).copied(),
            domain: vcuda::domain(container).map(str::to_string),
        };
        PodDialects { containers: pod.containers.iter().map(with_dialect).collect() }
    }

    /// Returns each container with its index in `spec.containers`. Init containers and sidecars have no index.
    fn places(&self) -> BTreeMap<&str, SpecPosition<'_>> {
        let mut app_indexes = 0..;
        let mut places = BTreeMap::new();
        for container in &self.containers {
            let app_index = if container.role == ContainerRole::App { app_indexes.next() } else { None };
            places.insert(container.name.as_str(), (container, app_index));
        }
        places
    }
}

/// A time in nanoseconds since the Unix epoch. This crate has no clock, so the caller passes the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnixNanos(pub u64);

impl UnixNanos {
    fn seconds(self) -> u64 {
        self.0 / 1_000_000_000
    }
}

/// Why a grant cannot be encoded or decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct GrantError {
    /// The annotation, resource or container that has the error.
    pub field: String,
    /// The offending value and the reason.
    pub message: String,
}

impl GrantError {
    /// Messages appear in logs and events and may quote tenants, so they are truncated and control characters, including
    /// line breaks, are replaced.
    fn new(field: impl Into<String>, message: impl Into<String>) -> GrantError {
        let plain = |text: String| text.replace(char::is_control, " ");
        let (field, message) = (plain(field.into()), plain(message.into()));
        GrantError { field: truncate::shorten_field(&field), message: truncate::shorten_message(&message) }
    }
}

/// Encodes a grant: the native annotation, and the annotations and environment of its containers' dialects.
pub fn write(
    grant: &PodGrant,
    node: &Node,
    dialects: &PodDialects,
    settings: &DialectSettings,
    now: UnixNanos,
) -> Result<EncodedGrant, GrantError> {
    if grant.node != node.name {
        let message = format!("the grant is on node {}, not on {}", grant.node, node.name);
        return Err(GrantError::new(native::ANNOTATION, message));
    }
    let places = dialects.places();
    let placed: Vec<PlacedGrant<'_>> =
        grant.grants.iter().map(|grant| PlacedGrant::of(grant, node, &places)).collect::<Result<_, _>>()?;
    let mut written = EncodedGrant::default();
    written.annotations.insert(native::ANNOTATION.into(), native::encode(grant)?);
    for container in &placed {
        environment::visible_devices(container, written.env_of(container));
    }
    let bind = BindContext { node, settings, now };
    for dialect in Dialect::ALL {
        let mine: Vec<&PlacedGrant<'_>> = placed.iter().filter(|placed| placed.dialect == dialect).collect();
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

/// Decodes the grant in a pod's annotations, with the dialect of its record; `None` if there is no record.
///
/// `bound_to` is the node in the pod's spec, and `node` the one whose GPUs the record must name. The native record takes
/// precedence. Records of two other dialects are an error, because it is undefined which one applies. AWS grants have no
/// record on the pod: only kubelet knows them (see [`aws::read`]).
pub fn read(
    pod: &PodManifest,
    bound_to: Option<&NodeName>,
    node: &Node,
    settings: &DialectSettings,
) -> Result<Option<(Dialect, PodGrant)>, GrantError> {
    if let Some(bound_to) = bound_to.filter(|&bound_to| *bound_to != node.name) {
        let message = format!("the pod runs on node {bound_to}: its grant cannot be on {}", node.name);
        return Err(GrantError::new("spec.nodeName", message));
    }
    let record = RecordReader { pod, node, settings };
    if let Some(text) = record.annotation(native::ANNOTATION)? {
        return native::read(text, &record).map(|grant| Some((Dialect::Native, grant)));
    }
    let readers: [(Dialect, ReadRecord); 4] = [
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
                "the pod has a grant of {other} and one of {dialect}, and it is undefined which one applies: \
                 remove the annotations of one"
            );
            return Err(GrantError::new("metadata.annotations", message));
        }
        found = Some((dialect, PodGrant { node: node.name.clone(), grants }));
    }
    Ok(found)
}

/// Updates the records of all dialects to show that the node has prepared the pod, as the tools of those projects expect.
pub fn mark_prepared(annotations: &mut BTreeMap<String, String>) {
    for (key, value) in annotations {
        let done = match key.as_str() {
            gpushare::ASSIGNED => "true",
            volcano::BIND_PHASE => "success",
            // Upstream erases this list container by container.
            volcano::TO_ALLOCATE => "",
            key if vcuda::is_assigned_key(key) => "true",
            _ => continue,
        };
        *value = done.into();
    }
}

/// Annotations that are a scheduler's record, except vcuda's, which can be in any domain.
pub const RECORD_ANNOTATIONS: [&str; 9] = [
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

/// Returns whether an annotation is a scheduler's record, which must not be in a manifest.
pub fn is_record(annotation: &str) -> bool {
    RECORD_ANNOTATIONS.contains(&annotation) || vcuda::is_index_key(annotation)
}

type ReadRecord = fn(&RecordReader<'_>) -> Result<Option<Vec<Grant>>, GrantError>;

impl EncodedGrant {
    fn env_of(&mut self, placed: &PlacedGrant<'_>) -> &mut BTreeMap<String, String> {
        self.env.entry(placed.container.clone()).or_default()
    }
}

type SpecPosition<'a> = (&'a ContainerDialect, Option<usize>);

/// Context for encoding a grant.
struct BindContext<'a> {
    node: &'a Node,
    settings: &'a DialectSettings,
    now: UnixNanos,
}

/// The grant of one container, with its position in the spec and its GPUs on the node.
struct PlacedGrant<'a> {
    container: &'a ContainerName,
    dialect: Dialect,
    domain: Option<&'a str>,
    /// Its index in `spec.containers`; `None` for init containers and sidecars, which are in another list.
    app_index: Option<usize>,
    init: bool,
    shares: Vec<ShareOnGpu<'a>>,
}

/// A share and its GPU.
struct ShareOnGpu<'a> {
    index: usize,
    gpu: &'a Gpu,
    share: &'a Share,
}

impl<'a> PlacedGrant<'a> {
    fn of(
        grant: &'a Grant,
        node: &'a Node,
        places: &BTreeMap<&str, SpecPosition<'a>>,
    ) -> Result<PlacedGrant<'a>, GrantError> {
        let name = &grant.container;
        let fail = |message: String| GrantError::new(name.as_str(), message);
        let &(container, app_index) = places
            .get(name.as_str())
            .ok_or_else(|| fail("the grant names a container that the pod does not have".into()))?;
        let dialect = container
            .dialect
            .ok_or_else(|| fail("the grant names a container that requests no GPU".into()))?;
        if grant.init != (container.role == ContainerRole::Init) {
            let (marked, is) = if grant.init {
                ("an init container", "is not one")
            } else {
                ("an app container", "is an init container")
            };
            return Err(fail(format!("the grant marks this container as {marked}, but it {is}")));
        }
        let on_gpu = |share: &'a Share| {
            let index = node.gpu_index(&share.gpu).ok_or_else(|| {
                fail(format!("node {} has no GPU {}: place the pod again", node.name, share.gpu))
            })?;
            Ok(ShareOnGpu { index, gpu: &node.gpus[index], share })
        };
        Ok(PlacedGrant {
            container: name,
            dialect,
            domain: container.domain.as_deref(),
            app_index,
            init: container.role == ContainerRole::Init,
            shares: grant.shares.iter().map(on_gpu).collect::<Result<_, _>>()?,
        })
    }
}

impl ShareOnGpu<'_> {
    /// Returns the share's memory in units of a tool, rounded up so that the tool never counts held memory as free. Tools do
    /// not count the last, partial unit of a GPU. A share without a limit holds all units.
    fn units(&self, unit: u64) -> u64 {
        let all = self.gpu.memory_bytes.0 / unit;
        match self.share.memory_bytes {
            None => all,
            Some(memory) if memory <= self.gpu.memory_bytes => memory.0.div_ceil(unit).min(all),
            Some(memory) => memory.0.div_ceil(unit),
        }
    }

    /// Returns the share's compute in whole percent, rounded up; 0 means no guaranteed compute.
    fn percent(&self) -> u32 {
        self.share.cores.map_or(0, |cores| cores.as_millipercent().div_ceil(1000))
    }
}

/// A pod whose records are decoded, and the node that they must match.
struct RecordReader<'a> {
    pod: &'a PodManifest,
    node: &'a Node,
    settings: &'a DialectSettings,
}

impl<'a> RecordReader<'a> {
    /// Returns an annotation, or an error if it is too long.
    fn annotation(&self, key: &str) -> Result<Option<&'a str>, GrantError> {
        let Some(text) = self.pod.annotations.get(key) else { return Ok(None) };
        if text.len() > MAX_RECORD_BYTES {
            let message = format!(
                "is {} bytes long, more than the {MAX_RECORD_BYTES} that Kubernetes allows",
                text.len()
            );
            return Err(GrantError::new(key, message));
        }
        Ok(Some(text))
    }

    /// Refuses a record that names another node. A record without a node is accepted.
    fn check_node(&self, key: &str) -> Result<(), GrantError> {
        match self.annotation(key)? {
            Some(name) if name != self.node.name.as_str() => {
                let message = format!("names node {}, but this is {}", quoted(name), self.node.name);
                Err(GrantError::new(key, message))
            }
            _ => Ok(()),
        }
    }

    /// Returns the containers of `spec.containers`. Records use their positions as indexes.
    fn apps(&self) -> impl Iterator<Item = &'a ContainerManifest> {
        self.pod.containers.iter().filter(|container| container.role == ContainerRole::App)
    }

    /// Returns the GPU with an index on the node.
    fn gpu_at(&self, field: &str, index: usize) -> Result<&'a Gpu, GrantError> {
        self.node.gpus.get(index).ok_or_else(|| {
            let (node, count) = (&self.node.name, self.node.gpus.len());
            GrantError::new(
                field,
                format!("names GPU {index}, but node {node} has {count} GPUs, counted from 0"),
            )
        })
    }

    /// Returns a container's amount of a resource as a whole number; `None` for zero or no amount.
    fn amount(&self, container: &ContainerManifest, resource: &str) -> Result<Option<u64>, GrantError> {
        let Some(count) = container.count(resource) else { return Ok(None) };
        let count = count.map_err(|e| {
            GrantError::new(
                resource,
                format!("container {}: {e}", truncate::shorten(container.name.as_str())),
            )
        })?;
        Ok(Some(count).filter(|&count| count > 0))
    }

    /// Returns the containers of `spec.containers` that request a nonzero amount of any of these resources.
    fn requesting(&self, resources: &[&str]) -> Result<Vec<&'a ContainerManifest>, GrantError> {
        let mut requesting = Vec::new();
        for container in self.apps() {
            for resource in resources {
                if self.amount(container, resource)?.is_some() {
                    requesting.push(container);
                    break;
                }
            }
        }
        Ok(requesting)
    }
}

/// Converts units of memory to bytes, or returns an error if no GPU has as much.
fn memory_of(field: &str, units: u64, unit: u64) -> Result<Bytes, GrantError> {
    let bytes = units.checked_mul(unit).map(Bytes).filter(|&bytes| bytes <= MAX_MEMORY);
    bytes.ok_or_else(|| {
        GrantError::new(
            field,
            format!("names {units} units of {}, which is more memory than any GPU has", Bytes(unit)),
        )
    })
}

/// Parses a position in canonical form: `01` and `+1` would be additional names for `1`.
fn parse_position(text: &str) -> Option<usize> {
    text.parse::<usize>().ok().filter(|index| index.to_string() == text)
}

/// Quotes a tenant's text, truncated and with control characters escaped.
fn quoted(text: &str) -> String {
    format!("{:?}", truncate::shorten(text))
}
