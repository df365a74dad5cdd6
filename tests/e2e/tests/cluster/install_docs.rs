//! Runs the documented commands to install, use, update and uninstall Partage, on a node that is clean in the end.

use crate::test_image;
use partage_testkit::agent::install_driver;
use partage_testkit::bed::{BedProfile, TestBed};
use partage_testkit::binaries::{Binaries, BuildPaths, helm};
use partage_testkit::clients::Clients;
use partage_testkit::cluster::install_nvidia_smi;
use partage_testkit::doc_pages::{DocPage, repository_root, substitute};
use partage_testkit::eventually;
use partage_testkit::skip_or_fail;
use serde_json::Value;
use std::env::{join_paths, split_paths, var_os};
use std::fs;
use std::path::{Path, PathBuf};

/// Replacements for placeholders of the pages. The values are unusual but valid: `/var/run` is a link in the node's
/// root.
const SUBSTITUTIONS: [(&str, &str); 4] = [
    (
        "image.repository=registry.example/partage",
        "image.repository=localhost/partage --set settings.driver=simulated \
         --set runtimeSocket=/var/run/containerd/containerd.sock --set cdiDir=/var/run/cdi",
    ),
    ("gpu-1", "node1"),
    (" --settings node.yaml", " --settings $HOME/node.yaml"),
    // jq would only add colors.
    (" | jq", ""),
];

#[test]
fn documented_install_use_update_and_uninstall_work_and_leave_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let Some((archive, _)) = test_image::build_image(folder.path()) else { return };
    let Some(sample) = test_image::built_program("partage-sample") else { return };
    // nvidia-smi is one of the clients.
    let helm = match Clients::ready().and_then(|_| helm(&BuildPaths::from_environment())) {
        Ok(helm) => helm,
        Err(missing) => return skip_or_fail(&missing),
    };
    let Some(bed) = TestBed::for_test(BedProfile::one_node().debian().image(&archive)) else { return };
    install_nvidia_smi(&bed).unwrap();
    let programs = bed.node("node1").unwrap().path("/var/lib/programs").unwrap();
    fs::create_dir_all(&programs).unwrap();
    fs::copy(&sample, programs.join("partage-sample")).unwrap();
    let operator = Operator { bed: &bed, home: folder.path().to_path_buf(), helm };
    let before = operator.wait_for_clean_node();

    let install =
        DocPage::read("docs/install.md", &[("make image", "the image was built before the bed")]).unwrap();
    operator.install_with_helm(&install);
    operator.run_operations_page();
    operator.read_metrics();
    operator.update(&install);
    operator.clean_up_after_agent_kill(&install, &before);
    operator.install_without_helm(&install, &before);
    operator.install_for_nvidia_driver(&install, &before);
    install.check_complete().unwrap();
}

/// The administrator of the cluster.
struct Operator<'a> {
    bed: &'a TestBed,
    home: PathBuf,
    helm: PathBuf,
}

impl Operator<'_> {
    /// Runs commands of a page in one shell and returns their output.
    fn run_commands(&self, commands: &[String]) -> String {
        let script = substitute(&commands.join("\n"), &SUBSTITUTIONS);
        self.shell(&script).unwrap_or_else(|output| panic!("{script}\n{output}"))
    }

    fn shell(&self, script: &str) -> Result<String, String> {
        // Commands that wait for nodes would wait forever if these do not appear.
        let mut command = self.bed.command("timeout");
        let own = [self.helm.parent().unwrap(), Path::new(partage_e2e::testkit()).parent().unwrap()];
        let own =
            own.map(Path::to_path_buf).into_iter().chain([Binaries::ready().unwrap().folder().to_path_buf()]);
        let path = join_paths(own.chain(split_paths(&var_os("PATH").unwrap()))).unwrap();
        command.env("PATH", path).env("HOME", &self.home).current_dir(repository_root());
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

    /// Returns the node once Kubernetes has written its own annotations.
    fn wait_for_clean_node(&self) -> Value {
        self.bed.block_on(eventually("the node has its annotations", async || {
            let node = self.node();
            let annotations = node["metadata"]["annotations"].clone();
            if annotations["node.alpha.kubernetes.io/ttl"].is_string() {
                Ok(node)
            } else {
                Err(annotations.to_string())
            }
        }))
    }

    fn wait_for_shares(&self, shares: u32) {
        let path = r"jsonpath={.status.allocatable.partage\.dev/gpu}";
        self.kubectl(&format!("wait --for={path}={shares} node/node1 --timeout=300s"));
    }

    fn wait_until_running(&self, pod: &str) {
        self.kubectl(&format!("wait --for=condition=Ready pod/{pod} --timeout=300s"));
        // The DaemonSet's agent writes it, with its own token and behind the policies.
        let granted = r"jsonpath={.metadata.annotations.partage\.dev/grant}";
        self.kubectl(&format!("wait --for={granted} pod/{pod} --timeout=300s"));
    }

    /// Returns the memory of a container's GPU in MiB, as `nvidia-smi` reports it there.
    fn visible_memory_mib(&self, pod: &str) -> u64 {
        let output = self.kubectl(&format!(
            "exec {pod} -- nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits"
        ));
        output.trim().parse().expect(&output)
    }

    fn install_with_helm(&self, page: &DocPage) {
        let blocks = page.commands("With Helm");
        let [install, try_it] = &blocks[..] else { panic!("{blocks:?}") };
        self.run_commands(install);
        self.wait_for_shares(20);
        let columns = self.run_commands(try_it);
        assert!(columns.contains("node1") && columns.contains(" 20 "), "{columns}");
        self.wait_until_running("share");
        assert_eq!(self.visible_memory_mib("share"), 4096);
        self.check_agent_pod();
    }

    /// Checks the agent's pod as it runs in the cluster, not only as the manifest has it.
    fn check_agent_pod(&self) {
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
        // Without real GPUs it needs no privileges.
        assert_eq!(agent["securityContext"]["privileged"], Value::Null, "{agent:#}");
    }

    fn run_operations_page(&self) {
        let page = DocPage::read("docs/operations.md", &[]).unwrap();
        self.bed.kubectl_with(&["apply", "-f", "-"], OPERATIONS_PODS).unwrap();
        self.wait_until_running("train");
        self.wait_until_running("pair");
        let json = |text: &str| -> Value { serde_json::from_str(text).expect(text) };

        let [describe, inventory] = &page.commands("Inspect a node")[0][..] else { panic!() };
        let described = self.run_commands(std::slice::from_ref(describe));
        assert!(
            described.contains("partage.dev/memory") && described.contains("volcano.sh/vgpu-number"),
            "{described}"
        );
        let inventory = json(&self.run_commands(std::slice::from_ref(inventory)));
        assert_eq!(inventory["gpus"].as_array().map(Vec::len), Some(2), "{inventory:#}");

        let [grant, smi] = &page.commands("Inspect a pod")[0][..] else { panic!() };
        json(&self.run_commands(std::slice::from_ref(grant)));
        let smi = self.run_commands(std::slice::from_ref(smi));
        assert!(smi.contains("4096MiB"), "{smi}");
        self.allocate("train", "3000Mi").unwrap();
        let beyond = self.allocate("train", "4096Mi").unwrap_err();
        assert!(beyond.contains("out of memory") && beyond.contains("of 4.0 GiB"), "{beyond}");

        for command in &page.commands("Resize a running pod")[0] {
            self.run_commands(std::slice::from_ref(command));
        }
        for pod in ["train", "pair"] {
            self.bed.block_on(eventually("the pod is resized", async || {
                match self.visible_memory_mib(pod) {
                    6144 => Ok(()),
                    other => Err(format!("{pod} sees {other} MiB")),
                }
            }));
        }
        self.allocate("train", "4096Mi").unwrap();

        let settings = &DocPage::read("docs/install.md", &[]).unwrap().blocks("Settings", "yaml")[0];
        let settings = settings.strip_prefix("settings:\n").unwrap().replace("\n  ", "\n");
        fs::write(self.home.join("node.yaml"), settings.trim_start()).unwrap();
        let checked = self.run_commands(&page.commands("Settings")[0]);
        assert!(checked.contains("node.yaml: valid; any node accepts the dialects native"), "{checked}");
        page.check_complete().unwrap();
    }

    /// Allocates GPU memory in a pod for a moment, through the driver API.
    fn allocate(&self, pod: &str, memory: &str) -> Result<String, String> {
        let words = format!("exec {pod} -- /programs/partage-sample trainer --memory {memory} --seconds 0.1");
        let words: Vec<_> = words.split(' ').collect();
        self.bed.kubectl(&words).map_err(|error| error.to_string())
    }

    fn read_metrics(&self) {
        let page = DocPage::read("docs/metrics.md", &[]).unwrap();
        self.kubectl("create namespace monitoring");
        self.kubectl("create serviceaccount prometheus --namespace monitoring");
        let blocks = page.commands("Scrape it");
        let [allow, by_hand] = &blocks[..] else { panic!("{blocks:?}") };
        self.run_commands(allow);
        let agent = "get pods --namespace partage-system -l app.kubernetes.io/component=node -o jsonpath={.items[0].status.podIP}";
        let script = substitute(&by_hand.join("\n"), &[("<pod ip>", &self.kubectl(agent))]);
        self.bed.block_on(eventually("the account of Prometheus can read metrics", async || {
            let metrics = self.shell(&script)?;
            if metrics.contains("partage_gpu_memory_bytes{") { Ok(()) } else { Err(metrics) }
        }));
        page.check_complete().unwrap();
    }

    fn update(&self, page: &DocPage) {
        self.run_commands(&page.commands("Update")[0]);
        self.wait_for_shares(40);
        // Running pods are not affected.
        let pods: Value = serde_json::from_str(&self.kubectl("get pods -o json")).unwrap();
        for pod in pods["items"].as_array().unwrap() {
            assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0, "{pod:#}");
        }
        assert_eq!(self.visible_memory_mib("train"), 6144);
    }

    /// The agent is suspended, so that it is killed in the end and cleans up nothing.
    fn clean_up_after_agent_kill(&self, page: &DocPage, before: &Value) {
        for left in
            [self.entry_names("/run/partage/regions"), self.entry_names("/run/cdi"), self.plugin_sockets()]
        {
            assert!(!left.is_empty());
        }
        let node = self.bed.node("node1").unwrap();
        node.run("/bed/bin/busybox", ["sh", "-c", "kill -STOP $(pidof partage)"]).unwrap();
        self.kubectl("delete pod share train pair --wait");
        self.clean_up_and_uninstall(&page.commands("Uninstall")[0], before);
    }

    /// The node must be clean before the last agent goes: no process would be left to clean it.
    fn clean_up_and_uninstall(&self, commands: &[String], before: &Value) {
        let is_removal = |command: &String| command.contains(" uninstall ") || command.contains(" delete ");
        let end = commands.iter().position(is_removal).unwrap();
        self.run_commands(&commands[..end]);
        self.assert_node_clean(before);
        self.run_commands(&commands[end..]);
        self.assert_nothing_left();
    }

    fn install_without_helm(&self, page: &DocPage, before: &Value) {
        self.run_commands(&page.commands("Without Helm")[0]);
        self.kubectl("rollout status daemonset/partage-node --namespace partage-system --timeout=240s");
        self.wait_for_shares(20);
        self.shell("kubectl apply -f examples/pod.yaml").unwrap();
        self.wait_until_running("share");
        let visible =
            self.bed.kubectl(&["exec", "share", "--", "sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES"]).unwrap();
        assert!(visible.starts_with("GPU-"), "{visible}");
        self.kubectl("delete pod share --wait");
        self.clean_up_and_uninstall(&page.commands("Uninstall")[1], before);
    }

    /// On a host with NVIDIA's driver: the agent runs in a pod and sees the host's files under other paths than
    /// containers will.
    fn install_for_nvidia_driver(&self, page: &DocPage, before: &Value) {
        let node = self.bed.node("node1").unwrap();
        let program = test_image::built_program("partage").unwrap();
        // A directory of the host that the agent's pod mounts.
        install_driver(node, &program, "A100-SXM4-40GB", "/dev/driver").unwrap();
        let install = substitute(&page.commands("With Helm")[0].join("\n"), &SUBSTITUTIONS);
        self.shell(&install.replace("settings.driver=simulated", "settings.driver=nvidia")).unwrap();
        self.wait_for_shares(20);
        self.bed.kubectl_with(&["apply", "-f", "-"], DRIVER_POD).unwrap();
        self.wait_until_running("real");
        let nodes = self.kubectl("exec real -- sh -c ls${IFS}-d${IFS}/dev/nvidia*");
        let gpus = nodes.lines().filter(|name| name.trim_start_matches("/dev/nvidia").parse::<u32>().is_ok());
        assert_eq!(gpus.count(), 1, "{nodes}");
        let visible = self.kubectl("exec real -- printenv NVIDIA_VISIBLE_DEVICES");
        let output = self.kubectl(&format!(
            "exec real -- nvidia-smi --id={} --query-gpu=memory.total --format=csv,noheader,nounits",
            visible.trim()
        ));
        assert_eq!(output.trim(), "4096");
        self.kubectl("delete pod real --wait");
        self.clean_up_and_uninstall(&page.commands("Uninstall")[0], before);
    }

    fn assert_node_clean(&self, before: &Value) {
        for gone in ["/var/lib/partage", "/run/partage"] {
            assert!(!self.node_path(gone).exists(), "{gone} still exists");
        }
        assert_eq!(self.entry_names("/run/cdi"), Vec::<String>::new());
        assert_eq!(self.plugin_sockets(), Vec::<String>::new());
        let after = self.node();
        for part in ["annotations", "labels"] {
            assert_eq!(after["metadata"][part], before["metadata"][part]);
        }
        assert!(after["status"]["allocatable"].get("partage.dev/memory").is_none(), "{}", after["status"]);
        // Kubelet owns the device counts: it keeps them at 0 for plugins that have gone, once it has noticed. The agent
        // owned the amounts.
        let counted = eventually("all device counts are 0", async || {
            let allocatable = self.node()["status"]["allocatable"].clone();
            let ours = allocatable.as_object().into_iter().flatten().filter(|(name, _)| name.contains('/'));
            let left: Vec<_> = ours.filter(|(_, amount)| **amount != "0").collect();
            if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
        });
        self.bed.block_on(counted);
    }

    fn assert_nothing_left(&self) {
        let kinds = "namespaces,clusterroles,clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings";
        assert_eq!(self.kubectl(&format!("get {kinds} -l app.kubernetes.io/name=partage -o name")), "");
        let there = self.kubectl("get namespaces -o name");
        assert!(!there.contains("partage-system"), "{there}");
    }

    fn node_path(&self, inside: &str) -> PathBuf {
        self.bed.node("node1").unwrap().path(inside).unwrap()
    }

    fn entry_names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.node_path(folder)).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Returns the sockets of plugins, without kubelet's own.
    fn plugin_sockets(&self) -> Vec<String> {
        let mut names = self.entry_names("/var/lib/kubelet/device-plugins");
        names.retain(|name| !name.starts_with("kubelet"));
        names
    }
}

/// The state of the simulated driver, which NVIDIA's driver keeps in the kernel, is mounted as a volume.
const DRIVER_POD: &str = "
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

/// The pods that the operations page refers to: one container with a share, and two.
const OPERATIONS_PODS: &str = "
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
