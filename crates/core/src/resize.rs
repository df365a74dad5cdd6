//! The annotation `partage.dev/resize`, which resizes the shares of a running pod.
//!
//! ```text
//! memory=6Gi, cores=40                     if one container has shares
//! train: memory=6Gi; serve: cores=10       by container
//! ```
//!
//! The amounts apply to each share of the container. Amounts that are not set stay the same. A share of a whole GPU cannot be
//! resized.

use crate::dialect::asks::{MAX_MEMORY, MIN_MEMORY};
use crate::model::{Bytes, ContainerName, Cores, PodGrant};
use crate::quantity::Quantity;
use crate::truncate;
use std::collections::BTreeSet;

/// The annotation that requests a resize.
pub const ANNOTATION: &str = "partage.dev/resize";
/// The smallest share of compute that a region can express, in thousandths of a percent.
const MIN_CORES: u32 = 10;
/// Maximum length of the annotation in bytes.
const MAX_ANNOTATION_BYTES: usize = 4096;

/// Why a resize is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ResizeError(String);

/// New amounts for the shares of one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResizeRequest {
    /// Name of the container; `None` for the only container with shares.
    pub container: Option<ContainerName>,
    /// Memory of each of its shares.
    pub memory: Option<Bytes>,
    /// Compute of each of its shares.
    pub cores: Option<Cores>,
}

/// Parses the text of the annotation.
pub fn read(text: &str) -> Result<Vec<ResizeRequest>, ResizeError> {
    if text.len() > MAX_ANNOTATION_BYTES {
        return Err(ResizeError(format!(
            "{} bytes are too long: the maximum is {MAX_ANNOTATION_BYTES}",
            text.len()
        )));
    }
    let requests: Vec<ResizeRequest> = text
        .split(';')
        .map(str::trim)
        .filter(|part| !part.is_empty())
        .map(parse_request)
        .collect::<Result<_, _>>()?;
    if requests.is_empty() {
        return Err(ResizeError("no amount: write memory=6Gi, cores=40 or one of the two".into()));
    }
    let mut seen = BTreeSet::new();
    if let Some(duplicate) = requests.iter().find(|request| !seen.insert(&request.container)) {
        let name = duplicate
            .container
            .as_ref()
            .map_or("the container".into(), |name| format!("container {}", truncate::shorten(name.as_str())));
        return Err(ResizeError(format!("{name} is named twice")));
    }
    Ok(requests)
}

/// Parses the amounts of one container.
fn parse_request(text: &str) -> Result<ResizeRequest, ResizeError> {
    let (container, amounts) = match text.split_once(':') {
        Some((container, amounts)) => (Some(container.trim()), amounts),
        None => (None, text),
    };
    if container.is_some_and(str::is_empty) {
        return Err(ResizeError(format!(
            "no container name before the colon in \"{}\"",
            truncate::shorten(text)
        )));
    }
    let mut change =
        ResizeRequest { container: container.map(ContainerName::from), memory: None, cores: None };
    for amount in amounts.split([',', ' ', '\n', '\t']).filter(|part| !part.is_empty()) {
        let wrong = |why: String| ResizeError(format!("\"{}\": {why}", truncate::shorten(amount)));
        let (key, value) =
            amount.split_once('=').ok_or_else(|| wrong("write memory=6Gi or cores=40".into()))?;
        let is_duplicate = match key {
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
                        "more memory than any GPU has: write {MAX_MEMORY} or less, with its unit, as in 6Gi"
                    )));
                }
                change.memory.replace(Bytes(bytes)).is_some()
            }
            "cores" => {
                let cores: Cores = value.parse().map_err(|error| wrong(format!("{error}")))?;
                if cores.as_millipercent() < MIN_CORES {
                    let min =
                        Cores::millipercent(MIN_CORES).map_or_else(String::new, |cores| cores.to_string());
                    return Err(wrong(format!(
                        "the smallest share of compute is {min} of one GPU: write a percentage from there to 100"
                    )));
                }
                change.cores.replace(cores).is_some()
            }
            _ => return Err(wrong("only memory and cores can be changed".into())),
        };
        if is_duplicate {
            return Err(wrong(format!("{key} is set twice")));
        }
    }
    match (change.memory, change.cores) {
        (None, None) => Err(ResizeError(format!(
            "\"{}\" has no amount: write memory=6Gi or cores=40",
            truncate::shorten(text)
        ))),
        _ => Ok(change),
    }
}

/// Returns the grant with the new amounts. The caller checks whether the GPUs have enough capacity.
pub fn apply(grant: &PodGrant, changes: &[ResizeRequest]) -> Result<PodGrant, ResizeError> {
    let mut new = grant.clone();
    for change in changes {
        let mut named: Vec<_> = match &change.container {
            Some(name) => new.grants.iter_mut().filter(|one| one.container == *name).collect(),
            None => new.grants.iter_mut().filter(|one| !one.init).collect(),
        };
        let one = match (named.as_mut_slice(), &change.container) {
            ([one], _) => one,
            ([], Some(name)) => {
                return Err(ResizeError(format!(
                    "container {} has no share",
                    truncate::shorten(name.as_str())
                )));
            }
            ([], None) => return Err(ResizeError("the pod has no share".into())),
            _ => {
                return Err(ResizeError(
                    "several containers have shares: name one, as in main: memory=6Gi".into(),
                ));
            }
        };
        for share in &mut one.shares {
            if share.whole {
                return Err(ResizeError(format!(
                    "container {} has a whole GPU, which cannot be resized",
                    one.container
                )));
            }
            if let Some(memory) = change.memory {
                if share.memory_bytes.is_none() {
                    return Err(ResizeError(format!(
                        "container {} has no memory limit, and none can be added while the pod runs: delete the pod and set a limit",
                        one.container
                    )));
                }
                share.memory_bytes = Some(memory);
            }
            if let Some(cores) = change.cores {
                share.cores = Some(cores);
                // A ceiling below the guaranteed compute would make the guarantee void.
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
    fn single_container_needs_no_name() {
        let new = resized(&grant(&[("fetch", true), ("main", false)]), "memory=6Gi, cores=40").unwrap();
        assert_eq!(new.grants[1].shares[0].memory_bytes, Some(Bytes(6 << 30)));
        assert_eq!(new.grants[1].shares[0].cores, Cores::percent(40));
        assert_eq!(
            new.grants[0],
            grant(&[("fetch", true)]).grants[0],
            "an init container is resized only by its name"
        );
    }

    #[test]
    fn several_containers_are_resized_by_name() {
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
    fn invalid_resizes_are_refused() {
        let one = grant(&[("main", false)]);
        for (text, words) in [
            ("", "no amount"),
            ("6Gi", "write memory=6Gi or cores=40"),
            ("gpu=2", "only memory and cores can be changed"),
            ("memory=6Gi memory=7Gi", "memory is set twice"),
            ("memory=0", "\"memory=0\": the smallest share of memory is 1 MiB"),
            (
                "memory=1",
                "\"memory=1\": the smallest share of memory is 1 MiB: write that or more, with its unit",
            ),
            ("memory=1048575", "the smallest share of memory is 1 MiB"),
            ("memory=9223372036854775807", "\"memory=9223372036854775807\": more memory than any GPU has"),
            ("memory=9223372036854775808", "\"9223372036854775808\" is larger than"),
            ("memory=-1", "\"memory=-1\""),
            ("cores=101", "\"cores=101\""),
            ("cores=0", "\"cores=0\": the smallest share of compute is 0.01 % of one GPU"),
            ("cores=0.005", "\"cores=0.005\": the smallest share of compute is 0.01 % of one GPU"),
            ("cores=0.0105", "at most three decimals"),
            ("other: cores=1", "container other has no share"),
            ("main:", "has no amount"),
            (": cores=1", "no container name"),
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
        fn arbitrary_text_never_panics(text in ".{0,300}") {
            let _ = resized(&grant(&[("main", false)]), &text);
        }

        #[test]
        fn memory_and_cores_are_parsed(memory in 1_u64 << 20..=1 << 40, cores in 1..=100_u32) {
            let changes = read(&format!("main: memory={memory}, cores={cores}")).unwrap();
            let wanted = ResizeRequest { container: Some("main".into()), memory: Some(Bytes(memory)), cores: Cores::percent(cores) };
            prop_assert_eq!(changes, [wanted]);
        }
    }
}
