//! Reports a driver that does not respond.

use crate::state::{NodeState, lock};
use partage_cluster::Severity;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Maximum time without a response of the driver: with a broken card the kernel can wait for it forever.
const DRIVER_TIMEOUT: Duration = Duration::from_secs(30);

/// Reports, once, that the driver does not respond: from then on the health of the GPUs is unknown.
pub(crate) async fn run(state: Arc<NodeState>, stop: CancellationToken) {
    let mut is_reported = false;
    while stop.run_until_cancelled(tokio::time::sleep(DRIVER_TIMEOUT / 3)).await.is_some() {
        let silent_for = lock(&state.last_poll).elapsed();
        if silent_for >= DRIVER_TIMEOUT && !is_reported {
            let seconds = silent_for.as_secs();
            tracing::error!(seconds, "the driver does not respond: check the kernel log (dmesg) for XIDs");
            let note = format!(
                "the driver has not responded for {seconds} s, and the health of the GPUs is unknown; containers continue to run; check the \
                 kernel log (dmesg) for XIDs, and reboot the node if the driver does not recover"
            );
            state.node_event(Severity::Warning, "DriverNotResponding", &note);
        }
        is_reported = silent_for >= DRIVER_TIMEOUT;
    }
}
