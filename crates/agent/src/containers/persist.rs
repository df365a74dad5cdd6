//! Writes the records of pods to disk in the background.
//!
//! Disks are slow while many pods start: their images are written to the same one. While the node runs, a pod's CDI spec carries its
//! record too and is written before its container may start, so an agent that is killed loses nothing. After a reboot no container
//! runs, and a pod whose record did not reach the disk in time is placed like a new one.

use crate::state::{NodeState, lock, logged_name};
use crate::store::PodRecord;
use partage_core::model::PodUid;
use partage_enforce::error_chain::describe;
use partage_enforce::records::RecordError;
use partage_region::failpoint as fault;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Interval between attempts while records cannot be written.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// A pod's record that cannot be written to disk.
#[derive(Debug, thiserror::Error)]
#[error("cannot record the grants of pods")]
pub(crate) struct SaveError(#[source] RecordError);

/// Writes records until stopped, and once more at the end.
pub(crate) async fn run(state: Arc<NodeState>, stop: CancellationToken) {
    let mut reported = String::new();
    loop {
        let failed = tokio::task::block_in_place(|| state.save_all());
        let is_saved = failed.is_none();
        let error = failed.map(|error| describe(&error)).unwrap_or_default();
        // Once for each cause, and not for each pod every second.
        if !is_saved && error != reported {
            tracing::warn!(error, "cannot save pod records, retrying");
        }
        reported = error;
        if stop.is_cancelled() {
            return;
        }
        tokio::select! {
            () = state.unsaved.notified() => {}
            () = tokio::time::sleep(RETRY_INTERVAL), if !is_saved => {}
            () = stop.cancelled() => {}
        }
    }
}

impl NodeState {
    /// Schedules a write of a pod's record, unless it is on disk.
    pub(super) fn save_soon(&self, uid: &PodUid) {
        if !self.containers().is_saved(uid) {
            self.unsaved.notify_one();
        }
    }

    /// Writes the records that are not on disk. Returns the last error.
    fn save_all(&self) -> Option<SaveError> {
        let unsaved = self.containers().unsaved_pods();
        let mut failed = None;
        for uid in &unsaved {
            let _guard = lock(&self.record_writes);
            let Some(record) = self.containers().unsaved_record(uid) else { continue };
            if let Err(error) = self.write_record(&record) {
                failed = Some(error);
            }
            fault::point("after-record");
        }
        failed
    }

    /// Writes a changed record to disk before it returns.
    pub(crate) fn save_now(&self, record: &PodRecord) -> Result<(), SaveError> {
        let _guard = lock(&self.record_writes);
        self.write_record(record)
    }

    fn write_record(&self, record: &PodRecord) -> Result<(), SaveError> {
        let written = self.adapters.store.put_pod(record);
        match &written {
            Ok(()) => self.containers().record_saved(record),
            Err(_) => self.containers().set_saved(&record.pod.uid, false),
        }
        written.map_err(SaveError)
    }

    /// Removes a pod's record from disk, then releases its grant.
    pub(super) fn remove_record(&self, uid: &PodUid) {
        let _guard = lock(&self.record_writes);
        if let Err(error) = self.adapters.store.remove_pod(uid) {
            let pod = self.pod_id(uid);
            let (namespace, pod) = logged_name(pod.as_ref());
            tracing::warn!(namespace, pod, %uid, error = %describe(&error), "cannot remove the record of a pod");
        }
        fault::point("after-forget-record");
        self.containers().release(uid);
    }
}
