//! What every pod of this node holds: the ledger, and the decisions that are written in it.
//!
//! A pod's grant is decided once, for all of its containers. Where an extender grants, the pod brings it, and it is obeyed or
//! refused; where none does, the core's allocator places the pod here.

use crate::checkpoint::PodRecord;
use crate::plugin::Refusal;
use crate::resources::CountResource;
use crate::settings::Settings;
use partage_core::dialect::Dialect;
use partage_core::dialect::asks::{self, Reading};
use partage_core::dialect::grants::{self, Spelling, UnixNanos, gpushare, volcano};
use partage_core::explain::explain;
use partage_core::ledger::{LedgerFinding, Ledger, LedgerTime, OverCommitment};
use partage_core::model::{
    Bytes, ContainerName, Cores, GpuUuid, Grant, Node, PodAsk, PodGrant, PodId, PodUid, Policy, Share,
};
use partage_core::place::{GpuClass, HostUsage, PolicyEngine, ShareNeed};
use partage_core::pod::{Pod, Problem};
use partage_core::resize;
use std::collections::BTreeMap;
use std::fmt;

/// Who holds what on this node.
pub(crate) struct Book {
    node: Node,
    ledger: Ledger,
    records: BTreeMap<PodUid, PodRecord>,
}

/// A pod that wants its grant.
pub(crate) struct Wanting<'a> {
    pub(crate) id: &'a PodId,
    pub(crate) pod: &'a Pod,
    /// What reading it found wrong.
    pub(crate) problems: &'a [Problem],
    /// This boot.
    pub(crate) boot: &'a str,
    /// In nanoseconds since 1970.
    pub(crate) now: u64,
}

impl Book {
    /// A book in which these grants stand already.
    pub(crate) fn new(node: Node, records: BTreeMap<PodUid, PodRecord>) -> Book {
        let held =
            records.values().map(|record| (record.pod.clone(), record.grant.clone(), HostUsage::default()));
        let ledger = Ledger::rebuild([node.clone()], held);
        Book { node, ledger, records }
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

    /// Decides what a pod gets. It is in the book from here on; [`Book::release`] takes it back.
    pub(crate) fn decide(
        &mut self,
        wanting: &Wanting<'_>,
        settings: &Settings,
    ) -> Result<PodRecord, Refusal> {
        if let Some(record) = self.records.get(&wanting.id.uid) {
            return Ok(record.clone());
        }
        let core = settings.dialect();
        let reading = asks::read(wanting.pod, &core);
        if let Some(problem) = wanting.problems.iter().chain(&reading.problems).next() {
            let more = wanting.problems.len() + reading.problems.len() - 1;
            return Err(wrong(problem, more));
        }
        counted_once(wanting.pod, settings)?;
        let grant = match settings.extender {
            true => {
                let brought = self.brought(wanting, &reading, settings)?;
                let (dialect, grant) = brought.ok_or_else(|| self.without_grant(wanting.id))?;
                if dialect == Dialect::Native && !wanting.pod.annotations.contains_key(resize::ANNOTATION) {
                    self.is_enough(&reading.ask, &grant)?;
                }
                self.obey(wanting.id, grant)?
            }
            false => self.place(wanting.id, &reading.ask, settings)?,
        };
        self.enter(wanting, &reading, grant, settings)
    }

    /// Writes down a grant that the ledger has.
    fn enter(
        &mut self,
        wanting: &Wanting<'_>,
        reading: &Reading,
        grant: PodGrant,
        settings: &Settings,
    ) -> Result<PodRecord, Refusal> {
        match self.record_of(wanting, reading, grant, settings) {
            Ok(record) => {
                self.records.insert(record.pod.uid.clone(), record.clone());
                Ok(record)
            }
            Err(refusal) => {
                self.ledger.release(&wanting.id.uid);
                Err(refusal)
            }
        }
    }

    /// Takes up what a pod says that it holds, where it runs and nothing else tells. It holds that already: where its GPUs have less
    /// by now, the audit says so, and nobody else is given any of them.
    pub(crate) fn adopt(&mut self, wanting: &Wanting<'_>, settings: &Settings) -> Result<PodRecord, Refusal> {
        if let Some(record) = self.records.get(&wanting.id.uid) {
            return Ok(record.clone());
        }
        let reading = asks::read(wanting.pod, &settings.dialect());
        let brought = self.brought(wanting, &reading, settings)?;
        let (_, grant) = brought.ok_or_else(|| Refusal("it carries no grant".into()))?;
        self.ledger.confirm(wanting.id.clone(), grant.clone(), HostUsage::default());
        self.enter(wanting, &reading, grant, settings)
    }

    /// Takes the best place there is now.
    fn place(&mut self, id: &PodId, ask: &PodAsk, settings: &Settings) -> Result<PodGrant, Refusal> {
        let mut placer = PolicyEngine::new(settings.policy);
        let held: Vec<PodAsk> = self.ledger.all_held().map(|held| held.ask()).collect();
        placer.learn(&held, self.ledger.cluster());
        let placed = self.ledger.best(&placer, ask);
        let granted = placed
            .and_then(|decision| self.ledger.reserve(id.clone(), ask, &decision, LedgerTime(u64::MAX)).ok());
        let Some(grant) = granted else { return Err(self.no_room(ask)) };
        self.ledger.confirm(id.clone(), grant.clone(), HostUsage::default());
        Ok(grant)
    }

    /// Why there is no room, in words for the pod's author.
    fn no_room(&self, ask: &PodAsk) -> Refusal {
        let explanation = explain(self.ledger.cluster(), ask);
        let why =
            explanation.per_node.first().map_or_else(|| explanation.summary(), |report| report.text.clone());
        let hint = explanation.suggestions.first().map(|hint| hint.change.to_string());
        let name = &self.node.name;
        Refusal(match self.ever_fits(ask) {
            true => {
                let hint = hint.map(|change| format!(", or {change}")).unwrap_or_default();
                format!(
                    "no room on node {name} now: {why}; the container starts by itself when there is{hint}"
                )
            }
            false => {
                let hint = hint.unwrap_or_else(|| "ask for less, or for another node".into());
                format!(
                    "no room on node {name}, also with nobody else on it: {why}; delete the pod, and {hint}"
                )
            }
        })
    }

    /// Whether an ask would fit if nobody held anything and all GPUs were well: who waits for what never comes must be told.
    fn ever_fits(&self, ask: &PodAsk) -> bool {
        let mut node = self.node.clone();
        node.gpus.iter_mut().for_each(|gpu| gpu.withheld = None);
        Ledger::new([node]).best(&PolicyEngine::new(Policy::Binpack), ask).is_some()
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
        wanting: &Wanting<'_>,
        reading: &Reading,
        settings: &Settings,
    ) -> Result<Option<(Dialect, PodGrant)>, Refusal> {
        let read = grants::read(wanting.pod, Some(&self.node.name), &self.node, &settings.dialect());
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

    /// Takes a grant that somebody else decided, unless its GPUs have no room for it.
    fn obey(&mut self, id: &PodId, grant: PodGrant) -> Result<PodGrant, Refusal> {
        self.ledger.confirm(id.clone(), grant.clone(), HostUsage::default());
        if let Some(finding) = self.ledger.audit().iter().find(|finding| concerns(finding, &grant)) {
            let refusal = not_obeyed(self.too_much(finding, &id.uid));
            self.ledger.release(&id.uid);
            return Err(refusal);
        }
        Ok(grant)
    }

    /// What a pod's grant would take of a GPU that does not have it, in words for its author: who else is on the GPU is no business of
    /// theirs. The ledger has the grant.
    fn too_much(&self, finding: &LedgerFinding, uid: &PodUid) -> String {
        let LedgerFinding::OverCommitted { gpu, what, .. } = finding else {
            return match finding {
                LedgerFinding::UnknownGpu { node, gpu, .. } => format!("node {node} does not have GPU {gpu}"),
                other => other.to_string(),
            };
        };
        let own = self.ledger.held(uid).zip(self.node.gpu_index(gpu)).map(|(held, at)| held.usage_on(at));
        let own = own.unwrap_or_default();
        match what {
            OverCommitment::Memory { promised, limit } => {
                let free = limit.0.saturating_sub(promised.0.saturating_sub(own.memory));
                let (free, asked) = (Bytes(free), Bytes(own.memory));
                format!("GPU {gpu} has {free} of memory for this pod, and {asked} would be its")
            }
            OverCommitment::Cores { promised } => {
                let all = u64::from(Cores::WHOLE.as_millipercent());
                let free = all.saturating_sub(promised.saturating_sub(own.cores)) / 1000;
                let asked = own.cores.div_ceil(1000);
                format!("GPU {gpu} has {free} % of its compute for this pod, and {asked} % would be its")
            }
            OverCommitment::Whole { .. } => {
                format!("GPU {gpu} is or would be held whole, and others are on it")
            }
            OverCommitment::Mixed => {
                format!("GPU {gpu} would have shares with and without a limit of memory")
            }
            OverCommitment::Shares { most, .. } => {
                format!("GPU {gpu} has {most} shares already, which is all that it may have")
            }
            OverCommitment::Share { card, .. } => {
                format!("a share of GPU {gpu} would be larger than its memory, which is {card}")
            }
        }
    }

    /// What is kept of a grant, and said on its pod.
    fn record_of(
        &self,
        wanting: &Wanting<'_>,
        reading: &Reading,
        grant: PodGrant,
        settings: &Settings,
    ) -> Result<PodRecord, Refusal> {
        let mut record = self.written(wanting, reading, grant, settings)?;
        if settings.extender {
            // What the extender wrote stays as it is; only that it was obeyed is new.
            let decided = |key: &str| {
                grants::is_record(key) && ![gpushare::ASSIGNED, volcano::TO_ALLOCATE].contains(&key)
            };
            record.annotations.retain(|key, _| !(decided(key) && wanting.pod.annotations.contains_key(key)));
        }
        Ok(record)
    }

    /// The same, with everything that a grant says in any dialect.
    fn written(
        &self,
        wanting: &Wanting<'_>,
        reading: &Reading,
        grant: PodGrant,
        settings: &Settings,
    ) -> Result<PodRecord, Refusal> {
        let dialects: BTreeMap<ContainerName, _> =
            reading.containers.iter().filter_map(|one| Some((one.name.clone(), one.dialect?))).collect();
        let spelling = Spelling::of(wanting.pod, &dialects);
        let mut written =
            grants::write(&grant, &self.node, &spelling, &settings.dialect(), UnixNanos(wanting.now))
                .map_err(|error| Refusal(format!("the grant cannot be written: {error}")))?;
        // The node that other systems' records wait for is this one.
        grants::set_up(&mut written.annotations);
        Ok(PodRecord {
            pod: wanting.id.clone(),
            boot: wanting.boot.into(),
            at: wanting.now,
            grant,
            dialects: dialects
                .into_iter()
                .map(|(name, dialect)| (name, dialect.name().to_string()))
                .collect(),
            annotations: written.annotations,
            env: written.env,
            resize: None,
        })
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
        let wanting = Wanting { id: &old.pod, pod, problems: &[], boot: &old.boot, now: old.at };
        self.written(&wanting, &reading, grant, settings)
    }

    /// A pod has ended: what it held can be given again.
    pub(crate) fn release(&mut self, uid: &PodUid) -> Option<PodRecord> {
        self.ledger.release(uid);
        self.records.remove(uid)
    }

    /// Holds, for a pod that runs, the more of what it has and what it is to have, where its GPUs have room for that. Then nobody
    /// else can take either, whatever becomes of the change; [`Book::put_back`] ends it, one way or the other.
    pub(crate) fn reserve(&mut self, old: &PodRecord, new: &PodGrant) -> Result<(), Refusal> {
        let most = most(&old.grant, new);
        self.ledger.confirm(old.pod.clone(), most.clone(), HostUsage::default());
        // Who takes less makes nothing worse, however full the GPU is.
        let wrong = self.ledger.audit().into_iter().find(|finding| concerns(finding, &most));
        match wrong.filter(|_| most != old.grant) {
            Some(finding) => {
                let why = self.too_much(&finding, &old.pod.uid);
                self.ledger.confirm(old.pod.clone(), old.grant.clone(), HostUsage::default());
                Err(Refusal(why))
            }
            None => Ok(()),
        }
    }

    /// This is what the pod holds now.
    pub(crate) fn put_back(&mut self, record: PodRecord) {
        self.ledger.confirm(record.pod.clone(), record.grant.clone(), HostUsage::default());
        self.records.insert(record.pod.uid.clone(), record);
    }

    /// How much of a GPU is given away: memory, compute in thousandths of a percent, shares. What an init container holds
    /// before the others start is not counted beside them.
    pub(crate) fn promised(&self, gpu: &GpuUuid) -> (u64, u32, u32) {
        let on = self.shares().filter(|(_, grant, share)| share.gpu == *gpu && !grant.init);
        on.fold((0, 0, 0), |(memory, cores, shares), (_, _, share)| {
            (
                memory + share.memory_bytes.map_or(0, |bytes| bytes.0),
                cores + share.cores.map_or(0, |cores| cores.as_millipercent()),
                shares + 1,
            )
        })
    }
}

fn wrong(problem: &Problem, more: usize) -> Refusal {
    let place =
        problem.container.as_ref().map_or_else(String::new, |container| format!("container {container}, "));
    let more =
        if more == 0 { String::new() } else { format!(" (and {more} more: partage check tells them all)") };
    Refusal(format!("{place}{}: {}{more}", problem.field, problem.message))
}

/// Whether a finding is about a GPU of this grant.
fn concerns(finding: &LedgerFinding, grant: &PodGrant) -> bool {
    let gpu = match finding {
        LedgerFinding::OverCommitted { gpu, .. } | LedgerFinding::UnknownGpu { gpu, .. } => gpu,
        LedgerFinding::UnknownNode { .. } | LedgerFinding::SeveralGrants { .. } => return false,
    };
    grant.grants.iter().flat_map(|one| &one.shares).any(|share| share.gpu == *gpu)
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
