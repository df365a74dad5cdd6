//! The annotation `volcano.sh/node-vgpu-register`: the GPUs of a node, as Volcano's scheduler reads them.
//!
//! One entry per GPU: `<uuid>,<max shares>,<memory>,NVIDIA-<model>,<healthy>,<mode>:`, sorted by minor number.

use super::volcano::unit;
use super::{GrantError, MAX_RECORD_BYTES, memory_of, quoted};
use crate::cluster_file::is_uuid;
use crate::dialect::DialectSettings;
use crate::model::{Gpu, Node, NodeName};
use std::collections::BTreeSet;

/// The annotation on the node.
pub const ANNOTATION: &str = "volcano.sh/node-vgpu-register";
/// Maximum number of shares per GPU that is registered for a node without a limit: the format requires a number.
pub const DEFAULT_MAX_SHARES: u32 = 10;

const MODEL_PREFIX: &str = "NVIDIA-";
/// The mode of a GPU that is shared by software.
const SOFTWARE_MODE: &str = "hami-core";
const UNHEALTHY: &str = "registered as unhealthy";

/// Encodes the GPUs of a node.
pub fn encode(node: &Node, settings: &DialectSettings) -> String {
    let unit = unit(settings.volcano_memory_factor);
    let max_shares = node.max_shares_per_gpu.unwrap_or(DEFAULT_MAX_SHARES);
    let mut gpus: Vec<&Gpu> = node.gpus.iter().collect();
    gpus.sort_by_key(|gpu| gpu.minor);
    let entry = |gpu: &Gpu| {
        let (uuid, memory, healthy) = (&gpu.uuid, gpu.memory_bytes.0 / unit, gpu.withheld.is_none());
        // The format has no escapes for its separators.
        let model = gpu.model.replace([',', ':'], " ");
        format!("{uuid},{max_shares},{memory},{MODEL_PREFIX}{model},{healthy},{SOFTWARE_MODE}:")
    };
    gpus.into_iter().map(entry).collect()
}

/// Decodes a node. As in Volcano, one invalid entry is an error for the whole node.
///
/// The format lacks minor numbers (the order of the entries replaces them), NUMA nodes, links, and the reason why a GPU is
/// unhealthy. A text without any `:` has no GPUs.
pub fn decode(name: &NodeName, text: &str, settings: &DialectSettings) -> Result<Node, GrantError> {
    let fail = |message: String| GrantError::new(ANNOTATION, format!("node {name}: {message}"));
    if text.len() > MAX_RECORD_BYTES {
        return Err(fail(format!("is {} bytes long, more than {MAX_RECORD_BYTES}", text.len())));
    }
    let mut node = Node::new(name.clone(), Vec::new());
    if !text.contains(':') {
        return Ok(node);
    }
    let unit = unit(settings.volcano_memory_factor);
    let mut uuids = BTreeSet::new();
    for (position, entry) in text.split(':').filter(|entry| !entry.is_empty()).enumerate() {
        let bad = |what: &str| fail(format!("GPU {position}: {what} in {}", quoted(entry)));
        let fields: Vec<&str> = entry.split(',').collect();
        let &[uuid, max_shares, memory, model, healthy, mode, ..] = &fields[..] else {
            return Err(bad(&format!("{} of 6 fields", fields.len())));
        };
        if !is_uuid(uuid) || !uuids.insert(uuid) {
            return Err(bad("missing or duplicate UUID"));
        }
        let max_shares: u32 =
            max_shares.parse().ok().filter(|&max| max > 0).ok_or_else(|| bad("invalid number of shares"))?;
        // A node has one limit for all of its GPUs, so the smallest is used.
        node.max_shares_per_gpu =
            Some(node.max_shares_per_gpu.map_or(max_shares, |other| other.min(max_shares)));
        let memory: u32 = memory.parse().map_err(|_| bad("invalid amount of memory"))?;
        let withheld = match (healthy, mode) {
            ("true", "mig") => Some("MIG is enabled: not supported yet".to_string()),
            ("true", _) => None,
            ("false", _) => Some(UNHEALTHY.to_string()),
            _ => return Err(bad("health is neither true nor false")),
        };
        node.gpus.push(Gpu {
            uuid: uuid.into(),
            minor: u32::try_from(position).map_err(|_| bad("too many GPUs"))?,
            model: model.strip_prefix(MODEL_PREFIX).unwrap_or(model).into(),
            memory_bytes: memory_of(ANNOTATION, memory.into(), unit)?,
            numa: None,
            pci: None,
            withheld,
        });
    }
    Ok(node)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Bytes;
    use crate::testing;
    use proptest::prelude::*;

    fn settings(factor: u32) -> DialectSettings {
        DialectSettings { volcano_memory_factor: factor, ..DialectSettings::default() }
    }

    fn read(text: &str) -> Result<Node, String> {
        decode(&"n1".into(), text, &settings(1)).map_err(|e| e.to_string())
    }

    #[test]
    fn c16_missing_field_is_an_error_and_text_without_colon_has_no_gpus() {
        assert_eq!(read("GPU-a,10,15360,NVIDIA-Tesla T4,true,hami-core").unwrap().gpus, []);
        assert_eq!(
            read("GPU-a,10,15360,NVIDIA-Tesla T4,true:").unwrap_err(),
            "volcano.sh/node-vgpu-register: node n1: GPU 0: 5 of 6 fields in \"GPU-a,10,15360,NVIDIA-Tesla T4,true\""
        );
        for bad in [
            "GPU-a,10,-1,NVIDIA-T4,true,hami-core:",
            "GPU-a,0,1,NVIDIA-T4,true,hami-core:",
            "GPU-a,10,1,NVIDIA-T4,yes,hami-core:",
            ",10,1,NVIDIA-T4,true,hami-core:",
            "GPU-a[0-0],10,1,NVIDIA-T4,true,hami-core:",
            "GPU-a,10,1,NVIDIA-T4,true,hami-core:GPU-a,10,1,NVIDIA-T4,true,hami-core:",
            "GPU-a,10,4294967295,NVIDIA-T4,true,hami-core:",
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn c90_gpus_are_sorted_by_minor_and_memory_uses_the_factor() {
        let gpu = |uuid: &str, minor| Gpu {
            uuid: uuid.into(),
            minor,
            model: "Tesla T4".into(),
            memory_bytes: Bytes(15360 << 20),
            numa: None,
            pci: None,
            withheld: None,
        };
        let node = Node::new("n1", vec![gpu("GPU-b", 1), gpu("GPU-a", 0)]);
        assert_eq!(
            encode(&node, &settings(10)),
            "GPU-a,10,1536,NVIDIA-Tesla T4,true,hami-core:GPU-b,10,1536,NVIDIA-Tesla T4,true,hami-core:"
        );
        let read = decode(&"n1".into(), &encode(&node, &settings(10)), &settings(10)).unwrap();
        assert_eq!(read.gpus, [gpu("GPU-a", 0), gpu("GPU-b", 1)]);
    }

    #[test]
    fn unhealthy_and_mig_gpus_are_withheld() {
        let node =
            read("GPU-a,10,100,NVIDIA-A100,false,hami-core:GPU-b,4,100,NVIDIA-A100,true,mig:").unwrap();
        let reasons: Vec<_> = node.gpus.iter().map(|gpu| gpu.withheld.clone().unwrap()).collect();
        assert_eq!(reasons, ["registered as unhealthy", "MIG is enabled: not supported yet"]);
        assert_eq!(node.max_shares_per_gpu, Some(4));
    }

    proptest! {
        #[test]
        fn encoded_node_decodes_to_the_same_gpus(node in testing::node("n1", 0..9), factor in 1u32..20) {
            let settings = settings(factor);
            let read = decode(&node.name, &encode(&node, &settings), &settings).unwrap();
            prop_assert_eq!(read.gpus.len(), node.gpus.len());
            for (read, gpu) in read.gpus.iter().zip(&node.gpus) {
                prop_assert_eq!((&read.uuid, &read.model), (&gpu.uuid, &gpu.model));
                prop_assert_eq!(read.withheld.is_some(), gpu.withheld.is_some());
                let lost = gpu.memory_bytes.0 - read.memory_bytes.0;
                prop_assert!(lost < unit(factor));
            }
            prop_assert_eq!(encode(&read, &settings), encode(&node, &settings));
        }

        #[test]
        fn decoding_any_text_does_not_panic(text in "([a-z0-9,:\\-]|.)*") {
            let _ = decode(&"n1".into(), &text, &settings(1));
        }
    }
}
