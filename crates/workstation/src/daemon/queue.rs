//! The queue of requests that wait for capacity. The oldest is tried first; a later one that fits does not wait for it.

use super::{Daemon, DaemonState};
use crate::protocol::GrantedShare;
use crate::users::UserIdentity;
use partage_core::model::PodAsk;
use partage_enforce::refusal::Refusal;
use partage_host::process::ProcessIdentity;
use std::sync::Arc;

/// A request that waits for capacity.
pub(super) struct QueuedRequest {
    pub(super) number: u64,
    pub(super) name: String,
    pub(super) who: UserIdentity,
    pub(super) main: ProcessIdentity,
    pub(super) ask: PodAsk,
    pub(super) command: Vec<String>,
    pub(super) since: u64,
    /// Why it does not fit yet.
    pub(super) why: Refusal,
    /// The granted share, until the thread of the request takes it.
    pub(super) granted: Option<GrantedShare>,
}

impl Daemon {
    /// Grants shares to the requests that fit now.
    pub(super) fn grant_waiting(self: &Arc<Self>, state: &mut DaemonState) {
        // Granting calls this function again, which must find no requests.
        let mut waiting = std::mem::take(&mut state.queue);
        for ticket in waiting.iter_mut().filter(|ticket| ticket.granted.is_none()) {
            if !ticket.main.is_running() {
                continue;
            }
            let given =
                self.grant_share(state, &ticket.name, &ticket.who, ticket.main, &ticket.ask, &ticket.command);
            match given {
                Ok(granted) => ticket.granted = Some(granted),
                Err(why) => ticket.why = why,
            }
        }
        state.queue = waiting;
    }
}
