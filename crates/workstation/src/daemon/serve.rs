//! Requests over the socket. Each connection has a thread of its own.

use super::queue::Ticket;
use super::threads::{Threads, Wake};
use super::{Daemon, State};
use crate::decide;
use crate::users::Who;
use crate::wire::{Answer, Bound, Granted, LONGEST, Question, RunRequest, hear, say, shown};
use partage_core::model::PodAsk;
use partage_enforce::error_chain::describe;
use partage_enforce::refusal::{Refusal, RefusalReason};
use partage_host::process::{self, Identity};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::UCred;
use std::fs;
use std::io::{self, BufReader, Read};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// How long a caller may take to send its request, and to read an answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a process that was granted a share may take to confine itself: libraries may have to be read from a slow disk.
const CONFINE_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval between checks whether a caller that waits is still there.
const CALLER_POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The longest grace period that a share can be stopped with.
const MAX_STOP_GRACE: Duration = Duration::from_secs(3600);
/// Pause after a connection could not be accepted: without files or memory there is no use in trying again at once.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// A connection, and the process at its other end.
struct Caller {
    who: Who,
    main: Identity,
    reader: BufReader<DeadlineReader>,
    writer: UnixStream,
}

/// A stream that is read until a deadline, however slowly the bytes come.
struct DeadlineReader {
    stream: UnixStream,
    deadline: Instant,
    /// Until the request is read, the daemon's end ends the wait for it: the caller sends it to the next daemon.
    interrupted_by: Option<Arc<Threads>>,
}

impl DeadlineReader {
    /// Waits for what follows the request until another deadline, also while the daemon ends.
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
                Wake::Readable => {}
                Wake::TimedOut => return Err(io::ErrorKind::TimedOut.into()),
                Wake::Stopped => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(bytes)
    }
}

impl Daemon {
    /// Accepts connections until the daemon is told to end.
    pub(super) fn serve(self: &Arc<Self>, listener: &UnixListener) {
        while self.threads.wait(Some(listener.as_fd()), None) != Wake::Stopped {
            if self.state().ending {
                // Callers connect to the next daemon.
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
                // A caller that is gone needs no answer.
                let _ = stream.set_nonblocking(true).and_then(|()| say(&mut &stream, &Answer::from(refused)));
                continue;
            }
            let daemon = Arc::clone(self);
            let handle = move || {
                let span = tracing::info_span!("request", uid, pid = %peer.pid, kind = tracing::field::Empty);
                let _span = span.entered();
                if let Err(error) = daemon.answer(stream, &peer) {
                    // A caller that goes away while it is answered needs no answer.
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

    fn answer(self: &Arc<Self>, stream: UnixStream, peer: &UCred) -> io::Result<()> {
        let pid = u32::try_from(peer.pid.as_raw_nonzero().get()).unwrap_or(0);
        let who = Who::of(peer.uid.as_raw(), peer.gid.as_raw(), pid);
        stream.set_write_timeout(Some(REQUEST_TIMEOUT))?;
        let mut writer = stream.try_clone()?;
        let mut reader = BufReader::new(DeadlineReader {
            stream,
            deadline: Instant::now() + REQUEST_TIMEOUT,
            interrupted_by: Some(Arc::clone(&self.threads)),
        });
        let question = match hear::<Question>(&mut reader, LONGEST) {
            Ok(Some(question)) => question,
            Ok(None) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => return Err(error),
            Err(error) => {
                let message = format!("malformed request: {error}");
                return say(&mut writer, &Answer::from(Refusal::new(RefusalReason::Invalid, message)));
            }
        };
        tracing::Span::current().record("kind", question.kind());
        let answer = match question {
            Question::Run(mut request) => {
                request.command = shown(request.command);
                // The process may have ended since it sent the request, and its pid may belong to another.
                let main = Identity::of(pid)?;
                if process::owner(pid)? != who.uid {
                    return Ok(());
                }
                return self.run(Caller { who, main, reader, writer }, &request);
            }
            Question::Report => Answer::Report(Box::new(self.report_to(&who))),
            Question::Resize { name, change } => match self.resize(&who, &name, &change) {
                Ok(()) => match self.report().shares.into_iter().find(|share| share.name == name) {
                    Some(share) => Answer::Resized(Box::new(share)),
                    None => {
                        Answer::from(Refusal::new(RefusalReason::NotFound, format!("{name} has just ended")))
                    }
                },
                Err(refused) => Answer::from(refused),
            },
            Question::Stop { name, grace_millis } => {
                let grace = Duration::from_millis(grace_millis).min(MAX_STOP_GRACE);
                match self.stop(&who, &name, grace) {
                    Ok(ended) => Answer::Stopped { ended: ended.ended, killed: ended.killed },
                    Err(refused) => Answer::from(refused),
                }
            }
            Question::HandOver => self.hand_over(&who),
        };
        say(&mut writer, &answer)
    }

    fn hand_over(&self, who: &Who) -> Answer {
        if !who.is_keeper() {
            return Answer::from(Refusal::new(
                RefusalReason::NotOwner,
                "only the keeper's own user may take over from it",
            ));
        }
        if self.foreground {
            let message = format!(
                "partage up already runs here, as process {}: watch it with partage top, or end that one first",
                std::process::id()
            );
            return Answer::from(Refusal::new(RefusalReason::NoCapacity, message));
        }
        self.state().handed_over = true;
        self.standby.dismiss();
        self.end();
        Answer::HandedOver
    }

    fn run(self: &Arc<Self>, mut caller: Caller, request: &RunRequest) -> io::Result<()> {
        let granted = match self.granted(&mut caller, request)? {
            Ok(granted) => granted,
            Err(refused) => {
                tracing::debug!(reason = ?refused.reason, message = %refused.message, "request refused");
                return say(&mut caller.writer, &Answer::from(refused));
            }
        };
        let name = granted.name.clone();
        let number = self.state().shares.get(&name).map(|live| live.number);
        let bound = self.bound(&mut caller, granted);
        if !matches!(bound, Ok(true))
            && let Some(number) = number
        {
            // The caller is gone or cannot be confined: its command has not started.
            self.release(&name, number);
        }
        bound.map(|_| ())
    }

    /// Sends the grant, and confines the caller. Returns whether its command may start.
    fn bound(self: &Arc<Self>, caller: &mut Caller, granted: Granted) -> io::Result<bool> {
        let name = granted.name.clone();
        self.watch_share(&name);
        say(&mut caller.writer, &Answer::Granted(Box::new(granted)))?;
        let confined = self.confine(&name, caller.main);
        caller.reader.get_mut().extend(CONFINE_TIMEOUT);
        let Some(bound) = hear::<Bound>(&mut caller.reader, LONGEST)? else { return Ok(false) };
        match self.bind(&name, caller.main, bound.binding, &confined) {
            Ok(()) => say(&mut caller.writer, &Answer::Go { notes: confined.notes }).map(|()| true),
            Err(error) => {
                let message = format!("the share cannot be bound to its process: {}", describe(&error));
                say(&mut caller.writer, &Answer::from(Refusal::new(RefusalReason::Failed, message)))
                    .map(|()| false)
            }
        }
    }

    /// Grants a share now, or later if the caller waits.
    fn granted(
        self: &Arc<Self>,
        caller: &mut Caller,
        request: &RunRequest,
    ) -> io::Result<Result<Granted, Refusal>> {
        let ask = match decide::ask(request, &self.settings.default) {
            Ok(ask) => ask,
            Err(refused) => return Ok(Err(refused)),
        };
        if self.is_inside(caller.main) {
            return Ok(Err(Refusal::new(
                RefusalReason::Invalid,
                "this process is in a share already, and shares do not nest",
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
        if let Err(never) = decide::place(&self.machine.node, &[], &self.settings, &caller.who, &ask) {
            return Ok(Err(never));
        }
        state.tickets += 1;
        let number = state.tickets;
        state.queue.push(Ticket {
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
            self.give_back(&granted.name);
        }
        waited.map(Ok)
    }

    /// Returns whether a process is in a share: it sees a region, or is in the cgroup of a share.
    fn is_inside(&self, main: Identity) -> bool {
        let limits = self.home.region_at().join(partage_region::LIMITS);
        let seen = limits
            .strip_prefix("/")
            .map(|limits| Path::new("/proc").join(main.pid.to_string()).join("root").join(limits));
        let cgroups = fs::read_to_string(format!("/proc/{}/cgroup", main.pid)).unwrap_or_default();
        seen.is_ok_and(|limits| limits.exists())
            || cgroups.contains(&format!("/{}", self.home.cgroup_prefix()))
    }

    /// Grants a share now. The error has the name that the share would have, and why it was refused.
    fn try_once(
        self: &Arc<Self>,
        state: &mut State,
        caller: &Caller,
        request: &RunRequest,
        ask: &PodAsk,
    ) -> Result<Granted, (Option<String>, Refusal)> {
        let name = state.name(request, &self.home).map_err(|why| (None, why))?;
        let given = self.give(state, &name, &caller.who, caller.main, ask, &request.command);
        given.map_err(|why| (Some(name), why))
    }

    fn wait_for(self: &Arc<Self>, number: u64, caller: &mut Caller) -> io::Result<Granted> {
        let mut told = None;
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
            if told.as_ref() != Some(&now) {
                drop(state);
                say(&mut caller.writer, &Answer::Queued { place: now.0, of: now.1, why: now.2.clone() })?;
                told = Some(now);
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

    /// Releases a share that its caller did not take.
    fn give_back(self: &Arc<Self>, name: &str) {
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
