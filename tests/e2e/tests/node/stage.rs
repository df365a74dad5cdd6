//! A bed with the agent on its node, and what a user does there.

use partage_core::dialect::grants::native;
use partage_core::model::{Node, PodGrant};
use partage_e2e::{partage, sample};
use partage_testkit::agent::Agent;
use partage_testkit::bed::{Bed, Profile};
use partage_testkit::eventually;
use serde_json::Value;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Asks for the GPUs that a container sees; [`gpus`] reads the answer.
pub(crate) const SMI: &str = "nvidia-smi --query-gpu=uuid,memory.total --format=csv,noheader,nounits";

/// What [`SMI`] says: UUID and memory in MiB.
pub(crate) fn gpus(said: &str) -> Vec<(String, u64)> {
    let gpu = |line: &str| {
        let (uuid, memory) = line.split_once(", ").expect(said);
        (uuid.to_string(), memory.trim().parse().expect(said))
    };
    said.lines().map(gpu).collect()
}

/// A bed for a test, or the reason why there is none.
pub(crate) fn bed() -> Option<Bed> {
    Bed::for_test(Profile::one_node().debian())
}

/// Sockets by their names: which file it is, and when it was made.
pub(crate) type Sockets = BTreeMap<String, (u64, i64, i64)>;

/// A bed with an agent on `node1`.
pub(crate) struct Stage<'a> {
    pub(crate) bed: &'a Bed,
    pub(crate) agent: Agent<'a>,
}

impl<'a> Stage<'a> {
    /// Starts the agent and waits until kubelet counts its devices and the node says its amounts.
    pub(crate) async fn set(bed: &'a Bed, settings: &str) -> Stage<'a> {
        Stage::set_on(bed, "node1", settings).await
    }

    /// The same on another node.
    pub(crate) async fn set_on(bed: &'a Bed, node: &str, settings: &str) -> Stage<'a> {
        let agent = Agent::start(bed, node, Path::new(partage()), settings).unwrap();
        let stage = Stage { bed, agent };
        stage.offers("partage.dev/gpu", None).await;
        stage.offers("partage.dev/memory", None).await;
        // What pods of these tests run, besides what the image has.
        let programs = stage.agent.path("/var/lib/programs").unwrap();
        std::fs::create_dir_all(&programs).unwrap();
        std::fs::copy(sample(), programs.join("partage-sample")).unwrap();
        stage
    }

    /// Waits until the node can give so much of a resource; any amount but none, where it is not said.
    pub(crate) async fn offers(&self, resource: &str, amount: Option<&str>) {
        eventually(&format!("the node offers {resource} {amount:?}"), async || {
            let node = self.object("node", self.agent.node().name())?;
            let offered = node["status"]["allocatable"][resource].as_str().unwrap_or("0").to_string();
            match amount.map_or(offered != "0", |amount| offered == amount) {
                true => Ok(()),
                false => Err(format!("{offered}; the agent said:\n{}", self.agent.log())),
            }
        })
        .await;
    }

    /// Starts the agent anew, and waits until kubelet listens to it.
    pub(crate) async fn start_again(&mut self) {
        self.agent.start_again(None).unwrap();
        self.is_ready().await;
    }

    /// Restarts kubelet, and waits until it listens to the agent again.
    pub(crate) async fn kubelet_restarts(&self) {
        let before = self.sockets();
        self.agent.node().kubelet().restart().unwrap();
        self.serves_anew(&before).await;
    }

    /// Waits until the agent serves on other sockets than these, and kubelet listens. A kubelet that has just started removes them,
    /// and fails pods that ask for devices of a plugin that it does not know again: until then the agent may say that it is ready,
    /// and mean the kubelet before.
    pub(crate) async fn serves_anew(&self, before: &Sockets) {
        assert!(!before.is_empty(), "the agent serves");
        eventually("the agent's sockets are new ones", async || {
            let now = self.sockets();
            let old = |name: &&String| now.get(*name).is_none_or(|made| *made == before[*name]);
            match before.keys().find(old) {
                None => Ok(()),
                Some(name) => Err(format!("{name} is not; {}", self.agent.log())),
            }
        })
        .await;
        self.is_ready().await;
    }

    /// The sockets that the agent serves on.
    pub(crate) fn sockets(&self) -> Sockets {
        let folder = self.agent.path("/var/lib/kubelet/device-plugins").unwrap();
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let ours = entries.filter_map(|entry| {
            let name = entry.file_name().into_string().ok().filter(|name| name.starts_with("partage_"))?;
            // One that was killed leaves its own behind.
            UnixStream::connect(entry.path()).ok()?;
            let made = entry.metadata().ok()?;
            Some((name, (made.ino(), made.ctime(), made.ctime_nsec())))
        });
        ours.collect()
    }

    /// Waits until the agent says that kubelet listens to it.
    pub(crate) async fn is_ready(&self) {
        eventually("the agent is ready", async || {
            self.ask("readyz").map(drop).map_err(|error| format!("{error}\n{}", self.agent.log()))
        })
        .await;
    }

    /// Starts the API server again and waits until it answers.
    pub(crate) async fn api_server_is_back(&self) {
        self.bed.apiserver().start().unwrap();
        eventually("the API server answers", async || self.bed.kubectl(&["get", "--raw", "/readyz"])).await;
    }

    /// What the agent answers under a path.
    pub(crate) fn ask(&self, path: &str) -> Result<String, String> {
        let url = format!("http://127.0.0.1:9394/{path}");
        let answer = self.agent.node().run("/bed/bin/busybox", ["wget", "-q", "-O", "-", &url]);
        answer.map_err(|error| error.to_string())
    }

    /// The sum of a metric over its labels.
    pub(crate) fn metric(&self, name: &str) -> Result<f64, String> {
        let text = self.ask("metrics")?;
        let is_it = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{']));
        let values: Vec<f64> =
            text.lines().filter(is_it).filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect();
        if values.is_empty() { Err(format!("no metric {name}")) } else { Ok(values.iter().sum()) }
    }

    /// An object of the API server.
    pub(crate) fn object(&self, kind: &str, name: &str) -> Result<Value, String> {
        let text = self.bed.kubectl(&["get", kind, name, "-o", "json"]).map_err(|error| error.to_string())?;
        serde_json::from_str(&text).map_err(|error| error.to_string())
    }

    /// The node's inventory, as a scheduler reads it.
    pub(crate) fn inventory(&self) -> Result<Node, String> {
        let node = self.object("node", self.agent.node().name())?;
        let text = node["metadata"]["annotations"]["partage.dev/inventory"].as_str().unwrap_or_default();
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    /// `kubectl apply`.
    pub(crate) fn apply(&self, manifest: &str) {
        self.bed.kubectl_with(&["apply", "-f", "-"], manifest).unwrap();
    }

    /// Waits until a pod's containers are all ready, or it has ended well.
    pub(crate) async fn runs(&self, name: &str) -> Value {
        eventually(&format!("{name} runs"), async || {
            let pod = self.object("pod", name)?;
            let statuses = pod["status"]["containerStatuses"].as_array().cloned().unwrap_or_default();
            let ready = !statuses.is_empty() && statuses.iter().all(|one| one["ready"] == true);
            match ready || pod["status"]["phase"] == "Succeeded" {
                true => Ok(pod),
                false => Err(format!("{}\n{}", pod["status"], self.agent.log())),
            }
        })
        .await
    }

    /// What a command in a pod writes; its words where it fails.
    pub(crate) fn exec(&self, pod: &str, command: &str) -> Result<String, String> {
        self.executed(&["exec", pod, "--", "sh", "-c", command])
    }

    /// The same in one of its containers.
    pub(crate) fn exec_in(&self, pod: &str, container: &str, command: &str) -> Result<String, String> {
        self.executed(&["exec", pod, "-c", container, "--", "sh", "-c", command])
    }

    /// Where kubelet could not be reached for a moment, nothing was run, and it is tried again.
    fn executed(&self, words: &[&str]) -> Result<String, String> {
        const TRIES: usize = 10;
        const UNREACHED: [&str; 4] = [
            "error dialing backend",
            "TLS handshake timeout",
            "connection refused",
            "unable to upgrade connection",
        ];
        let unreached = |said: &str| {
            !said.contains("command terminated") && UNREACHED.iter().any(|words| said.contains(words))
        };
        let mut said = self.bed.kubectl(words).map_err(|error| error.to_string());
        for _ in 1..TRIES {
            if !said.as_ref().is_err_and(|said| unreached(said)) {
                break;
            }
            std::thread::sleep(Duration::from_secs(1));
            said = self.bed.kubectl(words).map_err(|error| error.to_string());
        }
        said
    }

    /// The GPUs of a pod as it sees them: UUID and memory in MiB.
    pub(crate) fn sees(&self, pod: &str) -> Vec<(String, u64)> {
        gpus(&self.exec(pod, SMI).unwrap())
    }

    /// Waits until an annotation of a pod is there.
    pub(crate) async fn annotation(&self, pod: &str, key: &str) -> String {
        eventually(&format!("{pod} has {key}"), async || {
            let pod = self.object("pod", pod)?;
            let annotations = &pod["metadata"]["annotations"];
            annotations[key].as_str().map(String::from).ok_or_else(|| annotations.to_string())
        })
        .await
    }

    /// The grant that is written on a pod.
    pub(crate) async fn grant(&self, pod: &str) -> PodGrant {
        eventually(&format!("{pod} says its grant"), async || {
            let pod = self.object("pod", pod)?;
            let text = pod["metadata"]["annotations"][native::ANNOTATION].as_str().ok_or("no annotation")?;
            native::decode(text).map_err(|error| error.to_string())
        })
        .await
    }

    /// Waits until the reason why a container waits has these words.
    pub(crate) async fn waits(&self, pod: &str, words: &str) -> String {
        eventually(&format!("{pod} waits because {words}"), async || {
            let pod = self.object("pod", pod)?;
            let waiting = pod["status"]["containerStatuses"][0]["state"]["waiting"]["message"]
                .as_str()
                .unwrap_or_default();
            if waiting.contains(words) {
                Ok(waiting.to_string())
            } else {
                Err(format!("{}\n{}", pod["status"], self.agent.log()))
            }
        })
        .await
    }

    /// Waits until an event with this reason says these words.
    pub(crate) async fn event(&self, reason: &str, words: &str) {
        self.is_told(&format!("an event {reason}: {words}"), reason, words, |_| true).await;
    }

    /// Waits until an event about this object has this reason and these words.
    pub(crate) async fn told(&self, (kind, name): (&str, &str), reason: &str, words: &str) {
        let about = |regarding: &Value| regarding["kind"] == kind && regarding["name"] == name;
        self.is_told(&format!("{kind} {name} is told {reason}: {words}"), reason, words, about).await;
    }

    async fn is_told(&self, what: &str, reason: &str, words: &str, about: impl Fn(&Value) -> bool) {
        eventually(what, async || {
            let events = self
                .bed
                .kubectl(&["get", "events.events.k8s.io", "-A", "-o", "json"])
                .map_err(|error| error.to_string())?;
            let events: Value = serde_json::from_str(&events).map_err(|error| error.to_string())?;
            let all = events["items"].as_array().into_iter().flatten();
            let said: Vec<String> = all
                .filter(|event| event["reason"] == reason && about(&event["regarding"]))
                .map(|event| event["note"].to_string())
                .collect();
            match said.iter().any(|note| note.contains(words)) {
                true => Ok(()),
                false => Err(format!("{said:?}\n{}", self.agent.log())),
            }
        })
        .await;
    }

    /// Deletes a pod and waits until it is gone.
    pub(crate) fn delete(&self, pod: &str) {
        self.bed.kubectl(&["delete", "pod", pod, "--grace-period=1", "--wait"]).unwrap();
    }

    /// How many files of each kind the agent keeps on the node: CDI files of containers, regions, records of pods, names.
    pub(crate) fn kept(&self) -> [usize; 4] {
        ["/run/cdi", "/run/partage/regions", "/var/lib/partage/pods", "/run/partage/names"].map(|folder| {
            let path = self.agent.path(folder).unwrap();
            let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
            entries.filter(|entry| entry.file_name() != "partage.dev-driver.json").count()
        })
    }

    /// Waits until the agent keeps nothing: no pod holds anything.
    pub(crate) async fn nothing_is_kept(&self) {
        self.keeps([0, 0, 0]).await;
    }

    /// Waits until the agent keeps so many CDI files, regions and records. Names of pods that are gone stay until kubelet forgets
    /// them too, which it does when it gives their devices again.
    pub(crate) async fn keeps(&self, wanted: [usize; 3]) {
        eventually(&format!("{wanted:?} are kept"), async || {
            let kept = self.kept();
            if kept[..3] == wanted { Ok(()) } else { Err(format!("{kept:?}\n{}", self.agent.log())) }
        })
        .await;
    }
}

/// What a container sees of GPUs.
pub(crate) const SEES: &str = "nvidia-smi --query-gpu=uuid,memory.total --format=csv,noheader";

/// What a pod runs that says what it sees of GPUs when it starts, and ends when it is told to ([`Stage::crash`]). Whoever has
/// heard it may tell it: it knows by then what it was not told yet.
pub(crate) fn witness(name: &str) -> String {
    format!(
        "read was < /programs/{name}; {SEES}; exec 2>&-; now=$was; \
         while [ \"$now\" = \"$was\" ]; do sleep 0.5; read now < /programs/{name}; done; exit 1"
    )
}

/// A pod with [`witness`] whose container is started again when it ends.
pub(crate) fn lasting(name: &str, limits: &str) -> String {
    pod(name, limits, &witness(name)).replace("restartPolicy: Never", "restartPolicy: Always")
}

/// A pod of one container that asks and runs a command.
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
