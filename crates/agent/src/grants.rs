//! What every pod of this node holds: the ledger, and the decisions that are written in it.
//!
//! A pod's grant is decided once, for all of its containers. Where an extender grants, the pod brings it, and it is obeyed or
//! refused; where none does, the core's allocator places the pod here.

use crate::oversubscription;
use crate::plugin::Refusal;
use crate::resources::CountResource;
use crate::settings::Settings;
use crate::store::PodRecord;
use partage_core::dialect::Dialect;
use partage_core::dialect::asks::{self, Reading};
use partage_core::dialect::grants::{self, Spelling, UnixNanos, gpushare, volcano};
use partage_core::ledger::{HeldGrant, Ledger, LedgerFinding, LedgerTime};
use partage_core::model::{
    ContainerName, Grant, Node, Oversubscription, PodAsk, PodGrant, PodId, PodUid, Share,
};
use partage_core::place::{GpuClass, HostUsage, PolicyEngine, ShareNeed};
use partage_core::pod::{Pod, Problem};
use partage_core::resize;
use partage_enforce::placing::NoPlacement;
use std::collections::BTreeMap;
use std::fmt;

/// Who holds what on this node.
pub(crate) struct GrantBook {
    node: Node,
    ledger: Ledger,
    records: BTreeMap<PodUid, PodRecord>,
}

/// A pod that wants its grant.
pub(crate) struct GrantRequest<'a> {
    pub(crate) id: &'a PodId,
    pub(crate) pod: &'a Pod,
    /// What reading it found wrong.
    pub(crate) problems: &'a [Problem],
    /// This boot.
    pub(crate) boot: &'a str,
    /// In nanoseconds since 1970.
    pub(crate) now: u64,
}

impl GrantBook {
    /// A book in which these grants stand already.
    pub(crate) fn new(node: Node, records: BTreeMap<PodUid, PodRecord>) -> GrantBook {
        let held =
            records.values().map(|record| (record.pod.clone(), record.grant.clone(), HostUsage::default()));
        let ledger = Ledger::rebuild([node.clone()], held);
        GrantBook { node, ledger, records }
    }

    /// The node, as it can be given away.
    pub(crate) fn node(&self) -> &Node {
        &self.node
    }

    /// The node changed: a GPU fell ill or got well, or the settings are others. What is held stays held.
    pub(crate) fn set_node(&mut self, node: Node) {
        self.ledger.set_node(node.clone());
        self.node = node;
    }

    /// What a pod was granted.
    pub(crate) fn record(&self, uid: &PodUid) -> Option<&PodRecord> {
        self.records.get(uid)
    }

    /// All of them.
    pub(crate) fn records(&self) -> impl Iterator<Item = &PodRecord> {
        self.records.values()
    }

    /// All shares that are held, with whose they are.
    pub(crate) fn shares(&self) -> impl Iterator<Item = (&PodRecord, &Grant, &Share)> {
        let grants = self
            .records
            .values()
            .flat_map(|record| record.grant.grants.iter().map(move |grant| (record, grant)));
        grants.flat_map(|(record, grant)| grant.shares.iter().map(move |share| (record, grant, share)))
    }

    /// What the ledger finds wrong.
    pub(crate) fn audit(&self) -> Vec<LedgerFinding> {
        self.ledger.audit()
    }

    /// Decides what a pod gets. It is in the book from here on; [`GrantBook::release`] takes it back.
    pub(crate) fn decide(
        &mut self,
        request: &GrantRequest<'_>,
        settings: &Settings,
    ) -> Result<PodRecord, Refusal> {
        if let Some(record) = self.records.get(&request.id.uid) {
            return Ok(record.clone());
        }
        let core = settings.dialect();
        let reading = asks::read(request.pod, &core);
        if let Some(problem) = request.problems.iter().chain(&reading.problems).next() {
            let more = request.problems.len() + reading.problems.len() - 1;
            return Err(wrong(problem, more));
        }
        counted_once(request.pod, settings)?;
        oversubscription::is_allowed(&self.node, &reading.ask, settings)?;
        if settings.extender {
            let brought = self.brought(request, &reading, settings)?;
            let (dialect, grant) = brought.ok_or_else(|| self.without_grant(request.id))?;
            if dialect == Dialect::Native && !request.pod.annotations.contains_key(resize::ANNOTATION) {
                self.is_enough(&reading.ask, &grant)?;
            }
            let mut statement = self.ledger.statement();
            statement
                .try_confirm(request.id.clone(), grant.clone(), HostUsage::default())
                .map_err(not_obeyed)?;
            let record = record_of(&self.node, request, &reading, grant, settings)?;
            statement.commit();
            Ok(self.enter(record))
        } else {
            self.place(request, &reading, settings)
        }
    }

    /// Keeps the record of a grant that the ledger holds.
    fn enter(&mut self, record: PodRecord) -> PodRecord {
        self.records.insert(record.pod.uid.clone(), record.clone());
        record
    }

    /// Takes up what a pod says that it holds, where it runs and nothing else tells. It holds that already: where its GPUs have less
    /// by now, the audit says so, and nobody else is given any of them.
    pub(crate) fn adopt(
        &mut self,
        request: &GrantRequest<'_>,
        settings: &Settings,
    ) -> Result<PodRecord, Refusal> {
        if let Some(record) = self.records.get(&request.id.uid) {
            return Ok(record.clone());
        }
        let reading = asks::read(request.pod, &settings.dialect());
        let brought = self.brought(request, &reading, settings)?;
        let (_, grant) = brought.ok_or_else(|| Refusal("it carries no grant".into()))?;
        let mut statement = self.ledger.statement();
        statement.confirm(request.id.clone(), grant.clone(), HostUsage::default());
        let mut record = record_of(&self.node, request, &reading, grant, settings)?;
        // The annotation may be younger than the grant, and nothing tells whether the node allowed it then.
        record.oversubscribe &= settings.oversubscribe == Oversubscription::Allowed;
        statement.commit();
        Ok(self.enter(record))
    }

    /// Places a pod on the best GPUs of this node.
    fn place(
        &mut self,
        request: &GrantRequest<'_>,
        reading: &Reading,
        settings: &Settings,
    ) -> Result<PodRecord, Refusal> {
        let mut policies = PolicyEngine::new(settings.policy);
        let held: Vec<PodAsk> = self.ledger.all_held().map(HeldGrant::to_ask).collect();
        policies.learn(&held, self.ledger.cluster());
        let mut statement = self.ledger.statement();
        let id = request.id;
        let Ok(grant) = statement.place(id.clone(), &reading.ask, &policies, LedgerTime(u64::MAX)) else {
            drop(statement);
            return Err(self.no_room(&reading.ask));
        };
        statement.confirm(id.clone(), grant.clone(), HostUsage::default());
        let record = record_of(&self.node, request, reading, grant, settings)?;
        statement.commit();
        Ok(self.enter(record))
    }

    /// Explains to the pod's author why the pod does not fit.
    fn no_room(&self, ask: &PodAsk) -> Refusal {
        NoPlacement::explain(&self.ledger.snapshot(), ask).into_pod_refusal(&self.node.name).into()
    }

    fn without_grant(&self, id: &PodId) -> Refusal {
        Refusal(format!(
            "pod {}/{} came to node {} without a grant: the scheduler extender grants here, and this pod did not pass it; leave \
             spec.nodeName out and let the scheduler place it",
            id.namespace, id.name, self.node.name
        ))
    }

    /// The grant that the pod brought, if any, with as many shares for each container as it asks for; and whose spelling it was in.
    fn brought(
        &self,
        request: &GrantRequest<'_>,
        reading: &Reading,
        settings: &Settings,
    ) -> Result<Option<(Dialect, PodGrant)>, Refusal> {
        let read = grants::read(request.pod, Some(&self.node.name), &self.node, &settings.dialect());
        let Some((dialect, grant)) = read.map_err(not_obeyed)? else { return Ok(None) };
        for ask in &reading.ask.asks {
            let shares = shares_of(&grant, &ask.container).len();
            if shares != ask.want.count as usize {
                return Err(not_obeyed(format_args!(
                    "container {} asks for {} shares and was granted {shares}",
                    ask.container, ask.want.count
                )));
            }
        }
        Ok(Some((dialect, grant)))
    }

    /// Nobody is given less than it asks for, whoever decided that.
    fn is_enough(&self, asks: &PodAsk, grant: &PodGrant) -> Result<(), Refusal> {
        for ask in &asks.asks {
            for share in shares_of(grant, &ask.container) {
                let Some(at) = self.node.gpu_index(&share.gpu) else { continue };
                let need = ShareNeed::of(&ask.want.part, &GpuClass::of(&self.node, &self.node.gpus[at]));
                let less = |what: &str, asked: &dyn fmt::Display, granted: &dyn fmt::Display| {
                    Err(not_obeyed(format_args!(
                        "container {} asks for {asked} of {what} and was granted {granted}: have the scheduler place the pod again",
                        ask.container
                    )))
                };
                if let (Some(asked), Some(granted)) = (need.limit, share.memory_bytes)
                    && granted < asked
                {
                    return less("memory", &asked, &granted);
                }
                if let Some(asked) = need.cores.filter(|_| !share.whole)
                    && share.cores.is_none_or(|granted| granted < asked)
                {
                    let granted = share.cores.map_or("none".into(), |cores| cores.to_string());
                    return less("compute", &asked, &granted);
                }
            }
        }
        Ok(())
    }

    /// A pod's record with another grant, and everything that follows from that.
    pub(crate) fn rewritten(
        &self,
        old: &PodRecord,
        pod: &Pod,
        grant: PodGrant,
        settings: &Settings,
    ) -> Result<PodRecord, Refusal> {
        let reading = asks::read(pod, &settings.dialect());
        let request = GrantRequest { id: &old.pod, pod, problems: &[], boot: &old.boot, now: old.at };
        let written = written(&self.node, &request, &reading, grant, settings)?;
        Ok(PodRecord { oversubscribe: old.oversubscribe, ..written })
    }

    /// A pod has ended: what it held can be given again.
    pub(crate) fn release(&mut self, uid: &PodUid) -> Option<PodRecord> {
        self.ledger.release(uid);
        self.records.remove(uid)
    }

    /// Reserves, for a running pod that is resized, the larger of its old and its new amounts, if its GPUs have them.
    /// No other pod can take either until [`GrantBook::put_back`] ends the resize.
    pub(crate) fn reserve(&mut self, old: &PodRecord, new: &PodGrant) -> Result<(), Refusal> {
        let mut statement = self.ledger.statement();
        // Shrinking reserves what the pod has already, which is never refused, however full the GPU is.
        statement
            .replace(&old.pod.uid, most(&old.grant, new))
            .map_err(|refused| Refusal(refused.to_string()))?;
        statement.commit();
        Ok(())
    }

    /// Ends a resize: the pod holds what the record says.
    pub(crate) fn put_back(&mut self, record: PodRecord) {
        self.ledger.confirm(record.pod.clone(), record.grant.clone(), HostUsage::default());
        self.records.insert(record.pod.uid.clone(), record);
    }
}

/// Returns what is persisted of a grant and written to its pod.
fn record_of(
    node: &Node,
    request: &GrantRequest<'_>,
    reading: &Reading,
    grant: PodGrant,
    settings: &Settings,
) -> Result<PodRecord, Refusal> {
    let mut record = written(node, request, reading, grant, settings)?;
    if settings.extender {
        // What the extender wrote is kept; only the note that the grant was applied is new.
        let decided =
            |key: &str| grants::is_record(key) && ![gpushare::ASSIGNED, volcano::TO_ALLOCATE].contains(&key);
        record.annotations.retain(|key, _| !(decided(key) && request.pod.annotations.contains_key(key)));
    }
    Ok(record)
}

/// Returns a record with the annotations of every dialect.
fn written(
    node: &Node,
    request: &GrantRequest<'_>,
    reading: &Reading,
    grant: PodGrant,
    settings: &Settings,
) -> Result<PodRecord, Refusal> {
    let dialects: BTreeMap<ContainerName, _> =
        reading.containers.iter().filter_map(|one| Some((one.name.clone(), one.dialect?))).collect();
    let spelling = Spelling::of(request.pod, &dialects);
    let mut written = grants::write(&grant, node, &spelling, &settings.dialect(), UnixNanos(request.now))
        .map_err(|error| Refusal(format!("the grant cannot be written: {error}")))?;
    // Records of other systems that wait for a node to apply them are marked as applied.
    grants::set_up(&mut written.annotations);
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
    })
}

fn wrong(problem: &Problem, more: usize) -> Refusal {
    let place =
        problem.container.as_ref().map_or_else(String::new, |container| format!("container {container}, "));
    let more =
        if more == 0 { String::new() } else { format!(" (and {more} more: partage check tells them all)") };
    Refusal(format!("{place}{}: {}{more}", problem.field, problem.message))
}

fn not_obeyed(why: impl fmt::Display) -> Refusal {
    Refusal(format!("the pod's grant cannot be obeyed: {why}"))
}

fn shares_of<'a>(grant: &'a PodGrant, container: &ContainerName) -> &'a [Share] {
    let of = grant.grants.iter().find(|one| one.container == *container);
    of.map_or([].as_slice(), |one| &one.shares)
}

/// Kubelet asks for the devices of each resource by itself, and would be answered two names for one container: it starts with one.
fn counted_once(pod: &Pod, settings: &Settings) -> Result<(), Refusal> {
    let counted: Vec<String> = CountResource::enabled(settings).iter().map(CountResource::name).collect();
    for container in &pod.containers {
        let asks = |resource: &&String| container.count(resource).is_some_and(|count| count != Ok(0));
        let asked: Vec<&str> = counted.iter().filter(asks).map(String::as_str).collect();
        if asked.len() > 1 {
            return Err(Refusal(format!(
                "container {} asks for {}, and each of them is a share of its own: leave all but one out",
                container.name,
                asked.join(" and ")
            )));
        }
    }
    Ok(())
}

/// The more of two grants of the same shares.
fn most(old: &PodGrant, new: &PodGrant) -> PodGrant {
    let mut most = new.clone();
    let shares = most.grants.iter_mut().flat_map(|one| &mut one.shares);
    for (share, old) in shares.zip(old.grants.iter().flat_map(|one| &one.shares)) {
        // Absent is everything, for memory; nothing, for compute.
        share.memory_bytes = share.memory_bytes.zip(old.memory_bytes).map(|(new, old)| new.max(old));
        share.cores = share.cores.max(old.cores);
        share.ceiling = share.ceiling.max(old.ceiling);
    }
    most
}

#[cfg(test)]
mod tests;
