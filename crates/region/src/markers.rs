//! Stream markers: which of a container's streams have unfinished work on a GPU, as the GPU itself reports it.
//!
//! The shim puts *markers* into a stream: writes of a word that the GPU performs in stream order, after the work that
//! was launched before. So anyone who reads the words knows how far the stream is, without asking the process that
//! launched the work, which may be descheduled or stopped.
//!
//! A marker's value is its number, and whether a *boundary* follows: something in the stream that waits for anything
//! but kernels, such as an event, a value in memory or a host function. After a boundary, the first kernel is preceded by
//! a write of the same value to `begun`.
//!
//! ```text
//! stream   kernel kernel ·marker 5· kernel ·marker 6, boundary· wait ·begin 6· kernel ·marker 7·
//! passed 4                         5                           6                               7
//! begun                                                              6
//!          └───────── occupied ───────────────────────────────┘     └─────── occupied ───────┘
//! ```
//!
//! Markers lie on pages of their own, because a driver registers whole pages, and pinned pages must not hold words that
//! a forked child needs. A process takes a page per GPU.

use crate::mmap::number;
use crate::protocol::{MARKER_PAGE_COUNT, MARKER_PAGE_SIZE, STREAMS_PER_PAGE};
use core::mem::offset_of;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, AtomicU64};

/// The part of `usage` that follows the slots.
#[repr(C, align(4096))]
#[derive(Debug)]
pub(crate) struct MarkerArea {
    /// The owner of each page: see [`PageOwner`]. Zero for a free page.
    pub(crate) directory: MarkerDirectory,
    pub(crate) pages: [MarkerPage; MARKER_PAGE_COUNT],
}

#[repr(C, align(4096))]
#[derive(Debug)]
pub(crate) struct MarkerDirectory(pub(crate) [AtomicU32; MARKER_PAGE_COUNT]);

/// Bytes of the directory that hold entries.
pub(crate) const DIRECTORY_LENGTH: usize = MARKER_PAGE_COUNT * size_of::<u32>();

/// The streams of one process on one GPU.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct MarkerPage {
    /// Number of streams, from the first on, that were ever used.
    used: AtomicU32,
    _reserved: [AtomicU32; 15],
    streams: [StreamMarkers; STREAMS_PER_PAGE],
}

/// Number, in the upper bits of a marker's value.
const NUMBER_SHIFT: u32 = 1;
/// Bit of a marker's value: a boundary follows.
const BOUNDARY: u64 = 1;
/// The largest number of a marker; numbers wrap.
const NUMBER_MASK: u64 = u64::MAX >> NUMBER_SHIFT;

/// The value of a marker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MarkerValue(pub u64);

impl MarkerValue {
    /// Returns the value of the marker with the next number.
    #[must_use]
    pub fn next(self, boundary: bool) -> Self {
        let number = (self.0 >> NUMBER_SHIFT).wrapping_add(1);
        Self(number << NUMBER_SHIFT | if boundary { BOUNDARY } else { 0 })
    }

    /// Returns the number of the marker.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0 >> NUMBER_SHIFT
    }

    /// Returns whether a boundary follows the marker.
    #[must_use]
    pub fn is_boundary(self) -> bool {
        self.0 & BOUNDARY != 0
    }

    /// Returns the marker that comes later in the stream. Numbers wrap, so the difference decides.
    fn later(self, other: Self) -> Self {
        if self.is_before(other) { other } else { self }
    }

    /// Returns whether the marker comes before another one in the stream.
    #[must_use]
    pub fn is_before(self, other: Self) -> bool {
        let ahead = other.numbers_after(self);
        ahead != 0 && ahead <= NUMBER_MASK / 2
    }

    /// Returns the difference of the two numbers.
    fn numbers_after(self, other: Self) -> u64 {
        self.number().wrapping_sub(other.number()) & NUMBER_MASK
    }
}

/// The words of one stream. The GPU writes the first two, the process the others.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct StreamMarkers {
    /// The last marker that the GPU has passed.
    passed: AtomicU64,
    /// The last boundary behind which work has begun.
    begun: AtomicU64,
    /// The last marker that was put into the stream.
    issued: AtomicU64,
    /// A marker that the process knows to have passed, because it waited for the stream.
    settled: AtomicU64,
    /// Time of the first launch after the stream was idle, on the monotonic clock, while launches may follow the last
    /// marker; zero while the last marker covers all launches.
    open_since: AtomicU64,
    /// Nanoseconds that passed between the last two markers while the stream was busy.
    period: AtomicU64,
    /// Number of threads that wait for all work of the stream: what follows the last marker runs as long as they do.
    waiting_threads: AtomicU64,
    _reserved: [AtomicU64; 1],
}

impl StreamMarkers {
    /// Returns the words for a stream of a GPU whose launches are not marked.
    #[must_use]
    pub const fn unused() -> Self {
        Self {
            passed: AtomicU64::new(0),
            begun: AtomicU64::new(0),
            issued: AtomicU64::new(0),
            settled: AtomicU64::new(0),
            open_since: AtomicU64::new(0),
            period: AtomicU64::new(0),
            waiting_threads: AtomicU64::new(0),
            _reserved: [const { AtomicU64::new(0) }; 1],
        }
    }

    /// Returns the address of the word that the GPU writes when it passes a marker.
    #[must_use]
    pub fn passed_address(&self) -> u64 {
        self.passed.as_ptr().addr() as u64
    }

    /// Returns the address of the word that the GPU writes when it begins work behind a boundary.
    #[must_use]
    pub fn begun_address(&self) -> u64 {
        self.begun.as_ptr().addr() as u64
    }

    /// Returns the last marker that was put into the stream.
    #[inline]
    #[must_use]
    pub fn issued(&self) -> MarkerValue {
        MarkerValue(self.issued.load(Relaxed))
    }

    /// Records that a marker is about to be put into the stream.
    pub fn set_issued(&self, value: MarkerValue) {
        self.issued.store(value.0, Release);
    }

    /// Returns the last marker that is known to have passed.
    #[inline]
    #[must_use]
    pub fn passed(&self) -> MarkerValue {
        MarkerValue(self.passed.load(Acquire)).later(MarkerValue(self.settled.load(Acquire)))
    }

    /// Records that a marker has passed. The word is not the GPU's: the GPU's own write must not be overwritten.
    pub fn set_settled(&self, value: MarkerValue) {
        self.settled.store(value.0, Release);
    }

    /// Returns the number of markers that have not passed.
    #[inline]
    #[must_use]
    pub fn outstanding(&self) -> u64 {
        let (passed, issued) = (self.passed(), self.issued());
        if passed.is_before(issued) { issued.numbers_after(passed) } else { 0 }
    }

    /// Returns whether the stream waits at a boundary: its next work has not begun.
    #[inline]
    #[must_use]
    pub fn is_at_boundary(&self) -> bool {
        let passed = self.passed();
        passed.is_boundary() && self.begun.load(Acquire) != passed.0
    }

    /// Records that launches may follow the last marker from now on.
    pub fn open(&self, now: u64) {
        self.open_since.store(now.max(1), Release);
    }

    /// Records that the last marker covers all launches.
    pub fn close(&self) {
        self.open_since.store(0, Release);
    }

    /// Returns whether launches may follow the last marker.
    #[inline]
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open_since.load(Relaxed) != 0
    }

    /// Records that a thread waits for all work of the stream.
    pub fn add_waiting_thread(&self) {
        self.waiting_threads.fetch_add(1, AcqRel);
    }

    /// Records that a thread no longer waits.
    pub fn remove_waiting_thread(&self) {
        // The words may have been cleared for another stream meanwhile.
        let _ = self.waiting_threads.fetch_update(AcqRel, Relaxed, |count| count.checked_sub(1));
    }

    /// Sets the time between markers.
    pub fn set_period(&self, nanoseconds: u64) {
        self.period.store(nanoseconds, Relaxed);
    }

    /// Clears the words for another stream.
    fn clear(&self) {
        let Self { passed, begun, issued, settled, open_since, period, waiting_threads, _reserved: _ } = self;
        for word in [open_since, passed, begun, issued, settled, period, waiting_threads] {
            word.store(0, Release);
        }
    }

    /// Adds the stream's state to a sample.
    pub fn sample(&self, sample: &mut ActivitySample) {
        sample.add(&StreamState {
            passed: MarkerValue(self.passed.load(Acquire)),
            begun: self.begun.load(Acquire),
            issued: self.issued(),
            settled: MarkerValue(self.settled.load(Acquire)),
            open_since: self.open_since.load(Acquire),
            period: self.period.load(Relaxed),
            is_awaited: self.waiting_threads.load(Relaxed) != 0,
        });
    }
}

impl MarkerPage {
    /// Takes the words of a stream; `None` if all are in use. The caller serializes calls for one page.
    #[must_use]
    pub fn stream(&self, index: usize) -> Option<&StreamMarkers> {
        let stream = self.streams.get(index)?;
        stream.clear();
        // At most 63, so it fits.
        self.used.fetch_max(index as u32 + 1, AcqRel);
        Some(stream)
    }

    /// Returns the address of the page, to be registered with the driver.
    #[must_use]
    pub fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    pub(crate) fn streams(&self) -> impl Iterator<Item = &StreamMarkers> {
        let used = (self.used.load(Acquire) as usize).min(STREAMS_PER_PAGE);
        self.streams.iter().take(used)
    }

    /// Clears the page for another process.
    pub(crate) fn clear(&self) {
        for stream in &self.streams {
            stream.clear();
        }
        self.used.store(0, Release);
    }
}

/// The owner of a marker page: a process slot, and the GPU that its markers are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageOwner {
    pub(crate) slot: usize,
    pub(crate) gpu: usize,
}

impl PageOwner {
    /// Returns the entry of the directory.
    pub(crate) fn pack(self) -> u32 {
        // Slots and GPUs are below 1 << 16: see `protocol`.
        (self.gpu as u32) << 16 | (self.slot as u32 + 1)
    }

    /// Reads an entry of the directory; `None` for a free page.
    pub(crate) fn unpack(word: u32) -> Option<Self> {
        let slot = (word & 0xffff) as usize;
        Some(Self { slot: slot.checked_sub(1)?, gpu: (word >> 16) as usize })
    }
}

/// Words of one stream as read at one time. Any of them may be forged.
#[derive(Clone, Copy, Debug, Default)]
struct StreamState {
    passed: MarkerValue,
    begun: u64,
    issued: MarkerValue,
    settled: MarkerValue,
    open_since: u64,
    period: u64,
    is_awaited: bool,
}

/// Whether a container's streams occupied a GPU at one time, according to their markers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ActivitySample {
    /// Whether some stream has begun, unfinished work for certain: a marker behind it has not passed, or a thread waits
    /// for it.
    pub occupied: bool,
    /// Whether some stream has passed all markers, and launches may have followed the last one.
    pub has_tail: bool,
    /// Longest time between two markers of the streams with a tail: their tails last about as long.
    pub tail_period: u64,
    /// Time at which the streams that have something to do began, on the monotonic clock; zero if none has.
    pub since: u64,
    /// A number that changes when any marker passes or any work begins behind a boundary.
    pub progress: u64,
}

impl ActivitySample {
    fn add(&mut self, stream: &StreamState) {
        let passed = stream.passed.later(stream.settled);
        self.progress = self.progress.wrapping_add(passed.0).wrapping_add(stream.begun);
        if passed.is_boundary() && stream.begun != passed.0 {
            return;
        }
        let has_tail = stream.open_since != 0;
        if passed.is_before(stream.issued) || (has_tail && stream.is_awaited) {
            self.occupied = true;
        } else if has_tail {
            self.has_tail = true;
            self.tail_period = self.tail_period.max(stream.period);
        } else {
            return;
        }
        if has_tail {
            self.since = if self.since == 0 { stream.open_since } else { self.since.min(stream.open_since) };
        }
    }

    /// Adds another page's streams.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.occupied |= other.occupied;
        self.has_tail |= other.has_tail;
        self.tail_period = self.tail_period.max(other.tail_period);
        self.progress = self.progress.wrapping_add(other.progress);
        self.since = match (self.since, other.since) {
            (0, since) | (since, 0) => since,
            (one, two) => one.min(two),
        };
    }

    /// Reads the streams of a page from its bytes.
    pub(crate) fn of_page(bytes: &[u8; MARKER_PAGE_SIZE]) -> Self {
        let mut sample = Self::default();
        let used = (number(bytes, offset_of!(MarkerPage, used), 4) as usize).min(STREAMS_PER_PAGE);
        for index in 0..used {
            let at = offset_of!(MarkerPage, streams) + index * size_of::<StreamMarkers>();
            let word = |offset: usize| number(bytes, at + offset, 8);
            sample.add(&StreamState {
                passed: MarkerValue(word(offset_of!(StreamMarkers, passed))),
                begun: word(offset_of!(StreamMarkers, begun)),
                issued: MarkerValue(word(offset_of!(StreamMarkers, issued))),
                settled: MarkerValue(word(offset_of!(StreamMarkers, settled))),
                open_since: word(offset_of!(StreamMarkers, open_since)),
                period: word(offset_of!(StreamMarkers, period)),
                is_awaited: word(offset_of!(StreamMarkers, waiting_threads)) != 0,
            });
        }
        sample
    }
}

// The daemon and the shim of a container may be built years apart: the offset of every word is part of the contract.
const _: () = {
    assert!(size_of::<MarkerDirectory>() == MARKER_PAGE_SIZE && DIRECTORY_LENGTH <= MARKER_PAGE_SIZE);
    assert!(size_of::<MarkerPage>() == MARKER_PAGE_SIZE && offset_of!(MarkerPage, streams) == 64);
    assert!(size_of::<StreamMarkers>() == 64 && offset_of!(StreamMarkers, passed) == 0);
    assert!(offset_of!(StreamMarkers, begun) == 8 && offset_of!(StreamMarkers, issued) == 16);
    assert!(offset_of!(StreamMarkers, settled) == 24 && offset_of!(StreamMarkers, open_since) == 32);
    assert!(offset_of!(StreamMarkers, period) == 40 && offset_of!(StreamMarkers, waiting_threads) == 48);
    assert!(offset_of!(MarkerArea, pages) == MARKER_PAGE_SIZE);
};

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays a stream: the process's side and the GPU's side, one step at a time.
    struct Stream(StreamMarkers);

    impl Stream {
        fn issue(&self, boundary: bool) -> MarkerValue {
            let value = self.0.issued().next(boundary);
            self.0.set_issued(value);
            value
        }

        fn pass(&self, value: MarkerValue) {
            self.0.passed.store(value.0, Release);
        }

        fn begin(&self, value: MarkerValue) {
            self.0.begun.store(value.0, Release);
        }

        fn sample(&self) -> (bool, bool) {
            let mut sample = ActivitySample::default();
            self.0.sample(&mut sample);
            (sample.occupied, sample.has_tail)
        }
    }

    #[test]
    fn stream_is_occupied_from_launch_to_last_marker() {
        let stream = Stream(StreamMarkers::unused());
        assert_eq!(stream.sample(), (false, false));
        stream.0.open(7);
        assert_eq!(stream.sample(), (false, true));
        let (first, second) = (stream.issue(false), stream.issue(false));
        assert_eq!(stream.sample(), (true, false));
        stream.pass(first);
        assert_eq!((stream.sample(), stream.0.outstanding()), ((true, false), 1));
        stream.pass(second);
        assert_eq!(stream.sample(), (false, true), "launches may have followed the last marker");
        stream.0.close();
        assert_eq!(stream.sample(), (false, false));
    }

    #[test]
    fn stream_that_waits_at_a_boundary_is_not_occupied() {
        let stream = Stream(StreamMarkers::unused());
        stream.0.open(1);
        let boundary = stream.issue(true);
        let last = stream.issue(false);
        assert_eq!(stream.sample(), (true, false));
        stream.pass(boundary);
        assert!(stream.0.is_at_boundary());
        assert_eq!(stream.sample(), (false, false));
        stream.begin(boundary);
        assert_eq!(stream.sample(), (true, false));
        stream.0.close();
        stream.pass(last);
        assert_eq!(stream.sample(), (false, false));
    }

    #[test]
    fn settled_marker_ends_the_work_before_the_gpu_reports_it() {
        let stream = Stream(StreamMarkers::unused());
        stream.0.open(1);
        let value = stream.issue(false);
        stream.0.close();
        stream.0.set_settled(value);
        assert_eq!((stream.sample(), stream.0.outstanding()), ((false, false), 0));
        stream.pass(value);
        assert_eq!(stream.0.passed(), value);
    }

    #[test]
    fn marker_numbers_wrap() {
        let last = MarkerValue(u64::MAX << NUMBER_SHIFT);
        let next = last.next(true);
        assert_eq!((next.number(), next.is_boundary()), (0, true));
        assert!(last.is_before(next) && !next.is_before(last) && !next.is_before(next));
    }

    #[test]
    fn page_owner_survives_packing() {
        let owner = PageOwner { slot: 1023, gpu: 15 };
        assert_eq!(PageOwner::unpack(owner.pack()), Some(owner));
        assert_eq!(PageOwner::unpack(0), None);
    }

    #[test]
    fn bytes_and_words_of_a_page_give_the_same_sample() {
        let page = MarkerPage {
            used: AtomicU32::new(0),
            _reserved: [const { AtomicU32::new(0) }; 15],
            streams: [const { StreamMarkers::unused() }; STREAMS_PER_PAGE],
        };
        for (index, since) in [(0, 40), (2, 30)] {
            let stream = page.stream(index).unwrap();
            stream.open(since);
            stream.set_issued(MarkerValue::default().next(false));
        }
        let mut words = ActivitySample::default();
        page.streams().for_each(|stream| stream.sample(&mut words));
        // SAFETY: the page has no padding, and all its words are initialized.
        #[allow(unsafe_code)]
        let bytes = unsafe { &*std::ptr::from_ref(&page).cast::<[u8; MARKER_PAGE_SIZE]>() };
        assert_eq!(ActivitySample::of_page(bytes), words);
        assert!(words.occupied && words.since == 30);
    }
}
