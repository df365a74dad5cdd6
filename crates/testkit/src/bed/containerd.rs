//! Selects and configures the containerd of a node.

use super::BedError;
use super::profile::ContainerdVersion;
use crate::binaries;
use crate::image::BedImage;
use std::fs;
use std::path::Path;

/// Socket of containerd, as a path on the node.
pub(super) const SOCKET_PATH: &str = "/run/containerd/containerd.sock";
/// Paths of containerd 1.7 and of its shim on the node.
const CONTAINERD_1_7_PATH: &str = "/bed/containerd-1.7";
const SHIM_1_7_PATH: &str = "/bed/containerd-shim-runc-1.7";

impl ContainerdVersion {
    /// Returns the program's name, or its path on the node. A version that is not among the bed's programs is copied
    /// into the node's directory.
    pub(super) fn install(self, folder: &Path) -> Result<&'static str, BedError> {
        if self == ContainerdVersion::Newest {
            return Ok("containerd");
        }
        let programs = binaries::containerd_1_7(&binaries::BuildPaths::from_environment())?;
        for (program, at) in programs.iter().zip([CONTAINERD_1_7_PATH, SHIM_1_7_PATH]) {
            let to = folder.join(at.trim_start_matches("/bed/"));
            fs::copy(program, &to).map_err(BedError::io(format!("creating {}", to.display())))?;
        }
        Ok(CONTAINERD_1_7_PATH)
    }

    /// Returns the configuration file.
    pub(super) fn config(self, runc: &str) -> String {
        match self {
            ContainerdVersion::Newest => newest_config(runc),
            ContainerdVersion::Oldest => oldest_config(runc),
        }
    }
}

fn newest_config(runc: &str) -> String {
    let pause = BedImage::Pause.name();
    format!(
        r#"version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
temp = "/bed/tmp"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri", "io.containerd.tracing.processor.v1.otlp"]

[grpc]
address = "{SOCKET_PATH}"

[plugins.'io.containerd.cri.v1.images']
snapshotter = "overlayfs"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "{pause}"

[plugins.'io.containerd.cri.v1.runtime']
enable_cdi = true
cdi_spec_dirs = ["/etc/cdi", "/run/cdi"]
# Without CAP_SYS_RESOURCE a sandbox would fail to set its oom_score_adj.
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["/bed/bin"]
conf_dir = "/bed/cni"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
SystemdCgroup = false
BinaryName = "{runc}"
"#
    )
}

/// Returns the configuration in the format of containerd 1.7.
fn oldest_config(runc: &str) -> String {
    let pause = BedImage::Pause.name();
    format!(
        r#"version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
temp = "/bed/tmp"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri", "io.containerd.tracing.processor.v1.otlp"]

[grpc]
address = "{SOCKET_PATH}"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
enable_cdi = true
cdi_spec_dirs = ["/etc/cdi", "/run/cdi"]
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/bed/bin"
conf_dir = "/bed/cni"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
runtime_path = "{SHIM_1_7_PATH}"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
BinaryName = "{runc}"
"#
    )
}
