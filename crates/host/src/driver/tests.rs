use super::*;
use std::os::unix::fs::symlink;
use tempfile::TempDir;

fn search(folders: &[&Path]) -> DriverSearch {
    let folders = folders.iter().map(|folder| folder.to_path_buf()).collect();
    DriverSearch {
        folders,
        cache: "/nowhere".into(),
        usual: Vec::new(),
        toolkits: "/nowhere".into(),
        ..DriverSearch::below(HostRoot::here())
    }
}

/// Writes the start of a library for this processor.
pub(super) fn library(path: &Path) {
    let mut head = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0".to_vec();
    head.extend(ELF_MACHINE.to_ne_bytes());
    fs::write(path, head).unwrap();
}

fn folder(libraries: &[&str]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in libraries {
        let file = format!("{name}.999.1");
        library(&folder.path().join(&file));
        symlink(&file, folder.path().join(name)).unwrap();
    }
    folder
}

#[test]
fn missing_driver_is_not_an_error() {
    let empty = folder(&[]);
    assert_eq!(search(&[]).run().unwrap(), None);
    assert_eq!(search(&[empty.path(), Path::new("/nowhere/at/all")]).run().unwrap(), None);
}

#[test]
fn link_in_the_first_directory_is_resolved() {
    let (first, second) = (folder(&[CUDA_LIBRARY, NVML_LIBRARY]), folder(&[CUDA_LIBRARY, NVML_LIBRARY]));
    let found = search(&[first.path(), second.path()]).run().unwrap().unwrap();
    let real = first.path().canonicalize().unwrap();
    assert_eq!(found.cuda, real.join("libcuda.so.1.999.1"));
    assert_eq!(found.nvml, real.join("libnvidia-ml.so.1.999.1"));
    assert_eq!(found.simulated, None);
}

#[test]
fn default_directories_are_searched_last() {
    let (usual, named) = (folder(&[CUDA_LIBRARY, NVML_LIBRARY]), folder(&[CUDA_LIBRARY]));
    let mut search = search(&[named.path()]);
    search.usual = vec![usual.path().into()];
    let found = search.run().unwrap().unwrap();
    assert!(found.cuda.starts_with(named.path().canonicalize().unwrap()));
    assert!(found.nvml.starts_with(usual.path().canonicalize().unwrap()));
}

#[test]
fn incomplete_driver_is_an_error_that_names_both_libraries() {
    for (there, missing) in [(CUDA_LIBRARY, NVML_LIBRARY), (NVML_LIBRARY, CUDA_LIBRARY)] {
        let half = folder(&[there]);
        let error = search(&[half.path()]).run().unwrap_err();
        assert!(
            matches!(&error, DriverError::Incomplete { missing: what, .. } if *what == missing),
            "{error}"
        );
        let words = error.to_string();
        assert!(words.contains(there) && words.contains(missing) && words.contains("install"), "{words}");
    }
}

#[test]
fn text_and_empty_files_are_not_libraries() {
    for text in ["INPUT(libcuda.so.535) and so on, longer than a header", "short", ""] {
        let wrong = folder(&[NVML_LIBRARY]);
        fs::write(wrong.path().join(CUDA_LIBRARY), text).unwrap();
        let error = search(&[wrong.path()]).run().unwrap_err();
        assert!(
            matches!(&error, DriverError::NotALibrary { path } if path.ends_with(CUDA_LIBRARY)),
            "{error}"
        );
    }
}

#[test]
fn libraries_for_other_processors_are_skipped() {
    let (other, ours) = (folder(&[]), folder(&[CUDA_LIBRARY, NVML_LIBRARY]));
    // A 32-bit library, as game launchers install it.
    fs::write(other.path().join(CUDA_LIBRARY), b"\x7fELF\x01\x01\x01\0\0\0\0\0\0\0\0\0\x03\0\x03\0").unwrap();
    let found = search(&[other.path(), ours.path()]).run().unwrap().unwrap();
    assert!(found.cuda.starts_with(ours.path().canonicalize().unwrap()));
    assert_eq!(search(&[other.path()]).run().unwrap(), None);
}

#[test]
fn simulated_node_of_the_environment_comes_first_and_one_on_the_path_is_recognized() {
    let (node, other) = (tempfile::tempdir().unwrap(), folder(&[CUDA_LIBRARY, NVML_LIBRARY]));
    let libraries = node.path().join("lib");
    fs::create_dir(&libraries).unwrap();
    let mut search = search(&[other.path()]);
    search.node = Some(node.path().into());
    // Without libraries it is not a simulated node.
    assert_eq!(search.run().unwrap().unwrap().simulated, None);
    library(&libraries.join(CUDA_LIBRARY));
    let error = search.run().unwrap_err().to_string();
    assert!(error.contains(NVML_LIBRARY) && error.contains("partage sim env"), "{error}");
    library(&libraries.join(NVML_LIBRARY));
    let real = node.path().canonicalize().unwrap();
    let found = search.run().unwrap().unwrap();
    assert_eq!((&found.simulated, found.cuda.clone()), (&Some(real), libraries.join(CUDA_LIBRARY)));
    search.node = None;
    search.folders = vec![libraries];
    assert_eq!(search.run().unwrap().unwrap().simulated, None);
    fs::write(node.path().join("node.json"), "{}").unwrap();
    assert_eq!(search.run().unwrap(), Some(found));
}

#[test]
fn other_files_with_the_library_names_are_found() {
    let at = tempfile::tempdir().unwrap();
    let real = at.path().canonicalize().unwrap();
    let all = [
        "driver/libcuda.so.1",
        "driver/libcuda.so",
        "driver/libcuda.so.1.1",
        "driver/libnvidia-ml.so.1",
        "driver/libcudart.so.12",
        "driver/libcuda.sold",
        "usual/libcuda.so.535.1",
        "usual/libnvidia-ml.so.535.1",
        "local/cuda-12.8/compat/libcuda.so.570.1",
        "local/other/compat/libcuda.so.1",
    ];
    for file in all.map(|file| real.join(file)) {
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        library(&file);
    }
    // Links to the same files, and a file that no program can load.
    symlink("libcuda.so.535.1", real.join("usual/libcuda.so.1")).unwrap();
    symlink("../driver/libcuda.so.1", real.join("usual/libcuda.so")).unwrap();
    symlink("cuda-12.8", real.join("local/cuda")).unwrap();
    symlink("usual", real.join("again")).unwrap();
    fs::write(real.join("usual/libnvidia-ml.so"), "INPUT(libnvidia-ml.so.1)").unwrap();
    let mut search = search(&[&real.join("driver")]);
    search.usual = ["usual", "again"].map(|folder| real.join(folder)).into();
    search.toolkits = real.join("local");
    let found = search.run().unwrap().unwrap();
    assert_eq!(found.cuda, real.join("driver/libcuda.so.1"));
    let files = |names: &[&str]| names.iter().map(|name| real.join(name)).collect::<Vec<_>>();
    let expected = OtherLibraries {
        cuda: files(&[
            "driver/libcuda.so",
            "driver/libcuda.so.1.1",
            "local/cuda-12.8/compat/libcuda.so.570.1",
            "usual/libcuda.so.535.1",
        ]),
        nvml: files(&["usual/libnvidia-ml.so.535.1"]),
    };
    assert_eq!(found.others, expected);
}

#[test]
fn simulated_library_directory_is_recognized_by_its_node() {
    let (node, other) = (tempfile::tempdir().unwrap(), folder(&[CUDA_LIBRARY, NVML_LIBRARY]));
    let libraries = node.path().join("lib");
    fs::create_dir(&libraries).unwrap();
    library(&libraries.join(CUDA_LIBRARY));
    assert!(
        !is_simulated_library_dir(&libraries)
            && !is_simulated_library_dir(other.path())
            && !is_simulated_library_dir(Path::new("/nowhere"))
    );
    fs::write(node.path().join("node.json"), "{}").unwrap();
    assert!(is_simulated_library_dir(&libraries));
}

#[test]
fn library_path_is_split_as_by_the_loader() {
    let read = |text: &str| split_library_path(OsStr::new(text));
    assert_eq!(read("/a:/b;/c"), ["/a", "/b", "/c"].map(PathBuf::from));
    assert_eq!(read("/a::"), ["/a", ".", "."].map(PathBuf::from));
    assert!(read("").is_empty());
}

/// Creates a host root in a temporary directory, with files and links in it.
pub(super) fn host(files: &[&str], links: &[(&str, &str)]) -> (TempDir, HostRoot) {
    let folder = tempfile::tempdir().unwrap();
    let root = HostRoot::new(folder.path());
    let place = |path: &str| {
        let seen = root.at(Path::new(path));
        fs::create_dir_all(seen.parent().unwrap()).unwrap();
        seen
    };
    files.iter().for_each(|file| library(&place(file)));
    links.iter().for_each(|(link, to)| symlink(to, place(link)).unwrap());
    (folder, root)
}

#[test]
fn driver_of_a_host_is_found_below_its_root() {
    // The layout of Debian's packages, with links relative to the host's root.
    let (_kept, root) = host(
        &[
            "/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.9",
            "/usr/lib64/libnvidia-ml.so.9",
            "/usr/lib64/libcuda.so.8",
        ],
        &[
            ("/usr/lib/x86_64-linux-gnu/libcuda.so.1", "/etc/alternatives/libcuda.so.1"),
            ("/etc/alternatives/libcuda.so.1", "/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.9"),
            ("/usr/lib64/libnvidia-ml.so.1", "libnvidia-ml.so.9"),
            ("/lib", "usr/lib"),
        ],
    );
    let at = |path: &str| root.at(Path::new(path));
    let found = InstalledDriver::find_in(&root).unwrap().unwrap();
    assert_eq!(found.cuda, at("/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.9"));
    assert_eq!(found.nvml, at("/usr/lib64/libnvidia-ml.so.9"));
    assert_eq!(found.others.cuda, [at("/usr/lib64/libcuda.so.8")]);
    assert_eq!(found.simulated, None);
}

#[test]
fn driver_in_a_container_is_found() {
    let inside =
        ["libcuda.so.1", "libnvidia-ml.so.1"].map(|name| format!("/run/nvidia/driver/usr/lib64/{name}"));
    let (_kept, root) = host(&inside.each_ref().map(String::as_str), &[]);
    let found = InstalledDriver::find_in(&root).unwrap().unwrap();
    assert_eq!(found.cuda, root.at(Path::new(&inside[0])));
    // An incomplete driver on the host is skipped then, and an error if there is no other.
    fs::create_dir_all(root.at(Path::new("/usr/lib64"))).unwrap();
    library(&root.at(Path::new("/usr/lib64/libnvidia-ml.so.1")));
    assert_eq!(InstalledDriver::find_in(&root).unwrap(), Some(found));
    fs::remove_file(root.at(Path::new(&inside[1]))).unwrap();
    let error = InstalledDriver::find_in(&root).unwrap_err();
    assert!(matches!(&error, DriverError::Incomplete { missing: CUDA_LIBRARY, .. }), "{error}");
    assert_eq!(InstalledDriver::find_in(&host(&[], &[]).1).unwrap(), None);
}
