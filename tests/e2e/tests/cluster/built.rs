//! Partage's own image, of the program that was built beside the tests.

use partage_testkit::binaries::Settings;
use partage_testkit::image::{Product, product};
use partage_testkit::portable::Zig;
use partage_testkit::skip_or_fail;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// A program that cargo puts beside the tests whenever the whole workspace is tested.
pub(crate) fn beside(name: &str) -> Option<PathBuf> {
    let program = Path::new(partage_e2e::testkit()).with_file_name(name);
    if program.exists() {
        return Some(program);
    }
    skip_or_fail(&format!("{} is not built: cargo build --workspace", program.display()));
    None
}

/// An archive in this folder, and the shim that is in it.
pub(crate) fn image(folder: &Path) -> Option<(PathBuf, PathBuf)> {
    let stop = AtomicBool::new(false);
    let program = beside("partage")?;
    let archive = folder.join("partage.oci.tar");
    let made = Zig::ready().and_then(|zig| zig.shim(&stop)).and_then(|shim| {
        let asked = Product { program, shim: shim.clone(), archive: archive.clone(), fresh: false };
        product(&asked, &Settings::from_environment(), &mut std::io::sink(), &stop)?;
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
