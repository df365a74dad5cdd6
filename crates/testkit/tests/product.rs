//! Partage's own image, as `make image` makes it, in a pod.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use partage_testkit::bed::{Bed, Profile};
use partage_testkit::binaries::{Settings, skip_or_fail};
use partage_testkit::image::{Product, product};
use std::path::Path;
use std::sync::atomic::AtomicBool;

#[test]
fn partage_runs_in_a_pod() {
    // Built next to us whenever the whole workspace is tested.
    let program = Path::new(env!("CARGO_BIN_EXE_partage-testkit")).with_file_name("partage");
    if !program.exists() {
        return skip_or_fail(&format!("{} is not built: cargo build --package partage", program.display()));
    }
    let folder = tempfile::tempdir().unwrap();
    let archive = folder.path().join("partage.oci.tar");
    let asked = Product { program, archive: archive.clone(), fresh: false };
    let mut said = Vec::new();
    if let Err(missing) = product(&asked, &Settings::from_environment(), &mut said, &AtomicBool::new(false)) {
        return skip_or_fail(&missing);
    }
    let said = String::from_utf8(said).unwrap();
    let name =
        said.split_whitespace().find(|word| word.starts_with("localhost/partage:")).expect(&said).to_string();

    let Some(bed) = Bed::for_test(Profile::one_node().image(&archive)) else { return };
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
    bed.kubectl(&["wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/partage", "--timeout=90s"])
        .unwrap();
    let version = bed.kubectl(&["logs", "partage", "--container", "version"]).unwrap();
    assert_eq!(version, format!("partage {}\n", env!("CARGO_PKG_VERSION")));
    // The simulated driver is made from what lies in /usr/lib/partage.
    let made = bed.kubectl(&["logs", "partage", "--container", "sim"]).unwrap();
    assert!(made.contains("export LD_LIBRARY_PATH=/node/sim/lib\n"), "{made}");
    assert!(made.contains("simulated node: 8 GPUs, NVIDIA H100 80GB HBM3, driver 550.163.01"), "{made}");
}
