//! Partage's own image, as `make image` builds it, in a pod.

use crate::test_image;
use partage_testkit::bed::{BedProfile, TestBed};
use partage_testkit::binaries::BuildPaths;
use partage_testkit::image::{ProductImage, build_product_image};
use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

#[test]
fn partage_runs_in_a_pod() {
    let folder = tempfile::tempdir().unwrap();
    let Some((archive, shim)) = test_image::build_image(folder.path()) else { return };
    let name = concat!("localhost/partage:", env!("CARGO_PKG_VERSION"));
    let Some(bed) = TestBed::for_test(BedProfile::one_node().image(&archive)) else { return };
    // The program finds the shim in the image, as it was built for every image.
    let node = bed.node("node1").unwrap();
    node.run("/bed/bin/ctr", ["--namespace", "k8s.io", "images", "mount", name, "/mnt"]).unwrap();
    let inside = node.path("/mnt/usr/lib/partage/libpartage_shim.so").unwrap();
    assert!(fs::read(inside).unwrap() == fs::read(&shim).unwrap());

    // Without privileges and with a read-only root: the image and an empty volume are sufficient.
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
    let expected = format!("partage {} (", env!("CARGO_PKG_VERSION"));
    assert!(version.starts_with(&expected) && version.ends_with(")\n"), "{version}");
    // The simulated driver is made from the files in /usr/lib/partage.
    let made = bed.kubectl(&["logs", "partage", "--container", "sim"]).unwrap();
    assert!(made.contains("export LD_LIBRARY_PATH=/node/sim/lib\n"), "{made}");
    assert!(made.contains("simulated node: 8 GPUs, NVIDIA H100 80GB HBM3, driver 550.163.01"), "{made}");
}

#[test]
fn shim_that_needs_a_newer_glibc_is_refused() {
    let program = Path::new(partage_e2e::testkit()).to_path_buf();
    let folder = tempfile::tempdir().unwrap();
    let refused = |shim: &Path| {
        let archive = folder.path().join("partage.oci.tar");
        let asked =
            ProductImage { program: program.clone(), shim: shim.to_path_buf(), archive, fresh: false };
        let made = build_product_image(
            &asked,
            &BuildPaths::from_environment(),
            &mut std::io::sink(),
            &AtomicBool::new(false),
        );
        made.unwrap_err().to_string()
    };
    let absent = folder.path().join("libpartage_shim.so");
    assert!(refused(&absent).ends_with("it does not exist; build it: make shim"), "{}", refused(&absent));
    // Any program that was built on this machine needs its C library.
    let message = refused(&program);
    assert!(message.contains("it requires ") && message.ends_with("build it: make shim"), "{message}");
}
