//! One connection to the API server, for everything that a node asks of it.

use crate::error::{ClusterError, whole};
use crate::events::Events;
use crate::pauses::Pauses;
use futures::StreamExt;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::ApiResource;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Client, Config, Resource};
use partage_core::model::NodeName;
use serde::de::DeserializeOwned;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long one question may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// A watch is asked for anew after so many seconds: a server that vanished without a word is noticed then.
const WATCH_SECONDS: u32 = 120;
/// Objects of one page of a list: whole objects are in memory, several times over, until they are cut to what is needed, and a
/// tenant may make each of its pods a megabyte large.
const PAGE: u32 = 4;

/// A connection to the API server, on behalf of one node. Cloning it is cheap.
#[derive(Clone)]
pub struct Cluster {
    pub(crate) client: Client,
    pub(crate) node: NodeName,
    pub(crate) contact: Contact,
    pub(crate) events: Arc<Events>,
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").field("node", &self.node).finish_non_exhaustive()
    }
}

impl Cluster {
    /// A connection for the daemon of a node: by this kubeconfig, or by the service account of the pod that this process
    /// runs in. Nothing is asked yet, so that a daemon starts whether or not the API server is there.
    pub async fn connect(kubeconfig: Option<&Path>, node: &NodeName) -> Result<Cluster, ClusterError> {
        // Another part of the process may have chosen already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut config = match kubeconfig {
            Some(path) => {
                let bad = |said| ClusterError::Kubeconfig { path: path.to_path_buf(), said };
                let file = Kubeconfig::read_from(path).map_err(|error| bad(whole(&error)))?;
                let options = KubeConfigOptions::default();
                Config::from_custom_kubeconfig(file, &options).await.map_err(|error| bad(whole(&error)))?
            }
            None => Config::incluster().map_err(|error| ClusterError::NoAccount(whole(&error)))?,
        };
        config.connect_timeout = Some(PATIENCE);
        let client = Client::try_from(config).map_err(|error| match kubeconfig {
            Some(path) => ClusterError::Kubeconfig { path: path.to_path_buf(), said: whole(&error) },
            None => ClusterError::NoAccount(whole(&error)),
        })?;
        let contact = Contact::default();
        Ok(Cluster {
            events: Arc::new(Events::start(client.clone(), node.clone())),
            client,
            node: node.clone(),
            contact,
        })
    }

    /// The node on whose behalf this is.
    pub fn node_name(&self) -> &NodeName {
        &self.node
    }

    /// When the API server last answered or told something; absent where it never did. It may be silent for two minutes
    /// where nothing happens.
    pub fn last_contact(&self) -> Option<Instant> {
        self.contact.last()
    }

    /// The answer to a question, in a bounded time.
    pub(crate) async fn ask<T>(
        &self,
        doing: impl FnOnce() -> String,
        question: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, ClusterError> {
        let answer = in_time(doing, question).await;
        if !matches!(answer, Err(ClusterError::Away { .. })) {
            self.contact.heard();
        }
        answer
    }

    /// Follows what a field selector selects, for ever. Failures are tried again.
    pub(crate) async fn follow<K>(&self, what: &str, fields: String, mut hear: impl FnMut(Event<K>))
    where
        K: Resource<DynamicType = ApiResource> + Clone + DeserializeOwned + fmt::Debug + Send + 'static,
        K: Watched,
    {
        let api = kube::Api::all_with(self.client.clone(), &K::resource());
        let config = watcher::Config::default().fields(&fields).page_size(PAGE).timeout(WATCH_SECONDS);
        let mut stream = watcher(api, config).backoff(Pauses::of(&self.node)).boxed();
        let mut away = false;
        while let Some(event) = stream.next().await {
            match event {
                // It begins to ask, and has no answer yet.
                Ok(event @ Event::Init) => hear(event),
                Ok(event) => {
                    if std::mem::take(&mut away) {
                        tracing::info!("the API server tells of {what} again");
                    }
                    self.contact.heard();
                    hear(event);
                }
                Err(error) => {
                    // Once for each absence. A server that forgot how far it had told is asked for everything.
                    match std::mem::replace(&mut away, true) {
                        false => tracing::warn!("the API server tells of {what} no more: {}", whole(&error)),
                        true => tracing::debug!("the API server still does not tell of {what}: {error}"),
                    }
                }
            }
        }
    }
}

/// The answer to a question, in a bounded time.
pub(crate) async fn in_time<T>(
    doing: impl FnOnce() -> String,
    question: impl Future<Output = kube::Result<T>>,
) -> Result<T, ClusterError> {
    match tokio::time::timeout(PATIENCE, question).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(ClusterError::of(doing(), error)),
        Err(_) => {
            let said = format!("no answer in {} s", PATIENCE.as_secs());
            Err(ClusterError::Away { doing: doing(), said })
        }
    }
}

/// An object of which only a part is read.
pub(crate) trait Watched {
    /// What it is a part of.
    fn resource() -> ApiResource;
}

/// When the API server was last heard.
#[derive(Clone, Debug, Default)]
pub(crate) struct Contact(Arc<Mutex<Option<Instant>>>);

impl Contact {
    fn heard(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    pub(crate) fn last(&self) -> Option<Instant> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
