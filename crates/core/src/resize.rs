//! `partage.dev/resize`: other amounts for a pod that runs, written on it by who may change it.
//!
//! ```text
//! memory=6Gi, cores=40                     where one container has GPUs
//! train: memory=6Gi; serve: cores=10       by container
//! ```
//!
//! Each of a container's shares gets the amounts; what is not named stays. A share of a whole GPU has no amounts to change.

use crate::dialect::asks::{MAX_MEMORY, MIN_MEMORY};
use crate::model::{Bytes, ContainerName, Cores, PodGrant};
use crate::quantity::Quantity;
use crate::quote;
use std::collections::BTreeSet;

/// The annotation.
pub const ANNOTATION: &str = "partage.dev/resize";
/// The smallest share of compute that a region can express, in thousandths of a percent.
const MIN_CORES: u32 = 10;
/// Nobody writes as much by hand.
const LONGEST: usize = 4096;

/// Why a wish for other amounts cannot be fulfilled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ResizeError(String);

/// Other amounts for one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The container; absent = the only one with GPUs.
    pub container: Option<ContainerName>,
    /// Memory of each of its shares.
    pub memory: Option<Bytes>,
    /// Compute of each of its shares.
    pub cores: Option<Cores>,
}

/// Reads the annotation's text.
pub fn read(text: &str) -> Result<Vec<Change>, ResizeError> {
    if text.len() > LONGEST {
        return Err(ResizeError(format!("{} bytes are too many: at most {LONGEST}", text.len())));
    }
    let changes: Vec<Change> = text
        .split(';')
        .map(str::trim)
        .filter(|part| !part.is_empty())
        .map(change)
        .collect::<Result<_, _>>()?;
    if changes.is_empty() {
        return Err(ResizeError("nothing is named: write memory=6Gi, cores=40 or one of the two".into()));
    }
    let mut seen = BTreeSet::new();
    if let Some(twice) = changes.iter().find(|change| !seen.insert(&change.container)) {
        let whom = twice
            .container
            .as_ref()
            .map_or("the container".into(), |name| format!("container {}", quote::short(name.as_str())));
        return Err(ResizeError(format!("{whom} is named twice")));
    }
    Ok(changes)
}

fn change(text: &str) -> Result<Change, ResizeError> {
    let (container, amounts) = match text.split_once(':') {
        Some((container, amounts)) => (Some(container.trim()), amounts),
        None => (None, text),
    };
    if container.is_some_and(str::is_empty) {
        return Err(ResizeError(format!("no container is named before the : of \"{}\"", quote::short(text))));
    }
    let mut change = Change { container: container.map(ContainerName::from), memory: None, cores: None };
    for amount in amounts.split([',', ' ', '\n', '\t']).filter(|part| !part.is_empty()) {
        let wrong = |why: String| ResizeError(format!("\"{}\": {why}", quote::short(amount)));
        let (key, value) =
            amount.split_once('=').ok_or_else(|| wrong("write memory=6Gi or cores=40".into()))?;
        let twice = match key {
            "memory" => {
                let bytes = value
                    .parse::<Quantity>()
                    .and_then(Quantity::to_count)
                    .map_err(|error| wrong(error.to_string()))?;
                if bytes < MIN_MEMORY.0 {
                    return Err(wrong(format!(
                        "the smallest share of memory is {MIN_MEMORY}: write that or more, with its unit, as in 6Gi"
                    )));
                }
                if bytes > MAX_MEMORY.0 {
                    return Err(wrong(format!(
                        "this is more memory than any GPU has: write {MAX_MEMORY} or less, with its unit, as in 6Gi"
                    )));
                }
                change.memory.replace(Bytes(bytes)).is_some()
            }
            "cores" => {
                let cores: Cores = value.parse().map_err(|error| wrong(format!("{error}")))?;
                if cores.as_millipercent() < MIN_CORES {
                    let least =
                        Cores::millipercent(MIN_CORES).map_or_else(String::new, |cores| cores.to_string());
                    return Err(wrong(format!(
                        "the smallest share of compute is {least} of one GPU: write a percentage from there to 100"
                    )));
                }
                change.cores.replace(cores).is_some()
            }
            _ => return Err(wrong("only memory and cores can be changed".into())),
        };
        if twice {
            return Err(wrong(format!("{key} is there twice")));
        }
    }
    match (change.memory, change.cores) {
        (None, None) => Err(ResizeError(format!(
            "\"{}\" names no amount: write memory=6Gi or cores=40",
            quote::short(text)
        ))),
        _ => Ok(change),
    }
}

/// The grant with other amounts. Whether its GPUs have room for them is not looked at here.
pub fn apply(grant: &PodGrant, changes: &[Change]) -> Result<PodGrant, ResizeError> {
    let mut new = grant.clone();
    for change in changes {
        let mut named: Vec<_> = match &change.container {
            Some(name) => new.grants.iter_mut().filter(|one| one.container == *name).collect(),
            None => new.grants.iter_mut().filter(|one| !one.init).collect(),
        };
        let one = match (named.as_mut_slice(), &change.container) {
            ([one], _) => one,
            ([], Some(name)) => {
                return Err(ResizeError(format!("container {} has no share", quote::short(name.as_str()))));
            }
            ([], None) => return Err(ResizeError("the pod has no share".into())),
            _ => {
                return Err(ResizeError(
                    "several containers have shares: write whose, as in main: memory=6Gi".into(),
                ));
            }
        };
        for share in &mut one.shares {
            if share.whole {
                return Err(ResizeError(format!(
                    "container {} has its GPU whole: there is nothing to change",
                    one.container
                )));
            }
            if let Some(memory) = change.memory {
                if share.memory_bytes.is_none() {
                    return Err(ResizeError(format!(
                        "container {} has no memory limit, and beside it others count on that: delete the pod to have one",
                        one.container
                    )));
                }
                share.memory_bytes = Some(memory);
            }
            if let Some(cores) = change.cores {
                share.cores = Some(cores);
                // Who was promised more than it could reach would be promised nothing.
                share.ceiling = share.ceiling.map(|ceiling| ceiling.max(cores));
            }
        }
    }
    Ok(new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Grant, Share};
    use proptest::prelude::*;

    fn grant(containers: &[(&str, bool)]) -> PodGrant {
        let share = Share {
            gpu: "GPU-1".into(),
            memory_bytes: Some(Bytes(1 << 30)),
            cores: Cores::percent(30),
            ceiling: None,
            whole: false,
        };
        let grants = containers.iter().map(|(name, init)| Grant {
            container: (*name).into(),
            init: *init,
            shares: vec![share.clone()],
        });
        PodGrant { node: "n1".into(), grants: grants.collect() }
    }

    fn resized(grant: &PodGrant, text: &str) -> Result<PodGrant, String> {
        read(text).and_then(|changes| apply(grant, &changes)).map_err(|error| error.to_string())
    }

    #[test]
    fn one_container_need_not_be_named() {
        let new = resized(&grant(&[("fetch", true), ("main", false)]), "memory=6Gi, cores=40").unwrap();
        assert_eq!(new.grants[1].shares[0].memory_bytes, Some(Bytes(6 << 30)));
        assert_eq!(new.grants[1].shares[0].cores, Cores::percent(40));
        assert_eq!(
            new.grants[0],
            grant(&[("fetch", true)]).grants[0],
            "an init container is meant only by its name"
        );
    }

    #[test]
    fn containers_are_named_where_there_are_several() {
        let two = grant(&[("a", false), ("b", false)]);
        let new = resized(&two, "a: cores=10; b: memory=2Gi cores=20").unwrap();
        assert_eq!(
            (new.grants[0].shares[0].memory_bytes, new.grants[0].shares[0].cores),
            (Some(Bytes(1 << 30)), Cores::percent(10))
        );
        assert_eq!(
            (new.grants[1].shares[0].memory_bytes, new.grants[1].shares[0].cores),
            (Some(Bytes(2 << 30)), Cores::percent(20))
        );
        assert!(resized(&two, "cores=10").unwrap_err().starts_with("several containers have shares"));
    }

    #[test]
    fn what_cannot_be_is_refused_in_words() {
        let one = grant(&[("main", false)]);
        for (text, words) in [
            ("", "nothing is named"),
            ("6Gi", "write memory=6Gi or cores=40"),
            ("gpu=2", "only memory and cores can be changed"),
            ("memory=6Gi memory=7Gi", "memory is there twice"),
            ("memory=0", "\"memory=0\": the smallest share of memory is 1 MiB"),
            (
                "memory=1",
                "\"memory=1\": the smallest share of memory is 1 MiB: write that or more, with its unit",
            ),
            ("memory=1048575", "the smallest share of memory is 1 MiB"),
            (
                "memory=9223372036854775807",
                "\"memory=9223372036854775807\": this is more memory than any GPU has",
            ),
            ("memory=9223372036854775808", "\"9223372036854775808\" is larger than"),
            ("memory=-1", "\"memory=-1\""),
            ("cores=101", "\"cores=101\""),
            ("cores=0", "\"cores=0\": the smallest share of compute is 0.01 % of one GPU"),
            ("cores=0.005", "\"cores=0.005\": the smallest share of compute is 0.01 % of one GPU"),
            ("cores=0.0105", "at most three decimals"),
            ("other: cores=1", "container other has no share"),
            ("main:", "names no amount"),
            (": cores=1", "no container is named"),
            ("main: cores=1; main: cores=2", "container main is named twice"),
        ] {
            let error = resized(&one, text).expect_err(text);
            assert!(error.contains(words), "{text}: {error}");
        }
        for right in ["memory=1Mi", "memory=1048576", "memory=1Ti", "cores=0.01", "cores=100"] {
            assert!(resized(&one, right).is_ok(), "{right}");
        }
        let mut whole = one.clone();
        whole.grants[0].shares[0].whole = true;
        assert!(resized(&whole, "cores=1").unwrap_err().contains("whole"));
    }

    proptest! {
        #[test]
        fn any_text_is_a_change_or_words(text in ".{0,300}") {
            let _ = resized(&grant(&[("main", false)]), &text);
        }

        #[test]
        fn what_is_written_is_read(memory in 1_u64 << 20..=1 << 40, cores in 1..=100_u32) {
            let changes = read(&format!("main: memory={memory}, cores={cores}")).unwrap();
            let wanted = Change { container: Some("main".into()), memory: Some(Bytes(memory)), cores: Cores::percent(cores) };
            prop_assert_eq!(changes, [wanted]);
        }
    }
}
