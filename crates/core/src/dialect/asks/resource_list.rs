//! The resources of one container, with checks that are common to all dialects.

use super::super::Dialect;
use super::{carrier, dialect_of, did_you_mean, gpushare, hami, native};
use crate::model::MAX_GPUS_PER_CONTAINER;
use crate::pod::{ContainerManifest, Problem};
use crate::quantity::{Quantity, QuantityError};
use crate::truncate::shorten;

/// A request is unclear. The reason is already recorded as a problem.
#[derive(Debug)]
pub(super) struct UnclearAsk;

/// The resources of one container, and the list to which its problems are added.
pub(super) struct ResourceList<'a> {
    container: &'a ContainerManifest,
    /// Counts that an admission webhook added as carriers; they request nothing themselves.
    carriers: &'a [String],
    problems: &'a mut Vec<Problem>,
}

impl<'a> ResourceList<'a> {
    pub(super) fn new(
        container: &'a ContainerManifest,
        carriers: &'a [String],
        problems: &'a mut Vec<Problem>,
    ) -> ResourceList<'a> {
        ResourceList { container, carriers, problems }
    }

    /// Returns the container that has these resources.
    pub(super) fn container(&self) -> &'a ContainerManifest {
        self.container
    }

    /// Returns the names of all resources except carriers.
    pub(super) fn resources(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        let carriers = self.carriers;
        self.container.resources().filter(move |name| !carriers.iter().any(|carrier| carrier == name))
    }

    /// Records a problem with one resource or annotation.
    pub(super) fn problem(&mut self, field: &str, message: impl AsRef<str>) -> UnclearAsk {
        self.problems.push(Problem::of_container(&self.container.name, field, message));
        UnclearAsk
    }

    /// Returns the amount of a resource as a whole number, or `None` if it is absent.
    pub(super) fn count(&mut self, resource: &str) -> Result<Option<u64>, UnclearAsk> {
        match self.amount(resource) {
            None => Ok(None),
            Some(Ok(count)) => Ok(Some(count)),
            Some(Err(error)) => Err(self.problem(resource, error.to_string() + &advice(&error))),
        }
    }

    /// Returns the amount of a resource as a number of GPUs, at most [`MAX_GPUS_PER_CONTAINER`].
    pub(super) fn gpu_count(&mut self, resource: &str) -> Result<Option<u32>, UnclearAsk> {
        let count = self.count(resource)?;
        count.map(|count| self.check_gpu_count(resource, count)).transpose()
    }

    /// Returns the number, unless it is more GPUs than one container can have.
    pub(super) fn check_gpu_count(&mut self, field: &str, count: u64) -> Result<u32, UnclearAsk> {
        match u32::try_from(count) {
            Ok(count @ ..=MAX_GPUS_PER_CONTAINER) => Ok(count),
            _ => Err(self.problem(
                field,
                format!("{count} GPUs are more than one container can have: request at most {MAX_GPUS_PER_CONTAINER}"),
            )),
        }
    }

    /// Returns the amount of a resource as a percentage of one GPU, from `min` to 100.
    pub(super) fn percent(&mut self, resource: &str, min: u64) -> Result<Option<u32>, UnclearAsk> {
        match self.count(resource)? {
            Some(percent) if !(min..=100).contains(&percent) => Err(self.problem(
                resource,
                format!("{percent} is not a percentage of one GPU: write 1 to 100, or remove it"),
            )),
            percent => Ok(percent.map(|percent| percent as u32)),
        }
    }

    /// Returns the amount of a resource as written, for suggestions.
    pub(super) fn text(&self, resource: &str) -> &'a str {
        self.container.amount(resource).unwrap_or_default()
    }

    /// Returns the distinct dialects that this container uses. An amount of zero requests nothing.
    pub(super) fn dialects(&self) -> Vec<Dialect> {
        let mut dialects: Vec<Dialect> = self.requested().filter_map(dialect_of).collect();
        dialects.sort_unstable();
        dialects.dedup();
        dialects
    }

    /// Reports a container that uses several dialects.
    pub(super) fn refuse_several_dialects(&mut self) {
        let dialects: Vec<String> =
            self.dialects().into_iter().map(|dialect| self.describe_dialect(dialect)).collect();
        let message =
            format!("this container uses {} dialects, {}: keep one", dialects.len(), dialects.join(" and "));
        self.problem("resources.limits", message);
    }

    /// Reports requests that differ from limits: Kubernetes rejects such a pod, because the resources are extended ones.
    pub(super) fn check_requests(&mut self) {
        let asked: Vec<&str> = self.resources().filter(|resource| dialect_of(resource).is_some()).collect();
        for resource in asked {
            let (limits, requests) = (&self.container.limits, &self.container.requests);
            let Some(request) = requests.get(resource) else { continue };
            let message = match limits.get(resource) {
                None => format!(
                    "requested without a limit, which Kubernetes rejects: write {resource}: {request} under limits too",
                    resource = shorten(resource),
                    request = shorten(request),
                ),
                Some(limit) if !is_same_amount(request, limit) => format!(
                    "the request is {request} and the limit is {limit}, but Kubernetes requires them to be equal: write one amount, or only the limit",
                    request = shorten(request),
                    limit = shorten(limit),
                ),
                Some(_) => continue,
            };
            self.problem(resource, message);
        }
    }

    /// Reports resources that resemble those of a dialect but are unknown or unsupported.
    pub(super) fn check_names(&mut self) {
        let unknown: Vec<&str> = self.resources().filter(|resource| dialect_of(resource).is_none()).collect();
        for resource in unknown {
            if resource.starts_with(hami::MIG) {
                self.problem(
                    resource,
                    format!(
                        "MIG devices are not supported yet: request a share of a GPU, like {}: 1 with {}",
                        hami::GPU,
                        hami::MEMORY
                    ),
                );
            } else if resource == hami::TIME_SLICED {
                let (gpu, memory) = (hami::GPU, hami::MEMORY);
                self.problem(
                    resource,
                    format!("this resource is NVIDIA's time-slicing, which enforces no limits: request a share of a GPU, like {gpu}: 1 with {memory}"),
                );
            } else if resource == hami::PRIORITY {
                self.problem(
                    resource,
                    "priorities among the shares of one GPU are not supported yet: remove it",
                );
            } else if let Some(meant) = did_you_mean::intended_resource(resource) {
                self.problem(resource, format!("unknown resource: did you mean {meant}?"));
            }
        }
    }

    /// Reports carriers whose count differs from the request: the device plugin would allocate another number of GPUs.
    pub(super) fn check_carriers(&mut self, gpus: u32) {
        let is_count =
            |resource| carrier::CARRIER_RESOURCES.contains(&resource) || resource == gpushare::COUNT;
        // If the request has no count, the carrier may have any.
        let exactly = gpus > 1 || self.resources().any(is_count);
        for carrier in self.carriers {
            let Some(count) = self.container.count(carrier) else { continue };
            let wrong = match count {
                Err(error) => error.to_string(),
                Ok(count) if exactly && count != u64::from(gpus) => {
                    format!("carries a request for {gpus} GPUs but is {count}: write {gpus}")
                }
                Ok(0) => "carries a request but is 0: write 1".to_string(),
                Ok(_) => continue,
            };
            self.problem(carrier, wrong);
        }
    }

    /// Reports carriers of a container that requests nothing else.
    pub(super) fn check_carried(&mut self) {
        for carrier in self.carriers {
            if self.container.amount(carrier).is_some() {
                self.problem(
                    native::CARRIER,
                    format!("{carrier} is marked as a carrier, but the container requests nothing else: remove the mark"),
                );
            }
        }
    }

    fn describe_dialect(&self, dialect: Dialect) -> String {
        let resources = self.resources().filter(|resource| dialect_of(resource) == Some(dialect));
        let resources: Vec<String> = resources.map(shorten).collect();
        format!("{dialect} ({})", resources.join(", "))
    }

    /// Returns the resources whose amounts are not zero.
    fn requested(&self) -> impl Iterator<Item = &'a str> {
        self.resources().filter(|resource| !matches!(self.amount(resource), Some(Ok(0))))
    }

    fn amount(&self, resource: &str) -> Option<Result<u64, QuantityError>> {
        if self.carriers.iter().any(|carrier| carrier == resource) {
            return None;
        }
        self.container.count(resource)
    }
}

fn is_same_amount(request: &str, limit: &str) -> bool {
    match (request.parse::<Quantity>(), limit.parse::<Quantity>()) {
        (Ok(request), Ok(limit)) => request == limit,
        // Invalid amounts are reported where they are parsed.
        _ => true,
    }
}

/// Returns advice to append to the message of an invalid quantity.
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
