//! The connection to the API server.

use crate::backoff::RetryBackoff;
use crate::error::{ClusterError, with_causes};
use http::HeaderValue;
use http::header::USER_AGENT;
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy;
use hyper_util::rt::TokioExecutor;
use kube::client::retry::RetryPolicy;
use kube::client::{Body, ConfigExt};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tower::retry::RetryLayer;
use tower::{BoxError, ServiceBuilder};

/// Time for one request, its in-client retries included.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// How a daemon reaches the API server, and what it calls itself.
#[derive(Clone, Copy, Debug)]
pub struct ClientOptions<'a> {
    /// A kubeconfig file; absent, the service account of the pod that this process runs in is used.
    pub kubeconfig: Option<&'a Path>,
    /// The component in the `User-Agent` header, such as `partage-node`. Audit logs show it.
    pub component: &'a str,
    /// The name of this instance, such as the node's or pod's. It spreads the retries of many instances over time.
    pub instance: &'a str,
}

/// A connection to the API server. Cloning it is cheap.
///
/// ```no_run
/// use partage_cluster::{ApiClient, ClientOptions, WatchSelector};
///
/// # async fn connect() -> Result<(), partage_cluster::ClusterError> {
/// let options = ClientOptions { kubeconfig: None, component: "partage-control", instance: "control-0" };
/// let client = ApiClient::connect(&options).await?;
/// let pods = client.watch_pods(&WatchSelector::all());
/// pods.synced().await;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct ApiClient {
    kube: Client,
    instance: Arc<str>,
    contact: LastContact,
}

impl fmt::Debug for ApiClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiClient").field("instance", &self.instance).finish_non_exhaustive()
    }
}

impl ApiClient {
    /// Reads the configuration. No request is sent yet, so a daemon starts whether or not the API server is reachable.
    ///
    /// # Errors
    ///
    /// Fails if there is neither a usable kubeconfig nor a service account.
    pub async fn connect(options: &ClientOptions<'_>) -> Result<ApiClient, ClusterError> {
        // Fails if another part of the process has installed one, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let unusable = |reason: String| match options.kubeconfig {
            Some(path) => ClusterError::InvalidKubeconfig { path: path.to_path_buf(), reason },
            None => ClusterError::NotInCluster(reason),
        };
        let config = match options.kubeconfig {
            Some(path) => {
                let file = Kubeconfig::read_from(path).map_err(|error| unusable(with_causes(&error)))?;
                Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                    .await
                    .map_err(|error| unusable(with_causes(&error)))?
            }
            None => Config::incluster().map_err(|error| unusable(with_causes(&error)))?,
        };
        let user_agent = format!("{}/{}", options.component, env!("CARGO_PKG_VERSION"));
        let kube = build_client(config, &user_agent).map_err(|error| unusable(with_causes(&error)))?;
        Ok(ApiClient { kube, instance: options.instance.into(), contact: LastContact::default() })
    }

    /// Returns the kube client, for requests that this crate has no function for. They do not count as contact.
    pub fn kube(&self) -> &Client {
        &self.kube
    }

    /// Delays between retries of this instance.
    pub fn backoff(&self) -> RetryBackoff {
        RetryBackoff::for_instance(&self.instance)
    }

    /// Returns when the API server last responded or sent a watch event; `None` if it never did. While nothing changes it may
    /// be silent for two minutes.
    pub fn last_contact(&self) -> Option<Instant> {
        self.contact.get()
    }

    pub(crate) fn note_contact(&self) {
        self.contact.set();
    }

    /// Runs a request within [`REQUEST_TIMEOUT`]. `operation` is formatted only for an error.
    pub(crate) async fn request<T>(
        &self,
        operation: impl FnOnce() -> String,
        request: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, ClusterError> {
        self.request_within(REQUEST_TIMEOUT, operation, request).await
    }

    pub(crate) async fn request_within<T>(
        &self,
        timeout: Duration,
        operation: impl FnOnce() -> String,
        request: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, ClusterError> {
        let result = match tokio::time::timeout(timeout, request).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(ClusterError::new(operation(), error)),
            Err(_) => {
                let reason = format!("no response within {:.0} s", timeout.as_secs_f64());
                Err(ClusterError::Unavailable { operation: operation(), reason })
            }
        };
        if !matches!(result, Err(ClusterError::Unavailable { .. })) {
            self.contact.set();
        }
        result
    }
}

/// Builds kube's default stack without its request log: that reports every lost connection at level ERROR and without
/// context, while callers of this crate receive and report the error themselves.
fn build_client(mut config: Config, user_agent: &str) -> kube::Result<Client> {
    if let Some(proxy_url) = config.proxy_url.take() {
        return Err(kube::Error::ProxyProtocolUnsupported { proxy_url: Box::new(proxy_url) });
    }
    config.connect_timeout = Some(REQUEST_TIMEOUT);
    if let Ok(value) = HeaderValue::from_str(user_agent) {
        config.headers.push((USER_AGENT, value));
    }
    let mut connector = TimeoutConnector::new(config.rustls_https_connector()?);
    connector.set_connect_timeout(config.connect_timeout);
    connector.set_read_timeout(config.read_timeout);
    connector.set_write_timeout(config.write_timeout);
    connector.set_reset_reader_on_write(config.reset_reader_on_write);
    let http: legacy::Client<_, Body> = legacy::Client::builder(TokioExecutor::new()).build(connector);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.default_retry.then(|| RetryLayer::new(RetryPolicy::server_retry())))
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(http);
    Ok(Client::new(service, config.default_namespace.clone()))
}

/// When the API server last answered.
#[derive(Clone, Debug, Default)]
struct LastContact(Arc<Mutex<Option<Instant>>>);

impl LastContact {
    fn set(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    fn get(&self) -> Option<Instant> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{self, Write};
    use tokio::io::AsyncReadExt;
    use tokio::net::TcpListener;

    #[derive(Clone, Default)]
    struct LogBuffer(Arc<Mutex<Vec<u8>>>);

    impl Write for LogBuffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn lost_connection_is_returned_and_not_logged() {
        let captured = LogBuffer::default();
        let writer = captured.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::WARN)
            .with_writer(move || writer.clone())
            .finish();
        let _guard = tracing::subscriber::set_default(subscriber);

        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kubeconfig");
        let kubeconfig = serde_json::json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{}", listener.local_addr().unwrap())}}],
            "users": [{"name": "u", "user": {}}],
        });
        std::fs::write(&path, kubeconfig.to_string()).unwrap();
        let options =
            ClientOptions { kubeconfig: Some(&path), component: "partage-test", instance: "instance-0" };
        let client = ApiClient::connect(&options).await.unwrap();

        // A server that reads the request and closes the connection.
        let server = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = vec![0; 4096];
            let length = stream.read(&mut head).await.unwrap();
            String::from_utf8_lossy(&head[..length]).into_owned()
        };
        let (namespace, name) = ("default".into(), "web".into());
        let (head, pod) = tokio::join!(server, client.pod(&namespace, &name));
        let user_agent = format!("user-agent: partage-test/{}", env!("CARGO_PKG_VERSION"));
        assert!(head.to_lowercase().contains(&user_agent), "{head}");
        let error = pod.unwrap_err();
        assert!(matches!(error, ClusterError::Unavailable { .. }) && error.is_outcome_unknown(), "{error}");
        assert_eq!(client.last_contact(), None);
        let log = String::from_utf8(captured.0.lock().unwrap().clone()).unwrap();
        assert_eq!(log, "", "the caller reports the error, with what it attempted");
    }
}
