//! `volcano.sh/node-vgpu-register`: the GPUs of a node as Volcano's scheduler reads them.
//!
//! One entry per GPU: `<uuid>,<most shares>,<memory>,NVIDIA-<model>,<healthy>,<mode>:`, sorted by minor number.

use super::volcano::unit;
use super::{GrantError, MOST_TEXT, memory_of, quoted};
use crate::cluster_file::is_uuid;
use crate::dialect::Settings;
use crate::model::{Gpu, Node, NodeName};
use std::collections::BTreeSet;

/// The annotation of the node.
pub const ANNOTATION: &str = "volcano.sh/node-vgpu-register";
/// The most shares of one GPU that are registered for a node which sets no bound: the format needs a number.
pub const DEFAULT_MOST_SHARES: u32 = 10;

const MODEL_PREFIX: &str = "NVIDIA-";
/// The mode of a GPU shared in software.
const SHARED: &str = "hami-core";
const UNHEALTHY: &str = "registered as unhealthy";

/// The annotation's text for a node.
pub fn encode(node: &Node, settings: &Settings) -> String {
    let unit = unit(settings.volcano_memory_factor);
    let most = node.max_shares_per_gpu.unwrap_or(DEFAULT_MOST_SHARES);
    let mut gpus: Vec<&Gpu> = node.gpus.iter().collect();
    gpus.sort_by_key(|gpu| gpu.minor);
    let entry = |gpu: &Gpu| {
        let (uuid, memory, healthy) = (&gpu.uuid, gpu.memory_bytes.0 / unit, gpu.withheld.is_none());
        // The separators cannot be escaped.
        let model = gpu.model.replace([',', ':'], " ");
        format!("{uuid},{most},{memory},{MODEL_PREFIX}{model},{healthy},{SHARED}:")
    };
    gpus.into_iter().map(entry).collect()
}

/// A node from the annotation's text. An entry that is none refuses the whole node, as Volcano does.
///
/// Not in it: minor numbers (the order stands for them), NUMA nodes, links, and why a GPU is unhealthy. A text
/// without any `:` registers nothing.
pub fn decode(name: &NodeName, text: &str, settings: &Settings) -> Result<Node, GrantError> {
    let fail = |message: String| GrantError::new(ANNOTATION, format!("node {name}: {message}"));
    if text.len() > MOST_TEXT {
        return Err(fail(format!("is {} bytes long, more than {MOST_TEXT}", text.len())));
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
        let &[uuid, most, memory, model, healthy, mode, ..] = &fields[..] else {
            return Err(bad(&format!("{} of 6 fields", fields.len())));
        };
        if !is_uuid(uuid) || !uuids.insert(uuid) {
            return Err(bad("no UUID of its own"));
        }
        let most: u32 =
            most.parse().ok().filter(|&most| most > 0).ok_or_else(|| bad("no count of shares"))?;
        // One bound holds for all GPUs of a node; the smallest is right for each of them.
        node.max_shares_per_gpu = Some(node.max_shares_per_gpu.map_or(most, |other| other.min(most)));
        let memory: u32 = memory.parse().map_err(|_| bad("no amount of memory"))?;
        let withheld = match (healthy, mode) {
            ("true", "mig") => Some("MIG is enabled: not supported yet".to_string()),
            ("true", _) => None,
            ("false", _) => Some(UNHEALTHY.to_string()),
            _ => return Err(bad("neither true nor false for its health")),
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

    fn settings(factor: u32) -> Settings {
        Settings { volcano_memory_factor: factor, ..Settings::default() }
    }

    fn read(text: &str) -> Result<Node, String> {
        decode(&"n1".into(), text, &settings(1)).map_err(|e| e.to_string())
    }

    #[test]
    fn c16_five_fields_refuse_the_node_and_no_colon_means_no_gpus() {
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
    fn c90_sorted_by_minor_and_counted_in_the_factor() {
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
    fn health_and_mode_withhold_a_gpu() {
        let node =
            read("GPU-a,10,100,NVIDIA-A100,false,hami-core:GPU-b,4,100,NVIDIA-A100,true,mig:").unwrap();
        let reasons: Vec<_> = node.gpus.iter().map(|gpu| gpu.withheld.clone().unwrap()).collect();
        assert_eq!(reasons, ["registered as unhealthy", "MIG is enabled: not supported yet"]);
        assert_eq!(node.max_shares_per_gpu, Some(4));
    }

    proptest! {
        #[test]
        fn round_trips_what_it_can_say(node in testing::node("n1", 0..9), factor in 1u32..20) {
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
        fn never_panics(text in "([a-z0-9,:\\-]|.)*") {
            let _ = decode(&"n1".into(), &text, &settings(1));
        }
    }
}
