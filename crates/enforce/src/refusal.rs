//! A refusal: why a request is not granted, in a form that every front end converts into its own response.
//!
//! | front end | becomes |
//! |---|---|
//! | workstation daemon | the response over the socket; the reason determines the exit code of the command |
//! | node agent | the error that kubelet shows on the pod, or an event |
//! | admission | the message of the refused request |

use serde::{Deserialize, Serialize};
use std::fmt;

/// The kind of a refusal. Callers use it to decide whether to wait, to change the request, or to report an error.
///
/// The serialized names are part of the workstation's protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RefusalReason {
    /// The request is malformed or contradicts itself.
    Invalid,
    /// The free capacity is not sufficient now.
    NoCapacity,
    /// A rule of the settings forbids it.
    NotAllowed,
    /// The request concerns something that belongs to another user.
    NotOwner,
    /// The request names something that does not exist.
    NotFound,
    /// The machine failed to fulfill a valid request.
    Failed,
}

impl RefusalReason {
    /// Returns the reason in the form of a Kubernetes event reason.
    pub fn as_event_reason(self) -> &'static str {
        match self {
            RefusalReason::Invalid => "InvalidRequest",
            RefusalReason::NoCapacity => "InsufficientCapacity",
            RefusalReason::NotAllowed => "NotAllowed",
            RefusalReason::NotOwner => "NotOwner",
            RefusalReason::NotFound => "NotFound",
            RefusalReason::Failed => "Failed",
        }
    }

    /// Returns whether the same request can be granted later, when other tenants have released capacity.
    pub fn can_be_waited_for(self) -> bool {
        matches!(self, RefusalReason::NoCapacity | RefusalReason::NotAllowed)
    }
}

/// A request that is not granted. `Display` is the message alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The kind of the refusal.
    pub reason: RefusalReason,
    /// The request, the available capacity and the remedy; lower case, no full stop.
    pub message: String,
    /// Requests that would be granted instead, best first.
    pub hints: Vec<String>,
}

impl Refusal {
    /// Returns a refusal without hints.
    ///
    /// ```
    /// use partage_enforce::refusal::{Refusal, RefusalReason};
    ///
    /// let refusal = Refusal::new(RefusalReason::NoCapacity, "GPU 0 has 1 GiB free, 8 GiB requested")
    ///     .with_hints(["request 1 GiB of GPU memory instead of 8 GiB".to_string()]);
    /// assert_eq!(
    ///     refusal.sentence(),
    ///     "GPU 0 has 1 GiB free, 8 GiB requested; request 1 GiB of GPU memory instead of 8 GiB"
    /// );
    /// ```
    pub fn new(reason: RefusalReason, message: impl Into<String>) -> Refusal {
        Refusal { reason, message: message.into(), hints: Vec::new() }
    }

    /// Adds hints to the refusal.
    pub fn with_hints(mut self, hints: impl IntoIterator<Item = String>) -> Refusal {
        self.hints.extend(hints);
        self
    }

    /// Returns the message with its first hint, for places that show a single sentence.
    pub fn sentence(&self) -> String {
        match self.hints.first() {
            Some(hint) => format!("{}; {hint}", self.message),
            None => self.message.clone(),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Refusal {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_keep_their_names_in_the_protocol() {
        for (reason, name) in [
            (RefusalReason::Invalid, "\"invalid\""),
            (RefusalReason::NoCapacity, "\"noCapacity\""),
            (RefusalReason::NotAllowed, "\"notAllowed\""),
            (RefusalReason::NotOwner, "\"notOwner\""),
            (RefusalReason::NotFound, "\"notFound\""),
            (RefusalReason::Failed, "\"failed\""),
        ] {
            assert_eq!(serde_json::to_string(&reason).unwrap(), name);
            assert_eq!(serde_json::from_str::<RefusalReason>(name).unwrap(), reason);
            let event = reason.as_event_reason();
            assert!(event.starts_with(|letter: char| letter.is_ascii_uppercase()) && !event.contains(' '));
        }
    }

    #[test]
    fn only_refusals_that_others_can_resolve_are_waited_for() {
        assert!(
            RefusalReason::NoCapacity.can_be_waited_for() && RefusalReason::NotAllowed.can_be_waited_for()
        );
        for reason in
            [RefusalReason::Invalid, RefusalReason::NotOwner, RefusalReason::NotFound, RefusalReason::Failed]
        {
            assert!(!reason.can_be_waited_for(), "{reason:?}");
        }
    }
}
