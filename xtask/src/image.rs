//! Container images without a container engine: from Debian's packages and local files to one OCI archive.
//!
//! The same files make the same digest. Tests ask for the images of the bed with [`BedImage::ready`], which never builds;
//! `make binaries` builds them, and `make image` builds Partage's own. `docs/testbed.md` has the words.

mod archive;
mod bed;
mod files;
mod layer;
mod packages;
mod product;
mod store;

pub use bed::BedImage;
pub use layer::Layer;
pub use product::{Product, product};
pub use store::{build, check};

use crate::missing::Missing;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// An image to be written.
///
/// ```no_run
/// use partage_xtask::image::{Image, Layer};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut layer = Layer::new();
/// layer.text("/etc/greeting", 0o644, "hello\n")?.folder("/tmp", 0o1777)?;
/// let written = Image::new("localhost/greeting:bed")?.layer(layer).write("greeting.oci.tar".as_ref())?;
/// assert!(written.digest.starts_with("sha256:"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Image {
    name: String,
    layers: Vec<Layer>,
    config: Config,
    gzip: bool,
}

/// How a container of the image starts. The fields stand in the order they are written in.
#[derive(Clone, Debug, Default, Serialize)]
struct Config {
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
pub struct Written {
    /// The digest of its manifest: what runtimes know it by.
    pub digest: String,
    /// The size of the archive.
    pub size: u64,
}

impl Image {
    /// An image without files; the name is whole, with a host or `localhost` and a tag: `localhost/debian:bed`.
    pub fn new(name: &str) -> Result<Self, Missing> {
        let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "/.-_".contains(c);
        let whole = name.rsplit_once(':').is_some_and(|(path, tag)| {
            path.contains('/')
                && path.split('/').all(|part| !part.is_empty())
                && path.replacen(':', "", 1).chars().all(good)
                && tag.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
                && tag.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
        });
        match whole {
            true => Ok(Self {
                name: name.to_string(),
                layers: Vec::new(),
                config: Config::default(),
                gzip: false,
            }),
            false => Err(Missing::Refused {
                path: format!("the name {name:?}"),
                why: "a whole name is host/path:tag, the path in small letters".to_string(),
            }),
        }
    }

    /// One more layer, above the others.
    #[must_use]
    pub fn layer(mut self, layer: Layer) -> Self {
        self.layers.push(layer);
        self
    }

    /// What always runs.
    #[must_use]
    pub fn entrypoint(mut self, words: &[&str]) -> Self {
        self.config.entrypoint = owned(words);
        self
    }

    /// What runs, or the words after the entrypoint, where nobody asks for something else.
    #[must_use]
    pub fn command(mut self, words: &[&str]) -> Self {
        self.config.command = owned(words);
        self
    }

    /// A variable of the environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.config.env.push(format!("{name}={value}"));
        self
    }

    /// Who runs it: a name or a number; root where nothing is said.
    #[must_use]
    pub fn user(mut self, user: &str) -> Self {
        self.config.user = user.to_string();
        self
    }

    /// Where it runs.
    #[must_use]
    pub fn working_folder(mut self, folder: &str) -> Self {
        self.config.working_folder = folder.to_string();
        self
    }

    /// A label.
    #[must_use]
    pub fn label(mut self, name: &str, value: &str) -> Self {
        self.config.labels.insert(name.to_string(), value.to_string());
        self
    }

    /// Packs the layers: smaller to carry, slower to write and to read.
    #[must_use]
    pub fn gzip(mut self) -> Self {
        self.gzip = true;
        self
    }

    /// Its whole name.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn tag(&self) -> &str {
        self.name.rsplit_once(':').map_or("latest", |(_, tag)| tag)
    }

    /// Writes the OCI archive; it appears whole or not at all.
    pub fn write(&self, path: &Path) -> Result<Written, Missing> {
        archive::write(self, path)
    }
}

fn owned(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_whole() {
        for name in ["localhost/debian:bed", "a.b:5000/c/d:1.0", "localhost/x:_1"] {
            assert!(Image::new(name).is_ok(), "{name}");
        }
        for name in
            ["debian", "debian:bed", "localhost/debian", "localhost/Debian:bed", "a/b:", "a//b:c", "a/b c:d"]
        {
            let error = Image::new(name).unwrap_err().to_string();
            assert!(error.contains("a whole name is host/path:tag"), "{name}: {error}");
        }
    }
}
