//! When a marker is due.
//!
//! A marker after every launch would double the number of driver calls. So one follows after a number of launches, the
//! *stride*, which adapts until markers are about half a millisecond of work apart. A marker also follows the last launch
//! before a thread or the stream waits.

use super::marker_page::{MarkerMethod, StreamWords};
use super::streams::StreamKey;
use partage_region::markers::MarkerValue;

/// Work between two markers in nanoseconds that the stride aims at.
const PERIOD_NS: u64 = 500_000;
/// Most launches between two markers.
const MAX_STRIDE: u32 = 4096;
/// Markers whose launches are remembered: more than may be in a stream.
const REMEMBERED_MARKERS: usize = 32;
/// Launches after which a marker costs little, however short they are.
pub(super) const CHEAP_STRIDE: u32 = 32;
/// Least time between two markers of fewer launches: then they cost less than a hundredth of the program's time.
pub(super) const MIN_SPACING_NS: u64 = 100_000;

/// State of a stream that changes with its markers.
#[derive(Default)]
pub(super) struct MarkerPacing {
    pub(super) key: Option<StreamKey>,
    pub(super) context: usize,
    pub(super) words: Option<StreamWords>,
    pub(super) method: MarkerMethod,
    pub(super) stride: u32,
    /// Launches since the last marker that did not pass unmarked.
    pub(super) launches: u32,
    /// Launches that were allowed to pass without a marker.
    pub(super) allowed: u32,
    /// Whether a boundary precedes the next launch.
    pub(super) needs_begin: bool,
    pub(super) last_marker_at: u64,
    pub(super) last_boundary_at: u64,
    /// Marker and time of the last observation of a busy stream.
    pub(super) observed: Option<(MarkerValue, u64)>,
    /// Launches before each of the last markers, by the marker's number.
    pub(super) launches_before: [u64; REMEMBERED_MARKERS],
    pub(super) total_launches: u64,
    /// Measured nanoseconds of one launch; zero if it is not known.
    pub(super) launch_time: u64,
    /// Nanoseconds that a launch took at most recently: decides how many may pass without a marker.
    pub(super) longest_launch: u64,
}

impl MarkerPacing {
    /// Records a boundary without asking the GPU, which has nothing to do in this stream.
    pub(super) fn begin_after_boundary_of_idle_stream(&mut self) {
        if let Some(words) = &self.words {
            let value = words.words.issued().next(true);
            words.words.set_issued(value);
            words.words.set_settled(value);
            self.needs_begin = true;
        }
    }

    /// Returns whether launches take so long that a marker after each costs little, or may do so.
    pub(super) fn is_long(&self) -> bool {
        self.longest_launch == 0 || self.longest_launch >= MIN_SPACING_NS
    }

    /// Returns the time between markers; zero if it is not known.
    pub(super) fn period(&self) -> u64 {
        self.launch_time.saturating_mul(self.stride.into())
    }

    /// Returns the number of launches before a marker, which must be one of the last.
    pub(super) fn launches_until(&self, marker: MarkerValue) -> u64 {
        self.launches_before[marker.number() as usize % REMEMBERED_MARKERS]
    }

    pub(super) fn record_marker(&mut self, value: MarkerValue, now: u64) {
        self.total_launches += u64::from(self.launches);
        self.launches = 0;
        self.last_marker_at = now;
        self.launches_before[value.number() as usize % REMEMBERED_MARKERS] = self.total_launches;
    }

    /// Measures how long launches take while the stream is busy.
    pub(super) fn observe(&mut self, words: &StreamWords, now: u64) {
        let busy = words.words.outstanding() > 0 && !words.words.is_at_boundary();
        let passed = words.words.passed();
        let Some((before, since)) = self.observed.filter(|_| busy) else {
            self.observed = busy.then_some((passed, now));
            self.observe_idle(words, now);
            return;
        };
        let markers = passed.number().wrapping_sub(before.number());
        let launches = self.launches_until(passed).saturating_sub(self.launches_until(before));
        if markers >= REMEMBERED_MARKERS as u64 {
            self.observed = Some((passed, now));
        } else if let Some(measured) = now.saturating_sub(since).checked_div(launches) {
            self.launch_time = match self.launch_time {
                0 => measured,
                before if measured > before => before + (measured - before) / 4,
                before => before - (before - measured) / 4,
            };
            self.longest_launch = measured.max(self.longest_launch - self.longest_launch / 16);
            words.words.set_period(self.period());
            self.observed = Some((passed, now));
        }
    }

    /// Notes that the launches before the last marker were short, if the stream has run dry soon after it: a program
    /// that launches too slowly to keep a stream busy gets few markers, too.
    pub(super) fn observe_idle(&mut self, words: &StreamWords, now: u64) {
        let most = now.saturating_sub(self.last_marker_at);
        if self.launch_time == 0 && words.words.outstanding() == 0 && most < MIN_SPACING_NS {
            self.launch_time = most.max(1);
            self.longest_launch = self.launch_time;
            words.words.set_period(self.period());
        }
    }

    /// Chooses the number of launches until the next marker.
    pub(super) fn adapt_stride(&mut self) {
        let most = match self.longest_launch {
            0 => 1,
            time => u32::try_from(PERIOD_NS / time).unwrap_or(MAX_STRIDE).clamp(1, MAX_STRIDE),
        };
        self.stride = (self.stride * 2).min(most);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use partage_region::markers::StreamMarkers;

    const MICROSECOND: u64 = 1_000;

    /// Plays a stream: puts markers, and lets them pass.
    struct Stream {
        state: MarkerPacing,
        words: StreamWords,
    }

    impl Stream {
        fn new() -> Self {
            let words = StreamWords::unregistered(Box::leak(Box::new(StreamMarkers::unused())));
            Self { state: MarkerPacing { words: Some(words), stride: 1, ..MarkerPacing::default() }, words }
        }

        /// Launches kernels and puts a marker behind them.
        fn put(&mut self, launches: u32, now: u64) -> MarkerValue {
            let value = self.words.words.issued().next(false);
            self.words.words.set_issued(value);
            self.state.launches = launches;
            self.state.record_marker(value, now);
            value
        }

        fn observe(&mut self, now: u64) {
            let words = self.words;
            self.state.observe(&words, now);
        }

        fn pass(&self, marker: MarkerValue) {
            self.words.words.set_settled(marker);
        }
    }

    #[test]
    fn stride_doubles_until_markers_are_half_a_millisecond_apart() {
        let stride = |longest_launch| {
            let mut state = MarkerPacing { stride: 1, longest_launch, ..MarkerPacing::default() };
            (0..20).for_each(|_| state.adapt_stride());
            state.stride
        };
        assert_eq!([0, 20 * MICROSECOND, 400 * MICROSECOND, 10_000 * MICROSECOND].map(stride), [1, 25, 1, 1]);
        assert_eq!(stride(1), MAX_STRIDE);
        let mut state =
            MarkerPacing { stride: 64, longest_launch: 100 * MICROSECOND, ..MarkerPacing::default() };
        state.adapt_stride();
        assert_eq!(state.stride, 5, "it falls at once");
    }

    #[test]
    fn busy_stream_measures_its_launches() {
        let mut stream = Stream::new();
        let markers: Vec<MarkerValue> = (0..12).map(|number| stream.put(10, number * MICROSECOND)).collect();
        stream.observe(100 * MICROSECOND);
        assert_eq!(stream.state.period(), 0, "nothing has passed yet");
        stream.pass(markers[1]);
        stream.observe(500 * MICROSECOND);
        assert_eq!(stream.state.launch_time, 20 * MICROSECOND, "twenty launches in 400 us");
        // It changes by a quarter of the difference.
        stream.pass(markers[2]);
        stream.observe(900 * MICROSECOND);
        assert_eq!(stream.state.launch_time, 25 * MICROSECOND);
        stream.pass(markers[3]);
        stream.observe(950 * MICROSECOND);
        assert_eq!(stream.state.launch_time, 20 * MICROSECOND);
        // The longest one counts for some time.
        assert_eq!(stream.state.longest_launch, 37_500);
        assert!(!stream.state.is_long());
    }

    #[test]
    fn stream_that_runs_dry_at_once_has_short_launches() {
        let mut stream = Stream::new();
        let marker = stream.put(1, 100 * MICROSECOND);
        stream.pass(marker);
        assert!(stream.state.is_long(), "not known");
        stream.observe(400 * MICROSECOND);
        assert!(stream.state.is_long(), "it may have run for all the time");
        let marker = stream.put(1, 400 * MICROSECOND);
        stream.pass(marker);
        stream.observe(410 * MICROSECOND);
        assert!(!stream.state.is_long());
        assert_eq!(stream.state.launch_time, 10 * MICROSECOND);
    }

    #[test]
    fn boundary_of_an_idle_stream_needs_no_driver() {
        let mut stream = Stream::new();
        stream.state.begin_after_boundary_of_idle_stream();
        assert!(stream.state.needs_begin && stream.words.words.is_at_boundary());
        assert_eq!(stream.words.words.outstanding(), 0);
    }
}
