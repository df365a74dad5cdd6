//! Makes the API server reachable on the host's loopback. Tools outside the bed cannot reach its own network.

use crate::bed::{BedError, TestBed};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

/// The usual port; another one is used if it is taken.
const PREFERRED_PORT: u16 = 6443;

/// Maximum number of concurrent connections.
const MAX_CONNECTIONS: usize = 256;

/// Forwards connections until it is dropped.
#[derive(Debug)]
pub(super) struct ApiServerRelay {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl ApiServerRelay {
    pub(super) fn start(bed: &TestBed) -> Result<Self, BedError> {
        let doing = "opening a port on loopback";
        // Created by this thread, which is outside the bed's network.
        let outside = TcpListener::bind((Ipv4Addr::LOCALHOST, PREFERRED_PORT))
            .or_else(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
            .map_err(BedError::io(doing))?;
        let address = outside.local_addr().map_err(BedError::io(doing))?;
        outside.set_nonblocking(true).map_err(BedError::io(doing))?;
        let inside = SocketAddr::from((bed.address(), 443));
        // Connections are made by the bed's threads, which are inside its network.
        let task = bed.handle().spawn(async move {
            let Ok(outside) = tokio::net::TcpListener::from_std(outside) else { return };
            let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
            loop {
                // Further connections wait: the holder needs file descriptors of its own.
                let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
                let Ok((mut client, _)) = outside.accept().await else {
                    // Usually too many open files: some will be closed.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                };
                tokio::spawn(async move {
                    let _place = permit;
                    if let Ok(mut server) = tokio::net::TcpStream::connect(inside).await {
                        // Either side may close the connection at any time.
                        let _ = client.set_nodelay(true).and(server.set_nodelay(true));
                        let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
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

impl Drop for ApiServerRelay {
    fn drop(&mut self) {
        self.task.abort();
    }
}
