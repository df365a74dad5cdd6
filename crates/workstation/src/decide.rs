//! Who gets what: the core's allocator on one machine, under the settings' rules. Pure: no file, no clock.

use crate::settings::{DefaultShare, Settings};
use crate::users::Who;
use crate::wire::{Change, Mode, RunRequest};
use partage_core::explain::Change as Suggested;
use partage_core::ledger::{Ledger, LedgerTime, Statement};
use partage_core::model::{
    Ask, Bytes, Constraints, ContainerRole, Cores, CoresAsk, GpuUuid, Grant, MAX_GPUS_PER_CONTAINER,
    MemoryAsk, Node, Oversubscription, PodAsk, PodGrant, PodId, Selector, Share, ShareAsk, WantedGpus,
};
use partage_core::place::{HostUsage, PolicyEngine};
use partage_enforce::placing::NoPlacement;
use partage_enforce::refusal::{Refusal, RefusalReason};
use std::fmt::Write;

/// Everything is for the one container that a share is to the core.
const CONTAINER: &str = "share";

/// What somebody holds.
#[derive(Clone, Debug)]
pub struct Held<'a> {
    /// The name of the share.
    pub name: &'a str,
    /// Whose it is.
    pub who: &'a Who,
    /// What it is.
    pub shares: &'a [Share],
}

/// What a request asks for, in the core's words.
pub fn ask(request: &RunRequest, default: &DefaultShare) -> Result<PodAsk, Refusal> {
    let wrong = |message: &str| Err(Refusal::new(RefusalReason::Invalid, message));
    let sized = request.memory.is_some() || request.memory_percent.is_some() || request.cores.is_some();
    if request.memory.is_some() && request.memory_percent.is_some() {
        return wrong("memory is asked both as an amount and as a percentage: leave one out");
    }
    if request.whole && sized {
        return wrong("a whole GPU is all of it: leave out the memory and the cores, or --whole");
    }
    if request.whole && request.mode.is_some() {
        return wrong("a whole GPU is shared with nobody: leave out the mode, or --whole");
    }
    if request.whole && request.oversubscribe {
        return wrong("a whole GPU has no memory limit to exceed: leave out --oversubscribe, or --whole");
    }
    let count = request.gpus.unwrap_or(1);
    if !(1..=MAX_GPUS_PER_CONTAINER).contains(&count) {
        return wrong(&format!("{count} GPUs cannot be asked for: ask for 1 to {MAX_GPUS_PER_CONTAINER}"));
    }
    if request.memory_percent.is_some_and(|percent| !(1..=100).contains(&percent)) {
        return wrong("the memory percentage is from 1 to 100");
    }
    if request.memory.is_some_and(|memory| memory.0 < 1 << 20) {
        return wrong("less than 1 MiB of memory is of no use: ask for more, such as 4Gi or 500Mi");
    }
    if request.cores == Some(Cores::NONE) {
        return wrong(
            "0 % of a GPU is nothing: ask for 1 to 100, or leave the cores out to be promised none",
        );
    }
    let (memory, cores, mode) = match sized || request.whole {
        true => (request.memory, request.cores, request.mode),
        false => (default.memory, default.cores, request.mode.or(default.mode)),
    };
    if mode == Some(Mode::Hard) && cores.is_none() {
        return wrong("hard mode ends compute at what was promised, and no cores are asked for: add --cores");
    }
    let memory = match (memory, request.memory_percent) {
        (Some(memory), _) => MemoryAsk::Exactly(memory),
        (None, Some(percent)) => MemoryAsk::Percent(percent),
        (None, None) => MemoryAsk::All,
    };
    let part = ShareAsk {
        memory,
        cores: match (request.whole, cores) {
            (true, _) => CoresAsk::Exactly(Cores::WHOLE),
            (false, Some(cores)) => CoresAsk::Exactly(cores),
            (false, None) => CoresAsk::Uncounted,
        },
        whole: request.whole,
        ceiling: ceiling(mode, request.whole, cores),
    };
    let want = WantedGpus { count, part };
    Ok(PodAsk {
        asks: vec![Ask { container: CONTAINER.into(), role: ContainerRole::App, want }],
        constraints: Constraints {
            models: Selector { only: request.models.clone(), never: Vec::new() },
            ..Constraints::default()
        },
        oversubscribe: request.oversubscribe,
        ..PodAsk::default()
    })
}

/// How far compute may go: idle time is lent, if nobody says otherwise.
fn ceiling(mode: Option<Mode>, whole: bool, cores: Option<Cores>) -> Option<Cores> {
    (mode != Some(Mode::Hard) && !whole && cores.is_some()).then_some(Cores::WHOLE)
}

/// Decides for one who asks.
pub fn place(
    node: &Node,
    held: &[Held<'_>],
    settings: &Settings,
    who: &Who,
    ask: &PodAsk,
) -> Result<Vec<Share>, Refusal> {
    let mut ask = ask.clone();
    ask.constraints.policy = Some(settings.policy);
    may_oversubscribe(settings, &ask)?;
    admit(node, held, settings, who, &mut ask)?;
    let shares = fit(ledger_of(node, held).statement(), node, held, settings, who, &ask)?;
    within_rule(held, settings, who, &shares)?;
    Ok(shares)
}

/// Refuses an ask for more memory than the limit where the settings do.
fn may_oversubscribe(settings: &Settings, ask: &PodAsk) -> Result<(), Refusal> {
    if !ask.oversubscribe || settings.oversubscribe == Oversubscription::Allowed {
        return Ok(());
    }
    let message = "memory beyond the limit is refused on this machine (oversubscribe: refused in its settings): leave out \
                   --oversubscribe and ask for as much --memory as the program needs";
    Err(Refusal::new(RefusalReason::NotAllowed, message))
}

/// Decides for a share that wants to be another size, where it is.
pub fn resize(
    node: &Node,
    held: &[Held<'_>],
    settings: &Settings,
    name: &str,
    change: &Change,
) -> Result<Vec<Share>, Refusal> {
    let wrong = |message: String| Refusal::new(RefusalReason::Invalid, message);
    let Some(own) = held.iter().find(|held| held.name == name) else {
        return Err(Refusal::new(RefusalReason::NotFound, format!("there is no share called {name}")));
    };
    let Some(first) = own.shares.first() else {
        return Err(wrong(format!("{name} has no GPU")));
    };
    if first.whole {
        return Err(wrong(format!(
            "{name} has whole GPUs, which have no size: stop it and run it again with --memory and --cores"
        )));
    }
    let (cores, mode) = match (change.cores, change.mode) {
        (None, None) => (first.cores, None),
        (cores, mode) => (cores.or(first.cores), mode),
    };
    // What was hard stays hard, unless it is told otherwise.
    let hard_now = first.cores.is_some() && first.ceiling.is_none();
    let mode = mode.or(hard_now.then_some(Mode::Hard));
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
    let mut ask = ask(&request, &DefaultShare::default())?;
    ask.constraints.uuids.only = own.shares.iter().map(|share| share.gpu.to_string()).collect();
    let mut ledger = ledger_of(node, held);
    let mut statement = ledger.statement();
    statement.release(&id(name).uid);
    let others: Vec<Held<'_>> = held.iter().filter(|held| held.name != name).cloned().collect();
    let mut shares = fit(statement, node, &others, settings, own.who, &ask)?;
    within_rule(&others, settings, own.who, &shares)?;
    // In the order that the region has them.
    shares.sort_by_key(|share| own.shares.iter().position(|own| own.gpu == share.gpu));
    Ok(shares)
}

/// What the rules say before anything is looked for.
fn admit(
    node: &Node,
    held: &[Held<'_>],
    settings: &Settings,
    who: &Who,
    ask: &mut PodAsk,
) -> Result<(), Refusal> {
    let no = |message: String| Err(Refusal::new(RefusalReason::NotAllowed, message));
    let rule = match settings.rule(who) {
        Ok(Some(rule)) => rule,
        Ok(None) => return Ok(()),
        Err(()) => {
            return no(
                "the settings of this machine name nobody like you under users: ask who keeps it".into()
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
                rule.who,
                has_already(&has)
            ));
        }
    }
    if let Some(most) = rule.gpus.filter(|most| want.count > *most) {
        return no(format!("{} may have {most} GPUs in one share, asked are {}", rule.who, want.count));
    }
    if rule.whole == Some(false) && want.part.whole {
        return no(format!(
            "{} may not have a GPU alone: ask for a part with --memory and --cores",
            rule.who
        ));
    }
    if let Some(only) = &rule.only {
        let allowed =
            node.gpus.iter().enumerate().filter(|(at, gpu)| only.iter().any(|word| word.names(*at, gpu)));
        ask.constraints.uuids.only = allowed.map(|(_, gpu)| gpu.uuid.to_string()).collect();
        if ask.constraints.uuids.only.is_empty() {
            let words: Vec<String> = only.iter().map(ToString::to_string).collect();
            return no(format!("{} may use {} only, and there is none here", rule.who, words.join(", ")));
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

/// What the rules say about the sum of all that somebody would hold.
fn within_rule(held: &[Held<'_>], settings: &Settings, who: &Who, shares: &[Share]) -> Result<(), Refusal> {
    let Ok(Some(rule)) = settings.rule(who) else { return Ok(()) };
    let theirs = held.iter().filter(|held| held.who.uid == who.uid).flat_map(|held| held.shares);
    let no = |most: String, what: String, has: String, asked: String| {
        let message =
            format!("{} may have {most} of {what} in all, has {has} and asks for {asked}", rule.who);
        let refusal = Refusal::new(RefusalReason::NotAllowed, message);
        Err(refusal.with_hints(["ask for less, or stop another share".into()]))
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
        let sum = |shares: &mut dyn Iterator<Item = &Share>| -> u64 {
            shares.filter_map(|share| share.cores).map(|cores| u64::from(cores.as_millipercent())).sum()
        };
        let (has, asked) = (sum(&mut theirs.clone()), sum(&mut shares.iter()));
        let percent = |milli: u64| format!("{} %", milli.div_ceil(1000));
        if has + asked > u64::from(most) * 1000 {
            return no(format!("{most} %"), "GPU time".into(), percent(has), percent(asked));
        }
    }
    Ok(())
}

/// What is kept of a GPU for others than the one who asks.
struct Kept {
    share: Share,
    words: String,
}

fn kept(node: &Node, held: &[Held<'_>], settings: &Settings, who: &Who) -> Vec<Kept> {
    let others = settings.reservations.iter().filter(|reservation| !reservation.whom.includes(who));
    let kept = others.filter_map(|reservation| {
        let gpu = reservation.gpu(node)?;
        let (memory, cores) = left(reservation, &gpu, held);
        if memory == Bytes::ZERO && cores == Cores::NONE {
            return None;
        }
        let words = format!(
            "{} of {} {} kept for {}",
            amounts(memory, cores),
            reservation.gpu,
            is(memory, cores),
            reservation.whom
        );
        let share =
            Share { gpu, memory_bytes: Some(memory), cores: Some(cores), ceiling: None, whole: false };
        Some(Kept { share, words })
    });
    kept.collect()
}

fn is(memory: Bytes, cores: Cores) -> &'static str {
    if memory != Bytes::ZERO && cores != Cores::NONE { "are" } else { "is" }
}

fn amounts(memory: Bytes, cores: Cores) -> String {
    match (memory, cores) {
        (memory, Cores::NONE) => memory.to_string(),
        (Bytes::ZERO, cores) => cores.to_string(),
        (memory, cores) => format!("{memory} and {cores}"),
    }
}

/// What is left of a reservation: what those it is for already hold there counts as theirs.
fn left(reservation: &crate::settings::Reservation, gpu: &GpuUuid, held: &[Held<'_>]) -> (Bytes, Cores) {
    let theirs = held.iter().filter(|held| reservation.whom.includes(held.who)).flat_map(|held| held.shares);
    let there: Vec<&Share> = theirs.filter(|share| share.gpu == *gpu).collect();
    let memory = there.iter().filter_map(|share| share.memory_bytes).map(|bytes| bytes.0).sum::<u64>();
    let cores = there.iter().filter_map(|share| share.cores).map(Cores::as_millipercent).sum::<u32>();
    let left = reservation.cores.unwrap_or(Cores::NONE).as_millipercent().saturating_sub(cores);
    let left_memory = Bytes(reservation.memory.unwrap_or(Bytes::ZERO).0.saturating_sub(memory));
    (left_memory, Cores::millipercent(left).unwrap_or(Cores::NONE))
}

/// Memory of a GPU that is kept for somebody and not in use by them.
pub fn reserved(node: &Node, held: &[Held<'_>], settings: &Settings, gpu: &GpuUuid) -> Bytes {
    let here = settings.reservations.iter().filter(|reservation| reservation.gpu(node).as_ref() == Some(gpu));
    Bytes(here.map(|reservation| left(reservation, gpu, held).0.0).sum())
}

/// Returns a ledger of what is held on this machine.
fn ledger_of(node: &Node, held: &[Held<'_>]) -> Ledger {
    let grants = held.iter().map(|held| (id(held.name), grant_of(node, held.shares), HostUsage::default()));
    Ledger::rebuild([node.clone()], grants)
}

/// Returns a grant of these shares, all for the one container.
fn grant_of(node: &Node, shares: &[Share]) -> PodGrant {
    let grants = vec![Grant { container: CONTAINER.into(), init: false, shares: shares.to_vec() }];
    PodGrant { node: node.name.clone(), grants }
}

/// Finds shares for an ask beside what the statement's ledger holds and what is reserved for others.
///
/// The statement is only tried: it is rolled back, and the caller decides what becomes of the shares.
fn fit(
    mut statement: Statement<'_>,
    node: &Node,
    held: &[Held<'_>],
    settings: &Settings,
    who: &Who,
    ask: &PodAsk,
) -> Result<Vec<Share>, Refusal> {
    let kept = kept(node, held, settings, who);
    for (at, kept) in kept.iter().enumerate() {
        // Names of shares contain no space, so this one is free.
        let name = id(&format!("kept {at}"));
        statement.confirm(name, grant_of(node, std::slice::from_ref(&kept.share)), HostUsage::default());
    }
    let policies = PolicyEngine::new(settings.policy);
    let granted = statement.place(id("new share"), ask, &policies, LedgerTime(u64::MAX)).ok();
    if let Some(grant) = granted.and_then(|grant| grant.grants.into_iter().next()) {
        return Ok(grant.shares);
    }
    let refused = NoPlacement::explain(&statement.ledger().snapshot(), ask);
    let mut message = without_others(&of_this_machine(&refused.why));
    for kept in &kept {
        // A String takes everything.
        let _ = write!(message, "; {}", kept.words);
    }
    // Nobody named GPUs: the rules did, or the share is there.
    let hints =
        refused.changes.iter().filter(|change| **change != Suggested::Uuids).map(Suggested::to_string);
    Err(Refusal::new(RefusalReason::NoCapacity, message).with_hints(hints))
}

/// The core's words, where there is one machine and one container: neither needs a name, and nobody has pods.
fn of_this_machine(text: &str) -> String {
    let named = format!("container {CONTAINER}");
    let text = text.trim_start_matches(&format!("{named}: "));
    let text = text.strip_prefix(&named).map_or_else(|| text.to_string(), |rest| format!("the share{rest}"));
    text.replace("is of a model the pod excludes", "is of another model than asked for")
}

/// Words about GPUs that were not looked at help nobody, unless there are no others.
fn without_others(text: &str) -> String {
    let parts: Vec<&str> = text.split("; ").filter(|part| !part.ends_with("is excluded by UUID")).collect();
    if parts.is_empty() { text.into() } else { parts.join("; ") }
}

fn id(name: &str) -> PodId {
    PodId { uid: name.into(), namespace: "local".into(), name: name.into() }
}

/// What was given, in words: `4 GiB and 30 % of GPU 0`.
pub fn words(node: &Node, shares: &[Share]) -> String {
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

/// What was asked, in words: `4 GiB and 30 % of 1 GPU`.
pub fn asked(ask: &PodAsk) -> String {
    let Some(Ask { want: WantedGpus { count, part }, .. }) = ask.asks.first() else {
        return "nothing".into();
    };
    let gpus = if *count == 1 { "1 GPU".to_string() } else { format!("each of {count} GPUs") };
    if part.whole {
        return format!("all of {gpus}");
    }
    let memory = match part.memory {
        MemoryAsk::Exactly(bytes) | MemoryAsk::AtMost(bytes) => bytes.to_string(),
        MemoryAsk::Percent(percent) => format!("{percent} % of the memory"),
        MemoryAsk::All | MemoryAsk::Unlimited => "all the memory".into(),
    };
    match part.cores {
        CoresAsk::Exactly(cores) => format!("{memory} and {cores} of the time of {gpus}"),
        CoresAsk::Uncounted | CoresAsk::Slots(_) => format!("{memory} of {gpus}"),
    }
}

#[cfg(test)]
mod tests;
