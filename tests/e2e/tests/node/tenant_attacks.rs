//! A tenant that may only create pods tries to get more than its grant.

use crate::test_node::{GPU_QUERY, TestNode, bed, long_running_pod};
use partage_core::dialect::grants::native;
use partage_testkit::agent::SIMULATED_SETTINGS;
use partage_testkit::eventually;
use serde_json::json;

const LIMITS: &str = "partage.dev/gpu: 1, partage.dev/memory: 5Gi";

#[test]
fn environment_mounts_and_annotations_cannot_change_a_grant() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        std::fs::copy(
            test_node.node_path("/bed/bin/busybox"),
            test_node.node_path("/var/lib/programs/busybox"),
        )
        .unwrap();
        let tricks = "env:
    - {name: NVIDIA_VISIBLE_DEVICES, value: all}
    - {name: CUDA_VISIBLE_DEVICES, value: '0,1'}
    - {name: LD_LIBRARY_PATH, value: '/usr/local/partage/driver:/usr/lib64'}
    - {name: LD_PRELOAD, value: /usr/local/partage/driver/cuda}
    - {name: PARTAGE_SHIM_LIBRARY, value: /usr/local/partage/driver/cuda}
    - {name: PARTAGE_REGION, value: /tmp}
    resources:";
        let mounts = "volumeMounts:
    - {name: own, mountPath: /usr/local/partage}
    - {name: own, mountPath: /usr/local/partage/region}
    - {name: own, mountPath: /usr/local/partage/region/limits}
    - {name: own, mountPath: /usr/local/partage/region/usage}
    - ";
        let pod = long_running_pod("a", LIMITS)
            .replace("resources:", tricks)
            .replace("volumeMounts: [", mounts)
            .replace("readOnly: true}]", "readOnly: true}")
            .replace("volumes: [", "volumes: [{name: own, emptyDir: {}}, ");
        eventually("the tenant may create pods", async || test_node.apply_as_tenant(&pod)).await;
        test_node.wait_until_running("a").await;
        let share = test_node.wait_until_consistent().await[0].grant.grants[0].shares[0].clone();
        let granted = format!("{}, 5120 MiB", share.gpu);
        let others = [
            GPU_QUERY.to_string(),
            format!("env -i {GPU_QUERY}"),
            format!("env -i LD_LIBRARY_PATH=/usr/local/nvidia/lib64 {GPU_QUERY}"),
            format!(
                "LD_LIBRARY_PATH= LD_PRELOAD= NVIDIA_VISIBLE_DEVICES=all CUDA_VISIBLE_DEVICES=1 {GPU_QUERY}"
            ),
            format!("setpriv --reuid=65534 --clear-groups {GPU_QUERY}"),
        ];
        for command in others {
            let seen = test_node.exec("a", &command).unwrap();
            assert_eq!(seen.trim(), granted, "{command}");
        }
        let visible = test_node.exec("a", "echo $NVIDIA_VISIBLE_DEVICES").unwrap();
        assert_eq!(visible.trim(), share.gpu.as_str(), "the pod's own value was `all`");
        let out_of_memory =
            test_node.exec("a", "env -i /programs/partage-sample trainer --memory 6Gi --seconds 1");
        assert!(out_of_memory.unwrap_err().contains("out of memory"));
        for command in [
            "echo x > /usr/local/partage/region/limits",
            "chmod 777 /usr/local/partage/region/limits",
            "rm /usr/local/partage/region/limits",
            "mv /usr/local/partage/region/limits /tmp/limits",
            "/programs/busybox mount -o remount,rw,bind /usr/local/partage/region/limits",
            "/programs/busybox umount /usr/local/partage/region/limits",
            "echo x > /usr/local/partage/driver/cuda",
        ] {
            let output = test_node.exec("a", command).unwrap_err();
            let told = ["Read-only", "not permitted", "busy", "denied", "must be superuser"];
            assert!(told.iter().any(|expected| output.contains(expected)), "{command}: {output}");
        }
        assert_eq!(test_node.exec("a", GPU_QUERY).unwrap().trim(), granted);

        let forged = forged_grant(&share.gpu.to_string());
        let pod = long_running_pod("b", LIMITS)
            .replace("{name: b}", &format!("{{name: b, annotations: {forged}}}"));
        let output = test_node.apply_as_tenant(&pod).unwrap_err();
        assert!(output.contains("only Partage may write it"), "{output}");
        let patch = format!("{{\"metadata\":{{\"annotations\":{forged}}}}}");
        let output = test_node.kubectl_as_tenant(&["patch", "pod", "a", "-p", &patch], "").unwrap_err();
        assert!(output.contains("only Partage may write it"), "{output}");

        // Without the policies the node still uses its own records.
        bed.kubectl(&["delete", "validatingadmissionpolicybinding", "partage-grants"]).unwrap();
        test_node.wait_until_policy_removed(&pod).await;
        test_node.wait_until_running("b").await;
        test_node.kubectl_as_tenant(&["patch", "pod", "a", "-p", &patch], "").unwrap();
        let held = test_node.wait_until_consistent().await;
        assert!(held.iter().all(|pod| pod.grant.grants[0].shares[0].memory_bytes.unwrap().0 == 5 << 30));

        // A program that preloads the driver's own library: nothing can prevent that, and it is detected. The pod's
        // LD_PRELOAD is still set.
        let works = "/programs/partage-sample trainer --memory 6Gi > /dev/null 2>&1 & echo $! > /tmp/pid";
        test_node.exec("a", works).unwrap();
        test_node
            .wait_for_event_on(("Pod", "a"), "BypassSuspected", "container main bypasses its limits")
            .await;
        // A scrape after the process has ended still shows it.
        test_node.exec("a", "kill -9 $(cat /tmp/pid)").unwrap();
        test_node.wait_for_driver_memory("a", |bytes| bytes == 0.0).await;
        assert_eq!(test_node.metric_sum("partage_container_bypass_suspected").unwrap(), 1.0);
    });
}

#[test]
fn overwritten_usage_file_is_reported_and_harms_no_other_pod() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        let busy = |name: &str| {
            let works = "/programs/partage-sample trainer --memory 1Gi --seconds 3000 & nvidia-smi";
            long_running_pod(name, LIMITS).replacen("nvidia-smi", works, 1)
        };
        for name in ["a", "b"] {
            test_node.apply(&busy(name));
        }
        let gibibyte = f64::from(1 << 30);
        test_node.wait_until_running("a").await;
        test_node.wait_until_memory_above("a", gibibyte).await;
        test_node.wait_until_running("b").await;
        let alone = test_node.wait_until_memory_above("b", gibibyte).await;
        let agent = test_node.agent.process().pid();
        let usage = "/usr/local/partage/region/usage";
        let size: u64 = test_node.exec("a", &format!("stat -c %s {usage}")).unwrap().trim().parse().unwrap();
        for source in ["/dev/urandom", "/dev/zero", "/tmp/ones"] {
            let ones = format!("head -c {size} /dev/zero | tr \"\\\\000\" \"\\\\377\" > /tmp/ones");
            test_node.exec("a", &ones).unwrap();
            let write = format!("head -c {size} {source} | dd of={usage} conv=notrunc status=none");
            test_node.exec("a", &write).unwrap();
            // A program that starts now reads the damaged file, and either works or is refused; it does not crash.
            let tries = "/programs/partage-sample trainer --memory 1Gi --seconds 0.2; test $? -lt 128";
            test_node.exec("a", tries).unwrap();
            test_node.exec("a", GPU_QUERY).unwrap();
        }
        test_node.wait_for_event_on(("Pod", "a"), "BypassSuspected", "bypasses its limits").await;
        assert!(test_node.metric_sum("partage_bypass_total").unwrap() > 0.0);
        test_node.exec("b", "/programs/partage-sample trainer --memory 1Gi --seconds 0.2").unwrap();
        // A truncated file is worse than one with garbage.
        test_node.exec("a", &format!("truncate -s 0 {usage} || : > {usage}")).unwrap();
        test_node.wait_for_monitor_polls("b", alone, 3).await;
        assert_eq!(
            test_node.agent.process().pid(),
            agent,
            "the agent was not restarted:\n{}",
            test_node.agent.log()
        );
        test_node.exec("b", "/programs/partage-sample trainer --memory 1Gi --seconds 0.2").unwrap();

        // The chart adds this permission with this setting.
        bed.kubectl(&["create", "clusterrole", "evict", "--verb=delete", "--resource=pods"]).unwrap();
        let account = "--serviceaccount=partage-system:partage-node";
        bed.kubectl(&["create", "clusterrolebinding", "evict", "--clusterrole=evict", account]).unwrap();
        test_node.agent.write_settings(&format!("{SIMULATED_SETTINGS}onBypass: evict\n")).unwrap();
        eventually("the settings are read", async || {
            if test_node.agent.log().contains("settings reloaded") { Ok(()) } else { Err("not yet") }
        })
        .await;
        test_node
            .exec("b", &format!("head -c {size} /dev/zero | dd of={usage} conv=notrunc status=none"))
            .unwrap();
        test_node.wait_for_event_on(("Pod", "b"), "BypassSuspected", "the pod is evicted").await;
        // The other pod bypassed its limits before, and still does.
        for name in ["a", "b"] {
            eventually(&format!("{name} is deleted"), async || {
                let arguments = ["get", "pod", name, "--ignore-not-found", "-o", "name"];
                match test_node.bed.kubectl(&arguments).map_err(|error| error.to_string())?.as_str() {
                    "" => Ok(()),
                    there => Err(format!("{there}\n{}", test_node.agent.log())),
                }
            })
            .await;
        }
        test_node.wait_until_released().await;
    });
}

impl TestNode<'_> {
    /// Runs `kubectl` as a user with all permissions on pods, and no others.
    fn kubectl_as_tenant(&self, arguments: &[&str], input: &str) -> Result<String, String> {
        let role = ["create", "role", "pods", "--verb=*", "--resource=pods,pods/exec,pods/log"];
        let _ = self.bed.kubectl(&role);
        let _ = self.bed.kubectl(&["create", "rolebinding", "pods", "--role=pods", "--user=tenant"]);
        let arguments = [&["--as=tenant"], arguments].concat();
        self.bed.kubectl_with(&arguments, input).map_err(|error| error.to_string())
    }

    fn apply_as_tenant(&self, manifest: &str) -> Result<String, String> {
        self.kubectl_as_tenant(&["apply", "-f", "-"], manifest)
    }

    /// Waits until the API server no longer applies the policy.
    async fn wait_until_policy_removed(&self, manifest: &str) {
        eventually("the policy is no longer applied", async || self.apply_as_tenant(manifest)).await;
    }

    /// Waits until a pod uses more than this number of bytes of its GPU according to the driver, and returns the
    /// number.
    async fn wait_until_memory_above(&self, pod: &str, more_than: f64) -> f64 {
        self.wait_for_driver_memory(pod, |bytes| bytes > more_than).await
    }

    async fn wait_for_driver_memory(&self, pod: &str, right: impl Fn(f64) -> bool) -> f64 {
        eventually(&format!("{pod} uses its GPU"), async || {
            let metrics = self.get_from_agent("metrics")?;
            let line = metrics.lines().find(|line| {
                line.starts_with("partage_container_memory_seen_bytes")
                    && line.contains(&format!("pod=\"{pod}\""))
            });
            match line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()) {
                Some(bytes) if right(bytes) => Ok(bytes),
                seen => {
                    let gpus = metrics.lines().filter(|line| {
                        line.starts_with("partage_container_memory_seen_bytes")
                            || line.starts_with("partage_gpu_unowned_processes")
                    });
                    let gpus: Vec<&str> = gpus.collect();
                    Err(format!("{seen:?}\n{}\n{}", gpus.join("\n"), self.agent.log()))
                }
            }
        })
        .await
    }

    /// Waits until the agent has queried the driver this number of times: each time it sees a process that did not
    /// exist before. `alone` is what the pod uses by itself; programs that were started in it meanwhile have ended, and
    /// may still be in the agent's last sample.
    async fn wait_for_monitor_polls(&self, pod: &str, alone: f64, times: u32) {
        let mut seen = self.wait_for_driver_memory(pod, |bytes| bytes <= alone).await;
        for _ in 0..times {
            let works = "/programs/partage-sample trainer --memory 256Mi --seconds 3000 > /dev/null 2>&1 &";
            self.exec(pod, works).unwrap();
            seen = self.wait_until_memory_above(pod, seen).await;
        }
    }
}

/// Returns a grant of a whole GPU, as JSON for annotations.
fn forged_grant(gpu: &str) -> String {
    let grants = json!({"version": 1, "node": "node1", "grants": [
        {"container": "main", "shares": [{"gpu": gpu, "memoryBytes": 40_u64 << 30, "whole": true}]},
    ]});
    json!({ native::ANNOTATION: grants.to_string() }).to_string()
}
