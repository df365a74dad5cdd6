//! The queue of events: what occurred, how often, and how much of it is written.

use super::Severity;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Equal occurrences within this time are one event.
const SERIES_DURATION: Duration = Duration::from_secs(600);
/// When the count of an event is first updated.
const FIRST_COUNT_INTERVAL: Duration = Duration::from_secs(5);
/// How often the count of an event is updated afterwards.
const COUNT_INTERVAL: Duration = Duration::from_secs(60);
/// The delay after the first rejection, which grows linearly: an API server that has just started forbids what it allows
/// a moment later.
const REJECTION_DELAY: Duration = Duration::from_secs(3);
/// After this many rejections an event is given up.
const MAX_REJECTIONS: u32 = 4;
/// Events in the queue.
const MAX_EVENTS: usize = 256;

/// Something that occurred. Equal occurrences are one event.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Occurrence {
    pub(super) regarding: ObjectReference,
    pub(super) severity: Severity,
    pub(super) reason: &'static str,
    pub(super) note: String,
}

/// An event that is to be written now.
#[derive(Clone, Debug)]
pub(super) struct DueEvent {
    pub(super) occurrence: Occurrence,
    /// Distinguishes this event from all others.
    pub(super) number: u64,
    /// Whether it has never been written.
    pub(super) is_new: bool,
    pub(super) count: u32,
    pub(super) first: Timestamp,
    pub(super) last: Timestamp,
}

/// When to look at the queue again while nothing is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueueWait {
    /// After the next push.
    ForPush,
    /// At this moment, or after the next push.
    Until(Instant),
}

#[derive(Debug)]
struct QueuedEvent {
    due: DueEvent,
    begun: Instant,
    /// The count that was written last, and when.
    written: Option<(u32, Instant)>,
    rejections: u32,
    not_before: Instant,
}

impl QueuedEvent {
    fn is_settled(&self) -> bool {
        self.written.is_some_and(|(count, _)| count == self.due.count)
    }

    /// Returns when it is to be written next; `None` while everything is written.
    fn due_at(&self) -> Option<Instant> {
        let due_at = match self.written {
            None => self.begun,
            Some(_) if self.is_settled() => return None,
            Some((1, at)) => at + FIRST_COUNT_INTERVAL,
            Some((_, at)) => at + COUNT_INTERVAL,
        };
        Some(due_at.max(self.not_before))
    }
}

#[derive(Debug, Default)]
pub(super) struct EventQueue {
    by_number: HashMap<u64, QueuedEvent>,
    last_number: u64,
}

impl EventQueue {
    /// Adds an occurrence. Returns false if the queue is full.
    pub(super) fn push(&mut self, occurrence: Occurrence, now: Instant) -> bool {
        let clock = Timestamp::now();
        let is_same = |entry: &&mut QueuedEvent| {
            entry.due.occurrence == occurrence && now.duration_since(entry.begun) < SERIES_DURATION
        };
        if let Some(entry) = self.by_number.values_mut().find(is_same) {
            entry.due.count = entry.due.count.saturating_add(1);
            entry.due.last = clock;
            return true;
        }
        self.by_number
            .retain(|_, entry| !entry.is_settled() || now.duration_since(entry.begun) < SERIES_DURATION);
        if self.by_number.len() >= MAX_EVENTS {
            // Repetitions of what is written can become another event.
            self.by_number.retain(|_, entry| !entry.is_settled());
        }
        if self.by_number.len() >= MAX_EVENTS {
            return false;
        }
        // The clock may stand still or go back.
        let number = u64::try_from(clock.as_nanosecond()).unwrap_or(0).max(self.last_number + 1);
        self.last_number = number;
        let due = DueEvent { occurrence, number, is_new: true, count: 1, first: clock, last: clock };
        let entry = QueuedEvent { due, begun: now, written: None, rejections: 0, not_before: now };
        self.by_number.insert(number, entry);
        true
    }

    /// Returns the event that has been due for longest, or when to look again.
    pub(super) fn next(&self, now: Instant) -> Result<DueEvent, QueueWait> {
        let waiting = self.by_number.values().filter_map(|entry| Some((entry.due_at()?, entry)));
        match waiting.min_by_key(|(due_at, entry)| (*due_at, entry.due.number)) {
            None => Err(QueueWait::ForPush),
            Some((due_at, _)) if due_at > now => Err(QueueWait::Until(due_at)),
            Some((_, entry)) => Ok(DueEvent { is_new: entry.written.is_none(), ..entry.due.clone() }),
        }
    }

    /// Returns whether every event was written at least once or given up.
    pub(super) fn is_all_written(&self) -> bool {
        self.by_number.values().all(|entry| entry.written.is_some())
    }

    /// Records that an event was written.
    pub(super) fn written(&mut self, due: &DueEvent, now: Instant) {
        if let Some(entry) = self.by_number.get_mut(&due.number) {
            // A new event has no count: that is a second write.
            let count = if due.is_new { 1 } else { due.count };
            entry.written = Some((count, now));
        }
    }

    /// Delays an event that the API server rejected, or gives it up.
    pub(super) fn rejected(&mut self, due: &DueEvent, now: Instant) {
        let Some(entry) = self.by_number.get_mut(&due.number) else { return };
        entry.rejections += 1;
        entry.not_before = now + REJECTION_DELAY * entry.rejections;
        if entry.rejections >= MAX_REJECTIONS {
            self.by_number.remove(&due.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn occurrence(note: &str) -> Occurrence {
        Occurrence {
            regarding: ObjectReference { name: Some("node1".into()), ..ObjectReference::default() },
            severity: Severity::Warning,
            reason: "GpuUnhealthy",
            note: note.into(),
        }
    }

    #[test]
    fn repetitions_are_counted_and_written_once_a_minute() {
        let (mut queue, start) = (EventQueue::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(queue.next(start).unwrap_err(), QueueWait::ForPush);
        for second in 0..5 {
            assert!(queue.push(occurrence("a"), at(second)));
        }
        let due = queue.next(at(5)).unwrap();
        assert!(due.is_new && due.count == 5);
        queue.written(&due, at(5));
        assert_eq!(queue.next(at(6)).unwrap_err(), QueueWait::Until(at(10)));
        queue.push(occurrence("a"), at(7));
        let due = queue.next(at(10)).unwrap();
        assert!(!due.is_new && due.count == 6);
        // It occurs once more while it is being written.
        queue.push(occurrence("a"), at(10));
        queue.written(&due, at(11));
        assert_eq!(queue.next(at(12)).unwrap_err(), QueueWait::Until(at(71)));
        let due = queue.next(at(71)).unwrap();
        assert_eq!(due.count, 7);
        queue.written(&due, at(71));

        queue.push(occurrence("a"), at(601));
        let due = queue.next(at(602)).unwrap();
        assert!(due.is_new && due.count == 1, "after ten minutes it is another event");
    }

    #[test]
    fn same_note_about_another_object_is_another_event() {
        let (mut queue, start) = (EventQueue::default(), Instant::now());
        queue.push(occurrence("a"), start);
        let mut other = occurrence("a");
        other.regarding.name = Some("node2".into());
        queue.push(other, start);
        let first = queue.next(start).unwrap();
        queue.written(&first, start);
        let second = queue.next(start).unwrap();
        assert_eq!((first.count, second.count), (1, 1));
        assert_ne!(first.occurrence.regarding, second.occurrence.regarding);
    }

    #[test]
    fn rejected_event_is_retried_behind_others_and_given_up() {
        let (mut queue, start) = (EventQueue::default(), Instant::now());
        for note in ["a", "b", "c"] {
            queue.push(occurrence(note), start);
        }
        let mut notes = Vec::new();
        while let Ok(due) = queue.next(start) {
            notes.push(due.occurrence.note.clone());
            if notes.len() == 1 {
                queue.rejected(&due, start);
            } else {
                queue.written(&due, start);
            }
        }
        assert_eq!(notes, ["a", "b", "c"]);
        assert!(!queue.is_all_written());

        let mut now = start;
        for _ in 1..MAX_REJECTIONS {
            now += REJECTION_DELAY * MAX_REJECTIONS;
            let due = queue.next(now).unwrap();
            assert_eq!(due.occurrence.note, "a");
            queue.rejected(&due, now);
        }
        assert_eq!(queue.next(now + SERIES_DURATION).unwrap_err(), QueueWait::ForPush);
        assert!(queue.is_all_written(), "it was given up");
    }

    #[test]
    fn queue_is_bounded() {
        let (mut queue, start) = (EventQueue::default(), Instant::now());
        let accepted =
            (0..2 * MAX_EVENTS).filter(|number| queue.push(occurrence(&number.to_string()), start)).count();
        assert_eq!(accepted, MAX_EVENTS, "nothing was written, so nothing can be forgotten");
        let due = queue.next(start).unwrap();
        queue.written(&due, start);
        assert!(queue.push(occurrence("new"), start));
        assert_eq!(queue.by_number.len(), MAX_EVENTS);
    }
}
