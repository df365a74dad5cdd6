//! Asks that kubelet brings to nobody: amounts without the count that goes with them.
//!
//! A plugin hears of the containers that ask for its devices. One that asks for memory only runs, without a GPU; where no
//! webhook adds the count, its author learns here why.

use crate::resources::CountResource;
use crate::state::{MIN_PASS_INTERVAL, NodeState};
use partage_cluster::Severity;
use partage_core::dialect::asks::{self, is_or_resembles_ask};
use partage_core::model::PodUid;
use partage_core::pod::Pod;
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// Tells of each such pod once, until told to stop.
pub(crate) async fn keep_telling(state: Arc<NodeState>, stop: CancellationToken) {
    let mut pods = state.adapters.pods.changed();
    // What a pod asks does not change.
    let mut seen: BTreeSet<PodUid> = BTreeSet::new();
    while !stop.is_cancelled() {
        let looked = tokio::time::Instant::now();
        pods.borrow_and_update();
        let all = state.adapters.pods.all();
        let there: BTreeSet<&PodUid> = all.iter().map(|pod| &pod.id.uid).collect();
        seen.retain(|uid| there.contains(uid));
        for pod in &all {
            if !seen.insert(pod.id.uid.clone()) || pod.is_finished() {
                continue;
            }
            for note in notes(&pod.pod, &state.settings().dialect()) {
                state.adapters.cluster.pod_event(&pod.id, Severity::Warning, "NoGpuGiven", &note);
            }
        }
        tokio::select! {
            _ = pods.changed() => {}
            () = stop.cancelled() => {}
        }
        tokio::time::sleep_until(looked + MIN_PASS_INTERVAL).await;
    }
}

fn notes(pod: &Pod, settings: &partage_core::dialect::Settings) -> Vec<String> {
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
            "container {} has no GPU: it asks for {} without {counts}, and kubelet asks a plugin only for that; add {counts}",
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
    use partage_core::pod::Container;

    fn told(limits: &[(&str, &str)]) -> Vec<String> {
        let limits = limits.iter().map(|(name, amount)| ((*name).into(), (*amount).into())).collect();
        let container =
            Container { name: "main".into(), role: ContainerRole::App, requests: Default::default(), limits };
        notes(&Pod { containers: vec![container], ..Pod::default() }, &Default::default())
    }

    #[test]
    fn amounts_without_their_count_are_told_of() {
        assert_eq!(
            told(&[("partage.dev/memory", "4Gi"), ("partage.dev/cores", "30")]),
            [
                "container main has no GPU: it asks for partage.dev/cores and partage.dev/memory without partage.dev/gpu, \
              and kubelet asks a plugin only for that; add partage.dev/gpu"
            ]
        );
        for (alone, count) in [
            ("volcano.sh/vgpu-memory", "volcano.sh/vgpu-number"),
            ("inspur.com/vcuda-memory", "inspur.com/vcuda-core"),
            ("nvidia.com/gpumem", "nvidia.com/gpu"),
        ] {
            let told = told(&[(alone, "4")]);
            assert!(told.len() == 1 && told[0].ends_with(&format!("add {count}")), "{told:?}");
        }
    }

    #[test]
    fn others_are_not() {
        for limits in [
            &[][..],
            &[("cpu", "1"), ("example.com/fpga", "1")],
            &[("partage.dev/gpu", "1"), ("partage.dev/memory", "4Gi")],
            &[("volcano.sh/vgpu-number", "1"), ("volcano.sh/vgpu-memory", "4")],
            &[("tencent.com/vcuda-core", "20"), ("tencent.com/vcuda-memory", "4")],
            &[("aliyun.com/gpu-mem", "4")],
            &[("k8s.amazonaws.com/vgpu", "1")],
        ] {
            assert_eq!(told(limits), [] as [String; 0], "{limits:?}");
        }
    }
}
