//! Findings of the bypass audit as sentences, and which of them are new.

use partage_core::model::{Bytes, GpuUuid, Node};
use partage_host::gpus::{uuid_bytes, uuid_of};
use partage_region::audit::{Finding, FindingKind};
use std::collections::{BTreeMap, BTreeSet};

/// Identifies a finding from poll to poll. Its amount changes, and it is still the same finding.
type FindingId<K> = (K, [u8; 16], FindingKind, Option<u32>);

/// What was found in the last poll.
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

    /// Replaces the findings of the last poll by these. `keys` has the share of each name that the audit knows.
    pub(super) fn update(&mut self, findings: Vec<Finding>, keys: &BTreeMap<String, K>) -> Sentences<K> {
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

    fn sentence(&self, finding: &Finding) -> String {
        let at = self.gpus.iter().position(|uuid| uuid_bytes(uuid) == Some(finding.gpu));
        let gpu = at.map_or_else(|| uuid_of(finding.gpu).to_string(), |at| format!("GPU {at}"));
        let who = finding.pid.map_or_else(|| "its processes".into(), |pid| format!("process {pid}"));
        let one = |singular, plural| if finding.pid.is_some() { singular } else { plural };
        let bytes = Bytes(finding.amount);
        match finding.kind {
            FindingKind::ForgedUsage if finding.pid.is_none() && finding.amount > 0 => {
                format!("{who} made the file of their account {bytes} longer; it was cut back")
            }
            FindingKind::ForgedUsage => format!("{who} wrote over {} account of {gpu}", one("its", "their")),
            FindingKind::UnaccountedMemory => {
                format!(
                    "{who} {} {bytes} on {gpu} that {} did not ask for",
                    one("holds", "hold"),
                    one("it", "they")
                )
            }
            FindingKind::OverLimit => {
                format!("{who} {} {bytes} more on {gpu} than the limit", one("holds", "hold"))
            }
            FindingKind::UnaccountedWork => {
                format!("{who} {} on {gpu} outside {} turns", one("works", "work"), one("its", "their"))
            }
            FindingKind::UngrantedGpu => {
                format!("{who} {} {gpu}, which is not the share's", one("uses", "use"))
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
            log.sentence(&Finding { container: "a".into(), gpu, kind, pid, amount: 1 << 30, since: 0 })
        };
        for (kind, one, all) in [
            (
                FindingKind::UnaccountedWork,
                "process 7 works on GPU 0 outside its turns",
                "its processes work on GPU 0 outside their turns",
            ),
            (
                FindingKind::UnaccountedMemory,
                "process 7 holds 1 GiB on GPU 0 that it did not ask for",
                "its processes hold 1 GiB on GPU 0 that they did not ask for",
            ),
            (
                FindingKind::OverLimit,
                "process 7 holds 1 GiB more on GPU 0 than the limit",
                "its processes hold 1 GiB more on GPU 0 than the limit",
            ),
            (
                FindingKind::UngrantedGpu,
                "process 7 uses GPU 0, which is not the share's",
                "its processes use GPU 0, which is not the share's",
            ),
            (
                FindingKind::ForgedUsage,
                "process 7 wrote over its account of GPU 0",
                "its processes made the file of their account 1 GiB longer; it was cut back",
            ),
        ] {
            assert_eq!(sentence(kind, Some(7)), one);
            assert_eq!(sentence(kind, None), all);
        }
    }
}
