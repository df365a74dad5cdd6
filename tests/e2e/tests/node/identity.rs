//! Whose is what, where names and moments could mislead: everybody gets exactly their own.

use crate::stage::{Stage, bed, lasting};
use partage_testkit::agent::SETTINGS;
use std::collections::BTreeMap;

const CROWD: usize = 50;

#[test]
fn fifty_pods_at_once_get_exactly_their_own() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, &format!("{SETTINGS}sharesPerGpu: {CROWD}\n")).await;
        let size = |at: usize| 512 + 8 * at as u64;
        let pods: String = (0..CROWD)
            .map(|at| {
                let cores = 1 + at % 2;
                let memory = size(at);
                let limits =
                    format!("partage.dev/gpu: 1, partage.dev/memory: {memory}Mi, partage.dev/cores: {cores}");
                lasting(&format!("p{at}"), &limits)
            })
            .map(|pod| pod.replace("sleep 0.5", "sleep 5"))
            .collect();
        stage.apply(&pods);
        for at in 0..CROWD {
            stage.runs(&format!("p{at}")).await;
        }
        let held = stage.agrees().await;
        let sizes: BTreeMap<String, u64> = held
            .iter()
            .map(|pod| (pod.name.clone(), pod.grant.grants[0].shares[0].memory_bytes.unwrap().0 >> 20))
            .collect();
        assert_eq!(sizes, (0..CROWD).map(|at| (format!("p{at}"), size(at))).collect());
        assert!(held.iter().all(|pod| pod.witness), "every container was asked");
        bed.kubectl(&["delete", "pods", "--all", "--grace-period=1", "--wait"]).unwrap();
        stage.nothing_is_kept().await;
    });
}

#[test]
fn successors_of_the_same_name_get_their_own_and_not_before_it_is_free() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, SETTINGS).await;
        // Each fills its GPU for anybody else of this size. The first does not end when it is told to.
        let limits = "partage.dev/gpu: 1, partage.dev/memory: 21Gi";
        let slow = lasting("a", limits)
            .replace("terminationGracePeriodSeconds: 1", "terminationGracePeriodSeconds: 300")
            .replace("nvidia-smi", "trap \"\" TERM; nvidia-smi");
        stage.apply(&slow);
        stage.apply(&lasting("b", limits));
        for name in ["a", "b"] {
            stage.runs(name).await;
        }
        let first = stage.agrees().await.into_iter().find(|pod| pod.name == "a").unwrap();
        let status = stage.object("pod", "a").unwrap()["status"]["containerStatuses"][0].clone();
        let container =
            status["containerID"].as_str().unwrap().trim_start_matches("containerd://").to_string();
        bed.kubectl(&["delete", "pod", "a", "--force", "--grace-period=0", "--wait"]).unwrap();
        stage.apply(&lasting("a", limits));
        // The old one is gone for the API server at once, and on its GPU for as long as it takes to end.
        stage.waits("a", "no room on node node1 now").await;
        stage.crash("a");
        stage.runs("a").await;
        let tasks = bed.node("node1").unwrap().run("/bed/bin/ctr", ["-n", "k8s.io", "tasks", "ls"]).unwrap();
        assert!(!tasks.contains(&container), "{container} ends before its GPU is another's:\n{tasks}");
        let held = stage.agrees().await;
        let second = held.iter().find(|pod| pod.name == "a").unwrap();
        assert_ne!(second.uid, first.uid);
        assert_eq!(second.grant, first.grant);

        // As a StatefulSet does it: the same name, at once.
        for round in 1..4 {
            stage.delete("a");
            stage.apply(&lasting("a", &format!("partage.dev/gpu: 1, partage.dev/memory: {round}Gi")));
            stage.runs("a").await;
            let held = stage.agrees().await;
            let now = held.iter().find(|pod| pod.name == "a").unwrap();
            assert_eq!(now.grant.grants[0].shares[0].memory_bytes.unwrap().0, round << 30);
        }
        for name in ["a", "b"] {
            stage.delete(name);
        }
        stage.nothing_is_kept().await;
    });
}
