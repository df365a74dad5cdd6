//! A bed leaves nothing behind, however it ends. This test binary runs exclusively: other beds would change what is
//! counted.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use partage_testkit::bed::{BedProfile, TestBed};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Allows one bed at a time: leftovers are counted for the whole host.
fn exclusive() -> MutexGuard<'static, ()> {
    static EXCLUSIVE: Mutex<()> = Mutex::new(());
    EXCLUSIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Everything that a bed of this owner could change on the host.
#[derive(Debug, PartialEq, Eq)]
struct HostTraces {
    processes: BTreeSet<String>,
    /// Network namespaces of the bed's processes.
    networks: BTreeSet<PathBuf>,
    cgroups: BTreeSet<PathBuf>,
    /// State of the host itself, which must never change.
    mounts: BTreeSet<String>,
    interfaces: BTreeSet<String>,
    sysctls: Vec<String>,
    files: Vec<bool>,
}

const WATCHED_SYSCTLS: [&str; 7] = [
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
    "net/ipv4/ip_forward",
];

/// Files that kubelet, containerd, CNI and kubectl leave on an ordinary machine.
const WATCHED_FILES: [&str; 12] = [
    "/var/lib/kubelet",
    "/var/lib/containerd",
    "/var/lib/cni",
    "/var/log/pods",
    "/var/log/containers",
    "/run/containerd",
    "/run/cni",
    "/etc/cni",
    "/etc/cdi",
    "/bed",
    "/root/.kube/cache/discovery/10.200.0.1",
    "/dev/nvidia0",
];

impl HostTraces {
    fn of(owner: u32) -> Self {
        let name = format!("partage-bed-{owner}-");
        let sysctl = |name: &str| fs::read_to_string(format!("/proc/sys/{name}")).unwrap_or_default();
        let ours: Vec<String> = processes().filter(|pid| belongs_to_bed(&name, pid)).collect();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let hierarchies = entry_names("/sys/fs/cgroup").into_iter().chain([String::new()]);
        let cgroups = hierarchies.flat_map(|hierarchy| {
            let folder = PathBuf::from("/sys/fs/cgroup").join(hierarchy);
            entry_names(&folder.display().to_string()).into_iter().map(move |name| folder.join(name))
        });
        let of_a_bed = |interface: &String| {
            ["nodes", "cni0"].contains(&interface.as_str()) || interface.starts_with("to-node")
        };
        Self {
            networks: ours
                .iter()
                .filter_map(|pid| fs::read_link(format!("/proc/{pid}/ns/net")).ok())
                .collect(),
            processes: ours.into_iter().collect(),
            cgroups: cgroups.filter(|path| path.to_string_lossy().contains(&name)).collect(),
            mounts: mounts.lines().filter(|line| line.contains("partage-bed-")).map(str::to_string).collect(),
            interfaces: entry_names("/sys/class/net").into_iter().filter(of_a_bed).collect(),
            sysctls: WATCHED_SYSCTLS.map(sysctl).to_vec(),
            files: WATCHED_FILES.map(|file| PathBuf::from(file).exists()).to_vec(),
        }
    }
}

fn entry_names(folder: &str) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn processes() -> impl Iterator<Item = String> {
    entry_names("/proc").into_iter().filter(|name| name.chars().all(|one| one.is_ascii_digit()))
}

/// Returns whether a process belongs to a bed: it has the bed's cgroup, or its directory among its arguments.
fn belongs_to_bed(bed: &str, pid: &str) -> bool {
    let read = |file: &str| fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
    ["cmdline", "cgroup"].iter().any(|file| String::from_utf8_lossy(&read(file)).contains(bed))
}

/// Returns whether a process is in one of these network namespaces, or holds it open.
fn is_in_use(networks: &BTreeSet<PathBuf>) -> bool {
    let folders = processes().flat_map(|pid| ["ns", "fd"].map(|part| format!("/proc/{pid}/{part}")));
    let mut links = folders.flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten());
    links.any(|link| fs::read_link(link.path()).is_ok_and(|target| networks.contains(&target)))
}

const POD: &str = r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": {"containers": [
    {"name": "main", "image": "localhost/busybox:bed", "imagePullPolicy": "Never", "command": ["sleep", "1000"]}]}}"#;

#[test]
fn dropped_bed_leaves_nothing_behind() {
    let _exclusive = exclusive();
    let this = std::process::id();
    let before = HostTraces::of(this);
    let Some(bed) = TestBed::for_test(BedProfile::nodes(2)) else { return };
    bed.kubectl_with(&["apply", "-f", "-"], POD).unwrap();
    bed.kubectl(&["wait", "--for=condition=Ready", "pod/one", "--timeout=300s"]).unwrap();
    // The bed is visible from outside, and the host itself is unchanged.
    let during = HostTraces::of(this);
    assert!(during.processes.len() > 10, "{:?}", during.processes);
    // nsenter and similar processes are in the host's network namespace.
    let here = fs::read_link("/proc/self/ns/net").unwrap();
    let networks: BTreeSet<_> = during.networks.iter().filter(|one| **one != here).cloned().collect();
    assert!(
        networks.len() >= 3 && is_in_use(&networks),
        "one namespace of the control plane, one of each node, and more: {networks:?}"
    );
    assert!(during.cgroups.len() > before.cgroups.len());
    assert_eq!(host_only(&before), host_only(&during));
    drop(bed);
    assert_eq!(before, HostTraces::of(this));
    assert!(!is_in_use(&networks));
}

/// A user who can write next to a bed can neither read its keys nor make it harm others.
#[test]
fn bed_files_are_private_and_removed_after_cleanup_is_killed() {
    let _exclusive = exclusive();
    let Some(bed) = TestBed::for_test(BedProfile::control_plane()) else { return };
    let folder = std::env::temp_dir().join(format!("partage-bed-{}-", std::process::id()));
    let beds = entry_names(&std::env::temp_dir().display().to_string());
    let folder = beds
        .iter()
        .map(|name| std::env::temp_dir().join(name))
        .find(|path| path.to_string_lossy().starts_with(&*folder.to_string_lossy()));
    let folder = folder.expect("the bed has a directory");
    let mode = |path: PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(folder.clone()), 0o700);
    assert_eq!([mode(folder.join("pki/ca.key")), mode(folder.join("admin.kubeconfig"))], [0o600, 0o600]);

    // The cleanup process is killed: the owner cleans up instead.
    let cleanup = processes().find(|pid| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&words).starts_with(&format!("sh\0{}/cleanup.sh", folder.display()))
    });
    let cleanup =
        rustix::process::Pid::from_raw(cleanup.expect("the bed has a cleanup process").parse().unwrap())
            .unwrap();
    rustix::process::kill_process(cleanup, rustix::process::Signal::KILL).unwrap();
    drop(bed);
    assert!(!folder.exists());
    let left = HostTraces::of(std::process::id());
    assert_eq!((left.processes, left.cgroups), Default::default());
}

#[test]
fn foreign_files_beside_beds_are_not_changed() {
    let _exclusive = exclusive();
    let Some(cluster) = TestBed::for_test(BedProfile::control_plane()) else { return };
    drop(cluster);
    let folder = tempfile::tempdir().unwrap();
    let (place, victim) = (folder.path().join("tmp"), folder.path().join("victim"));
    for number in 0..25 {
        fs::create_dir_all(victim.join(format!("{number}-0"))).unwrap();
    }
    fs::create_dir_all(place.join("partage-bed-notes")).unwrap();
    fs::create_dir_all(place.join("partage-bed-4000000-0")).unwrap();
    let fifo = Command::new("mkfifo").arg(place.join("partage-bed-4000000-0/lock")).status().unwrap();
    assert!(fifo.success());
    std::os::unix::fs::symlink(&victim, place.join("partage-bed-logs")).unwrap();
    let name = format!("planted-{}", std::process::id());
    let mut command = Command::new(env!("CARGO_BIN_EXE_partage-testkit"));
    let output = command.args(["cluster", "up", "--name", &name]).env("TMPDIR", &place).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(message.contains("partage-bed-logs does not belong to this user"), "{message}");
    assert_eq!(entry_names(&victim.display().to_string()).len(), 25);
    assert!(place.join("partage-bed-notes").exists(), "a directory with this prefix is not always a bed");
    assert!(!place.join("partage-bed-4000000-0").exists(), "leftovers of a bed are removed");
    remove_cluster_dir(&name);
}

/// Returns only the state of the host itself.
fn host_only(traces: &HostTraces) -> HostTraces {
    HostTraces {
        processes: BTreeSet::new(),
        networks: BTreeSet::new(),
        cgroups: BTreeSet::new(),
        mounts: traces.mounts.clone(),
        interfaces: traces.interfaces.clone(),
        sysctls: traces.sysctls.clone(),
        files: traces.files.clone(),
    }
}

#[test]
fn killed_owner_takes_its_bed_along() {
    let _exclusive = exclusive();
    let name = format!("killed-{}", std::process::id());
    let Some(mut owner) = start_holder(&name) else { return };
    let output = read_until_line(&mut owner, "up").expect("the cluster's holder starts");
    assert!(output.contains("kubelet"), "{output}");
    let during = HostTraces::of(owner.id());
    assert!(during.processes.len() > 6 && !during.cgroups.is_empty());
    // Killed, without a chance to clean up.
    owner.kill().unwrap();
    owner.wait().unwrap();
    let start = Instant::now();
    let left = || {
        let now = HostTraces::of(owner.id());
        (now.processes, now.networks, now.cgroups, now.mounts)
    };
    while left() != Default::default() {
        assert!(start.elapsed() < Duration::from_secs(120), "{:#?}", left());
        std::thread::sleep(Duration::from_millis(20));
    }
    let folder = std::env::temp_dir().join(format!("partage-bed-{}-0", owner.id()));
    while folder.exists() {
        assert!(start.elapsed() < Duration::from_secs(120), "{} is not removed", folder.display());
        std::thread::sleep(Duration::from_millis(20));
    }
    remove_cluster_dir(&name);
}

/// Starts the holder of a cluster, as `cluster up` does. Returns `None` if this machine lacks a requirement.
fn start_holder(name: &str) -> Option<Child> {
    drop(TestBed::for_test(BedProfile::control_plane())?);
    let child = Command::new(env!("CARGO_BIN_EXE_partage-testkit"))
        .args(["cluster", "hold", "--name", name])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .process_group(0)
        .spawn();
    Some(child.unwrap())
}

/// Reads lines until this one, and returns those before it; `None` if the process exits first.
fn read_until_line(child: &mut Child, word: &str) -> Option<String> {
    use std::io::{BufRead, BufReader};
    let mut output = String::new();
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        if line == word {
            return Some(output);
        }
        output += &line;
    }
    None
}

fn remove_cluster_dir(name: &str) {
    let home = partage_testkit::binaries::BuildPaths::from_environment().cache.unwrap();
    fs::remove_dir_all(home.join("partage").join("cluster").join(name)).unwrap();
}
