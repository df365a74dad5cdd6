//! Which containerd a node has, and what it is told.

use super::BedError;
use super::profile::Containerd;
use crate::binaries;
use crate::image::BedImage;
use std::fs;
use std::path::Path;

/// Where it listens, inside.
pub(super) const SOCKET: &str = "/run/containerd/containerd.sock";
/// Where 1.7 and its shim are, inside.
const OLDEST: &str = "/bed/containerd-1.7";
const OLDEST_SHIM: &str = "/bed/containerd-shim-runc-1.7";

impl Containerd {
    /// The program, by its name or its path inside. One that is not among the bed's is brought to the node's folder.
    pub(super) fn bring(self, folder: &Path) -> Result<&'static str, BedError> {
        if self == Containerd::Newest {
            return Ok("containerd");
        }
        let programs = binaries::containerd_1_7(&binaries::Settings::from_environment())?;
        for (program, at) in programs.iter().zip([OLDEST, OLDEST_SHIM]) {
            let to = folder.join(at.trim_start_matches("/bed/"));
            fs::copy(program, &to).map_err(BedError::io(format!("making {}", to.display())))?;
        }
        Ok(OLDEST)
    }

    /// Its configuration.
    pub(super) fn config(self, runc: &str) -> String {
        match self {
            Containerd::Newest => newest(runc),
            Containerd::Oldest => oldest(runc),
        }
    }
}

fn newest(runc: &str) -> String {
    let pause = BedImage::Pause.name();
    format!(
        r#"version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
temp = "/bed/tmp"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri", "io.containerd.tracing.processor.v1.otlp"]

[grpc]
address = "{SOCKET}"

[plugins.'io.containerd.cri.v1.images']
snapshotter = "overlayfs"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "{pause}"

[plugins.'io.containerd.cri.v1.runtime']
enable_cdi = true
cdi_spec_dirs = ["/etc/cdi", "/run/cdi"]
# Without CAP_SYS_RESOURCE a sandbox would die of its oom_score_adj.
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

/// The same, as 1.7 has it written.
fn oldest(runc: &str) -> String {
    let pause = BedImage::Pause.name();
    format!(
        r#"version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
temp = "/bed/tmp"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri", "io.containerd.tracing.processor.v1.otlp"]

[grpc]
address = "{SOCKET}"

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
runtime_path = "{OLDEST_SHIM}"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
BinaryName = "{runc}"
"#
    )
}
