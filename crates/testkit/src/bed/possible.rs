//! What can be known to be missing is said before anything is made.

use super::BedError;
use super::network::MOST_NODES;
use super::profile::Profile;
use crate::binaries::Binaries;
use crate::image::BedImage;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// What a bed stands on.
#[derive(Debug)]
pub(super) struct Ground {
    pub(super) bin: PathBuf,
    pub(super) images: Vec<PathBuf>,
    /// The system's: busybox has one of its own, which can do less.
    pub(super) unshare: PathBuf,
}

/// Tools of the system that the bed calls, and the packages that have them.
const TOOLS: [(&str, &str); 4] =
    [("ip", "iproute2"), ("nsenter", "util-linux"), ("unshare", "util-linux"), ("flock", "util-linux")];

pub(super) fn ground(profile: &Profile) -> Result<Ground, BedError> {
    sensible(profile)?;
    if !rustix::process::geteuid().is_root() {
        return Err(BedError::NotRoot);
    }
    let mut unshare = PathBuf::new();
    for (tool, package) in TOOLS {
        let path = on_the_path(tool).ok_or(BedError::NoTool { tool, package })?;
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
    Ok(Ground { bin: binaries.folder().to_path_buf(), images, unshare })
}

/// Names become host names, folders and cgroups.
fn sensible(profile: &Profile) -> Result<(), BedError> {
    if profile.nodes.len() > MOST_NODES {
        let asked = profile.nodes.len();
        return Err(BedError::Profile(format!(
            "{asked} nodes were asked for, and a bed has {MOST_NODES} at the most"
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
            return Err(BedError::Profile(format!(
                "a node cannot be called {:?}: take 1 to 40 of a-z, 0-9 and -, and not \"control\"",
                node.name
            )));
        }
        if !seen.insert(&node.name) {
            return Err(BedError::Profile(format!(
                "two nodes are called {}: give each a name of its own",
                node.name
            )));
        }
    }
    Ok(())
}

fn on_the_path(tool: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|folder| folder.join(tool)).find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bed::NodeProfile;

    #[test]
    fn a_profile_that_cannot_be_is_refused() {
        let twice = Profile::one_node().node(NodeProfile::new("node1"));
        let error = ground(&twice).unwrap_err().to_string();
        assert_eq!(error, "two nodes are called node1: give each a name of its own");
        let odd = Profile::control_plane().node(NodeProfile::new("Node/1"));
        assert!(ground(&odd).unwrap_err().to_string().starts_with("a node cannot be called \"Node/1\""));
        let error = ground(&Profile::nodes(201)).unwrap_err().to_string();
        assert_eq!(error, "201 nodes were asked for, and a bed has 200 at the most");
    }
}
