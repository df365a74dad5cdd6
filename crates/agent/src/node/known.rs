//! What earlier agents left: their records, kubelet's, the CDI files, and what pods say of themselves.

use super::{NodeState, Parts, grant_of, lock, logged_name, now, offered};
use crate::book::{Book, Wanting};
use crate::checkpoint::{self, Name, PodRecord};
use crate::identity::{ContainerState, Holder};
use crate::plugin::{Nonce, Refusal};
use crate::refusals::RefusalLog;
use crate::report::Counts;
use crate::settings::Settings;
use crate::sweep::ListedPods;
use partage_cluster::Severity;
use partage_core::model::{ContainerName, PodUid};
use partage_enforce::error_chain::describe;
use partage_enforce::records::DecodeError;
use partage_host::cdi::{Found, SpecError};
use partage_host::truth::Truth;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tokio::sync::Notify;

/// What a CDI file says of its container, besides what it gets: enough to know everything again.
const OF_POD: &str = "partage.dev/pod";
const OF_CONTAINER: &str = "partage.dev/container";

/// A container that was made ready by an earlier agent.
struct Ready {
    uid: PodUid,
    container: ContainerName,
    /// Whether its CDI file is as it was written.
    written: bool,
}

impl NodeState {
    /// Everything that is known of earlier: from its own records, kubelet, and the CDI folder.
    pub(crate) fn rebuild(parts: Parts, settings: Settings) -> io::Result<NodeState> {
        let kept = parts.checkpoint.read()?;
        let mut counts = Counts { quarantined: kept.quarantined as u64, ..Counts::default() };
        let (mut names, mut pods) = (kept.names, kept.pods);
        // A record that another version of the agent wrote counts as saved: it is not replaced.
        let saved = pods.keys().chain(&kept.unsupported).cloned().collect();
        let mut ready = BTreeMap::new();
        let mut unsupported_cdi = BTreeSet::new();
        for found in parts.cdi.all()? {
            match owner(&found) {
                Some(Ok((record, container))) => {
                    let (nonce, uid) = (Nonce(found.name), record.pod.uid.clone());
                    ready.insert(nonce, Ready { uid: uid.clone(), container, written: true });
                    pods.entry(uid).or_insert(record);
                }
                Some(Err(OwnerError::Record(error @ DecodeError::UnsupportedVersion { .. }))) => {
                    tracing::warn!(name = found.name, %error, "CDI spec of another agent version left in place");
                    unsupported_cdi.insert(Nonce(found.name));
                }
                Some(Err(error)) => {
                    counts.quarantined += 1;
                    tracing::warn!(name = found.name, error = %describe(&error), "cannot read a CDI spec");
                }
                None => {}
            }
        }
        // What these pods hold is read from the pods themselves, before anything is granted to others.
        let mut unknown = kept.unsupported;
        unknown.retain(|uid| !pods.contains_key(uid));
        for Holder { uid, container, resource, ids, nonce, .. } in parts.kubelet.all().into_iter().flatten() {
            let Some(nonce) = nonce else { continue };
            if !pods.contains_key(&uid) {
                unknown.insert(uid.clone());
            }
            let written = unsupported_cdi.contains(&nonce);
            ready.entry(nonce.clone()).or_insert(Ready { uid, container, written });
            names.entry(nonce.clone()).or_insert(Name { nonce, resource, ids, at: 0 });
        }
        // Nothing is offered on a GPU that nobody has looked at.
        let truth = Truth { looks: parts.gpus.look(), ..Truth::default() };
        let node = offered(&parts.inventory.node, &settings, &truth);
        let listed = ListedPods::new(pods.keys().cloned());
        let state = NodeState {
            parts,
            settings: Mutex::new(Arc::new(settings)),
            book: Mutex::new(Book::new(node, pods)),
            names: Mutex::new(names),
            owners: Mutex::new(
                ready
                    .iter()
                    .map(|(nonce, Ready { uid, container, .. })| {
                        (nonce.clone(), (uid.clone(), container.clone()))
                    })
                    .collect(),
            ),
            saved: Mutex::new(saved),
            saving: Mutex::default(),
            to_save: Notify::new(),
            truth: Mutex::new(truth),
            looked: Mutex::new(Instant::now()),
            suspected: Mutex::default(),
            counts: Mutex::new(counts),
            mismatched: Mutex::default(),
            refusals: RefusalLog::default(),
            listed: Mutex::new(listed),
            unknown: Mutex::new(unknown),
            busy: Mutex::default(),
            settled: Mutex::default(),
            changed: Notify::new(),
        };
        let records: Vec<PodRecord> = state.book().records().cloned().collect();
        state.take_up(&records, &ready);
        Ok(state)
    }

    /// Keeps the regions of containers that were made ready before, and makes whole what is missing beside them.
    fn take_up(&self, records: &[PodRecord], ready: &BTreeMap<Nonce, Ready>) {
        let gated = self.gated();
        for (nonce, Ready { uid, container, written }) in ready {
            let Some(record) = records.iter().find(|record| record.pod.uid == *uid) else { continue };
            let Some(grant) = grant_of(record, container) else { continue };
            // After a boot there is no region, and no container that would miss it: it comes with the next start. The same where
            // somebody removed it: a container that runs has it still, and a new one would only say otherwise.
            if !self.regions.folder(nonce).is_dir() {
                continue;
            }
            let kept = match written {
                true => {
                    self.regions.adopt(nonce, uid, container, &grant.shares, &gated).map_err(String::from)
                }
                false => self.make_ready(nonce, &[], record, grant, true),
            };
            if let Err(error) = kept {
                let (namespace, pod) = logged_name(Some(&record.pod));
                tracing::warn!(namespace, pod, %container, %nonce, error, "region cannot be adopted");
            }
        }
        self.settle();
    }

    /// Pods whose containers run, and of which nothing on this node tells what they hold, are asked themselves: it is written on
    /// them. Nothing is given away before that.
    pub(crate) async fn adopt(&self) -> Result<(), Refusal> {
        let unknown: Vec<PodUid> = lock(&self.unknown).iter().cloned().collect();
        if unknown.is_empty() {
            return Ok(());
        }
        let later = |why: &str| {
            Refusal(format!("it is not known yet who holds what: {why}; kubelet tries again by itself"))
        };
        if !self.pods.is_synced() {
            return Err(later("the API server has not told of the node's pods"));
        }
        let containers = self.runtime.containers().await.map_err(|error| later(&error.to_string()))?;
        for uid in unknown {
            let runs = containers.iter().any(|one| one.uid == uid && one.state == ContainerState::Running);
            if let Some(pod) = self.pods.by_uid(&uid).filter(|_| runs) {
                let settings = self.settings();
                let wanting =
                    Wanting { id: &pod.id, pod: &pod.pod, problems: &[], boot: &self.boot, now: now() };
                let adopted = self.book().adopt(&wanting, &settings);
                if adopted.is_ok() {
                    self.listed().insert(&uid);
                }
                let (namespace, pod) = (&pod.id.namespace, &pod.id.name);
                match adopted {
                    Ok(record) => {
                        tracing::warn!(%namespace, %pod, "record was lost; the grant is read from the pod's annotation");
                        tokio::task::block_in_place(|| self.take_up_adopted(&record));
                    }
                    Err(why) => {
                        let note = format!(
                            "pod {namespace}/{pod} runs with a GPU, its record was lost, and the pod does not tell what it holds: {why}; \
                             what it uses is not counted: delete the pod"
                        );
                        tracing::warn!(%namespace, %pod, "{note}");
                        self.tell_node(Severity::Warning, "GrantLost", &note);
                    }
                }
            }
            lock(&self.unknown).remove(&uid);
        }
        self.changed.notify_waiters();
        Ok(())
    }

    fn take_up_adopted(&self, record: &PodRecord) {
        let held = self.kubelet.all().into_iter().flatten().filter(|holder| holder.uid == record.pod.uid);
        let ready = held.filter_map(|Holder { uid, container, nonce, .. }| {
            let nonce = nonce?;
            // A spec that another version of the agent wrote is not replaced.
            let written = self.cdi.get(&nonce.0).is_some_and(|found| is_unsupported(&found));
            Some((nonce, Ready { uid, container, written }))
        });
        let ready: BTreeMap<Nonce, Ready> = ready.collect();
        for (nonce, Ready { uid, container, .. }) in &ready {
            lock(&self.owners).insert(nonce.clone(), (uid.clone(), container.clone()));
        }
        self.save_soon(&record.pod.uid);
        self.take_up(std::slice::from_ref(record), &ready);
    }

    /// A CDI file says what its pod holds now.
    pub(crate) fn note_in_cdi(&self, nonce: &Nonce, record: &PodRecord, container: &ContainerName) {
        let Some(Found { content: Ok(content), .. }) = self.cdi.get(&nonce.0) else { return };
        let noted = annotations(record, container)
            .map_err(io::Error::from)
            .and_then(|annotations| self.cdi.put(&nonce.0, &annotations, &content.edits));
        if let Err(error) = noted {
            let (namespace, pod) = logged_name(Some(&record.pod));
            tracing::warn!(namespace, pod, %container, %nonce, %error, "CDI file cannot be written");
        }
    }
}

/// What a CDI file says of its container.
pub(super) fn annotations(
    record: &PodRecord,
    container: &ContainerName,
) -> serde_json::Result<BTreeMap<String, String>> {
    let text = checkpoint::encode(record)?;
    Ok([(OF_POD.to_string(), text), (OF_CONTAINER.to_string(), container.to_string())].into())
}

/// The pod and container of a CDI file, as [`annotations`] wrote them.
fn owner(found: &Found) -> Option<Result<(PodRecord, ContainerName), OwnerError>> {
    let content = match &found.content {
        Ok(content) => content,
        Err(why) => return Some(Err(OwnerError::Spec(why.clone()))),
    };
    let (text, container) = (content.annotations.get(OF_POD)?, content.annotations.get(OF_CONTAINER)?);
    let record = checkpoint::decode(text).map_err(OwnerError::Record);
    Some(record.map(|record| (record, ContainerName::from(container.as_str()))))
}

/// Why the container of a CDI spec is unknown.
#[derive(Debug, thiserror::Error)]
enum OwnerError {
    /// The file is no CDI spec of ours.
    #[error(transparent)]
    Spec(SpecError),
    /// The record in it cannot be read.
    #[error("its record cannot be read")]
    Record(#[source] DecodeError),
}

/// Whether a CDI spec carries the record of another version of the agent.
fn is_unsupported(found: &Found) -> bool {
    matches!(owner(found), Some(Err(OwnerError::Record(DecodeError::UnsupportedVersion { .. }))))
}
