//! Containers that work on a GPU without a share of it, and without a region to be held against: one beside a container with a grant
//! that was passed its devices over a socket, or a pod that came to the GPU past Partage.

use super::containers::Whose;
use partage_core::model::{ContainerName, GpuUuid, PodUid};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What is over sooner is no finding, as in the audit of regions: containers come and go between two looks.
const GRACE: Duration = Duration::from_secs(3);

/// A process of a container on a GPU that the container has no share of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) whose: Whose,
    pub(super) gpu: GpuUuid,
    pub(super) pid: u32,
}

impl Seen {
    /// In words; its container's name stands before them.
    pub(super) fn words(&self) -> String {
        format!("process {} works on GPU {}, of which it holds no share", self.pid, self.gpu)
    }
}

/// Who has been seen, from look to look.
#[derive(Debug, Default)]
pub(super) struct Foreign(BTreeMap<Key, Since>);

type Key = (PodUid, ContainerName, GpuUuid);

#[derive(Clone, Copy, Debug)]
struct Since {
    at: Instant,
    told: bool,
}

/// Who has been there for longer than the grace.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// All of them.
    pub(super) all: Vec<Seen>,
    /// Those of whom nothing was said before.
    pub(super) new: Vec<Seen>,
}

impl Foreign {
    /// Takes in who is there now. Whatever its processes, a container on a GPU is one finding.
    pub(super) fn take(&mut self, now: Instant, seen: Vec<Seen>) -> Found {
        let before = std::mem::take(&mut self.0);
        let mut found = Found::default();
        for one in seen {
            let key = (one.whose.pod.uid.clone(), one.whose.container.clone(), one.gpu.clone());
            if self.0.contains_key(&key) {
                continue;
            }
            let mut since = before.get(&key).copied().unwrap_or(Since { at: now, told: false });
            if now.duration_since(since.at) >= GRACE {
                if !std::mem::replace(&mut since.told, true) {
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

    fn seen(container: &str, pid: u32) -> Seen {
        let pod = PodId { uid: "u".into(), namespace: "n".into(), name: "p".into() };
        Seen { whose: Whose { pod, container: container.into() }, gpu: "GPU-1".into(), pid }
    }

    #[test]
    fn who_stays_is_found_once_and_who_comes_back_anew() {
        let (mut foreign, start) = (Foreign::default(), Instant::now());
        let mut at = |millis, seen| foreign.take(start + Duration::from_millis(millis), seen);
        let two = || vec![seen("side", 7), seen("side", 8), seen("other", 9)];
        assert_eq!(at(0, two()), Found::default());
        assert_eq!(at(2900, vec![seen("side", 8)]), Found::default(), "not at once");
        let found = at(3000, two());
        assert_eq!(found.new, [seen("side", 7)], "by whichever process; the other one had gone");
        assert_eq!(found.all, found.new);
        let again = at(3500, vec![seen("side", 8)]);
        assert_eq!((again.all, again.new), (vec![seen("side", 8)], vec![]));
        assert_eq!(at(3600, vec![]), Found::default());
        assert_eq!(at(7000, vec![seen("side", 8)]), Found::default());
        assert_eq!(at(10_000, vec![seen("side", 8)]).new.len(), 1);
    }
}
