//! What a context takes on each GPU, measured once for a GPU and a driver, and written down.

use crate::files;
use partage_core::model::{Bytes, GpuUuid, Node};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs;
use std::io;
use std::path::PathBuf;

/// What is known of the sizes of contexts.
#[derive(Debug)]
pub struct Sizes {
    file: PathBuf,
    /// The version of the driver that is loaded now.
    driver: String,
    /// By GPU, also those that are not there now: a card may be lost today and back tomorrow.
    known: BTreeMap<GpuUuid, Measured>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Measured {
    /// With which driver.
    driver: String,
    bytes: Bytes,
}

impl Sizes {
    /// What was written down. A file that cannot be read is like none: all is measured again.
    pub fn read(file: PathBuf, driver: &str) -> Self {
        let known = fs::read(&file).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        Self { file, driver: driver.into(), known: known.unwrap_or_default() }
    }

    /// What a context takes on a GPU; nothing where that is unknown.
    pub fn of(&self, gpu: &GpuUuid) -> Bytes {
        self.find(gpu).unwrap_or(Bytes::ZERO)
    }

    fn find(&self, gpu: &GpuUuid) -> Option<Bytes> {
        self.known.get(gpu).filter(|known| known.driver == self.driver).map(|known| known.bytes)
    }

    /// GPUs that can be shared and of which it is not known, with their numbers.
    fn missing<'a>(&self, node: &'a Node) -> Vec<(usize, &'a GpuUuid)> {
        let gpus = node.gpus.iter().enumerate().filter(|(_, gpu)| gpu.withheld.is_none());
        gpus.map(|(at, gpu)| (at, &gpu.uuid)).filter(|(_, gpu)| self.find(gpu).is_none()).collect()
    }

    /// Measures where something is missing; what to warn of. What stays unknown is tried again at the next start: a GPU may
    /// have been somebody's alone, or full.
    pub fn complete<E: Display>(
        &mut self,
        node: &Node,
        measure: impl FnOnce() -> Result<Vec<(GpuUuid, Bytes)>, E>,
    ) -> Vec<String> {
        if self.missing(node).is_empty() {
            return Vec::new();
        }
        let mut warnings = Vec::new();
        let mut why = "the driver made no context there, or does not tell its size".to_string();
        match measure() {
            Ok(measured) => {
                let driver = &self.driver;
                let measured = measured
                    .into_iter()
                    .map(|(gpu, bytes)| (gpu, Measured { driver: driver.clone(), bytes }));
                self.known.extend(measured);
                if let Err(error) = self.write() {
                    warnings.push(format!("{}: cannot be written: {error}", self.file.display()));
                }
            }
            Err(error) => why = error.to_string(),
        }
        let unknown = self.missing(node);
        if !unknown.is_empty() {
            let gpus: Vec<String> = unknown.iter().map(|(at, _)| at.to_string()).collect();
            warnings.push(format!(
                "what a context takes on GPU {} is unknown, and is not counted: {why}; it is measured again with the next start",
                gpus.join(", ")
            ));
        }
        warnings
    }

    fn write(&self) -> io::Result<()> {
        files::write_whole(&self.file, &serde_json::to_vec(&self.known)?, 0o644)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use partage_core::model::Gpu;

    fn node(gpus: usize) -> Node {
        let gpu = |at: usize| Gpu {
            uuid: uuid(at),
            minor: at as u32,
            model: "Tesla T4".into(),
            memory_bytes: Bytes(15 << 30),
            numa: None,
            pci: None,
            withheld: None,
        };
        Node::new("this machine", (0..gpus).map(gpu).collect())
    }

    fn uuid(at: usize) -> GpuUuid {
        format!("GPU-{at}").into()
    }

    /// Measures, and says so.
    fn complete(sizes: &mut Sizes, node: &Node, found: &[(usize, u64)]) -> (bool, Vec<String>) {
        let mut asked = false;
        let warnings = sizes.complete(node, || {
            asked = true;
            Ok::<_, io::Error>(found.iter().map(|(at, bytes)| (uuid(*at), Bytes(*bytes))).collect())
        });
        (asked, warnings)
    }

    #[test]
    fn what_is_missing_is_measured_again_and_warned_of() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("contexts.json");
        let read = |driver: &str| Sizes::read(file.clone(), driver);
        let three = node(3);

        let (asked, warnings) = complete(&mut read("550.1"), &three, &[(0, 100), (2, 300)]);
        assert!(asked && warnings.len() == 1, "{warnings:?}");
        assert!(warnings[0].starts_with("what a context takes on GPU 1 is unknown"), "{warnings:?}");
        // A start later the GPU is free.
        let mut sizes = read("550.1");
        assert_eq!((sizes.of(&uuid(1)), sizes.of(&uuid(2))), (Bytes::ZERO, Bytes(300)));
        assert_eq!(complete(&mut sizes, &three, &[(0, 101), (1, 200)]), (true, Vec::new()));
        assert_eq!([0, 1, 2].map(|at| sizes.of(&uuid(at)).0), [101, 200, 300]);
        // All is known, also of fewer GPUs and when the third is back.
        for gpus in [3, 2, 3] {
            assert_eq!(complete(&mut read("550.1"), &node(gpus), &[]), (false, Vec::new()), "{gpus}");
        }
        // Another driver takes other amounts.
        let mut updated = read("575.2");
        assert_eq!(updated.of(&uuid(0)), Bytes::ZERO);
        assert!(complete(&mut updated, &three, &[(0, 1), (1, 2), (2, 3)]).0);
        assert_eq!(read("575.2").of(&uuid(2)), Bytes(3));
    }

    #[test]
    fn what_fails_is_told_with_why_and_what_cannot_be_shared_is_not_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("contexts.json");
        fs::write(&file, "[\"another format\", {}]").unwrap();
        let mut sizes = Sizes::read(file, "550.1");
        let mut node = node(2);
        let warnings = sizes.complete(&node, || Err(io::Error::other("it hangs")));
        assert!(warnings.len() == 1 && warnings[0].contains("GPU 0, 1") && warnings[0].contains("it hangs"));
        node.gpus[0].withheld = Some("MIG".into());
        assert_eq!(complete(&mut sizes, &node, &[(1, 7)]), (true, Vec::new()));
        assert_eq!(complete(&mut sizes, &node, &[]), (false, Vec::new()));
    }
}
