//! `make cluster` and `make cluster-down`, as a person uses them.

use crate::built;
use partage_testkit::bed::{Bed, Profile};
use partage_testkit::binaries::{Binaries, Settings};
use partage_testkit::clients::Clients;
use partage_testkit::pages::{Page, meant, repository};
use partage_testkit::skip_or_fail;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A cluster of this test only, and its folder.
struct Cluster {
    name: String,
}

impl Cluster {
    /// Nothing where this machine has not what it takes; that was said then.
    fn new(what: &str) -> Option<Self> {
        // The same questions as a bed asks; the answer of an empty one comes quickly.
        drop(Bed::for_test(Profile::control_plane())?);
        Some(Self { name: format!("{what}-{}", std::process::id()) })
    }

    fn command(&self, word: &str) -> Command {
        let mut command = Command::new(partage_e2e::testkit());
        command.args(["cluster", word, "--name", &self.name]).stdin(Stdio::null());
        command
    }

    fn run(&self, word: &str) -> Output {
        self.command(word).output().unwrap()
    }

    fn folder(&self) -> PathBuf {
        Settings::from_environment().cache.unwrap().join("partage").join("cluster").join(&self.name)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = self.command("down").status();
        let _ = fs::remove_dir_all(self.folder());
    }
}

fn words(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn a_person_brings_one_up_uses_it_and_ends_it() {
    let Some(cluster) = Cluster::new("person") else { return };
    let (code, out, err) = words(&cluster.run("down"));
    assert_eq!((code, out.as_str(), err.as_str()), (Some(0), "no cluster is running\n", ""));

    let (code, out, err) = words(&cluster.run("up"));
    assert_eq!((code, err.as_str()), (Some(0), ""), "{out}");
    assert!(out.contains("kube-apiserver") && out.contains("node1: containerd and kubelet"), "{out}");
    let kubeconfig = cluster.folder().join("kubeconfig");
    assert!(out.contains(&format!("export KUBECONFIG='{}'", kubeconfig.display())), "{out}");

    // From outside, with any kubectl.
    let kubectl = |words: &[&str]| {
        let kubectl = Binaries::ready().unwrap().path("kubectl");
        Command::new(kubectl).args(words).env("KUBECONFIG", &kubeconfig).output().unwrap()
    };
    let (code, out, err) = words(&kubectl(&["get", "nodes"]));
    assert!(code == Some(0) && out.contains("node1   Ready"), "{out}{err}");
    let run =
        ["run", "try", "--image=localhost/debian:bed", "--image-pull-policy=Never", "--", "sleep", "1000"];
    assert!(kubectl(&run).status.success());
    assert!(kubectl(&["wait", "--for=condition=Ready", "pod/try", "--timeout=300s"]).status.success());
    let (code, out, err) = words(&kubectl(&["exec", "try", "--", "cat", "/etc/debian_version"]));
    assert_eq!(code, Some(0), "{out}{err}");

    // A second one of the same name is refused, and says how to use the first.
    let (code, _, err) = words(&cluster.run("up"));
    assert_eq!(code, Some(1));
    assert!(err.starts_with("error: a cluster is running already (pid "), "{err}");
    assert!(
        err.contains(&format!("cluster down --name {}", cluster.name)) && err.contains("export KUBECONFIG="),
        "{err}"
    );
    let (_, out, _) = words(&cluster.run("status"));
    assert!(out.starts_with("a cluster is up (pid "), "{out}");

    let (code, out, _) = words(&cluster.run("down"));
    assert_eq!((code, out.as_str()), (Some(0), "the cluster is gone\n"));
    assert!(!kubeconfig.exists());
    let (_, out, _) = words(&cluster.run("status"));
    assert_eq!(out, "no cluster is running\n");
}

/// What the README and the page of the bed say to do with it, in their own words. Nothing is built here.
const README: &[(&str, &str)] = &[
    ("make run", "tests/e2e/tests/workstation/picture.rs runs the same for a picture"),
    ("make test", "it is what runs this"),
    ("partage run", "tests/e2e/tests/workstation has the commands of one machine"),
    ("partage top", "tests/e2e/tests/workstation/top.rs"),
    ("make cluster-down", "the page of the bed goes on with the cluster, and ends it"),
];
const TESTBED: &[(&str, &str)] = &[
    ("make cluster ", "the README has brought it up"),
    ("make binaries", "it builds; `make test` begins with it"),
    ("make shim", "tests/shim_file.rs builds the shim the same way"),
    ("cargo run -p partage-xtask -- clients  ", "it fetches; `make binaries` does"),
];

#[test]
fn partage_is_in_it_as_the_pages_say() {
    let folder = tempfile::tempdir().unwrap();
    let Some((archive, _)) = built::image(folder.path()) else { return };
    if let Err(missing) = Clients::ready() {
        return skip_or_fail(&missing);
    }
    let Some(cluster) = Cluster::new("partage") else { return };
    let testkit = partage_e2e::testkit();
    let of = |word: &str| format!("{testkit} cluster {word} --name {}", cluster.name);
    let (up, down) = (format!("{} --partage {}", of("up"), archive.display()), of("down"));
    let kubeconfig = cluster.folder().join("kubeconfig").display().to_string();
    let table = [
        ("make cluster-down", down.as_str()),
        ("make cluster", &up),
        ("~/.cache/partage/cluster/bed/kubeconfig", &kubeconfig),
        ("cargo run -p partage-testkit --", testkit),
        ("cargo run -p partage-xtask --", partage_e2e::xtask()),
        // A person would repeat it where their machine is slow.
        ("kubectl wait ", "kubectl wait --timeout=300s "),
    ];
    let does = |commands: &[String]| {
        let script = meant(&commands.join("\n"), &table);
        let bin = Binaries::ready().unwrap().folder().display().to_string();
        let path = format!("{bin}:{}", std::env::var("PATH").unwrap());
        let mut command = Command::new("bash");
        command.args(["-euo", "pipefail", "-c", &script]).env("PATH", path).current_dir(repository());
        let (code, out, err) = words(&command.stdin(Stdio::null()).output().unwrap());
        assert_eq!(code, Some(0), "{script}\n{out}{err}");
        out
    };

    let readme = Page::read("README.md", README).unwrap();
    let blocks = readme.commands("Try it");
    let said = does(blocks.last().unwrap());
    assert!(said.contains("waiting until the nodes have shares of GPUs"), "{said}");
    assert!(said.contains("4096MiB"), "{said}");
    readme.is_done().unwrap();

    let page = Page::read("docs/testbed.md", TESTBED).unwrap();
    let said = does(&page.commands("Try it")[0]);
    assert!(
        said.contains("node1") && said.contains("4096MiB") && said.ends_with("the cluster is gone\n"),
        "{said}"
    );
    for heading in ["The programs", "The images", "The clients"] {
        does(&page.commands(heading)[0]);
    }
    page.is_done().unwrap();
    assert!(!Path::new(&kubeconfig).exists());
}

#[test]
fn an_interruption_in_the_middle_leaves_nothing() {
    let Some(cluster) = Cluster::new("interrupted") else { return };
    let mut up =
        cluster.command("up").process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(up.stdout.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert!(line.ends_with("etcd and kube-apiserver\n"), "{line}");
    let group = rustix::process::Pid::from_child(&up);
    rustix::process::kill_process_group(group, rustix::process::Signal::INT).unwrap();
    let (code, _, err) = words(&up.wait_with_output().unwrap());
    assert_eq!((code, err.as_str()), (Some(130), "error: interrupted; nothing is left behind\n"));
    let (_, out, _) = words(&cluster.run("status"));
    assert_eq!(out, "no cluster is running\n");
    assert_eq!(beds_without_owner(), Vec::<String>::new());
}

/// Folders and cgroups of beds whose owner is dead. Beds of other tests have one who lives.
fn beds_without_owner() -> Vec<String> {
    let folders = ["/sys/fs/cgroup", "/sys/fs/cgroup/cpu", "/sys/fs/cgroup/unified", "/tmp"];
    let entries = folders.into_iter().flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten());
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let dead = |name: &String| {
        let owner = name.strip_prefix("partage-bed-").and_then(|rest| rest.split('-').next());
        let owner = owner.filter(|owner| owner.parse::<u32>().is_ok());
        owner.is_some_and(|owner| !PathBuf::from(format!("/proc/{owner}")).exists())
    };
    names.filter(dead).collect()
}

#[test]
fn who_is_not_root_is_told() {
    let folder = std::env::temp_dir().join(format!("partage-nobody-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    // The program stands where not everybody may look.
    let program = folder.join("partage-testkit");
    fs::copy(partage_e2e::testkit(), &program).unwrap();
    let cache = folder.join("cache");
    fs::create_dir_all(&cache).unwrap();
    let mut command = Command::new(&program);
    command.args(["cluster", "up"]).env("XDG_CACHE_HOME", &cache);
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&cache, Some(65534), Some(65534)).unwrap();
        command.uid(65534).gid(65534);
    }
    let output = command.output().unwrap();
    let (code, out, err) = words(&output);
    fs::remove_dir_all(&folder).unwrap();
    assert_eq!((code, out.as_str()), (Some(1), ""));
    assert_eq!(
        err,
        "error: the test bed needs root: it makes namespaces, mounts and cgroups, all of its own; repeat as root \
         (sudo -E make cluster)\n"
    );
}

#[test]
fn a_missing_tool_is_named_with_its_package() {
    if !rustix::process::geteuid().is_root() {
        return skip_or_fail(&"only root gets so far as to miss a tool");
    }
    let folder = std::env::temp_dir().join(format!("partage-no-ip-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let mut command = Command::new(partage_e2e::testkit());
    command.args(["cluster", "up", "--name", "tools"]).env("PATH", &folder).env("XDG_CACHE_HOME", &folder);
    let (code, _, err) = words(&command.output().unwrap());
    fs::remove_dir_all(&folder).unwrap();
    assert_eq!(code, Some(1));
    assert_eq!(
        err,
        "error: the test bed needs ip, and it is not on the PATH; as root: apt-get install iproute2\n"
    );
}

/// Runs `cluster up` after a script that takes something away, in mounts of its own.
fn up_after(script: &str, name: &str) -> (Option<i32>, String, String) {
    let line = format!("{script}; exec \"$1\" cluster up --name {name}");
    let unshare = ["--mount", "--propagation", "private", "sh", "-euc", &line, "sh"];
    let program = partage_e2e::testkit();
    words(&Command::new("unshare").args(unshare).arg(program).output().unwrap())
}

#[test]
fn what_the_machine_lacks_is_named_and_nothing_is_left() {
    let Some(cluster) = Cluster::new("lacks") else { return };
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().display();

    let little = format!("mount -t tmpfs -o size=64m tmpfs {at}; export TMPDIR={at}");
    let (code, _, err) = up_after(&little, &cluster.name);
    assert_eq!(code, Some(1));
    let expected = format!(
        "error: {at} has 64 MiB free, and a bed takes about 512 MiB there; make room, or point TMPDIR"
    );
    assert!(err.starts_with(&expected), "{err}");

    // An overlay cannot have its writable layer on another overlay.
    let overlay = format!(
        "mount -t tmpfs tmpfs {at}; mkdir {at}/u {at}/w {at}/m; \
         mount -t overlay overlay -o lowerdir=/usr,upperdir={at}/u,workdir={at}/w {at}/m; export TMPDIR={at}/m"
    );
    let (code, _, err) = up_after(&overlay, &cluster.name);
    assert_eq!(code, Some(1));
    assert!(err.contains("this kernel does not let us start a node"), "{err}");
    assert!(err.contains("put TMPDIR on ext4, xfs or tmpfs"), "{err}");

    // Root in name only, as in most containers.
    let program = partage_e2e::testkit();
    let bounded = ["--bounding-set=-sys_admin", "--", program, "cluster", "up", "--name", &cluster.name];
    let (code, _, err) = words(&Command::new("setpriv").args(bounded).output().unwrap());
    assert_eq!(code, Some(1));
    assert!(err.starts_with("error: this kernel does not let us make namespaces (exit status: 0"), "{err}");
    assert!(
        err.contains("Operation not permitted") && err.contains("to be root in the machine's user namespace"),
        "{err}"
    );

    assert_eq!(beds_without_owner(), Vec::<String>::new());
}

#[test]
fn wishes_that_cannot_be_are_refused() {
    for (wish, words) in [("--nodes=0", "0 is not in 1..=20"), ("--name=a/b", "take 1 to 40 letters")] {
        let mut command = Command::new(partage_e2e::testkit());
        let output = command.args(["cluster", "up", wish]).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains(words), "{said}");
    }
}
