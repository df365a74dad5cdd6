//! Why the API server did not do what it was asked.

use std::error::Error;
use std::path::PathBuf;

/// Why the API server did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    /// There is no service account to go by.
    #[error(
        "this process runs in no pod with a service account ({0}): run it in one, or name a kubeconfig with --kubeconfig"
    )]
    NoAccount(String),
    /// The kubeconfig is none.
    #[error("the kubeconfig {} cannot be used ({said}): name one that kubectl can use", path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        said: String,
    },
    /// RBAC or a policy says no.
    #[error("{doing}: the API server forbids it ({said}): allow it to who asks, as Partage's manifests do")]
    Forbidden {
        /// What was asked.
        doing: String,
        /// Its words.
        said: String,
    },
    /// It was asked for something that it does not do.
    #[error("{doing}: the API server refuses ({code}: {said})")]
    Refused {
        /// What was asked.
        doing: String,
        /// The HTTP status.
        code: u16,
        /// Its words.
        said: String,
    },
    /// There is no such node.
    #[error("{doing}: the cluster has no node {node}: give the name under which its kubelet registered it")]
    NoNode {
        /// What was asked.
        doing: String,
        /// The node.
        node: String,
    },
    /// Nobody answers.
    #[error("{doing}: the API server does not answer ({said}): it is asked again when it is back")]
    Away {
        /// What was asked.
        doing: String,
        /// How the connection failed.
        said: String,
    },
}

impl ClusterError {
    /// Whether the same question may have another answer in a while, without anybody changing anything. A server that has
    /// just started also forbids for a moment what it allows: what matters is asked again whatever was said.
    pub fn passes(&self) -> bool {
        match self {
            ClusterError::Away { .. } => true,
            // It does not know us yet, somebody else wrote at the same time, it is asked too much, or it is in trouble.
            ClusterError::Refused { code, .. } => matches!(*code, 401 | 409 | 429 | 500..),
            _ => false,
        }
    }

    pub(crate) fn of(doing: String, error: kube::Error) -> ClusterError {
        match error {
            kube::Error::Api(status) => {
                let said = status.message;
                match status.code {
                    403 => ClusterError::Forbidden { doing, said },
                    code => ClusterError::Refused { doing, code, said },
                }
            }
            other => ClusterError::Away { doing, said: whole(&other) },
        }
    }
}

/// An error with all its causes: the first one alone never says that a connection was refused.
pub(crate) fn whole(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.contains(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        cause = error.source();
    }
    text
}
