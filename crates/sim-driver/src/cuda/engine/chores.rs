//! What the host does in the streams' order, and what waits for it.

use super::super::device::Device;
use super::super::entry;
use super::super::{CudaError, pools};
use super::{Engine, Op, Outstanding, Submitted, Track, Until, Work};
use crate::state::now;
use std::panic::AssertUnwindSafe;
use std::sync::MutexGuard;
use std::time::Duration;

/// A thread of a program that waits looks this often whether something it cannot be told of has changed.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// How long to wait for another GPU, or for a word in memory, before looking at it again.
const POLL: u64 = 50_000;

/// Work of the host that a stream has come to.
pub(in super::super) struct Chore {
    track: usize,
    number: u64,
    work: Option<Work>,
    /// The program's own function, for the driver's own thread.
    call: bool,
}

impl Engine {
    /// A chore at that position: for now, if nothing comes before it.
    pub(super) fn chore(
        &mut self,
        track: usize,
        position: u64,
        number: u64,
        work: Work,
        call: bool,
    ) -> Submitted {
        let chore = Chore { track, number, work: Some(work), call };
        let alone = self.tracks[track].outstanding.is_empty();
        if alone {
            self.loose.add();
        }
        self.tracks[track].outstanding.push_back(Outstanding { number, key: None });
        let reached = self.lane.as_mut().is_none_or(|lane| {
            lane.served() >= position || lane.refresh().is_ok_and(|served| served >= position)
        });
        if alone && reached && !call {
            return Submitted::Now(chore);
        }
        self.put_off(position, chore);
        Submitted::Done
    }

    /// It is done when the GPU has come to the position.
    fn put_off(&mut self, position: u64, chore: Chore) {
        let key = (position, self.next_chore);
        self.next_chore += 1;
        if let Some(own) = self.tracks[chore.track].outstanding.back_mut() {
            own.key = Some(key);
        }
        self.chores.insert(key, chore);
    }

    /// A chore is done: what waited for it goes on.
    fn finish(&mut self, track: usize, number: u64, call: bool) {
        let own = &mut self.tracks[track];
        // It was the first: chores of a track are done one after the other.
        if own.outstanding.front().is_some_and(|first| first.number == number) {
            own.outstanding.pop_front();
        }
        if own.outstanding.is_empty() {
            self.loose.remove();
        }
        if call && matches!(own.held, Some(Until::Call)) {
            own.held = None;
            self.loose.remove();
        }
        self.go_on();
    }

    /// Lets every track go on that nothing holds any more.
    pub(super) fn go_on(&mut self) {
        if !self.loose.any() && self.queued == 0 {
            return;
        }
        loop {
            let mut moved = false;
            for index in 0..self.tracks.len() {
                if self.is_released(index) && self.tracks[index].held.take().is_some() {
                    self.loose.remove();
                    moved = true;
                }
                moved |= self.place_queue(index);
            }
            if !moved {
                return;
            }
        }
    }

    fn is_released(&mut self, index: usize) -> bool {
        // Taken out for the look: an event may have to look at the engine.
        let Some(until) = self.tracks[index].held.take() else { return false };
        let released = match &until {
            Until::Call => false,
            Until::True(condition) => condition(),
            Until::Settled(others) => {
                others.iter().all(|&(track, number)| self.tracks[track].settled() >= number)
            }
            Until::Event(event, ticket) => match event.position(*ticket, self) {
                // It lies on this GPU: what follows can be placed behind it already.
                Some(position) => {
                    self.set_tail(index, position);
                    true
                }
                None => event.is_over(*ticket, Some(self)),
            },
        };
        self.tracks[index].held = Some(until);
        released
    }

    /// Places what waits in the track's queue, as far as it goes.
    fn place_queue(&mut self, index: usize) -> bool {
        let mut moved = false;
        while self.tracks[index].held.is_none() {
            let Some((op, mut others)) = self.tracks[index].queue.pop_front() else { break };
            others.retain(|&(track, number)| self.tracks[track].settled() < number);
            if !others.is_empty() {
                self.tracks[index].queue.push_front((op, Vec::new()));
                self.hold(index, Until::Settled(others));
                break;
            }
            self.queued -= 1;
            moved = true;
            // If the GPU is lost instead, whoever waits finds out.
            if let Ok(Submitted::Now(chore)) = self.place(index, op, false) {
                // Nobody is here to do it at once: it is the first of its track and goes to the next who looks.
                self.put_off(0, chore);
            }
        }
        moved
    }

    /// A chore that can be done now.
    fn ready(&mut self, calls: bool) -> Option<Chore> {
        let served = match self.lane.as_mut().map(|lane| lane.refresh()) {
            Some(Ok(served)) => served,
            // Nothing will be served any more: chores end without having been done, so that nobody waits for them.
            Some(Err(_)) | None => u64::MAX,
        };
        let first = |track: &Track| track.outstanding.front().and_then(|first| first.key);
        let can_be_done = |key: &(u64, u64)| {
            key.0 <= served && self.chores.get(key).is_some_and(|chore| calls || !chore.call)
        };
        let key = self.tracks.iter().filter_map(first).filter(can_be_done).min()?;
        self.chores.remove(&key)
    }

    /// When the next chore or hold is worth a look; nothing if there is none.
    fn next_look(&mut self) -> Option<u64> {
        let first = self.chores.keys().next().map(|&(position, _)| position);
        let chore = first.map(|position| match self.lane.as_mut().map(|lane| lane.not_before(position)) {
            Some(Ok(Some(instant))) => instant,
            // It can be done; another thread does what comes before it.
            _ => now() + POLL,
        });
        let polled =
            self.tracks.iter().any(|track| matches!(track.held, Some(Until::True(_) | Until::Event(..))));
        [chore, polled.then(|| now() + POLL)].into_iter().flatten().min()
    }
}

/// Does a chore.
pub(super) fn run(device: &'static Device, mut chore: Chore) {
    if let Some(work) = chore.work.take()
        && !device.state.is_lost(device.gpu)
    {
        // Whatever goes wrong in it, nobody must wait for it for ever.
        let _ = std::panic::catch_unwind(AssertUnwindSafe(work));
    }
    let mut engine = device.engine();
    engine.finish(chore.track, chore.number, chore.call);
    drop(engine);
    device.changed.notify_all();
}

/// Sees to it that the driver's own thread is there and looks.
pub(super) fn wake(device: &'static Device, engine: &mut Engine) {
    if !engine.worker {
        let thread = std::thread::Builder::new().name("cuda-EvtHandlr".into());
        engine.worker = spawn_without_signals(|| thread.spawn(move || work(device)).is_ok());
    }
    device.changed.notify_all();
}

/// Signals are for the program's own threads.
fn spawn_without_signals(spawn: impl FnOnce() -> bool) -> bool {
    // SAFETY: a C struct of integers, for which zeros are a value.
    let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = unsafe { std::mem::zeroed() };
    // SAFETY: fills the set it is given.
    unsafe { libc::sigfillset(&mut all) };
    // SAFETY: both sets live through the call; the thread's mask is put back below.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before) };
    let spawned = spawn();
    // SAFETY: the mask from before.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    spawned
}

/// The driver's own thread: does chores as the GPU comes to them.
fn work(device: &'static Device) {
    entry::enter_driver_thread();
    // Nobody else does its work: whatever went wrong, it goes on.
    while std::panic::catch_unwind(AssertUnwindSafe(|| work_on(device))).is_err() {}
}

fn work_on(device: &'static Device) {
    let mut engine = device.engine();
    loop {
        engine.go_on();
        if let Some(chore) = engine.ready(true) {
            drop(engine);
            run(device, chore);
            engine = device.engine();
            continue;
        }
        engine = pause(device, engine);
    }
}

/// Waits until there may be something to do.
fn pause<'a>(device: &'static Device, mut engine: MutexGuard<'a, Engine>) -> MutexGuard<'a, Engine> {
    match engine.next_look() {
        Some(instant) => {
            let wait = Duration::from_nanos(instant.saturating_sub(now()).max(1));
            match device.changed.wait_timeout(engine, wait) {
                Ok((engine, _)) => engine,
                Err(poisoned) => poisoned.into_inner().0,
            }
        }
        None => device.changed.wait(engine).unwrap_or_else(|poisoned| poisoned.into_inner()),
    }
}

impl Device {
    /// Waits until everything submitted to the track before now is done.
    pub(in super::super) fn sync(&'static self, track: usize) -> Result<(), CudaError> {
        entry::outside_driver_thread()?;
        let mut engine = self.engine();
        engine.lane()?.check()?;
        let submitted = engine.submit_to(track, Op::Host(Box::new(|| ())))?;
        let number = engine.entered(track);
        if let Submitted::Now(chore) = submitted {
            engine.finish(chore.track, chore.number, false);
            drop(engine);
            self.changed.notify_all();
        } else {
            self.help_until(engine, |engine| engine.is_settled(track, number))?;
        }
        pools::at_sync(self);
        Ok(())
    }

    /// Does what there is to do, and waits, until it is done.
    pub(in super::super) fn help_until<'a>(
        &'static self,
        mut engine: MutexGuard<'a, Engine>,
        mut done: impl FnMut(&mut Engine) -> bool,
    ) -> Result<(), CudaError> {
        entry::outside_driver_thread()?;
        loop {
            engine.go_on();
            if done(&mut engine) {
                return Ok(());
            }
            engine.lane()?.check()?;
            if let Some(chore) = engine.ready(false) {
                drop(engine);
                run(self, chore);
                engine = self.engine();
                continue;
            }
            let soon = engine.next_look();
            match soon {
                Some(instant) => {
                    drop(engine);
                    crate::state::wait_until(instant);
                    engine = self.engine();
                }
                None => {
                    // Another thread does it, or nothing that can be waited for does: look now and then.
                    engine = match self.changed.wait_timeout(engine, LOOK_AGAIN) {
                        Ok((engine, _)) => engine,
                        Err(poisoned) => poisoned.into_inner().0,
                    };
                }
            }
        }
    }
}
