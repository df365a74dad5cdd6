//! The memory that a CUDA context takes on each GPU: measured once for a GPU and a driver version, and cached in a
//! file.
//!
//! A context's memory counts against its share, and only the driver can report how much it is.
//! [`partage_host::context_size`] measures it; this module decides when to measure, and what to do if that fails.

use crate::records::{self, DecodeError, Durability, RecordError, VersionedRecord};
use partage_core::model::{Bytes, GpuUuid, Node};
use partage_host::context_size;
use partage_host::driver::InstalledDriver;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

/// The hidden command of the binary that measures contexts, in a process of its own.
pub const MEASURE_COMMAND: &str = "context-sizes";

/// The running program, which is started again for the measurement.
const PROGRAM: &str = "/proc/self/exe";

/// The known sizes of contexts.
#[derive(Debug)]
pub struct ContextSizes {
    file: PathBuf,
    /// The version of the driver that is loaded now.
    driver_version: String,
    /// The sizes by GPU, including GPUs that are missing now: a lost card may return.
    known: BTreeMap<GpuUuid, MeasuredContext>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct MeasuredContext {
    /// The driver's version at the time.
    driver: String,
    bytes: Bytes,
}

/// The file with the sizes.
#[derive(Debug, Default, Serialize, Deserialize)]
struct ContextSizesRecord {
    gpus: BTreeMap<GpuUuid, MeasuredContext>,
}

impl VersionedRecord for ContextSizesRecord {
    const VERSION: u32 = 1;
}

impl ContextSizes {
    /// Reads the cached sizes. A file that cannot be read is treated like none: everything is measured again.
    pub fn read(file: PathBuf, driver_version: &str) -> ContextSizes {
        let known = match records::read_file::<ContextSizesRecord>(&file) {
            Ok(record) => record.unwrap_or_default().gpus,
            // Earlier builds wrote the sizes without a version.
            Err(RecordError::Invalid { source: DecodeError::NoVersion, .. }) => {
                fs::read(&file).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
            }
            Err(error) => {
                let cause = crate::error_chain::describe(&error);
                tracing::warn!(cause, "cannot read the sizes of CUDA contexts, measuring them again");
                BTreeMap::new()
            }
        };
        ContextSizes { file, driver_version: driver_version.into(), known }
    }

    /// Returns the size of a context on a GPU; zero if it is unknown.
    pub fn of(&self, gpu: &GpuUuid) -> Bytes {
        self.find(gpu).unwrap_or(Bytes::ZERO)
    }

    fn find(&self, gpu: &GpuUuid) -> Option<Bytes> {
        let known = self.known.get(gpu).filter(|known| known.driver == self.driver_version);
        known.map(|known| known.bytes)
    }

    /// Returns the GPUs that can be shared and whose size is unknown, with their indexes.
    fn unknown<'a>(&self, node: &'a Node) -> Vec<(usize, &'a GpuUuid)> {
        let gpus = node.gpus.iter().enumerate().filter(|(_, gpu)| gpu.withheld.is_none());
        gpus.map(|(at, gpu)| (at, &gpu.uuid)).filter(|(_, gpu)| self.find(gpu).is_none()).collect()
    }

    /// Measures with the driver if a size is unknown, and returns warnings for the user. A size that stays unknown is
    /// measured again at the next start: the GPU may have been full, or in exclusive use.
    pub fn measure_unknown(&mut self, node: &Node, driver: &InstalledDriver) -> Vec<String> {
        self.complete(node, || {
            let _span = tracing::debug_span!("measure_contexts").entered();
            context_size::measure(driver, Path::new(PROGRAM), &[MEASURE_COMMAND])
        })
    }

    fn complete<E: Error>(
        &mut self,
        node: &Node,
        measure: impl FnOnce() -> Result<Vec<(GpuUuid, Bytes)>, E>,
    ) -> Vec<String> {
        if self.unknown(node).is_empty() {
            return Vec::new();
        }
        let mut warnings = Vec::new();
        let mut why = "the driver created no context there, or does not report its size".to_string();
        match measure() {
            Ok(measured) => {
                let driver = &self.driver_version;
                let measured = measured
                    .into_iter()
                    .map(|(gpu, bytes)| (gpu, MeasuredContext { driver: driver.clone(), bytes }));
                self.known.extend(measured);
                if let Err(error) = self.write() {
                    warnings.push(crate::error_chain::describe(&error));
                }
            }
            Err(error) => why = crate::error_chain::describe(&error),
        }
        let unknown = self.unknown(node);
        if !unknown.is_empty() {
            let gpus: Vec<String> = unknown.iter().map(|(at, _)| at.to_string()).collect();
            warnings.push(format!(
                "the size of a CUDA context on GPU {} is unknown and not counted against limits: {why}; it is measured again at the next start",
                gpus.join(", ")
            ));
        }
        warnings
    }

    fn write(&self) -> Result<(), RecordError> {
        let record = ContextSizesRecord { gpus: self.known.clone() };
        records::write_file(&self.file, &record, Durability::AcrossReboots)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use partage_core::model::Gpu;
    use std::io;

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

    /// Completes the sizes with a measurement that finds these; also returns whether it was made.
    fn complete(sizes: &mut ContextSizes, node: &Node, found: &[(usize, u64)]) -> (bool, Vec<String>) {
        let mut measured = false;
        let warnings = sizes.complete(node, || {
            measured = true;
            Ok::<_, io::Error>(found.iter().map(|(at, bytes)| (uuid(*at), Bytes(*bytes))).collect())
        });
        (measured, warnings)
    }

    #[test]
    fn unknown_size_is_measured_again_and_warned_of() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("contexts.json");
        let read = |driver: &str| ContextSizes::read(file.clone(), driver);
        let three = node(3);

        let (measured, warnings) = complete(&mut read("550.1"), &three, &[(0, 100), (2, 300)]);
        assert!(measured && warnings.len() == 1, "{warnings:?}");
        assert!(warnings[0].starts_with("the size of a CUDA context on GPU 1 is unknown"), "{warnings:?}");
        // At the next start the GPU is free.
        let mut sizes = read("550.1");
        assert_eq!((sizes.of(&uuid(1)), sizes.of(&uuid(2))), (Bytes::ZERO, Bytes(300)));
        assert_eq!(complete(&mut sizes, &three, &[(0, 101), (1, 200)]), (true, Vec::new()));
        assert_eq!([0, 1, 2].map(|at| sizes.of(&uuid(at)).0), [101, 200, 300]);
        // All sizes are known, also with fewer GPUs and when the third one returns.
        for gpus in [3, 2, 3] {
            assert_eq!(complete(&mut read("550.1"), &node(gpus), &[]), (false, Vec::new()), "{gpus}");
        }
        // The sizes differ for another driver.
        let mut updated = read("575.2");
        assert_eq!(updated.of(&uuid(0)), Bytes::ZERO);
        assert!(complete(&mut updated, &three, &[(0, 1), (1, 2), (2, 3)]).0);
        assert_eq!(read("575.2").of(&uuid(2)), Bytes(3));
    }

    #[test]
    fn file_of_an_earlier_build_is_read_and_one_of_a_newer_build_is_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("contexts.json");
        fs::write(&file, r#"{"GPU-0":{"driver":"550.1","bytes":100}}"#).unwrap();
        let mut sizes = ContextSizes::read(file.clone(), "550.1");
        assert_eq!(sizes.of(&uuid(0)), Bytes(100));
        assert_eq!(complete(&mut sizes, &node(2), &[(1, 200)]), (true, Vec::new()));
        let written = fs::read_to_string(&file).unwrap();
        assert!(written.starts_with(r#"{"version":1,"gpus":{"GPU-0""#), "{written}");

        let newer = r#"{"version":3,"sizes":[]}"#;
        fs::write(&file, newer).unwrap();
        let mut sizes = ContextSizes::read(file.clone(), "550.1");
        let (measured, warnings) = complete(&mut sizes, &node(1), &[(0, 100)]);
        assert!(measured && warnings.len() == 1 && warnings[0].contains("version 3"), "{warnings:?}");
        assert_eq!((sizes.of(&uuid(0)), fs::read_to_string(&file).unwrap().as_str()), (Bytes(100), newer));
    }

    #[test]
    fn failed_measurement_is_reported_and_withheld_gpus_are_not_measured() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("contexts.json");
        fs::write(&file, "[\"another format\", {}]").unwrap();
        let mut sizes = ContextSizes::read(file, "550.1");
        let mut node = node(2);
        let warnings = sizes.complete(&node, || Err(io::Error::other("timed out")));
        assert!(warnings.len() == 1 && warnings[0].contains("GPU 0, 1") && warnings[0].contains("timed out"));
        node.gpus[0].withheld = Some("MIG".into());
        assert_eq!(complete(&mut sizes, &node, &[(1, 7)]), (true, Vec::new()));
        assert_eq!(complete(&mut sizes, &node, &[]), (false, Vec::new()));
    }
}
