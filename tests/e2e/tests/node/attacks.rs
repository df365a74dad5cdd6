//! A tenant tries to get more than it was granted, with nothing but the right to pods.

use crate::stage::{SEES, Stage, bed, lasting};
use partage_core::dialect::grants::native;
use partage_testkit::agent::SETTINGS;
use partage_testkit::eventually;
use serde_json::json;

const LIMITS: &str = "partage.dev/gpu: 1, partage.dev/memory: 5Gi";

#[test]
fn neither_the_environment_nor_mounts_nor_annotations_change_a_grant() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, SETTINGS).await;
        std::fs::copy(stage.node_path("/bed/bin/busybox"), stage.node_path("/var/lib/programs/busybox"))
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
        let pod = lasting("a", LIMITS)
            .replace("resources:", tricks)
            .replace("volumeMounts: [", mounts)
            .replace("readOnly: true}]", "readOnly: true}")
            .replace("volumes: [", "volumes: [{name: own, emptyDir: {}}, ");
        eventually("the tenant may make pods", async || stage.apply_as_tenant(&pod)).await;
        stage.runs("a").await;
        let share = stage.agrees().await[0].grant.grants[0].shares[0].clone();
        let granted = format!("{}, 5120 MiB", share.gpu);
        let others = [
            SEES.to_string(),
            format!("env -i {SEES}"),
            format!("env -i LD_LIBRARY_PATH=/usr/local/nvidia/lib64 {SEES}"),
            format!("LD_LIBRARY_PATH= LD_PRELOAD= NVIDIA_VISIBLE_DEVICES=all CUDA_VISIBLE_DEVICES=1 {SEES}"),
            format!("setpriv --reuid=65534 --clear-groups {SEES}"),
        ];
        for command in others {
            let seen = stage.exec("a", &command).unwrap();
            assert_eq!(seen.trim(), granted, "{command}");
        }
        let visible = stage.exec("a", "echo $NVIDIA_VISIBLE_DEVICES").unwrap();
        assert_eq!(visible.trim(), share.gpu.as_str(), "the pod's own word was: all");
        let out_of_memory =
            stage.exec("a", "env -i /programs/partage-sample trainer --memory 6Gi --seconds 1");
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
            let said = stage.exec("a", command).unwrap_err();
            let told = ["Read-only", "not permitted", "busy", "denied", "must be superuser"];
            assert!(told.iter().any(|words| said.contains(words)), "{command}: {said}");
        }
        assert_eq!(stage.exec("a", SEES).unwrap().trim(), granted);

        let forged = forged(&share.gpu.to_string());
        let pod = lasting("b", LIMITS).replace("{name: b}", &format!("{{name: b, annotations: {forged}}}"));
        let said = stage.apply_as_tenant(&pod).unwrap_err();
        assert!(said.contains("Partage writes it, nobody else"), "{said}");
        let patch = format!("{{\"metadata\":{{\"annotations\":{forged}}}}}");
        let said = stage.as_tenant(&["patch", "pod", "a", "-p", &patch], "").unwrap_err();
        assert!(said.contains("Partage writes it, nobody else"), "{said}");

        // Without the policies the node still knows better.
        bed.kubectl(&["delete", "validatingadmissionpolicybinding", "partage-grants"]).unwrap();
        stage.without_policy(&pod).await;
        stage.runs("b").await;
        stage.as_tenant(&["patch", "pod", "a", "-p", &patch], "").unwrap();
        let held = stage.agrees().await;
        assert!(held.iter().all(|pod| pod.grant.grants[0].shares[0].memory_bytes.unwrap().0 == 5 << 30));

        // The driver's own file, loaded before all others: nothing can stop that, and it is seen. The pod's LD_PRELOAD is still there.
        let works = "/programs/partage-sample trainer --memory 6Gi > /dev/null 2>&1 & echo $! > /tmp/pid";
        stage.exec("a", works).unwrap();
        stage.told(("Pod", "a"), "BypassSuspected", "container main goes around its limits").await;
        // A scrape that comes after the process has ended finds it, too.
        stage.exec("a", "kill -9 $(cat /tmp/pid)").unwrap();
        stage.is_seen_with("a", |bytes| bytes == 0.0).await;
        assert_eq!(stage.metric("partage_container_bypass_suspected").unwrap(), 1.0);
    });
}

#[test]
fn who_writes_over_its_account_harms_nobody_and_is_told_of() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, SETTINGS).await;
        let busy = |name: &str| {
            let works = "/programs/partage-sample trainer --memory 1Gi --seconds 3000 & nvidia-smi";
            lasting(name, LIMITS).replacen("nvidia-smi", works, 1)
        };
        for name in ["a", "b"] {
            stage.apply(&busy(name));
        }
        let gibibyte = f64::from(1 << 30);
        stage.runs("a").await;
        stage.uses("a", gibibyte).await;
        stage.runs("b").await;
        let alone = stage.uses("b", gibibyte).await;
        let agent = stage.agent.process().process();
        let usage = "/usr/local/partage/region/usage";
        let size: u64 = stage.exec("a", &format!("stat -c %s {usage}")).unwrap().trim().parse().unwrap();
        for source in ["/dev/urandom", "/dev/zero", "/tmp/ones"] {
            let ones = format!("head -c {size} /dev/zero | tr \"\\\\000\" \"\\\\377\" > /tmp/ones");
            stage.exec("a", &ones).unwrap();
            let write = format!("head -c {size} {source} | dd of={usage} conv=notrunc status=none");
            stage.exec("a", &write).unwrap();
            // A program that starts now finds it so, and either works or is refused; it does not crash.
            let tries = "/programs/partage-sample trainer --memory 1Gi --seconds 0.2; test $? -lt 128";
            stage.exec("a", tries).unwrap();
            stage.exec("a", SEES).unwrap();
        }
        stage.told(("Pod", "a"), "BypassSuspected", "goes around its limits").await;
        assert!(stage.metric("partage_bypass_total").unwrap() > 0.0);
        stage.exec("b", "/programs/partage-sample trainer --memory 1Gi --seconds 0.2").unwrap();
        // A file without an end is worse than one with garbage.
        stage.exec("a", &format!("truncate -s 0 {usage} || : > {usage}")).unwrap();
        stage.is_looked_at("b", alone, 3).await;
        assert_eq!(stage.agent.process().process(), agent, "the agent lives:\n{}", stage.agent.log());
        stage.exec("b", "/programs/partage-sample trainer --memory 1Gi --seconds 0.2").unwrap();

        // As the chart does with this setting.
        bed.kubectl(&["create", "clusterrole", "evict", "--verb=delete", "--resource=pods"]).unwrap();
        let account = "--serviceaccount=partage-system:partage-node";
        bed.kubectl(&["create", "clusterrolebinding", "evict", "--clusterrole=evict", account]).unwrap();
        stage.agent.write_settings(&format!("{SETTINGS}onBypass: evict\n")).unwrap();
        eventually("the settings are read", async || {
            if stage.agent.log().contains("the settings have changed") { Ok(()) } else { Err("not yet") }
        })
        .await;
        stage
            .exec("b", &format!("head -c {size} /dev/zero | dd of={usage} conv=notrunc status=none"))
            .unwrap();
        stage.told(("Pod", "b"), "BypassSuspected", "the pod is evicted").await;
        // The other one did it before, and does it still.
        for name in ["a", "b"] {
            eventually(&format!("{name} is gone"), async || {
                let words = ["get", "pod", name, "--ignore-not-found", "-o", "name"];
                match stage.bed.kubectl(&words).map_err(|error| error.to_string())?.as_str() {
                    "" => Ok(()),
                    there => Err(format!("{there}\n{}", stage.agent.log())),
                }
            })
            .await;
        }
        stage.nothing_is_kept().await;
    });
}

impl Stage<'_> {
    /// `kubectl` as somebody who may do with pods what they like, and nothing else.
    fn as_tenant(&self, words: &[&str], input: &str) -> Result<String, String> {
        let role = ["create", "role", "pods", "--verb=*", "--resource=pods,pods/exec,pods/log"];
        let _ = self.bed.kubectl(&role);
        let _ = self.bed.kubectl(&["create", "rolebinding", "pods", "--role=pods", "--user=tenant"]);
        let words = [&["--as=tenant"], words].concat();
        self.bed.kubectl_with(&words, input).map_err(|error| error.to_string())
    }

    fn apply_as_tenant(&self, manifest: &str) -> Result<String, String> {
        self.as_tenant(&["apply", "-f", "-"], manifest)
    }

    /// Waits until the API server has forgotten the policy.
    async fn without_policy(&self, manifest: &str) {
        eventually("the policy is gone", async || self.apply_as_tenant(manifest)).await;
    }

    /// Waits until a pod uses more of its GPU than so many bytes, as the driver says; how many.
    async fn uses(&self, pod: &str, more_than: f64) -> f64 {
        self.is_seen_with(pod, |bytes| bytes > more_than).await
    }

    async fn is_seen_with(&self, pod: &str, right: impl Fn(f64) -> bool) -> f64 {
        eventually(&format!("{pod} uses its GPU"), async || {
            let metrics = self.ask("metrics")?;
            let line = metrics.lines().find(|line| {
                line.starts_with("partage_container_memory_seen_bytes")
                    && line.contains(&format!("pod=\"{pod}\""))
            });
            match line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()) {
                Some(bytes) if right(bytes) => Ok(bytes),
                seen => Err(format!("{seen:?}\n{}", self.agent.log())),
            }
        })
        .await
    }

    /// Waits until the agent has asked the driver so many times: each time it sees a process that was not there before.
    /// `alone` is what the pod uses by itself; programs that were started in it meanwhile have ended, and may still be in the
    /// agent's last look.
    async fn is_looked_at(&self, pod: &str, alone: f64, times: u32) {
        let mut seen = self.is_seen_with(pod, |bytes| bytes <= alone).await;
        for _ in 0..times {
            let works = "/programs/partage-sample trainer --memory 256Mi --seconds 3000 > /dev/null 2>&1 &";
            self.exec(pod, works).unwrap();
            seen = self.uses(pod, seen).await;
        }
    }
}

/// A grant of all of a GPU, as JSON for annotations.
fn forged(gpu: &str) -> String {
    let grants = json!({"version": 1, "node": "node1", "grants": [
        {"container": "main", "shares": [{"gpu": gpu, "memoryBytes": 40_u64 << 30, "whole": true}]},
    ]});
    json!({ native::ANNOTATION: grants.to_string() }).to_string()
}
