//! An image as one file: an OCI layout in a tar, which container runtimes and tools read.

use super::{Image, Written};
use crate::missing::Missing;
use crate::{digest, machine};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use tar::{Builder, EntryType, Header};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
const LAYER_GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

// The fields of these stand in the order they are written in: it is part of the digest.

#[derive(Serialize)]
struct Index {
    #[serde(rename = "schemaVersion")]
    schema_version: u32,
    #[serde(rename = "mediaType")]
    media_type: &'static str,
    manifests: Vec<Descriptor>,
}

#[derive(Serialize)]
struct Manifest {
    #[serde(rename = "schemaVersion")]
    schema_version: u32,
    #[serde(rename = "mediaType")]
    media_type: &'static str,
    config: Descriptor,
    layers: Vec<Descriptor>,
}

#[derive(Serialize)]
struct Descriptor {
    #[serde(rename = "mediaType")]
    media_type: &'static str,
    digest: String,
    size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    platform: Option<Platform>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<&'static str, String>,
}

#[derive(Serialize)]
struct Platform {
    architecture: &'static str,
    os: &'static str,
}

#[derive(Serialize)]
struct Config<'a> {
    architecture: &'static str,
    os: &'static str,
    config: &'a super::Config,
    rootfs: RootFs,
}

#[derive(Serialize)]
struct RootFs {
    #[serde(rename = "type")]
    kind: &'static str,
    diff_ids: Vec<String>,
}

/// What Docker reads that is too old for OCI layouts.
#[derive(Serialize)]
struct ForDocker<'a> {
    #[serde(rename = "Config")]
    config: String,
    #[serde(rename = "RepoTags")]
    tags: [&'a str; 1],
    #[serde(rename = "Layers")]
    layers: Vec<String>,
}

/// Blobs by their checksums.
#[derive(Default)]
struct Blobs(BTreeMap<String, Vec<u8>>);

impl Blobs {
    fn add(&mut self, media_type: &'static str, bytes: Vec<u8>) -> Descriptor {
        let (sha256, size) = (digest::of_bytes(&bytes), bytes.len() as u64);
        self.0.insert(sha256.clone(), bytes);
        let digest = format!("sha256:{sha256}");
        Descriptor { media_type, digest, size, platform: None, annotations: BTreeMap::new() }
    }
}

/// Writes the image; it appears at `path` whole or not at all.
pub(super) fn write(image: &Image, path: &Path) -> Result<Written, Missing> {
    let doing = || Missing::io(format!("writing {}", path.display()));
    let half = half_of(path);
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        fs::create_dir_all(folder).map_err(doing())?;
    }
    let written = write_half(image, &half).and_then(|written| {
        fs::rename(&half, path)?;
        Ok(written)
    });
    if written.is_err() {
        // It may not have been made at all.
        let _ = fs::remove_file(&half);
    }
    written.map_err(doing())
}

fn half_of(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".half");
    path.with_file_name(name)
}

fn write_half(image: &Image, half: &Path) -> io::Result<Written> {
    let mut blobs = Blobs::default();
    let (mut layers, mut diff_ids) = (Vec::new(), Vec::new());
    for layer in &image.layers {
        let tar = layer.tar()?;
        diff_ids.push(format!("sha256:{}", digest::of_bytes(&tar)));
        layers.push(match image.gzip {
            true => blobs.add(LAYER_GZIP, gzip(&tar)?),
            false => blobs.add(LAYER, tar),
        });
    }
    let architecture = machine::architecture();
    let config = Config {
        architecture,
        os: "linux",
        config: &image.config,
        rootfs: RootFs { kind: "layers", diff_ids },
    };
    let config = blobs.add(CONFIG, json(&config)?);
    let in_layout = |descriptor: &Descriptor| format!("blobs/{}", descriptor.digest.replace(':', "/"));
    let for_docker = [ForDocker {
        config: in_layout(&config),
        tags: [&image.name],
        layers: layers.iter().map(in_layout).collect(),
    }];
    let manifest = Manifest { schema_version: 2, media_type: MANIFEST, config, layers };
    let mut manifest = blobs.add(MANIFEST, json(&manifest)?);
    let digest = manifest.digest.clone();
    manifest.platform = Some(Platform { architecture, os: "linux" });
    manifest.annotations = BTreeMap::from([
        ("io.containerd.image.name", image.name.clone()),
        ("org.opencontainers.image.ref.name", image.tag().to_string()),
    ]);
    let index = Index {
        schema_version: 2,
        media_type: "application/vnd.oci.image.index.v1+json",
        manifests: vec![manifest],
    };

    let mut tar = Builder::new(BufWriter::new(File::create(half)?));
    append(&mut tar, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    append(&mut tar, "index.json", &json(&index)?)?;
    append(&mut tar, "manifest.json", &json(&for_docker)?)?;
    for folder in ["blobs/", "blobs/sha256/"] {
        let mut header = header(EntryType::Directory, 0o755, 0);
        tar.append_data(&mut header, folder, io::empty())?;
    }
    for (sha256, bytes) in &blobs.0 {
        append(&mut tar, &format!("blobs/sha256/{sha256}"), bytes)?;
    }
    tar.into_inner()?.flush()?;
    Ok(Written { digest, size: fs::metadata(half)?.len() })
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

/// The encoder writes neither a time nor a name.
fn gzip(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes)?;
    encoder.finish()
}

fn json(value: &impl Serialize) -> io::Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(io::Error::other)
}
