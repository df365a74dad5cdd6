//! Partage's own image, as `make image` makes it, in a pod.

use crate::built;
use partage_testkit::bed::{Bed, Profile};
use partage_testkit::binaries::Settings;
use partage_testkit::image::{Product, product};
use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

#[test]
fn partage_runs_in_a_pod() {
    let folder = tempfile::tempdir().unwrap();
    let Some((archive, shim)) = built::image(folder.path()) else { return };
    let name = concat!("localhost/partage:", env!("CARGO_PKG_VERSION"));
    let Some(bed) = Bed::for_test(Profile::one_node().image(&archive)) else { return };
    // Where the program looks for it, as it was built for every image.
    let node = bed.node("node1").unwrap();
    node.run("/bed/bin/ctr", ["--namespace", "k8s.io", "images", "mount", name, "/mnt"]).unwrap();
    let inside = node.path("/mnt/usr/lib/partage/libpartage_shim.so").unwrap();
    assert!(fs::read(inside).unwrap() == fs::read(&shim).unwrap());

    // Without rights, without a writable file but in a folder that comes with the pod: what is in the image is enough.
    let container = |container: &str, arguments: &str| {
        format!(
            r#"{{"name": "{container}", "image": "{name}", "imagePullPolicy": "Never", "args": {arguments},
                 "volumeMounts": [{{"name": "node", "mountPath": "/node"}}],
                 "securityContext": {{"readOnlyRootFilesystem": true, "capabilities": {{"drop": ["ALL"]}}}}}}"#
        )
    };
    let containers = [
        container("version", r#"["--version"]"#),
        container(
            "sim",
            r#"["sim", "env", "--dir", "/node/sim", "--gpus", "8", "--model", "H100-SXM5-80GB"]"#,
        ),
    ]
    .join(", ");
    let manifest = format!(
        r#"{{"apiVersion": "v1", "kind": "Pod", "metadata": {{"name": "partage"}}, "spec": {{
            "restartPolicy": "Never",
            "securityContext": {{"runAsUser": 65534, "runAsNonRoot": true}},
            "volumes": [{{"name": "node", "emptyDir": {{}}}}],
            "containers": [{containers}]}}}}"#
    );
    bed.kubectl_with(&["apply", "-f", "-"], &manifest).unwrap();
    bed.kubectl(&["wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/partage", "--timeout=300s"])
        .unwrap();
    let version = bed.kubectl(&["logs", "partage", "--container", "version"]).unwrap();
    assert_eq!(version, format!("partage {}\n", env!("CARGO_PKG_VERSION")));
    // The simulated driver is made from what lies in /usr/lib/partage.
    let made = bed.kubectl(&["logs", "partage", "--container", "sim"]).unwrap();
    assert!(made.contains("export LD_LIBRARY_PATH=/node/sim/lib\n"), "{made}");
    assert!(made.contains("simulated node: 8 GPUs, NVIDIA H100 80GB HBM3, driver 550.163.01"), "{made}");
}

#[test]
fn a_shim_for_this_machine_only_is_refused() {
    let program = Path::new(partage_e2e::testkit()).to_path_buf();
    let folder = tempfile::tempdir().unwrap();
    let refused = |shim: &Path| {
        let archive = folder.path().join("partage.oci.tar");
        let asked = Product { program: program.clone(), shim: shim.to_path_buf(), archive, fresh: false };
        let made =
            product(&asked, &Settings::from_environment(), &mut std::io::sink(), &AtomicBool::new(false));
        made.unwrap_err().to_string()
    };
    let absent = folder.path().join("libpartage_shim.so");
    assert!(refused(&absent).ends_with("it is not there; build it: make shim"), "{}", refused(&absent));
    // Any program of this machine needs its C library.
    let said = refused(&program);
    assert!(said.contains("it needs ") && said.ends_with("build it: make shim"), "{said}");
}
