//! The Rust in `src/generated` is what the files in `proto` make, byte for byte.
//!
//! After a change: `PARTAGE_REGENERATE=1 cargo test -p partage-kubelet-api --test generated`, then read the difference.

use std::fs;
use std::path::Path;

/// The name of a `.proto` file, and of its package: the generator names its output after the package.
const CONTRACTS: &[(&str, &str)] =
    &[("deviceplugin.v1beta1", "v1beta1"), ("podresources.v1", "v1"), ("cri.v1", "runtime.v1")];

#[test]
fn generated_code_is_what_the_contracts_make() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (name, package) in CONTRACTS {
        let out = tempfile::tempdir().unwrap();
        let contract = protox::compile([format!("{name}.proto")], [here.join("proto")])
            .unwrap_or_else(|e| panic!("{e:?}"));
        tonic_prost_build::configure()
            .build_transport(false)
            .out_dir(out.path())
            .emit_rerun_if_changed(false)
            .compile_fds(contract)
            .unwrap();
        let made = fs::read_to_string(out.path().join(format!("{package}.rs"))).unwrap();
        let path = here.join(format!("src/generated/{name}.rs"));
        if std::env::var_os("PARTAGE_REGENERATE").is_some() {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, made).unwrap();
        } else {
            let kept = fs::read_to_string(&path).unwrap_or_default();
            assert!(
                kept == made,
                "{} is not what proto/{name}.proto makes: run PARTAGE_REGENERATE=1 cargo test -p partage-kubelet-api \
                 --test generated",
                path.display()
            );
        }
    }
}
