//! Tests of the installed libraries: exactly the symbols, sonames and links of the real ones.
#![allow(unsafe_code, clippy::unwrap_used, clippy::expect_used)]

use partage_driver_api::exports::{DriverLibraryKind, DriverVersion, exports};
use partage_elf_rewrite::elf;
use partage_sim_node::install;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// A shared object with the symbols of all versions; each function returns the length of its name.
static SHARED_OBJECT: LazyLock<(tempfile::TempDir, PathBuf)> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    let (source, object) = (dir.path().join("all.c"), dir.path().join("all.so"));
    let mut text = String::new();
    for library in DriverLibraryKind::ALL {
        for name in DriverVersion::ALL
            .into_iter()
            .flat_map(|driver| exports(library, driver))
            .collect::<BTreeSet<_>>()
        {
            writeln!(text, "int {name}(void) {{ return {}; }}", name.len()).unwrap();
        }
    }
    // The place where the node's directory is written.
    let place: Vec<String> = install::marker().iter().map(u8::to_string).collect();
    writeln!(text, "const unsigned char place[{} + 512] = {{ {} }};", place.len(), place.join(", ")).unwrap();
    std::fs::write(&source, text).unwrap();
    let link = "-Wl,-Bsymbolic,--hash-style=gnu,-soname,libpartage_sim.so";
    let cc = Command::new("cc").args(["-shared", "-fPIC", link, "-o"]).arg(&object).arg(&source).status();
    assert!(cc.unwrap().success());
    (dir, object)
});

fn installed(object: &Path, driver: DriverVersion) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    install::write_libraries(object, dir.path(), driver, dir.path()).unwrap();
    dir
}

fn assert_exports_match_real(object: &Path) {
    for driver in DriverVersion::ALL {
        let dir = installed(object, driver);
        for (library, count) in DriverLibraryKind::ALL.into_iter().zip(match driver {
            DriverVersion::R535 => [620, 332],
            DriverVersion::R550 => [656, 350],
        }) {
            let bytes = std::fs::read(dir.path().join(library.soname())).unwrap();
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
fn installed_libraries_export_the_real_symbols() {
    assert_exports_match_real(&SHARED_OBJECT.1);
}

#[test]
fn own_shared_object_has_every_symbol() {
    // Found next to the test program: see the docs of `install`.
    assert_exports_match_real(&install::shared_object().unwrap());
}

#[test]
fn files_and_links_match_the_real_packages() {
    let dir = installed(&SHARED_OBJECT.1, DriverVersion::R535);
    let mut seen: Vec<String> = std::fs::read_dir(dir.path())
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
    // Installing again replaces the files.
    install::write_libraries(&SHARED_OBJECT.1, dir.path(), DriverVersion::R535, dir.path()).unwrap();
}

#[test]
fn program_links_and_loads_by_soname() {
    let dir = installed(&SHARED_OBJECT.1, DriverVersion::R550);
    let program = dir.path().join("program");
    let source = dir.path().join("program.c");
    let text = "int cuInit(void); int nvmlInit_v2(void); int main(void) { return cuInit() + nvmlInit_v2(); }";
    std::fs::write(&source, text).unwrap();
    let mut cc = Command::new("cc");
    cc.arg("-o").arg(&program).arg(&source).arg("-L").arg(dir.path()).args(["-lcuda", "-lnvidia-ml"]);
    assert!(cc.status().unwrap().success(), "linking failed");
    let status = Command::new(&program).env("LD_LIBRARY_PATH", dir.path()).status().unwrap();
    assert_eq!(status.code(), Some("cuInit".len() as i32 + "nvmlInit_v2".len() as i32));
}

#[test]
fn install_errors_name_the_problem() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("text.so");
    std::fs::write(&text, "hello").unwrap();
    let absent = dir.path().join("absent");
    let error = |object: &Path, into: &Path, node: &Path| {
        install::write_libraries(object, into, DriverVersion::R550, node).unwrap_err().to_string()
    };
    let here = dir.path();
    assert!(error(&text, here, here).contains("cannot create libcuda.so.1 from"));
    assert!(error(&absent, here, here).contains("absent: cannot read the file"));
    assert!(error(&SHARED_OBJECT.1, &absent, here).contains("cannot write the file"));
    assert!(error(&SHARED_OBJECT.1, here, &absent).contains("absent: cannot resolve the node's directory"));
    let deep = here.join(vec!["x".repeat(200); 3].join("/"));
    std::fs::create_dir_all(&deep).unwrap();
    let words = error(&SHARED_OBJECT.1, here, &deep);
    assert!(
        words.starts_with("the node's directory, ") && words.contains("longer than 511 bytes"),
        "{words}"
    );
}
