//! Places at which a test lets the agent die, as a kill in that instant would. Release builds have none.

/// Names the step at which a debug build dies.
#[cfg(debug_assertions)]
const DIE_AT: &str = "PARTAGE_DIE_AT";

/// Dies here where a test said so.
#[cfg(debug_assertions)]
pub(crate) fn point(step: &str) {
    if std::env::var(DIE_AT).is_ok_and(|at| at == step) {
        tracing::warn!("dies at {step}, as it was told");
        // Nothing is cleaned up, flushed or answered.
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}

/// Nothing.
#[cfg(not(debug_assertions))]
pub(crate) fn point(_: &str) {}
