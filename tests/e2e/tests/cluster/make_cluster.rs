//! `make cluster` and `make cluster-down`, as users run them.

use crate::test_image;
use partage_testkit::bed::{BedProfile, TestBed};
use partage_testkit::binaries::{Binaries, BuildPaths};
use partage_testkit::clients::Clients;
use partage_testkit::doc_pages::{DocPage, repository_root, substitute};
use partage_testkit::skip_or_fail;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A cluster of this test only, and its directory.
struct TestCluster {
    name: String,
}

impl TestCluster {
    /// Returns `None` if this machine lacks a requirement; the test was skipped then.
    fn new(what: &str) -> Option<Self> {
        // Starting an empty bed checks the same requirements quickly.
        drop(TestBed::for_test(BedProfile::control_plane())?);
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
        BuildPaths::from_environment().cache.unwrap().join("partage").join("cluster").join(&self.name)
    }
}

impl Drop for TestCluster {
    fn drop(&mut self) {
        let _ = self.command("down").status();
        let _ = fs::remove_dir_all(self.folder());
    }
}

fn output_text(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn cluster_is_started_used_and_stopped() {
    let Some(cluster) = TestCluster::new("person") else { return };
    let (code, out, err) = output_text(&cluster.run("down"));
    assert_eq!((code, out.as_str(), err.as_str()), (Some(0), "no cluster is running\n", ""));

    let (code, out, err) = output_text(&cluster.run("up"));
    assert_eq!((code, err.as_str()), (Some(0), ""), "{out}");
    assert!(out.contains("kube-apiserver") && out.contains("node1: containerd and kubelet"), "{out}");
    let kubeconfig = cluster.folder().join("kubeconfig");
    assert!(out.contains(&format!("export KUBECONFIG='{}'", kubeconfig.display())), "{out}");

    // From outside the bed, with any kubectl.
    let kubectl = |arguments: &[&str]| {
        let kubectl = Binaries::ready().unwrap().path("kubectl");
        Command::new(kubectl).args(arguments).env("KUBECONFIG", &kubeconfig).output().unwrap()
    };
    let (code, out, err) = output_text(&kubectl(&["get", "nodes"]));
    assert!(code == Some(0) && out.contains("node1   Ready"), "{out}{err}");
    let run =
        ["run", "try", "--image=localhost/debian:bed", "--image-pull-policy=Never", "--", "sleep", "1000"];
    assert!(kubectl(&run).status.success());
    assert!(kubectl(&["wait", "--for=condition=Ready", "pod/try", "--timeout=300s"]).status.success());
    let (code, out, err) = output_text(&kubectl(&["exec", "try", "--", "cat", "/etc/debian_version"]));
    assert_eq!(code, Some(0), "{out}{err}");

    // A second cluster of the same name is refused, and the message explains how to use the first.
    let (code, _, err) = output_text(&cluster.run("up"));
    assert_eq!(code, Some(1));
    assert!(err.starts_with("error: a cluster is running already (pid "), "{err}");
    assert!(
        err.contains(&format!("cluster down --name {}", cluster.name)) && err.contains("export KUBECONFIG="),
        "{err}"
    );
    let (_, out, _) = output_text(&cluster.run("status"));
    assert!(out.starts_with("a cluster is up (pid "), "{out}");

    let (code, out, _) = output_text(&cluster.run("down"));
    assert_eq!((code, out.as_str()), (Some(0), "the cluster was removed\n"));
    assert!(!kubeconfig.exists());
    let (_, out, _) = output_text(&cluster.run("status"));
    assert_eq!(out, "no cluster is running\n");
}

/// Commands of the README and of the testbed page that are not run here, with the reason. Nothing is built here.
const README_SKIPPED: &[(&str, &str)] = &[
    ("make run", "tests/e2e/tests/workstation/readme_image.rs runs the same command"),
    ("make test", "it runs this test"),
    ("partage run", "tests/e2e/tests/workstation covers the workstation commands"),
    ("partage top", "tests/e2e/tests/workstation/top_terminal.rs"),
    ("make cluster-down", "the testbed page continues with the cluster and stops it"),
];
const TESTBED_SKIPPED: &[(&str, &str)] = &[
    ("make cluster ", "the README has started it"),
    ("make binaries", "builds programs; `make test` starts with it"),
    ("make shim", "tests/e2e/tests/clients/shim_file.rs builds the shim the same way"),
    ("cargo run -p partage-xtask -- clients  ", "fetches clients; `make binaries` does it"),
];

#[test]
fn documented_cluster_commands_work_with_partage_installed() {
    let folder = tempfile::tempdir().unwrap();
    let Some((archive, _)) = test_image::build_image(folder.path()) else { return };
    if let Err(missing) = Clients::ready() {
        return skip_or_fail(&missing);
    }
    let Some(cluster) = TestCluster::new("partage") else { return };
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
        // A slow machine may need longer than kubectl's default.
        ("kubectl wait ", "kubectl wait --timeout=300s "),
    ];
    let does = |commands: &[String]| {
        let script = substitute(&commands.join("\n"), &table);
        let bin = Binaries::ready().unwrap().folder().display().to_string();
        let path = format!("{bin}:{}", std::env::var("PATH").unwrap());
        let mut command = Command::new("bash");
        command.args(["-euo", "pipefail", "-c", &script]).env("PATH", path).current_dir(repository_root());
        let (code, out, err) = output_text(&command.stdin(Stdio::null()).output().unwrap());
        assert_eq!(code, Some(0), "{script}\n{out}{err}");
        out
    };

    let readme = DocPage::read("README.md", README_SKIPPED).unwrap();
    let blocks = readme.commands("Try it");
    let output = does(blocks.last().unwrap());
    assert!(output.contains("waiting until the nodes offer GPU shares"), "{output}");
    assert!(output.contains("4096MiB"), "{output}");
    readme.check_complete().unwrap();

    let page = DocPage::read("docs/testbed.md", TESTBED_SKIPPED).unwrap();
    let output = does(&page.commands("Try it")[0]);
    assert!(
        output.contains("node1")
            && output.contains("4096MiB")
            && output.ends_with("the cluster was removed\n"),
        "{output}"
    );
    for heading in ["The programs", "The images", "The clients"] {
        does(&page.commands(heading)[0]);
    }
    page.check_complete().unwrap();
    assert!(!Path::new(&kubeconfig).exists());
}

#[test]
fn interrupted_start_leaves_nothing_behind() {
    let Some(cluster) = TestCluster::new("interrupted") else { return };
    let mut up =
        cluster.command("up").process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(up.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    assert!(line.ends_with("etcd and kube-apiserver\n"), "{line}");
    let group = rustix::process::Pid::from_child(&up);
    rustix::process::kill_process_group(group, rustix::process::Signal::INT).unwrap();
    let (code, _, err) = output_text(&up.wait_with_output().unwrap());
    assert_eq!((code, err.as_str()), (Some(130), "error: interrupted; everything was removed\n"));
    let (_, out, _) = output_text(&cluster.run("status"));
    assert_eq!(out, "no cluster is running\n");
    assert_eq!(orphaned_beds(), Vec::<String>::new());
}

/// Returns directories and cgroups of beds whose owner is dead. Owners of other tests' beds are alive.
fn orphaned_beds() -> Vec<String> {
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
fn non_root_user_is_refused_with_the_reason() {
    let folder = std::env::temp_dir().join(format!("partage-unprivileged-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    // The program may be in a directory that other users cannot read.
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
    let (code, out, err) = output_text(&output);
    fs::remove_dir_all(&folder).unwrap();
    assert_eq!((code, out.as_str()), (Some(1), ""));
    assert_eq!(
        err,
        "error: the test bed requires root to create its own namespaces, mounts and cgroups; run again as root \
         (sudo -E make cluster)\n"
    );
}

#[test]
fn missing_tool_is_named_with_its_package() {
    if !rustix::process::geteuid().is_root() {
        return skip_or_fail(&"only root gets as far as a missing tool");
    }
    let folder = std::env::temp_dir().join(format!("partage-no-ip-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let mut command = Command::new(partage_e2e::testkit());
    command.args(["cluster", "up", "--name", "tools"]).env("PATH", &folder).env("XDG_CACHE_HOME", &folder);
    let (code, _, err) = output_text(&command.output().unwrap());
    fs::remove_dir_all(&folder).unwrap();
    assert_eq!(code, Some(1));
    assert_eq!(
        err,
        "error: the test bed requires ip, which is not on the PATH; install it as root: apt-get install iproute2\n"
    );
}

/// Runs `cluster up` in its own mount namespace after a script that removes a requirement.
fn up_after_script(script: &str, name: &str) -> (Option<i32>, String, String) {
    let line = format!("{script}; exec \"$1\" cluster up --name {name}");
    let unshare = ["--mount", "--propagation", "private", "sh", "-euc", &line, "sh"];
    let program = partage_e2e::testkit();
    output_text(&Command::new("unshare").args(unshare).arg(program).output().unwrap())
}

#[test]
fn missing_host_features_are_named_and_nothing_is_left() {
    let Some(cluster) = TestCluster::new("lacks") else { return };
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().display();

    let little = format!("mount -t tmpfs -o size=64m tmpfs {at}; export TMPDIR={at}");
    let (code, _, err) = up_after_script(&little, &cluster.name);
    assert_eq!(code, Some(1));
    let expected =
        format!("error: {at} has 64 MiB free, and a bed needs about 512 MiB; free some space, or set TMPDIR");
    assert!(err.starts_with(&expected), "{err}");

    // An overlay cannot have its writable layer on another overlay.
    let overlay = format!(
        "mount -t tmpfs tmpfs {at}; mkdir {at}/u {at}/w {at}/m; \
         mount -t overlay overlay -o lowerdir=/usr,upperdir={at}/u,workdir={at}/w {at}/m; export TMPDIR={at}/m"
    );
    let (code, _, err) = up_after_script(&overlay, &cluster.name);
    assert_eq!(code, Some(1));
    assert!(err.contains("this kernel does not allow the test bed to start a node"), "{err}");
    assert!(err.contains("put TMPDIR on ext4, xfs or tmpfs"), "{err}");

    // Root without CAP_SYS_ADMIN, as in most containers.
    let program = partage_e2e::testkit();
    let bounded = ["--bounding-set=-sys_admin", "--", program, "cluster", "up", "--name", &cluster.name];
    let (code, _, err) = output_text(&Command::new("setpriv").args(bounded).output().unwrap());
    assert_eq!(code, Some(1));
    assert!(
        err.starts_with(
            "error: this kernel does not allow the test bed to create namespaces (exit status: 0"
        ),
        "{err}"
    );
    assert!(
        err.contains("Operation not permitted") && err.contains("root in the host's user namespace"),
        "{err}"
    );

    assert_eq!(orphaned_beds(), Vec::<String>::new());
}

#[test]
fn invalid_options_are_refused() {
    for (option, expected) in [("--nodes=0", "0 is not in 1..=20"), ("--name=a/b", "use 1 to 40 letters")] {
        let mut command = Command::new(partage_e2e::testkit());
        let output = command.args(["cluster", "up", option]).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(message.contains(expected), "{message}");
    }
}
