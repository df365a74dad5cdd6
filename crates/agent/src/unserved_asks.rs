//! Reports asks that reach no device plugin: amounts without the count resource that goes with them.
//!
//! Kubelet calls a plugin only for containers that request its devices. A container that requests only memory runs without a
//! GPU; if no webhook adds the count, an event explains that to the pod's author.

use crate::resources::CountResource;
use crate::state::{MIN_PASS_INTERVAL, NodeState};
use partage_cluster::Severity;
use partage_core::dialect::asks::{self, is_or_resembles_ask};
use partage_core::model::PodUid;
use partage_core::pod::PodManifest;
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// Writes an event on each such pod, once, until stopped.
pub(crate) async fn run(state: Arc<NodeState>, stop: CancellationToken) {
    let mut pods = state.adapters.pods.changed();
    // A pod's requests do not change.
    let mut seen: BTreeSet<PodUid> = BTreeSet::new();
    while !stop.is_cancelled() {
        let started = tokio::time::Instant::now();
        pods.borrow_and_update();
        let all = state.adapters.pods.all();
        let existing: BTreeSet<&PodUid> = all.iter().map(|pod| &pod.id.uid).collect();
        seen.retain(|uid| existing.contains(uid));
        for pod in &all {
            if !seen.insert(pod.id.uid.clone()) || pod.is_finished() {
                continue;
            }
            for note in notes(&pod.pod, &state.settings().dialect()) {
                state.adapters.cluster.pod_event(&pod.id, Severity::Warning, "NoGpuAllocated", &note);
            }
        }
        tokio::select! {
            _ = pods.changed() => {}
            () = stop.cancelled() => {}
        }
        tokio::time::sleep_until(started + MIN_PASS_INTERVAL).await;
    }
}

/// Returns a message for each container of a pod that requests GPUs without their count.
fn notes(pod: &PodManifest, settings: &partage_core::dialect::DialectSettings) -> Vec<String> {
    let reading = asks::read(pod, settings);
    let read = pod.containers.iter().zip(&reading.containers);
    read.filter_map(|(container, read)| {
        let counts = CountResource::of(read.dialect?, container).name();
        let asked: Vec<&str> = container
            .resources()
            .filter(|resource| {
                is_or_resembles_ask(resource) && !matches!(container.count(resource), Some(Ok(0)))
            })
            .collect();
        if asked.iter().any(|resource| counts == *resource) {
            return None;
        }
        Some(format!(
            "container {} has no GPU: it requests {} without {counts}, which kubelet allocates; add {counts}",
            container.name,
            asked.join(" and ")
        ))
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use partage_core::model::ContainerRole;
    use partage_core::pod::ContainerManifest;

    fn reported(limits: &[(&str, &str)]) -> Vec<String> {
        let limits = limits.iter().map(|(name, amount)| ((*name).into(), (*amount).into())).collect();
        let container = ContainerManifest {
            name: "main".into(),
            role: ContainerRole::App,
            requests: Default::default(),
            limits,
        };
        notes(&PodManifest { containers: vec![container], ..PodManifest::default() }, &Default::default())
    }

    #[test]
    fn amounts_without_their_count_are_reported() {
        assert_eq!(
            reported(&[("partage.dev/memory", "4Gi"), ("partage.dev/cores", "30")]),
            [
                "container main has no GPU: it requests partage.dev/cores and partage.dev/memory without partage.dev/gpu, \
              which kubelet allocates; add partage.dev/gpu"
            ]
        );
        for (alone, count) in [
            ("volcano.sh/vgpu-memory", "volcano.sh/vgpu-number"),
            ("inspur.com/vcuda-memory", "inspur.com/vcuda-core"),
            ("nvidia.com/gpumem", "nvidia.com/gpu"),
        ] {
            let notes = reported(&[(alone, "4")]);
            assert!(notes.len() == 1 && notes[0].ends_with(&format!("add {count}")), "{notes:?}");
        }
    }

    #[test]
    fn pods_with_a_count_or_without_asks_are_not_reported() {
        for limits in [
            &[][..],
            &[("cpu", "1"), ("example.com/fpga", "1")],
            &[("partage.dev/gpu", "1"), ("partage.dev/memory", "4Gi")],
            &[("volcano.sh/vgpu-number", "1"), ("volcano.sh/vgpu-memory", "4")],
            &[("tencent.com/vcuda-core", "20"), ("tencent.com/vcuda-memory", "4")],
            &[("aliyun.com/gpu-mem", "4")],
            &[("k8s.amazonaws.com/vgpu", "1")],
        ] {
            assert_eq!(reported(limits), [] as [String; 0], "{limits:?}");
        }
    }
}
