//! Runs the workspace's tests: several test binaries at a time, and measures the duration of each test.
//!
//! `cargo test` runs one test binary after the other, and libtest on a stable compiler reports no durations. Most of
//! the time is spent waiting for a real Kubernetes, so binaries that wait run beside those that compute. Cargo builds,
//! libtest runs the tests and prints their results; a failure fails the run after everything has run.
//!
//! cargo-nextest is not used because it runs each test in its own process. Tests of one binary share expensive
//! resources in their process: compiled objects, the portable shim, a Kubernetes test bed. With a process per test,
//! each test would create its own.

mod binaries;
mod plan;
mod runner;
mod summary;
mod supervise;
mod timing;

pub use runner::{TestRunOptions, run};

use std::error::Error;
use std::io;

/// Why the tests could not be run to their end.
#[derive(Debug, thiserror::Error)]
pub enum TestRunError {
    /// Cargo did not build the tests; it has printed why.
    #[error("the tests could not be built: cargo ended with {0}")]
    Build(std::process::ExitStatus),
    /// Cargo printed a line that is not valid JSON.
    #[error("cargo's list of test binaries could not be read")]
    List(#[source] serde_json::Error),
    /// Cargo ended before it had listed everything that it built.
    #[error("cargo's list of test binaries is incomplete: run the command again")]
    Incomplete,
    /// No test binary was built.
    #[error("cargo built no test binary")]
    NoTests,
    /// A signal requested the end of the run.
    #[error("interrupted")]
    Interrupted,
    /// A program could not be started, or its output not read.
    #[error("{doing}")]
    Io {
        /// Operation that failed, as a verb phrase.
        doing: String,
        /// What the system reported.
        #[source]
        source: io::Error,
    },
}

impl TestRunError {
    /// The error and its causes, on one line.
    pub fn with_causes(&self) -> String {
        let first: &dyn Error = self;
        let causes = std::iter::successors(Some(first), |error: &&dyn Error| (*error).source());
        causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
    }

    fn io(doing: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let doing = doing.into();
        move |source| Self::Io { doing, source }
    }
}
