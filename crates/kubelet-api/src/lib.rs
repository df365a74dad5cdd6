//! The gRPC contracts that Partage speaks, over unix sockets.
//!
//! | module | contract | who serves it | where |
//! |---|---|---|---|
//! | [`deviceplugin`] | `v1beta1.Registration` | kubelet | `device-plugins/kubelet.sock` |
//! | [`deviceplugin`] | `v1beta1.DevicePlugin` | the plugin | a socket beside it |
//! | [`podresources`] | `v1.PodResourcesLister` | kubelet | `pod-resources/kubelet.sock` |
//! | [`cri`] | `runtime.v1.RuntimeService`, the part that is used | the container runtime | such as `/run/containerd/containerd.sock` |
//!
//! The `.proto` files in `proto/` are ours: names and numbers are the contract, the words are not. The Rust made from
//! them is checked in, so a build needs no protocol compiler; `tests/generated.rs` makes it again and compares.

pub mod unix;

/// Device plugins: how kubelet learns of devices and gives them to containers.
pub mod deviceplugin {
    pub use generated::*;

    /// The version of this contract, as a plugin says it when it registers.
    pub const VERSION: &str = "v1beta1";
    /// The name of kubelet's socket in its folder of device plugins.
    pub const KUBELET_SOCKET: &str = "kubelet.sock";
    /// The health of a device that may be given.
    pub const HEALTHY: &str = "Healthy";
    /// The health of a device that may not.
    pub const UNHEALTHY: &str = "Unhealthy";

    #[allow(missing_docs, unreachable_pub, clippy::all, reason = "made by a program")]
    mod generated {
        include!("generated/deviceplugin.v1beta1.rs");
    }
}

/// Pod resources: who holds what on a node, as kubelet knows it.
pub mod podresources {
    pub use generated::*;

    #[allow(missing_docs, unreachable_pub, clippy::all, reason = "made by a program")]
    mod generated {
        include!("generated/podresources.v1.rs");
    }
}

/// The container runtime: which one it is, and the pods and containers that it knows.
pub mod cri {
    pub use generated::*;

    #[allow(missing_docs, unreachable_pub, clippy::all, reason = "made by a program")]
    mod generated {
        include!("generated/cri.v1.rs");
    }
}
