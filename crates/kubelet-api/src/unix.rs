//! Connects to and listens on unix sockets.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::Stream;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Endpoint};

/// Why a socket could not be used.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The path is not valid UTF-8, which the address of a gRPC endpoint must be.
    #[error("the path {0:?} is not valid UTF-8")]
    NotText(PathBuf),
    /// No server accepts the connection.
    #[error("cannot connect to {path}")]
    Connect {
        /// The path of the socket.
        path: PathBuf,
        /// The error that tonic returned for the connection attempt.
        source: tonic::transport::Error,
    },
    /// Another process listens on the socket.
    #[error("{0} is served by another process: stop it first")]
    InUse(PathBuf),
    /// The path exists and is not a socket. It is left unchanged.
    #[error("{0} is not a socket: remove it")]
    NotASocket(PathBuf),
    /// The socket could not be created.
    #[error("cannot listen on {path}")]
    Listen {
        /// The path of the socket.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// Connects to the server of a socket. The channel reconnects automatically when the server restarts.
pub async fn connect(path: impl AsRef<Path>) -> Result<Channel, SocketError> {
    let path = path.as_ref();
    let text = path.to_str().ok_or_else(|| SocketError::NotText(path.to_path_buf()))?;
    let failed = |source| SocketError::Connect { path: path.to_path_buf(), source };
    Endpoint::from_shared(format!("unix:{text}")).map_err(failed)?.connect().await.map_err(failed)
}

/// Listens on a socket. A stale socket is replaced; one that another process serves is not.
pub async fn listen(path: impl AsRef<Path>) -> Result<Listener, SocketError> {
    let path = path.as_ref();
    let failed = |source| SocketError::Listen { path: path.to_path_buf(), source };
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(SocketError::NotASocket(path.to_path_buf()));
        }
        Ok(_) if UnixStream::connect(path).await.is_ok() => {
            return Err(SocketError::InUse(path.to_path_buf()));
        }
        Ok(_) => std::fs::remove_file(path).map_err(failed)?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(failed(e)),
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    let file = SocketFile::at(path).map_err(failed)?;
    Ok(Listener { incoming: UnixListenerStream::new(listener), file })
}

/// Incoming connections for [`tonic::transport::Server::serve_with_incoming_shutdown`]. Dropping it removes the
/// socket, unless another socket has replaced it.
#[derive(Debug)]
pub struct Listener {
    incoming: UnixListenerStream,
    file: SocketFile,
}

impl Listener {
    /// Returns the file of the socket.
    pub fn file(&self) -> &SocketFile {
        &self.file
    }
}

impl Stream for Listener {
    type Item = io::Result<UnixStream>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut self.incoming).poll_next(context)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.file.is_in_place() {
            // An error is ignored: the next listener replaces a stale socket.
            let _ = std::fs::remove_file(&self.file.path);
        }
    }
}

/// The identity of a socket file, which distinguishes it from a later file at the same path. Kubelet recreates its own
/// sockets when it starts, and removes those of device plugins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketFile {
    path: PathBuf,
    /// Device, inode and modification time: the kernel may reuse an inode number immediately.
    identity: (u64, u64, i64, i64),
}

impl SocketFile {
    /// Returns the identity of the file that is at a path now.
    pub fn at(path: impl AsRef<Path>) -> io::Result<SocketFile> {
        let metadata = std::fs::symlink_metadata(path.as_ref())?;
        let identity = (metadata.dev(), metadata.ino(), metadata.mtime(), metadata.mtime_nsec());
        Ok(SocketFile { path: path.as_ref().to_path_buf(), identity })
    }

    /// Returns whether this file is still at its path.
    pub fn is_in_place(&self) -> bool {
        SocketFile::at(&self.path).is_ok_and(|now| now == *self)
    }
}
