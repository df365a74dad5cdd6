//! Builds container images without a container engine, from Debian's packages and local files to an OCI archive.
//!
//! Equal files make equal digests. Tests get the images of the bed with [`BedImage::ready`], which never builds; `make
//! binaries` builds them, and `make image` builds Partage's own. `docs/testbed.md` describes them.

mod bed_images;
mod image_store;
mod layer;
mod oci_archive;
mod packages;
mod product_image;
mod system_files;

pub use bed_images::BedImage;
pub use image_store::{build, check};
pub use layer::ImageLayer;
pub use product_image::{ProductImage, build_product_image};

use crate::prerequisites::MissingPrerequisite;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// An image to be written.
///
/// ```no_run
/// use partage_xtask::image::{ContainerImage, ImageLayer};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut layer = ImageLayer::new();
/// layer.text("/etc/greeting", 0o644, "hello\n")?.folder("/tmp", 0o1777)?;
/// let written = ContainerImage::new("localhost/greeting:bed")?.layer(layer).write("greeting.oci.tar".as_ref())?;
/// assert!(written.digest.starts_with("sha256:"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ContainerImage {
    name: String,
    layers: Vec<ImageLayer>,
    config: ContainerConfig,
    gzip: bool,
}

/// How a container of the image starts. Fields are serialized in this order.
#[derive(Clone, Debug, Default, Serialize)]
struct ContainerConfig {
    #[serde(rename = "User", skip_serializing_if = "String::is_empty")]
    user: String,
    #[serde(rename = "Env", skip_serializing_if = "Vec::is_empty")]
    env: Vec<String>,
    #[serde(rename = "Entrypoint", skip_serializing_if = "Vec::is_empty")]
    entrypoint: Vec<String>,
    #[serde(rename = "Cmd", skip_serializing_if = "Vec::is_empty")]
    command: Vec<String>,
    #[serde(rename = "WorkingDir", skip_serializing_if = "String::is_empty")]
    working_folder: String,
    #[serde(rename = "Labels", skip_serializing_if = "BTreeMap::is_empty")]
    labels: BTreeMap<String, String>,
}

/// An image that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenImage {
    /// The digest of its manifest, by which runtimes identify it.
    pub digest: String,
    /// Size of the archive in bytes.
    pub size: u64,
}

impl ContainerImage {
    /// Creates an image without files. The name must be complete, with a host or `localhost` and a tag:
    /// `localhost/debian:bed`.
    pub fn new(name: &str) -> Result<Self, MissingPrerequisite> {
        let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "/.-_".contains(c);
        let whole = name.rsplit_once(':').is_some_and(|(path, tag)| {
            path.contains('/')
                && path.split('/').all(|part| !part.is_empty())
                && path.replacen(':', "", 1).chars().all(good)
                && tag.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
                && tag.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
        });
        if whole {
            Ok(Self {
                name: name.to_string(),
                layers: Vec::new(),
                config: ContainerConfig::default(),
                gzip: false,
            })
        } else {
            Err(MissingPrerequisite::Refused {
                path: format!("the image name {name:?}"),
                why: "a complete name is host/path:tag, with a lower-case path".to_string(),
            })
        }
    }

    /// Adds a layer above the others.
    #[must_use]
    pub fn layer(mut self, layer: ImageLayer) -> Self {
        self.layers.push(layer);
        self
    }

    /// Sets the entrypoint of the image.
    #[must_use]
    pub fn entrypoint(mut self, words: &[&str]) -> Self {
        self.config.entrypoint = to_owned_strings(words);
        self
    }

    /// Sets the default command, or the default arguments of the entrypoint.
    #[must_use]
    pub fn command(mut self, words: &[&str]) -> Self {
        self.config.command = to_owned_strings(words);
        self
    }

    /// Adds an environment variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.config.env.push(format!("{name}={value}"));
        self
    }

    /// Sets the user, by name or number; the default is root.
    #[must_use]
    pub fn user(mut self, user: &str) -> Self {
        self.config.user = user.to_string();
        self
    }

    /// Sets the working directory.
    #[must_use]
    pub fn working_folder(mut self, folder: &str) -> Self {
        self.config.working_folder = folder.to_string();
        self
    }

    /// Adds a label to the image.
    #[must_use]
    pub fn label(mut self, name: &str, value: &str) -> Self {
        self.config.labels.insert(name.to_string(), value.to_string());
        self
    }

    /// Compresses the layers: smaller to transfer, slower to write and read.
    #[must_use]
    pub fn gzip(mut self) -> Self {
        self.gzip = true;
        self
    }

    /// Returns the complete name.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn tag(&self) -> &str {
        self.name.rsplit_once(':').map_or("latest", |(_, tag)| tag)
    }

    /// Writes the OCI archive; it appears complete or not at all.
    pub fn write(&self, path: &Path) -> Result<WrittenImage, MissingPrerequisite> {
        oci_archive::write(self, path)
    }
}

fn to_owned_strings(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_name_without_host_or_tag_is_refused() {
        for name in ["localhost/debian:bed", "a.b:5000/c/d:1.0", "localhost/x:_1"] {
            assert!(ContainerImage::new(name).is_ok(), "{name}");
        }
        for name in
            ["debian", "debian:bed", "localhost/debian", "localhost/Debian:bed", "a/b:", "a//b:c", "a/b c:d"]
        {
            let error = ContainerImage::new(name).unwrap_err().to_string();
            assert!(error.contains("a complete name is host/path:tag"), "{name}: {error}");
        }
    }
}
