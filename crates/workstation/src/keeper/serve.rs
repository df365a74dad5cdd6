//! Who asks, over the socket. Each is heard by a thread of its own.

use super::queue::Ticket;
use super::{Keeper, State};
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
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// How many may ask at a time, those that wait included.
const MOST: usize = 512;
/// How many of them one user may be: nobody can keep the others from asking.
const MOST_OF_ONE: usize = 128;
/// How long one may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long one that was granted a share may take to bind itself: libraries may have to be read from a slow disk.
const BINDING: Duration = Duration::from_secs(30);
/// How often it is looked whether one that waits is still there.
const GLANCE: Duration = Duration::from_millis(500);
/// The longest grace that a share can be stopped with.
const LONGEST_GRACE: Duration = Duration::from_secs(3600);

/// A connection, and who is at its other end.
struct Caller {
    who: Who,
    main: Identity,
    reader: BufReader<Patient>,
    writer: UnixStream,
}

/// A stream that is read until a time, however slowly the words come.
struct Patient {
    stream: UnixStream,
    until: Instant,
}

impl Patient {
    fn new(stream: UnixStream, patience: Duration) -> Patient {
        Patient { stream, until: Instant::now() + patience }
    }
}

impl Read for Patient {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(bytes)
    }
}

impl Keeper {
    pub(super) fn serve(self: &Arc<Self>, listener: &UnixListener) {
        for stream in listener.incoming() {
            let stream = match stream {
                Ok(stream) => stream,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    // Without files or memory it is of no use to try again at once.
                    std::thread::sleep(Duration::from_millis(50));
                    continue;
                }
            };
            if self.state().ending {
                // Another one is asked next.
                continue;
            }
            let Ok(peer) = rustix::net::sockopt::socket_peercred(&stream) else { continue };
            let uid = peer.uid.as_raw();
            if let Some(refused) = self.one_more(uid) {
                // Who is not there any more need not hear it.
                let _ = stream.set_nonblocking(true).and_then(|()| say(&mut &stream, &Answer::from(refused)));
                continue;
            }
            let keeper = Arc::clone(self);
            let heard = move || {
                let span = tracing::info_span!("request", uid, pid = %peer.pid, kind = tracing::field::Empty);
                let _span = span.entered();
                if let Err(error) = keeper.answer(stream, &peer) {
                    // A caller that goes away while it is answered needs no answer.
                    tracing::debug!(%error, "connection ended");
                }
                keeper.one_less(uid);
                keeper.changed.notify_all();
            };
            if std::thread::Builder::new().spawn(heard).is_err() {
                self.one_less(uid);
            }
        }
    }

    /// Counts a connection of a user; why not, where there are too many.
    fn one_more(&self, uid: u32) -> Option<Refusal> {
        let mut state = self.state();
        let (all, own) =
            (state.callers.values().sum::<usize>(), state.callers.get(&uid).copied().unwrap_or(0));
        // The administrator is always heard: somebody must be able to end what is too much.
        let keeper = uid == 0 || uid == rustix::process::geteuid().as_raw();
        let message = match (all >= MOST, own >= MOST_OF_ONE) {
            _ if keeper && own < MOST => None,
            (_, true) => Some(format!(
                "{own} commands of yours talk to the keeper already, those that wait included: end some first"
            )),
            (true, _) => Some(format!("{all} commands talk to the keeper already: try again soon")),
            _ => None,
        };
        if message.is_none() {
            *state.callers.entry(uid).or_default() += 1;
        }
        message.map(|message| Refusal::new(RefusalReason::NoCapacity, message))
    }

    fn one_less(&self, uid: u32) {
        let mut state = self.state();
        if let Some(own) = state.callers.get_mut(&uid) {
            *own -= 1;
            if *own == 0 {
                state.callers.remove(&uid);
            }
        }
    }

    fn answer(self: &Arc<Self>, stream: UnixStream, peer: &UCred) -> io::Result<()> {
        let pid = u32::try_from(peer.pid.as_raw_nonzero().get()).unwrap_or(0);
        let who = Who::of(peer.uid.as_raw(), peer.gid.as_raw(), pid);
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut writer = stream.try_clone()?;
        let mut reader = BufReader::new(Patient::new(stream, PATIENCE));
        let question = match hear::<Question>(&mut reader, LONGEST) {
            Ok(Some(question)) => question,
            Ok(None) => return Ok(()),
            Err(error) => {
                let message = format!("malformed request: {error}");
                return say(&mut writer, &Answer::from(Refusal::new(RefusalReason::Invalid, message)));
            }
        };
        tracing::Span::current().record("kind", question.kind());
        let answer = match question {
            Question::Run(mut request) => {
                request.command = shown(request.command);
                // Between the question and now the process may have ended, and its number be another's.
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
                let grace = Duration::from_millis(grace_millis).min(LONGEST_GRACE);
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
        if self.options.foreground {
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
            // It went away, or could not be bound: it has not started.
            self.release(&name, number);
        }
        bound.map(|_| ())
    }

    /// Says what was granted, and hears how it is bound; whether the command may start.
    fn bound(self: &Arc<Self>, caller: &mut Caller, granted: Granted) -> io::Result<bool> {
        let name = granted.name.clone();
        self.watch_share(&name);
        say(&mut caller.writer, &Answer::Granted(Box::new(granted)))?;
        let confined = self.confine(&name, caller.main);
        caller.reader.get_mut().until = Instant::now() + BINDING;
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

    /// A share now, or later for one who would rather wait.
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
        self.sweep(&mut state);
        let (name, why) = match self.try_once(&mut state, caller, request, &ask) {
            Ok(granted) => return Ok(Ok(granted)),
            Err((Some(name), why)) if request.wait && why.reason.can_be_waited_for() => (name, why),
            Err((_, why)) => return Ok(Err(why)),
        };
        // What would not fit an empty machine is not worth waiting for.
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

    /// Whether a process sees a region, or is in the cgroup of a share.
    fn is_inside(&self, main: Identity) -> bool {
        let limits = self.home.region_at().join(partage_region::LIMITS);
        let seen = limits
            .strip_prefix("/")
            .map(|limits| Path::new("/proc").join(main.pid.to_string()).join("root").join(limits));
        let cgroups = fs::read_to_string(format!("/proc/{}/cgroup", main.pid)).unwrap_or_default();
        seen.is_ok_and(|limits| limits.exists())
            || cgroups.contains(&format!("/{}", self.home.cgroup_prefix()))
    }

    /// A share right now, or the name it would have and why not.
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
            state = self.changed.wait_timeout(state, GLANCE).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes back a share that nobody fetched.
    fn give_back(self: &Arc<Self>, name: &str) {
        let number = self.state().shares.get(name).map(|live| live.number);
        if let Some(number) = number {
            self.release(name, number);
        }
    }
}

/// Whether nobody listens any more.
fn is_gone(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok() && !fds[0].revents().is_empty()
}
