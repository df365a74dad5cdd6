//! The stand-ins as programs find them: the shim's functions first, then the driver's.
#![allow(unsafe_code, clippy::unwrap_used, clippy::expect_used)]

use partage_elf_rewrite::elf;
use partage_shim::install::{self, StandInPaths};
use std::ffi::{CStr, CString, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// A driver with two functions per library, in a directory of its own that programs do not search.
struct FakeDriver {
    folder: tempfile::TempDir,
    cuda: PathBuf,
    nvml: PathBuf,
    stand_ins: PathBuf,
}

static DRIVER: LazyLock<FakeDriver> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let (real, stand_ins) = (folder.path().join("real"), folder.path().join("stand-ins"));
    std::fs::create_dir(&real).unwrap();
    std::fs::create_dir(&stand_ins).unwrap();
    let cuda = built(
        &real,
        "libcuda.so.1",
        "int cuCtxPopCurrent_v2(int *v) { *v = 12040; return 0; }
         int cuNotYetInvented(void) { return 7; }",
    );
    let nvml = built(
        &real,
        "libnvidia-ml.so.1",
        "int nvmlInternalGetExportTable(int *v) { *v = 12050; return 0; }
         int nvmlNotYetInvented(void) { return 8; }",
    );
    let paths = StandInPaths {
        region: Path::new("/nowhere/region"),
        real_cuda: &cuda,
        real_nvml: &nvml,
        version: Some("550.163.01"),
    };
    install::write_stand_ins(&install::shared_object().unwrap(), &stand_ins, &paths).unwrap();
    FakeDriver { folder, cuda, nvml, stand_ins }
});

fn built(folder: &Path, soname: &str, text: &str) -> PathBuf {
    let (source, library) = (folder.join(format!("{soname}.c")), folder.join(soname));
    std::fs::write(&source, text).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC"]).arg(format!("-Wl,-soname,{soname}"));
    assert!(cc.arg("-o").arg(&library).arg(&source).status().unwrap().success());
    library
}

/// Returns a function of a library, and the file that it is in.
fn function(library: &Path, name: &str) -> Option<(*mut c_void, PathBuf)> {
    let (path, name) = (CString::new(library.to_str().unwrap()).unwrap(), CString::new(name).unwrap());
    // SAFETY: the path is a C string; the libraries have no initializers but the compiler's.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!handle.is_null(), "{path:?} is not loaded");
    // SAFETY: the handle is open and the name is a C string.
    let symbol = unsafe { libc::dlsym(handle, name.as_ptr()) };
    if symbol.is_null() {
        return None;
    }
    // SAFETY: the structure consists of pointers, for which all zeros is a valid value.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: the address is that of a loaded function, and `info` is a local structure.
    assert_ne!(unsafe { libc::dladdr(symbol, &mut info) }, 0);
    // SAFETY: `dladdr` returned the name of a file that stays loaded.
    let file = unsafe { CStr::from_ptr(info.dli_fname) };
    Some((symbol, PathBuf::from(file.to_str().unwrap())))
}

fn number(library: &Path, name: &str) -> (c_int, c_int, PathBuf) {
    let (symbol, file) = function(library, name).unwrap();
    // SAFETY: the test driver's functions take a pointer to a number; the hooks take that and, one of them, an id.
    let call = unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_int, *const u8) -> c_int>(symbol)
    };
    let mut number = 0;
    // SAFETY: the pointer is to a local variable, and a null id is allowed.
    let result = unsafe { call(&mut number, std::ptr::null()) };
    (result, number, file)
}

#[test]
fn hooked_name_is_the_shims_and_reaches_the_driver() {
    let cuda = DRIVER.stand_ins.join("libcuda.so.1");
    assert_eq!(number(&cuda, "cuCtxPopCurrent_v2"), (0, 12040, cuda));
    let nvml = DRIVER.stand_ins.join("libnvidia-ml.so.1");
    assert_eq!(number(&nvml, "nvmlInternalGetExportTable"), (0, 12050, nvml));
}

#[test]
fn other_names_are_the_drivers() {
    let found = |library: &str, name| function(&DRIVER.stand_ins.join(library), name).map(|(_, file)| file);
    assert_eq!(found("libcuda.so.1", "cuNotYetInvented"), Some(DRIVER.cuda.clone()));
    assert_eq!(found("libnvidia-ml.so.1", "nvmlNotYetInvented"), Some(DRIVER.nvml.clone()));
    assert_eq!(found("libcuda.so.1", "nvmlNotYetInvented"), None);
}

#[test]
fn all_file_names_lead_to_the_same_library() {
    let loaded = function(&DRIVER.stand_ins.join("libcuda.so.1"), "cuCtxPopCurrent_v2").unwrap().0;
    for name in ["libcuda.so", "libcuda.so.550.163.01"] {
        assert_eq!(function(&DRIVER.stand_ins.join(name), "cuCtxPopCurrent_v2").unwrap().0, loaded, "{name}");
    }
}

#[test]
fn linked_program_gets_both() {
    let program = DRIVER.folder.path().join("program");
    let source = DRIVER.folder.path().join("program.c");
    let text = "#define _GNU_SOURCE
        #include <dlfcn.h>
        int cuCtxPopCurrent_v2(int *); int cuNotYetInvented(void);
        int main(void) {
            int version = 0;
            void *next = dlsym(RTLD_NEXT, \"cuCtxPopCurrent_v2\");
            if (next != (void *)cuCtxPopCurrent_v2 || cuCtxPopCurrent_v2(&version)) return 1;
            return version == 12040 && cuNotYetInvented() == 7 ? 42 : 2;
        }";
    std::fs::write(&source, text).unwrap();
    let mut cc = Command::new("cc");
    // The linker resolves the driver's names in the driver's library.
    cc.arg("-o").arg(&program).arg(&source).arg(&DRIVER.cuda).arg("-ldl");
    assert!(cc.status().unwrap().success());
    let run = |variable: &str, value: &Path| {
        Command::new(&program).env(variable, value).env_remove("PARTAGE_SHIM_LIBRARY").output().unwrap()
    };
    let output = run("LD_LIBRARY_PATH", &DRIVER.stand_ins);
    assert_eq!(output.status.code(), Some(42), "{output:?}");
    assert!(output.stdout.is_empty() && output.stderr.is_empty(), "{output:?}");
}

#[test]
fn each_file_exports_only_the_names_of_its_library() {
    let object = std::fs::read(install::shared_object().unwrap()).unwrap();
    let symbols = elf::exports(&object).unwrap();
    let hooks: Vec<&str> = symbols.iter().filter_map(|name| name.strip_prefix("partage_hook_")).collect();
    let rest: Vec<_> = symbols.iter().filter(|name| !name.starts_with("partage_hook_")).collect();
    assert!(rest.len() == 1 && rest[0].starts_with("partage_room_") && rest[0].len() > 600, "{rest:?}");
    for (file, prefix) in [("libcuda.so.1", "cu"), ("libnvidia-ml.so.1", "nvml")] {
        let bytes = std::fs::read(DRIVER.stand_ins.join(file)).unwrap();
        let expected: Vec<&str> = hooks.iter().copied().filter(|name| name.starts_with(prefix)).collect();
        assert!(!expected.is_empty());
        assert_eq!(elf::exports(&bytes).unwrap(), expected, "{file}");
        assert_eq!(elf::soname(&bytes).unwrap().as_deref(), Some(file));
        let text = String::from_utf8_lossy(&bytes);
        assert!(
            !text.contains("partage_hook_") && !text.contains("partage_room_"),
            "{file}: a symbol's old name"
        );
    }
    let needed = |file| elf::needed_libraries(&std::fs::read(DRIVER.stand_ins.join(file)).unwrap()).unwrap();
    assert_eq!(needed("libcuda.so.1")[0], DRIVER.cuda.to_str().unwrap());
    assert_eq!(needed("libnvidia-ml.so.1")[0], DRIVER.nvml.to_str().unwrap());
}

#[test]
fn files_and_links_are_where_programs_look() {
    let mut seen: Vec<String> = std::fs::read_dir(&DRIVER.stand_ins)
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
            "libcuda.so.1",
            "libcuda.so.550.163.01 -> libcuda.so.1",
            "libnvidia-ml.so -> libnvidia-ml.so.1",
            "libnvidia-ml.so.1",
            "libnvidia-ml.so.550.163.01 -> libnvidia-ml.so.1",
        ]
    );
}

#[test]
fn unusable_paths_are_refused_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let long = format!("/{}", "x".repeat(511));
    let error = |region: &str, real: &str| {
        let paths = StandInPaths {
            region: Path::new(region),
            real_cuda: Path::new(real),
            real_nvml: Path::new("/n"),
            version: None,
        };
        let done = install::write_stand_ins(&install::shared_object().unwrap(), folder.path(), &paths);
        done.unwrap_err().to_string()
    };
    assert_eq!(
        error("region", "/c"),
        "the region's directory, region, cannot be embedded into a library: it is not absolute"
    );
    assert!(error(&long, "/c").ends_with("it is longer than 511 bytes"));
    assert!(error("/r", &long).ends_with("it is longer than 511 bytes"));
    assert!(error("/r", "/$ORIGIN/libcuda.so.1").contains("it contains a $"));
    assert!(error("/r", "/c\0d").contains("zero byte"));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn longest_paths_fit() {
    let folder = tempfile::tempdir().unwrap();
    let (region, cuda, nvml) = ("/r".repeat(255) + "/", "/c".repeat(255) + "x", "/n".repeat(255) + "x");
    assert_eq!(cuda.len(), 511);
    let paths = StandInPaths {
        region: Path::new(&region),
        real_cuda: Path::new(&cuda),
        real_nvml: Path::new(&nvml),
        version: None,
    };
    install::write_stand_ins(&install::shared_object().unwrap(), folder.path(), &paths).unwrap();
    let bytes = std::fs::read(folder.path().join("libcuda.so.1")).unwrap();
    assert_eq!(elf::needed_libraries(&bytes).unwrap()[0], cuda);
    // Again, over the existing files.
    install::write_stand_ins(&install::shared_object().unwrap(), folder.path(), &paths).unwrap();
}
