//! Partage as the pages say that it is installed, used, updated and taken away: their own commands, on a node that is clean in the
//! end.

use crate::built;
use partage_testkit::agent::install_driver;
use partage_testkit::bed::{Bed, Profile};
use partage_testkit::binaries::{Binaries, Settings, helm};
use partage_testkit::clients::Clients;
use partage_testkit::cluster::bring_nvidia_smi;
use partage_testkit::eventually;
use partage_testkit::pages::{Page, meant, repository};
use partage_testkit::skip_or_fail;
use serde_json::Value;
use std::env::{join_paths, split_paths, var_os};
use std::fs;
use std::path::{Path, PathBuf};

/// What the pages have for what is here. Values of a node that is unusual, but not wrong: `/var/run` is a link of its root.
const HERE: [(&str, &str); 4] = [
    (
        "image.repository=registry.example/partage",
        "image.repository=localhost/partage --set settings.driver=simulated \
         --set runtimeSocket=/var/run/containerd/containerd.sock --set cdi=/var/run/cdi",
    ),
    ("gpu-1", "node1"),
    (" --settings node.yaml", " --settings $HOME/node.yaml"),
    // It shows the same in colours.
    (" | jq", ""),
];

#[test]
fn what_the_pages_say_works_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let Some((archive, _)) = built::image(folder.path()) else { return };
    let Some(sample) = built::beside("partage-sample") else { return };
    // nvidia-smi is one of the clients.
    let helm = match Clients::ready().and_then(|_| helm(&Settings::from_environment())) {
        Ok(helm) => helm,
        Err(missing) => return skip_or_fail(&missing),
    };
    let Some(bed) = Bed::for_test(Profile::one_node().debian().image(&archive)) else { return };
    bring_nvidia_smi(&bed).unwrap();
    let programs = bed.node("node1").unwrap().path("/var/lib/programs").unwrap();
    fs::create_dir_all(&programs).unwrap();
    fs::copy(&sample, programs.join("partage-sample")).unwrap();
    let person = Person { bed: &bed, home: folder.path().to_path_buf(), helm };
    let before = person.node_by_itself();

    let install =
        Page::read("docs/install.md", &[("make image", "the image was made before the bed")]).unwrap();
    person.installs(&install);
    person.operates();
    person.reads_metrics();
    person.updates(&install);
    person.withdraws_what_a_killed_agent_left(&install, &before);
    person.installs_without_helm(&install, &before);
    person.installs_for_a_driver(&install, &before);
    install.is_done().unwrap();
}

/// Who looks after the cluster.
struct Person<'a> {
    bed: &'a Bed,
    home: PathBuf,
    helm: PathBuf,
}

impl Person<'_> {
    /// Runs commands of a page, one shell for all of them; what they wrote.
    fn does(&self, commands: &[String]) -> String {
        let script = meant(&commands.join("\n"), &HERE);
        self.shell(&script).unwrap_or_else(|said| panic!("{script}\n{said}"))
    }

    fn shell(&self, script: &str) -> Result<String, String> {
        // What waits for nodes waits for ever where they do not come.
        let mut command = self.bed.command("timeout");
        let own = [self.helm.parent().unwrap(), Path::new(partage_e2e::testkit()).parent().unwrap()];
        let own =
            own.map(Path::to_path_buf).into_iter().chain([Binaries::ready().unwrap().folder().to_path_buf()]);
        let path = join_paths(own.chain(split_paths(&var_os("PATH").unwrap()))).unwrap();
        command.env("PATH", path).env("HOME", &self.home).current_dir(repository());
        for kept in ["XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"] {
            command.env_remove(kept);
        }
        let output = command.args(["300", "bash", "-euo", "pipefail", "-c", script]).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        if output.status.success() { Ok(out) } else { Err(format!("{}: {out}{err}", output.status)) }
    }

    fn kubectl(&self, words: &str) -> String {
        let words: Vec<_> = words.split(' ').collect();
        self.bed.kubectl(&words).unwrap()
    }

    fn node(&self) -> Value {
        serde_json::from_str(&self.kubectl("get node node1 -o json")).unwrap()
    }

    /// The node when Kubernetes has written on it what it writes on every node, in its own time.
    fn node_by_itself(&self) -> Value {
        self.bed.block_on(eventually("the node is as Kubernetes has it", async || {
            let node = self.node();
            let annotations = node["metadata"]["annotations"].clone();
            match annotations["node.alpha.kubernetes.io/ttl"].is_string() {
                true => Ok(node),
                false => Err(annotations.to_string()),
            }
        }))
    }

    fn has_shares(&self, shares: u32) {
        let path = r"jsonpath={.status.allocatable.partage\.dev/gpu}";
        self.kubectl(&format!("wait --for={path}={shares} node/node1 --timeout=300s"));
    }

    fn runs(&self, pod: &str) {
        self.kubectl(&format!("wait --for=condition=Ready pod/{pod} --timeout=300s"));
        // Written by the agent of the DaemonSet, with its own token and behind the policies.
        let granted = r"jsonpath={.metadata.annotations.partage\.dev/grant}";
        self.kubectl(&format!("wait --for={granted} pod/{pod} --timeout=300s"));
    }

    /// What a container has of a GPU, in MiB, as `nvidia-smi` there says.
    fn memory_of(&self, pod: &str) -> u64 {
        let said = self.kubectl(&format!(
            "exec {pod} -- nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits"
        ));
        said.trim().parse().expect(&said)
    }

    fn installs(&self, page: &Page) {
        let blocks = page.commands("With helm");
        let [install, try_it] = &blocks[..] else { panic!("{blocks:?}") };
        self.does(install);
        self.has_shares(20);
        let columns = self.does(try_it);
        assert!(columns.contains("node1") && columns.contains(" 20 "), "{columns}");
        self.runs("share");
        assert_eq!(self.memory_of("share"), 4096);
        self.is_installed_as_it_should_be();
    }

    /// The pod that the cluster runs, and not only what the manifest asks for.
    fn is_installed_as_it_should_be(&self) {
        let pods =
            self.kubectl("get pods --namespace partage-system -l app.kubernetes.io/component=node -o json");
        let pods: Value = serde_json::from_str(&pods).unwrap();
        let spec = &pods["items"][0]["spec"];
        assert_eq!(spec["priorityClassName"], "system-node-critical");
        assert!(spec["priority"].as_u64() > Some(2_000_000_000), "{}", spec["priority"]);
        let agent = &spec["containers"][0];
        for (probe, path) in
            [("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")]
        {
            assert_eq!(agent[probe]["httpGet"]["path"], path, "{agent:#}");
        }
        for amount in ["cpu", "memory"] {
            assert!(agent["resources"]["requests"][amount].is_string(), "{agent:#}");
        }
        assert!(agent["resources"]["limits"]["memory"].is_string(), "{agent:#}");
        // Without real GPUs it needs no more.
        assert_eq!(agent["securityContext"]["privileged"], Value::Null, "{agent:#}");
    }

    fn operates(&self) {
        let page = Page::read("docs/operations.md", &[]).unwrap();
        self.bed.kubectl_with(&["apply", "-f", "-"], PODS).unwrap();
        self.runs("train");
        self.runs("pair");
        let json = |text: &str| -> Value { serde_json::from_str(text).expect(text) };

        let [describe, inventory] = &page.commands("What does a node have?")[0][..] else { panic!() };
        let described = self.does(std::slice::from_ref(describe));
        assert!(
            described.contains("partage.dev/memory") && described.contains("volcano.sh/vgpu-number"),
            "{described}"
        );
        let inventory = json(&self.does(std::slice::from_ref(inventory)));
        assert_eq!(inventory["gpus"].as_array().map(Vec::len), Some(2), "{inventory:#}");

        let [grant, smi] = &page.commands("What does a pod have?")[0][..] else { panic!() };
        json(&self.does(std::slice::from_ref(grant)));
        let smi = self.does(std::slice::from_ref(smi));
        assert!(smi.contains("4096MiB"), "{smi}");
        self.takes("train", "3000Mi").unwrap();
        let beyond = self.takes("train", "4096Mi").unwrap_err();
        assert!(beyond.contains("out of memory") && beyond.contains("of 4.0 GiB"), "{beyond}");

        for command in &page.commands("Other amounts for a pod that runs")[0] {
            self.does(std::slice::from_ref(command));
        }
        for pod in ["train", "pair"] {
            self.bed.block_on(eventually("it is resized", async || match self.memory_of(pod) {
                6144 => Ok(()),
                other => Err(format!("{pod} has {other} MiB")),
            }));
        }
        self.takes("train", "4096Mi").unwrap();

        let settings = &Page::read("docs/install.md", &[]).unwrap().blocks("Settings", "yaml")[0];
        let settings = settings.strip_prefix("settings:\n").unwrap().replace("\n  ", "\n");
        fs::write(self.home.join("node.yaml"), settings.trim_start()).unwrap();
        let checked = self.does(&page.commands("Settings")[0]);
        assert!(checked.contains("node.yaml: right; any node speaks native"), "{checked}");
        page.is_done().unwrap();
    }

    /// Holds so much of its GPU for a moment, by the driver's API.
    fn takes(&self, pod: &str, memory: &str) -> Result<String, String> {
        let words = format!("exec {pod} -- /programs/partage-sample trainer --memory {memory} --seconds 0.1");
        let words: Vec<_> = words.split(' ').collect();
        self.bed.kubectl(&words).map_err(|error| error.to_string())
    }

    fn reads_metrics(&self) {
        let page = Page::read("docs/metrics.md", &[]).unwrap();
        self.kubectl("create namespace monitoring");
        self.kubectl("create serviceaccount prometheus --namespace monitoring");
        let blocks = page.commands("Scrape it");
        let [allow, by_hand] = &blocks[..] else { panic!("{blocks:?}") };
        self.does(allow);
        let agent = "get pods --namespace partage-system -l app.kubernetes.io/component=node -o jsonpath={.items[0].status.podIP}";
        let script = meant(&by_hand.join("\n"), &[("<pod ip>", &self.kubectl(agent))]);
        self.bed.block_on(eventually("Prometheus' account reads metrics", async || {
            let metrics = self.shell(&script)?;
            if metrics.contains("partage_gpu_memory_bytes{") { Ok(()) } else { Err(metrics) }
        }));
        page.is_done().unwrap();
    }

    fn updates(&self, page: &Page) {
        self.does(&page.commands("Update")[0]);
        self.has_shares(40);
        // Nobody who runs has noticed.
        let pods: Value = serde_json::from_str(&self.kubectl("get pods -o json")).unwrap();
        for pod in pods["items"].as_array().unwrap() {
            assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0, "{pod:#}");
        }
        assert_eq!(self.memory_of("train"), 6144);
    }

    /// The agent is stopped, so that it is killed in the end, and has tidied up nothing.
    fn withdraws_what_a_killed_agent_left(&self, page: &Page, before: &Value) {
        for left in [self.names("/run/partage/regions"), self.names("/run/cdi"), self.sockets()] {
            assert!(!left.is_empty());
        }
        let node = self.bed.node("node1").unwrap();
        node.run("/bed/bin/busybox", ["sh", "-c", "kill -STOP $(pidof partage)"]).unwrap();
        self.kubectl("delete pod share train pair --wait");
        self.withdraws_and_uninstalls(&page.commands("Uninstall")[0], before);
    }

    /// The node is clean before the last agent goes: nobody would be left to tidy it.
    fn withdraws_and_uninstalls(&self, commands: &[String], before: &Value) {
        let ends = |command: &String| command.contains(" uninstall ") || command.contains(" delete ");
        let end = commands.iter().position(ends).unwrap();
        self.does(&commands[..end]);
        self.finds_a_clean_node(before);
        self.does(&commands[end..]);
        self.finds_nothing_left();
    }

    fn installs_without_helm(&self, page: &Page, before: &Value) {
        self.does(&page.commands("Without helm")[0]);
        self.kubectl("rollout status daemonset/partage-node --namespace partage-system --timeout=240s");
        self.has_shares(20);
        self.shell("kubectl apply -f examples/pod.yaml").unwrap();
        self.runs("share");
        let visible =
            self.bed.kubectl(&["exec", "share", "--", "sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES"]).unwrap();
        assert!(visible.starts_with("GPU-"), "{visible}");
        self.kubectl("delete pod share --wait");
        self.withdraws_and_uninstalls(&page.commands("Uninstall")[1], before);
    }

    /// On a host with NVIDIA's driver: the agent is a pod and sees the host's files elsewhere than containers will.
    fn installs_for_a_driver(&self, page: &Page, before: &Value) {
        let node = self.bed.node("node1").unwrap();
        let program = built::beside("partage").unwrap();
        // In a folder that the agent's pod has of the host.
        install_driver(node, &program, "A100-SXM4-40GB", "/dev/driver").unwrap();
        let install = meant(&page.commands("With helm")[0].join("\n"), &HERE);
        self.shell(&install.replace("settings.driver=simulated", "settings.driver=nvidia")).unwrap();
        self.has_shares(20);
        self.bed.kubectl_with(&["apply", "-f", "-"], ON_A_DRIVER).unwrap();
        self.runs("real");
        let nodes = self.kubectl("exec real -- sh -c ls${IFS}-d${IFS}/dev/nvidia*");
        let gpus = nodes.lines().filter(|name| name.trim_start_matches("/dev/nvidia").parse::<u32>().is_ok());
        assert_eq!(gpus.count(), 1, "{nodes}");
        let visible = self.kubectl("exec real -- printenv NVIDIA_VISIBLE_DEVICES");
        let said = self.kubectl(&format!(
            "exec real -- nvidia-smi --id={} --query-gpu=memory.total --format=csv,noheader,nounits",
            visible.trim()
        ));
        assert_eq!(said.trim(), "4096");
        self.kubectl("delete pod real --wait");
        self.withdraws_and_uninstalls(&page.commands("Uninstall")[0], before);
    }

    fn finds_a_clean_node(&self, before: &Value) {
        for gone in ["/var/lib/partage", "/run/partage"] {
            assert!(!self.path(gone).exists(), "{gone} is left");
        }
        assert_eq!(self.names("/run/cdi"), Vec::<String>::new());
        assert_eq!(self.sockets(), Vec::<String>::new());
        let after = self.node();
        for part in ["annotations", "labels"] {
            assert_eq!(after["metadata"][part], before["metadata"][part]);
        }
        assert!(after["status"]["allocatable"].get("partage.dev/memory").is_none(), "{}", after["status"]);
        // Counts are kubelet's: it keeps them at 0 for plugins that have gone, once it has heard of that. Amounts were ours.
        let counted = eventually("nothing is counted any more", async || {
            let allocatable = self.node()["status"]["allocatable"].clone();
            let ours = allocatable.as_object().into_iter().flatten().filter(|(name, _)| name.contains('/'));
            let left: Vec<_> = ours.filter(|(_, amount)| **amount != "0").collect();
            if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
        });
        self.bed.block_on(counted);
    }

    fn finds_nothing_left(&self) {
        let kinds = "namespaces,clusterroles,clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings";
        assert_eq!(self.kubectl(&format!("get {kinds} -l app.kubernetes.io/name=partage -o name")), "");
        let there = self.kubectl("get namespaces -o name");
        assert!(!there.contains("partage-system"), "{there}");
    }

    fn path(&self, inside: &str) -> PathBuf {
        self.bed.node("node1").unwrap().path(inside).unwrap()
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Those of plugins, kubelet's own left out.
    fn sockets(&self) -> Vec<String> {
        let mut names = self.names("/var/lib/kubelet/device-plugins");
        names.retain(|name| !name.starts_with("kubelet"));
        names
    }
}

/// The simulated driver's state, which NVIDIA's has in the kernel, comes as a volume.
const ON_A_DRIVER: &str = "
apiVersion: v1
kind: Pod
metadata: {name: real}
spec:
  terminationGracePeriodSeconds: 1
  volumes: [{name: driver, hostPath: {path: /dev/driver}}]
  containers:
    - name: main
      image: localhost/debian:bed
      imagePullPolicy: Never
      command: [sleep, infinity]
      volumeMounts: [{name: driver, mountPath: /dev/driver}]
      resources: {limits: {partage.dev/gpu: 1, partage.dev/memory: 4Gi}}
";

/// What the page of operations speaks of: one container with a share, and two.
const PODS: &str = "
apiVersion: v1
kind: Pod
metadata: {name: train}
spec:
  terminationGracePeriodSeconds: 1
  volumes: [{name: programs, hostPath: {path: /var/lib/programs}}]
  containers:
    - name: main
      image: localhost/debian:bed
      imagePullPolicy: Never
      command: [sleep, infinity]
      volumeMounts: [{name: programs, mountPath: /programs, readOnly: true}]
      resources: {limits: {partage.dev/gpu: 1, partage.dev/memory: 4Gi, partage.dev/cores: 30}}
---
apiVersion: v1
kind: Pod
metadata: {name: pair}
spec:
  terminationGracePeriodSeconds: 1
  containers:
    - name: trainer
      image: localhost/debian:bed
      imagePullPolicy: Never
      command: [sleep, infinity]
      resources: {limits: {partage.dev/gpu: 1, partage.dev/memory: 4Gi, partage.dev/cores: 30}}
    - name: helper
      image: localhost/debian:bed
      imagePullPolicy: Never
      command: [sleep, infinity]
      resources: {limits: {partage.dev/gpu: 1, partage.dev/memory: 1Gi, partage.dev/cores: 20}}
";
