//! A real Kubernetes in namespaces of its own: `Bed::start` brings it up, dropping it leaves nothing behind.
//!
//! The map: `profile` what is asked for; `folder` its files; `world` the namespaces and who tidies up; `component` one program;
//! `control_plane`, `node` what is in a cluster; `agent` what an agent is given; `network`, `dns`, `pki`, `kubeconfig`, `cgroups` what they need;
//! `scripts` what runs inside before any program of ours could. `docs/testbed.md` shows it in use.

mod agent;
mod cgroups;
mod component;
mod containerd;
mod control_plane;
mod dns;
mod error;
mod folder;
mod kubeconfig;
mod logs;
mod network;
mod node;
mod pki;
mod possible;
mod profile;
mod trial;
mod wait;
mod world;

pub use component::Component;
pub use error::BedError;
pub use node::Node;
pub use pki::Certificate;
pub use profile::{Cgroups, Containerd, NodeProfile, Profile};

use cgroups::Hierarchies;
use component::Place;
use control_plane::ControlPlane;
use dns::Dns;
use folder::Folder;
use k8s_openapi::api::core::v1 as api;
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::Api;
use kube::api::PostParams;
use kubeconfig::Identity;
use node::Surroundings;
use pki::Authority;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::future::Future;
use std::io::Write;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use tokio::runtime::{Handle, Runtime};
use world::World;

/// How long the cluster may take to come up on a machine that is busy with other things.
const PATIENCE: Duration = Duration::from_secs(300);

/// A running cluster. Dropped, it is gone: processes, mounts, interfaces, cgroups, files.
pub struct Bed {
    nodes: Vec<Node>,
    plane: ControlPlane,
    authority: Authority,
    client: kube::Client,
    kubeconfig: PathBuf,
    around: Arc<Surroundings>,
    dns: Option<Dns>,
    handle: Handle,
    runtime: Option<Runtime>,
    world: World,
    /// It came up whole; its logs are of use only where something fails later.
    up: bool,
}

impl std::fmt::Debug for Bed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bed").field("folder", &self.around.folder.path).finish_non_exhaustive()
    }
}

impl Bed {
    /// Brings a cluster up; returns when its nodes are ready for pods.
    pub fn start(profile: Profile) -> Result<Self, BedError> {
        Self::start_telling(profile, &AtomicBool::new(false), &mut |_| {})
    }

    /// The same for people: tells how far it is, and can be stopped.
    pub(crate) fn start_telling(
        profile: Profile,
        stop: &AtomicBool,
        tell: &mut dyn FnMut(&str),
    ) -> Result<Self, BedError> {
        let ground = possible::ground(&profile)?;
        // Another part of the process may have chosen already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let hierarchies = Hierarchies::of_this_machine()?;
        folder::sweep(&hierarchies);
        let folder = Folder::new()?;
        let started = Self::start_in(profile, ground, hierarchies, &folder, stop, tell);
        if matches!(started, Err(BedError::Interrupted)) {
            folder.forget_logs();
        }
        started
    }

    fn start_in(
        profile: Profile,
        ground: possible::Ground,
        hierarchies: Hierarchies,
        folder: &Folder,
        stop: &AtomicBool,
        tell: &mut dyn FnMut(&str),
    ) -> Result<Self, BedError> {
        let busybox = ground.bin.join("busybox");
        let world = World::begin(folder, &busybox, &hierarchies, stop)?;
        let authority = Authority::new()?;
        let host = Place {
            target: world.first(),
            cgroups: hierarchies.make(&format!("{}/control", folder.name))?,
            enter: folder.path.join("enter.sh"),
            bin: ground.bin.clone(),
        };
        let plane = ControlPlane::new(folder, &host, &authority, &profile)?;
        let around = Arc::new(Surroundings {
            folder: folder.clone(),
            host,
            network: world.network.clone(),
            hierarchies,
            images: ground.images,
            bin: ground.bin,
            unshare: ground.unshare,
        });
        let numbered = profile.nodes.iter().zip(1..);
        let nodes = numbered.map(|(node, number)| Node::new(node, number, &around, &authority));
        let nodes = nodes.collect::<Result<Vec<_>, _>>()?;
        let runtime = runtime(&around)?;
        let dns = Dns::start(&around.network)?;
        let config = administrator(&authority, &control_plane::server())?;
        let kubeconfig = folder.write("admin.kubeconfig", &config.to_string())?;
        let client = kubeconfig::client(config, runtime.handle())?;
        let mut bed = Self {
            nodes,
            plane,
            authority,
            client,
            kubeconfig,
            around,
            dns: Some(dns),
            handle: runtime.handle().clone(),
            runtime: Some(runtime),
            world,
            up: false,
        };
        match bed.bring_up(stop, tell) {
            // Why it is not there yet, only the whole picture tells.
            Err(BedError::TooLate { what, seconds, last }) => {
                Err(BedError::TooLate { what, seconds, last: format!("{last}\n{}", bed.report()) })
            }
            other => other,
        }?;
        bed.up = true;
        Ok(bed)
    }

    fn bring_up(&self, stop: &AtomicBool, tell: &mut dyn FnMut(&str)) -> Result<(), BedError> {
        std::thread::scope(|scope| {
            // containerd needs no API server: nodes boot beside the control plane.
            let boots: Vec<_> = self
                .nodes
                .iter()
                .map(|node| {
                    scope.spawn(move || {
                        node.boot(stop)?;
                        node.import_images()
                    })
                })
                .collect();
            tell("etcd and kube-apiserver");
            let visit = self.around.network.visit()?;
            self.plane.start_store_and_server(stop)?;
            drop(visit);
            self.api_ready_or(stop)?;
            tell("kube-controller-manager and kube-scheduler");
            self.plane.controller_manager.start()?;
            self.plane.scheduler.start()?;
            self.first_objects()?;
            for (node, boot) in self.nodes.iter().zip(boots) {
                tell(&format!("{}: containerd and kubelet", node.name()));
                boot.join().unwrap_or_else(|_| {
                    Err(BedError::Failed {
                        doing: format!("booting {}", node.name()),
                        said: "it panicked".to_string(),
                    })
                })?;
                node.kubelet().start()?;
            }
            for node in &self.nodes {
                self.node_ready_or(node.name(), stop)?;
            }
            Ok(())
        })
    }

    /// What a cluster has before anybody else comes.
    fn first_objects(&self) -> Result<(), BedError> {
        let client = self.client.clone();
        self.block_on(async move {
            let doing = "making the cluster's first objects";
            let binding: ClusterRoleBinding = serde_json::from_value(control_plane::kubelet_client_binding())
                .map_err(BedError::failed(doing))?;
            let bindings: Api<ClusterRoleBinding> = Api::all(client.clone());
            bindings.create(&PostParams::default(), &binding).await.map_err(BedError::failed(doing))?;
            // Pods are refused until it exists, and its controller takes seconds to get there.
            let account = json!({ "metadata": { "name": "default" } });
            let account = serde_json::from_value(account).map_err(BedError::failed(doing))?;
            let accounts: Api<api::ServiceAccount> = Api::namespaced(client, "default");
            match accounts.create(&PostParams::default(), &account).await {
                Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
                other => other.map(drop).map_err(BedError::failed(doing)),
            }
        })
    }

    /// Waits until the API server is ready.
    pub fn api_ready(&self) -> Result<(), BedError> {
        self.api_ready_or(&AtomicBool::new(false))
    }

    fn api_ready_or(&self, stop: &AtomicBool) -> Result<(), BedError> {
        wait::until_seen("a ready API server", PATIENCE, stop, || {
            for component in self.plane.components() {
                component.check()?;
            }
            let client = self.client.clone();
            self.block_on(async move {
                let doing = "asking whether the API server is ready";
                let request =
                    http::Request::get("/readyz").body(Vec::new()).map_err(BedError::failed(doing))?;
                Ok(client.request_text(request).await.map(drop).map_err(|error| error.to_string()))
            })
        })
    }

    /// Waits until pods can be placed on a node: it is ready, and the taint from before is gone.
    pub fn node_ready(&self, name: &str) -> Result<(), BedError> {
        self.node_ready_or(name, &AtomicBool::new(false))
    }

    fn node_ready_or(&self, name: &str, stop: &AtomicBool) -> Result<(), BedError> {
        wait::until_seen(&format!("{name} Ready"), PATIENCE, stop, || {
            for component in self.plane.components() {
                component.check()?;
            }
            for node in self.nodes.iter().filter(|node| node.name() == name) {
                for component in node.components() {
                    component.check()?;
                }
            }
            let nodes: Api<api::Node> = Api::all(self.client.clone());
            Ok(self.block_on(async move {
                let node = nodes.get(name).await.map_err(|error| error.to_string())?;
                let conditions = node.status.and_then(|status| status.conditions).unwrap_or_default();
                let ready = conditions.iter().find(|condition| condition.type_ == "Ready");
                let taints = node.spec.and_then(|spec| spec.taints).unwrap_or_default();
                match (ready, taints.first()) {
                    (Some(ready), None) if ready.status == "True" => Ok(()),
                    (_, Some(taint)) => Err(format!("taint {}", taint.key)),
                    (ready, None) => Err(ready.and_then(|ready| ready.message.clone()).unwrap_or_default()),
                }
            }))
        })
    }

    /// Runs a future inside the bed's network, on this thread and the bed's own.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        // Who cannot enter would connect to nothing, or worse, to the machine.
        #[allow(clippy::expect_used)]
        let _visit = self.around.network.visit().expect("a thread can enter the bed's network");
        self.handle.block_on(future)
    }

    /// The runtime whose threads are inside the bed's network.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// A client that may do everything: to arrange things. What is tested gets [`Bed::client_as`].
    pub fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// A client with a certificate of this user, who may do what RBAC says.
    pub fn client_as(&self, user: &str, group: Option<&str>) -> Result<kube::Client, BedError> {
        let certificate = self.authority.client(user, group)?;
        self.client_with(&Identity::Certificate(&certificate))
    }

    /// A client with a token, as a service account has it.
    pub fn client_with_token(&self, token: &str) -> Result<kube::Client, BedError> {
        self.client_with(&Identity::Token(token))
    }

    fn client_with(&self, identity: &Identity<'_>) -> Result<kube::Client, BedError> {
        kubeconfig::client(self.kubeconfig_of(identity), self.handle())
    }

    fn kubeconfig_of(&self, identity: &Identity<'_>) -> Value {
        kubeconfig::kubeconfig(&control_plane::server(), &self.authority.pem(), identity)
    }

    /// An administrator's kubeconfig that reaches the API server at this address.
    pub(crate) fn kubeconfig_at(&self, server: &str) -> Result<String, BedError> {
        Ok(administrator(&self.authority, server)?.to_string())
    }

    /// Where servers of a test listen, so that the control plane, nodes and pods reach them.
    pub fn address(&self) -> IpAddr {
        network::HOST.into()
    }

    /// A certificate for a server of the test, under these names and addresses.
    pub fn server_certificate(&self, names: &[&str]) -> Result<Certificate, BedError> {
        self.authority.server("test", names)
    }

    /// The certificate of the cluster's authority.
    pub fn authority(&self) -> String {
        self.authority.pem()
    }

    /// A node by its name.
    pub fn node(&self, name: &str) -> Result<&Node, BedError> {
        self.nodes.iter().find(|node| node.name() == name).ok_or_else(|| {
            let there: Vec<_> = self.nodes.iter().map(Node::name).collect();
            BedError::Profile(format!("the bed has no node {name}; it has: {}", there.join(", ")))
        })
    }

    /// All nodes.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The cluster's store.
    pub fn etcd(&self) -> &Component {
        &self.plane.etcd
    }

    /// The API server.
    pub fn apiserver(&self) -> &Component {
        &self.plane.apiserver
    }

    /// The controller manager.
    pub fn controller_manager(&self) -> &Component {
        &self.plane.controller_manager
    }

    /// The scheduler.
    pub fn scheduler(&self) -> &Component {
        &self.plane.scheduler
    }

    /// Every component, the control plane's first.
    pub fn components(&self) -> impl Iterator<Item = &Component> {
        self.plane.components().into_iter().chain(self.nodes.iter().flat_map(Node::components))
    }

    /// Did somebody else end it?
    pub(crate) fn is_gone(&self) -> bool {
        self.world.is_gone()
    }

    /// A program of who looks after the cluster, ready to be given arguments and run: on this machine, in the bed's network, with an
    /// administrator's kubeconfig.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.world.first())).arg(program);
        // By default what is learned of a cluster goes to the user's home, by address, and beds have all the same.
        command.env("KUBECACHEDIR", self.around.folder.path.join("kubectl"));
        command.env("KUBECONFIG", &self.kubeconfig).stdin(Stdio::null());
        command
    }

    /// `kubectl`, as administrator, ready to be given arguments and run.
    pub fn kubectl_command(&self) -> Command {
        self.command(self.around.bin.join("kubectl"))
    }

    /// Runs `kubectl`; what it wrote, or its own words on why not.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String, BedError> {
        self.kubectl_with(arguments, "")
    }

    /// Runs `kubectl` with something on its standard input: `bed.kubectl_with(&["apply", "-f", "-"], manifest)`.
    pub fn kubectl_with(&self, arguments: &[&str], input: &str) -> Result<String, BedError> {
        let doing = format!("kubectl {}", arguments.join(" "));
        let mut command = self.kubectl_command();
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(BedError::io(&doing))?;
        if let Some(mut pipe) = child.stdin.take() {
            // One that reads nothing may be gone already.
            let _ = pipe.write_all(input.as_bytes());
        }
        let output = child.wait_with_output().map_err(BedError::io(&doing))?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            false => {
                let said = String::from_utf8_lossy(&output.stderr).trim().to_string();
                Err(BedError::Failed { doing, said })
            }
        }
    }

    /// What a person needs to see of a bed in which something went wrong.
    pub fn report(&self) -> String {
        let mut text = format!("\n== the bed, logs in {}\n", self.around.folder.logs.display());
        for component in self.components() {
            let log = std::fs::read_to_string(component.log()).unwrap_or_default();
            let _ = writeln!(text, "{}: {}", component.name(), component.state());
            text.push_str(&logs::cut(&log, 8));
        }
        for node in &self.nodes {
            text.push_str(&node.words());
        }
        let questions: [&[&str]; 3] = [
            &["get", "nodes", "--request-timeout=3s"],
            &["get", "pods", "--all-namespaces", "-o", "wide", "--request-timeout=3s"],
            &["get", "events", "--all-namespaces", "--sort-by=.lastTimestamp", "--request-timeout=3s"],
        ];
        for question in questions {
            let answer = self.kubectl(question).unwrap_or_else(|error| error.to_string());
            let _ = writeln!(text, "-- kubectl {}", question.first().map_or("", |_| question[1]));
            let lines: Vec<_> = answer.lines().collect();
            for line in lines.iter().skip(lines.len().saturating_sub(25)) {
                text.extend(line.chars().take(240));
                text.push('\n');
            }
        }
        text
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let failed = std::thread::panicking();
        if failed {
            // Past the capture of the test runner, which would print it in the wrong place.
            let _ = writeln!(std::io::stderr(), "{}", self.report());
        }
        if let Some(runtime) = self.runtime.take() {
            // Its sockets would keep the network namespace.
            runtime.shutdown_timeout(Duration::from_secs(2));
        }
        drop(self.dns.take());
        let (plane, nodes) = (&self.plane, &self.nodes);
        self.world.end(|| {
            let of_nodes = nodes.iter().flat_map(Node::components);
            plane.components().into_iter().chain(of_nodes).for_each(Component::nudge);
        });
        if self.up && !failed {
            self.around.folder.forget_logs();
        }
    }
}

/// The kubeconfig of who may do everything.
fn administrator(authority: &Authority, server: &str) -> Result<Value, BedError> {
    let certificate = authority.client("partage-bed", Some("system:masters"))?;
    Ok(kubeconfig::kubeconfig(server, &authority.pem(), &Identity::Certificate(&certificate)))
}

/// Threads that are inside the bed's network, all of them.
fn runtime(around: &Surroundings) -> Result<Runtime, BedError> {
    let network = around.network.clone();
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("bed")
        .on_thread_start(move || {
            // The first thing asked of the API server would say so.
            let _ = network.enter();
        })
        .enable_all()
        .build()
        .map_err(BedError::io("starting threads"))
}
