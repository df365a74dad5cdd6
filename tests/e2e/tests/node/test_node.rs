//! A bed with the agent on its node, and helpers for what a user does there.

use partage_core::dialect::grants::native;
use partage_core::model::{Node, PodGrant};
use partage_e2e::{partage, sample};
use partage_testkit::agent::TestAgent;
use partage_testkit::bed::{BedProfile, TestBed};
use partage_testkit::eventually;
use serde_json::Value;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Queries the GPUs that a container sees; [`parse_gpus`] parses the output.
pub(crate) const GPU_QUERY_NOUNITS: &str =
    "nvidia-smi --query-gpu=uuid,memory.total --format=csv,noheader,nounits";

/// Parses the output of [`GPU_QUERY_NOUNITS`]: UUID and memory in MiB.
pub(crate) fn parse_gpus(output: &str) -> Vec<(String, u64)> {
    let gpu = |line: &str| {
        let (uuid, memory) = line.split_once(", ").expect(output);
        (uuid.to_string(), memory.trim().parse().expect(output))
    };
    output.lines().map(gpu).collect()
}

/// Returns a bed for a test, or `None` if the test is skipped.
pub(crate) fn bed() -> Option<TestBed> {
    TestBed::for_test(BedProfile::one_node().debian())
}

/// Sockets by their names, with inode number and creation time.
pub(crate) type PluginSockets = BTreeMap<String, (u64, i64, i64)>;

/// A bed with an agent on `node1`.
pub(crate) struct TestNode<'a> {
    pub(crate) bed: &'a TestBed,
    pub(crate) agent: TestAgent<'a>,
}

impl<'a> TestNode<'a> {
    /// Starts the agent and waits until kubelet counts its devices and the node offers its amounts.
    pub(crate) async fn start(bed: &'a TestBed, settings: &str) -> TestNode<'a> {
        TestNode::start_on(bed, "node1", settings).await
    }

    /// Starts the agent on another node.
    pub(crate) async fn start_on(bed: &'a TestBed, node: &str, settings: &str) -> TestNode<'a> {
        let agent = TestAgent::start(bed, node, Path::new(partage()), settings).unwrap();
        let test_node = TestNode { bed, agent };
        test_node.wait_until_offered("partage.dev/gpu", None).await;
        test_node.wait_until_offered("partage.dev/memory", None).await;
        // Programs that pods of these tests run, in addition to those of the image.
        let programs = test_node.agent.path("/var/lib/programs").unwrap();
        std::fs::create_dir_all(&programs).unwrap();
        std::fs::copy(sample(), programs.join("partage-sample")).unwrap();
        test_node
    }

    /// Waits until the node offers this amount of a resource, or any amount but zero if it is `None`.
    pub(crate) async fn wait_until_offered(&self, resource: &str, amount: Option<&str>) {
        eventually(&format!("the node offers {resource} {amount:?}"), async || {
            let node = self.get_object("node", self.agent.node().name())?;
            let offered = node["status"]["allocatable"][resource].as_str().unwrap_or("0").to_string();
            if amount.map_or(offered != "0", |amount| offered == amount) {
                Ok(())
            } else {
                Err(format!("{offered}; the agent's log:\n{}", self.agent.log()))
            }
        })
        .await;
    }

    /// Restarts the agent, and waits until kubelet has registered it.
    pub(crate) async fn restart_agent(&mut self) {
        self.agent.restart(None).unwrap();
        self.wait_until_ready().await;
    }

    /// Restarts kubelet, and waits until it has registered the agent again.
    pub(crate) async fn restart_kubelet(&self) {
        let before = self.plugin_sockets();
        self.agent.node().kubelet().restart().unwrap();
        self.wait_until_sockets_replaced(&before).await;
    }

    /// Waits until the agent serves on other sockets than these, and is registered. A kubelet that has just started
    /// removes them, and fails pods that request devices of a plugin that has not registered again: until then the
    /// agent may report that it is ready because of the previous kubelet.
    pub(crate) async fn wait_until_sockets_replaced(&self, before: &PluginSockets) {
        assert!(!before.is_empty(), "the agent must be serving");
        eventually("the agent's sockets are new", async || {
            let now = self.plugin_sockets();
            let old = |name: &&String| now.get(*name).is_none_or(|made| *made == before[*name]);
            match before.keys().find(old) {
                None => Ok(()),
                Some(name) => Err(format!("{name} is not new; {}", self.agent.log())),
            }
        })
        .await;
        self.wait_until_ready().await;
    }

    /// Returns the sockets that the agent serves on.
    pub(crate) fn plugin_sockets(&self) -> PluginSockets {
        let folder = self.agent.path("/var/lib/kubelet/device-plugins").unwrap();
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let ours = entries.filter_map(|entry| {
            let name = entry.file_name().into_string().ok().filter(|name| name.starts_with("partage_"))?;
            // An agent that was killed leaves its sockets behind.
            UnixStream::connect(entry.path()).ok()?;
            let made = entry.metadata().ok()?;
            Some((name, (made.ino(), made.ctime(), made.ctime_nsec())))
        });
        ours.collect()
    }

    /// Waits until the agent reports that kubelet has registered it.
    pub(crate) async fn wait_until_ready(&self) {
        eventually("the agent is ready", async || {
            self.get_from_agent("readyz").map(drop).map_err(|error| format!("{error}\n{}", self.agent.log()))
        })
        .await;
    }

    /// Starts the API server again and waits until it responds.
    pub(crate) async fn start_api_server(&self) {
        self.bed.apiserver().start().unwrap();
        eventually("the API server responds", async || self.bed.kubectl(&["get", "--raw", "/readyz"])).await;
    }

    /// Returns the agent's response for a path.
    pub(crate) fn get_from_agent(&self, path: &str) -> Result<String, String> {
        let url = format!("http://127.0.0.1:9394/{path}");
        let answer = self.agent.node().run("/bed/bin/busybox", ["wget", "-q", "-O", "-", &url]);
        answer.map_err(|error| error.to_string())
    }

    /// Returns the sum of a metric over its labels.
    pub(crate) fn metric_sum(&self, name: &str) -> Result<f64, String> {
        let text = self.get_from_agent("metrics")?;
        let is_it = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{']));
        let values: Vec<f64> =
            text.lines().filter(is_it).filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect();
        if values.is_empty() { Err(format!("no metric {name}")) } else { Ok(values.iter().sum()) }
    }

    /// Returns an object of the API server.
    pub(crate) fn get_object(&self, kind: &str, name: &str) -> Result<Value, String> {
        let text = self.bed.kubectl(&["get", kind, name, "-o", "json"]).map_err(|error| error.to_string())?;
        serde_json::from_str(&text).map_err(|error| error.to_string())
    }

    /// Returns the node's inventory, as a scheduler reads it.
    pub(crate) fn inventory(&self) -> Result<Node, String> {
        let node = self.get_object("node", self.agent.node().name())?;
        let text = node["metadata"]["annotations"]["partage.dev/inventory"].as_str().unwrap_or_default();
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    /// Runs `kubectl apply` with a manifest.
    pub(crate) fn apply(&self, manifest: &str) {
        self.bed.kubectl_with(&["apply", "-f", "-"], manifest).unwrap();
    }

    /// Waits until all containers of a pod are ready, or it has succeeded.
    pub(crate) async fn wait_until_running(&self, name: &str) -> Value {
        eventually(&format!("{name} is running"), async || {
            let pod = self.get_object("pod", name)?;
            let statuses = pod["status"]["containerStatuses"].as_array().cloned().unwrap_or_default();
            let ready = !statuses.is_empty() && statuses.iter().all(|one| one["ready"] == true);
            if ready || pod["status"]["phase"] == "Succeeded" {
                Ok(pod)
            } else {
                Err(format!("{}\n{}", pod["status"], self.agent.log()))
            }
        })
        .await
    }

    /// Returns the output of a command in a pod, or its message if it fails.
    pub(crate) fn exec(&self, pod: &str, command: &str) -> Result<String, String> {
        self.kubectl_exec(&["exec", pod, "--", "sh", "-c", command])
    }

    /// Runs a command in one of a pod's containers.
    pub(crate) fn exec_in(&self, pod: &str, container: &str, command: &str) -> Result<String, String> {
        self.kubectl_exec(&["exec", pod, "-c", container, "--", "sh", "-c", command])
    }

    /// Runs kubectl, and retries if kubelet could not be reached, in which case nothing was run.
    fn kubectl_exec(&self, arguments: &[&str]) -> Result<String, String> {
        const TRIES: usize = 10;
        const UNREACHED: [&str; 4] = [
            "error dialing backend",
            "TLS handshake timeout",
            "connection refused",
            "unable to upgrade connection",
        ];
        let unreached = |message: &str| {
            !message.contains("command terminated") && UNREACHED.iter().any(|cause| message.contains(cause))
        };
        let mut message = self.bed.kubectl(arguments).map_err(|error| error.to_string());
        for _ in 1..TRIES {
            if !message.as_ref().is_err_and(|message| unreached(message)) {
                break;
            }
            std::thread::sleep(Duration::from_secs(1));
            message = self.bed.kubectl(arguments).map_err(|error| error.to_string());
        }
        message
    }

    /// Returns the GPUs of a pod as it sees them: UUID and memory in MiB.
    pub(crate) fn visible_gpus(&self, pod: &str) -> Vec<(String, u64)> {
        parse_gpus(&self.exec(pod, GPU_QUERY_NOUNITS).unwrap())
    }

    /// Waits for an annotation of a pod, and returns its value.
    pub(crate) async fn wait_for_annotation(&self, pod: &str, key: &str) -> String {
        eventually(&format!("{pod} has {key}"), async || {
            let pod = self.get_object("pod", pod)?;
            let annotations = &pod["metadata"]["annotations"];
            annotations[key].as_str().map(String::from).ok_or_else(|| annotations.to_string())
        })
        .await
    }

    /// Waits for the grant in a pod's annotation, and returns it.
    pub(crate) async fn wait_for_grant(&self, pod: &str) -> PodGrant {
        eventually(&format!("{pod} has its grant"), async || {
            let pod = self.get_object("pod", pod)?;
            let text = pod["metadata"]["annotations"][native::ANNOTATION].as_str().ok_or("no annotation")?;
            native::decode(text).map_err(|error| error.to_string())
        })
        .await
    }

    /// Waits until the message of a waiting container contains these words, and returns it.
    pub(crate) async fn wait_until_waiting(&self, pod: &str, expected: &str) -> String {
        eventually(&format!("{pod} waits because {expected}"), async || {
            let pod = self.get_object("pod", pod)?;
            let waiting = pod["status"]["containerStatuses"][0]["state"]["waiting"]["message"]
                .as_str()
                .unwrap_or_default();
            if waiting.contains(expected) {
                Ok(waiting.to_string())
            } else {
                Err(format!("{}\n{}", pod["status"], self.agent.log()))
            }
        })
        .await
    }

    /// Waits until a pod waits because of this, or runs. Returns whether it waits.
    pub(crate) async fn wait_until_waiting_or_running(&self, pod: &str, expected: &str) -> bool {
        eventually(&format!("{pod} runs, or waits because {expected}"), async || {
            let pod = self.get_object("pod", pod)?;
            let status = &pod["status"]["containerStatuses"][0];
            let waiting = status["state"]["waiting"]["message"].as_str().unwrap_or_default();
            if waiting.contains(expected) || status["ready"] == true {
                Ok(status["ready"] != true)
            } else {
                Err(format!("{}\n{}", pod["status"], self.agent.log()))
            }
        })
        .await
    }

    /// Waits until an event with this reason contains these words.
    pub(crate) async fn wait_for_event(&self, reason: &str, expected: &str) {
        self.wait_for_matching_event(&format!("an event {reason}: {expected}"), reason, expected, |_| true)
            .await;
    }

    /// Waits until an event about this object has this reason and these words.
    pub(crate) async fn wait_for_event_on(&self, (kind, name): (&str, &str), reason: &str, expected: &str) {
        let about = |regarding: &Value| regarding["kind"] == kind && regarding["name"] == name;
        self.wait_for_matching_event(
            &format!("{kind} {name} has an event {reason}: {expected}"),
            reason,
            expected,
            about,
        )
        .await;
    }

    async fn wait_for_matching_event(
        &self,
        what: &str,
        reason: &str,
        expected: &str,
        about: impl Fn(&Value) -> bool,
    ) {
        eventually(what, async || {
            let events = self
                .bed
                .kubectl(&["get", "events.events.k8s.io", "-A", "-o", "json"])
                .map_err(|error| error.to_string())?;
            let events: Value = serde_json::from_str(&events).map_err(|error| error.to_string())?;
            let all = events["items"].as_array().into_iter().flatten();
            let found: Vec<String> = all
                .filter(|event| event["reason"] == reason && about(&event["regarding"]))
                .map(|event| event["note"].to_string())
                .collect();
            if found.iter().any(|note| note.contains(expected)) {
                Ok(())
            } else {
                Err(format!("{found:?}\n{}", self.agent.log()))
            }
        })
        .await;
    }

    /// Deletes a pod and waits until it is gone.
    pub(crate) fn delete_pod(&self, pod: &str) {
        self.bed.kubectl(&["delete", "pod", pod, "--grace-period=1", "--wait"]).unwrap();
    }

    /// Counts the agent's files of each kind on the node: CDI files of containers, regions, records of pods, names.
    pub(crate) fn agent_files(&self) -> [usize; 4] {
        ["/run/cdi", "/run/partage/regions", "/var/lib/partage/pods", "/run/partage/names"].map(|folder| {
            let path = self.agent.path(folder).unwrap();
            let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
            entries.filter(|entry| entry.file_name() != "partage.dev-driver.json").count()
        })
    }

    /// Waits until the agent has no files: no pod holds anything.
    pub(crate) async fn wait_until_released(&self) {
        self.wait_for_agent_files([0, 0, 0]).await;
    }

    /// Waits until the agent has this number of CDI files, regions and records. Names of deleted pods stay until
    /// kubelet forgets them too, which it does when it allocates their devices again.
    pub(crate) async fn wait_for_agent_files(&self, wanted: [usize; 3]) {
        eventually(&format!("files of the agent are {wanted:?}"), async || {
            let kept = self.agent_files();
            if kept[..3] == wanted { Ok(()) } else { Err(format!("{kept:?}\n{}", self.agent.log())) }
        })
        .await;
    }
}

/// Prints the GPUs that a container sees.
pub(crate) const GPU_QUERY: &str = "nvidia-smi --query-gpu=uuid,memory.total --format=csv,noheader";

/// Returns a shell command that prints what it sees of GPUs when it starts, and ends when its file changes
/// ([`TestNode::crash_container`]). It reads the file before it prints, so no later change is missed.
pub(crate) fn report_gpus_command(name: &str) -> String {
    format!(
        "read was < /programs/{name}; {GPU_QUERY}; exec 2>&-; now=$was; \
         while [ \"$now\" = \"$was\" ]; do sleep 0.5; read now < /programs/{name}; done; exit 1"
    )
}

/// Returns a pod with [`report_gpus_command`] whose container is restarted when it ends.
pub(crate) fn long_running_pod(name: &str, limits: &str) -> String {
    pod(name, limits, &report_gpus_command(name)).replace("restartPolicy: Never", "restartPolicy: Always")
}

/// Returns a pod of one container with limits and a command.
pub(crate) fn pod(name: &str, limits: &str, command: &str) -> String {
    format!(
        "apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: localhost/debian:bed
    imagePullPolicy: Never
    command: [sh, -c, '{command}']
    resources: {{limits: {{{limits}}}}}
    volumeMounts: [{{name: programs, mountPath: /programs, readOnly: true}}]
  volumes: [{{name: programs, hostPath: {{path: /var/lib/programs}}}}]
---
"
    )
}
