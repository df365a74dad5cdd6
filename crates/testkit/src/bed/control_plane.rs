//! Runs etcd, kube-apiserver, kube-controller-manager and kube-scheduler.

use super::bed_dir::BedDir;
use super::component::{Component, ExecEnvironment};
use super::kubeconfig::{Identity, kubeconfig};
use super::network::{HOST_ADDRESS, KUBERNETES_ADDRESS, SERVICE_CIDR};
use super::pki::{self, CertificateAuthority};
use super::profile::BedProfile;
use super::{BedError, wait};
use serde_json::{Value, json};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Returns the URL of the API server. It listens on every address of the host, including the one of
/// `kubernetes.default`.
pub(super) fn server_url() -> String {
    format!("https://{HOST_ADDRESS}")
}

/// The four programs of the control plane.
#[derive(Debug)]
pub(super) struct ControlPlane {
    pub(super) etcd: Component,
    pub(super) apiserver: Component,
    pub(super) controller_manager: Component,
    pub(super) scheduler: Component,
}

/// User name with which the API server calls kubelets.
const KUBELET_CLIENT_USER: &str = "kube-apiserver-kubelet-client";

impl ControlPlane {
    /// Writes the files that the programs read, without starting anything.
    pub(super) fn new(
        folder: &BedDir,
        environment: &ExecEnvironment,
        authority: &CertificateAuthority,
        profile: &BedProfile,
    ) -> Result<Self, BedError> {
        let write = |name: &str, text: &str| {
            Ok::<_, BedError>(path_text(&folder.write(&format!("pki/{name}"), text)?))
        };
        let ca = write("ca.crt", &authority.pem())?;
        let ca_key = write("ca.key", &authority.key())?;
        let (token_private, token_public) = pki::token_key()?;
        let (token_private, token_public) =
            (write("sa.key", &token_private)?, write("sa.pub", &token_public)?);
        let (host, kubernetes) = (HOST_ADDRESS.to_string(), KUBERNETES_ADDRESS.to_string());
        let names = [
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            "kubernetes.default.svc.cluster.local",
            "localhost",
            "127.0.0.1",
            &host,
            &kubernetes,
        ];
        let serving = authority.server("kube-apiserver", &names)?;
        let (serving, serving_key) =
            (write("api.crt", &serving.certificate)?, write("api.key", &serving.key)?);
        // Not in system:masters: `TestBed` binds this user to the role for kubelet clients.
        let to_kubelet = authority.client(KUBELET_CLIENT_USER, None)?;
        let (to_kubelet, to_kubelet_key) = (
            write("kubelet-client.crt", &to_kubelet.certificate)?,
            write("kubelet-client.key", &to_kubelet.key)?,
        );

        let client_kubeconfig = |user: &str| -> Result<String, BedError> {
            let certificate = authority.client(user, None)?;
            let text =
                kubeconfig(&server_url(), &authority.pem(), &Identity::Certificate(&certificate)).to_string();
            Ok(path_text(&folder.write(&format!("{}.kubeconfig", user.replace(':', "-")), &text)?))
        };
        let controller_manager = client_kubeconfig("system:kube-controller-manager")?;
        let scheduler = client_kubeconfig("system:kube-scheduler")?;
        let scheduler_config = scheduler_config(&scheduler, &profile.extenders).to_string();
        let scheduler_config = path_text(&folder.write("scheduler.yaml", &scheduler_config)?);

        let component =
            |name: &str, arguments: Vec<String>| Component::new(name, name, arguments, folder, environment);
        Ok(Self {
            etcd: component("etcd", etcd_arguments(&folder.path.join("etcd"))),
            apiserver: component(
                "kube-apiserver",
                vec![
                    "--etcd-servers=http://127.0.0.1:2379".to_string(),
                    "--bind-address=0.0.0.0".to_string(),
                    "--secure-port=443".to_string(),
                    format!("--advertise-address={HOST_ADDRESS}"),
                    "--endpoint-reconciler-type=none".to_string(),
                    format!("--service-cluster-ip-range={SERVICE_CIDR}"),
                    format!("--client-ca-file={ca}"),
                    format!("--tls-cert-file={serving}"),
                    format!("--tls-private-key-file={serving_key}"),
                    format!("--kubelet-certificate-authority={ca}"),
                    format!("--kubelet-client-certificate={to_kubelet}"),
                    format!("--kubelet-client-key={to_kubelet_key}"),
                    "--kubelet-preferred-address-types=InternalIP,Hostname".to_string(),
                    "--service-account-issuer=https://kubernetes.default.svc".to_string(),
                    format!("--service-account-key-file={token_public}"),
                    format!("--service-account-signing-key-file={token_private}"),
                    // Names are required because clients use the same certificate authority.
                    format!("--requestheader-client-ca-file={ca}"),
                    "--requestheader-allowed-names=front-proxy-client".to_string(),
                    "--authorization-mode=Node,RBAC".to_string(),
                    "--enable-admission-plugins=NodeRestriction".to_string(),
                    "--allow-privileged=true".to_string(),
                ],
            ),
            controller_manager: component(
                "kube-controller-manager",
                [
                    format!("--kubeconfig={controller_manager}"),
                    "--bind-address=127.0.0.1".to_string(),
                    "--leader-elect=false".to_string(),
                    // A node that is Ready keeps its taint until the next check; the default period is five seconds.
                    "--node-monitor-period=1s".to_string(),
                    "--use-service-account-credentials=true".to_string(),
                    // Each controller first requests its own token; with the default limits this alone takes four
                    // seconds.
                    "--kube-api-qps=500".to_string(),
                    "--kube-api-burst=1000".to_string(),
                    format!("--service-account-private-key-file={token_private}"),
                    format!("--root-ca-file={ca}"),
                    format!("--cluster-signing-cert-file={ca}"),
                    format!("--cluster-signing-key-file={ca_key}"),
                ]
                .into_iter()
                .chain(profile.node_grace.map(|seconds| format!("--node-monitor-grace-period={seconds}s")))
                .collect(),
            ),
            scheduler: component(
                "kube-scheduler",
                vec![
                    format!("--config={scheduler_config}"),
                    "--bind-address=127.0.0.1".to_string(),
                    format!("--authentication-kubeconfig={scheduler}"),
                    format!("--authorization-kubeconfig={scheduler}"),
                ],
            ),
        })
    }

    /// Starts etcd first: an API server that finds no etcd waits a second before it retries.
    pub(super) fn start_etcd_and_apiserver(&self, stop: &AtomicBool) -> Result<(), BedError> {
        self.etcd.start()?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 2379));
        wait::poll_until("etcd's port", Duration::from_secs(300), stop, || {
            self.etcd.check()?;
            Ok(TcpStream::connect_timeout(&address, Duration::from_secs(1)).ok())
        })?;
        self.apiserver.start()
    }

    pub(super) fn components(&self) -> [&Component; 4] {
        [&self.etcd, &self.apiserver, &self.controller_manager, &self.scheduler]
    }
}

/// Returns the role binding that lets the API server call kubelets: logs, exec, port-forward.
pub(super) fn kubelet_client_binding() -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": { "name": KUBELET_CLIENT_USER },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:kubelet-api-admin" },
        "subjects": [{ "apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": KUBELET_CLIENT_USER }],
    })
}

fn etcd_arguments(data: &Path) -> Vec<String> {
    [
        "--name=bed",
        &format!("--data-dir={}", data.display()),
        // A bed does not outlive the host, and a killed etcd loses no data without fsync.
        "--unsafe-no-fsync",
        "--listen-client-urls=http://127.0.0.1:2379",
        "--advertise-client-urls=http://127.0.0.1:2379",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--initial-advertise-peer-urls=http://127.0.0.1:2380",
        "--initial-cluster=bed=http://127.0.0.1:2380",
        "--log-level=warn",
    ]
    .map(str::to_string)
    .to_vec()
}

fn scheduler_config(kubeconfig: &str, extenders: &[Value]) -> Value {
    json!({
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": { "leaderElect": false },
        // With the defaults (50 and 100) benchmarks would measure only these limits.
        "clientConnection": { "kubeconfig": kubeconfig, "qps": 5000, "burst": 5000 },
        "extenders": extenders,
    })
}

fn path_text(path: &Path) -> String {
    path.display().to_string()
}
