//! Whose a GPU is, when a machine has several keepers: the first one that gives something of it holds a lock on its device file.
//!
//! Root's keeper is for everybody and gives way to nobody, since anybody can lock a file that anybody can open; it says so.

use super::{Keeper, State};
use partage_core::model::{Gpu, GpuUuid, Node};
use rustix::fs::{FlockOperation, flock};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// GPUs of which this keeper gives.
#[derive(Default)]
pub(super) struct Claims(Mutex<BTreeMap<GpuUuid, File>>);

impl Keeper {
    /// Withholds what another keeper has; what is free is ours from now on, until [`Keeper::unclaim`].
    pub(super) fn claim(&self, node: &mut Node) {
        let mut claims = self.claims.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (index, gpu) in node.gpus.iter_mut().enumerate() {
            if claims.contains_key(&gpu.uuid) {
                continue;
            }
            // Where there is no such file there is nothing to agree on.
            let Ok(file) = File::open(self.device(gpu)) else { continue };
            if flock(&file, FlockOperation::NonBlockingLockExclusive) != Err(rustix::io::Errno::WOULDBLOCK) {
                claims.insert(gpu.uuid.clone(), file);
            } else if rustix::process::geteuid().is_root() {
                self.warn(&format!(
                    "somebody on this machine gives shares of GPU {index} without this keeper: what they gave is not counted \
                     here; let them end, and use partage run without --home"
                ));
            } else {
                gpu.withheld = gpu.withheld.take().or_else(|| {
                    Some("another keeper of this machine gives of it: let root start partage up, for all users".into())
                });
            }
        }
    }

    /// Lets go of GPUs of which nothing is given.
    pub(super) fn unclaim(&self, state: &State) {
        let given = |uuid: &GpuUuid| {
            state.shares.values().any(|live| live.record.shares.iter().any(|share| share.gpu == *uuid))
        };
        self.claims.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|uuid, _| given(uuid));
    }

    fn device(&self, gpu: &Gpu) -> PathBuf {
        let folder =
            self.machine.driver.simulated.as_ref().map_or_else(|| "/dev".into(), |node| node.join("dev"));
        folder.join(format!("nvidia{}", gpu.minor))
    }
}
