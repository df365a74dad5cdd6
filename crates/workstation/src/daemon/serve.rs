//! Serves requests over the socket. Each connection has a thread of its own.

use super::queue::QueuedRequest;
use super::threads::{Threads, WakeReason};
use super::{Daemon, DaemonState};
use crate::admission;
use crate::protocol::{
    ConfinedNotice, DaemonRequest, DaemonResponse, GrantedShare, MAX_REQUEST_BYTES, RunRequest, read_message,
    shorten_command, write_message,
};
use crate::users::UserIdentity;
use partage_core::model::PodAsk;
use partage_enforce::error_chain::describe;
use partage_enforce::refusal::{Refusal, RefusalReason};
use partage_host::process::{self, ProcessIdentity};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::UCred;
use std::fs;
use std::io::{self, BufReader, Read};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// How long a caller may take to send its request, and to read a response.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a process may take to confine itself after the grant: libraries may have to be read from a slow disk.
const CONFINE_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval between checks whether a waiting caller is still connected.
const CALLER_POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The maximum grace period of a stop request.
const MAX_STOP_GRACE: Duration = Duration::from_secs(3600);
/// Pause after a connection could not be accepted: if descriptors or memory are exhausted, an immediate retry fails,
/// too.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// A connection, and the process at its other end.
struct CallerConnection {
    who: UserIdentity,
    main: ProcessIdentity,
    reader: BufReader<DeadlineReader>,
    writer: UnixStream,
}

/// A stream with a deadline for all reads together, however slowly the bytes arrive.
struct DeadlineReader {
    stream: UnixStream,
    deadline: Instant,
    /// Stops the wait for the request when the daemon stops: the caller sends the request to the next daemon.
    interrupted_by: Option<Arc<Threads>>,
}

impl DeadlineReader {
    /// Sets another deadline for the messages after the request, which are read even while the daemon stops.
    fn extend(&mut self, timeout: Duration) {
        self.deadline = Instant::now() + timeout;
        self.interrupted_by = None;
    }
}

impl Read for DeadlineReader {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        if let Some(threads) = &self.interrupted_by {
            match threads.wait(Some(self.stream.as_fd()), Some(self.deadline)) {
                WakeReason::Readable => {}
                WakeReason::TimedOut => return Err(io::ErrorKind::TimedOut.into()),
                WakeReason::Stopped => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(bytes)
    }
}

impl Daemon {
    /// Accepts connections until the daemon is stopped.
    pub(super) fn serve(self: &Arc<Self>, listener: &UnixListener) {
        while self.threads.wait(Some(listener.as_fd()), None) != WakeReason::Stopped {
            if self.state().ending {
                // New callers connect to the next daemon.
                return;
            }
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    std::thread::sleep(ACCEPT_RETRY_INTERVAL);
                    continue;
                }
            };
            let Ok(peer) = rustix::net::sockopt::socket_peercred(&stream) else { continue };
            let uid = peer.uid.as_raw();
            let is_privileged = uid == 0 || uid == rustix::process::geteuid().as_raw();
            if let Err(refused) = self.connections.open(uid, is_privileged) {
                // The caller may have disconnected.
                let _ = stream
                    .set_nonblocking(true)
                    .and_then(|()| write_message(&mut &stream, &DaemonResponse::from(refused)));
                continue;
            }
            let daemon = Arc::clone(self);
            let handle = move || {
                let span = tracing::info_span!("request", uid, pid = %peer.pid, kind = tracing::field::Empty);
                let _span = span.entered();
                if let Err(error) = daemon.handle_request(stream, &peer) {
                    // The caller may disconnect at any time.
                    tracing::debug!(%error, "connection ended");
                }
                daemon.connections.close(uid);
                daemon.changed.notify_all();
            };
            if let Err(error) = self.threads.spawn("request", handle) {
                tracing::warn!(%error, "cannot start a thread for a connection");
                self.connections.close(uid);
            }
        }
    }

    fn handle_request(self: &Arc<Self>, stream: UnixStream, peer: &UCred) -> io::Result<()> {
        let pid = u32::try_from(peer.pid.as_raw_nonzero().get()).unwrap_or(0);
        let who = UserIdentity::of(peer.uid.as_raw(), peer.gid.as_raw(), pid);
        stream.set_write_timeout(Some(REQUEST_TIMEOUT))?;
        let mut writer = stream.try_clone()?;
        let mut reader = BufReader::new(DeadlineReader {
            stream,
            deadline: Instant::now() + REQUEST_TIMEOUT,
            interrupted_by: Some(Arc::clone(&self.threads)),
        });
        let message = match read_message::<DaemonRequest>(&mut reader, MAX_REQUEST_BYTES) {
            Ok(Some(message)) => message,
            Ok(None) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => return Err(error),
            Err(error) => {
                let message = format!("malformed request: {error}");
                return write_message(
                    &mut writer,
                    &DaemonResponse::from(Refusal::new(RefusalReason::Invalid, message)),
                );
            }
        };
        tracing::Span::current().record("kind", message.kind());
        let response = match message {
            DaemonRequest::Run(mut request) => {
                request.command = shorten_command(request.command);
                // The process may have ended since it sent the request, and its pid may belong to another.
                let main = ProcessIdentity::of(pid)?;
                if process::real_uid(pid)? != who.uid {
                    return Ok(());
                }
                return self.run(CallerConnection { who, main, reader, writer }, &request);
            }
            DaemonRequest::Report => DaemonResponse::Report(Box::new(self.report_to(&who))),
            DaemonRequest::Resize { name, change } => match self.resize(&who, &name, &change) {
                Ok(()) => match self.report().shares.into_iter().find(|share| share.name == name) {
                    Some(share) => DaemonResponse::Resized(Box::new(share)),
                    None => DaemonResponse::from(Refusal::new(
                        RefusalReason::NotFound,
                        format!("{name} has just ended"),
                    )),
                },
                Err(refused) => DaemonResponse::from(refused),
            },
            DaemonRequest::Stop { name, grace_millis } => {
                let grace = Duration::from_millis(grace_millis).min(MAX_STOP_GRACE);
                match self.stop(&who, &name, grace) {
                    Ok(ended) => DaemonResponse::Stopped { ended: ended.ended, killed: ended.killed },
                    Err(refused) => DaemonResponse::from(refused),
                }
            }
            DaemonRequest::HandOver => self.hand_over(&who),
        };
        write_message(&mut writer, &response)
    }

    fn hand_over(&self, who: &UserIdentity) -> DaemonResponse {
        if !who.is_daemon_user() {
            return DaemonResponse::from(Refusal::new(
                RefusalReason::NotOwner,
                "only the daemon's own user may take over from it",
            ));
        }
        if self.foreground {
            let message = format!(
                "partage up is already running here, as process {}: watch it with partage top, or end it first",
                std::process::id()
            );
            return DaemonResponse::from(Refusal::new(RefusalReason::NoCapacity, message));
        }
        self.state().handed_over = true;
        self.standby.dismiss();
        self.end();
        DaemonResponse::HandedOver
    }

    fn run(self: &Arc<Self>, mut caller: CallerConnection, request: &RunRequest) -> io::Result<()> {
        let granted = match self.grant_or_wait(&mut caller, request)? {
            Ok(granted) => granted,
            Err(refused) => {
                tracing::debug!(reason = ?refused.reason, message = %refused.message, "request refused");
                return write_message(&mut caller.writer, &DaemonResponse::from(refused));
            }
        };
        let name = granted.name.clone();
        let number = self.state().shares.get(&name).map(|live| live.number);
        let confined = self.confine_caller(&mut caller, granted);
        if !matches!(confined, Ok(true))
            && let Some(number) = number
        {
            // The caller disconnected or cannot be confined, so its command has not started.
            self.release(&name, number);
        }
        confined.map(|_| ())
    }

    /// Sends the grant, and confines the caller. Returns whether its command may start.
    fn confine_caller(
        self: &Arc<Self>,
        caller: &mut CallerConnection,
        granted: GrantedShare,
    ) -> io::Result<bool> {
        let name = granted.name.clone();
        self.watch_share(&name);
        write_message(&mut caller.writer, &DaemonResponse::Granted(Box::new(granted)))?;
        let confined = self.confine(&name, caller.main);
        caller.reader.get_mut().extend(CONFINE_TIMEOUT);
        let Some(notice) = read_message::<ConfinedNotice>(&mut caller.reader, MAX_REQUEST_BYTES)? else {
            return Ok(false);
        };
        match self.verify_confinement(&name, caller.main, notice.confinement, &confined) {
            Ok(()) => write_message(&mut caller.writer, &DaemonResponse::Go { notes: confined.notes })
                .map(|()| true),
            Err(error) => {
                let message = format!("cannot confine the process to its share: {}", describe(&error));
                write_message(
                    &mut caller.writer,
                    &DaemonResponse::from(Refusal::new(RefusalReason::Failed, message)),
                )
                .map(|()| false)
            }
        }
    }

    /// Grants a share now, or later if the caller waits.
    fn grant_or_wait(
        self: &Arc<Self>,
        caller: &mut CallerConnection,
        request: &RunRequest,
    ) -> io::Result<Result<GrantedShare, Refusal>> {
        let ask = match admission::to_ask(request, &self.settings.default) {
            Ok(ask) => ask,
            Err(refused) => return Ok(Err(refused)),
        };
        if self.is_in_share(caller.main) {
            return Ok(Err(Refusal::new(
                RefusalReason::Invalid,
                "this process is already in a share, and shares do not nest",
            )));
        }
        let mut state = self.state();
        self.release_ended(&mut state);
        let (name, why) = match self.try_once(&mut state, caller, request, &ask) {
            Ok(granted) => return Ok(Ok(granted)),
            Err((Some(name), why)) if request.wait && why.reason.can_be_waited_for() => (name, why),
            Err((_, why)) => return Ok(Err(why)),
        };
        // A request that would not fit an empty machine is refused at once.
        if let Err(never) = admission::place(&self.machine.node, &[], &self.settings, &caller.who, &ask) {
            return Ok(Err(never));
        }
        state.tickets += 1;
        let number = state.tickets;
        state.queue.push(QueuedRequest {
            number,
            name,
            who: caller.who.clone(),
            main: caller.main,
            ask,
            command: request.command.clone(),
            since: super::now(),
            why,
            granted: None,
        });
        drop(state);
        let waited = self.wait_for(number, caller);
        let mut state = self.state();
        let at = state.queue.iter().position(|ticket| ticket.number == number);
        let unfetched = at.and_then(|at| state.queue.remove(at).granted);
        drop(state);
        if let Some(granted) = unfetched {
            self.release_unclaimed(&granted.name);
        }
        waited.map(Ok)
    }

    /// Returns whether a process is in a share: it sees a region, or is in the cgroup of a share.
    fn is_in_share(&self, main: ProcessIdentity) -> bool {
        let limits = self.state_dir.region_at().join(partage_region::LIMITS_FILE);
        let seen = limits
            .strip_prefix("/")
            .map(|limits| Path::new("/proc").join(main.pid.to_string()).join("root").join(limits));
        let cgroups = fs::read_to_string(format!("/proc/{}/cgroup", main.pid)).unwrap_or_default();
        seen.is_ok_and(|limits| limits.exists())
            || cgroups.contains(&format!("/{}", self.state_dir.cgroup_prefix()))
    }

    /// Tries to grant a share now. The error contains the name that the share would have, and the refusal.
    fn try_once(
        self: &Arc<Self>,
        state: &mut DaemonState,
        caller: &CallerConnection,
        request: &RunRequest,
        ask: &PodAsk,
    ) -> Result<GrantedShare, (Option<String>, Refusal)> {
        let name = state.name(request, &self.state_dir).map_err(|why| (None, why))?;
        let given = self.grant_share(state, &name, &caller.who, caller.main, ask, &request.command);
        given.map_err(|why| (Some(name), why))
    }

    fn wait_for(self: &Arc<Self>, number: u64, caller: &mut CallerConnection) -> io::Result<GrantedShare> {
        let mut last_sent = None;
        let mut state = self.state();
        loop {
            let of = state.queue.len();
            let Some(at) = state.queue.iter().position(|ticket| ticket.number == number) else {
                return Err(io::ErrorKind::NotFound.into());
            };
            let ticket = &mut state.queue[at];
            if let Some(granted) = ticket.granted.take() {
                return Ok(granted);
            }
            let now = (at + 1, of, ticket.why.message.clone());
            let ending = state.ending;
            if last_sent.as_ref() != Some(&now) {
                drop(state);
                write_message(
                    &mut caller.writer,
                    &DaemonResponse::Queued { place: now.0, of: now.1, why: now.2.clone() },
                )?;
                last_sent = Some(now);
                state = self.state();
                continue;
            }
            if ending || is_gone(&caller.writer) {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            state = self
                .changed
                .wait_timeout(state, CALLER_POLL_INTERVAL)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Releases a share whose caller disconnected before it received the grant.
    fn release_unclaimed(self: &Arc<Self>, name: &str) {
        let number = self.state().shares.get(name).map(|live| live.number);
        if let Some(number) = number {
            self.release(name, number);
        }
    }
}

/// Returns whether the other end of a connection is closed.
fn is_gone(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok() && !fds[0].revents().is_empty()
}
