//! What was told, how often, and what of it is written.

use super::Severity;
use jiff::Timestamp;
use partage_core::model::PodId;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The same within this time is one event.
const SAME: Duration = Duration::from_secs(600);
/// When the count of one event is first written, and how often from then on.
const FIRST_COUNTED: Duration = Duration::from_secs(5);
const COUNTED: Duration = Duration::from_secs(60);
/// A server that has just started forbids what it allows a moment later: it is asked again after this, and longer.
const REFUSED: Duration = Duration::from_secs(3);
const MOST_REFUSALS: u32 = 4;
/// Events that are remembered at once.
const MOST: usize = 256;

/// One thing that was told. Equal ones are one event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Told {
    /// The pod; absent for the node.
    pub(super) pod: Option<PodId>,
    pub(super) severity: Severity,
    pub(super) reason: &'static str,
    pub(super) note: String,
}

/// Something that is to be written.
#[derive(Clone, Debug)]
pub(super) struct Due {
    pub(super) told: Told,
    /// Tells this event from all others.
    pub(super) number: u64,
    /// It has never been written.
    pub(super) fresh: bool,
    pub(super) count: u32,
    pub(super) first: Timestamp,
    pub(super) last: Timestamp,
}

/// Nothing is to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// Until something is told.
    ForMore,
    /// Until then, or until something is told.
    Until(Instant),
}

#[derive(Debug)]
struct Entry {
    due: Due,
    begun: Instant,
    /// The count as it was last written, and when.
    written: Option<(u32, Instant)>,
    refusals: u32,
    not_before: Instant,
}

impl Entry {
    fn is_settled(&self) -> bool {
        self.written.is_some_and(|(count, _)| count == self.due.count)
    }

    /// When it is to be written next; `None` where all of it is.
    fn when(&self) -> Option<Instant> {
        let when = match self.written {
            None => self.begun,
            Some(_) if self.is_settled() => return None,
            Some((1, at)) => at + FIRST_COUNTED,
            Some((_, at)) => at + COUNTED,
        };
        Some(when.max(self.not_before))
    }
}

#[derive(Debug, Default)]
pub(super) struct Book {
    /// By number.
    entries: HashMap<u64, Entry>,
    last_number: u64,
}

impl Book {
    /// False where there is no room for it.
    pub(super) fn tell(&mut self, told: Told, now: Instant) -> bool {
        let clock = Timestamp::now();
        let same = |entry: &&mut Entry| entry.due.told == told && now.duration_since(entry.begun) < SAME;
        if let Some(entry) = self.entries.values_mut().find(same) {
            entry.due.count = entry.due.count.saturating_add(1);
            entry.due.last = clock;
            return true;
        }
        self.entries.retain(|_, entry| !entry.is_settled() || now.duration_since(entry.begun) < SAME);
        if self.entries.len() >= MOST {
            // Room for news: what is written can be written once more as another event.
            self.entries.retain(|_, entry| !entry.is_settled());
        }
        if self.entries.len() >= MOST {
            return false;
        }
        // The clock may stand still or go back.
        let number = u64::try_from(clock.as_nanosecond()).unwrap_or(0).max(self.last_number + 1);
        self.last_number = number;
        let due = Due { told, number, fresh: true, count: 1, first: clock, last: clock };
        let entry = Entry { due, begun: now, written: None, refusals: 0, not_before: now };
        self.entries.insert(number, entry);
        true
    }

    /// What is to be written now, the oldest first.
    pub(super) fn next(&self, now: Instant) -> Result<Due, Wait> {
        let waiting = self.entries.values().filter_map(|entry| Some((entry.when()?, entry)));
        match waiting.min_by_key(|(when, entry)| (*when, entry.due.number)) {
            None => Err(Wait::ForMore),
            Some((when, _)) if when > now => Err(Wait::Until(when)),
            Some((_, entry)) => Ok(Due { fresh: entry.written.is_none(), ..entry.due.clone() }),
        }
    }

    /// Whether everything that was told can be seen, however often it was told.
    pub(super) fn all_written(&self) -> bool {
        self.entries.values().all(|entry| entry.written.is_some())
    }

    /// This much of it is written.
    pub(super) fn written(&mut self, due: &Due, now: Instant) {
        if let Some(entry) = self.entries.get_mut(&due.number) {
            // A new event says nothing of how often: that is a second writing.
            let count = if due.fresh { 1 } else { due.count };
            entry.written = Some((count, now));
        }
    }

    /// The server did not take it. It is given up after a few times.
    pub(super) fn refused(&mut self, due: &Due, now: Instant) {
        let Some(entry) = self.entries.get_mut(&due.number) else { return };
        entry.refusals += 1;
        entry.not_before = now + REFUSED * entry.refusals;
        if entry.refusals >= MOST_REFUSALS {
            self.entries.remove(&due.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(note: &str) -> Told {
        Told { pod: None, severity: Severity::Warning, reason: "GpuLost", note: note.into() }
    }

    #[test]
    fn the_same_is_counted_and_written_once_a_minute() {
        let (mut book, start) = (Book::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(book.next(start).unwrap_err(), Wait::ForMore);
        for second in 0..5 {
            assert!(book.tell(told("a"), at(second)));
        }
        let due = book.next(at(5)).unwrap();
        assert!(due.fresh && due.count == 5);
        book.written(&due, at(5));
        assert_eq!(book.next(at(6)).unwrap_err(), Wait::Until(at(10)));
        book.tell(told("a"), at(7));
        let due = book.next(at(10)).unwrap();
        assert!(!due.fresh && due.count == 6);
        // Told once more while it is being written.
        book.tell(told("a"), at(10));
        book.written(&due, at(11));
        assert_eq!(book.next(at(12)).unwrap_err(), Wait::Until(at(71)));
        let due = book.next(at(71)).unwrap();
        assert_eq!(due.count, 7);
        book.written(&due, at(71));

        book.tell(told("a"), at(601));
        let due = book.next(at(602)).unwrap();
        assert!(due.fresh && due.count == 1, "after ten minutes it is another event");
    }

    #[test]
    fn different_ones_are_written_in_order() {
        let (mut book, start) = (Book::default(), Instant::now());
        for note in ["a", "b", "c"] {
            book.tell(told(note), start);
        }
        let mut notes = Vec::new();
        while let Ok(due) = book.next(start) {
            notes.push(due.told.note.clone());
            match notes.len() {
                1 => book.refused(&due, start),
                _ => book.written(&due, start),
            }
        }
        assert_eq!(notes, ["a", "b", "c"]);
        assert!(!book.all_written());

        let mut now = start;
        for _ in 1..MOST_REFUSALS {
            now += REFUSED * MOST_REFUSALS;
            let due = book.next(now).unwrap();
            assert_eq!(due.told.note, "a", "what was refused is tried again, behind the others");
            book.refused(&due, now);
        }
        assert_eq!(book.next(now + SAME).unwrap_err(), Wait::ForMore);
        assert!(book.all_written(), "or given up");
    }

    #[test]
    fn it_never_grows_beyond_its_bound() {
        let (mut book, start) = (Book::default(), Instant::now());
        let taken = (0..2 * MOST).filter(|number| book.tell(told(&number.to_string()), start)).count();
        assert_eq!(taken, MOST, "nothing was written, so nothing can be forgotten");
        let due = book.next(start).unwrap();
        book.written(&due, start);
        assert!(book.tell(told("news"), start));
        assert_eq!(book.entries.len(), MOST);
    }
}
