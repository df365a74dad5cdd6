//! Errors of requests to the API server.

use std::error::Error;
use std::path::PathBuf;

/// Why a request to the API server did not succeed.
///
/// `operation` names what was attempted, such as `reading pod default/web`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    /// The process does not run in a pod with a service account, and was given no kubeconfig.
    #[error(
        "this process does not run in a pod with a service account ({0}): run it in one, or set a kubeconfig with --kubeconfig"
    )]
    NotInCluster(String),
    /// The kubeconfig cannot be used.
    #[error("invalid kubeconfig {} ({reason}): use one that works with kubectl", path.display())]
    InvalidKubeconfig {
        /// The path of the kubeconfig.
        path: PathBuf,
        /// Why it cannot be loaded or used to connect.
        reason: String,
    },
    /// RBAC or an admission policy forbids the request.
    #[error("{operation}: forbidden ({message}): grant the permission, as Partage's manifests do")]
    Forbidden {
        /// The operation that was forbidden, as a phrase: "reading node gpu-1".
        operation: String,
        /// The API server's message.
        message: String,
    },
    /// The API server answered with another error.
    #[error("{operation}: rejected by the API server ({code}: {message})")]
    Rejected {
        /// The operation that was rejected, as a phrase: "reading node gpu-1".
        operation: String,
        /// The HTTP status code of the answer, other than 403.
        code: u16,
        /// The API server's message.
        message: String,
    },
    /// The cluster has no node of this name.
    #[error("{operation}: node {node} not found: use the name under which its kubelet registered it")]
    NodeNotFound {
        /// The operation on the node, as a phrase: "reading node gpu-1".
        operation: String,
        /// The node's name, as it was requested.
        node: String,
    },
    /// The API server could not be reached, or did not answer in time. A write may or may not have happened.
    #[error(
        "{operation}: the API server is unavailable ({reason}): the operation is retried when the API server is available"
    )]
    Unavailable {
        /// The operation that got no answer, as a phrase: "reading node gpu-1".
        operation: String,
        /// How the connection failed.
        reason: String,
    },
}

impl ClusterError {
    /// Returns whether the same request may succeed later although nothing was changed.
    ///
    /// An API server that has just started also forbids for a moment what it allows, so requests that matter are retried
    /// whatever this returns.
    pub fn is_transient(&self) -> bool {
        match self {
            ClusterError::Unavailable { .. } => true,
            // Credentials that are not known yet, a conflicting write, throttling, or a failing server.
            ClusterError::Rejected { code, .. } => matches!(*code, 401 | 409 | 429 | 500..),
            _ => false,
        }
    }

    /// Returns whether the API server may have carried out a write although this error was returned for it.
    pub fn is_outcome_unknown(&self) -> bool {
        matches!(self, ClusterError::Unavailable { .. } | ClusterError::Rejected { code: 500.., .. })
    }

    pub(crate) fn new(operation: String, error: kube::Error) -> ClusterError {
        match error {
            kube::Error::Api(status) if status.code == 403 => {
                ClusterError::Forbidden { operation, message: status.message }
            }
            kube::Error::Api(status) => {
                ClusterError::Rejected { operation, code: status.code, message: status.message }
            }
            other => ClusterError::Unavailable { operation, reason: with_causes(&other) },
        }
    }
}

/// Formats an error with all its causes: the outermost one alone does not mention that a connection was refused.
pub(crate) fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if !text.contains(&message) {
            text.push_str(": ");
            text.push_str(&message);
        }
        cause = error.source();
    }
    text
}
