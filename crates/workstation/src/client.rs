//! The client of the daemon: sends requests over its socket, and starts a daemon if none runs.

use crate::daemon::background;
use crate::protocol::{
    DaemonRequest, DaemonResponse, MAX_RESPONSE_BYTES, ResizeChange, read_message, write_message,
};
use crate::report::{MachineReport, ShareReport};
use crate::state_dir::{StateDir, StateDirError};
use partage_enforce::refusal::Refusal;
use std::io::{self, BufRead, BufReader, ErrorKind};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// How long a daemon may take to start: the first start on a machine measures contexts.
const START_TIMEOUT: Duration = Duration::from_secs(90);
/// How long a daemon may take to respond.
pub(crate) const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);

/// The maximum number of times that a request is sent, if daemons exit before they respond.
pub(crate) const MAX_ATTEMPTS: usize = 20;
/// Interval between attempts: a daemon that exits still accepts connections for a moment.
pub(crate) const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The daemon refused the request.
    #[error(transparent)]
    Refused(Refusal),
    /// The state directory cannot be used.
    #[error(transparent)]
    StateDir(#[from] StateDirError),
    /// No daemon runs, and none can be started.
    #[error("cannot start the daemon")]
    NotStarted(#[source] StartError),
    /// The socket of the daemon cannot be used.
    #[error("{}: {error}", state_dir.socket().display())]
    Io {
        /// The state directory of the daemon.
        state_dir: StateDir,
        /// The error of the system.
        #[source]
        error: io::Error,
    },
    /// The daemon runs as a user that is not trusted.
    #[error(
        "the daemon at {} runs as user {uid}, which is neither this user nor root, and could run arbitrary code as you: use another \
         state directory with --state-dir",
        state_dir.socket().display()
    )]
    UntrustedDaemon {
        /// The state directory of the daemon.
        state_dir: StateDir,
        /// The user of the daemon.
        uid: u32,
    },
    /// The daemon did not respond in time.
    #[error("the daemon of {} does not respond: it may be very busy; if this persists, end it and check its log", .0.path().display())]
    TimedOut(StateDir),
    /// The daemon sent a response that does not fit the request.
    #[error(
        "unexpected response from the daemon: it may have another version; stop partage up and start it again"
    )]
    UnexpectedResponse,
}

/// Why no daemon could be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The state directory belongs to another user, and only that user can start its daemon.
    #[error(
    "{} belongs to another user, and no daemon is running there: ask that user to start partage up, or use a state directory of \
     your own with --state-dir",
        state_dir.display()
    )]
    NotOwner {
        /// The state directory of the daemon.
        state_dir: PathBuf,
    },
    /// The state directory cannot be used.
    #[error(transparent)]
    StateDir(#[from] StateDirError),
    /// The process cannot be started, or its output cannot be read.
    #[error(transparent)]
    Process(#[from] io::Error),
    /// The process exited without output.
    #[error("it exited at once; see {}", log.display())]
    Exited {
        /// The daemon's log file.
        log: PathBuf,
    },
    /// The daemon reported why it cannot run.
    #[error("{0}")]
    Failed(String),
    /// The daemon was started repeatedly, and does not respond.
    #[error("it does not respond")]
    Unresponsive,
}

/// How the processes of a stopped share ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopOutcome {
    /// The number of processes that exited after SIGTERM.
    pub ended: usize,
    /// The number of processes that had to be killed.
    pub killed: usize,
}

/// A client of the daemon of a state directory.
pub struct DaemonClient {
    state_dir: StateDir,
}

/// A connection to the daemon.
pub(crate) struct DaemonConnection {
    pub(crate) reader: BufReader<UnixStream>,
    pub(crate) writer: UnixStream,
}

impl DaemonClient {
    /// Returns a client for a state directory. It connects with the first request.
    pub fn new(state_dir: StateDir) -> DaemonClient {
        DaemonClient { state_dir }
    }

    /// Returns the report about all GPUs, shares and waiting requests.
    pub fn report(&self) -> Result<MachineReport, ClientError> {
        match self.request(&DaemonRequest::Report, RESPONSE_TIMEOUT)? {
            DaemonResponse::Report(report) => Ok(*report),
            _ => Err(ClientError::UnexpectedResponse),
        }
    }

    /// Resizes a running share. Returns its new state.
    pub fn resize(&self, name: &str, change: ResizeChange) -> Result<ShareReport, ClientError> {
        match self.request(&DaemonRequest::Resize { name: name.into(), change }, RESPONSE_TIMEOUT)? {
            DaemonResponse::Resized(share) => Ok(*share),
            _ => Err(ClientError::UnexpectedResponse),
        }
    }

    /// Ends all processes of a share. They are killed after the grace period.
    pub fn stop(&self, name: &str, grace: Duration) -> Result<StopOutcome, ClientError> {
        let grace_millis = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        match self.request(
            &DaemonRequest::Stop { name: name.into(), grace_millis },
            RESPONSE_TIMEOUT.saturating_add(grace),
        )? {
            DaemonResponse::Stopped { ended, killed } => Ok(StopOutcome { ended, killed }),
            _ => Err(ClientError::UnexpectedResponse),
        }
    }

    /// Asks a daemon in the background to hand over. Succeeds if none runs.
    pub fn take_over(&self) -> Result<(), ClientError> {
        let stream = match connect_trusted(&self.state_dir) {
            Ok(stream) => stream,
            Err(ClientError::Io { error, .. }) if is_not_running(&error) => return Ok(()),
            Err(error) => return Err(error),
        };
        let mut connection =
            DaemonConnection::new(stream, RESPONSE_TIMEOUT).map_err(|error| self.io(error))?;
        match self.exchange(&mut connection, &DaemonRequest::HandOver) {
            Ok(DaemonResponse::HandedOver) => Ok(()),
            Ok(_) => Err(ClientError::UnexpectedResponse),
            // The daemon has just exited.
            Err(ClientError::Io { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Starts a daemon in the background if there are shares. If that fails, the next command tries again.
    pub fn resume(&self) {
        if crate::share_store::has_shares(&self.state_dir) {
            let _ = self.connect(RESPONSE_TIMEOUT);
        }
    }

    fn request(&self, message: &DaemonRequest, timeout: Duration) -> Result<DaemonResponse, ClientError> {
        // A daemon may exit while the request is sent: then the next one gets it.
        let mut last = None;
        for tried in 0..MAX_ATTEMPTS {
            if tried > 0 {
                std::thread::sleep(RETRY_INTERVAL);
            }
            let mut connection = self.connect(timeout)?;
            match self.exchange(&mut connection, message) {
                Err(error @ ClientError::Io { .. }) => last = Some(error),
                other => return other,
            }
        }
        Err(last.unwrap_or(ClientError::UnexpectedResponse))
    }

    fn exchange(
        &self,
        connection: &mut DaemonConnection,
        message: &DaemonRequest,
    ) -> Result<DaemonResponse, ClientError> {
        // A daemon that refuses the connection may have sent the reason; reading the response reports any other error.
        let _ = write_message(&mut connection.writer, message);
        self.receive(connection)
    }

    pub(crate) fn receive(&self, connection: &mut DaemonConnection) -> Result<DaemonResponse, ClientError> {
        match read_message(&mut connection.reader, MAX_RESPONSE_BYTES) {
            Ok(Some(DaemonResponse::Refused { kind, message, hints })) => {
                Err(ClientError::Refused(Refusal::new(kind, message).with_hints(hints)))
            }
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err(self.io(ErrorKind::UnexpectedEof.into())),
            Err(error) if error.kind() == ErrorKind::InvalidData => Err(ClientError::UnexpectedResponse),
            Err(error) => Err(self.io(error)),
        }
    }

    /// Connects to the daemon, and starts one if none runs.
    pub(crate) fn connect(&self, timeout: Duration) -> Result<DaemonConnection, ClientError> {
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            match connect_trusted(&self.state_dir) {
                Ok(stream) => return DaemonConnection::new(stream, timeout).map_err(|error| self.io(error)),
                // Only its own user can start it; if it was killed, its standby process is about to take over.
                Err(ClientError::Io { error, .. })
                    if is_not_running(&error)
                        && self.state_dir.belongs_to_another_user()
                        && self.state_dir.is_answering() => {}
                Err(ClientError::Io { error, .. }) if is_not_running(&error) => {
                    self.start().map_err(ClientError::NotStarted)?;
                }
                Err(error) => return Err(error),
            }
            if Instant::now() > deadline {
                return Err(ClientError::NotStarted(StartError::Unresponsive));
            }
        }
    }

    /// Starts a daemon in the background. Returns when it is ready, or another one runs.
    fn start(&self) -> Result<(), StartError> {
        if self.state_dir.belongs_to_another_user() {
            return Err(StartError::NotOwner { state_dir: self.state_dir.path().into() });
        }
        self.state_dir.create()?;
        let mut child = background(&self.state_dir).stdout(Stdio::piped()).spawn()?;
        let mut line = String::new();
        if let Some(out) = child.stdout.take() {
            BufReader::new(out).read_line(&mut line)?;
        }
        match line.trim() {
            READY => Ok(()),
            // Another process started one at the same time, which may not be ready yet.
            BUSY => {
                std::thread::sleep(RETRY_INTERVAL);
                Ok(())
            }
            "" => Err(StartError::Exited { log: self.state_dir.log() }),
            why => Err(StartError::Failed(why.to_string())),
        }
    }

    fn io(&self, error: io::Error) -> ClientError {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => ClientError::TimedOut(self.state_dir.clone()),
            _ => ClientError::Io { state_dir: self.state_dir.clone(), error },
        }
    }
}

/// The first line on the standard output of a started daemon: this, [`BUSY`], or why it cannot run.
pub const READY: &str = "ready";
/// The first line of a started daemon that found another one running. See [`READY`].
pub const BUSY: &str = "busy";

fn is_not_running(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused | ErrorKind::NotADirectory)
}

/// Connects to a daemon and verifies its user: the daemon's responses determine what is mounted and loaded.
fn connect_trusted(state_dir: &StateDir) -> Result<UnixStream, ClientError> {
    let failed = |error: io::Error| ClientError::Io { state_dir: state_dir.clone(), error };
    let stream = UnixStream::connect(state_dir.socket()).map_err(failed)?;
    let peer = rustix::net::sockopt::socket_peercred(&stream).map_err(|error| failed(error.into()))?;
    let uid = peer.uid.as_raw();
    if uid != 0 && uid != rustix::process::geteuid().as_raw() {
        return Err(ClientError::UntrustedDaemon { state_dir: state_dir.clone(), uid });
    }
    Ok(stream)
}

impl DaemonConnection {
    fn new(stream: UnixStream, timeout: Duration) -> io::Result<DaemonConnection> {
        stream.set_read_timeout(Some(timeout))?;
        let writer = stream.try_clone()?;
        Ok(DaemonConnection { reader: BufReader::new(stream), writer })
    }
}
