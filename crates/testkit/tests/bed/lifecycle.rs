//! The bed itself: it comes up, its parts can be broken and mended, and nothing of it stays.

use partage_testkit::bed::{Bed, BedError, Cgroups, Component, NodeProfile, Profile};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

/// A pod of one container that does `script`.
fn pod(name: &str, script: &str, more: &str) -> String {
    let script = serde_json::to_string(script).unwrap();
    format!(
        r#"{{"apiVersion": "v1", "kind": "Pod", "metadata": {{"name": "{name}"}}, "spec": {{
            "terminationGracePeriodSeconds": 0, {more}
            "containers": [{{"name": "main", "image": "localhost/busybox:bed", "imagePullPolicy": "Never",
                             "command": ["sh", "-c", {script}]}}]}}}}"#
    )
}

const FOREVER: &str = "echo up; trap 'exit 0' TERM; while :; do sleep 1; done";

fn apply(bed: &Bed, manifest: &str) {
    bed.kubectl_with(&["apply", "-f", "-"], manifest).unwrap();
}

fn wait_for(bed: &Bed, pod: &str, condition: &str) {
    bed.kubectl(&["wait", &format!("--for={condition}"), &format!("pod/{pod}"), "--timeout=300s"]).unwrap();
}

fn run_pod(bed: &Bed, name: &str, script: &str, more: &str) {
    apply(bed, &pod(name, script, more));
    wait_for(bed, name, "condition=Ready");
}

/// Looks until it holds; a deadline ends what never will.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(300), "{what} did not come about");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn two_beds_and_their_nodes_do_not_see_each_other() {
    let mixed = Profile::control_plane()
        .node(NodeProfile::new("old"))
        .node(NodeProfile::new("new").cgroups(Cgroups::V2));
    let Some(bed) = Bed::for_test(mixed) else { return };
    let other = Bed::for_test(Profile::control_plane()).expect("where one bed stands, there is room for two");

    // A pod on either node; they reach each other and the API server by its name.
    for node in ["old", "new"] {
        run_pod(
            &bed,
            node,
            &format!("echo {node} > /index.html; httpd -f -p 80 -h /"),
            &format!(r#""nodeName": "{node}","#),
        );
    }
    let address = bed.kubectl(&["get", "pod", "new", "-o", "jsonpath={.status.podIP}"]).unwrap();
    let ask = ["exec", "old", "--", "wget", "-q", "-O-", &format!("http://{address}/")];
    eventually("new answers", || bed.kubectl(&ask).is_ok_and(|heard| heard == "new\n"));

    // v1 has a hierarchy per controller, v2 one for all; both begin at the node itself.
    let cgroups = |pod: &str| bed.kubectl(&["exec", pod, "--", "cat", "/proc/1/mountinfo"]).unwrap();
    // A machine that has only v2 gives only that.
    let v1 = bed.node("old").unwrap().cgroups() == Cgroups::V1;
    assert_eq!(cgroups("old").contains(" - cgroup cgroup rw,devices"), v1);
    assert!(!cgroups("new").contains(" - cgroup cgroup "));
    assert!(cgroups("new").contains(" - cgroup2 "));

    let pods = other.kubectl(&["get", "pods", "-o", "name"]).unwrap();
    assert_eq!(pods, "", "another cluster has other pods");
}

#[test]
fn pods_reach_the_api_server_with_their_own_rights() {
    let Some(bed) = Bed::for_test(Profile::one_node()) else { return };
    apply(
        &bed,
        r#"
apiVersion: v1
kind: ServiceAccount
metadata: {name: reader}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: reader}
rules: [{apiGroups: [""], resources: [pods], verbs: [list]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: reader}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: reader}
subjects: [{kind: ServiceAccount, name: reader, namespace: default}]
"#,
    );
    // The node's kubectl, lent to the pod.
    let tools =
        r#""serviceAccountName": "reader", "volumes": [{"name": "bin", "hostPath": {"path": "/bed/bin"}}],"#;
    let manifest = pod("caller", FOREVER, tools)
        .replace(r#""command""#, r#""volumeMounts": [{"name": "bin", "mountPath": "/tools"}], "command""#);
    apply(&bed, &manifest);
    wait_for(&bed, "caller", "condition=Ready");
    let ask = |words: &[&str]| {
        let program = ["exec", "caller", "--", "/tools/kubectl", "--server=https://kubernetes.default"];
        bed.kubectl(&[&program[..], words].concat())
    };
    let token = "--token=$(cat /var/run/secrets/kubernetes.io/serviceaccount/token)";
    let in_shell = |words: &str| {
        let line = format!(
            "/tools/kubectl --server=https://kubernetes.default \
             --certificate-authority=/var/run/secrets/kubernetes.io/serviceaccount/ca.crt \"{token}\" {words}"
        );
        bed.kubectl(&["exec", "caller", "--", "sh", "-c", &line])
    };
    assert_eq!(in_shell("get pods -o name").unwrap(), "pod/caller\n");
    let refused = in_shell("get secrets").unwrap_err().to_string();
    assert!(
        refused.contains(r#"User "system:serviceaccount:default:reader" cannot list resource "secrets""#),
        "{refused}"
    );
    assert!(ask(&["get", "pods"]).is_err(), "without the cluster's authority it is not believed");

    // People have certificates, and what RBAC gives them.
    let alice = bed.client_as("alice", Some("readers")).unwrap();
    let pods: kube::Api<k8s_openapi::api::core::v1::Pod> = kube::Api::default_namespaced(alice);
    let refused = bed.block_on(pods.list(&Default::default())).unwrap_err().to_string();
    assert!(refused.contains(r#"User "alice" cannot list resource "pods""#), "{refused}");
    bed.kubectl(&["create", "rolebinding", "alice", "--role=reader", "--group=readers"]).unwrap();
    // The API server hears of what it was told itself, a moment later.
    eventually("alice may read", || {
        bed.block_on(pods.list(&Default::default())).is_ok_and(|seen| seen.items.len() == 1)
    });
}

#[test]
fn every_part_can_be_killed_paused_and_restarted() {
    let Some(bed) = Bed::for_test(Profile::one_node()) else { return };
    let node = bed.node("node1").unwrap();
    run_pod(&bed, "steady", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.1; done", "");
    let quick = |words: &[&str]| bed.kubectl(&[words, &["--request-timeout=2s"]].concat());

    // A paused store: nothing can be written; nothing is lost.
    bed.etcd().pause();
    assert!(quick(&["create", "configmap", "during"]).is_err());
    bed.etcd().resume();
    eventually("writing goes on", || {
        quick(&["create", "configmap", "after"]).is_ok() || quick(&["get", "configmap", "after"]).is_ok()
    });

    // A killed store and a killed server: what was written is there.
    bed.kubectl(&["create", "configmap", "kept"]).unwrap();
    bed.etcd().kill();
    assert_eq!(bed.etcd().process(), None);
    bed.etcd().start().unwrap();
    bed.apiserver().kill();
    assert!(quick(&["get", "configmap", "kept"]).is_err());
    bed.apiserver().start().unwrap();
    bed.api_ready().unwrap();
    bed.kubectl(&["get", "configmap", "kept"]).unwrap();

    // Containers do not notice that containerd is gone.
    let process = container_process(&bed, "steady");
    let born = || {
        fs::read_to_string(format!("/proc/{process}/stat")).unwrap().split(' ').nth(21).unwrap().to_string()
    };
    let before = born();
    node.containerd().kill();
    assert_eq!(born(), before);
    node.containerd().start().unwrap();
    eventually("exec works again", || bed.kubectl(&["exec", "steady", "--", "true"]).is_ok());
    let restarts = ["get", "pod", "steady", "-o", "jsonpath={.status.containerStatuses[0].restartCount}"];
    assert_eq!((bed.kubectl(&restarts).unwrap(), born()), ("0".to_string(), before));

    // A paused kubelet starts nothing; a resumed one does.
    node.kubelet().pause();
    eventually("kubelet is stopped", || state(node.kubelet()) == 'T');
    apply(&bed, &pod("waits", FOREVER, r#""nodeName": "node1","#));
    let phase = || bed.kubectl(&["get", "pod", "waits", "-o", "jsonpath={.status.phase}"]).unwrap();
    assert_eq!(phase(), "Pending");
    node.kubelet().resume();
    wait_for(&bed, "waits", "condition=Ready");

    // So does a paused containerd, and a paused API server answers nobody.
    node.containerd().pause();
    apply(&bed, &pod("later", FOREVER, r#""nodeName": "node1","#));
    node.containerd().resume();
    wait_for(&bed, "later", "condition=Ready");
    bed.apiserver().pause();
    assert!(quick(&["get", "configmap", "kept"]).is_err());
    bed.apiserver().resume();
    bed.api_ready().unwrap();
    node.kubelet().restart().unwrap();
    bed.node_ready("node1").unwrap();
    assert_eq!(bed.kubectl(&restarts).unwrap(), "0");

    // What is paused goes with the rest: with its node, and with the bed.
    node.containerd().pause();
    node.reboot().unwrap();
    bed.etcd().pause();
    node.kubelet().pause();
}

/// R, S or T: what the kernel says that a program does.
fn state(component: &Component) -> char {
    let stat = fs::read_to_string(format!("/proc/{}/stat", component.process().unwrap())).unwrap();
    stat.rsplit(") ").next().unwrap().chars().next().unwrap()
}

/// The first process of a pod's container, by its number on the machine: the one whose parent is not in the pod.
fn container_process(bed: &Bed, pod: &str) -> u32 {
    let uid = bed.kubectl(&["get", "pod", pod, "-o", "jsonpath={.metadata.uid}"]).unwrap();
    let processes =
        fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let read =
        |process: u32, file: &str| fs::read_to_string(format!("/proc/{process}/{file}")).unwrap_or_default();
    let mut ours: Vec<u32> = processes
        .filter(|process| {
            read(*process, "cgroup").contains(&uid) && read(*process, "cmdline").starts_with("sh")
        })
        .collect();
    ours.sort_by_key(|process| {
        read(*process, "stat").split(' ').nth(21).unwrap_or_default().parse().unwrap_or(u64::MAX)
    });
    *ours.first().expect("the container has a process")
}

#[test]
fn a_reboot_loses_memory_and_keeps_the_disk() {
    let Some(bed) = Bed::for_test(Profile::one_node()) else { return };
    let node = bed.node("node1").unwrap();
    run_pod(&bed, "one", FOREVER, "");
    let boot_id =
        || bed.kubectl(&["get", "node", "node1", "-o", "jsonpath={.status.nodeInfo.bootID}"]).unwrap();
    let before = boot_id();
    fs::write(node.path("/run/mark").unwrap(), "").unwrap();
    fs::write(node.path("/var/lib/mark").unwrap(), "").unwrap();
    fs::write(node.path("/etc/mark").unwrap(), "").unwrap();
    assert!(
        !Path::new("/run/mark").exists()
            && !Path::new("/var/lib/mark").exists()
            && !Path::new("/etc/mark").exists()
    );
    let planted = fs::write(node.path("/bed/bin/kubelet").unwrap(), "").unwrap_err();
    assert_eq!(planted.kind(), ErrorKind::ReadOnlyFilesystem, "the programs are the machine's");
    let kubelet = node.kubelet().process().unwrap();

    node.switch_off();
    assert!(!Path::new(&format!("/proc/{kubelet}")).exists());
    let error = node.path("/run").unwrap_err().to_string();
    assert_eq!(error, "reaching node1 failed: it is switched off");
    node.switch_on().unwrap();

    eventually("the node tells its new boot id", || boot_id() != before);
    assert!(!node.path("/run/mark").unwrap().exists());
    assert!(node.path("/var/lib/mark").unwrap().exists() && node.path("/etc/mark").unwrap().exists());
    let restarts = ["get", "pod", "one", "-o", "jsonpath={.status.containerStatuses[0].restartCount}"];
    eventually("the pod is started again", || bed.kubectl(&restarts).unwrap() == "1");
    wait_for(&bed, "one", "condition=Ready");
}

#[test]
fn a_part_that_ends_by_itself_is_named_with_its_last_words() {
    let broken = Profile::control_plane()
        .extender(serde_json::json!({ "urlPrefix": "http://127.0.0.1:1", "wight": 1 }));
    let bed = match Bed::start(broken.node(NodeProfile::new("node1"))) {
        Err(BedError::Ended { name, said, log, .. }) => {
            assert_eq!(name, "kube-scheduler");
            assert!(said.contains("wight"), "{said}");
            assert!(log.exists(), "logs of a bed that failed are kept");
            fs::remove_dir_all(log.parent().unwrap()).unwrap();
            return;
        }
        Err(error @ (BedError::Missing(_) | BedError::NotRoot | BedError::NoTool { .. })) => {
            return partage_testkit::skip_or_fail(&error);
        }
        other => other.unwrap(),
    };
    panic!("a scheduler with a broken configuration runs: {}", bed.report());
}

/// A test that fails says what matters of its bed, and keeps the logs.
#[test]
fn a_failing_test_keeps_the_logs() {
    let Some(bed) = Bed::for_test(Profile::control_plane()) else { return };
    let log = bed.scheduler().log().to_path_buf();
    let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
        let _bed = bed;
        panic!("on purpose: the report that follows belongs to the test of it");
    }));
    assert!(failed.is_err());
    assert!(log.exists());
    fs::remove_dir_all(log.parent().unwrap()).unwrap();
}

#[test]
fn what_matters_is_shown_of_a_bed() {
    let Some(bed) = Bed::for_test(Profile::one_node()) else { return };
    apply(&bed, &pod("stuck", "true", "").replace("localhost/busybox:bed", "localhost/absent:bed"));
    eventually("kubelet tells", || bed.kubectl(&["get", "events"]).unwrap().contains("ErrImageNeverPull"));
    bed.scheduler().stop();
    let report = bed.report();
    assert!(report.contains("kube-scheduler: not running"), "{report}");
    assert!(report.contains("node1/kubelet: running, pid"), "{report}");
    assert!(report.contains("ErrImageNeverPull"), "{report}");
    assert!(report.lines().count() < 150, "it is cut to what matters:\n{report}");
}
