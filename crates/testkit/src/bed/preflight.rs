//! Checks the requirements of a bed before anything is created.

use super::BedError;
use super::network::MAX_NODES;
use super::profile::BedProfile;
use crate::binaries::Binaries;
use crate::image::BedImage;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// The programs and images that a bed uses.
#[derive(Debug)]
pub(super) struct BedInputs {
    pub(super) bin: PathBuf,
    pub(super) images: Vec<PathBuf>,
    /// The system's `unshare`: the one of busybox has fewer options.
    pub(super) unshare: PathBuf,
}

/// System tools that the bed runs, and the packages that contain them.
const REQUIRED_TOOLS: [(&str, &str); 4] =
    [("ip", "iproute2"), ("nsenter", "util-linux"), ("unshare", "util-linux"), ("flock", "util-linux")];

pub(super) fn check_inputs(profile: &BedProfile) -> Result<BedInputs, BedError> {
    validate_profile(profile)?;
    if !rustix::process::geteuid().is_root() {
        return Err(BedError::NotRoot);
    }
    let mut unshare = PathBuf::new();
    for (tool, package) in REQUIRED_TOOLS {
        let path = find_in_path(tool).ok_or(BedError::NoTool { tool, package })?;
        if tool == "unshare" {
            unshare = path;
        }
    }
    let binaries = Binaries::ready()?;
    let mut images = vec![BedImage::Pause.ready()?, BedImage::Busybox.ready()?];
    if profile.debian {
        images.push(BedImage::Debian.ready()?);
    }
    images.extend(profile.images.iter().cloned());
    Ok(BedInputs { bin: binaries.folder().to_path_buf(), images, unshare })
}

/// Checks the node names, which become host names, directories and cgroups.
fn validate_profile(profile: &BedProfile) -> Result<(), BedError> {
    if profile.nodes.len() > MAX_NODES {
        let asked = profile.nodes.len();
        return Err(BedError::BedProfile(format!(
            "{asked} nodes requested, but a bed has at most {MAX_NODES}"
        )));
    }
    let mut seen = BTreeSet::new();
    for node in &profile.nodes {
        let letters =
            node.name.chars().all(|one| one.is_ascii_lowercase() || one.is_ascii_digit() || one == '-');
        if node.name.is_empty()
            || node.name.len() > 40
            || !letters
            || node.name.starts_with('-')
            || node.name == "control"
        {
            return Err(BedError::BedProfile(format!(
                "invalid node name {:?}: use 1 to 40 characters of a-z, 0-9 and -, and not \"control\"",
                node.name
            )));
        }
        if !seen.insert(&node.name) {
            return Err(BedError::BedProfile(format!(
                "duplicate node name {}: node names must be unique",
                node.name
            )));
        }
    }
    Ok(())
}

fn find_in_path(tool: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|folder| folder.join(tool)).find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bed::NodeProfile;

    #[test]
    fn invalid_profile_is_refused_with_the_reason() {
        let twice = BedProfile::one_node().node(NodeProfile::new("node1"));
        let error = check_inputs(&twice).unwrap_err().to_string();
        assert_eq!(error, "duplicate node name node1: node names must be unique");
        let odd = BedProfile::control_plane().node(NodeProfile::new("Node/1"));
        assert!(check_inputs(&odd).unwrap_err().to_string().starts_with("invalid node name \"Node/1\""));
        let error = check_inputs(&BedProfile::nodes(201)).unwrap_err().to_string();
        assert_eq!(error, "201 nodes requested, but a bed has at most 200");
    }
}
