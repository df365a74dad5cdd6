//! The libraries as programs find them: exactly the names, sonames and links of the real ones.
#![allow(unsafe_code, clippy::unwrap_used, clippy::expect_used)]

use partage_driver_api::exports::{DriverVersion, Library, exports};
use partage_elf_rewrite::elf;
use partage_sim_node::install;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// A shared object with every name of every version, each of which answers its number.
static OBJECT: LazyLock<(tempfile::TempDir, PathBuf)> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let (source, object) = (folder.path().join("all.c"), folder.path().join("all.so"));
    let mut text = String::new();
    for library in Library::ALL {
        for name in DriverVersion::ALL
            .into_iter()
            .flat_map(|driver| exports(library, driver))
            .collect::<BTreeSet<_>>()
        {
            writeln!(text, "int {name}(void) {{ return {}; }}", name.len()).unwrap();
        }
    }
    // The place of the node's folder.
    let place: Vec<String> = install::marker().iter().map(u8::to_string).collect();
    writeln!(text, "const unsigned char place[{} + 512] = {{ {} }};", place.len(), place.join(", ")).unwrap();
    std::fs::write(&source, text).unwrap();
    let link = "-Wl,-Bsymbolic,--hash-style=gnu,-soname,libpartage_sim.so";
    let cc = Command::new("cc").args(["-shared", "-fPIC", link, "-o"]).arg(&object).arg(&source).status();
    assert!(cc.unwrap().success());
    (folder, object)
});

fn installed(object: &Path, driver: DriverVersion) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    install::libraries(object, folder.path(), driver, folder.path()).unwrap();
    folder
}

fn exports_exactly_what_is_real(object: &Path) {
    for driver in DriverVersion::ALL {
        let folder = installed(object, driver);
        for (library, count) in Library::ALL.into_iter().zip(match driver {
            DriverVersion::R535 => [620, 332],
            DriverVersion::R550 => [656, 350],
        }) {
            let bytes = std::fs::read(folder.path().join(library.soname())).unwrap();
            let names = elf::exports(&bytes).unwrap();
            let mut real: Vec<&str> = exports(library, driver).collect();
            real.sort_unstable();
            assert_eq!(names, real);
            assert_eq!(names.len(), count, "{library:?} {driver:?}");
            assert_eq!(elf::soname(&bytes).unwrap().as_deref(), Some(library.soname()));
        }
    }
}

#[test]
fn both_libraries_of_both_drivers_export_what_the_real_ones_do() {
    exports_exactly_what_is_real(&OBJECT.1);
}

#[test]
fn our_own_shared_object_has_every_name() {
    // Beside the test's own program: see the docs of `install`.
    exports_exactly_what_is_real(&install::shared_object().unwrap());
}

#[test]
fn files_and_links_lie_as_the_packages_lay_them() {
    let folder = installed(&OBJECT.1, DriverVersion::R535);
    let mut seen: Vec<String> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            match std::fs::read_link(entry.path()) {
                Ok(to) => format!("{name} -> {}", to.display()),
                Err(_) => name,
            }
        })
        .collect();
    seen.sort();
    assert_eq!(
        seen,
        [
            "libcuda.so -> libcuda.so.1",
            "libcuda.so.1 -> libcuda.so.535.261.03",
            "libcuda.so.535.261.03",
            "libnvidia-ml.so -> libnvidia-ml.so.1",
            "libnvidia-ml.so.1 -> libnvidia-ml.so.535.261.03",
            "libnvidia-ml.so.535.261.03",
        ]
    );
    // A second time nothing is in the way.
    install::libraries(&OBJECT.1, folder.path(), DriverVersion::R535, folder.path()).unwrap();
}

#[test]
fn a_program_finds_them_by_their_sonames() {
    let folder = installed(&OBJECT.1, DriverVersion::R550);
    let program = folder.path().join("program");
    let source = folder.path().join("program.c");
    let text = "int cuInit(void); int nvmlInit_v2(void); int main(void) { return cuInit() + nvmlInit_v2(); }";
    std::fs::write(&source, text).unwrap();
    let mut cc = Command::new("cc");
    cc.arg("-o").arg(&program).arg(&source).arg("-L").arg(folder.path()).args(["-lcuda", "-lnvidia-ml"]);
    assert!(cc.status().unwrap().success(), "the linker takes them");
    let status = Command::new(&program).env("LD_LIBRARY_PATH", folder.path()).status().unwrap();
    assert_eq!(status.code(), Some("cuInit".len() as i32 + "nvmlInit_v2".len() as i32));
}

#[test]
fn what_is_wrong_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.so");
    std::fs::write(&text, "hello").unwrap();
    let absent = folder.path().join("absent");
    let error = |object: &Path, into: &Path, node: &Path| {
        install::libraries(object, into, DriverVersion::R550, node).unwrap_err().to_string()
    };
    let here = folder.path();
    assert!(error(&text, here, here).contains("cannot be made into libcuda.so.1: it is no 64-bit"));
    assert!(error(&absent, here, here).contains("absent: cannot be read"));
    assert!(error(&OBJECT.1, &absent, here).contains("cannot be written"));
    assert!(error(&OBJECT.1, here, &absent).contains("absent: the node cannot be found"));
    let deep = here.join(vec!["x".repeat(200); 3].join("/"));
    std::fs::create_dir_all(&deep).unwrap();
    let words = error(&OBJECT.1, here, &deep);
    assert!(words.starts_with("the node's folder, ") && words.contains("longer than 511 bytes"), "{words}");
}
