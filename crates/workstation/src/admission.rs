//! Admission and placement: runs the core's allocator on one machine under the rules of the settings. It uses neither
//! files nor clocks.

use crate::protocol::{ComputeMode, ResizeChange, RunRequest};
use crate::settings::{DefaultShare, WorkstationSettings};
use crate::users::UserIdentity;
use partage_core::explain::SuggestedChange;
use partage_core::ledger::{Ledger, LedgerTime, Statement};
use partage_core::model::{
    Ask, Bytes, Constraints, ContainerRole, Cores, CoresAsk, GpuUuid, Grant, MAX_GPUS_PER_CONTAINER,
    MAX_PRIORITY, MemoryAsk, Node, Oversubscription, PodAsk, PodGrant, PodId, Selector, Share, ShareAsk,
    TotalCores, TurnPreferences, WantedGpus,
};
use partage_core::place::{HostUsage, PolicyEngine};
use partage_enforce::placement_refusal::NoPlacement;
use partage_enforce::refusal::{Refusal, RefusalReason};
use std::fmt::Write;

/// The name of the one container that a share is to the core.
const CONTAINER: &str = "share";

/// A share that a user holds.
#[derive(Clone, Debug)]
pub struct HeldShares<'a> {
    /// The name of the share.
    pub name: &'a str,
    /// The owner of the share.
    pub who: &'a UserIdentity,
    /// The shares of GPUs.
    pub shares: &'a [Share],
}

/// Converts a request into an ask of the core, and refuses one that contradicts itself.
pub fn to_ask(request: &RunRequest, default: &DefaultShare) -> Result<PodAsk, Refusal> {
    let wrong = |message: &str| Err(Refusal::new(RefusalReason::Invalid, message));
    let sized = request.memory.is_some() || request.memory_percent.is_some() || request.cores.is_some();
    if request.memory.is_some() && request.memory_percent.is_some() {
        return wrong("memory is requested both as an amount and as a percentage: omit one of them");
    }
    if request.whole && sized {
        return wrong("--whole requests all memory and cores: omit the memory and the cores, or --whole");
    }
    if request.whole && request.mode.is_some() {
        return wrong("--whole requests a GPU that is not shared: omit the mode, or --whole");
    }
    if request.whole && request.oversubscribe {
        return wrong("a whole GPU has no memory limit to exceed: omit --oversubscribe, or --whole");
    }
    if request.whole && (request.low_latency || request.priority.is_some()) {
        return wrong("a whole GPU is not shared in turns: omit --latency and --priority, or --whole");
    }
    let priority = request.priority.unwrap_or(0);
    if priority > MAX_PRIORITY {
        return wrong(&format!("invalid priority {priority}: use 0 to {MAX_PRIORITY}"));
    }
    let count = request.gpus.unwrap_or(1);
    if !(1..=MAX_GPUS_PER_CONTAINER).contains(&count) {
        return wrong(&format!("invalid number of GPUs {count}: request 1 to {MAX_GPUS_PER_CONTAINER}"));
    }
    if request.memory_percent.is_some_and(|percent| !(1..=100).contains(&percent)) {
        return wrong("invalid memory percentage: use 1 to 100");
    }
    if request.memory.is_some_and(|memory| memory.0 < 1 << 20) {
        return wrong("memory is less than 1 MiB: request more, such as 4Gi or 500Mi");
    }
    if request.cores == Some(Cores::NONE) {
        return wrong("cores must not be 0 %: request 1 to 100, or omit them for no guarantee");
    }
    let (memory, cores, mode) = if sized || request.whole {
        (request.memory, request.cores, request.mode)
    } else {
        (default.memory, default.cores, request.mode.or(default.mode))
    };
    if mode == Some(ComputeMode::Hard) && cores.is_none() {
        return wrong("--mode hard requires --cores");
    }
    if request.low_latency && cores.is_none() {
        return wrong("--latency low requires --cores: only launches within the guarantee start soon");
    }
    let memory = match (memory, request.memory_percent) {
        (Some(memory), _) => MemoryAsk::Exactly(memory),
        (None, Some(percent)) => MemoryAsk::Percent(percent),
        (None, None) => MemoryAsk::All,
    };
    let share = ShareAsk {
        memory,
        cores: match (request.whole, cores) {
            (true, _) => CoresAsk::Exactly(Cores::WHOLE),
            (false, Some(cores)) => CoresAsk::Exactly(cores),
            (false, None) => CoresAsk::Uncounted,
        },
        whole: request.whole,
        ceiling: ceiling(mode, request.whole, cores),
    };
    let want = WantedGpus { count, share };
    Ok(PodAsk {
        asks: vec![Ask { container: CONTAINER.into(), role: ContainerRole::App, want }],
        constraints: Constraints {
            models: Selector { only: request.models.clone(), never: Vec::new() },
            ..Constraints::default()
        },
        oversubscribe: request.oversubscribe,
        turns: TurnPreferences { low_latency: request.low_latency, priority },
        ..PodAsk::default()
    })
}

/// Returns the compute limit. By default, a share may use idle time.
fn ceiling(mode: Option<ComputeMode>, whole: bool, cores: Option<Cores>) -> Option<Cores> {
    (mode != Some(ComputeMode::Hard) && !whole && cores.is_some()).then_some(Cores::WHOLE)
}

/// Places the share that a user requests, or refuses it.
pub fn place(
    node: &Node,
    held: &[HeldShares<'_>],
    settings: &WorkstationSettings,
    who: &UserIdentity,
    ask: &PodAsk,
) -> Result<Vec<Share>, Refusal> {
    let mut ask = ask.clone();
    ask.constraints.policy = Some(settings.policy);
    may_oversubscribe(settings, &ask)?;
    may_have_priority(settings, who, &ask)?;
    admit(node, held, settings, who, &mut ask)?;
    let shares = fit(ledger_of(node, held).statement(), node, held, settings, who, &ask)?;
    within_rule(held, settings, who, &shares)?;
    Ok(shares)
}

/// Refuses oversubscription if the settings do.
fn may_oversubscribe(settings: &WorkstationSettings, ask: &PodAsk) -> Result<(), Refusal> {
    if !ask.oversubscribe || settings.oversubscribe == Oversubscription::Allowed {
        return Ok(());
    }
    let message = "oversubscription is not allowed on this machine (oversubscribe: refused in its settings): omit \
                   --oversubscribe and request as much --memory as the program needs";
    Err(Refusal::new(RefusalReason::NotAllowed, message))
}

/// Refuses a priority above the one that the settings allow. The user of the daemon, and root, may have any.
fn may_have_priority(
    settings: &WorkstationSettings,
    who: &UserIdentity,
    ask: &PodAsk,
) -> Result<(), Refusal> {
    let (priority, most) = (ask.turns.priority, settings.max_priority);
    if priority <= most || who.is_daemon_user() {
        return Ok(());
    }
    let remedy = if most == 0 { "omit --priority".into() } else { format!("use at most --priority {most}") };
    let message = format!(
        "priority {priority} is not allowed on this machine (maxPriority: {most} in its settings): {remedy}"
    );
    Err(Refusal::new(RefusalReason::NotAllowed, message))
}

/// Resizes a share on the GPUs that it has, or refuses.
pub fn resize(
    node: &Node,
    held: &[HeldShares<'_>],
    settings: &WorkstationSettings,
    name: &str,
    change: &ResizeChange,
) -> Result<Vec<Share>, Refusal> {
    let wrong = |message: String| Refusal::new(RefusalReason::Invalid, message);
    let Some(own) = held.iter().find(|held| held.name == name) else {
        return Err(Refusal::new(RefusalReason::NotFound, format!("share {name} not found")));
    };
    let Some(first) = own.shares.first() else {
        return Err(wrong(format!("{name} has no GPU")));
    };
    if first.whole {
        return Err(wrong(format!(
            "{name} has whole GPUs, which cannot be resized: stop it and run it again with --memory and --cores"
        )));
    }
    let (cores, mode) = match (change.cores, change.mode) {
        (None, None) => (first.cores, None),
        (cores, mode) => (cores.or(first.cores), mode),
    };
    // The mode stays the same unless the change sets another.
    let hard_now = first.cores.is_some() && first.ceiling.is_none();
    let mode = mode.or(hard_now.then_some(ComputeMode::Hard));
    let count = u32::try_from(own.shares.len()).unwrap_or(u32::MAX);
    let request = RunRequest {
        gpus: Some(count),
        memory: change.memory.or(match change.memory_percent {
            None => first.memory_bytes,
            Some(_) => None,
        }),
        memory_percent: change.memory_percent,
        cores,
        mode,
        ..RunRequest::default()
    };
    let mut ask = to_ask(&request, &DefaultShare::default())?;
    ask.constraints.uuids.only = own.shares.iter().map(|share| share.gpu.to_string()).collect();
    let mut ledger = ledger_of(node, held);
    let mut statement = ledger.statement();
    statement.release(&pod_id(name).uid);
    let others: Vec<HeldShares<'_>> = held.iter().filter(|held| held.name != name).cloned().collect();
    let mut shares = fit(statement, node, &others, settings, own.who, &ask)?;
    within_rule(&others, settings, own.who, &shares)?;
    // The order must be that of the region.
    shares.sort_by_key(|share| own.shares.iter().position(|own| own.gpu == share.gpu));
    Ok(shares)
}

/// Applies the rules that do not depend on a placement.
fn admit(
    node: &Node,
    held: &[HeldShares<'_>],
    settings: &WorkstationSettings,
    who: &UserIdentity,
    ask: &mut PodAsk,
) -> Result<(), Refusal> {
    let no = |message: String| Err(Refusal::new(RefusalReason::NotAllowed, message));
    let rule = match settings.rule(who) {
        Ok(Some(rule)) => rule,
        Ok(None) => return Ok(()),
        Err(()) => {
            return no(
                "no rule under users in the settings of this machine applies to you: contact the administrator".into()
            );
        }
    };
    let Some(want) = ask.asks.first().map(|ask| ask.want) else { return Ok(()) };
    if let Some(most) = rule.shares {
        let has: Vec<&str> =
            held.iter().filter(|held| held.who.uid == who.uid).map(|held| held.name).collect();
        if has.len() >= usize::try_from(most).unwrap_or(usize::MAX) {
            return no(format!(
                "{} may have {most} shares at a time and {}: stop one first",
                rule.apply_to,
                has_already(&has)
            ));
        }
    }
    if let Some(most) = rule.gpus.filter(|most| want.count > *most) {
        return no(format!("{} may have {most} GPUs per share, requested {}", rule.apply_to, want.count));
    }
    if rule.whole == Some(false) && want.share.whole {
        return no(format!(
            "{} may not have a whole GPU: request a share with --memory and --cores",
            rule.apply_to
        ));
    }
    if let Some(only) = &rule.only {
        let allowed =
            node.gpus.iter().enumerate().filter(|(at, gpu)| only.iter().any(|word| word.matches(*at, gpu)));
        ask.constraints.uuids.only = allowed.map(|(_, gpu)| gpu.uuid.to_string()).collect();
        if ask.constraints.uuids.only.is_empty() {
            let words: Vec<String> = only.iter().map(ToString::to_string).collect();
            return no(format!(
                "{} may only use {}, which this machine does not have",
                rule.apply_to,
                words.join(", ")
            ));
        }
    }
    Ok(())
}

fn has_already(names: &[&str]) -> String {
    match names {
        [one] => format!("has {one}"),
        names => format!("has {}", names.join(", ")),
    }
}

/// Applies the rules on the sum of all shares of a user.
fn within_rule(
    held: &[HeldShares<'_>],
    settings: &WorkstationSettings,
    who: &UserIdentity,
    shares: &[Share],
) -> Result<(), Refusal> {
    let Ok(Some(rule)) = settings.rule(who) else { return Ok(()) };
    let theirs = held.iter().filter(|held| held.who.uid == who.uid).flat_map(|held| held.shares);
    let no = |most: String, what: String, has: String, asked: String| {
        let message =
            format!("{} may have {most} of {what} in total, has {has} and requests {asked}", rule.apply_to);
        let refusal = Refusal::new(RefusalReason::NotAllowed, message);
        Err(refusal.with_hints(["request less, or stop another share".into()]))
    };
    if let Some(most) = rule.memory {
        let sum = |shares: &mut dyn Iterator<Item = &Share>| {
            Bytes(
                shares
                    .filter_map(|share| share.memory_bytes)
                    .fold(0, |sum: u64, bytes| sum.saturating_add(bytes.0)),
            )
        };
        let (has, asked) = (sum(&mut theirs.clone()), sum(&mut shares.iter()));
        if has.0.saturating_add(asked.0) > most.0 {
            return no(most.to_string(), "GPU memory".into(), has.to_string(), asked.to_string());
        }
    }
    if let Some(most) = rule.cores {
        let sum = |shares: &mut dyn Iterator<Item = &Share>| -> TotalCores {
            shares.filter_map(|share| share.cores).sum()
        };
        let (has, asked) = (sum(&mut theirs.clone()), sum(&mut shares.iter()));
        if has.saturating_add(asked) > most {
            return no(most.to_string(), "GPU time".into(), has.to_string(), asked.to_string());
        }
    }
    Ok(())
}

/// The unused part of a reservation for other users.
struct ReservedPart {
    share: Share,
    words: String,
}

fn reserved_for_others(
    node: &Node,
    held: &[HeldShares<'_>],
    settings: &WorkstationSettings,
    who: &UserIdentity,
) -> Vec<ReservedPart> {
    let others = settings.reservations.iter().filter(|reservation| !reservation.apply_to.includes(who));
    let kept = others.filter_map(|reservation| {
        let gpu = reservation.gpu(node)?;
        let (memory, cores) = unused_reservation(reservation, &gpu, held);
        if memory == Bytes::ZERO && cores == Cores::NONE {
            return None;
        }
        let words = format!(
            "{} of {} {} reserved for {}",
            amounts(memory, cores),
            reservation.gpu,
            verb_for(memory, cores),
            reservation.apply_to
        );
        let share =
            Share { gpu, memory_bytes: Some(memory), cores: Some(cores), ceiling: None, whole: false };
        Some(ReservedPart { share, words })
    });
    kept.collect()
}

fn verb_for(memory: Bytes, cores: Cores) -> &'static str {
    if memory != Bytes::ZERO && cores != Cores::NONE { "are" } else { "is" }
}

fn amounts(memory: Bytes, cores: Cores) -> String {
    match (memory, cores) {
        (memory, Cores::NONE) => memory.to_string(),
        (Bytes::ZERO, cores) => cores.to_string(),
        (memory, cores) => format!("{memory} and {cores}"),
    }
}

/// Returns the unused part of a reservation: shares of its users on the GPU count against it.
fn unused_reservation(
    reservation: &crate::settings::Reservation,
    gpu: &GpuUuid,
    held: &[HeldShares<'_>],
) -> (Bytes, Cores) {
    let theirs =
        held.iter().filter(|held| reservation.apply_to.includes(held.who)).flat_map(|held| held.shares);
    let there: Vec<&Share> = theirs.filter(|share| share.gpu == *gpu).collect();
    let memory = there.iter().filter_map(|share| share.memory_bytes).map(|bytes| bytes.0).sum::<u64>();
    let cores = there.iter().filter_map(|share| share.cores).map(Cores::as_millipercent).sum::<u32>();
    let left = reservation.cores.unwrap_or(Cores::NONE).as_millipercent().saturating_sub(cores);
    let left_memory = Bytes(reservation.memory.unwrap_or(Bytes::ZERO).0.saturating_sub(memory));
    (left_memory, Cores::millipercent(left).unwrap_or(Cores::NONE))
}

/// Returns the memory of a GPU that is reserved for users and not held by them.
pub fn reserved(
    node: &Node,
    held: &[HeldShares<'_>],
    settings: &WorkstationSettings,
    gpu: &GpuUuid,
) -> Bytes {
    let here = settings.reservations.iter().filter(|reservation| reservation.gpu(node).as_ref() == Some(gpu));
    Bytes(here.map(|reservation| unused_reservation(reservation, gpu, held).0.0).sum())
}

/// Returns a ledger of the shares on this machine.
fn ledger_of(node: &Node, held: &[HeldShares<'_>]) -> Ledger {
    let grants =
        held.iter().map(|held| (pod_id(held.name), grant_of(node, held.shares), HostUsage::default()));
    Ledger::rebuild([node.clone()], grants)
}

/// Returns a grant of these shares for the one container.
fn grant_of(node: &Node, shares: &[Share]) -> PodGrant {
    let grants = vec![Grant { container: CONTAINER.into(), init: false, shares: shares.to_vec() }];
    PodGrant { node: node.name.clone(), grants }
}

/// Finds shares for an ask beside the shares in the statement's ledger and the reservations for other users.
///
/// The statement is rolled back; the caller records the shares.
fn fit(
    mut statement: Statement<'_>,
    node: &Node,
    held: &[HeldShares<'_>],
    settings: &WorkstationSettings,
    who: &UserIdentity,
    ask: &PodAsk,
) -> Result<Vec<Share>, Refusal> {
    let kept = reserved_for_others(node, held, settings, who);
    for (at, kept) in kept.iter().enumerate() {
        // Names of shares contain no space, so this name is not used.
        let name = pod_id(&format!("kept {at}"));
        statement.confirm(name, grant_of(node, std::slice::from_ref(&kept.share)), HostUsage::default());
    }
    let policies = PolicyEngine::new(settings.policy);
    let granted = statement.place(pod_id("new share"), ask, &policies, LedgerTime(u64::MAX)).ok();
    if let Some(grant) = granted.and_then(|grant| grant.grants.into_iter().next()) {
        return Ok(grant.shares);
    }
    let refused = NoPlacement::explain(&statement.ledger().snapshot(), ask);
    let mut message = without_others(&of_this_machine(&refused.why));
    for kept in &kept {
        // Writing to a String does not fail.
        let _ = write!(message, "; {}", kept.words);
    }
    // The user named no GPUs: the rules did, or the share is on these.
    let hints = refused
        .changes
        .iter()
        .filter(|change| **change != SuggestedChange::Uuids)
        .map(SuggestedChange::to_string);
    Err(Refusal::new(RefusalReason::NoCapacity, message).with_hints(hints))
}

/// Adapts a message of the core to one machine and one container: neither needs a name, and there are no pods.
fn of_this_machine(text: &str) -> String {
    let named = format!("container {CONTAINER}");
    let text = text.trim_start_matches(&format!("{named}: "));
    let text = text.strip_prefix(&named).map_or_else(|| text.to_string(), |rest| format!("the share{rest}"));
    text.replace("has a model that the pod excludes", "is not of a requested model")
}

/// Removes the parts of a message about excluded GPUs, unless nothing else is left.
fn without_others(text: &str) -> String {
    let parts: Vec<&str> = text.split("; ").filter(|part| !part.ends_with("is excluded by UUID")).collect();
    if parts.is_empty() { text.into() } else { parts.join("; ") }
}

fn pod_id(name: &str) -> PodId {
    PodId { uid: name.into(), namespace: "local".into(), name: name.into() }
}

/// Describes granted shares: `4 GiB and 30 % of GPU 0`.
pub fn describe_shares(node: &Node, shares: &[Share]) -> String {
    let place =
        |share: &Share| node.gpu_index(&share.gpu).map_or_else(|| share.gpu.to_string(), |at| at.to_string());
    let gpus: Vec<String> = shares.iter().map(place).collect();
    let gpus = if gpus.len() == 1 {
        format!("GPU {}", gpus[0])
    } else {
        format!("each of GPUs {}", gpus.join(", "))
    };
    let Some(share) = shares.first() else { return "nothing".into() };
    if share.whole {
        return format!("all of {gpus}");
    }
    let memory = share.memory_bytes.map_or_else(|| "all memory".to_string(), |memory| memory.to_string());
    match share.cores {
        Some(cores) => format!("{memory} and {cores} of {gpus}"),
        None => format!("{memory} of {gpus}"),
    }
}

/// Describes an ask: `4 GiB and 30 % of 1 GPU`.
pub fn describe_ask(ask: &PodAsk) -> String {
    let Some(Ask { want: WantedGpus { count, share }, .. }) = ask.asks.first() else {
        return "nothing".into();
    };
    let gpus = if *count == 1 { "1 GPU".to_string() } else { format!("each of {count} GPUs") };
    if share.whole {
        return format!("all of {gpus}");
    }
    let memory = match share.memory {
        MemoryAsk::Exactly(bytes) | MemoryAsk::AtMost(bytes) => bytes.to_string(),
        MemoryAsk::Percent(percent) => format!("{percent} % of the memory"),
        MemoryAsk::All | MemoryAsk::Unlimited => "all the memory".into(),
    };
    match share.cores {
        CoresAsk::Exactly(cores) => format!("{memory} and {cores} of the time of {gpus}"),
        CoresAsk::Uncounted | CoresAsk::Slots(_) => format!("{memory} of {gpus}"),
    }
}

#[cfg(test)]
mod tests;
