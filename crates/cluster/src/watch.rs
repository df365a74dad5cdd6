//! Watching any resource of the API server.

use crate::cache::{ObjectKey, ViewStore, WatchCache};
use crate::client::ApiClient;
use crate::error::with_causes;
use futures::StreamExt;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use tokio_util::task::AbortOnDropHandle;

/// The server ends a watch after this many seconds and the client renews it, which bounds how long a connection that
/// broke silently goes unnoticed.
const WATCH_TIMEOUT_SECONDS: u32 = 120;
/// Objects per page of a list. Whole objects are in memory, several times over, until they are projected, and a tenant
/// can make each of its pods more than a megabyte large.
const DEFAULT_PAGE_SIZE: u32 = 4;

/// Which objects of a resource are watched.
///
/// ```
/// use partage_cluster::WatchSelector;
///
/// let of_one_node = WatchSelector::all().fields("spec.nodeName=node-1");
/// let of_one_app = WatchSelector::in_namespace("default").labels("app=web").page_size(100);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchSelector {
    namespace: Option<String>,
    fields: Option<String>,
    labels: Option<String>,
    page_size: u32,
}

impl WatchSelector {
    /// Selects all objects of the cluster.
    pub fn all() -> WatchSelector {
        WatchSelector { namespace: None, fields: None, labels: None, page_size: DEFAULT_PAGE_SIZE }
    }

    /// Selects all objects of a namespace.
    pub fn in_namespace(namespace: &str) -> WatchSelector {
        WatchSelector { namespace: Some(namespace.into()), ..WatchSelector::all() }
    }

    /// Objects that match a field selector, such as `spec.nodeName=node-1`.
    #[must_use]
    pub fn fields(self, selector: &str) -> WatchSelector {
        WatchSelector { fields: Some(selector.into()), ..self }
    }

    /// Objects that match a label selector, such as `app=web`.
    #[must_use]
    pub fn labels(self, selector: &str) -> WatchSelector {
        WatchSelector { labels: Some(selector.into()), ..self }
    }

    /// Sets how many whole objects a list may hold in memory at a time; 4 by default. A larger page makes the initial list of
    /// a large cluster faster and costs up to that many times the size of the largest object.
    #[must_use]
    pub fn page_size(self, objects: u32) -> WatchSelector {
        WatchSelector { page_size: objects.max(1), ..self }
    }

    fn config(&self) -> watcher::Config {
        let mut config = watcher::Config::default().page_size(self.page_size).timeout(WATCH_TIMEOUT_SECONDS);
        if let Some(fields) = &self.fields {
            config = config.fields(fields);
        }
        if let Some(labels) = &self.labels {
            config = config.labels(labels);
        }
        config
    }
}

/// How objects of a resource become the small views that a cache keeps.
///
/// `Object` should have only the fields that `view` reads (see [`kube::core::Object`]): what it lacks is not even held
/// while an object is decoded.
pub trait Projection: 'static {
    /// The type that is decoded from the API server's answer.
    type Object: Resource + Clone + DeserializeOwned + fmt::Debug + Send + 'static;
    /// The type that the cache stores. Its size must be bounded, whatever a tenant writes into the object.
    type View: PartialEq + Send + Sync + 'static;
    /// The plural of the resource, for logs.
    const RESOURCE: &'static str;

    /// Returns the API of the resource, in one namespace or in all.
    fn api(client: Client, namespace: Option<&str>) -> Api<Self::Object>;

    /// Returns the view of an object; `None` leaves the object out of the cache.
    fn view(object: Self::Object) -> Option<Self::View>;
}

/// Watches a resource until the last clone of the returned cache is dropped.
///
/// Must be called inside a tokio runtime.
pub fn watch<P: Projection>(client: &ApiClient, selector: &WatchSelector) -> WatchCache<P::View> {
    let store = Arc::new(ViewStore::default());
    let api = P::api(client.kube().clone(), selector.namespace.as_deref());
    let watched = follow::<P>(api, selector.config(), client.clone(), Arc::clone(&store));
    WatchCache::new(store, client.clone(), AbortOnDropHandle::new(tokio::spawn(watched)))
}

/// Applies watch events to a store, forever. Errors are retried with backoff; the store keeps its content meanwhile.
async fn follow<P: Projection>(
    api: Api<P::Object>,
    config: watcher::Config,
    client: ApiClient,
    store: Arc<ViewStore<P::View>>,
) {
    let mut events = watcher(api, config).backoff(client.backoff()).boxed();
    // The objects of a list that is not complete yet. Until it is, the old content stays.
    let mut listed = HashMap::new();
    let mut is_interrupted = false;
    while let Some(event) = events.next().await {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                // Once per absence. An expired resource version is one, too: it is followed by a new list.
                let error = with_causes(&error);
                if std::mem::replace(&mut is_interrupted, true) {
                    tracing::debug!(resource = P::RESOURCE, error, "watch still interrupted");
                } else {
                    tracing::warn!(
                        resource = P::RESOURCE,
                        error,
                        "watch interrupted: the last known state is used"
                    );
                }
                continue;
            }
        };
        // `Init` precedes the request: the server has not answered yet.
        if !matches!(event, Event::Init) {
            client.note_contact();
            if std::mem::take(&mut is_interrupted) {
                tracing::info!(resource = P::RESOURCE, "watch resumed");
            }
        }
        match event {
            Event::Init => listed.clear(),
            Event::InitApply(object) => {
                if let Some((key, view)) = project::<P>(object) {
                    listed.insert(Arc::clone(&key.uid), (Arc::new(key), Arc::new(view)));
                }
            }
            Event::InitDone => store.replace(std::mem::take(&mut listed)),
            Event::Apply(object) => match (object.uid(), project::<P>(object)) {
                (_, Some((key, view))) => store.apply(key, view),
                (Some(uid), None) => store.remove(&uid),
                (None, None) => {}
            },
            Event::Delete(object) => {
                if let Some(uid) = object.uid() {
                    store.remove(&uid);
                }
            }
        }
    }
}

/// Returns the key and view of an object. Every object of the API server has a UID and a name.
fn project<P: Projection>(object: P::Object) -> Option<(ObjectKey, P::View)> {
    let meta = object.meta();
    let key = ObjectKey {
        uid: meta.uid.as_deref()?.into(),
        namespace: meta.namespace.as_deref().unwrap_or_default().into(),
        name: meta.name.as_deref()?.into(),
    };
    Some((key, P::view(object)?))
}
