//! Locks on GPUs, for a machine with several daemons: the first one that grants a share of a GPU holds a lock on its
//! device file.
//!
//! Root's daemon serves all users and ignores such a lock with a warning, since any user can lock a file that any user
//! can open.

use super::warnings::Warnings;
use partage_core::model::{GpuUuid, Node};
use rustix::fs::{FlockOperation, flock};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The GPUs that this daemon holds a lock on.
pub(super) struct GpuClaims {
    /// The directory of the device files.
    devices: PathBuf,
    held: Mutex<BTreeMap<GpuUuid, File>>,
}

impl GpuClaims {
    pub(super) fn new(devices: &Path) -> GpuClaims {
        GpuClaims { devices: devices.into(), held: Mutex::default() }
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<GpuUuid, File>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Withholds the GPUs that another daemon holds. The others are held by this one, until
    /// [`GpuClaims::release_unused`].
    pub(super) fn claim(&self, node: &mut Node, warnings: &Warnings) {
        let mut held = self.held();
        for (index, gpu) in node.gpus.iter_mut().enumerate() {
            if held.contains_key(&gpu.uuid) {
                continue;
            }
            // Without a device file there is nothing to lock.
            let Ok(file) = File::open(self.devices.join(format!("nvidia{}", gpu.minor))) else { continue };
            if flock(&file, FlockOperation::NonBlockingLockExclusive) != Err(rustix::io::Errno::WOULDBLOCK) {
                held.insert(gpu.uuid.clone(), file);
            } else if rustix::process::geteuid().is_root() {
                warnings.add(&format!(
                    "another daemon on this machine grants shares of GPU {index}, which are not accounted for \
                     here; stop these shares (`partage stop --state-dir DIR`), and omit --state-dir"
                ));
            } else {
                gpu.withheld = gpu.withheld.take().or_else(|| {
                    Some(
                        "another daemon on this machine holds this GPU: to share it, run one daemon as root \
                         (`sudo partage up`)"
                            .into(),
                    )
                });
            }
        }
    }

    /// Releases the GPUs of which no share is granted.
    pub(super) fn release_unused(&self, is_granted: impl Fn(&GpuUuid) -> bool) {
        self.held().retain(|uuid, _| is_granted(uuid));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use partage_core::model::{Bytes, Gpu};
    use std::fs;

    #[test]
    fn gpu_of_another_daemon_is_withheld_until_that_releases_it() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("nvidia0"), "").unwrap();
        let gpu = |minor: u32| Gpu {
            uuid: format!("GPU-{minor}").into(),
            minor,
            model: "Tesla T4".into(),
            memory_bytes: Bytes(16 << 30),
            numa: None,
            pci: None,
            withheld: None,
        };
        let (first, second) = (GpuClaims::new(folder.path()), GpuClaims::new(folder.path()));
        // The other GPU has no device file, and cannot be locked.
        let claimed = |claims: &GpuClaims| {
            let (mut node, warnings) = (Node::new("here", vec![gpu(0), gpu(1)]), Warnings::default());
            claims.claim(&mut node, &warnings);
            let withheld = node.gpus.iter().filter(|gpu| gpu.withheld.is_some()).count();
            (claims.held().len(), withheld + warnings.all().len())
        };
        assert_eq!(claimed(&first), (1, 0));
        assert_eq!(claimed(&second), (0, 1), "withheld, or a warning if root runs the test");
        first.release_unused(|_| true);
        assert_eq!(claimed(&second), (0, 1));
        first.release_unused(|_| false);
        assert_eq!(claimed(&second), (1, 0));
    }
}
