//! Creates kubeconfigs, and clients from them.

use super::BedError;
use super::pki::Certificate;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::FutureExt;
use serde_json::{Value, json};
use tokio::runtime::Handle;

/// The credentials of a client.
#[derive(Clone, Debug)]
pub(super) enum Identity<'a> {
    Certificate(&'a Certificate),
    Token(&'a str),
}

/// Returns a kubeconfig with all data inline. It is JSON, which is valid YAML.
pub(super) fn kubeconfig(server: &str, authority: &str, identity: &Identity<'_>) -> Value {
    let user = match identity {
        Identity::Certificate(pair) => json!({
            "client-certificate-data": STANDARD.encode(&pair.certificate),
            "client-key-data": STANDARD.encode(&pair.key),
        }),
        Identity::Token(token) => json!({ "token": token }),
    };
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{
            "name": "bed",
            "cluster": { "server": server, "certificate-authority-data": STANDARD.encode(authority) },
        }],
        "users": [{ "name": "user", "user": user }],
        "contexts": [{ "name": "bed", "context": { "cluster": "bed", "user": "user" } }],
        "current-context": "bed",
    })
}

/// Returns a client for a kubeconfig, whose connections are made by threads of this runtime.
pub(super) fn client(kubeconfig: Value, runtime: &Handle) -> Result<kube::Client, BedError> {
    let doing = "creating a client";
    let kubeconfig = serde_json::from_value(kubeconfig).map_err(BedError::failed(doing))?;
    let options = kube::config::KubeConfigOptions::default();
    // All data is inline, so the future is ready at once. This can therefore be called inside a future.
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &options).now_or_never();
    let config = config.ok_or("the kubeconfig is not self-contained").map_err(BedError::failed(doing))?;
    let _inside = runtime.enter();
    kube::Client::try_from(config.map_err(BedError::failed(doing))?).map_err(BedError::failed(doing))
}
