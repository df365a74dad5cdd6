//! Formats an error together with its sources, for log lines, events and messages to users.
//!
//! Error types of this crate do not repeat their source in `Display`, so a caller that prints one has to print the
//! chain.

use std::error::Error;

/// Returns the error's message followed by those of its sources, separated by `": "`.
///
/// A source whose text the message ends with already is left out: some error types of lower layers repeat it.
///
/// ```
/// use partage_enforce::instance_lock::LockError;
/// use partage_enforce::error_chain::describe;
///
/// let source = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
/// let error = LockError::Io { path: "/run/partage/agent.lock".into(), source };
/// assert_eq!(describe(&error), "cannot lock /run/partage/agent.lock: permission denied");
/// ```
pub fn describe(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let message = cause.to_string();
        if !text.ends_with(&message) {
            text.push_str(": ");
            text.push_str(&message);
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct LayeredError {
        text: &'static str,
        source: io::Error,
    }

    #[test]
    fn sources_follow_the_message_and_are_not_repeated() {
        let plain = LayeredError { text: "cannot write", source: io::Error::other("disk full") };
        assert_eq!(describe(&plain), "cannot write: disk full");
        let repeating =
            LayeredError { text: "cannot write: disk full", source: io::Error::other("disk full") };
        assert_eq!(describe(&repeating), "cannot write: disk full");
        let nested = LayeredError { text: "cannot start", source: io::Error::other(plain) };
        assert_eq!(describe(&nested), "cannot start: cannot write: disk full");
    }
}
