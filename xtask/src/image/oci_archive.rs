//! Writes an image as one file: an OCI layout in a tar file, which container runtimes and tools read.

use super::{ContainerImage, WrittenImage};
use crate::prerequisites::MissingPrerequisite;
use crate::{digest, host_info};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use tar::{Builder, EntryType, Header};

const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG_TYPE: &str = "application/vnd.oci.image.config.v1+json";
const LAYER_TYPE: &str = "application/vnd.oci.image.layer.v1.tar";
const LAYER_GZIP_TYPE: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

// Fields of these types are serialized in their order, which is part of the digest.

#[derive(Serialize)]
struct OciIndex {
    #[serde(rename = "schemaVersion")]
    schema_version: u32,
    #[serde(rename = "mediaType")]
    media_type: &'static str,
    manifests: Vec<OciDescriptor>,
}

#[derive(Serialize)]
struct OciManifest {
    #[serde(rename = "schemaVersion")]
    schema_version: u32,
    #[serde(rename = "mediaType")]
    media_type: &'static str,
    config: OciDescriptor,
    layers: Vec<OciDescriptor>,
}

#[derive(Serialize)]
struct OciDescriptor {
    #[serde(rename = "mediaType")]
    media_type: &'static str,
    digest: String,
    size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    platform: Option<OciPlatform>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<&'static str, String>,
}

#[derive(Serialize)]
struct OciPlatform {
    architecture: &'static str,
    os: &'static str,
}

#[derive(Serialize)]
struct OciConfig<'a> {
    architecture: &'static str,
    os: &'static str,
    config: &'a super::ContainerConfig,
    rootfs: OciRootFs,
}

#[derive(Serialize)]
struct OciRootFs {
    #[serde(rename = "type")]
    kind: &'static str,
    diff_ids: Vec<String>,
}

/// The manifest for Docker versions that cannot read OCI layouts.
#[derive(Serialize)]
struct DockerManifest<'a> {
    #[serde(rename = "Config")]
    config: String,
    #[serde(rename = "RepoTags")]
    tags: [&'a str; 1],
    #[serde(rename = "Layers")]
    layers: Vec<String>,
}

/// Blobs by their checksums.
#[derive(Default)]
struct BlobSet(BTreeMap<String, Vec<u8>>);

impl BlobSet {
    fn add(&mut self, media_type: &'static str, bytes: Vec<u8>) -> OciDescriptor {
        let (sha256, size) = (digest::of_bytes(&bytes), bytes.len() as u64);
        self.0.insert(sha256.clone(), bytes);
        let digest = format!("sha256:{sha256}");
        OciDescriptor { media_type, digest, size, platform: None, annotations: BTreeMap::new() }
    }
}

/// Writes the image; it appears at `path` complete or not at all.
pub(super) fn write(image: &ContainerImage, path: &Path) -> Result<WrittenImage, MissingPrerequisite> {
    let doing = || MissingPrerequisite::io(format!("writing {}", path.display()));
    let unfinished = unfinished_path(path);
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        fs::create_dir_all(folder).map_err(doing())?;
    }
    let written = write_unfinished(image, &unfinished).and_then(|written| {
        fs::rename(&unfinished, path)?;
        Ok(written)
    });
    if written.is_err() {
        // It may not have been created.
        let _ = fs::remove_file(&unfinished);
    }
    written.map_err(doing())
}

fn unfinished_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".half");
    path.with_file_name(name)
}

fn write_unfinished(image: &ContainerImage, unfinished: &Path) -> io::Result<WrittenImage> {
    let mut blobs = BlobSet::default();
    let (mut layers, mut diff_ids) = (Vec::new(), Vec::new());
    for layer in &image.layers {
        let tar = layer.tar()?;
        diff_ids.push(format!("sha256:{}", digest::of_bytes(&tar)));
        layers.push(if image.gzip {
            blobs.add(LAYER_GZIP_TYPE, gzip(&tar)?)
        } else {
            blobs.add(LAYER_TYPE, tar)
        });
    }
    let architecture = host_info::architecture();
    let config = OciConfig {
        architecture,
        os: "linux",
        config: &image.config,
        rootfs: OciRootFs { kind: "layers", diff_ids },
    };
    let config = blobs.add(CONFIG_TYPE, json(&config)?);
    let in_layout = |descriptor: &OciDescriptor| format!("blobs/{}", descriptor.digest.replace(':', "/"));
    let docker_manifest = [DockerManifest {
        config: in_layout(&config),
        tags: [&image.name],
        layers: layers.iter().map(in_layout).collect(),
    }];
    let manifest = OciManifest { schema_version: 2, media_type: MANIFEST_TYPE, config, layers };
    let mut manifest = blobs.add(MANIFEST_TYPE, json(&manifest)?);
    let digest = manifest.digest.clone();
    manifest.platform = Some(OciPlatform { architecture, os: "linux" });
    manifest.annotations = BTreeMap::from([
        ("io.containerd.image.name", image.name.clone()),
        ("org.opencontainers.image.ref.name", image.tag().to_string()),
    ]);
    let index = OciIndex {
        schema_version: 2,
        media_type: "application/vnd.oci.image.index.v1+json",
        manifests: vec![manifest],
    };

    let mut tar = Builder::new(BufWriter::new(File::create(unfinished)?));
    append(&mut tar, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    append(&mut tar, "index.json", &json(&index)?)?;
    append(&mut tar, "manifest.json", &json(&docker_manifest)?)?;
    for folder in ["blobs/", "blobs/sha256/"] {
        let mut header = header(EntryType::Directory, 0o755, 0);
        tar.append_data(&mut header, folder, io::empty())?;
    }
    for (sha256, bytes) in &blobs.0 {
        append(&mut tar, &format!("blobs/sha256/{sha256}"), bytes)?;
    }
    tar.into_inner()?.flush()?;
    Ok(WrittenImage { digest, size: fs::metadata(unfinished)?.len() })
}

fn append(tar: &mut Builder<impl Write>, path: &str, bytes: &[u8]) -> io::Result<()> {
    tar.append_data(&mut header(EntryType::Regular, 0o644, bytes.len() as u64), path, bytes)
}

fn header(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(size);
    header
}

/// Compresses bytes. The encoder writes neither a time nor a name.
fn gzip(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes)?;
    encoder.finish()
}

fn json(value: &impl Serialize) -> io::Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(io::Error::other)
}
