//! Kubeconfigs, and clients made from them.

use super::BedError;
use super::pki::Certificate;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::FutureExt;
use serde_json::{Value, json};
use tokio::runtime::Handle;

/// How a caller shows who it is.
#[derive(Clone, Debug)]
pub(super) enum Identity<'a> {
    Certificate(&'a Certificate),
    Token(&'a str),
}

/// A kubeconfig with everything inside; JSON is YAML.
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

/// A client for it, whose connections are made by this runtime's threads.
pub(super) fn client(kubeconfig: Value, runtime: &Handle) -> Result<kube::Client, BedError> {
    let doing = "making a client";
    let kubeconfig = serde_json::from_value(kubeconfig).map_err(BedError::failed(doing))?;
    let options = kube::config::KubeConfigOptions::default();
    // There is nothing to wait for: everything is inside. So it can be called from a future, too.
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &options).now_or_never();
    let config = config.ok_or("it waits").map_err(BedError::failed(doing))?;
    let _inside = runtime.enter();
    kube::Client::try_from(config.map_err(BedError::failed(doing))?).map_err(BedError::failed(doing))
}
