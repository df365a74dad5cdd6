//! Runs a real Kubernetes in its own namespaces: `TestBed::start` starts it, and dropping it removes every trace.
//!
//! Modules: `profile` describes a bed, `bed_dir` holds its files, `sandbox` its namespaces and cleanup process,
//! `component` is one program; `control_plane` and `node` are the parts of a cluster; `agent_access` gives an agent its
//! permissions; `network`, `dns`, `pki`, `kubeconfig` and `cgroups` support them; `scripts` run inside before any
//! program of this crate can. `docs/testbed.md` shows how tests use it.

mod agent_access;
mod bed_dir;
mod cgroups;
mod component;
mod containerd;
mod control_plane;
mod dns;
mod error;
mod for_test;
mod kubeconfig;
mod log_excerpt;
mod network;
mod node;
mod pki;
mod preflight;
mod profile;
mod sandbox;
mod wait;

pub use component::Component;
pub use error::BedError;
pub use node::BedNode;
pub use pki::Certificate;
pub use profile::{BedProfile, CgroupVersion, ContainerdVersion, NodeProfile};

use bed_dir::BedDir;
use cgroups::Hierarchies;
use component::ExecEnvironment;
use control_plane::ControlPlane;
use dns::DnsServer;
use k8s_openapi::api::core::v1 as api;
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::Api;
use kube::api::PostParams;
use kubeconfig::Identity;
use node::BedContext;
use pki::CertificateAuthority;
use sandbox::Sandbox;
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

/// Time limit for the cluster to become ready on a loaded machine.
const READY_TIMEOUT: Duration = Duration::from_secs(300);

/// A running cluster. Dropping it removes its processes, mounts, network interfaces, cgroups and files.
pub struct TestBed {
    nodes: Vec<BedNode>,
    plane: ControlPlane,
    authority: CertificateAuthority,
    client: kube::Client,
    kubeconfig: PathBuf,
    context: Arc<BedContext>,
    dns: Option<DnsServer>,
    handle: Handle,
    runtime: Option<Runtime>,
    sandbox: Sandbox,
    /// Whether the bed started completely. Its logs are kept only if something fails later.
    up: bool,
}

impl std::fmt::Debug for TestBed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bed").field("folder", &self.context.folder.path).finish_non_exhaustive()
    }
}

impl TestBed {
    /// Starts a cluster and returns when its nodes are ready for pods.
    pub fn start(profile: BedProfile) -> Result<Self, BedError> {
        Self::start_with_progress(profile, &AtomicBool::new(false), &mut |_| {})
    }

    /// Starts a cluster as [`TestBed::start`] does, reports each step, and can be interrupted.
    pub(crate) fn start_with_progress(
        profile: BedProfile,
        stop: &AtomicBool,
        report_progress: &mut dyn FnMut(&str),
    ) -> Result<Self, BedError> {
        let inputs = preflight::check_inputs(&profile)?;
        // Another part of the process may have installed a provider already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let hierarchies = Hierarchies::detect()?;
        bed_dir::remove_stale_beds(&hierarchies);
        let folder = BedDir::new()?;
        let started = Self::start_in(profile, inputs, hierarchies, &folder, stop, report_progress);
        if matches!(started, Err(BedError::Interrupted)) {
            folder.remove_logs();
        }
        started
    }

    fn start_in(
        profile: BedProfile,
        inputs: preflight::BedInputs,
        hierarchies: Hierarchies,
        folder: &BedDir,
        stop: &AtomicBool,
        report_progress: &mut dyn FnMut(&str),
    ) -> Result<Self, BedError> {
        let busybox = inputs.bin.join("busybox");
        let sandbox = Sandbox::start(folder, &busybox, &hierarchies, stop)?;
        let authority = CertificateAuthority::new()?;
        let host = ExecEnvironment {
            target: sandbox.first_pid(),
            cgroups: hierarchies.create(&format!("{}/control", folder.name))?,
            enter: folder.path.join("enter.sh"),
            bin: inputs.bin.clone(),
        };
        let plane = ControlPlane::new(folder, &host, &authority, &profile)?;
        let context = Arc::new(BedContext {
            folder: folder.clone(),
            host,
            network: sandbox.network.clone(),
            hierarchies,
            images: inputs.images,
            bin: inputs.bin,
            unshare: inputs.unshare,
        });
        let numbered = profile.nodes.iter().zip(1..);
        let nodes = numbered.map(|(node, number)| BedNode::new(node, number, &context, &authority));
        let nodes = nodes.collect::<Result<Vec<_>, _>>()?;
        let runtime = runtime(&context)?;
        let dns = DnsServer::start(&context.network)?;
        let config = admin_kubeconfig(&authority, &control_plane::server_url())?;
        let kubeconfig = folder.write("admin.kubeconfig", &config.to_string())?;
        let client = kubeconfig::client(config, runtime.handle())?;
        let mut bed = Self {
            nodes,
            plane,
            authority,
            client,
            kubeconfig,
            context,
            dns: Some(dns),
            handle: runtime.handle().clone(),
            runtime: Some(runtime),
            sandbox,
            up: false,
        };
        match bed.start_components(stop, report_progress) {
            // The error of a timeout includes the report: the cause may be in any component.
            Err(BedError::TooLate { what, seconds, last }) => {
                Err(BedError::TooLate { what, seconds, last: format!("{last}\n{}", bed.report()) })
            }
            other => other,
        }?;
        bed.up = true;
        Ok(bed)
    }

    fn start_components(
        &self,
        stop: &AtomicBool,
        report_progress: &mut dyn FnMut(&str),
    ) -> Result<(), BedError> {
        std::thread::scope(|scope| {
            // containerd needs no API server, so nodes boot in parallel with the control plane.
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
            report_progress("etcd and kube-apiserver");
            let in_network = self.context.network.enter_temporarily()?;
            self.plane.start_etcd_and_apiserver(stop)?;
            drop(in_network);
            self.wait_until_api_ready_or_stopped(stop)?;
            report_progress("kube-controller-manager and kube-scheduler");
            self.plane.controller_manager.start()?;
            self.plane.scheduler.start()?;
            self.create_initial_objects()?;
            for (node, boot) in self.nodes.iter().zip(boots) {
                report_progress(&format!("{}: containerd and kubelet", node.name()));
                boot.join().unwrap_or_else(|_| {
                    Err(BedError::Failed {
                        doing: format!("booting {}", node.name()),
                        message: "it panicked".to_string(),
                    })
                })?;
                node.kubelet().start()?;
            }
            for node in &self.nodes {
                self.wait_until_node_ready_or_stopped(node.name(), stop)?;
            }
            Ok(())
        })
    }

    /// Creates the objects that a cluster needs before tests use it.
    fn create_initial_objects(&self) -> Result<(), BedError> {
        let client = self.client.clone();
        self.block_on(async move {
            let doing = "creating the cluster's initial objects";
            let binding: ClusterRoleBinding = serde_json::from_value(control_plane::kubelet_client_binding())
                .map_err(BedError::failed(doing))?;
            let bindings: Api<ClusterRoleBinding> = Api::all(client.clone());
            bindings.create(&PostParams::default(), &binding).await.map_err(BedError::failed(doing))?;
            // Pods are refused until the service account exists, and its controller needs seconds to create it.
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
    pub fn wait_until_api_ready(&self) -> Result<(), BedError> {
        self.wait_until_api_ready_or_stopped(&AtomicBool::new(false))
    }

    fn wait_until_api_ready_or_stopped(&self, stop: &AtomicBool) -> Result<(), BedError> {
        wait::poll_until_ok("a ready API server", READY_TIMEOUT, stop, || {
            for component in self.plane.components() {
                component.check()?;
            }
            let client = self.client.clone();
            self.block_on(async move {
                let doing = "checking whether the API server is ready";
                let request =
                    http::Request::get("/readyz").body(Vec::new()).map_err(BedError::failed(doing))?;
                Ok(client.request_text(request).await.map(drop).map_err(|error| error.to_string()))
            })
        })
    }

    /// Waits until pods can be scheduled to a node: it is Ready, and its initial taint is gone.
    pub fn wait_until_node_ready(&self, name: &str) -> Result<(), BedError> {
        self.wait_until_node_ready_or_stopped(name, &AtomicBool::new(false))
    }

    fn wait_until_node_ready_or_stopped(&self, name: &str, stop: &AtomicBool) -> Result<(), BedError> {
        wait::poll_until_ok(&format!("{name} Ready"), READY_TIMEOUT, stop, || {
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

    /// Runs a future inside the bed's network, on this thread and the bed's worker threads.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        // A thread outside the bed's network would connect to nothing, or to the host.
        #[allow(clippy::expect_used)]
        let _visit = self.context.network.enter_temporarily().expect("the thread enters the bed's network");
        self.handle.block_on(future)
    }

    /// Returns the runtime whose threads are inside the bed's network.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Returns an administrator's client, to arrange a test. The code under test gets [`TestBed::client_as`].
    pub fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// Returns a client with a certificate of this user, whose permissions come from RBAC.
    pub fn client_as(&self, user: &str, group: Option<&str>) -> Result<kube::Client, BedError> {
        let certificate = self.authority.client(user, group)?;
        self.client_with(&Identity::Certificate(&certificate))
    }

    /// Returns a client with a token, as a service account has one.
    pub fn client_with_token(&self, token: &str) -> Result<kube::Client, BedError> {
        self.client_with(&Identity::Token(token))
    }

    fn client_with(&self, identity: &Identity<'_>) -> Result<kube::Client, BedError> {
        kubeconfig::client(self.kubeconfig_of(identity), self.handle())
    }

    fn kubeconfig_of(&self, identity: &Identity<'_>) -> Value {
        kubeconfig::kubeconfig(&control_plane::server_url(), &self.authority.pem(), identity)
    }

    /// Returns an administrator's kubeconfig for the API server at this address.
    pub(crate) fn kubeconfig_at(&self, server: &str) -> Result<String, BedError> {
        Ok(admin_kubeconfig(&self.authority, server)?.to_string())
    }

    /// Returns the address on which servers of a test listen, so that the control plane, nodes and pods can reach them.
    pub fn address(&self) -> IpAddr {
        network::HOST_ADDRESS.into()
    }

    /// Issues a certificate for a server of the test, valid for these names and addresses.
    pub fn server_certificate(&self, names: &[&str]) -> Result<Certificate, BedError> {
        self.authority.server("test", names)
    }

    /// Returns the certificate of the cluster's certificate authority, as PEM.
    pub fn ca_certificate(&self) -> String {
        self.authority.pem()
    }

    /// Returns a node by its name.
    pub fn node(&self, name: &str) -> Result<&BedNode, BedError> {
        self.nodes.iter().find(|node| node.name() == name).ok_or_else(|| {
            let there: Vec<_> = self.nodes.iter().map(BedNode::name).collect();
            BedError::BedProfile(format!("the bed has no node {name}; it has: {}", there.join(", ")))
        })
    }

    /// Returns the nodes of the bed.
    pub fn nodes(&self) -> &[BedNode] {
        &self.nodes
    }

    /// Returns the etcd component.
    pub fn etcd(&self) -> &Component {
        &self.plane.etcd
    }

    /// Returns the API server.
    pub fn apiserver(&self) -> &Component {
        &self.plane.apiserver
    }

    /// Returns the controller manager.
    pub fn controller_manager(&self) -> &Component {
        &self.plane.controller_manager
    }

    /// Returns the scheduler component.
    pub fn scheduler(&self) -> &Component {
        &self.plane.scheduler
    }

    /// Returns every component, those of the control plane first.
    pub fn components(&self) -> impl Iterator<Item = &Component> {
        self.plane.components().into_iter().chain(self.nodes.iter().flat_map(BedNode::components))
    }

    /// Returns whether another process has ended the bed.
    pub(crate) fn is_gone(&self) -> bool {
        self.sandbox.is_gone()
    }

    /// Returns a command that runs on the host in the bed's network, with an administrator's kubeconfig. Arguments can
    /// be added.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.sandbox.first_pid())).arg(program);
        // By default kubectl caches discovery data in the user's home by server address, and all beds have the same
        // address.
        command.env("KUBECACHEDIR", self.context.folder.path.join("kubectl"));
        command.env("KUBECONFIG", &self.kubeconfig).stdin(Stdio::null());
        command
    }

    /// Returns a `kubectl` command as administrator. Arguments can be added.
    pub fn kubectl_command(&self) -> Command {
        self.command(self.context.bin.join("kubectl"))
    }

    /// Runs `kubectl`. Returns its output, or its error text.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String, BedError> {
        self.kubectl_with(arguments, "")
    }

    /// Runs `kubectl` with text on its standard input: `bed.kubectl_with(&["apply", "-f", "-"], manifest)`.
    pub fn kubectl_with(&self, arguments: &[&str], input: &str) -> Result<String, BedError> {
        let doing = format!("kubectl {}", arguments.join(" "));
        let mut command = self.kubectl_command();
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(BedError::io(&doing))?;
        if let Some(mut pipe) = child.stdin.take() {
            // A kubectl that reads nothing may have exited already.
            let _ = pipe.write_all(input.as_bytes());
        }
        let output = child.wait_with_output().map_err(BedError::io(&doing))?;
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        } else {
            let message = String::from_utf8_lossy(&output.stderr).trim().to_string();
            Err(BedError::Failed { doing, message })
        }
    }

    /// Returns the state of every component, for a person who investigates a failure.
    pub fn report(&self) -> String {
        let mut text = format!("\n== test bed, logs in {}\n", self.context.folder.logs.display());
        for component in self.components() {
            let log = std::fs::read_to_string(component.log()).unwrap_or_default();
            let _ = writeln!(text, "{}: {}", component.name(), component.status_line());
            text.push_str(&log_excerpt::excerpt(&log, 8));
        }
        for node in &self.nodes {
            text.push_str(&node.boot_log_excerpt());
        }
        let queries: [&[&str]; 3] = [
            &["get", "nodes", "--request-timeout=3s"],
            &["get", "pods", "--all-namespaces", "-o", "wide", "--request-timeout=3s"],
            &["get", "events", "--all-namespaces", "--sort-by=.lastTimestamp", "--request-timeout=3s"],
        ];
        for query in queries {
            let output = self.kubectl(query).unwrap_or_else(|error| error.to_string());
            let _ = writeln!(text, "-- kubectl {}", query.first().map_or("", |_| query[1]));
            let lines: Vec<_> = output.lines().collect();
            for line in lines.iter().skip(lines.len().saturating_sub(25)) {
                text.extend(line.chars().take(240));
                text.push('\n');
            }
        }
        text
    }
}

impl Drop for TestBed {
    fn drop(&mut self) {
        let failed = std::thread::panicking();
        if failed {
            // Written past the capture of the test runner, which would print it in the wrong place.
            let _ = writeln!(std::io::stderr(), "{}", self.report());
        }
        if let Some(runtime) = self.runtime.take() {
            // Its sockets would keep the network namespace alive.
            runtime.shutdown_timeout(Duration::from_secs(2));
        }
        drop(self.dns.take());
        let (plane, nodes) = (&self.plane, &self.nodes);
        self.sandbox.terminate(|| {
            let of_nodes = nodes.iter().flat_map(BedNode::components);
            plane.components().into_iter().chain(of_nodes).for_each(Component::wake_waiter);
        });
        if self.up && !failed {
            self.context.folder.remove_logs();
        }
    }
}

/// Returns a kubeconfig with all permissions.
fn admin_kubeconfig(authority: &CertificateAuthority, server: &str) -> Result<Value, BedError> {
    let certificate = authority.client("partage-bed", Some("system:masters"))?;
    Ok(kubeconfig::kubeconfig(server, &authority.pem(), &Identity::Certificate(&certificate)))
}

/// Starts a runtime whose threads are all inside the bed's network.
fn runtime(context: &BedContext) -> Result<Runtime, BedError> {
    let network = context.network.clone();
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("bed")
        .on_thread_start(move || {
            // A failure shows in the first request to the API server.
            let _ = network.enter_permanently();
        })
        .enable_all()
        .build()
        .map_err(BedError::io("starting threads"))
}
