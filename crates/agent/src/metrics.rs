//! Metrics for Prometheus, and the server that exposes them.
//!
//! ```text
//!  native       partage_…, strict OpenMetrics
//!  compat       the metric names of replaced systems
//!  text_format  the Prometheus text format that precedes OpenMetrics
//!  serve        /metrics, /healthz and /readyz over HTTP or HTTPS
//! ```

mod compat;
mod native;
mod serve;
mod text_format;

use crate::api_server::ApiServer;
use crate::readiness::Readiness;
use crate::report::NodeReport;
use crate::settings::MetricsSettings;
use partage_enforce::metrics;
use partage_serve::NotReady;
use serve::{MetricsServer, token_auth};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Interval between attempts to bind an address that is in use.
const BIND_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Renders a report as OpenMetrics text.
pub(crate) fn render(report: NodeReport) -> String {
    metrics::render(move |to| {
        native::write(&report, to)?;
        compat::write(&report, to)
    })
}

/// Serves metrics and probes until stopped.
pub(crate) async fn run_server(
    readiness: Arc<Readiness>,
    cluster: ApiServer,
    settings: MetricsSettings,
    stop: CancellationToken,
) {
    let node = cluster.node.name().clone();
    let auth = token_auth(move |token| {
        let cluster = cluster.clone();
        async move { cluster.client.token_may_get(&token, "/metrics").await }
    });
    while !stop.is_cancelled() {
        let (source, probed, node) = (Arc::clone(&readiness), Arc::clone(&readiness), node.clone());
        let report = move || match source.state() {
            Some(state) => NodeReport::collect(&state),
            None => NodeReport::empty(&node),
        };
        let served = async {
            let server = MetricsServer::bind(&settings, Arc::clone(&auth)).await?;
            tracing::info!(address = %server.address(), anonymous = settings.anonymous, "serving metrics");
            let is_ready = move || probed.check().map_err(|error| NotReady::new(error.to_string()));
            server.run(report, is_ready, stop.clone()).await;
            std::io::Result::Ok(())
        };
        if let Err(error) = served.await {
            tracing::error!(address = %settings.address, %error, "cannot serve metrics, retrying");
            stop.run_until_cancelled(tokio::time::sleep(BIND_RETRY_INTERVAL)).await;
        }
    }
}

#[cfg(test)]
mod tests;
