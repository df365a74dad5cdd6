//! The bed itself: it starts, its components can be killed and restarted, and it leaves nothing behind.

use partage_testkit::bed::{BedError, BedProfile, CgroupVersion, Component, NodeProfile, TestBed};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

/// Returns the manifest of a pod with one container that runs `script`.
fn pod(name: &str, script: &str, more: &str) -> String {
    let script = serde_json::to_string(script).unwrap();
    format!(
        r#"{{"apiVersion": "v1", "kind": "Pod", "metadata": {{"name": "{name}"}}, "spec": {{
            "terminationGracePeriodSeconds": 0, {more}
            "containers": [{{"name": "main", "image": "localhost/busybox:bed", "imagePullPolicy": "Never",
                             "command": ["sh", "-c", {script}]}}]}}}}"#
    )
}

const RUN_FOREVER: &str = "echo up; trap 'exit 0' TERM; while :; do sleep 1; done";

fn apply(bed: &TestBed, manifest: &str) {
    bed.kubectl_with(&["apply", "-f", "-"], manifest).unwrap();
}

fn wait_for(bed: &TestBed, pod: &str, condition: &str) {
    bed.kubectl(&["wait", &format!("--for={condition}"), &format!("pod/{pod}"), "--timeout=300s"]).unwrap();
}

fn run_pod(bed: &TestBed, name: &str, script: &str, more: &str) {
    apply(bed, &pod(name, script, more));
    wait_for(bed, name, "condition=Ready");
}

/// Polls until the condition holds, and panics after a time limit.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(300), "timed out: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn beds_and_their_nodes_are_isolated_from_each_other() {
    let mixed = BedProfile::control_plane()
        .node(NodeProfile::new("old"))
        .node(NodeProfile::new("new").cgroups(CgroupVersion::V2));
    let Some(bed) = TestBed::for_test(mixed) else { return };
    let other = TestBed::for_test(BedProfile::control_plane()).expect("a second bed starts");

    // One pod per node; they reach each other, and the API server by its name.
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
    eventually("the pod on the new node answers", || bed.kubectl(&ask).is_ok_and(|heard| heard == "new\n"));

    // v1 has one hierarchy per controller, v2 one for all; in both the root is the node's own cgroup.
    let cgroups = |pod: &str| bed.kubectl(&["exec", pod, "--", "cat", "/proc/1/mountinfo"]).unwrap();
    // A host that has only v2 provides only v2.
    let v1 = bed.node("old").unwrap().cgroups() == CgroupVersion::V1;
    assert_eq!(cgroups("old").contains(" - cgroup cgroup rw,devices"), v1);
    assert!(!cgroups("new").contains(" - cgroup cgroup "));
    assert!(cgroups("new").contains(" - cgroup2 "));

    let pods = other.kubectl(&["get", "pods", "-o", "name"]).unwrap();
    assert_eq!(pods, "", "the other cluster has none of these pods");
}

#[test]
fn pods_call_the_api_server_with_their_own_permissions() {
    let Some(bed) = TestBed::for_test(BedProfile::one_node()) else { return };
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
    // The node's kubectl, mounted into the pod.
    let tools =
        r#""serviceAccountName": "reader", "volumes": [{"name": "bin", "hostPath": {"path": "/bed/bin"}}],"#;
    let manifest = pod("caller", RUN_FOREVER, tools)
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
    assert!(ask(&["get", "pods"]).is_err(), "without the cluster's CA the server is not trusted");

    // Users have certificates, and the permissions that RBAC grants them.
    let alice = bed.client_as("alice", Some("readers")).unwrap();
    let pods: kube::Api<k8s_openapi::api::core::v1::Pod> = kube::Api::default_namespaced(alice);
    let refused = bed.block_on(pods.list(&Default::default())).unwrap_err().to_string();
    assert!(refused.contains(r#"User "alice" cannot list resource "pods""#), "{refused}");
    bed.kubectl(&["create", "rolebinding", "alice", "--role=reader", "--group=readers"]).unwrap();
    // The API server applies RBAC changes a moment later.
    eventually("alice can list pods", || {
        bed.block_on(pods.list(&Default::default())).is_ok_and(|seen| seen.items.len() == 1)
    });
}

#[test]
fn components_can_be_killed_paused_and_restarted() {
    let Some(bed) = TestBed::for_test(BedProfile::one_node()) else { return };
    let node = bed.node("node1").unwrap();
    run_pod(&bed, "steady", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.1; done", "");
    let quick = |words: &[&str]| bed.kubectl(&[words, &["--request-timeout=2s"]].concat());

    // While etcd is paused nothing can be written, and nothing is lost.
    bed.etcd().pause();
    assert!(quick(&["create", "configmap", "during"]).is_err());
    bed.etcd().resume();
    eventually("writes succeed again", || {
        quick(&["create", "configmap", "after"]).is_ok() || quick(&["get", "configmap", "after"]).is_ok()
    });

    // After etcd and the API server were killed, everything written before is still there.
    bed.kubectl(&["create", "configmap", "kept"]).unwrap();
    bed.etcd().kill();
    assert_eq!(bed.etcd().pid(), None);
    bed.etcd().start().unwrap();
    bed.apiserver().kill();
    assert!(quick(&["get", "configmap", "kept"]).is_err());
    bed.apiserver().start().unwrap();
    bed.wait_until_api_ready().unwrap();
    bed.kubectl(&["get", "configmap", "kept"]).unwrap();

    // Containers keep running while containerd is down.
    let process = container_pid(&bed, "steady");
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

    // A paused kubelet starts nothing until it is resumed.
    node.kubelet().pause();
    eventually("kubelet is stopped", || process_state(node.kubelet()) == 'T');
    apply(&bed, &pod("waits", RUN_FOREVER, r#""nodeName": "node1","#));
    let phase = || bed.kubectl(&["get", "pod", "waits", "-o", "jsonpath={.status.phase}"]).unwrap();
    assert_eq!(phase(), "Pending");
    node.kubelet().resume();
    wait_for(&bed, "waits", "condition=Ready");

    // The same holds for a paused containerd, and a paused API server answers no requests.
    node.containerd().pause();
    apply(&bed, &pod("later", RUN_FOREVER, r#""nodeName": "node1","#));
    node.containerd().resume();
    wait_for(&bed, "later", "condition=Ready");
    bed.apiserver().pause();
    assert!(quick(&["get", "configmap", "kept"]).is_err());
    bed.apiserver().resume();
    bed.wait_until_api_ready().unwrap();
    node.kubelet().restart().unwrap();
    bed.wait_until_node_ready("node1").unwrap();
    assert_eq!(bed.kubectl(&restarts).unwrap(), "0");

    // Paused components are removed too: with their node, and with the bed.
    node.containerd().pause();
    node.reboot().unwrap();
    bed.etcd().pause();
    node.kubelet().pause();
}

/// Returns the state of a program in the kernel: R, S or T.
fn process_state(component: &Component) -> char {
    let stat = fs::read_to_string(format!("/proc/{}/stat", component.pid().unwrap())).unwrap();
    stat.rsplit(") ").next().unwrap().chars().next().unwrap()
}

/// Returns the first process of a pod's container, by its PID on the host: the one that started first.
fn container_pid(bed: &TestBed, pod: &str) -> u32 {
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
fn reboot_clears_run_and_keeps_the_disk() {
    let Some(bed) = TestBed::for_test(BedProfile::one_node()) else { return };
    let node = bed.node("node1").unwrap();
    run_pod(&bed, "one", RUN_FOREVER, "");
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
    assert_eq!(planted.kind(), ErrorKind::ReadOnlyFilesystem, "the programs belong to the host");
    let kubelet = node.kubelet().pid().unwrap();

    node.power_off();
    assert!(!Path::new(&format!("/proc/{kubelet}")).exists());
    let error = node.path("/run").unwrap_err().to_string();
    assert_eq!(error, "accessing node1 failed: the node is powered off");
    node.power_on().unwrap();

    eventually("the node reports its new boot id", || boot_id() != before);
    assert!(!node.path("/run/mark").unwrap().exists());
    assert!(node.path("/var/lib/mark").unwrap().exists() && node.path("/etc/mark").unwrap().exists());
    let restarts = ["get", "pod", "one", "-o", "jsonpath={.status.containerStatuses[0].restartCount}"];
    eventually("the pod is restarted", || bed.kubectl(&restarts).unwrap() == "1");
    wait_for(&bed, "one", "condition=Ready");
}

#[test]
fn component_that_exits_is_named_with_its_last_log_lines() {
    let broken = BedProfile::control_plane()
        .extender(serde_json::json!({ "urlPrefix": "http://127.0.0.1:1", "wight": 1 }));
    let bed = match TestBed::start(broken.node(NodeProfile::new("node1"))) {
        Err(BedError::Ended { name, message, log, .. }) => {
            assert_eq!(name, "kube-scheduler");
            assert!(message.contains("wight"), "{message}");
            assert!(log.exists(), "logs of a failed bed are kept");
            fs::remove_dir_all(log.parent().unwrap()).unwrap();
            return;
        }
        Err(error @ (BedError::MissingPrerequisite(_) | BedError::NotRoot | BedError::NoTool { .. })) => {
            return partage_testkit::skip_or_fail(&error);
        }
        other => other.unwrap(),
    };
    panic!("the scheduler accepts an invalid configuration: {}", bed.report());
}

/// A failing test prints the report of its bed and keeps the logs.
#[test]
fn failing_test_keeps_the_logs() {
    let Some(bed) = TestBed::for_test(BedProfile::control_plane()) else { return };
    let log = bed.scheduler().log().to_path_buf();
    let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
        let _bed = bed;
        panic!("intended panic: the following report is part of this test");
    }));
    assert!(failed.is_err());
    assert!(log.exists());
    fs::remove_dir_all(log.parent().unwrap()).unwrap();
}

#[test]
fn report_shows_component_states_and_events() {
    let Some(bed) = TestBed::for_test(BedProfile::one_node()) else { return };
    apply(&bed, &pod("stuck", "true", "").replace("localhost/busybox:bed", "localhost/absent:bed"));
    eventually("kubelet reports the missing image", || {
        bed.kubectl(&["get", "events"]).unwrap().contains("ErrImageNeverPull")
    });
    bed.scheduler().stop();
    let report = bed.report();
    assert!(report.contains("kube-scheduler: not running"), "{report}");
    assert!(report.contains("node1/kubelet: running, pid"), "{report}");
    assert!(report.contains("ErrImageNeverPull"), "{report}");
    assert!(report.lines().count() < 150, "the report is not shortened:\n{report}");
}
