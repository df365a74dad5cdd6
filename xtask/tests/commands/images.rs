//! Images: complete, reproducible, and one clear message for each failure.

use crate::test_dir::{TestDir, xtask};
use partage_testkit::skip_or_fail;
use partage_xtask::binaries::MissingPrerequisite;
use partage_xtask::image::{BedImage, ContainerImage, ImageLayer};
use partage_xtask::portable_shim::ZigToolchain;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// One entry of a layer.
#[derive(Debug)]
struct LayerEntry {
    kind: tar::EntryType,
    mode: u32,
    owner: (u64, u64),
    target: Option<String>,
    contents: Vec<u8>,
}

fn entries(bytes: &[u8]) -> BTreeMap<String, LayerEntry> {
    let mut found = BTreeMap::new();
    for entry in tar::Archive::new(bytes).entries().unwrap() {
        let mut entry = entry.unwrap();
        let header = entry.header();
        assert_eq!(header.mtime().unwrap(), 0);
        assert_eq!((header.username_bytes(), header.groupname_bytes()), (Some(&b""[..]), Some(&b""[..])));
        let (kind, mode) = (header.entry_type(), header.mode().unwrap());
        let owner = (header.uid().unwrap(), header.gid().unwrap());
        let target = entry.link_name().unwrap().map(|target| target.display().to_string());
        let path = entry.path().unwrap().display().to_string();
        let mut contents = Vec::new();
        entry.read_to_end(&mut contents).unwrap();
        let path = path.trim_end_matches('/').to_string();
        let before = found.insert(path.clone(), LayerEntry { kind, mode, owner, target, contents });
        assert!(before.is_none(), "{path} occurs twice");
    }
    found
}

/// Reads an archive back and verifies every descriptor. Returns the configuration, and the files of all layers
/// together.
fn read_and_verify(path: &Path, name: &str) -> (Value, BTreeMap<String, LayerEntry>) {
    let archive = entries(&fs::read(path).unwrap());
    let json = |path: &str| serde_json::from_slice::<Value>(&archive[path].contents).unwrap();
    assert_eq!(json("oci-layout")["imageLayoutVersion"], "1.0.0");
    let blob = |descriptor: &Value| {
        let digest = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap().to_string();
        let bytes = &archive[&format!("blobs/sha256/{digest}")].contents;
        assert_eq!(sha256(bytes), digest);
        assert_eq!(descriptor["size"], bytes.len());
        bytes.clone()
    };
    let index = json("index.json");
    assert_eq!(index["manifests"].as_array().unwrap().len(), 1);
    let in_index = &index["manifests"][0];
    assert_eq!(in_index["annotations"]["io.containerd.image.name"], name);
    let tag = name.rsplit_once(':').unwrap().1;
    assert_eq!(in_index["annotations"]["org.opencontainers.image.ref.name"], tag);
    let manifest: Value = serde_json::from_slice(&blob(in_index)).unwrap();
    let config: Value = serde_json::from_slice(&blob(&manifest["config"])).unwrap();
    assert_eq!(config["os"], "linux");

    let docker = json("manifest.json");
    assert_eq!(docker[0]["RepoTags"][0], name);
    let layers = manifest["layers"].as_array().unwrap();
    let diff_ids = config["rootfs"]["diff_ids"].as_array().unwrap();
    assert_eq!(layers.len(), diff_ids.len());
    let mut files = BTreeMap::new();
    for (number, (layer, diff_id)) in layers.iter().zip(diff_ids).enumerate() {
        let mut bytes = blob(layer);
        if layer["mediaType"].as_str().unwrap().ends_with("+gzip") {
            let mut plain = Vec::new();
            flate2::read::GzDecoder::new(&bytes[..]).read_to_end(&mut plain).unwrap();
            bytes = plain;
        }
        assert_eq!(diff_id.as_str().unwrap(), format!("sha256:{}", sha256(&bytes)));
        let in_docker = docker[0]["Layers"][number].as_str().unwrap();
        assert_eq!(in_docker, format!("blobs/{}", layer["digest"].as_str().unwrap().replace(':', "/")));
        files.extend(entries(&bytes));
    }
    let blobs = archive.keys().filter(|path| path.starts_with("blobs/sha256/")).count();
    assert_eq!(blobs, 2 + layers.len(), "the archive has no other blobs");
    for (path, entry) in &files {
        let plain = entry.kind.is_file() || entry.kind.is_dir() || entry.kind.is_symlink();
        assert!(plain, "{path} is {:?}", entry.kind);
        assert!(!path.starts_with('/') && !path.contains(".."), "{path}");
    }
    (config, files)
}

fn greeting(source: &Path, gzip: bool) -> ContainerImage {
    let mut base = ImageLayer::new();
    base.text("/etc/passwd", 0o644, "root:x:0:0::/:/bin/sh\n").unwrap().folder("/tmp", 0o1777).unwrap();
    let mut own = ImageLayer::new();
    own.file("/bin/greet", 0o755, source).unwrap().link("/bin/hello", "greet").unwrap();
    own.folder("/home/user", 0o750).unwrap().owner("/home/user", 1000, 1000).unwrap();
    let image = ContainerImage::new("localhost/greeting:bed").unwrap().layer(base).layer(own);
    let image = image.entrypoint(&["/bin/greet"]).command(&["you"]).env("A", "b").user("1000");
    let image = image.working_folder("/tmp").label("title", "greeting");
    if gzip { image.gzip() } else { image }
}

#[test]
fn equal_files_make_equal_archives() {
    let folder = TestDir::new();
    for gzip in [false, true] {
        let made = [("one", 0o022, 0o755), ("two", 0o077, 0o600)].map(|(name, mask, mode)| {
            let source = folder.path().join(name).join("greet");
            fs::create_dir_all(source.parent().unwrap()).unwrap();
            fs::write(&source, "#!/bin/sh\necho hello\n").unwrap();
            fs::set_permissions(&source, fs::Permissions::from_mode(mode)).unwrap();
            let long_ago = std::time::UNIX_EPOCH + std::time::Duration::from_secs(u64::from(mode) * 1000);
            fs::File::open(&source).unwrap().set_modified(long_ago).unwrap();
            let archive = folder.path().join(name).join("deeper/greeting.oci.tar");
            let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(mask));
            let written = greeting(&source, gzip).write(&archive).unwrap();
            rustix::process::umask(before);
            assert_eq!(written.size, fs::metadata(&archive).unwrap().len());
            (written, fs::read(archive).unwrap())
        });
        assert!(made[0] == made[1], "gzip: {gzip}");
        fs::write(folder.path().join("one/greet"), "#!/bin/sh\necho good bye\n").unwrap();
        let changed =
            greeting(&folder.path().join("one/greet"), gzip).write(&folder.path().join("changed")).unwrap();
        assert_ne!(changed.digest, made[0].0.digest);
        let left: Vec<_> = fs::read_dir(folder.path().join("one/deeper")).unwrap().collect();
        assert_eq!(left.len(), 1, "no unfinished archive is left");
    }
}

#[test]
fn archive_descriptors_match_its_contents() {
    let folder = TestDir::new();
    let source = folder.path().join("greet");
    fs::write(&source, "hello").unwrap();
    for gzip in [false, true] {
        let archive = folder.path().join("greeting.oci.tar");
        greeting(&source, gzip).write(&archive).unwrap();
        let (config, files) = read_and_verify(&archive, "localhost/greeting:bed");
        let expected = serde_json::json!({
            "User": "1000", "Env": ["A=b"], "Entrypoint": ["/bin/greet"], "Cmd": ["you"],
            "WorkingDir": "/tmp", "Labels": {"title": "greeting"},
        });
        assert_eq!(config["config"], expected);
        assert_eq!(config.get("created"), None);
        assert_eq!(files["bin"].target.as_deref(), Some("usr/bin"));
        assert_eq!(
            (files["usr/bin/greet"].mode, &files["usr/bin/greet"].contents[..]),
            (0o755, &b"hello"[..])
        );
        assert_eq!(files["tmp"].mode, 0o1777);
        assert_eq!((files["home/user"].mode, files["home/user"].owner), (0o750, (1000, 1000)));
    }
}

#[test]
fn write_failure_names_the_path() {
    let folder = TestDir::new();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let error = greeting(&file, false).write(&file.join("x.tar")).unwrap_err().to_string();
    assert!(error.starts_with(&format!("writing {}", file.join("x.tar").display())), "{error}");
}

/// Runs `partage-xtask image` with this program in this directory.
fn run_image_command(folder: &TestDir, program: &Path, shim: &Path, path: &Path) -> (i32, String, String) {
    let archive = folder.path().join("dist/partage.oci.tar");
    let [program, archive, shim] = [program, &archive, shim].map(|path| path.to_str().unwrap());
    let arguments = ["image", "--program", program, "--archive", archive, "--shim", shim];
    xtask(&arguments, &[("PATH", path), ("XDG_CACHE_HOME", &folder.path().join("cache"))])
}

#[test]
fn missing_or_non_executable_program_is_refused() {
    let folder = TestDir::new();
    let program = folder.path().join("partage");
    let (code, out, err) = run_image_command(&folder, &program, Path::new("none"), folder.path());
    assert_eq!((code, out.as_str()), (1, ""));
    let output_text =
        "cannot be added to an image: it does not exist; build it: cargo build --release --package partage\n";
    assert!(err.ends_with(output_text), "{err}");
    fs::write(&program, "").unwrap();
    let (code, _, err) = run_image_command(&folder, &program, Path::new("none"), folder.path());
    assert!(code == 1 && err.ends_with("it is not executable\n"), "{err}");
    assert!(!folder.path().join("cache").exists(), "nothing is left behind");
}

/// Builds the shim of this checkout, because the packed shim is checked.
fn build_shim() -> Option<PathBuf> {
    // Concurrent tests must not replace the file at the same time.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let built = ZigToolchain::ready().and_then(|zig| zig.shim(&AtomicBool::new(false)));
    built.map_err(|missing| skip_or_fail(&missing)).ok()
}

/// Writes a program to pack, with its shared object where cargo puts it.
fn write_partage_program(folder: &TestDir, script: &str) -> PathBuf {
    fs::create_dir_all(folder.path().join("deps")).unwrap();
    fs::write(folder.path().join("deps/libpartage_sim.so"), "a simulated driver").unwrap();
    folder.program("partage", script)
}

#[test]
fn missing_apt_and_network_failures_are_reported() {
    let Some(shim) = build_shim() else { return };
    let folder = TestDir::new();
    let program = write_partage_program(&folder, "");
    let empty = folder.path().join("empty");
    let (code, _, err) = run_image_command(&folder, &program, &shim, &empty);
    assert_eq!(code, 1);
    assert!(err.contains("apt-get is not installed; build on Debian"), "{err}");

    folder.program("path/apt-get", "echo \"E: Failed to fetch x  Could not resolve 'y'\" >&2; exit 100");
    let (code, out, err) = run_image_command(&folder, &program, &shim, &folder.path().join("path"));
    assert_eq!(code, 1);
    assert!(out.contains("failed"), "{out}");
    assert!(err.contains(": E: Failed to fetch x"), "{err}");
    assert!(err.contains("check the network and apt's sources and proxy"), "{err}");
    assert!(
        !folder.path().join("dist").exists() && !folder.path().join("cache/partage/images/building").exists()
    );
}

#[test]
fn interruption_leaves_no_partial_files() {
    let Some(shim) = build_shim() else { return };
    let folder = TestDir::new();
    let program = write_partage_program(&folder, "");
    folder.program("path/apt-get", "/bin/sleep 60");
    let mut child = Command::new(env!("CARGO_BIN_EXE_partage-xtask"))
        .args([
            "image",
            "--program",
            program.to_str().unwrap(),
            "--shim",
            shim.to_str().unwrap(),
            "--archive",
        ])
        .arg(folder.path().join("dist/partage.oci.tar"))
        .env("PATH", folder.path().join("path"))
        .env("XDG_CACHE_HOME", folder.path().join("cache"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    // It prints each step before it starts.
    let mut first = [0; 8];
    out.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"fetching");
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::INT)
        .unwrap();
    let mut rest = String::new();
    out.read_line(&mut rest).unwrap();
    let mut err = String::new();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{rest}{err}");
    assert_eq!(err, "error: interrupted: 0 of 1 images are finished; run the command again to continue\n");
    assert!(
        !folder.path().join("dist").exists() && !folder.path().join("cache/partage/images/building").exists()
    );
}

/// Writes an `apt-get` that has these packages and no others, which the real `dpkg-deb` builds.
fn write_fake_apt(folder: &TestDir, packages: &[&str]) {
    let pool = folder.path().join("pool");
    fs::create_dir_all(&pool).unwrap();
    for name in packages {
        let tree = folder.path().join("trees").join(name);
        fs::create_dir_all(tree.join("DEBIAN")).unwrap();
        fs::create_dir_all(tree.join("lib")).unwrap();
        let control = format!(
            "Package: {name}\nVersion: 1:2.0\nArchitecture: all\nMaintainer: none <none@localhost>\nDescription: x\n"
        );
        fs::write(tree.join("DEBIAN/control"), control).unwrap();
        fs::write(tree.join("lib").join(format!("{name}.so")), name).unwrap();
        let mut build = Command::new("dpkg-deb");
        build
            .args(["--root-owner-group", "--build"])
            .arg(&tree)
            .arg(pool.join(format!("{name}_2.0_all.deb")));
        assert!(build.stdout(Stdio::null()).status().unwrap().success());
    }
    let lines = packages.iter().map(|name| format!("Inst {name} (1:2.0 Debian:12 [all])"));
    let script = format!(
        "case \"$*\" in\n*--simulate*) printf '%s\\n' {} ;;\n*download*) cp '{}'/*.deb . ;;\nesac",
        lines.map(|line| format!("'{line}'")).collect::<Vec<_>>().join(" "),
        pool.display()
    );
    folder.program("path/apt-get", &script);
}

#[test]
fn product_image_has_the_program_above_its_libraries() {
    if Command::new("dpkg-deb").arg("--version").output().is_err() {
        let what = "a test package".to_string();
        return skip_or_fail(&MissingPrerequisite::NoDebian {
            what,
            tool: "dpkg-deb",
            alternative: "test on Debian",
        });
    }
    let Some(shim) = build_shim() else { return };
    let folder = TestDir::new();
    let program = write_partage_program(&folder, "echo I am Partage");
    // The tools around apt-get are the host's.
    let path = PathBuf::from(format!("{}:/usr/bin:/bin", folder.path().join("path").display()));
    write_fake_apt(&folder, &["base-files", "libc6", "libgcc-s1", "mawk"]);
    let (code, first, err) = run_image_command(&folder, &program, &shim, &path);
    assert_eq!((code, err.as_str()), (0, ""), "{first}");
    assert!(first.contains("   3 packages"), "{first}");
    assert!(first.contains("docker load --input") && first.contains("ctr --namespace k8s.io"), "{first}");

    let archive = folder.path().join("dist/partage.oci.tar");
    let name = format!("localhost/partage:{}", env!("CARGO_PKG_VERSION"));
    let (config, files) = read_and_verify(&archive, &name);
    assert_eq!(config["config"]["Entrypoint"], serde_json::json!(["/usr/bin/partage"]));
    assert_eq!(config["config"]["Labels"]["org.opencontainers.image.licenses"], "Apache-2.0");
    assert_eq!(files["usr/bin/partage"].mode, 0o755);
    assert_eq!(files["usr/lib/partage/libpartage_sim.so"].contents, b"a simulated driver");
    assert_eq!(files["usr/lib/libc6.so"].contents, b"libc6");
    assert!(!files.contains_key("usr/lib/mawk.so"), "the package is needed only for installation");

    // A second run fetches nothing, and the digest is the same.
    folder.program("path/apt-get", "exit 1");
    let bytes = fs::read(&archive).unwrap();
    let (code, second, err) = run_image_command(&folder, &program, &shim, &path);
    assert_eq!((code, err.as_str()), (0, ""), "{second}");
    assert!(!second.contains("fetching"), "{second}");
    assert!(fs::read(&archive).unwrap() == bytes);
    // A truncated package is fetched again, and not used.
    let kept = folder.path().join("cache/partage/images/packages");
    let kept = fs::read_dir(kept).unwrap().next().unwrap().unwrap().path().join("libc6_2.0_all.deb");
    fs::write(kept, "half").unwrap();
    let (code, out, _) = run_image_command(&folder, &program, &shim, &path);
    assert!(code == 1 && out.contains("fetching"), "{out}");
}

#[test]
fn dockerfile_matches_the_image() {
    let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../Dockerfile")).unwrap();
    assert!(text.contains("ENTRYPOINT [\"/usr/bin/partage\"]"));
    assert!(text.contains(&format!("FROM rust:{}-", env!("CARGO_PKG_RUST_VERSION"))), "{text}");
    // The released profile, stripped, with the commit: what `make image` packs.
    assert!(text.contains("cargo build --profile dist ") && text.contains("strip --strip-all"), "{text}");
    assert!(text.contains("ARG PARTAGE_COMMIT"), "{text}");
}

#[test]
fn missing_images_are_named() {
    let folder = TestDir::new();
    let settings =
        partage_xtask::binaries::BuildPaths { bin_dir: None, cache: Some(folder.path().to_path_buf()) };
    let error = BedImage::Debian.ready_in(&settings).unwrap_err().to_string();
    assert!(error.starts_with("the image localhost/debian:bed is not built"), "{error}");
    assert!(error.ends_with("run `make binaries`"), "{error}");
    let nowhere = partage_xtask::binaries::BuildPaths::default();
    let error = BedImage::Pause.ready_in(&nowhere).unwrap_err().to_string();
    assert!(error.starts_with("no cache directory"), "{error}");
}

#[test]
fn bed_images_have_the_files_that_tests_need() {
    let mut archives = Vec::new();
    for image in BedImage::ALL {
        match image.ready() {
            Ok(archive) => archives.push((image, archive)),
            Err(missing) => return skip_or_fail(&missing),
        }
    }
    for (image, archive) in archives {
        let (config, files) = read_and_verify(&archive, image.name());
        match image {
            BedImage::Pause => {
                assert_eq!(config["config"]["Entrypoint"], serde_json::json!(["/pause"]));
                assert_eq!(files.len(), 1);
                assert_pause_exits_on_sigterm(&files["pause"].contents);
            }
            BedImage::Busybox => {
                assert_eq!(files["usr/bin/sh"].target.as_deref(), Some("busybox"));
                assert_eq!(files["bin"].target.as_deref(), Some("usr/bin"));
            }
            BedImage::Debian => {
                for program in ["bash", "dash", "env", "id", "ls", "mknod", "ps", "su"] {
                    assert!(files.contains_key(&format!("usr/bin/{program}")), "{program}");
                }
                assert_eq!(files["usr/bin/su"].mode, 0o4755);
                assert_eq!(files["etc/shadow"].owner, (0, 42));
                for (link, target) in [("bin", "usr/bin"), ("lib", "usr/lib"), ("sbin", "usr/sbin")] {
                    assert_eq!(files[link].target.as_deref(), Some(target));
                }
                let cache = String::from_utf8_lossy(&files["etc/ld.so.cache"].contents).into_owned();
                assert!(cache.contains("libstdc++.so.6"));
                assert!(!files.keys().any(|path| path.contains("cuda") || path.contains("nvidia")));
                assert!(fs::metadata(&archive).unwrap().len() < 80 << 20);
            }
            BedImage::Other => {
                assert_eq!(files["lib64"].target.as_deref(), Some("usr/lib64"));
                assert_eq!(files["usr/bin/sh"].target.as_deref(), Some("busybox"));
                assert!(!files.contains_key("etc/ld.so.cache"));
                let interpreter =
                    String::from_utf8_lossy(&files["usr/bin/musl-program"].contents).into_owned();
                assert!(interpreter.contains("/lib/ld-musl-"));
            }
        }
    }
}

fn assert_pause_exits_on_sigterm(pause: &[u8]) {
    let folder = TestDir::new();
    let program = folder.path().join("pause");
    fs::write(&program, pause).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let mut child = loop {
        match Command::new(&program).spawn() {
            // A concurrent test is starting a program, and holds ours open until its exec.
            Err(error) if error.kind() == ErrorKind::ExecutableFileBusy => std::thread::yield_now(),
            spawned => break spawned.unwrap(),
        }
    };
    let pid = rustix::process::Pid::from_child(&child);
    // Before it waits for signals, SIGTERM would end it in another way. It sleeps only where it waits.
    let listens = |status: String| status.lines().any(|line| line.starts_with("State:\tS"));
    while !listens(fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap()) {
        std::thread::yield_now();
    }
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
