//! Writes the records of pods to disk in the background.
//!
//! Disks are slow while many pods start: their images are written to the same one. While the node runs, a pod's CDI spec carries its
//! record too and is written before its container may start, so an agent that is killed loses nothing. After a reboot no container
//! runs, and a pod whose record did not reach the disk in time is placed like a new one.

use crate::state::{NodeState, lock, logged_name};
use crate::store::PodRecord;
use partage_core::model::PodUid;
use partage_region::failpoint as fault;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Interval between attempts while records cannot be written.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Writes records until stopped, and once more at the end.
pub(crate) async fn keep_saving(state: Arc<NodeState>, stop: CancellationToken) {
    let mut reported = String::new();
    loop {
        let failed = tokio::task::block_in_place(|| state.save_all());
        let done = failed.is_none();
        let why = failed.unwrap_or_default();
        // Once for each cause, and not for each pod every second.
        if !done && why != reported {
            tracing::warn!("{why}; it is tried again");
        }
        reported = why;
        if stop.is_cancelled() {
            return;
        }
        tokio::select! {
            () = state.unsaved.notified() => {}
            () = tokio::time::sleep(RETRY_INTERVAL), if !done => {}
            () = stop.cancelled() => {}
        }
    }
}

impl NodeState {
    /// Has a pod's record written soon, unless it is on disk.
    pub(super) fn save_soon(&self, uid: &PodUid) {
        if !self.containers().is_saved(uid) {
            self.unsaved.notify_one();
        }
    }

    /// Writes the records that are not on disk. Returns why some could not be written.
    fn save_all(&self) -> Option<String> {
        let unsaved = self.containers().unsaved_pods();
        let mut failed = None;
        for uid in &unsaved {
            let _one = lock(&self.record_writes);
            let Some(record) = self.containers().unsaved_record(uid) else { continue };
            if let Err(why) = self.put_record(&record) {
                failed = Some(why);
            }
            fault::point("after-record");
        }
        failed
    }

    /// Writes a changed record to disk before it returns.
    pub(crate) fn save_now(&self, record: &PodRecord) -> Result<(), String> {
        let _one = lock(&self.record_writes);
        self.put_record(record)
    }

    fn put_record(&self, record: &PodRecord) -> Result<(), String> {
        let put = self.adapters.store.put_pod(record);
        match &put {
            Ok(()) => self.containers().record_saved(record),
            Err(_) => self.containers().set_saved(&record.pod.uid, false),
        }
        put.map_err(|error| format!("grants cannot be recorded: {error}; look after the node's disk"))
    }

    /// Removes a pod's record from disk, then releases its grant.
    pub(super) fn remove_record(&self, uid: &PodUid) {
        let _one = lock(&self.record_writes);
        if let Err(error) = self.adapters.store.remove_pod(uid) {
            let pod = self.pod_id(uid);
            let (namespace, pod) = logged_name(pod.as_ref());
            tracing::warn!(namespace, pod, %uid, %error, "cannot remove the record of a pod");
        }
        fault::point("after-forget-record");
        self.containers().release(uid);
    }
}
