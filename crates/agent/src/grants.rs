//! The grants of this node's pods: the ledger, and the decisions that are recorded in it.
//!
//! A pod's grant is decided once, for all of its containers. Where a scheduler extender grants, the pod carries its grant, and
//! the node accepts or refuses it; elsewhere the core's allocator places the pod on this node's GPUs.

use crate::device_plugin::{Refusal, RefusalReason};
use crate::oversubscription;
use crate::resources::CountResource;
use crate::settings::AgentSettings;
use crate::store::PodRecord;
use partage_core::dialect::Dialect;
use partage_core::dialect::asks::{self, PodReading};
use partage_core::dialect::grants::{self, PodDialects, UnixNanos, gpushare, volcano};
use partage_core::ledger::{HeldGrant, Ledger, LedgerFinding, LedgerTime};
use partage_core::model::{
    ContainerName, Grant, Node, Oversubscription, PodAsk, PodGrant, PodId, PodUid, Share, TurnPreferences,
};
use partage_core::place::{GpuClass, HostUsage, PolicyEngine, ShareNeed};
use partage_core::pod::{PodManifest, Problem};
use partage_core::resize;
use partage_enforce::placement_refusal::NoPlacement;
use std::collections::BTreeMap;
use std::fmt;

/// The grants of all pods on this node.
pub(crate) struct NodeGrants {
    node: Node,
    ledger: Ledger,
    records: BTreeMap<PodUid, PodRecord>,
}

/// A pod that needs a grant.
pub(crate) struct GrantRequest<'a> {
    pub(crate) id: &'a PodId,
    pub(crate) pod: &'a PodManifest,
    /// Problems that were found when the manifest was read.
    pub(crate) problems: &'a [Problem],
    /// Identifies this boot of the node.
    pub(crate) boot: &'a str,
    /// The time of the decision, in nanoseconds since the epoch.
    pub(crate) now: u64,
}

impl NodeGrants {
    /// Builds the ledger from these records.
    pub(crate) fn new(node: Node, records: BTreeMap<PodUid, PodRecord>) -> NodeGrants {
        let held =
            records.values().map(|record| (record.pod.clone(), record.grant.clone(), HostUsage::default()));
        let ledger = Ledger::rebuild([node.clone()], held);
        NodeGrants { node, ledger, records }
    }

    /// Returns the node as it can be granted: with its settings, and without unhealthy GPUs.
    pub(crate) fn node(&self) -> &Node {
        &self.node
    }

    /// Replaces the node after a change of health or settings. Grants stay as they are.
    pub(crate) fn set_node(&mut self, node: Node) {
        self.ledger.set_node(node.clone());
        self.node = node;
    }

    /// Returns the record of a pod that holds a grant.
    pub(crate) fn record(&self, uid: &PodUid) -> Option<&PodRecord> {
        self.records.get(uid)
    }

    /// Returns the records of all pods.
    pub(crate) fn records(&self) -> impl Iterator<Item = &PodRecord> {
        self.records.values()
    }

    /// Returns all shares, each with its pod and container.
    pub(crate) fn shares(&self) -> impl Iterator<Item = (&PodRecord, &Grant, &Share)> {
        let grants = self
            .records
            .values()
            .flat_map(|record| record.grant.grants.iter().map(move |grant| (record, grant)));
        grants.flat_map(|(record, grant)| grant.shares.iter().map(move |share| (record, grant, share)))
    }

    /// Returns the inconsistencies that the ledger finds.
    pub(crate) fn audit(&self) -> Vec<LedgerFinding> {
        self.ledger.audit()
    }

    /// Decides a pod's grant and enters it in the ledger; [`NodeGrants::release`] releases it.
    pub(crate) fn decide(
        &mut self,
        request: &GrantRequest<'_>,
        settings: &AgentSettings,
    ) -> Result<PodRecord, Refusal> {
        if let Some(record) = self.records.get(&request.id.uid) {
            return Ok(record.clone());
        }
        let core = settings.dialect();
        let reading = asks::read(request.pod, &core);
        if let Some(problem) = request.problems.iter().chain(&reading.problems).next() {
            let more = request.problems.len() + reading.problems.len() - 1;
            return Err(invalid_manifest(problem, more));
        }
        check_single_count(request.pod, settings)?;
        oversubscription::check_allowed(&self.node, &reading.ask, settings)?;
        if settings.extender {
            let carried = self.carried_grant(request, &reading, settings)?;
            let (dialect, grant) = carried.ok_or_else(|| self.missing_grant(request.id))?;
            if dialect == Dialect::Native && !request.pod.annotations.contains_key(resize::ANNOTATION) {
                self.check_amounts(&reading.ask, &grant)?;
            }
            let mut statement = self.ledger.statement();
            statement
                .try_confirm(request.id.clone(), grant.clone(), HostUsage::default())
                .map_err(|error| unusable_grant(&error))?;
            let record = record_of(&self.node, request, &reading, grant, settings)?;
            statement.commit();
            Ok(self.enter(record))
        } else {
            self.place(request, &reading, settings)
        }
    }

    /// Stores the record of a grant that the ledger holds.
    fn enter(&mut self, record: PodRecord) -> PodRecord {
        self.records.insert(record.pod.uid.clone(), record.clone());
        record
    }

    /// Adopts the grant in the annotations of a running pod whose record was lost. The pod holds it already: if its GPUs have
    /// less capacity by now, the ledger's audit reports that, and no other pod is placed there.
    pub(crate) fn adopt(
        &mut self,
        request: &GrantRequest<'_>,
        settings: &AgentSettings,
    ) -> Result<PodRecord, Refusal> {
        if let Some(record) = self.records.get(&request.id.uid) {
            return Ok(record.clone());
        }
        let reading = asks::read(request.pod, &settings.dialect());
        let carried = self.carried_grant(request, &reading, settings)?;
        let no_grant = || Refusal::new(RefusalReason::NotFound, "the pod carries no grant");
        let (_, grant) = carried.ok_or_else(no_grant)?;
        let mut statement = self.ledger.statement();
        statement.confirm(request.id.clone(), grant.clone(), HostUsage::default());
        let mut record = record_of(&self.node, request, &reading, grant, settings)?;
        // The annotation may be newer than the grant, and whether the node allowed it then is unknown.
        record.oversubscribe &= settings.oversubscribe == Oversubscription::Allowed;
        statement.commit();
        Ok(self.enter(record))
    }

    /// Places a pod on the best GPUs of this node.
    fn place(
        &mut self,
        request: &GrantRequest<'_>,
        reading: &PodReading,
        settings: &AgentSettings,
    ) -> Result<PodRecord, Refusal> {
        let mut policies = PolicyEngine::new(settings.policy);
        let held: Vec<PodAsk> = self.ledger.all_held().map(HeldGrant::to_ask).collect();
        policies.learn(&held, self.ledger.cluster());
        let mut statement = self.ledger.statement();
        let id = request.id;
        let Ok(grant) = statement.place(id.clone(), &reading.ask, &policies, LedgerTime(u64::MAX)) else {
            drop(statement);
            return Err(self.insufficient_capacity(&reading.ask));
        };
        statement.confirm(id.clone(), grant.clone(), HostUsage::default());
        let record = record_of(&self.node, request, reading, grant, settings)?;
        statement.commit();
        Ok(self.enter(record))
    }

    /// Explains to the pod's author why the pod does not fit.
    fn insufficient_capacity(&self, ask: &PodAsk) -> Refusal {
        NoPlacement::explain(&self.ledger.snapshot(), ask).into_pod_refusal(&self.node.name)
    }

    fn missing_grant(&self, id: &PodId) -> Refusal {
        let message = format!(
            "pod {}/{} was bound to node {} without a grant: this node requires a grant from the scheduler extender; remove \
             spec.nodeName so that the scheduler places the pod",
            id.namespace, id.name, self.node.name
        );
        Refusal::new(RefusalReason::NotAllowed, message)
    }

    /// Returns the grant that the pod carries, if any, and its dialect. It has as many shares for each container as the pod asks
    /// for.
    fn carried_grant(
        &self,
        request: &GrantRequest<'_>,
        reading: &PodReading,
        settings: &AgentSettings,
    ) -> Result<Option<(Dialect, PodGrant)>, Refusal> {
        let read = grants::read(request.pod, Some(&self.node.name), &self.node, &settings.dialect());
        let Some((dialect, grant)) = read.map_err(|error| unusable_grant(&error))? else { return Ok(None) };
        for ask in &reading.ask.asks {
            let shares = shares_of(&grant, &ask.container).len();
            if shares != ask.want.count as usize {
                return Err(unusable_grant(&format_args!(
                    "container {} requests {} shares, granted {shares}",
                    ask.container, ask.want.count
                )));
            }
        }
        Ok(Some((dialect, grant)))
    }

    /// Checks that the grant has at least the amounts that the pod asks for.
    fn check_amounts(&self, asks: &PodAsk, grant: &PodGrant) -> Result<(), Refusal> {
        for ask in &asks.asks {
            for share in shares_of(grant, &ask.container) {
                let Some(at) = self.node.gpu_index(&share.gpu) else { continue };
                let need = ShareNeed::of(&ask.want.share, &GpuClass::of(&self.node, &self.node.gpus[at]));
                let insufficient = |what: &str, asked: &dyn fmt::Display, granted: &dyn fmt::Display| {
                    Err(unusable_grant(&format_args!(
                        "container {} requests {asked} of {what}, granted {granted}: delete the pod so that it is scheduled again",
                        ask.container
                    )))
                };
                if let (Some(asked), Some(granted)) = (need.limit, share.memory_bytes)
                    && granted < asked
                {
                    return insufficient("memory", &asked, &granted);
                }
                if let Some(asked) = need.cores.filter(|_| !share.whole)
                    && share.cores.is_none_or(|granted| granted < asked)
                {
                    let granted = share.cores.map_or("none".into(), |cores| cores.to_string());
                    return insufficient("compute", &asked, &granted);
                }
            }
        }
        Ok(())
    }

    /// Returns a pod's record with another grant, and the annotations and environment that follow from it.
    pub(crate) fn with_grant(
        &self,
        old: &PodRecord,
        pod: &PodManifest,
        grant: PodGrant,
        settings: &AgentSettings,
    ) -> Result<PodRecord, Refusal> {
        let reading = asks::read(pod, &settings.dialect());
        let request = GrantRequest { id: &old.pod, pod, problems: &[], boot: &old.boot, now: old.at };
        let record = unmerged_record(&self.node, &request, &reading, grant, settings)?;
        Ok(PodRecord { oversubscribe: old.oversubscribe, turns: old.turns, ..record })
    }

    /// Releases the grant of a pod that has ended.
    pub(crate) fn release(&mut self, uid: &PodUid) -> Option<PodRecord> {
        self.ledger.release(uid);
        self.records.remove(uid)
    }

    /// Reserves, for a running pod that is resized, the larger of its old and its new amounts, if its GPUs have them.
    /// No other pod can take either until [`NodeGrants::replace`] ends the resize.
    pub(crate) fn reserve(&mut self, old: &PodRecord, new: &PodGrant) -> Result<(), Refusal> {
        let mut statement = self.ledger.statement();
        // Shrinking reserves what the pod has already, which is never refused, however full the GPU is.
        statement
            .replace(&old.pod.uid, larger_amounts(&old.grant, new))
            .map_err(|error| Refusal::new(RefusalReason::NoCapacity, error.to_string()))?;
        statement.commit();
        Ok(())
    }

    /// Ends a resize: the pod holds the amounts of the record.
    pub(crate) fn replace(&mut self, record: PodRecord) {
        self.ledger.confirm(record.pod.clone(), record.grant.clone(), HostUsage::default());
        self.records.insert(record.pod.uid.clone(), record);
    }
}

/// Returns what is persisted of a grant and written to its pod.
fn record_of(
    node: &Node,
    request: &GrantRequest<'_>,
    reading: &PodReading,
    grant: PodGrant,
    settings: &AgentSettings,
) -> Result<PodRecord, Refusal> {
    let mut record = unmerged_record(node, request, reading, grant, settings)?;
    if settings.extender {
        // What the extender wrote is kept; only the note that the grant was applied is new.
        let decided =
            |key: &str| grants::is_record(key) && ![gpushare::ASSIGNED, volcano::TO_ALLOCATE].contains(&key);
        record.annotations.retain(|key, _| !(decided(key) && request.pod.annotations.contains_key(key)));
    }
    Ok(record)
}

/// Returns a record with the annotations of every dialect.
fn unmerged_record(
    node: &Node,
    request: &GrantRequest<'_>,
    reading: &PodReading,
    grant: PodGrant,
    settings: &AgentSettings,
) -> Result<PodRecord, Refusal> {
    let dialects: BTreeMap<ContainerName, _> =
        reading.containers.iter().filter_map(|one| Some((one.name.clone(), one.dialect?))).collect();
    let spelling = PodDialects::of(request.pod, &dialects);
    let mut written = grants::write(&grant, node, &spelling, &settings.dialect(), UnixNanos(request.now))
        .map_err(|error| {
            Refusal::new(RefusalReason::Failed, format!("the grant cannot be encoded: {error}"))
        })?;
    // Records of other systems that wait for a node to apply them are marked as applied.
    grants::mark_prepared(&mut written.annotations);
    Ok(PodRecord {
        pod: request.id.clone(),
        boot: request.boot.into(),
        at: request.now,
        grant,
        dialects: dialects.into_iter().map(|(name, dialect)| (name, dialect.name().to_string())).collect(),
        annotations: written.annotations,
        env: written.env,
        resize: None,
        oversubscribe: reading.ask.oversubscribe,
        turns: TurnPreferences {
            priority: reading.ask.turns.priority.min(settings.max_priority),
            ..reading.ask.turns
        },
    })
}

/// Refuses a pod whose manifest has problems, with the first of them.
fn invalid_manifest(problem: &Problem, more: usize) -> Refusal {
    let place =
        problem.container.as_ref().map_or_else(String::new, |container| format!("container {container}, "));
    let more =
        if more == 0 { String::new() } else { format!(" (and {more} more: `partage check` lists all)") };
    let message = format!("{place}{}: {}{more}", problem.field, problem.message);
    Refusal::new(RefusalReason::Invalid, message)
}

/// Refuses a grant that the pod carries and that this node cannot apply.
fn unusable_grant(cause: &dyn fmt::Display) -> Refusal {
    Refusal::new(RefusalReason::Failed, format!("the pod's grant cannot be applied: {cause}"))
}

fn shares_of<'a>(grant: &'a PodGrant, container: &ContainerName) -> &'a [Share] {
    let of = grant.grants.iter().find(|one| one.container == *container);
    of.map_or([].as_slice(), |one| &one.shares)
}

/// Refuses a container that requests several count resources: kubelet allocates the devices of each one separately, so the
/// container would get two keys and start with one of them.
fn check_single_count(pod: &PodManifest, settings: &AgentSettings) -> Result<(), Refusal> {
    let counted: Vec<String> = CountResource::enabled(settings).iter().map(CountResource::name).collect();
    for container in &pod.containers {
        let is_requested = |resource: &&String| container.count(resource).is_some_and(|count| count != Ok(0));
        let requested: Vec<&str> = counted.iter().filter(is_requested).map(String::as_str).collect();
        if requested.len() > 1 {
            let message = format!(
                "container {} requests {}, which are separate shares: keep one of these resources",
                container.name,
                requested.join(" and ")
            );
            return Err(Refusal::new(RefusalReason::Invalid, message));
        }
    }
    Ok(())
}

/// Returns the larger amounts of two grants of the same shares.
fn larger_amounts(old: &PodGrant, new: &PodGrant) -> PodGrant {
    let mut larger = new.clone();
    let shares = larger.grants.iter_mut().flat_map(|one| &mut one.shares);
    for (share, old) in shares.zip(old.grants.iter().flat_map(|one| &one.shares)) {
        // An absent amount is all memory of the GPU, and no compute.
        share.memory_bytes = share.memory_bytes.zip(old.memory_bytes).map(|(new, old)| new.max(old));
        share.cores = share.cores.max(old.cores);
        share.ceiling = share.ceiling.max(old.ceiling);
    }
    larger
}

#[cfg(test)]
mod tests;
