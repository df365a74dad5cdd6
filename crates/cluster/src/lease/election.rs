//! The decisions of a leader election, without I/O and without a clock.
//!
//! The lease is one object that every candidate reads and writes with compare-and-swap (its resource version). Safety
//! rests on two rules that use each process's own clock only; timestamps that another process wrote are never compared:
//!
//! - A holder leads until `renew_deadline` after it *sent* the last write that succeeded.
//! - A candidate takes the lease of a holder that it has *seen unchanged* for the holder's whole `lease_duration`.
//!
//! A candidate cannot see a write before it was sent, so it waits at least from that moment, and `renew_deadline` is
//! shorter than `lease_duration`. The ratio of the two bounds how much faster one clock may run than the other.

use super::ElectionTiming;
use std::time::Duration;

/// The longest lease that a candidate waits for, whatever duration the lease has. [`ElectionTiming`] accepts no longer one.
pub(super) const MAX_LEASE_DURATION: Duration = Duration::from_secs(600);

/// Time on this process's monotonic clock.
pub(super) type LocalTime = Duration;

/// The lease as it was read or written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LeaseRecord {
    /// Empty for a lease that was released.
    pub(super) holder: String,
    /// Absent if the holder did not write a usable one.
    pub(super) duration: Option<Duration>,
    /// How often the lease has changed hands.
    pub(super) transitions: i32,
    /// The resource version: it changes with every write.
    pub(super) version: String,
}

/// The next action of a candidate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NextStep {
    /// Do nothing until this time, then ask for the next action again.
    Wait(LocalTime),
    /// Read the lease, because its last known state may be out of date.
    Read,
    /// Create the lease with this candidate as its holder.
    Create,
    /// Write this candidate as holder, if the lease still has this version.
    Write {
        /// The version that must not have changed.
        version: String,
        /// The number of transitions to write.
        transitions: i32,
        /// Whether leadership begins; otherwise it is renewed.
        is_acquisition: bool,
    },
}

/// A period of leadership. No other candidate leads before its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LeaseTerm {
    pub(super) number: i32,
    pub(super) deadline: LocalTime,
}

/// The state of one candidate in an election, without I/O: the caller performs each [`NextStep`] and reports its
/// result.
#[derive(Clone, Debug)]
pub(super) struct Election {
    identity: String,
    timing: ElectionTiming,
    /// Added to every wait of this candidate, so that candidates do not act in the same moment.
    jitter: Duration,
    /// Whether `observed` is what the last answer showed. Otherwise the lease is read first.
    is_current: bool,
    /// The lease as last seen, and when this version was first seen. `None`: it does not exist.
    observed: Option<(LeaseRecord, LocalTime)>,
    /// Until then, a holder that was seen before the lease was deleted may lead.
    deleted_holder_until: LocalTime,
    next_attempt: LocalTime,
    term: Option<LeaseTerm>,
}

impl Election {
    pub(super) fn new(identity: String, timing: ElectionTiming, jitter: Duration) -> Election {
        Election {
            identity,
            timing,
            jitter,
            is_current: false,
            observed: None,
            deleted_holder_until: LocalTime::ZERO,
            next_attempt: LocalTime::ZERO,
            term: None,
        }
    }

    /// Returns the current term. A caller at another moment compares its deadline with the clock itself.
    pub(super) fn term(&self, now: LocalTime) -> Option<LeaseTerm> {
        self.term.filter(|term| now < term.deadline)
    }

    /// Returns the holder that was seen last.
    pub(super) fn holder(&self) -> Option<&str> {
        self.observed.as_ref().map(|(record, _)| record.holder.as_str()).filter(|holder| !holder.is_empty())
    }

    /// Returns the next action.
    pub(super) fn next(&mut self, now: LocalTime) -> NextStep {
        self.term = self.term(now);
        if now < self.next_attempt {
            let deadline = self.term.map_or(LocalTime::MAX, |term| term.deadline);
            return NextStep::Wait(self.next_attempt.min(deadline));
        }
        if !self.is_current {
            return NextStep::Read;
        }
        match &self.observed {
            None if now >= self.deleted_holder_until => NextStep::Create,
            Some((record, since)) if self.may_take(record, *since, now) => {
                let is_acquisition = self.term.is_none();
                let transitions = record.transitions.saturating_add(i32::from(is_acquisition));
                NextStep::Write { version: record.version.clone(), transitions, is_acquisition }
            }
            _ => {
                // Another candidate holds it: read it again later.
                self.is_current = false;
                self.next_attempt = now + self.timing.retry_interval() + self.jitter;
                NextStep::Wait(self.next_attempt)
            }
        }
    }

    /// Returns whether this candidate may write itself into the lease.
    fn may_take(&self, record: &LeaseRecord, since: LocalTime, now: LocalTime) -> bool {
        record.holder.is_empty() || record.holder == self.identity || now >= since + self.expiry_wait(record)
    }

    /// Returns how long a holder must have been silent: what it wrote itself, and at least this candidate's own setting.
    fn expiry_wait(&self, record: &LeaseRecord) -> Duration {
        let own = self.timing.lease_duration();
        record.duration.map_or(own, |written| written.clamp(own, MAX_LEASE_DURATION))
    }

    /// Notes the answer to [`NextStep::Read`], with the moment at which it arrived.
    pub(super) fn was_read(&mut self, now: LocalTime, record: Option<LeaseRecord>) {
        self.is_current = true;
        let Some(record) = record else {
            // A deleted lease protects no holder: stop leading, and wait until the last one that was seen has stopped, too.
            self.term = None;
            if let Some((record, since)) = self.observed.take()
                && record.holder != self.identity
                && !record.holder.is_empty()
            {
                self.deleted_holder_until = since + self.expiry_wait(&record);
            }
            return;
        };
        if record.holder != self.identity {
            self.term = None;
        }
        let since = match &self.observed {
            Some((known, since)) if known.version == record.version => *since,
            _ => now,
        };
        self.observed = Some((record, since));
    }

    /// Notes that [`NextStep::Create`] or [`NextStep::Write`], sent at `sent`, succeeded with this record.
    pub(super) fn was_written(&mut self, sent: LocalTime, now: LocalTime, record: LeaseRecord) {
        let number = record.transitions;
        self.observed = Some((record, now));
        self.is_current = true;
        self.next_attempt = now + self.timing.retry_interval();
        self.term = Some(LeaseTerm { number, deadline: sent + self.timing.renew_deadline() });
        self.term = self.term(now);
    }

    /// Notes that a write failed because the lease has another version, exists already or no longer exists.
    pub(super) fn was_refused(&mut self, now: LocalTime) {
        self.is_current = false;
        self.next_attempt = now;
    }

    /// Notes that a request failed, and that a write may have happened nevertheless.
    pub(super) fn has_failed(&mut self, now: LocalTime) {
        self.is_current = false;
        self.next_attempt = now + self.timing.retry_interval() + self.jitter;
    }

    /// Ends leadership, and returns the version under which the lease can be given back.
    pub(super) fn release(&mut self) -> Option<String> {
        self.term = None;
        self.is_current = false;
        let (record, _) = self.observed.as_ref()?;
        (record.holder == self.identity).then(|| record.version.clone())
    }
}

#[cfg(test)]
mod tests;
