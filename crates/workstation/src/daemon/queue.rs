//! Requests that wait for capacity. The oldest is tried first; a later one that fits does not wait for it.

use super::{Daemon, State};
use crate::users::Who;
use crate::wire::Granted;
use partage_core::model::PodAsk;
use partage_enforce::refusal::Refusal;
use partage_host::process::Identity;
use std::sync::Arc;

/// A request that waits.
pub(super) struct Ticket {
    pub(super) number: u64,
    pub(super) name: String,
    pub(super) who: Who,
    pub(super) main: Identity,
    pub(super) ask: PodAsk,
    pub(super) command: Vec<String>,
    pub(super) since: u64,
    /// Why it does not fit yet.
    pub(super) why: Refusal,
    /// Its share, until the request's thread takes it.
    pub(super) granted: Option<Granted>,
}

impl Daemon {
    /// Grants shares to the requests that fit now.
    pub(super) fn grant_waiting(self: &Arc<Self>, state: &mut State) {
        // Granting calls this again, which must find no requests.
        let mut waiting = std::mem::take(&mut state.queue);
        for ticket in waiting.iter_mut().filter(|ticket| ticket.granted.is_none()) {
            if !ticket.main.lives() {
                continue;
            }
            let given =
                self.give(state, &ticket.name, &ticket.who, ticket.main, &ticket.ask, &ticket.command);
            match given {
                Ok(granted) => ticket.granted = Some(granted),
                Err(why) => ticket.why = why,
            }
        }
        state.queue = waiting;
    }
}
