//! A control plane with a node that no kubelet runs: pods on it are bound by hand and stay as they are.

use partage_cluster::{ApiClient, ClientOptions};
use partage_core::model::PodId;
use partage_testkit::bed::{BedProfile, TestBed};
use partage_testkit::eventually;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

pub(crate) const NODE: &str = "n1";
/// Only a test that fails waits so long.
pub(crate) const WATCH_TIMEOUT: Duration = Duration::from_secs(120);

pub(crate) struct ControlPlane {
    folder: TempDir,
    pub(crate) bed: TestBed,
}

impl ControlPlane {
    pub(crate) fn start() -> Option<ControlPlane> {
        let bed = TestBed::for_test(BedProfile::control_plane())?;
        let plane = ControlPlane { folder: tempfile::tempdir().unwrap(), bed };
        plane.apply(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}));
        Some(plane)
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn apply(&self, object: Value) {
        self.bed.kubectl_with(&["create", "-f", "-"], &object.to_string()).unwrap();
    }

    pub(crate) fn get(&self, arguments: &[&str]) -> Value {
        let all = [&["get", "-o", "json"], arguments].concat();
        serde_json::from_str(&self.bed.kubectl(&all).unwrap()).unwrap()
    }

    /// Stops the API server and starts it again around `absent`.
    pub(crate) fn without_server<T>(&self, absent: impl FnOnce() -> T) -> T {
        // A controller manager that has not initialized yet ends with the API server.
        self.bed.block_on(eventually("the controllers run", async || {
            self.bed.kubectl(&["get", "configmap", "kube-root-ca.crt"])
        }));
        self.bed.apiserver().kill();
        let seen = absent();
        self.bed.apiserver().start().unwrap();
        self.bed.wait_until_api_ready().unwrap();
        seen
    }

    /// Creates a pod that is bound to a node, or that no scheduler binds.
    pub(crate) fn pod(&self, name: &str, node: Option<&str>, limits: Value) -> PodId {
        let mut spec = json!({
            "schedulerName": "none",
            "containers": [{"name": "main", "image": "none", "resources": {"limits": limits}}],
        });
        if let Some(node) = node {
            spec["nodeName"] = node.into();
        }
        self.apply(json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "annotations": {"partage.dev/policy": "spread"}},
            "spec": spec,
        }));
        let uid = self.get(&["pod", name])["metadata"]["uid"].as_str().unwrap().to_string();
        PodId { uid: uid.into(), namespace: "default".into(), name: name.into() }
    }

    pub(crate) fn delete(&self, name: &str) {
        self.bed.kubectl(&["delete", "pod", name, "--force", "--grace-period=0"]).unwrap();
    }

    pub(crate) fn annotation(&self, pod: &str, key: &str) -> Value {
        self.get(&["pod", pod])["metadata"]["annotations"][key].clone()
    }

    /// The administrator's kubeconfig, changed.
    pub(crate) fn kubeconfig(&self, name: &str, change: impl FnOnce(&mut Value)) -> PathBuf {
        let text = self.bed.kubectl(&["config", "view", "--raw", "-o", "json"]).unwrap();
        let mut config = serde_json::from_str(&text).unwrap();
        change(&mut config);
        let path = self.folder.path().join(name);
        std::fs::write(&path, config.to_string()).unwrap();
        path
    }

    pub(crate) fn administrator(&self) -> ApiClient {
        let path = self.kubeconfig("administrator", |_| {});
        self.bed.block_on(connect(&path)).unwrap()
    }

    /// Creates a service account with these permissions and returns its token.
    pub(crate) fn account(&self, name: &str, rules: Value) -> String {
        self.bed.kubectl(&["create", "serviceaccount", name]).unwrap();
        self.apply(json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
            "metadata": {"name": name}, "rules": rules,
        }));
        let account = format!("--serviceaccount=default:{name}");
        self.bed.kubectl(&["create", "clusterrolebinding", name, "--clusterrole", name, &account]).unwrap();
        self.bed.kubectl(&["create", "token", name]).unwrap().trim().to_string()
    }

    pub(crate) fn kubeconfig_with_token(&self, token: &str) -> PathBuf {
        self.kubeconfig("token", |config| config["users"][0]["user"] = json!({"token": token}))
    }

    pub(crate) fn with_token(&self, token: &str) -> ApiClient {
        let path = self.kubeconfig_with_token(token);
        self.bed.block_on(connect(&path)).unwrap()
    }
}

pub(crate) async fn connect(kubeconfig: &Path) -> Result<ApiClient, partage_cluster::ClusterError> {
    let options = ClientOptions { kubeconfig: Some(kubeconfig), component: "partage-test", instance: NODE };
    ApiClient::connect(&options).await
}
