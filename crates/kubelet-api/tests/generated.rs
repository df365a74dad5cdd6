//! Checks that the Rust code in `src/generated` is generated from the files in `proto`, byte for byte.
//!
//! After a change, run `PARTAGE_REGENERATE=1 cargo test -p partage-kubelet-api --test generated` and review the diff.

use std::fs;
use std::path::Path;

/// The name of each `.proto` file and of its package, after which the generator names its output.
const PROTO_FILES: &[(&str, &str)] =
    &[("deviceplugin.v1beta1", "v1beta1"), ("podresources.v1", "v1"), ("cri.v1", "runtime.v1")];

#[test]
fn generated_code_matches_the_proto_files() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (name, package) in PROTO_FILES {
        let out = tempfile::tempdir().unwrap();
        let descriptors = protox::compile([format!("{name}.proto")], [here.join("proto")])
            .unwrap_or_else(|e| panic!("{e:?}"));
        tonic_prost_build::configure()
            .build_transport(false)
            .out_dir(out.path())
            .emit_rerun_if_changed(false)
            .compile_fds(descriptors)
            .unwrap();
        let generated = fs::read_to_string(out.path().join(format!("{package}.rs"))).unwrap();
        let path = here.join(format!("src/generated/{name}.rs"));
        if std::env::var_os("PARTAGE_REGENERATE").is_some() {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, generated).unwrap();
        } else {
            let committed = fs::read_to_string(&path).unwrap_or_default();
            assert!(
                committed == generated,
                "{} does not match proto/{name}.proto: run PARTAGE_REGENERATE=1 cargo test -p partage-kubelet-api \
                 --test generated",
                path.display()
            );
        }
    }
}
