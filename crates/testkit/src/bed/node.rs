//! One node of a bed: namespaces with containerd and kubelet in them.

use super::bed_dir::BedDir;
use super::cgroups::{self, Hierarchies};
use super::component::{Component, ExecEnvironment, lock};
use super::containerd::SOCKET_PATH;
use super::kubeconfig::{Identity, kubeconfig};
use super::network::{self, DNS_ADDRESS, Network};
use super::pki::CertificateAuthority;
use super::profile::{CgroupVersion, NodeProfile};
use super::sandbox::{only_child_of, signal, wait_waking};
use super::{BedError, control_plane, log_excerpt, wait};
use rustix::process::Signal;
use serde_json::json;
use std::fs::{self, File};
use std::io::Read;
use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Time limit for a node to boot.
const BOOT_TIMEOUT: Duration = Duration::from_secs(300);

/// What all nodes of a bed share.
#[derive(Debug)]
pub(super) struct BedContext {
    pub(super) folder: BedDir,
    /// The control plane's host, whose network the nodes are connected to.
    pub(super) host: ExecEnvironment,
    pub(super) network: Network,
    pub(super) hierarchies: Hierarchies,
    /// OCI archives that every node imports.
    pub(super) images: Vec<PathBuf>,
    pub(super) bin: PathBuf,
    pub(super) unshare: PathBuf,
}

/// One node of the bed.
#[derive(Debug)]
pub struct BedNode {
    name: String,
    number: u8,
    cgroups: CgroupVersion,
    folder: PathBuf,
    kubelet: Component,
    containerd: Component,
    context: Arc<BedContext>,
    booted: Mutex<Option<BootedNode>>,
}

/// A node that is powered on.
#[derive(Debug)]
struct BootedNode {
    /// Exits when the node's first process does.
    waiter: Child,
    first_pid: u32,
    environment: ExecEnvironment,
}

impl BedNode {
    /// Writes the node's files. It is powered off.
    pub(super) fn new(
        profile: &NodeProfile,
        number: u8,
        context: &Arc<BedContext>,
        authority: &CertificateAuthority,
    ) -> Result<Self, BedError> {
        let cgroups = profile.cgroups.unwrap_or_else(|| context.hierarchies.default_version());
        context.hierarchies.check_available(cgroups)?;
        let name = profile.name.clone();
        let folder = context.folder.path.join("nodes").join(&name);
        let parts =
            ["root", "disk/upper", "disk/work", "disk/lib", "disk/log", "sysctl", "bin", "cni", "tmp"];
        for part in parts {
            let path = folder.join(part);
            fs::create_dir_all(&path).map_err(BedError::io(format!("creating {}", path.display())))?;
        }
        let write = |file: &str, text: &str| context.folder.write(&format!("nodes/{name}/{file}"), text);
        let address = network::node_address(number).to_string();
        let serving = authority.server(&format!("system:node:{name}"), &[&name, &address])?;
        write("kubelet.crt", &serving.certificate)?;
        write("kubelet.key", &serving.key)?;
        write("ca.crt", &authority.pem())?;
        let caller = authority.client(&format!("system:node:{name}"), Some("system:nodes"))?;
        let caller = Identity::Certificate(&caller);
        write(
            "kubeconfig",
            &kubeconfig(&control_plane::server_url(), &authority.pem(), &caller).to_string(),
        )?;
        write("resolv.conf", &format!("nameserver {DNS_ADDRESS}\n"))?;
        write("kubelet.yaml", &kubelet_config().to_string())?;
        write("cni/10-bed.conflist", &cni_config(number).to_string())?;
        let runc = if cgroups == CgroupVersion::V2 && !context.hierarchies.v2_has_all_controllers() {
            make_executable(&write("runc-v2lite", include_str!("scripts/runc-v2lite.sh"))?)?
        } else {
            "/bed/bin/runc"
        };
        write("containerd.toml", &profile.containerd.config(runc))?;
        let containerd = profile.containerd.install(&folder)?;

        let component = |part: &str, program: &str, arguments: &[&str]| {
            let arguments = arguments.iter().map(ToString::to_string).collect();
            Component::new(format!("{name}/{part}"), program, arguments, &context.folder, &context.host)
        };
        let kubelet = component(
            "kubelet",
            "kubelet",
            &[
                "--config=/bed/kubelet.yaml",
                "--kubeconfig=/bed/kubeconfig",
                &format!("--hostname-override={name}"),
                &format!("--node-ip={address}"),
                "--cert-dir=/bed/tmp",
                "--v=2",
            ],
        );
        let containerd = component("containerd", containerd, &["--config=/bed/containerd.toml"]);
        let context = Arc::clone(context);
        Ok(Self { name, number, cgroups, folder, kubelet, containerd, context, booted: Mutex::new(None) })
    }

    /// Returns the node's name, `node1`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the node's address in the bed's network.
    pub fn address(&self) -> Ipv4Addr {
        network::node_address(self.number)
    }

    /// Returns the cgroup version that the node sees.
    pub fn cgroups(&self) -> CgroupVersion {
        self.cgroups
    }

    /// Returns the node's kubelet.
    pub fn kubelet(&self) -> &Component {
        &self.kubelet
    }

    /// Returns the node's containerd. Containers survive its exit.
    pub fn containerd(&self) -> &Component {
        &self.containerd
    }

    /// Returns a path of the node as this process sees it, valid until the next reboot. Sockets can be connected to.
    pub fn path(&self, inside: impl AsRef<Path>) -> Result<PathBuf, BedError> {
        let inside = inside.as_ref();
        let first_pid = lock(&self.booted)
            .as_ref()
            .map(|booted| booted.first_pid)
            .ok_or_else(|| self.powered_off_error())?;
        Ok(Path::new(&format!("/proc/{first_pid}/root")).join(inside.strip_prefix("/").unwrap_or(inside)))
    }

    /// Returns a command that runs on the node as root, outside of any container. Paths are the node's.
    pub fn command<I: AsRef<str>>(
        &self,
        program: &str,
        arguments: impl IntoIterator<Item = I>,
    ) -> Result<Command, BedError> {
        let environment = lock(&self.booted)
            .as_ref()
            .map(|booted| booted.environment.clone())
            .ok_or_else(|| self.powered_off_error())?;
        let arguments: Vec<_> = arguments.into_iter().map(|one| one.as_ref().to_string()).collect();
        Ok(environment.command(Path::new(program), &arguments))
    }

    /// Returns a component that runs on the node outside of any container, as the node's services do. Paths are the
    /// node's. It does not survive a reboot.
    pub fn service<I: AsRef<str>>(
        &self,
        name: &str,
        program: &str,
        arguments: impl IntoIterator<Item = I>,
    ) -> Result<Component, BedError> {
        let environment = lock(&self.booted)
            .as_ref()
            .map(|booted| booted.environment.clone())
            .ok_or_else(|| self.powered_off_error())?;
        let arguments = arguments.into_iter().map(|one| one.as_ref().to_string()).collect();
        Ok(Component::new(
            format!("{}/{name}", self.name),
            program,
            arguments,
            &self.context.folder,
            &environment,
        ))
    }

    /// Runs a program on the node to its end and returns its output.
    pub fn run<I: AsRef<str>>(
        &self,
        program: &str,
        arguments: impl IntoIterator<Item = I>,
    ) -> Result<String, BedError> {
        let doing = format!("running {program} on {}", self.name);
        let output = self.command(program, arguments)?.output().map_err(BedError::io(&doing))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() {
            Ok(text(&output.stdout))
        } else {
            Err(BedError::Failed {
                doing,
                message: format!("{}: {}", output.status, text(&output.stderr).trim()),
            })
        }
    }

    fn powered_off_error(&self) -> BedError {
        BedError::Failed {
            doing: format!("accessing {}", self.name),
            message: "the node is powered off".to_string(),
        }
    }

    /// Powers the node off: all its processes are killed and its memory is lost. Its disk stays.
    pub fn power_off(&self) {
        if let Some(mut booted) = lock(&self.booted).take() {
            signal(booted.first_pid, Signal::KILL);
            wait_waking(&mut booted.waiter, || {
                self.components().into_iter().for_each(Component::wake_waiter)
            });
            // The veth pair would be removed a little later by itself, but its name is needed again.
            let _ = self.context.network.run_ip(&network::disconnect_commands(self.number));
            // They were killed with the node.
            self.kubelet.kill();
            self.containerd.kill();
            for folder in self.context.hierarchies.directories(&self.cgroup()) {
                cgroups::remove(&folder);
            }
        }
    }

    /// Powers the node on, with a new boot id, containerd and kubelet. Paths from before are no longer valid.
    pub fn power_on(&self) -> Result<(), BedError> {
        self.boot(&AtomicBool::new(false))?;
        self.kubelet.start()
    }

    /// Powers the node off and on.
    pub fn reboot(&self) -> Result<(), BedError> {
        self.power_off();
        self.power_on()
    }

    /// Returns the name of the node's cgroup in every hierarchy.
    fn cgroup(&self) -> String {
        format!("{}/{}", self.context.folder.name, self.name)
    }

    /// Starts the namespaces, network and containerd. Kubelet needs an API server and is started separately.
    pub(super) fn boot(&self, stop: &AtomicBool) -> Result<(), BedError> {
        let context = &self.context;
        let busybox = context.bin.join("busybox");
        let cgroups = context.hierarchies.create(&self.cgroup())?;
        let up = self.folder.join("up");
        let _ = fs::remove_file(&up);
        let boot_id = random_boot_id()?;
        let log_path = context.folder.logs.join(format!("{}.log", self.name));
        let log = File::create(&log_path).map_err(BedError::io(format!("writing {}", log_path.display())))?;
        let copy = log.try_clone().map_err(BedError::io("copying a file handle"))?;
        let text = |path: &Path| path.display().to_string();
        let arguments = [
            "--mount",
            "--net",
            "--pid",
            "--cgroup",
            "--uts",
            "--ipc",
            "--fork",
            "--kill-child",
            "--propagation",
            "private",
            &text(&busybox),
            "sh",
            &text(&context.folder.path.join("node.sh")),
            &text(&self.folder),
            &text(&context.bin),
            &self.name,
            &boot_id,
            &context.hierarchies.mount_options(self.cgroups),
        ]
        .map(str::to_string);
        let outside = ExecEnvironment { cgroups, ..context.host.clone() };
        let mut waiter = outside
            .command(&context.unshare, &arguments)
            .stdout(log)
            .stderr(copy)
            .spawn()
            .map_err(BedError::io(format!("starting {}", self.name)))?;
        let first_pid = wait::poll_until(&format!("{}'s namespaces", self.name), BOOT_TIMEOUT, stop, || {
            if let Some(status) = waiter.try_wait().map_err(BedError::io("waiting for a node"))? {
                let message = fs::read_to_string(&log_path).unwrap_or_default();
                return Err(BedError::Kernel {
                    what: format!("start a node ({status})"),
                    message: message.trim().replace('\n', "; "),
                    needs: "mount, network, pid, cgroup, uts and ipc namespaces and overlayfs",
                });
            }
            // The child of enter.sh is unshare, whose child is the node's first process.
            Ok(up.exists().then(|| only_child_of(only_child_of(waiter.id())?)).flatten())
        })?;
        let environment = ExecEnvironment {
            target: first_pid,
            cgroups: context.hierarchies.create_leaf(&self.cgroup(), "system")?,
            bin: "/bed/bin".into(),
            ..context.host.clone()
        };
        context.network.run_ip(&network::connect_commands(self.number, first_pid))?;
        Network::of_process(first_pid)?.run_ip(&network::node_commands(self.number))?;
        self.kubelet.move_to(&environment);
        self.containerd.move_to(&environment);
        *lock(&self.booted) = Some(BootedNode { waiter, first_pid, environment });
        self.start_containerd(stop)
    }

    fn start_containerd(&self, stop: &AtomicBool) -> Result<(), BedError> {
        self.containerd.start()?;
        let socket = self.path(SOCKET_PATH)?;
        wait::poll_until(&format!("{}'s containerd", self.name), BOOT_TIMEOUT, stop, || {
            self.containerd.check()?;
            Ok(UnixStream::connect(&socket).ok().map(drop))
        })
    }

    /// Imports the images. They stay on the node's disk.
    pub(super) fn import_images(&self) -> Result<(), BedError> {
        for archive in &self.context.images {
            // Passed through a pipe: the node may not see the archive's directory.
            let doing = format!("importing {} on {}", archive.display(), self.name);
            let file = File::open(archive).map_err(BedError::io(&doing))?;
            let output = self
                .command("/bed/bin/ctr", ["-n", "k8s.io", "images", "import", "--local", "-"])?
                .stdin(file)
                .output()
                .map_err(BedError::io(&doing))?;
            if !output.status.success() {
                let message = String::from_utf8_lossy(&output.stderr).trim().to_string();
                return Err(BedError::Failed { doing, message });
            }
        }
        Ok(())
    }

    /// Returns the components, for the report of a failed test.
    pub(super) fn components(&self) -> [&Component; 2] {
        [&self.containerd, &self.kubelet]
    }

    /// Returns an excerpt of the node's boot log.
    pub(super) fn boot_log_excerpt(&self) -> String {
        log_excerpt::excerpt(
            &fs::read_to_string(self.context.folder.logs.join(format!("{}.log", self.name)))
                .unwrap_or_default(),
            5,
        )
    }
}

impl Drop for BedNode {
    fn drop(&mut self) {
        if let Some(booted) = lock(&self.booted).as_mut() {
            let _ = booted.waiter.wait();
        }
    }
}

/// Returns a new boot id, by which a reboot is detected.
fn random_boot_id() -> Result<String, BedError> {
    let path = "/proc/sys/kernel/random/uuid";
    let mut text = String::new();
    let read = File::open(path).and_then(|mut file| file.read_to_string(&mut text));
    read.map_err(BedError::io(format!("reading {path}")))?;
    Ok(text.trim().to_string())
}

fn make_executable(path: &Path) -> Result<&'static str, BedError> {
    use std::os::unix::fs::PermissionsExt;
    let doing = format!("writing {}", path.display());
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).map_err(BedError::io(doing))?;
    Ok("/bed/runc-v2lite")
}

fn kubelet_config() -> serde_json::Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": { "anonymous": { "enabled": false }, "webhook": { "enabled": true }, "x509": { "clientCAFile": "/bed/ca.crt" } },
        "authorization": { "mode": "Webhook" },
        "tlsCertFile": "/bed/kubelet.crt",
        "tlsPrivateKeyFile": "/bed/kubelet.key",
        "containerRuntimeEndpoint": format!("unix://{SOCKET_PATH}"),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": "/",
        // On v1 nodes kubelet would refuse to start.
        "failCgroupV1": false,
        "failSwapOn": false,
        "enforceNodeAllocatable": ["pods"],
        // The host's disk may be fuller than kubelet allows, which is not under test.
        "evictionHard": { "memory.available": "50Mi", "nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%", "imagefs.inodesFree": "0%" },
        "imageGCHighThresholdPercent": 100,
        "clusterDNS": [DNS_ADDRESS.to_string()],
        "clusterDomain": "cluster.local",
        "resolvConf": "/bed/resolv.conf",
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        // Tests wait for the reported status.
        "nodeStatusUpdateFrequency": "1s",
        "syncFrequency": "10s",
        "fileCheckFrequency": "5s",
        "serializeImagePulls": false,
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
        "kubeAPIQPS": 500,
        "kubeAPIBurst": 1000,
        "shutdownGracePeriod": "0s",
    })
}

fn cni_config(number: u8) -> serde_json::Value {
    json!({
        "cniVersion": "1.0.0",
        "name": "bed",
        "plugins": [{
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": true,
            "hairpinMode": true,
            "ipam": {
                "type": "host-local",
                "ranges": [[{ "subnet": network::pod_network(number) }]],
                "routes": [{ "dst": "0.0.0.0/0" }],
                // As on a real machine, address leases do not survive a reboot.
                "dataDir": "/run/cni",
            },
        }],
    })
}
