//! Limits of a server, and the bookkeeping that enforces those on connections.
//!
//! Probes reach the same port as all other clients. One address therefore gets few connections, and when all connections of
//! the server are taken, a new one displaces the one that has been silent for longest: a probe sends its request at once,
//! a connection that only occupies a slot does not.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Upper bounds for connections and requests of one server.
///
/// The default suits a scraped endpoint that any pod can reach: one small request per connection.
///
/// ```
/// use partage_serve::ServerLimits;
/// use std::time::Duration;
///
/// // A webhook: the API server keeps connections open and posts whole pods.
/// let limits = ServerLimits {
///     idle_timeout: Some(Duration::from_secs(90)),
///     max_body_bytes: 3 << 20,
///     ..ServerLimits::default()
/// };
/// # assert_eq!(limits.max_connections, 512);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerLimits {
    /// Connections at a time. Further ones displace a silent connection, or wait in the kernel's backlog.
    pub max_connections: usize,
    /// Connections at a time from one address. Further ones are closed at once.
    pub max_connections_per_address: usize,
    /// Time for the TLS handshake and the head of a request together, from the connection's first packet (or, on a kept
    /// connection, from the request's first byte).
    pub head_timeout: Duration,
    /// Time for a whole request and its response, counted from the same moment as `head_timeout`.
    pub request_timeout: Duration,
    /// How long a connection may stay open between two requests. `None` closes it after its first response.
    pub idle_timeout: Option<Duration>,
    /// Size of a request's head. At least 8 KiB are allowed whatever is set here.
    pub max_head_bytes: usize,
    /// Size of a request's body. A request that announces or sends more is answered 413.
    pub max_body_bytes: usize,
}

impl Default for ServerLimits {
    fn default() -> Self {
        ServerLimits {
            max_connections: 512,
            max_connections_per_address: 8,
            head_timeout: Duration::from_secs(2),
            request_timeout: Duration::from_secs(10),
            idle_timeout: None,
            max_head_bytes: 16 << 10,
            max_body_bytes: 16 << 10,
        }
    }
}

/// Counts the open connections of each address.
#[derive(Clone, Default)]
pub(crate) struct AddressCounter(Arc<Mutex<BTreeMap<IpAddr, usize>>>);

impl AddressCounter {
    /// Reserves a connection for an address, or returns `None` if it has `max` already.
    pub(crate) fn reserve(&self, address: IpAddr, max: usize) -> Option<AddressSlot> {
        let mut counts = self.counts();
        let count = counts.entry(address).or_default();
        if *count >= max {
            return None;
        }
        *count += 1;
        Some(AddressSlot { counter: self.clone(), address })
    }

    fn counts(&self) -> MutexGuard<'_, BTreeMap<IpAddr, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One connection of an address, released on drop.
pub(crate) struct AddressSlot {
    counter: AddressCounter,
    address: IpAddr,
}

impl AddressSlot {
    pub(crate) fn address(&self) -> IpAddr {
        self.address
    }
}

impl Drop for AddressSlot {
    fn drop(&mut self) {
        let mut counts = self.counter.counts();
        if let Some(count) = counts.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

/// The connections that have no request in progress, in the order in which they became silent.
#[derive(Clone, Default)]
pub(crate) struct SilentConnections(Arc<Mutex<SilentQueue>>);

#[derive(Default)]
struct SilentQueue {
    next_number: u64,
    waiting: BTreeMap<u64, CancellationToken>,
}

impl SilentConnections {
    /// Lists one more connection as silent until the returned slot is dropped.
    pub(crate) fn enter(&self) -> SilentSlot {
        let mut queue = self.queue();
        let number = queue.next_number;
        queue.next_number += 1;
        let displaced = CancellationToken::new();
        queue.waiting.insert(number, displaced.clone());
        SilentSlot { connections: self.clone(), number, displaced }
    }

    /// Cancels the connection that has been silent for longest, if there is one.
    pub(crate) fn displace_oldest(&self) {
        if let Some((_, displaced)) = self.queue().waiting.pop_first() {
            displaced.cancel();
        }
    }

    fn queue(&self) -> MutexGuard<'_, SilentQueue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One silent connection, delisted on drop.
pub(crate) struct SilentSlot {
    connections: SilentConnections,
    number: u64,
    displaced: CancellationToken,
}

impl SilentSlot {
    /// Returns the token that is cancelled when another connection takes this one's place.
    pub(crate) fn displaced(&self) -> &CancellationToken {
        &self.displaced
    }
}

impl Drop for SilentSlot {
    fn drop(&mut self) {
        self.connections.queue().waiting.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_slots_are_released_on_drop() {
        let counter = AddressCounter::default();
        let [one, other] = [[127, 0, 0, 1], [127, 0, 0, 2]].map(IpAddr::from);
        let held: Vec<_> = (0..2).map(|_| counter.reserve(one, 2).unwrap()).collect();
        assert!(counter.reserve(one, 2).is_none());
        assert!(counter.reserve(other, 2).is_some());
        drop(held);
        assert!(counter.counts().is_empty(), "an address without connections is forgotten");
        assert!(counter.reserve(one, 2).is_some());
    }

    #[test]
    fn longest_silent_connection_is_displaced_first() {
        let silent = SilentConnections::default();
        let slots: Vec<_> = (0..3).map(|_| silent.enter()).collect();
        let [first, second, third] = slots.try_into().ok().unwrap();
        drop(first);
        silent.displace_oldest();
        assert!(second.displaced().is_cancelled());
        assert!(!third.displaced().is_cancelled());
        silent.displace_oldest();
        silent.displace_oldest();
        assert!(third.displaced().is_cancelled());
    }
}
