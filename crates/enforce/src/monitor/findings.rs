//! Formats findings of the bypass audit, and determines which of them are new.

use partage_core::model::{Bytes, GpuUuid, Node};
use partage_host::gpus::{uuid_bytes, uuid_from_bytes};
use partage_region::audit::{BypassFinding, BypassKind};
use std::collections::{BTreeMap, BTreeSet};

/// Identifies a finding from poll to poll. Its amount changes, and it is still the same finding.
type FindingId<K> = (K, [u8; 16], BypassKind, Option<u32>);

/// The findings of the last poll.
#[derive(Debug)]
pub(super) struct FindingLog<K> {
    /// The index of a GPU is its position here.
    gpus: Vec<GpuUuid>,
    known: BTreeSet<FindingId<K>>,
}

/// Findings by share, and the new ones among them.
type Sentences<K> = (BTreeMap<K, Vec<String>>, Vec<(K, String)>);

impl<K: Ord + Clone> FindingLog<K> {
    pub(super) fn new(node: &Node) -> FindingLog<K> {
        let gpus = node.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        FindingLog { gpus, known: BTreeSet::new() }
    }

    /// Replaces the findings of the last poll by these. `keys` maps the names that the audit uses to shares.
    pub(super) fn update(
        &mut self,
        findings: Vec<BypassFinding>,
        keys: &BTreeMap<String, K>,
    ) -> Sentences<K> {
        let mut all: BTreeMap<K, Vec<String>> = BTreeMap::new();
        let mut new = Vec::new();
        let mut known = BTreeSet::new();
        for finding in findings {
            let Some(key) = keys.get(&finding.container) else { continue };
            let sentence = self.sentence(&finding);
            let id = (key.clone(), finding.gpu, finding.kind, finding.pid);
            if !self.known.contains(&id) {
                new.push((key.clone(), sentence.clone()));
            }
            known.insert(id);
            all.entry(key.clone()).or_default().push(sentence);
        }
        self.known = known;
        (all, new)
    }

    fn sentence(&self, finding: &BypassFinding) -> String {
        let at = self.gpus.iter().position(|uuid| uuid_bytes(uuid) == Some(finding.gpu));
        let gpu = at.map_or_else(|| uuid_from_bytes(finding.gpu).to_string(), |at| format!("GPU {at}"));
        let who = finding.pid.map_or_else(|| "its processes".into(), |pid| format!("process {pid}"));
        let one = |singular, plural| if finding.pid.is_some() { singular } else { plural };
        let bytes = Bytes(finding.amount);
        match finding.kind {
            BypassKind::ForgedUsage if finding.pid.is_none() && finding.amount > 0 => {
                format!("{who} extended the usage file by {bytes}; it was truncated")
            }
            BypassKind::ForgedUsage => {
                format!("{who} overwrote {} usage record of {gpu}", one("its", "their"))
            }
            BypassKind::UnaccountedMemory => {
                format!("{who} {} {bytes} on {gpu} that the shim did not allocate", one("holds", "hold"))
            }
            BypassKind::OverLimit => {
                format!("{who} {} {bytes} above the limit on {gpu}", one("holds", "hold"))
            }
            BypassKind::UnaccountedWork => {
                format!("{who} {} kernels on {gpu} outside {} turns", one("runs", "run"), one("its", "their"))
            }
            BypassKind::UngrantedGpu => {
                format!("{who} {} {gpu}, which was not granted", one("uses", "use"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use partage_core::model::Gpu;

    const GPU: &str = "GPU-01234567-89ab-cdef-0123-456789abcdef";

    #[test]
    fn sentences_agree_with_one_process_and_with_several() {
        let gpu = Gpu {
            uuid: GPU.into(),
            minor: 0,
            model: "Tesla T4".into(),
            memory_bytes: Bytes(16 << 30),
            numa: None,
            pci: None,
            withheld: None,
        };
        let log: FindingLog<String> = FindingLog::new(&Node::new("n1", vec![gpu]));
        let sentence = |kind, pid| {
            let gpu = uuid_bytes(&GPU.into()).unwrap();
            log.sentence(&BypassFinding { container: "a".into(), gpu, kind, pid, amount: 1 << 30, since: 0 })
        };
        for (kind, one, all) in [
            (
                BypassKind::UnaccountedWork,
                "process 7 runs kernels on GPU 0 outside its turns",
                "its processes run kernels on GPU 0 outside their turns",
            ),
            (
                BypassKind::UnaccountedMemory,
                "process 7 holds 1 GiB on GPU 0 that the shim did not allocate",
                "its processes hold 1 GiB on GPU 0 that the shim did not allocate",
            ),
            (
                BypassKind::OverLimit,
                "process 7 holds 1 GiB above the limit on GPU 0",
                "its processes hold 1 GiB above the limit on GPU 0",
            ),
            (
                BypassKind::UngrantedGpu,
                "process 7 uses GPU 0, which was not granted",
                "its processes use GPU 0, which was not granted",
            ),
            (
                BypassKind::ForgedUsage,
                "process 7 overwrote its usage record of GPU 0",
                "its processes extended the usage file by 1 GiB; it was truncated",
            ),
        ] {
            assert_eq!(sentence(kind, Some(7)), one);
            assert_eq!(sentence(kind, None), all);
        }
    }
}
