use super::*;
use crate::driver::tests::{host, library};
use std::os::unix::fs::symlink;

const VERSION: &str = "550.163.01";

fn find(root: &HostRoot) -> DriverFiles {
    let driver = InstalledDriver::find_in(root).unwrap().unwrap();
    DriverFiles::find(root, &driver, VERSION)
}

fn names(library: &DriverLibrary) -> Vec<&str> {
    library.names.iter().map(String::as_str).collect()
}

fn program(root: &HostRoot, path: &str) {
    let seen = root.at(Path::new(path));
    fs::create_dir_all(seen.parent().unwrap()).unwrap();
    fs::write(&seen, "").unwrap();
    fs::set_permissions(&seen, fs::Permissions::from_mode(0o755)).unwrap();
}

fn paths(paths: &[&str]) -> Vec<PathBuf> {
    paths.iter().map(PathBuf::from).collect()
}

#[test]
fn files_of_a_debian_installation_are_found() {
    let current = "/usr/lib/x86_64-linux-gnu/nvidia/current";
    let file = |name: &str| format!("{current}/{name}.{VERSION}");
    let files = ["libcuda.so", "libnvidia-ml.so", "libnvcuvid.so", "libnvidia-gpucomp.so"].map(file);
    let to = |name: &str| format!("{name}.{VERSION}");
    let (cuda, nvml, video) = (to("libcuda.so"), to("libnvidia-ml.so"), to("libnvcuvid.so"));
    let (_kept, root) = host(
        &files.each_ref().map(String::as_str),
        &[
            (&format!("{current}/libcuda.so.1"), &cuda),
            (&format!("{current}/libcuda.so"), "libcuda.so.1"),
            (&format!("{current}/libnvidia-ml.so.1"), &nvml),
            (&format!("{current}/libnvcuvid.so.1"), &video),
            ("/usr/lib/x86_64-linux-gnu/libcuda.so.1", "/etc/alternatives/libcuda.so.1"),
            ("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "/etc/alternatives/libnvidia-ml.so.1"),
            ("/usr/lib/x86_64-linux-gnu/libnvcuvid.so", &format!("{current}/libnvcuvid.so.1")),
            ("/etc/alternatives/libcuda.so.1", &format!("{current}/libcuda.so.1")),
            ("/etc/alternatives/libnvidia-ml.so.1", &format!("{current}/libnvidia-ml.so.1")),
            ("/usr/bin/nvidia-smi", "/etc/alternatives/nvidia-smi"),
            ("/etc/alternatives/nvidia-smi", "/usr/lib/nvidia/current/nvidia-smi"),
            ("/lib", "usr/lib"),
            ("/bin", "usr/bin"),
        ],
    );
    program(&root, "/usr/lib/nvidia/current/nvidia-smi");
    program(&root, &format!("/usr/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"));
    program(&root, "/usr/lib/firmware/nvidia/535.1/gsp_tu10x.bin");
    let found = find(&root);
    assert_eq!(found.cuda.file, Path::new(&files[0]));
    assert_eq!(names(&found.cuda), ["libcuda.so", "libcuda.so.1", &cuda]);
    // A name is listed even if no link has it.
    assert_eq!(names(&found.nvml), ["libnvidia-ml.so", "libnvidia-ml.so.1", &nvml]);
    let others: Vec<&Path> = found.libraries.iter().map(|library| library.file.as_path()).collect();
    assert_eq!(others, [Path::new(&files[2]), Path::new(&files[3])]);
    assert_eq!(names(&found.libraries[0]), ["libnvcuvid.so", "libnvcuvid.so.1", &video]);
    assert_eq!(found.libraries[0].sonames().collect::<Vec<_>>(), ["libnvcuvid.so.1"]);
    assert_eq!(found.libraries[1].sonames().collect::<Vec<_>>(), [to("libnvidia-gpucomp.so")]);
    let smi = DriverProgram { name: "nvidia-smi", file: "/usr/lib/nvidia/current/nvidia-smi".into() };
    assert_eq!(found.programs, [smi]);
    assert_eq!(found.firmware, paths(&[&format!("/usr/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin")]));
}

#[test]
fn files_of_a_red_hat_installation_are_found() {
    let file = |name: &str| format!("/usr/lib64/{name}.{VERSION}");
    let files =
        ["libcuda.so", "libnvidia-ml.so", "libnvidia-ptxjitcompiler.so", "libGLX_nvidia.so"].map(file);
    let (_kept, root) = host(
        &files.each_ref().map(String::as_str),
        &[
            ("/usr/lib64/libcuda.so.1", &format!("libcuda.so.{VERSION}")),
            ("/usr/lib64/libnvidia-ml.so.1", &format!("libnvidia-ml.so.{VERSION}")),
            ("/usr/lib64/libnvidia-ptxjitcompiler.so.1", &format!("libnvidia-ptxjitcompiler.so.{VERSION}")),
            ("/usr/lib64/libGLX_indirect.so.0", &format!("libGLX_nvidia.so.{VERSION}")),
            ("/lib64", "usr/lib64"),
        ],
    );
    // Files for another processor, of another version, of another package, and of an older driver.
    let at = |name: &str| root.at(Path::new(name));
    fs::create_dir_all(at("/usr/lib")).unwrap();
    let thirty_two = b"\x7fELF\x01\x01\x01\0\0\0\0\0\0\0\0\0\x03\0\x03\0";
    fs::write(at(&format!("/usr/lib/libnvcuvid.so.{VERSION}")), thirty_two).unwrap();
    for name in ["libnvidia-container.so.1.17.0", "libnvcuvid.so.535.1", "libcuda.so.535.1"] {
        library(&at("/usr/lib64").join(name));
    }
    library(&at("/usr/lib64/libnvidia-nvvm70.so.4"));
    program(&root, "/usr/bin/nvidia-cuda-mps-control");
    fs::write(at("/usr/bin/nvidia-smi"), "no program").unwrap();
    let found = find(&root);
    assert_eq!(found.nvml.file, Path::new(&files[1]));
    let others: Vec<Vec<&str>> = found.libraries.iter().map(names).collect();
    let [ptx, glx] = [&files[2], &files[3]].map(|file| file.rsplit_once('/').unwrap().1);
    let expected = [
        vec!["libGLX_indirect.so.0", glx],
        vec!["libnvidia-nvvm70.so.4"],
        vec!["libnvidia-ptxjitcompiler.so.1", ptx],
    ];
    assert_eq!(others, expected);
    let programs: Vec<&str> = found.programs.iter().map(|program| program.name).collect();
    assert_eq!((programs, found.firmware), (vec!["nvidia-cuda-mps-control"], vec![]));
}

#[test]
fn files_of_a_driver_container_are_found() {
    let inside = "/run/nvidia/driver";
    let file = |name: &str| format!("{inside}/usr/lib/x86_64-linux-gnu/{name}.{VERSION}");
    let files = ["libcuda.so", "libnvidia-ml.so", "libnvidia-opencl.so"].map(file);
    let (_kept, root) = host(
        &files.each_ref().map(String::as_str),
        &[
            // Links are relative to the container's root.
            (&format!("{inside}/usr/lib64/libcuda.so.1"), &files[0][inside.len()..]),
            (&format!("{inside}/usr/lib64/libnvidia-ml.so.1"), &files[1][inside.len()..]),
            (&format!("{inside}/lib"), "usr/lib"),
        ],
    );
    program(&root, &format!("{inside}/usr/bin/nvidia-smi"));
    program(&root, &format!("{inside}/usr/lib/firmware/nvidia/{VERSION}/gsp_tu10x.bin"));
    // The host's own programs belong to another driver.
    program(&root, "/usr/bin/nvidia-debugdump");
    let found = find(&root);
    assert_eq!((found.cuda.file, found.nvml.file), (files[0].clone().into(), files[1].clone().into()));
    assert_eq!(found.libraries.len(), 1);
    assert_eq!(found.libraries[0].file, Path::new(&files[2]));
    let smi = DriverProgram { name: "nvidia-smi", file: format!("{inside}/usr/bin/nvidia-smi").into() };
    assert_eq!(found.programs, [smi]);
    assert_eq!(
        found.firmware,
        paths(&[&format!("{inside}/usr/lib/firmware/nvidia/{VERSION}/gsp_tu10x.bin")])
    );
}

#[test]
fn simulated_driver_has_two_libraries_and_the_hosts_nvidia_smi() {
    let file = |name: &str| format!("/usr/lib64/{name}.{VERSION}");
    let (_kept, root) = host(&[&file("libcuda.so"), &file("libnvcuvid.so")], &[]);
    program(&root, "/usr/bin/nvidia-smi");
    program(&root, "/usr/bin/nvidia-debugdump");
    let node = PathBuf::from("/var/lib/partage/simulated");
    let driver = InstalledDriver {
        cuda: node.join("lib/libcuda.so.550"),
        nvml: node.join("lib/libnvidia-ml.so.550"),
        simulated: Some(node),
        others: Default::default(),
    };
    let found = DriverFiles::find(&root, &driver, VERSION);
    // The node's directory is mounted beside the host's root, at the same path.
    assert_eq!(found.cuda.file, driver.cuda);
    assert_eq!((found.libraries.len(), found.programs.len(), found.programs[0].name), (0, 1, "nvidia-smi"));
}

#[test]
fn device_nodes_are_found_once_they_exist() {
    let (_kept, root) = host(&["/run/nvidia/driver/usr/lib64/libcuda.so.1"], &[]);
    let nodes = DeviceNodes::new(&root);
    // Only root can create devices; a link to one counts as one.
    let node = |path: &str| {
        let seen = root.at(Path::new(path));
        fs::create_dir_all(seen.parent().unwrap()).unwrap();
        symlink("/dev/null", &seen).unwrap();
    };
    assert_eq!(nodes.gpu(0), None);
    assert!(
        nodes
            .control()
            .unwrap_err()
            .to_string()
            .starts_with("/dev/nvidiactl does not exist on the node: run `nvidia-modprobe")
    );
    node("/dev/nvidiactl");
    assert!(
        nodes.control().unwrap_err().to_string().starts_with("/dev/nvidia-uvm does not exist on the node")
    );
    for path in [
        "/dev/nvidia0",
        "/dev/nvidia-uvm",
        "/run/nvidia/driver/dev/nvidia1",
        "/run/nvidia/driver/dev/nvidiactl",
    ] {
        node(path);
    }
    // A regular file is not a device.
    fs::write(root.at(Path::new("/dev/nvidia2")), "").unwrap();
    assert_eq!(nodes.gpu(2), None);
    let found = |path: &str, host: &str| HostDeviceNode { path: path.into(), host: host.into() };
    assert_eq!(nodes.gpu(0), Some(found("/dev/nvidia0", "/dev/nvidia0")));
    assert_eq!(nodes.gpu(1), Some(found("/dev/nvidia1", "/run/nvidia/driver/dev/nvidia1")));
    let control = ["/dev/nvidiactl", "/dev/nvidia-uvm"].map(|path| found(path, path));
    assert_eq!(nodes.control(), Ok(control.to_vec()));
    node("/dev/nvidia-modeset");
    assert_eq!(nodes.control().unwrap().len(), 3);
}
