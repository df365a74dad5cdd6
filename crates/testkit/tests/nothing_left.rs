//! A bed leaves nothing behind, however it ends. On its own: what is counted here, other beds would change.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use partage_testkit::bed::{Bed, Profile};
use std::collections::BTreeSet;
use std::fs;
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

/// What a bed could change on the machine.
#[derive(Debug, PartialEq, Eq)]
struct Traces {
    processes: BTreeSet<String>,
    mounts: BTreeSet<String>,
    networks: BTreeSet<PathBuf>,
    interfaces: BTreeSet<String>,
    cgroups: BTreeSet<PathBuf>,
    sysctls: Vec<String>,
    folders: Vec<BTreeSet<String>>,
}

impl Traces {
    fn now() -> Self {
        let sysctl = |name: &str| fs::read_to_string(format!("/proc/sys/{name}")).unwrap_or_default();
        Self {
            processes: processes().filter_map(|pid| of_a_bed(&pid)).collect(),
            mounts: fs::read_to_string("/proc/self/mountinfo").unwrap().lines().map(str::to_string).collect(),
            networks: networks(),
            interfaces: names("/sys/class/net"),
            cgroups: names("/sys/fs/cgroup")
                .into_iter()
                .chain([String::new()])
                .map(|name| format!("/sys/fs/cgroup/{name}"))
                .flat_map(|folder| {
                    names(&folder).into_iter().map(move |name| PathBuf::from(&folder).join(name))
                })
                .filter(|path| path.is_dir())
                .collect(),
            sysctls: [
                "vm/overcommit_memory",
                "vm/panic_on_oom",
                "kernel/panic",
                "kernel/panic_on_oops",
                "kernel/keys/root_maxkeys",
                "net/ipv4/ip_forward",
            ]
            .map(sysctl)
            .to_vec(),
            folders: ["/var/lib", "/run", "/etc", "/var/log", "/dev", "/opt", "/mnt"].map(names).to_vec(),
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
fn of_a_bed(pid: &str) -> Option<String> {
    let read = |file: &str| fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
    let words = String::from_utf8_lossy(&read("cmdline")).replace('\0', " ");
    let of_a_bed =
        words.contains("partage-bed-") || String::from_utf8_lossy(&read("cgroup")).contains("partage-bed-");
    of_a_bed.then(|| format!("{pid}: {words}"))
}

/// Every network namespace that somebody is in, or holds open.
fn networks() -> BTreeSet<PathBuf> {
    let folders = processes().flat_map(|pid| ["ns", "fd"].map(|part| format!("/proc/{pid}/{part}")));
    let links = folders.flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten());
    let targets = links.filter_map(|link| fs::read_link(link.path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("net:")).collect()
}

const POD: &str = r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": {"containers": [
    {"name": "main", "image": "localhost/busybox:bed", "imagePullPolicy": "Never", "command": ["sleep", "1000"]}]}}"#;

#[test]
fn a_dropped_bed_is_gone() {
    let _alone = alone();
    let before = Traces::now();
    let Some(bed) = Bed::for_test(Profile::nodes(2)) else { return };
    bed.kubectl_with(&["apply", "-f", "-"], POD).unwrap();
    bed.kubectl(&["wait", "--for=condition=Ready", "pod/one", "--timeout=90s"]).unwrap();
    // It can be told from outside that something is there at all.
    let during = Traces::now();
    assert!(during.processes.len() > 10, "{:?}", during.processes);
    assert_eq!(during.networks.len() - before.networks.len(), 4, "the host's, two nodes', a pod's");
    assert!(during.cgroups.len() > before.cgroups.len());
    assert_eq!((&before.mounts, &before.sysctls), (&during.mounts, &during.sysctls));
    assert_eq!((&before.folders, &before.interfaces), (&during.folders, &during.interfaces));
    drop(bed);
    assert_eq!(before, Traces::now());
}

#[test]
fn a_bed_goes_with_its_owner() {
    let _alone = alone();
    let before = Traces::now();
    let name = format!("killed-{}", std::process::id());
    let mut owner = hold(&name);
    let Some(said) = wait_for(&mut owner, "up") else {
        return partage_testkit::binaries::skip_or_fail(&"the cluster's holder did not come up");
    };
    assert!(said.contains("kubelet"), "{said}");
    assert!(Traces::now().processes.len() > 6);
    // Not asked: killed.
    owner.kill().unwrap();
    owner.wait().unwrap();
    let start = Instant::now();
    while Traces::now() != before {
        assert!(start.elapsed() < Duration::from_secs(30), "{:#?}", (&before, Traces::now()));
        std::thread::sleep(Duration::from_millis(20));
    }
    forget(&name);
}

/// Runs the owner of a person's cluster, as `cluster up` does.
fn hold(name: &str) -> Child {
    Command::new(env!("CARGO_BIN_EXE_partage-testkit"))
        .args(["cluster", "hold", "--name", name])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .process_group(0)
        .spawn()
        .unwrap()
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
