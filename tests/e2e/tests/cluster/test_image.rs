//! The image of Partage with the program that was built with the tests.

use partage_testkit::binaries::BuildPaths;
use partage_testkit::image::{ProductImage, build_product_image};
use partage_testkit::portable_shim::ZigToolchain;
use partage_testkit::skip_or_fail;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// Returns a program that cargo builds whenever the whole workspace is tested.
pub(crate) fn built_program(name: &str) -> Option<PathBuf> {
    let program = Path::new(partage_e2e::testkit()).with_file_name(name);
    if program.exists() {
        return Some(program);
    }
    skip_or_fail(&format!("{} is not built: cargo build --workspace", program.display()));
    None
}

/// Builds an archive in this directory, and returns it and the shim that is in it.
pub(crate) fn build_image(folder: &Path) -> Option<(PathBuf, PathBuf)> {
    let stop = AtomicBool::new(false);
    let program = built_program("partage")?;
    let archive = folder.join("partage.oci.tar");
    let made = ZigToolchain::ready().and_then(|zig| zig.shim(&stop)).and_then(|shim| {
        let asked = ProductImage { program, shim: shim.clone(), archive: archive.clone(), fresh: false };
        build_product_image(&asked, &BuildPaths::from_environment(), &mut std::io::sink(), &stop)?;
        Ok(shim)
    });
    match made {
        Ok(shim) => Some((archive, shim)),
        Err(missing) => {
            skip_or_fail(&missing);
            None
        }
    }
}
