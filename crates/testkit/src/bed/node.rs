//! A node: its own namespaces with containerd and kubelet in them.

use super::cgroups::{self, Hierarchies};
use super::component::{Component, Place, lock};
use super::containerd::SOCKET;
use super::folder::Folder;
use super::kubeconfig::{Identity, kubeconfig};
use super::network::{self, DNS, Network};
use super::pki::Authority;
use super::profile::{Cgroups, NodeProfile};
use super::world::{child_of, signal, wait_nudging};
use super::{BedError, control_plane, logs, wait};
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

/// A node that runs this long without being up never will be.
const PATIENCE: Duration = Duration::from_secs(300);

/// What all nodes of a bed share.
#[derive(Debug)]
pub(super) struct Surroundings {
    pub(super) folder: Folder,
    /// The control plane's host, whose network the node is plugged into.
    pub(super) host: Place,
    pub(super) network: Network,
    pub(super) hierarchies: Hierarchies,
    /// OCI archives that every node has.
    pub(super) images: Vec<PathBuf>,
    pub(super) bin: PathBuf,
    pub(super) unshare: PathBuf,
}

/// One node of the bed.
#[derive(Debug)]
pub struct Node {
    name: String,
    number: u8,
    cgroups: Cgroups,
    folder: PathBuf,
    kubelet: Component,
    containerd: Component,
    around: Arc<Surroundings>,
    machine: Mutex<Option<Machine>>,
}

/// A node that is switched on.
#[derive(Debug)]
struct Machine {
    /// Ends when the node's first process does.
    waiter: Child,
    first: u32,
    place: Place,
}

impl Node {
    /// Writes what it needs. It is switched off.
    pub(super) fn new(
        profile: &NodeProfile,
        number: u8,
        around: &Arc<Surroundings>,
        authority: &Authority,
    ) -> Result<Self, BedError> {
        let cgroups = profile.cgroups.unwrap_or_else(|| around.hierarchies.usual());
        around.hierarchies.allow(cgroups)?;
        let name = profile.name.clone();
        let folder = around.folder.path.join("nodes").join(&name);
        let parts =
            ["root", "disk/upper", "disk/work", "disk/lib", "disk/log", "sysctl", "bin", "cni", "tmp"];
        for part in parts {
            let path = folder.join(part);
            fs::create_dir_all(&path).map_err(BedError::io(format!("making {}", path.display())))?;
        }
        let write = |file: &str, text: &str| around.folder.write(&format!("nodes/{name}/{file}"), text);
        let address = network::node_address(number).to_string();
        let serving = authority.server(&format!("system:node:{name}"), &[&name, &address])?;
        write("kubelet.crt", &serving.certificate)?;
        write("kubelet.key", &serving.key)?;
        write("ca.crt", &authority.pem())?;
        let caller = authority.client(&format!("system:node:{name}"), Some("system:nodes"))?;
        let caller = Identity::Certificate(&caller);
        write("kubeconfig", &kubeconfig(&control_plane::server(), &authority.pem(), &caller).to_string())?;
        write("resolv.conf", &format!("nameserver {DNS}\n"))?;
        write("kubelet.yaml", &kubelet_config().to_string())?;
        write("cni/10-bed.conflist", &cni_config(number).to_string())?;
        let runc = match cgroups == Cgroups::V2 && !around.hierarchies.v2_is_whole() {
            true => executable(&write("runc-v2lite", include_str!("scripts/runc-v2lite.sh"))?)?,
            false => "/bed/bin/runc",
        };
        write("containerd.toml", &profile.containerd.config(runc))?;
        let containerd = profile.containerd.bring(&folder)?;

        let component = |part: &str, program: &str, arguments: &[&str]| {
            let arguments = arguments.iter().map(ToString::to_string).collect();
            Component::new(format!("{name}/{part}"), program, arguments, &around.folder, &around.host)
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
        let around = Arc::clone(around);
        Ok(Self { name, number, cgroups, folder, kubelet, containerd, around, machine: Mutex::new(None) })
    }

    /// Its name, `node1`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its address in the bed's network.
    pub fn address(&self) -> Ipv4Addr {
        network::node_address(self.number)
    }

    /// Which cgroups it sees.
    pub fn cgroups(&self) -> Cgroups {
        self.cgroups
    }

    /// Its kubelet.
    pub fn kubelet(&self) -> &Component {
        &self.kubelet
    }

    /// Its containerd. Containers survive its death.
    pub fn containerd(&self) -> &Component {
        &self.containerd
    }

    /// A path of the node as seen from the test, valid until the next reboot; sockets can be connected to.
    pub fn path(&self, inside: impl AsRef<Path>) -> Result<PathBuf, BedError> {
        let inside = inside.as_ref();
        let first = lock(&self.machine).as_ref().map(|machine| machine.first).ok_or_else(|| self.off())?;
        Ok(Path::new(&format!("/proc/{first}/root")).join(inside.strip_prefix("/").unwrap_or(inside)))
    }

    /// A command that runs on the node, outside of any container, as root. Paths are the node's.
    pub fn command<I: AsRef<str>>(
        &self,
        program: &str,
        arguments: impl IntoIterator<Item = I>,
    ) -> Result<Command, BedError> {
        let place =
            lock(&self.machine).as_ref().map(|machine| machine.place.clone()).ok_or_else(|| self.off())?;
        let arguments: Vec<_> = arguments.into_iter().map(|one| one.as_ref().to_string()).collect();
        Ok(place.command(Path::new(program), &arguments))
    }

    /// A program that runs on the node, outside of any container, as its services do. Paths are the node's; it does not outlive a
    /// reboot.
    pub fn service<I: AsRef<str>>(
        &self,
        name: &str,
        program: &str,
        arguments: impl IntoIterator<Item = I>,
    ) -> Result<Component, BedError> {
        let place =
            lock(&self.machine).as_ref().map(|machine| machine.place.clone()).ok_or_else(|| self.off())?;
        let arguments = arguments.into_iter().map(|one| one.as_ref().to_string()).collect();
        Ok(Component::new(format!("{}/{name}", self.name), program, arguments, &self.around.folder, &place))
    }

    /// Runs a program on the node to its end; what it wrote.
    pub fn run<I: AsRef<str>>(
        &self,
        program: &str,
        arguments: impl IntoIterator<Item = I>,
    ) -> Result<String, BedError> {
        let doing = format!("running {program} on {}", self.name);
        let output = self.command(program, arguments)?.output().map_err(BedError::io(&doing))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match output.status.success() {
            true => Ok(text(&output.stdout)),
            false => Err(BedError::Failed {
                doing,
                said: format!("{}: {}", output.status, text(&output.stderr).trim()),
            }),
        }
    }

    fn off(&self) -> BedError {
        BedError::Failed { doing: format!("reaching {}", self.name), said: "it is switched off".to_string() }
    }

    /// Power off: every process of the node is gone at once, and so is what was in memory. Its disk stays.
    pub fn switch_off(&self) {
        if let Some(mut machine) = lock(&self.machine).take() {
            signal(machine.first, Signal::KILL);
            wait_nudging(&mut machine.waiter, || self.components().into_iter().for_each(Component::nudge));
            // By itself the cable goes a little later, and its name is needed again.
            let _ = self.around.network.ip(&network::unplug_commands(self.number));
            // They are gone with the node.
            self.kubelet.kill();
            self.containerd.kill();
            for folder in self.around.hierarchies.folders(&self.cgroup()) {
                cgroups::remove(&folder);
            }
        }
    }

    /// Power on, with a new boot id, containerd and kubelet. Paths from before are no longer valid.
    pub fn switch_on(&self) -> Result<(), BedError> {
        self.boot(&AtomicBool::new(false))?;
        self.kubelet.start()
    }

    /// Power off and on.
    pub fn reboot(&self) -> Result<(), BedError> {
        self.switch_off();
        self.switch_on()
    }

    /// The name of its cgroup, in every hierarchy.
    fn cgroup(&self) -> String {
        format!("{}/{}", self.around.folder.name, self.name)
    }

    /// Namespaces, network and containerd. Kubelet waits for an API server.
    pub(super) fn boot(&self, stop: &AtomicBool) -> Result<(), BedError> {
        let around = &self.around;
        let busybox = around.bin.join("busybox");
        let cgroups = around.hierarchies.make(&self.cgroup())?;
        let up = self.folder.join("up");
        let _ = fs::remove_file(&up);
        let boot_id = random_boot_id()?;
        let log_path = around.folder.logs.join(format!("{}.log", self.name));
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
            &text(&around.folder.path.join("node.sh")),
            &text(&self.folder),
            &text(&around.bin),
            &self.name,
            &boot_id,
            &around.hierarchies.words(self.cgroups),
        ]
        .map(str::to_string);
        let outside = Place { cgroups, ..around.host.clone() };
        let mut waiter = outside
            .command(&around.unshare, &arguments)
            .stdout(log)
            .stderr(copy)
            .spawn()
            .map_err(BedError::io(format!("starting {}", self.name)))?;
        let first = wait::until(&format!("{}'s namespaces", self.name), PATIENCE, stop, || {
            if let Some(status) = waiter.try_wait().map_err(BedError::io("waiting for a node"))? {
                let said = fs::read_to_string(&log_path).unwrap_or_default();
                return Err(BedError::Kernel {
                    what: format!("start a node ({status})"),
                    said: said.trim().replace('\n', "; "),
                    needs: "mount, network, pid, cgroup, uts and ipc namespaces and overlayfs",
                });
            }
            // enter.sh's child is unshare, and unshare's is the node's first.
            Ok(up.exists().then(|| child_of(child_of(waiter.id())?)).flatten())
        })?;
        let place = Place {
            target: first,
            cgroups: around.hierarchies.make_leaf(&self.cgroup(), "system")?,
            bin: "/bed/bin".into(),
            ..around.host.clone()
        };
        around.network.ip(&network::plug_commands(self.number, first))?;
        Network::of(first)?.ip(&network::node_commands(self.number))?;
        self.kubelet.move_to(&place);
        self.containerd.move_to(&place);
        *lock(&self.machine) = Some(Machine { waiter, first, place });
        self.start_containerd(stop)
    }

    fn start_containerd(&self, stop: &AtomicBool) -> Result<(), BedError> {
        self.containerd.start()?;
        let socket = self.path(SOCKET)?;
        wait::until(&format!("{}'s containerd", self.name), PATIENCE, stop, || {
            self.containerd.check()?;
            Ok(UnixStream::connect(&socket).ok().map(drop))
        })
    }

    /// Brings the images. They stay on its disk.
    pub(super) fn import_images(&self) -> Result<(), BedError> {
        for archive in &self.around.images {
            // A pipe: the archive may stand where the node does not see it.
            let doing = format!("importing {} on {}", archive.display(), self.name);
            let file = File::open(archive).map_err(BedError::io(&doing))?;
            let output = self
                .command("/bed/bin/ctr", ["-n", "k8s.io", "images", "import", "--local", "-"])?
                .stdin(file)
                .output()
                .map_err(BedError::io(&doing))?;
            if !output.status.success() {
                let said = String::from_utf8_lossy(&output.stderr).trim().to_string();
                return Err(BedError::Failed { doing, said });
            }
        }
        Ok(())
    }

    /// For the report of a failed test.
    pub(super) fn components(&self) -> [&Component; 2] {
        [&self.containerd, &self.kubelet]
    }

    /// What the node's own start said.
    pub(super) fn words(&self) -> String {
        logs::cut(
            &fs::read_to_string(self.around.folder.logs.join(format!("{}.log", self.name)))
                .unwrap_or_default(),
            5,
        )
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(machine) = lock(&self.machine).as_mut() {
            let _ = machine.waiter.wait();
        }
    }
}

/// A node that was rebooted is known by it.
fn random_boot_id() -> Result<String, BedError> {
    let path = "/proc/sys/kernel/random/uuid";
    let mut text = String::new();
    let read = File::open(path).and_then(|mut file| file.read_to_string(&mut text));
    read.map_err(BedError::io(format!("reading {path}")))?;
    Ok(text.trim().to_string())
}

fn executable(path: &Path) -> Result<&'static str, BedError> {
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
        "containerRuntimeEndpoint": format!("unix://{SOCKET}"),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": "/",
        // On v1 nodes kubelet would refuse to start.
        "failCgroupV1": false,
        "failSwapOn": false,
        "enforceNodeAllocatable": ["pods"],
        // The machine's disk may be fuller than kubelet likes; that is not what is tested.
        "evictionHard": { "memory.available": "50Mi", "nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%", "imagefs.inodesFree": "0%" },
        "imageGCHighThresholdPercent": 100,
        "clusterDNS": [DNS.to_string()],
        "clusterDomain": "cluster.local",
        "resolvConf": "/bed/resolv.conf",
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        // Tests wait for what it reports.
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
                // As on a machine: leases of a node that went down are forgotten.
                "dataDir": "/run/cni",
            },
        }],
    })
}
