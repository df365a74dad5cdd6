//! One type per kind of name, so that a node name never lands where a pod name belongs.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

macro_rules! names {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(Arc<str>);

        impl $name {
            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                $name(text.into())
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                $name(text.into())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        // Lets maps keyed by this name be asked with plain text.
        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    )*};
}

names! {
    /// A GPU's UUID as NVML prints it (`GPU-…`).
    GpuUuid;
    /// A node's name.
    NodeName;
    /// A namespace.
    Namespace;
    /// A pod's name.
    PodName;
    /// A pod's UID: the only name that is never used twice.
    PodUid;
    /// A container's name inside its pod.
    ContainerName;
}
