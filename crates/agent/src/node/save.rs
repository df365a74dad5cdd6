//! Records of pods come to the disk, and nobody waits for it.
//!
//! Disks are slow when many pods start: their images are written to the same one. While the node runs a pod's CDI file has its record,
//! too, and is written before its container may start; so an agent that is killed loses nothing. After a boot no container runs, and
//! a pod whose record did not come to the disk in time is placed as a new one is.

use super::{NodeState, lock, logged_name};
use crate::checkpoint::PodRecord;
use partage_core::model::PodUid;
use partage_region::failpoint as fault;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// While the disk takes nothing.
const LATER: Duration = Duration::from_secs(1);

/// Writes what is to be written, until told to stop; then once more.
pub(crate) async fn keep_saving(state: Arc<NodeState>, stop: CancellationToken) {
    let mut told = String::new();
    loop {
        let failed = tokio::task::block_in_place(|| state.save_all());
        let done = failed.is_none();
        let why = failed.unwrap_or_default();
        // Once for each cause, and not for each pod every second.
        if !done && why != told {
            tracing::warn!("{why}; it is tried again");
        }
        told = why;
        if stop.is_cancelled() {
            return;
        }
        tokio::select! {
            () = state.to_save.notified() => {}
            () = tokio::time::sleep(LATER), if !done => {}
            () = stop.cancelled() => {}
        }
    }
}

impl NodeState {
    /// A pod is ready: its record is to be on disk soon, where it is not.
    pub(super) fn save_soon(&self, uid: &PodUid) {
        if !lock(&self.saved).contains(uid) {
            self.to_save.notify_one();
        }
    }

    /// Writes the records that are not on disk. Why some could not be.
    fn save_all(&self) -> Option<String> {
        let all: Vec<PodUid> = self.book().records().map(|record| record.pod.uid.clone()).collect();
        let mut failed = None;
        for uid in &all {
            let _one = lock(&self.saving);
            if lock(&self.saved).contains(uid) {
                continue;
            }
            let Some(record) = self.book().record(uid).cloned() else { continue };
            if let Err(why) = self.put_record(&record) {
                failed = Some(why);
            }
            fault::point("after-record");
        }
        failed
    }

    /// A record that changed is on disk when this returns.
    pub(crate) fn save_anew(&self, record: &PodRecord) -> Result<(), String> {
        let _one = lock(&self.saving);
        self.put_record(record)
    }

    fn put_record(&self, record: &PodRecord) -> Result<(), String> {
        let put = self.checkpoint.put_pod(record);
        let mut saved = lock(&self.saved);
        match put {
            Ok(()) => {
                saved.insert(record.pod.uid.clone());
                Ok(())
            }
            Err(error) => {
                // Whatever is there now, what the book has is to be there.
                saved.remove(&record.pod.uid);
                Err(format!("grants cannot be recorded: {error}; look after the node's disk"))
            }
        }
    }

    /// A pod's record goes, from the disk and from the book.
    pub(super) fn unsave(&self, uid: &PodUid) {
        let _one = lock(&self.saving);
        lock(&self.saved).remove(uid);
        if let Err(error) = self.checkpoint.remove_pod(uid) {
            let pod = self.pod_id(uid);
            let (namespace, pod) = logged_name(pod.as_ref());
            tracing::warn!(namespace, pod, %uid, %error, "record of a pod cannot be removed");
        }
        fault::point("after-forget-record");
        self.book().release(uid);
    }
}
