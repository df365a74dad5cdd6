//! The gRPC APIs of kubelet and of container runtimes that Partage uses, over unix sockets.
//!
//! | module | service | server | socket |
//! |---|---|---|---|
//! | [`deviceplugin`] | `v1beta1.Registration` | kubelet | `device-plugins/kubelet.sock` |
//! | [`deviceplugin`] | `v1beta1.DevicePlugin` | the plugin | a socket beside it |
//! | [`podresources`] | `v1.PodResourcesLister` | kubelet | `pod-resources/kubelet.sock` |
//! | [`cri`] | `runtime.v1.RuntimeService`, in part | the container runtime | such as `/run/containerd/containerd.sock` |
//!
//! The `.proto` files in `proto/` have the names and field numbers of Kubernetes, but their own comments. The
//! generated Rust code is checked in, so that a build needs no protocol compiler; `tests/generated.rs` regenerates
//! and compares it.

pub mod unix;

/// The device plugin API, through which kubelet discovers devices and allocates them to containers.
pub mod deviceplugin {
    pub use generated::*;

    /// The version of this API, which a plugin sends when it registers.
    pub const VERSION: &str = "v1beta1";
    /// The name of kubelet's socket in its device plugin directory.
    pub const KUBELET_SOCKET: &str = "kubelet.sock";
    /// The health of a device that can be allocated.
    pub const HEALTHY: &str = "Healthy";
    /// The health of a device that cannot be allocated.
    pub const UNHEALTHY: &str = "Unhealthy";

    #[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]
    mod generated {
        include!("generated/deviceplugin.v1beta1.rs");
    }
}

/// The pod resources API: the resources that kubelet has allocated to the pods of its node.
pub mod podresources {
    pub use generated::*;

    #[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]
    mod generated {
        include!("generated/podresources.v1.rs");
    }
}

/// The container runtime interface (CRI): the version of the runtime, and its pods and containers.
pub mod cri {
    pub use generated::*;

    #[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]
    mod generated {
        include!("generated/cri.v1.rs");
    }
}
