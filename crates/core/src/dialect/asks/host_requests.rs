//! Requests of a pod for CPU and host memory, summed as Kubernetes sums them.

use crate::model::{Bytes, ContainerRole, MilliCpu};
use crate::pod::{ContainerManifest, PodManifest, Problem};
use crate::quantity::{Quantity, QuantityError};

/// Returns the CPU and memory that a node must have free for the pod: the sum of its running containers, or more if an
/// init container needs more.
pub(super) fn read(pod: &PodManifest, problems: &mut Vec<Problem>) -> (MilliCpu, Bytes) {
    let mut total = |resource: &str, read: fn(Quantity) -> Result<u64, QuantityError>| {
        let amounts: Vec<(ContainerRole, u64)> =
            pod.containers.iter().map(|c| (c.role, amount(c, resource, read, problems))).collect();
        peak(&amounts)
    };
    (MilliCpu(total("cpu", Quantity::to_milli)), Bytes(total("memory", Quantity::to_units)))
}

/// Returns the maximum held at one time: all containers that keep running, or one init container together with the
/// sidecars started before it.
fn peak(amounts: &[(ContainerRole, u64)]) -> u64 {
    let (mut sidecars, mut apps, mut init) = (0u64, 0u64, 0u64);
    for &(role, amount) in amounts {
        // No node has enough for a saturated sum, so the pod is refused. The sum must not wrap around.
        match role {
            ContainerRole::Init => init = init.max(sidecars.saturating_add(amount)),
            ContainerRole::Sidecar => sidecars = sidecars.saturating_add(amount),
            ContainerRole::App => apps = apps.saturating_add(amount),
        }
    }
    init.max(sidecars.saturating_add(apps))
}

fn amount(
    container: &ContainerManifest,
    resource: &str,
    read: fn(Quantity) -> Result<u64, QuantityError>,
    problems: &mut Vec<Problem>,
) -> u64 {
    // In Kubernetes, a limit without a request implies a request of the same amount.
    let text = container.requests.get(resource).or_else(|| container.limits.get(resource));
    let Some(text) = text else { return 0 };
    text.parse().and_then(read).unwrap_or_else(|error: QuantityError| {
        problems.push(Problem::of_container(&container.name, resource, error.to_string()));
        0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c140_largest_init_container_counts() {
        use ContainerRole::{App, Init, Sidecar};
        assert_eq!(peak(&[(App, 1), (App, 3)]), 4);
        assert_eq!(peak(&[(Init, 1), (Init, 3), (App, 2)]), 3);
        assert_eq!(peak(&[(Sidecar, 2), (Init, 3), (App, 2)]), 5);
        assert_eq!(peak(&[(Init, 3), (Sidecar, 2), (App, 2)]), 4);
        assert_eq!(peak(&[(App, u64::MAX), (App, 1)]), u64::MAX);
    }
}
