//! A type for each kind of name, so that a node name cannot be used as a pod name.

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
            /// Returns the name as text.
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

        // Allows lookups by `&str` in maps with this key.
        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    )*};
}

names! {
    /// The UUID of a GPU as NVML reports it (`GPU-…`).
    GpuUuid;
    /// The name of a node.
    NodeName;
    /// The name of a namespace.
    Namespace;
    /// The name of a pod.
    PodName;
    /// The UID of a pod, which is never reused, unlike its name.
    PodUid;
    /// The name of a container, unique within its pod.
    ContainerName;
}
