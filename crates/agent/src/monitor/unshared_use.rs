//! Containers that use a GPU without a share of it, and without a region to compare with: one that received device files from a
//! container with a grant, over a socket, or a pod that got the GPU from something other than Partage.

use super::container_index::NamedContainer;
use partage_core::model::{ContainerName, GpuUuid, PodUid};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Use that ends sooner is not a finding, as in the audit of regions: containers start and end between two polls.
const GRACE_PERIOD: Duration = Duration::from_secs(3);

/// A process of a container on a GPU that the container has no share of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UnsharedProcess {
    pub(super) owner: NamedContainer,
    pub(super) gpu: GpuUuid,
    pub(super) pid: u32,
}

impl UnsharedProcess {
    /// Describes the finding; the container's name comes before the text.
    pub(super) fn sentence(&self) -> String {
        format!("process {} uses GPU {}, and the container has no share of it", self.pid, self.gpu)
    }
}

/// Since when each container uses a GPU without a share of it.
#[derive(Debug, Default)]
pub(super) struct UnsharedUse(BTreeMap<ContainerGpu, FirstSeen>);

/// A container and a GPU that it uses.
type ContainerGpu = (PodUid, ContainerName, GpuUuid);

#[derive(Clone, Copy, Debug)]
struct FirstSeen {
    at: Instant,
    reported: bool,
}

/// Use that has lasted for longer than the grace period.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct LastingUse {
    /// One process for each container and GPU.
    pub(super) all: Vec<UnsharedProcess>,
    /// Those that were not reported before.
    pub(super) new: Vec<UnsharedProcess>,
}

impl UnsharedUse {
    /// Replaces the processes of the last poll by these. A container on a GPU is one finding, whatever its processes.
    pub(super) fn update(&mut self, now: Instant, seen: Vec<UnsharedProcess>) -> LastingUse {
        let before = std::mem::take(&mut self.0);
        let mut found = LastingUse::default();
        for one in seen {
            let key = (one.owner.pod.uid.clone(), one.owner.container.clone(), one.gpu.clone());
            if self.0.contains_key(&key) {
                continue;
            }
            let mut since = before.get(&key).copied().unwrap_or(FirstSeen { at: now, reported: false });
            if now.duration_since(since.at) >= GRACE_PERIOD {
                if !std::mem::replace(&mut since.reported, true) {
                    found.new.push(one.clone());
                }
                found.all.push(one);
            }
            self.0.insert(key, since);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use partage_core::model::PodId;

    fn seen(container: &str, pid: u32) -> UnsharedProcess {
        let pod = PodId { uid: "u".into(), namespace: "n".into(), name: "p".into() };
        UnsharedProcess {
            owner: NamedContainer { pod, container: container.into() },
            gpu: "GPU-1".into(),
            pid,
        }
    }

    #[test]
    fn lasting_use_is_reported_once_and_again_after_it_ended() {
        let (mut unshared, start) = (UnsharedUse::default(), Instant::now());
        let mut at = |millis, seen| unshared.update(start + Duration::from_millis(millis), seen);
        let two = || vec![seen("side", 7), seen("side", 8), seen("other", 9)];
        assert_eq!(at(0, two()), LastingUse::default());
        assert_eq!(at(2900, vec![seen("side", 8)]), LastingUse::default(), "not at once");
        let found = at(3000, two());
        assert_eq!(found.new, [seen("side", 7)], "by any of its processes; the other container had ended");
        assert_eq!(found.all, found.new);
        let again = at(3500, vec![seen("side", 8)]);
        assert_eq!((again.all, again.new), (vec![seen("side", 8)], vec![]));
        assert_eq!(at(3600, vec![]), LastingUse::default());
        assert_eq!(at(7000, vec![seen("side", 8)]), LastingUse::default());
        assert_eq!(at(10_000, vec![seen("side", 8)]).new.len(), 1);
    }
}
