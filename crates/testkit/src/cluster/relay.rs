//! The API server on the machine's loopback. The bed's own network is out of reach for a person's tools.

use crate::bed::{Bed, BedError};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

/// The port people expect; another where it is taken.
const PORT: u16 = 6443;

/// Connections at once.
const MOST: usize = 256;

/// Carries bytes until dropped.
#[derive(Debug)]
pub(super) struct Relay {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Relay {
    pub(super) fn start(bed: &Bed) -> Result<Self, BedError> {
        let doing = "opening a port on loopback";
        // Made by this thread, which is outside.
        let outside = TcpListener::bind((Ipv4Addr::LOCALHOST, PORT))
            .or_else(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
            .map_err(BedError::io(doing))?;
        let address = outside.local_addr().map_err(BedError::io(doing))?;
        outside.set_nonblocking(true).map_err(BedError::io(doing))?;
        let inside = SocketAddr::from((bed.address(), 443));
        // Connections are made by the bed's threads, which are inside.
        let task = bed.handle().spawn(async move {
            let Ok(outside) = tokio::net::TcpListener::from_std(outside) else { return };
            let room = Arc::new(Semaphore::new(MOST));
            loop {
                // Whoever would take more than that has to wait: the holder needs file handles of its own.
                let Ok(place) = Arc::clone(&room).acquire_owned().await else { return };
                let Ok((mut near, _)) = outside.accept().await else {
                    // Too many open files, as a rule: some will close.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                };
                tokio::spawn(async move {
                    let _place = place;
                    if let Ok(mut far) = tokio::net::TcpStream::connect(inside).await {
                        // Either side may hang up as it likes.
                        let _ = near.set_nodelay(true).and(far.set_nodelay(true));
                        let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
                    }
                });
            }
        });
        Ok(Self { address, task })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}
