//! A cluster in one JSON file: its nodes and the grants of its pods (`docs/snapshot.md`).
//!
//! The format is strict: an operator writes or exports the file once and then trusts every answer computed from
//! it, so a misspelled field or a duplicate UUID is refused with its path in the file. A grant on a node or GPU
//! that no longer exists is accepted, because real clusters contain such grants; the ledger's audit reports it.

use crate::model::{
    Bytes, Gpu, Grant, MAX_GPUS_PER_NODE, MAX_SLOTS, MilliCpu, Namespace, Node, NodeName, PodGrant, PodId,
    PodName, PodUid,
};
use crate::quantity::Quantity;
use crate::truncate::shorten;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The `apiVersion` of a cluster file.
pub const API_VERSION: &str = "partage.dev/v1";
/// The `kind` of a cluster file.
pub const KIND: &str = "Snapshot";
/// Upper bound for the memory of one GPU or share; sums over a whole cluster stay far from overflow.
pub(crate) const MAX_MEMORY: Bytes = Bytes(1 << 50);

/// The nodes of a cluster and the grants held on them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterFile {
    /// The nodes, each listed once.
    pub nodes: Vec<Node>,
    /// The grants held on them, one entry per pod.
    pub grants: Vec<ClusterFileGrant>,
}

/// The grant that one pod holds, with its CPU and host memory requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "GrantFields", into = "GrantFields")]
pub struct ClusterFileGrant {
    /// The pod that holds the grant.
    pub pod: PodId,
    /// Its shares, by container.
    pub grant: PodGrant,
    /// CPU that the pod requests.
    pub cpu_milli: MilliCpu,
    /// Host memory that the pod requests.
    pub memory_bytes: Bytes,
}

/// Why a text is not a valid cluster file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {message}")]
pub struct ClusterFileError {
    /// The path in the file, with the name of the node or pod.
    pub path: String,
    /// The mistake and how to correct it.
    pub message: String,
}

impl ClusterFile {
    /// Parses and validates a cluster file.
    pub fn from_json(text: &str) -> Result<ClusterFile, ClusterFileError> {
        // Editors on Windows may start a file with a byte order mark.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let file: FileFields = serde_json::from_str(text).map_err(|e| locate(text, &e))?;
        if file.api_version != API_VERSION {
            return Err(at("apiVersion", mismatch(&file.api_version, API_VERSION)));
        }
        if file.kind != KIND {
            return Err(at("kind", mismatch(&file.kind, KIND)));
        }
        let cluster = ClusterFile { nodes: file.nodes, grants: file.grants };
        cluster.check()?;
        Ok(cluster)
    }

    /// Serializes the cluster as indented JSON.
    pub fn to_json(&self) -> Result<String, serde_json::Error> {
        let file = FileFields {
            api_version: API_VERSION.into(),
            kind: KIND.into(),
            nodes: self.nodes.clone(),
            grants: self.grants.clone(),
        };
        serde_json::to_string_pretty(&file)
    }

    /// Validates everything that [`ClusterFile::from_json`] requires beyond the JSON shape.
    pub fn check(&self) -> Result<(), ClusterFileError> {
        let mut names = BTreeSet::new();
        let mut uuids = BTreeMap::new();
        for (index, node) in self.nodes.iter().enumerate() {
            let path = format!("nodes[{index}] ({})", node.name);
            if node.name.as_str().is_empty() {
                return Err(at(&path, "the node has no name: write one".into()));
            }
            if !names.insert(&node.name) {
                return Err(at(&path, "another node has this name: list each node once".into()));
            }
            check_node(node, &path)?;
            for (gpu_index, gpu) in node.gpus.iter().enumerate() {
                if let Some(elsewhere) = uuids.insert(&gpu.uuid, &node.name) {
                    let message =
                        format!("UUID {} is also on node {elsewhere}: list each GPU once", gpu.uuid);
                    return Err(at(&format!("{path}.gpus[{gpu_index}].uuid"), message));
                }
            }
        }
        let mut uids = BTreeSet::new();
        for (index, held) in self.grants.iter().enumerate() {
            let path = format!("grants[{index}] ({}/{})", held.pod.namespace, held.pod.name);
            for (field, text) in [
                ("uid", held.pod.uid.as_str()),
                ("namespace", held.pod.namespace.as_str()),
                ("name", held.pod.name.as_str()),
                ("node", held.grant.node.as_str()),
            ] {
                if text.is_empty() {
                    return Err(at(&format!("{path}.{field}"), "is empty: set a value".into()));
                }
            }
            if !uids.insert(&held.pod.uid) {
                let message = format!("another pod has the UID {}: list each pod once", held.pod.uid);
                return Err(at(&format!("{path}.uid"), message));
            }
            check_grants(&held.grant.grants, &path)?;
        }
        Ok(())
    }
}

fn check_node(node: &Node, path: &str) -> Result<(), ClusterFileError> {
    if !(1..=MAX_SLOTS).contains(&node.slots_per_gpu) {
        let message = format!("is {}: write 1 to {MAX_SLOTS}", node.slots_per_gpu);
        return Err(at(&format!("{path}.slotsPerGpu"), message));
    }
    if node.max_shares_per_gpu == Some(0) {
        let message = "is 0, so no pod would ever fit: write 1 or more, or remove it".into();
        return Err(at(&format!("{path}.maxSharesPerGpu"), message));
    }
    if node.gpus.len() > MAX_GPUS_PER_NODE {
        let message = format!("are {}: the maximum is {MAX_GPUS_PER_NODE}", node.gpus.len());
        return Err(at(&format!("{path}.gpus"), message));
    }
    // The text form has one row per GPU.
    let rows = node.links.clone().map(|links| Vec::<String>::from(links).len());
    if let Some(rows) = rows.filter(|&rows| rows != node.gpus.len()) {
        let message = format!("has {rows} rows for {} GPUs: write one row per GPU", node.gpus.len());
        return Err(at(&format!("{path}.links"), message));
    }
    let mut minors = BTreeSet::new();
    for (index, gpu) in node.gpus.iter().enumerate() {
        let path = format!("{path}.gpus[{index}]");
        let uuid = gpu.uuid.as_str();
        if !is_uuid(uuid) {
            let message = format!("\"{uuid}\" is not a UUID: write it as `nvidia-smi -L` prints it");
            return Err(at(&format!("{path}.uuid"), message));
        }
        if !minors.insert(gpu.minor) {
            let message =
                format!("another GPU of this node has minor {}: minor numbers are unique", gpu.minor);
            return Err(at(&format!("{path}.minor"), message));
        }
        if gpu.memory_bytes == Bytes::ZERO || gpu.memory_bytes > MAX_MEMORY {
            let message = format!("is {}: write the GPU's memory, at most {MAX_MEMORY}", gpu.memory_bytes.0);
            return Err(at(&format!("{path}.memoryBytes"), message));
        }
    }
    Ok(())
}

/// Returns whether a text can be a GPU's UUID. Other tools read lists of UUIDs with the excluded separators.
pub(crate) fn is_uuid(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_graphic() && !",:;[]\"".contains(c))
}

/// Validates a list of grants, whichever format it was read from.
pub(crate) fn check_grants(grants: &[Grant], path: &str) -> Result<(), ClusterFileError> {
    let mut containers = BTreeSet::new();
    for (index, grant) in grants.iter().enumerate() {
        let path = format!("{path}.grants[{index}] ({})", shorten(grant.container.as_str()));
        if grant.container.as_str().is_empty() {
            return Err(at(&path, "the container has no name: write one".into()));
        }
        if !containers.insert(&grant.container) {
            return Err(at(&path, "another grant is for this container: write all its shares in one".into()));
        }
        if grant.shares.is_empty() {
            return Err(at(&path, "has no shares: remove the container".into()));
        }
        let mut gpus = BTreeSet::new();
        for (index, share) in grant.shares.iter().enumerate() {
            if !gpus.insert(&share.gpu) {
                let gpu = shorten(share.gpu.as_str());
                let message = format!("{gpu} is listed twice: write one share per GPU");
                return Err(at(&format!("{path}.shares[{index}].gpu"), message));
            }
            if let Some(memory) = share.memory_bytes.filter(|&memory| memory > MAX_MEMORY) {
                let message = format!("is {}: write at most {MAX_MEMORY}", memory.0);
                return Err(at(&format!("{path}.shares[{index}].memoryBytes"), message));
            }
        }
    }
    Ok(())
}

/// The fields of the file as written.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct FileFields<N = Node, G = ClusterFileGrant> {
    api_version: String,
    kind: String,
    #[serde(default = "Vec::new")]
    nodes: Vec<N>,
    #[serde(default = "Vec::new")]
    grants: Vec<G>,
}

/// A pod's grant as written: flat, so that one line per pod can be read.
///
/// Spelled out rather than flattened by serde, which would accept unknown fields.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct GrantFields {
    uid: PodUid,
    namespace: Namespace,
    name: PodName,
    node: NodeName,
    grants: Vec<Grant>,
    #[serde(default, skip_serializing_if = "is_default")]
    cpu_milli: MilliCpu,
    #[serde(default, skip_serializing_if = "is_default")]
    memory_bytes: Bytes,
}

fn is_default<T: Default + PartialEq>(amount: &T) -> bool {
    *amount == T::default()
}

impl From<GrantFields> for ClusterFileGrant {
    fn from(fields: GrantFields) -> ClusterFileGrant {
        ClusterFileGrant {
            pod: PodId { uid: fields.uid, namespace: fields.namespace, name: fields.name },
            grant: PodGrant { node: fields.node, grants: fields.grants },
            cpu_milli: fields.cpu_milli,
            memory_bytes: fields.memory_bytes,
        }
    }
}

impl From<ClusterFileGrant> for GrantFields {
    fn from(held: ClusterFileGrant) -> GrantFields {
        GrantFields {
            uid: held.pod.uid,
            namespace: held.pod.namespace,
            name: held.pod.name,
            node: held.grant.node,
            grants: held.grant.grants,
            cpu_milli: held.cpu_milli,
            memory_bytes: held.memory_bytes,
        }
    }
}

fn at(path: &str, message: String) -> ClusterFileError {
    ClusterFileError { path: path.into(), message }
}

fn mismatch(is: &str, must: &str) -> String {
    format!("is \"{is}\": write \"{must}\"")
}

/// Names the node or pod that contains a shape error: a line number helps little in a generated file.
///
/// Only a file that failed to parse is read this second time, item by item.
fn locate(text: &str, error: &serde_json::Error) -> ClusterFileError {
    let whole = || at("snapshot", error.to_string());
    let Ok(file) = serde_json::from_str::<FileFields<Value, Value>>(text) else { return whole() };
    let node = |item: &Value| {
        let gpus = item.get("gpus").and_then(Value::as_array).into_iter().flatten();
        first_bad::<Gpu>(gpus, ".gpus", "uuid", |_| None)
    };
    first_bad::<Node>(file.nodes.iter(), "nodes", "name", node)
        .or_else(|| first_bad::<ClusterFileGrant>(file.grants.iter(), "grants", "name", |_| None))
        .map_or_else(whole, |(path, message)| at(&path, message))
}

/// Returns a hint if a quantity as in manifests was written instead of a number of bytes.
fn quantity_for_bytes(value: &Value) -> Option<String> {
    match value {
        Value::Object(fields) => fields.iter().find_map(|(key, value)| match value {
            Value::String(text) if key.ends_with("Bytes") => {
                let bytes = text.parse().and_then(Quantity::to_units).ok()?;
                Some(format!("{} is \"{}\": write bytes: {bytes}", shorten(key), shorten(text)))
            }
            value => quantity_for_bytes(value),
        }),
        Value::Array(items) => items.iter().find_map(quantity_for_bytes),
        _ => None,
    }
}

/// Returns the path and error of the first item that does not deserialize as `T`, or what `inside` finds in it.
fn first_bad<'a, T: DeserializeOwned>(
    items: impl Iterator<Item = &'a Value>,
    list: &str,
    name: &str,
    inside: impl Fn(&Value) -> Option<(String, String)>,
) -> Option<(String, String)> {
    for (index, item) in items.enumerate() {
        let Err(error) = T::deserialize(item) else { continue };
        let label = item.get(name).and_then(Value::as_str).unwrap_or("no name");
        let path = format!("{list}[{index}] ({label})");
        return Some(match inside(item) {
            Some((deeper, message)) => (format!("{path}{deeper}"), message),
            None => (path, quantity_for_bytes(item).unwrap_or_else(|| error.to_string())),
        });
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use proptest::prelude::*;

    const EXAMPLE: &str = include_str!("../../../examples/cluster.json");

    fn refused(change: impl Fn(&mut Value)) -> String {
        let mut value: Value = serde_json::from_str(EXAMPLE).unwrap();
        change(&mut value);
        ClusterFile::from_json(&value.to_string()).unwrap_err().to_string()
    }

    #[test]
    fn example_file_is_valid() {
        let cluster = ClusterFile::from_json(EXAMPLE).unwrap();
        assert_eq!((cluster.nodes.len(), cluster.grants.len()), (3, 4));
        assert_eq!(ClusterFile::from_json(&cluster.to_json().unwrap()), Ok(cluster));
    }

    #[test]
    fn errors_name_the_path() {
        assert_eq!(refused(|v| v["kind"] = "List".into()), "kind: is \"List\": write \"Snapshot\"");
        assert!(refused(|v| v["apiVersion"] = "v2".into()).starts_with("apiVersion: "));
        let doubled = refused(|v| v["nodes"][1]["name"] = "gpu-a".into());
        assert_eq!(doubled, "nodes[1] (gpu-a): another node has this name: list each node once");
        let uuid = refused(|v| v["nodes"][1]["gpus"][0]["uuid"] = v["nodes"][0]["gpus"][1]["uuid"].clone());
        assert!(uuid.starts_with("nodes[1] (gpu-b).gpus[0].uuid: UUID GPU-"), "{uuid}");
        assert!(uuid.contains("is also on node gpu-a"), "{uuid}");
        for slots in [0, 49] {
            let message = refused(|v| v["nodes"][2]["slotsPerGpu"] = slots.into());
            assert_eq!(message, format!("nodes[2] (gpu-c).slotsPerGpu: is {slots}: write 1 to 48"));
        }
        let unknown = refused(|v| v["nodes"][0]["gpus"][1]["memoryByte"] = 5.into());
        assert!(unknown.starts_with("nodes[0] (gpu-a).gpus[1] (GPU-"), "{unknown}");
        assert!(unknown.contains("unknown field `memoryByte`"), "{unknown}");
        let cores = refused(|v| v["grants"][0]["grants"][0]["shares"][0]["cores"] = 101.into());
        assert!(cores.starts_with("grants[0] (notebook-0): "), "{cores}");
        assert!(
            refused(|v| v["nodes"][0]["gpus"][0]["memoryBytes"] = 0.into()).contains("memoryBytes: is 0")
        );
        assert!(refused(|v| v["nodes"][0]["gpus"][1]["minor"] = 0.into()).contains("has minor 0"));
        assert!(refused(|v| v["nodes"][0]["gpus"][1]["uuid"] = "a,b".into()).contains("is not a UUID"));
        assert!(refused(|v| v["nodes"][0]["links"] = Value::from(vec!["X"])).contains("1 rows for 4 GPUs"));
        assert!(refused(|v| v["grants"][1]["uid"] = v["grants"][0]["uid"].clone()).contains("has the UID"));
        assert!(refused(|v| v["grants"][0]["node"] = "".into()).contains("node: is empty"));
        assert!(refused(|v| v["more"] = 1.into()).contains("unknown field `more`"));
        assert!(ClusterFile::from_json("{").unwrap_err().to_string().contains("line 1"));
    }

    #[test]
    fn quantity_instead_of_bytes_is_converted_in_the_message() {
        let error = refused(|v| v["nodes"][0]["gpus"][0]["memoryBytes"] = "80Gi".into());
        assert!(error.ends_with(": memoryBytes is \"80Gi\": write bytes: 85899345920"), "{error}");
        let error = refused(|v| v["nodes"][1]["memoryBytes"] = "1G".into());
        assert!(error.ends_with("(gpu-b): memoryBytes is \"1G\": write bytes: 1000000000"), "{error}");
    }

    #[test]
    fn too_many_gpus_on_a_node_are_refused() {
        let many = |count: usize| {
            refused(|v| {
                v["nodes"][2].as_object_mut().unwrap().remove("links");
                let gpu = v["nodes"][2]["gpus"][0].clone();
                let gpus = (0..count).map(|index| {
                    let mut gpu = gpu.clone();
                    gpu["uuid"] = format!("GPU-many-{index}").into();
                    gpu["minor"] = index.into();
                    gpu
                });
                v["nodes"][2]["gpus"] = gpus.collect();
                v["grants"][0]["uid"] = if count > 64 { "u".into() } else { Value::Null };
            })
        };
        assert_eq!(many(65), "nodes[2] (gpu-c).gpus: are 65: the maximum is 64");
        assert!(many(64).starts_with("grants[0]"));
        assert!(ClusterFile::from_json(&format!("\u{feff}{EXAMPLE}")).is_ok());
    }

    #[test]
    fn grant_on_unknown_node_is_accepted() {
        let mut value: Value = serde_json::from_str(EXAMPLE).unwrap();
        value["grants"][0]["node"] = "gone".into();
        assert!(ClusterFile::from_json(&value.to_string()).is_ok());
    }

    proptest! {
        #[test]
        fn cluster_file_round_trips_through_json(cluster in testing::cluster_file()) {
            let json = cluster.to_json().unwrap();
            prop_assert_eq!(ClusterFile::from_json(&json).unwrap(), cluster);
        }

        #[test]
        fn parsing_any_text_does_not_panic(text in ".*") {
            let _ = ClusterFile::from_json(&text);
        }
    }
}
