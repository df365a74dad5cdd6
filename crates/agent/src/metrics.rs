//! What is told to Prometheus, and to whom.
//!
//! ```text
//!  ours    partage_…, strict OpenMetrics       serve        HTTP or HTTPS, and health
//!  theirs  the names of replaced systems       access       who may read
//!  classic the text for older readers          connections  how long, how many, how much
//! ```

mod access;
mod classic;
mod connections;
mod ours;
mod serve;
mod theirs;

pub(crate) use access::Access;
pub(crate) use serve::Server;

use crate::report::Report;
use partage_host::openmetrics;

/// A report as OpenMetrics text.
pub(crate) fn text(report: Report) -> String {
    openmetrics::text(move |to| {
        ours::tell(&report, to)?;
        theirs::tell(&report, to)
    })
}

#[cfg(test)]
mod tests;
