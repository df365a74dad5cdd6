//! A stream with markers: lets launches pass, and puts markers behind them.
#![allow(unsafe_code)]

use super::marker_pacing::{CHEAP_STRIDE, MIN_SPACING_NS, MarkerPacing};
use super::marker_page::{StreamWords, any_events, beside_captures};
use super::streams::{LEGACY_STREAM, StreamKey, current_context, lock};
use super::{Throttle, capture, ticks};
use crate::driver::cuda as driver;
use crate::hook::StreamVariant;
use crate::process::Process;
use partage_driver_api::cuda::*;
use partage_region::clock;
use std::sync::Mutex;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};

/// A stream with markers.
pub(super) struct MarkedStream {
    /// The key, in parts. The stream is zero while the entry is not used.
    stream: AtomicUsize,
    thread: AtomicUsize,
    gpu: AtomicUsize,
    /// Launches that may still pass without a marker.
    unmarked_left: AtomicU32,
    /// Changes with every marker and every launch that is not a mere pass.
    epoch: AtomicU32,
    /// The processor's counter at the last launch.
    last_launch: AtomicU64,
    state: Mutex<MarkerPacing>,
}

/// The work that is queued in a stream.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StreamQueue {
    /// Markers that have not passed.
    pub(super) markers: u64,
    /// Whether the stream waits at a boundary.
    pub(super) is_at_boundary: bool,
    /// Estimated nanoseconds of the work before these markers; zero if it is not known.
    pub(super) work: u64,
    /// Estimated nanoseconds between two markers; zero if they are not known.
    pub(super) period: u64,
}

/// A launch that passed without a marker.
#[derive(Clone, Copy)]
pub(super) struct UnmarkedPass(u32);

impl MarkedStream {
    pub(super) fn unused() -> Self {
        Self {
            stream: AtomicUsize::new(0),
            thread: AtomicUsize::new(0),
            gpu: AtomicUsize::new(0),
            unmarked_left: AtomicU32::new(0),
            epoch: AtomicU32::new(0),
            last_launch: AtomicU64::new(0),
            state: Mutex::default(),
        }
    }

    #[inline]
    pub(super) fn is(&self, key: StreamKey) -> bool {
        self.stream.load(Relaxed) == key.stream
            && self.thread.load(Relaxed) == key.thread
            && self.gpu.load(Relaxed) == key.gpu
    }

    pub(super) fn set(&self, throttle: &Throttle, key: StreamKey, context: CUcontext, words: StreamWords) {
        let mut state = lock(&self.state);
        *state = MarkerPacing {
            key: Some(key),
            context: context.addr(),
            words: Some(words),
            stride: 1,
            ..MarkerPacing::default()
        };
        if !throttle.is_idle(key) {
            // What the stream waits for is not known: its first marked work is preceded by a boundary.
            state.begin_after_boundary_of_idle_stream();
        }
        self.unmarked_left.store(0, Relaxed);
        self.gpu.store(key.gpu, Relaxed);
        self.thread.store(key.thread, Relaxed);
        self.stream.store(key.stream, Release);
    }

    /// Makes the entry unused. Returns its words.
    pub(super) fn retire(&self) -> Option<StreamWords> {
        self.stream.store(0, Release);
        self.unmarked_left.store(0, Relaxed);
        self.bump_epoch();
        let mut state = lock(&self.state);
        let words = state.words.take();
        if let Some(words) = &words {
            words.words.close();
            if !state.method.can_mark_boundaries() {
                // No thread queries its events any more.
                words.words.set_settled(words.words.issued());
            }
        }
        *state = MarkerPacing::default();
        words
    }

    fn bump_epoch(&self) {
        self.epoch.fetch_add(1, Release);
    }

    /// Lets a launch pass that no marker needs to follow, if the stream has work, and a marker is not due.
    #[inline]
    pub(super) fn pass_unmarked(&self, launches: u32) -> Option<UnmarkedPass> {
        let left = self.unmarked_left.load(Relaxed);
        if left <= launches {
            return None;
        }
        let now = ticks::read();
        if ticks::is_pause(self.last_launch.load(Relaxed), now) {
            return None;
        }
        // Two concurrent threads may count one launch: this only affects when the next marker is put.
        self.unmarked_left.store(left - launches, Relaxed);
        self.last_launch.store(now, Relaxed);
        Some(UnmarkedPass(self.epoch.load(Acquire)))
    }

    /// Returns whether a marker was put since the launch passed.
    #[inline]
    pub(super) fn is_outdated(&self, pass: UnmarkedPass) -> bool {
        self.epoch.load(Acquire) != pass.0
    }

    /// Records that a launch follows the last marker.
    #[cold]
    pub(super) fn reopen(&self) {
        let state = lock(&self.state);
        if let Some(words) = &state.words
            && !words.words.is_open()
        {
            words.words.open(clock::monotonic_ns());
        }
        self.unmarked_left.store(0, Relaxed);
    }

    /// Returns what is queued in the stream.
    pub(super) fn queue(&self) -> StreamQueue {
        let mut state = lock(&self.state);
        let Some(words) = state.words else { return StreamQueue::default() };
        state.method.poll(&words);
        let markers = words.words.outstanding();
        let launches = state.total_launches.saturating_sub(state.launches_until(words.words.passed()));
        StreamQueue {
            markers,
            is_at_boundary: words.words.is_at_boundary(),
            work: if markers == 0 { 0 } else { state.launch_time.saturating_mul(launches) },
            period: state.period(),
        }
    }

    /// Prepares the stream for a launch.
    pub(super) fn open(&self, process: &Process, throttle: &Throttle) {
        let now = clock::monotonic_ns();
        ticks::calibrate(now);
        let mut state = lock(&self.state);
        let Some(words) = state.words else { return };
        self.bump_epoch();
        state.method.poll(&words);
        let idle = words.words.outstanding() == 0;
        let paused = ticks::is_pause(self.last_launch.load(Relaxed), ticks::read());
        if state.needs_begin {
            state.needs_begin = false;
            let value = words.words.issued();
            let (key, context) = (state.key, state.context);
            let method = &mut state.method;
            let put = |key: StreamKey| {
                let put = || method.put_begun(&words, key.handle(), key.variant, value);
                throttle.with_markable_stream(key, context, put)
            };
            if key.and_then(put) != Some(true) {
                // Waiting counts as work.
                let value = value.next(false);
                words.words.set_issued(value);
                words.words.set_settled(value);
            }
        }
        if idle && (paused || !words.words.is_open()) {
            state.stride = 1;
            state.observed = None;
            words.words.open(now);
            ring_if_unwatched(process, self.gpu.load(Relaxed));
        } else if !words.words.is_open() {
            words.words.open(now);
        }
    }

    /// Counts a launch, and puts a marker behind it if one is due.
    pub(super) fn finish_launch(&self, throttle: &Throttle, launches: u32) {
        let now = clock::monotonic_ns();
        self.last_launch.store(ticks::read(), Relaxed);
        let mut state = lock(&self.state);
        let Some(words) = state.words else { return };
        // Those that passed without this lock.
        let passed = state.allowed.saturating_sub(self.unmarked_left.swap(0, Relaxed));
        state.allowed = 0;
        state.launches = state.launches.saturating_add(passed).saturating_add(launches);
        state.observe(&words, now);
        // Work behind a boundary does not run yet, so that it needs few markers.
        let waits = words.words.is_at_boundary() && words.words.outstanding() > 0;
        let spaced =
            !waits && (state.is_long() || now.saturating_sub(state.last_marker_at) >= MIN_SPACING_NS);
        let due = state.launches >= state.stride && (spaced || state.launches >= CHEAP_STRIDE);
        if due && self.put_marker(throttle, &mut state, now, false) {
            state.adapt_stride();
        }
        let goal = if spaced { state.stride } else { state.stride.max(CHEAP_STRIDE) };
        // Behind a boundary, every launch looks whether it has passed.
        let allowed = if waits { 0 } else { goal.saturating_sub(state.launches) };
        state.allowed = allowed;
        self.unmarked_left.store(allowed, Relaxed);
        if state.launches == 0 && allowed <= 1 {
            // No launch passes without a marker, so none follows the last one.
            words.words.close();
        }
    }

    /// Puts a marker into the stream. Returns false if that is not possible now.
    fn put_marker(&self, throttle: &Throttle, state: &mut MarkerPacing, now: u64, boundary: bool) -> bool {
        let Some(words) = state.words else { return false };
        let Some(key) = state.key else { return false };
        let before = words.words.issued();
        let value = before.next(boundary);
        let method = &mut state.method;
        let put = throttle.with_markable_stream(key, state.context, || {
            words.words.set_issued(value);
            method.put_passed(&words, key.handle(), key.variant, value)
        });
        match put {
            Some(true) => {
                self.bump_epoch();
                state.record_marker(value, now);
                true
            }
            Some(false) => {
                words.words.set_issued(before);
                false
            }
            None => false,
        }
    }

    /// Puts a marker behind the last launch, before a thread waits. Unless `always`, the marker is left to a later call
    /// if the last one was put only just now.
    pub(super) fn flush(&self, throttle: &Throttle, always: bool) {
        let mut state = lock(&self.state);
        let Some(words) = state.words else { return };
        if !words.words.is_open() || state.key.is_none_or(StreamKey::is_of_another_thread) {
            return;
        }
        let now = clock::monotonic_ns();
        if !always && !state.is_long() && now.saturating_sub(state.last_marker_at) < MIN_SPACING_NS {
            return;
        }
        self.unmarked_left.store(0, Relaxed);
        state.allowed = 0;
        if self.put_marker(throttle, &mut state, now, false) {
            words.words.close();
        }
    }

    /// Records that the stream waits for something other than kernels from here on.
    pub(super) fn put_boundary(&self, throttle: &Throttle) {
        let mut state = lock(&self.state);
        let Some(words) = state.words else { return };
        if state.needs_begin || !state.method.can_mark_boundaries() {
            return;
        }
        let now = clock::monotonic_ns();
        self.unmarked_left.store(0, Relaxed);
        state.allowed = 0;
        if words.words.outstanding() == 0 && !words.words.is_open() {
            state.begin_after_boundary_of_idle_stream();
            return;
        }
        if now.saturating_sub(state.last_boundary_at) < 2 * MIN_SPACING_NS {
            // It waits often: waiting counts as work, so that markers cost little.
            return;
        }
        state.last_boundary_at = now;
        if self.put_marker(throttle, &mut state, now, true) {
            words.words.close();
            state.needs_begin = true;
        }
    }

    /// Returns what changes when anything is launched into the stream.
    pub(super) fn launch_stamp(&self) -> (u32, u32) {
        (self.epoch.load(Acquire), self.unmarked_left.load(Acquire))
    }

    /// Records that a thread waits for all work of the stream.
    pub(super) fn begin_wait(&self) {
        if let Some(words) = &lock(&self.state).words {
            words.words.add_waiting_thread();
        }
    }

    /// Records that a thread no longer waits; if all work has ended, that the stream is idle, unless anything was
    /// launched since `stamp`.
    pub(super) fn end_wait(&self, stamp: (u32, u32), has_ended: bool) {
        let state = lock(&self.state);
        let Some(words) = state.words else { return };
        words.words.remove_waiting_thread();
        if !has_ended || self.launch_stamp() != stamp {
            return;
        }
        self.unmarked_left.store(0, Relaxed);
        let issued = words.words.issued();
        words.words.close();
        words.words.set_settled(issued);
    }

    pub(super) fn is_in_context(&self, context: CUcontext) -> bool {
        lock(&self.state).context == context.addr()
    }
}

/// Wakes the turn scheduler, unless it polls this container at short intervals anyway.
fn ring_if_unwatched(process: &Process, gpu: usize) {
    if !process.region.limits(gpu).is_watched() {
        let doorbell = process.region.gpu_account(gpu).doorbell();
        doorbell.fetch_add(1, Release);
        partage_region::futex::wake(doorbell, u32::MAX);
    }
}

impl Throttle {
    /// Puts markers behind the last launches of all streams on a GPU.
    pub(super) fn flush(&self, gpu: usize) {
        for stream in self.streams.matching(|stream| stream.gpu.load(Relaxed) == gpu) {
            stream.flush(self, true);
        }
    }

    /// Queries the events of all streams on a GPU. Returns whether some have not passed.
    pub(super) fn poll_events(&self, gpu: usize) -> bool {
        any_events()
            && self
                .streams
                .matching(|stream| stream.gpu.load(Relaxed) == gpu)
                .into_iter()
                .fold(false, |any, stream| (stream.queue().markers > 0) | any)
    }

    /// Returns whether a stream has nothing to do, as far as that can be found out without invalidating a capture.
    fn is_idle(&self, key: StreamKey) -> bool {
        let _captures = self.captures.lock_out();
        if key.stream == LEGACY_STREAM && self.is_capturing() {
            return false;
        }
        let answer = beside_captures(|| match key.variant {
            // SAFETY: the stream is the application's, which is about to launch into it.
            StreamVariant::Legacy => unsafe { driver::cuStreamQuery(key.handle()) },
            // SAFETY: the stream is the application's, which is about to launch into it.
            StreamVariant::PerThread => unsafe { driver::cuStreamQuery_ptsz(key.handle()) },
        });
        answer == CUDA_SUCCESS
    }

    /// Calls `put` if the calling thread may put a marker into a stream now: it is not captured, and its context can
    /// be made current. Captures cannot begin meanwhile.
    fn with_markable_stream(
        &self,
        key: StreamKey,
        context: usize,
        put: impl FnOnce() -> bool,
    ) -> Option<bool> {
        if key.is_of_another_thread() {
            return None;
        }
        let captures = self.captures.lock_out();
        if self.is_capturing() {
            // The legacy stream is a barrier for streams that may be captured.
            let barrier = key.stream == LEGACY_STREAM;
            if barrier || capture::is_stream_captured(key.handle(), key.variant) {
                return None;
            }
        }
        let put = in_context(context, put);
        drop(captures);
        put
    }
}

/// Calls a function with a context current.
fn in_context(context: usize, call: impl FnOnce() -> bool) -> Option<bool> {
    let current = current_context().map_or(0, |current| current.addr());
    if current == context {
        return Some(call());
    }
    // SAFETY: the context exists: before it is destroyed, its streams are forgotten.
    let pushed = unsafe { driver::cuCtxPushCurrent_v2(std::ptr::with_exposed_provenance_mut(context)) };
    if pushed != CUDA_SUCCESS {
        return None;
    }
    let result = call();
    let mut popped = std::ptr::null_mut();
    // SAFETY: the pointer is to a local variable; the context was pushed above.
    let _ = unsafe { driver::cuCtxPopCurrent_v2(&mut popped) };
    Some(result)
}
