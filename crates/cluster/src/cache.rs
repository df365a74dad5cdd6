//! A cache of views that a watch keeps up to date.

use crate::client::ApiClient;
use std::borrow::Borrow;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

/// The identity of an object. A successor can reuse its name, but never its UID.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ObjectKey {
    /// The UID that the API server assigned; unique over the lifetime of the cluster.
    pub uid: Arc<str>,
    /// The object's namespace; empty for a cluster-scoped object.
    pub namespace: Arc<str>,
    /// The object's name, unique in its namespace at any one time.
    pub name: Arc<str>,
}

/// Views of the watched objects, as the API server last reported them. Cloning the cache is cheap.
///
/// While the API server is unreachable, the last known content stays. [`WatchCache::last_contact`] shows its age.
pub struct WatchCache<V> {
    store: Arc<ViewStore<V>>,
    client: ApiClient,
    _task: Arc<AbortOnDropHandle<()>>,
}

impl<V> Clone for WatchCache<V> {
    fn clone(&self) -> Self {
        WatchCache {
            store: Arc::clone(&self.store),
            client: self.client.clone(),
            _task: Arc::clone(&self._task),
        }
    }
}

impl<V> fmt::Debug for WatchCache<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WatchCache")
            .field("objects", &self.store.content().by_uid.len())
            .finish_non_exhaustive()
    }
}

impl<V> WatchCache<V> {
    pub(crate) fn new(
        store: Arc<ViewStore<V>>,
        client: ApiClient,
        task: AbortOnDropHandle<()>,
    ) -> WatchCache<V> {
        WatchCache { store, client, _task: Arc::new(task) }
    }

    /// Returns the object with this UID.
    pub fn by_uid(&self, uid: &(impl Borrow<str> + ?Sized)) -> Option<Arc<V>> {
        self.store.content().by_uid.get(uid.borrow()).map(|(_, view)| Arc::clone(view))
    }

    /// Returns the object with this name now. The namespace of a cluster-scoped object is empty.
    pub fn by_name(
        &self,
        namespace: &(impl Borrow<str> + ?Sized),
        name: &(impl Borrow<str> + ?Sized),
    ) -> Option<Arc<V>> {
        let content = self.store.content();
        let uid = content.by_name.get(namespace.borrow())?.get(name.borrow())?;
        content.by_uid.get(uid).map(|(_, view)| Arc::clone(view))
    }

    /// Returns all objects, in no order.
    pub fn all(&self) -> Vec<Arc<V>> {
        self.store.content().by_uid.values().map(|(_, view)| Arc::clone(view)).collect()
    }

    /// Returns all objects with their keys, in no order.
    pub fn entries(&self) -> Vec<(Arc<ObjectKey>, Arc<V>)> {
        self.store.content().by_uid.values().cloned().collect()
    }

    /// Waits for the object with this UID, for no longer than `timeout`. Kubelet may learn of a pod before this cache does.
    pub async fn wait_for(&self, uid: &(impl Borrow<str> + ?Sized), timeout: Duration) -> Option<Arc<V>> {
        let mut changed = self.changed();
        let appeared = async {
            loop {
                if let Some(view) = self.by_uid(uid) {
                    return Some(view);
                }
                changed.changed().await.ok()?;
            }
        };
        tokio::time::timeout(timeout, appeared).await.ok().flatten()
    }

    /// Returns a number that grows with every change of the content; 0 before the first complete list.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.store.version.subscribe()
    }

    /// Returns whether the API server has listed all objects at least once. Before that, an object that is not in the cache may
    /// exist.
    pub fn is_synced(&self) -> bool {
        *self.store.version.borrow() > 0
    }

    /// Waits until the API server has listed all objects once ([`WatchCache::is_synced`]).
    pub async fn synced(&self) {
        // The sender lives as long as this cache.
        let _ = self.changed().wait_for(|version| *version > 0).await;
    }

    /// Returns when the API server last responded or sent an event; `None` if it never did. While nothing changes it may be
    /// silent for two minutes.
    pub fn last_contact(&self) -> Option<Instant> {
        self.client.last_contact()
    }
}

type CacheEntry<V> = (Arc<ObjectKey>, Arc<V>);

/// The content that a watch writes and a cache reads.
pub(crate) struct ViewStore<V> {
    content: RwLock<CacheContent<V>>,
    version: watch::Sender<u64>,
}

struct CacheContent<V> {
    by_uid: HashMap<Arc<str>, CacheEntry<V>>,
    /// The UID of each object, by namespace and name.
    by_name: HashMap<Arc<str>, HashMap<Arc<str>, Arc<str>>>,
}

impl<V> Default for ViewStore<V> {
    fn default() -> Self {
        let content = CacheContent { by_uid: HashMap::new(), by_name: HashMap::new() };
        ViewStore { content: RwLock::new(content), version: watch::Sender::new(0) }
    }
}

impl<V> ViewStore<V> {
    fn content(&self) -> RwLockReadGuard<'_, CacheContent<V>> {
        self.content.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut CacheContent<V>) -> bool) {
        let changed = change(&mut self.content.write().unwrap_or_else(PoisonError::into_inner));
        if changed {
            self.version.send_modify(|version| *version += 1);
        }
    }

    pub(crate) fn remove(&self, uid: &str) {
        self.change(|content| content.remove(uid));
    }
}

impl<V: PartialEq> ViewStore<V> {
    /// Replaces the whole content by a complete list.
    pub(crate) fn replace(&self, listed: HashMap<Arc<str>, CacheEntry<V>>) {
        let is_first = *self.version.borrow() == 0;
        self.change(|content| {
            let differs = content.by_uid != listed;
            if differs {
                *content =
                    CacheContent { by_uid: HashMap::with_capacity(listed.len()), by_name: HashMap::new() };
                for (key, view) in listed.into_values() {
                    content.insert(key, view);
                }
            }
            is_first || differs
        });
    }

    /// Adds or updates one object.
    pub(crate) fn apply(&self, key: ObjectKey, view: V) {
        self.change(|content| {
            let is_same = content.by_uid.get(&key.uid).is_some_and(|(_, known)| **known == view);
            if !is_same {
                content.insert(Arc::new(key), Arc::new(view));
            }
            !is_same
        });
    }
}

impl<V> CacheContent<V> {
    fn insert(&mut self, key: Arc<ObjectKey>, view: Arc<V>) {
        let names = self.by_name.entry(Arc::clone(&key.namespace)).or_default();
        let previous = names.insert(Arc::clone(&key.name), Arc::clone(&key.uid));
        // A name belongs to one object at a time: its predecessor is gone.
        if let Some(previous) = previous.filter(|previous| *previous != key.uid) {
            self.by_uid.remove(&previous);
        }
        self.by_uid.insert(Arc::clone(&key.uid), (key, view));
    }

    fn remove(&mut self, uid: &str) -> bool {
        let Some((key, _)) = self.by_uid.remove(uid) else { return false };
        if let Some(names) = self.by_name.get_mut(&key.namespace) {
            names.remove(&key.name);
            if names.is_empty() {
                self.by_name.remove(&key.namespace);
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(uid: &str, name: &str) -> ObjectKey {
        ObjectKey { uid: uid.into(), namespace: "default".into(), name: name.into() }
    }

    fn list(objects: &[(&str, &str, u32)]) -> HashMap<Arc<str>, CacheEntry<u32>> {
        let entry = |(uid, name, view): &(&str, &str, u32)| {
            let key = Arc::new(key(uid, name));
            (Arc::clone(&key.uid), (key, Arc::new(*view)))
        };
        objects.iter().map(entry).collect()
    }

    fn uid_of(store: &ViewStore<u32>, name: &str) -> Option<String> {
        store.content().by_name.get("default").and_then(|names| names.get(name)).map(|uid| uid.to_string())
    }

    #[test]
    fn only_changes_of_the_content_are_notified() {
        let store = ViewStore::default();
        let version = || *store.version.borrow();
        store.replace(HashMap::new());
        assert_eq!(version(), 1, "an empty list is a complete one");
        store.replace(HashMap::new());
        store.remove("absent");
        assert_eq!(version(), 1);
        store.apply(key("1", "a"), 7);
        store.apply(key("1", "a"), 7);
        assert_eq!(version(), 2);
        store.apply(key("1", "a"), 8);
        store.replace(list(&[("1", "a", 8)]));
        assert_eq!(version(), 3);
        store.replace(list(&[("1", "a", 8), ("2", "b", 1)]));
        store.remove("1");
        assert_eq!((version(), store.content().by_uid.len()), (5, 1));
        assert_eq!((uid_of(&store, "a"), uid_of(&store, "b")), (None, Some("2".into())));
    }

    #[test]
    fn successor_of_the_same_name_replaces_its_predecessor() {
        let store = ViewStore::default();
        store.replace(list(&[("1", "a", 1)]));
        store.apply(key("2", "a"), 2);
        assert_eq!(uid_of(&store, "a"), Some("2".into()));
        assert!(!store.content().by_uid.contains_key("1"));
        store.remove("1");
        assert_eq!(
            uid_of(&store, "a"),
            Some("2".into()),
            "a late deletion of the predecessor changes nothing"
        );
        store.remove("2");
        assert!(store.content().by_uid.is_empty() && store.content().by_name.is_empty());
    }
}
