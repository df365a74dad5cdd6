//! Metrics for Prometheus, and the server that exposes them.
//!
//! ```text
//!  ours     partage_…, strict OpenMetrics
//!  theirs   the metric names of replaced systems
//!  classic  the Prometheus text format that precedes OpenMetrics
//!  serve    /metrics, /healthz and /readyz over HTTP or HTTPS
//! ```

mod classic;
mod ours;
mod serve;
mod theirs;

pub(crate) use serve::{Server, token_auth};

use crate::report::Report;
use partage_enforce::metrics;

/// A report as OpenMetrics text.
pub(crate) fn text(report: Report) -> String {
    metrics::render(move |to| {
        ours::tell(&report, to)?;
        theirs::tell(&report, to)
    })
}

#[cfg(test)]
mod tests;
