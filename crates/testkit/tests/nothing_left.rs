//! A bed leaves nothing behind, however it ends. On its own: what is counted here, other beds would change.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use partage_testkit::bed::{Bed, Profile};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// One bed at a time: what is left is counted for the whole machine.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a bed of this owner could change on the machine.
#[derive(Debug, PartialEq, Eq)]
struct Traces {
    processes: BTreeSet<String>,
    /// Network namespaces of its processes.
    networks: BTreeSet<PathBuf>,
    cgroups: BTreeSet<PathBuf>,
    /// Of the machine itself: they must never change.
    mounts: BTreeSet<String>,
    interfaces: BTreeSet<String>,
    sysctls: Vec<String>,
    files: Vec<bool>,
}

const SYSCTLS: [&str; 7] = [
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
    "net/ipv4/ip_forward",
];

/// What kubelet, containerd, CNI and kubectl leave on an ordinary machine.
const FILES: [&str; 12] = [
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

impl Traces {
    fn of(owner: u32) -> Self {
        let name = format!("partage-bed-{owner}-");
        let sysctl = |name: &str| fs::read_to_string(format!("/proc/sys/{name}")).unwrap_or_default();
        let ours: Vec<String> = processes().filter(|pid| is_of(&name, pid)).collect();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let hierarchies = names("/sys/fs/cgroup").into_iter().chain([String::new()]);
        let cgroups = hierarchies.flat_map(|hierarchy| {
            let folder = PathBuf::from("/sys/fs/cgroup").join(hierarchy);
            names(&folder.display().to_string()).into_iter().map(move |name| folder.join(name))
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
            interfaces: names("/sys/class/net").into_iter().filter(of_a_bed).collect(),
            sysctls: SYSCTLS.map(sysctl).to_vec(),
            files: FILES.map(|file| PathBuf::from(file).exists()).to_vec(),
        }
    }
}

fn names(folder: &str) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn processes() -> impl Iterator<Item = String> {
    names("/proc").into_iter().filter(|name| name.chars().all(|one| one.is_ascii_digit()))
}

/// A process of a bed has the bed's cgroup, or its folder among its words.
fn is_of(bed: &str, pid: &str) -> bool {
    let read = |file: &str| fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
    ["cmdline", "cgroup"].iter().any(|file| String::from_utf8_lossy(&read(file)).contains(bed))
}

/// Is somebody in one of these network namespaces, or holds it open?
fn held(networks: &BTreeSet<PathBuf>) -> bool {
    let folders = processes().flat_map(|pid| ["ns", "fd"].map(|part| format!("/proc/{pid}/{part}")));
    let mut links = folders.flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten());
    links.any(|link| fs::read_link(link.path()).is_ok_and(|target| networks.contains(&target)))
}

const POD: &str = r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": {"containers": [
    {"name": "main", "image": "localhost/busybox:bed", "imagePullPolicy": "Never", "command": ["sleep", "1000"]}]}}"#;

#[test]
fn a_dropped_bed_is_gone() {
    let _alone = alone();
    let this = std::process::id();
    let before = Traces::of(this);
    let Some(bed) = Bed::for_test(Profile::nodes(2)) else { return };
    bed.kubectl_with(&["apply", "-f", "-"], POD).unwrap();
    bed.kubectl(&["wait", "--for=condition=Ready", "pod/one", "--timeout=300s"]).unwrap();
    // It can be told from outside that something is there at all, and that the machine has nothing of it.
    let during = Traces::of(this);
    assert!(during.processes.len() > 10, "{:?}", during.processes);
    // nsenter and its like are of the machine's own network.
    let here = fs::read_link("/proc/self/ns/net").unwrap();
    let networks: BTreeSet<_> = during.networks.iter().filter(|one| **one != here).cloned().collect();
    assert!(networks.len() >= 3 && held(&networks), "the host's, two nodes', and more: {networks:?}");
    assert!(during.cgroups.len() > before.cgroups.len());
    assert_eq!(of_the_machine(&before), of_the_machine(&during));
    drop(bed);
    assert_eq!(before, Traces::of(this));
    assert!(!held(&networks));
}

/// Who may write next to a bed may neither read its keys nor make it hurt others.
#[test]
fn a_bed_is_for_its_owner_only() {
    let _alone = alone();
    let Some(bed) = Bed::for_test(Profile::control_plane()) else { return };
    let folder = std::env::temp_dir().join(format!("partage-bed-{}-", std::process::id()));
    let beds = names(&std::env::temp_dir().display().to_string());
    let folder = beds
        .iter()
        .map(|name| std::env::temp_dir().join(name))
        .find(|path| path.to_string_lossy().starts_with(&*folder.to_string_lossy()));
    let folder = folder.expect("the bed has a folder");
    let mode = |path: PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(folder.clone()), 0o700);
    assert_eq!([mode(folder.join("pki/ca.key")), mode(folder.join("admin.kubeconfig"))], [0o600, 0o600]);

    // The keeper is killed: its owner tidies up.
    let keeper = processes().find(|pid| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&words).starts_with(&format!("sh\0{}/keeper.sh", folder.display()))
    });
    let keeper =
        rustix::process::Pid::from_raw(keeper.expect("the bed has a keeper").parse().unwrap()).unwrap();
    rustix::process::kill_process(keeper, rustix::process::Signal::KILL).unwrap();
    drop(bed);
    assert!(!folder.exists());
    let left = Traces::of(std::process::id());
    assert_eq!((left.processes, left.cgroups), Default::default());
}

#[test]
fn what_others_put_in_the_way_stays_theirs() {
    let _alone = alone();
    let Some(cluster) = Bed::for_test(Profile::control_plane()) else { return };
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
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("partage-bed-logs is not a folder of ours"), "{said}");
    assert_eq!(names(&victim.display().to_string()).len(), 25);
    assert!(place.join("partage-bed-notes").exists(), "not every folder of that name is a bed");
    assert!(!place.join("partage-bed-4000000-0").exists(), "what is left of one goes");
    forget(&name);
}

/// Only what is the machine's own.
fn of_the_machine(traces: &Traces) -> Traces {
    Traces {
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
fn a_bed_goes_with_its_owner() {
    let _alone = alone();
    let name = format!("killed-{}", std::process::id());
    let Some(mut owner) = hold(&name) else { return };
    let said = wait_for(&mut owner, "up").expect("the cluster's holder comes up");
    assert!(said.contains("kubelet"), "{said}");
    let during = Traces::of(owner.id());
    assert!(during.processes.len() > 6 && !during.cgroups.is_empty());
    // Not asked: killed.
    owner.kill().unwrap();
    owner.wait().unwrap();
    let start = Instant::now();
    let left = || {
        let now = Traces::of(owner.id());
        (now.processes, now.networks, now.cgroups, now.mounts)
    };
    while left() != Default::default() {
        assert!(start.elapsed() < Duration::from_secs(120), "{:#?}", left());
        std::thread::sleep(Duration::from_millis(20));
    }
    let folder = std::env::temp_dir().join(format!("partage-bed-{}-0", owner.id()));
    while folder.exists() {
        assert!(start.elapsed() < Duration::from_secs(120), "{} stays", folder.display());
        std::thread::sleep(Duration::from_millis(20));
    }
    forget(&name);
}

/// Runs the owner of a person's cluster, as `cluster up` does; not where this machine has not what it takes.
fn hold(name: &str) -> Option<Child> {
    drop(Bed::for_test(Profile::control_plane())?);
    let child = Command::new(env!("CARGO_BIN_EXE_partage-testkit"))
        .args(["cluster", "hold", "--name", name])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .process_group(0)
        .spawn();
    Some(child.unwrap())
}

/// Reads what it says until it says this; nothing where it ends before.
fn wait_for(child: &mut Child, word: &str) -> Option<String> {
    use std::io::{BufRead, BufReader};
    let mut said = String::new();
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        if line == word {
            return Some(said);
        }
        said += &line;
    }
    None
}

fn forget(name: &str) {
    let home = partage_testkit::binaries::Settings::from_environment().cache.unwrap();
    fs::remove_dir_all(home.join("partage").join("cluster").join(name)).unwrap();
}
