use super::*;
use std::os::unix::fs::symlink;
use tempfile::TempDir;

fn search(folders: &[&Path]) -> Search {
    let folders = folders.iter().map(|folder| folder.to_path_buf()).collect();
    Search {
        folders,
        cache: "/nowhere".into(),
        usual: Vec::new(),
        toolkits: "/nowhere".into(),
        ..Search::below(Root::here())
    }
}

/// The start of a library for this processor.
pub(super) fn library(path: &Path) {
    let mut head = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0".to_vec();
    head.extend(MACHINE.to_ne_bytes());
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
fn none_is_no_error() {
    let empty = folder(&[]);
    assert_eq!(search(&[]).run().unwrap(), None);
    assert_eq!(search(&[empty.path(), Path::new("/nowhere/at/all")]).run().unwrap(), None);
}

#[test]
fn what_is_loaded_is_the_file_behind_the_link_in_the_first_folder() {
    let (first, second) = (folder(&[CUDA, NVML]), folder(&[CUDA, NVML]));
    let found = search(&[first.path(), second.path()]).run().unwrap().unwrap();
    let real = first.path().canonicalize().unwrap();
    assert_eq!(found.cuda, real.join("libcuda.so.1.999.1"));
    assert_eq!(found.nvml, real.join("libnvidia-ml.so.1.999.1"));
    assert_eq!(found.simulated, None);
}

#[test]
fn usual_folders_come_last() {
    let (usual, named) = (folder(&[CUDA, NVML]), folder(&[CUDA]));
    let mut search = search(&[named.path()]);
    search.usual = vec![usual.path().into()];
    let found = search.run().unwrap().unwrap();
    assert!(found.cuda.starts_with(named.path().canonicalize().unwrap()));
    assert!(found.nvml.starts_with(usual.path().canonicalize().unwrap()));
}

#[test]
fn half_a_driver_is_told_in_words() {
    for (there, missing) in [(CUDA, NVML), (NVML, CUDA)] {
        let half = folder(&[there]);
        let error = search(&[half.path()]).run().unwrap_err();
        assert!(matches!(&error, DriverError::Half { missing: what, .. } if *what == missing), "{error}");
        let words = error.to_string();
        assert!(words.contains(there) && words.contains(missing) && words.contains("install"), "{words}");
    }
}

#[test]
fn a_text_and_an_empty_file_are_no_libraries() {
    for text in ["INPUT(libcuda.so.535) and so on, longer than a header", "short", ""] {
        let wrong = folder(&[NVML]);
        fs::write(wrong.path().join(CUDA), text).unwrap();
        let error = search(&[wrong.path()]).run().unwrap_err();
        assert!(matches!(&error, DriverError::NoLibrary { path } if path.ends_with(CUDA)), "{error}");
    }
}

#[test]
fn libraries_for_other_processors_are_passed_over() {
    let (other, ours) = (folder(&[]), folder(&[CUDA, NVML]));
    // A 32-bit one, as game launchers install it beside.
    fs::write(other.path().join(CUDA), b"\x7fELF\x01\x01\x01\0\0\0\0\0\0\0\0\0\x03\0\x03\0").unwrap();
    let found = search(&[other.path(), ours.path()]).run().unwrap().unwrap();
    assert!(found.cuda.starts_with(ours.path().canonicalize().unwrap()));
    assert_eq!(search(&[other.path()]).run().unwrap(), None);
}

#[test]
fn a_named_node_comes_before_everything_and_one_on_the_path_is_known() {
    let (node, other) = (tempfile::tempdir().unwrap(), folder(&[CUDA, NVML]));
    let libraries = node.path().join("lib");
    fs::create_dir(&libraries).unwrap();
    let mut search = search(&[other.path()]);
    search.node = Some(node.path().into());
    // Without libraries it is none.
    assert_eq!(search.run().unwrap().unwrap().simulated, None);
    library(&libraries.join(CUDA));
    let error = search.run().unwrap_err().to_string();
    assert!(error.contains(NVML) && error.contains("partage sim env"), "{error}");
    library(&libraries.join(NVML));
    let real = node.path().canonicalize().unwrap();
    let found = search.run().unwrap().unwrap();
    assert_eq!((&found.simulated, found.cuda.clone()), (&Some(real), libraries.join(CUDA)));
    search.node = None;
    search.folders = vec![libraries];
    assert_eq!(search.run().unwrap().unwrap().simulated, None);
    fs::write(node.path().join("node.json"), "{}").unwrap();
    assert_eq!(search.run().unwrap(), Some(found));
}

#[test]
fn other_files_of_the_names_are_found_wherever_programs_come_by() {
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
    // The same ones again, and what no program can load.
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
    let expected = Others {
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
fn only_a_simulated_node_is_taken_from_roots_path() {
    let (node, other) = (tempfile::tempdir().unwrap(), folder(&[CUDA, NVML]));
    let libraries = node.path().join("lib");
    fs::create_dir(&libraries).unwrap();
    library(&libraries.join(CUDA));
    assert!(!has_node(&libraries) && !has_node(other.path()) && !has_node(Path::new("/nowhere")));
    fs::write(node.path().join("node.json"), "{}").unwrap();
    assert!(has_node(&libraries));
}

#[test]
fn the_path_is_read_as_the_loader_reads_it() {
    let read = |text: &str| folders(OsStr::new(text));
    assert_eq!(read("/a:/b;/c"), ["/a", "/b", "/c"].map(PathBuf::from));
    assert_eq!(read("/a::"), ["/a", ".", "."].map(PathBuf::from));
    assert!(read("").is_empty());
}

/// A host seen at a folder, with files and links in it.
pub(super) fn host(files: &[&str], links: &[(&str, &str)]) -> (TempDir, Root) {
    let folder = tempfile::tempdir().unwrap();
    let root = Root::new(folder.path());
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
fn a_hosts_driver_is_found_below_its_root() {
    // As Debian's packages lay it, all links from the host's root.
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
    let found = Driver::find_in(&root).unwrap().unwrap();
    assert_eq!(found.cuda, at("/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.9"));
    assert_eq!(found.nvml, at("/usr/lib64/libnvidia-ml.so.9"));
    assert_eq!(found.others.cuda, [at("/usr/lib64/libcuda.so.8")]);
    assert_eq!(found.simulated, None);
}

#[test]
fn a_hosts_driver_may_be_in_a_container() {
    let inside =
        ["libcuda.so.1", "libnvidia-ml.so.1"].map(|name| format!("/run/nvidia/driver/usr/lib64/{name}"));
    let (_kept, root) = host(&inside.each_ref().map(String::as_str), &[]);
    let found = Driver::find_in(&root).unwrap().unwrap();
    assert_eq!(found.cuda, root.at(Path::new(&inside[0])));
    // Half a driver on the host is passed over then, and told of where there is nothing else.
    fs::create_dir_all(root.at(Path::new("/usr/lib64"))).unwrap();
    library(&root.at(Path::new("/usr/lib64/libnvidia-ml.so.1")));
    assert_eq!(Driver::find_in(&root).unwrap(), Some(found));
    fs::remove_file(root.at(Path::new(&inside[1]))).unwrap();
    let error = Driver::find_in(&root).unwrap_err();
    assert!(matches!(&error, DriverError::Half { missing: CUDA, .. }), "{error}");
    assert_eq!(Driver::find_in(&host(&[], &[]).1).unwrap(), None);
}
