//! What one container writes, read amount by amount.

use super::super::Dialect;
use super::{dialect_of, gpushare, hami, native, nearest, volcano};
use crate::model::MAX_GPUS_PER_CONTAINER;
use crate::pod::{Container, Problem};
use crate::quantity::{Quantity, QuantityError};
use crate::quote::short;

/// An amount could not be understood; the problem is recorded.
#[derive(Debug)]
pub(super) struct Unclear;

/// The resource lines of one container, and where its problems go.
pub(super) struct Lines<'a> {
    container: &'a Container,
    /// Counts our own webhook added to carry an ask; they ask nothing themselves.
    carriers: &'a [String],
    problems: &'a mut Vec<Problem>,
}

impl<'a> Lines<'a> {
    pub(super) fn new(
        container: &'a Container,
        carriers: &'a [String],
        problems: &'a mut Vec<Problem>,
    ) -> Lines<'a> {
        Lines { container, carriers, problems }
    }

    /// The container whose lines these are.
    pub(super) fn container(&self) -> &'a Container {
        self.container
    }

    /// Every resource the author wrote.
    pub(super) fn resources(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        let carriers = self.carriers;
        self.container.resources().filter(move |name| !carriers.iter().any(|carrier| carrier == name))
    }

    /// Records a problem with one resource or annotation.
    pub(super) fn problem(&mut self, field: &str, message: impl AsRef<str>) -> Unclear {
        self.problems.push(Problem::of_container(&self.container.name, field, message));
        Unclear
    }

    /// A whole amount; absent where it is not written.
    pub(super) fn count(&mut self, resource: &str) -> Result<Option<u64>, Unclear> {
        match self.amount(resource) {
            None => Ok(None),
            Some(Ok(count)) => Ok(Some(count)),
            Some(Err(error)) => Err(self.problem(resource, error.to_string() + &advice(&error))),
        }
    }

    /// A number of GPUs.
    pub(super) fn gpus(&mut self, resource: &str) -> Result<Option<u32>, Unclear> {
        let count = self.count(resource)?;
        count.map(|count| self.few_enough(resource, count)).transpose()
    }

    /// Returns the number, unless it is more GPUs than one container can have.
    pub(super) fn few_enough(&mut self, field: &str, count: u64) -> Result<u32, Unclear> {
        match u32::try_from(count) {
            Ok(count @ ..=MAX_GPUS_PER_CONTAINER) => Ok(count),
            _ => Err(self.problem(
                field,
                format!("{count} GPUs are more than one container can have: ask for {MAX_GPUS_PER_CONTAINER} at the most"),
            )),
        }
    }

    /// A percentage of one GPU from `least` to 100.
    pub(super) fn percent(&mut self, resource: &str, least: u64) -> Result<Option<u32>, Unclear> {
        match self.count(resource)? {
            Some(percent) if !(least..=100).contains(&percent) => Err(self.problem(
                resource,
                format!("{percent} is not a part of one GPU: write 1 to 100, in percent, or leave it out"),
            )),
            percent => Ok(percent.map(|percent| percent as u32)),
        }
    }

    /// As written, for suggestions.
    pub(super) fn text(&self, resource: &str) -> &'a str {
        self.container.amount(resource).unwrap_or_default()
    }

    /// The dialects this container asks in, each once. An amount of zero asks nothing.
    pub(super) fn dialects(&self) -> Vec<Dialect> {
        let mut dialects: Vec<Dialect> = self.asking().filter_map(dialect_of).collect();
        dialects.sort_unstable();
        dialects.dedup();
        dialects
    }

    pub(super) fn refuse_several_dialects(&mut self) {
        let spoken: Vec<String> = self.dialects().into_iter().map(|dialect| self.spelling(dialect)).collect();
        let message =
            format!("this container asks in {} dialects, {}: keep one", spoken.len(), spoken.join(" and "));
        self.problem("resources.limits", message);
    }

    /// Extended resources are the same in requests and limits, or Kubernetes refuses the pod.
    pub(super) fn check_requests(&mut self) {
        let asked: Vec<&str> = self.resources().filter(|resource| dialect_of(resource).is_some()).collect();
        for resource in asked {
            let (limits, requests) = (&self.container.limits, &self.container.requests);
            let Some(request) = requests.get(resource) else { continue };
            let message = match limits.get(resource) {
                None => format!(
                    "requested but not limited, which Kubernetes refuses: write {resource}: {request} under limits too",
                    resource = short(resource),
                    request = short(request),
                ),
                Some(limit) if !same(request, limit) => format!(
                    "the request is {request}, the limit {limit}, and Kubernetes wants them equal: write one amount, or the limit only",
                    request = short(request),
                    limit = short(limit),
                ),
                Some(_) => continue,
            };
            self.problem(resource, message);
        }
    }

    /// Resources that look like a dialect's and are none.
    pub(super) fn check_names(&mut self) {
        let unknown: Vec<&str> = self.resources().filter(|resource| dialect_of(resource).is_none()).collect();
        for resource in unknown {
            if resource.starts_with(hami::MIG) {
                self.problem(
                    resource,
                    format!(
                        "MIG devices are not shared by Partage (yet): ask for a part of a GPU, like {}: 1 with {}",
                        hami::GPU,
                        hami::MEMORY
                    ),
                );
            } else if resource == hami::TIME_SLICED {
                let (gpu, memory) = (hami::GPU, hami::MEMORY);
                self.problem(
                    resource,
                    format!("this is NVIDIA's name for time-slicing, which has no limits: ask for a part of a GPU, like {gpu}: 1 with {memory}"),
                );
            } else if resource == hami::PRIORITY {
                self.problem(
                    resource,
                    "priorities among the shares of one GPU are not supported yet: leave it out",
                );
            } else if let Some(meant) = nearest::meant(resource) {
                self.problem(resource, format!("Partage knows no such resource: did you mean {meant}?"));
            }
        }
    }

    /// A carrier is as large as the ask it carries, or the device plugin hands out something else.
    pub(super) fn check_carriers(&mut self, asked: u32) {
        const COUNTS: [&str; 4] = [native::GPU, gpushare::COUNT, volcano::NUMBER, hami::GPU];
        // Beside an ask that says no count, any count will do.
        let exactly = asked > 1 || self.resources().any(|resource| COUNTS.contains(&resource));
        for carrier in self.carriers {
            let Some(count) = self.container.count(carrier) else { continue };
            let wrong = match count {
                Err(error) => error.to_string(),
                Ok(count) if exactly && count != u64::from(asked) => {
                    format!("carries an ask for {asked} and is {count}: write {asked}")
                }
                Ok(0) => "carries an ask and is 0: write 1".to_string(),
                Ok(_) => continue,
            };
            self.problem(carrier, wrong);
        }
    }

    /// A carrier carries somebody else's ask; there must be one.
    pub(super) fn check_carried(&mut self) {
        for carrier in self.carriers {
            if self.container.amount(carrier).is_some() {
                self.problem(
                    native::CARRIER,
                    format!("{carrier} is marked as carrying another ask, but there is no other: unmark it"),
                );
            }
        }
    }

    fn spelling(&self, dialect: Dialect) -> String {
        let resources = self.resources().filter(|resource| dialect_of(resource) == Some(dialect));
        let resources: Vec<String> = resources.map(short).collect();
        format!("{dialect} ({})", resources.join(", "))
    }

    /// The resources that are not plainly zero.
    fn asking(&self) -> impl Iterator<Item = &'a str> {
        self.resources().filter(|resource| !matches!(self.amount(resource), Some(Ok(0))))
    }

    fn amount(&self, resource: &str) -> Option<Result<u64, QuantityError>> {
        if self.carriers.iter().any(|carrier| carrier == resource) {
            return None;
        }
        self.container.count(resource)
    }
}

fn same(request: &str, limit: &str) -> bool {
    match (request.parse::<Quantity>(), limit.parse::<Quantity>()) {
        (Ok(request), Ok(limit)) => request == limit,
        // Unreadable amounts are reported where they are read.
        _ => true,
    }
}

fn advice(error: &QuantityError) -> String {
    match error {
        QuantityError::NotWhole(_) => {
            ": write a whole number, Kubernetes does not split this resource".to_string()
        }
        QuantityError::Negative(_) => ": write 1 or more".to_string(),
        QuantityError::UnknownSuffix { text, suffix } => {
            let number = text.strip_suffix(suffix.as_str()).unwrap_or_default();
            match suffix.to_ascii_lowercase().trim_end_matches('b') {
                unit @ ("ki" | "mi" | "gi" | "ti" | "pi" | "ei") => {
                    let (first, _) = unit.split_at(1);
                    format!(": did you mean {number}{}i?", first.to_ascii_uppercase())
                }
                "k" => format!(": did you mean {number}k or {number}Ki?"),
                unit @ ("m" | "g" | "t") => {
                    let unit = unit.to_ascii_uppercase();
                    format!(": did you mean {number}{unit} or {number}{unit}i?")
                }
                _ => String::new(),
            }
        }
        _ => String::new(),
    }
}
