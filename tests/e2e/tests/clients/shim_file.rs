//! The shim as a file that is put into unknown images: its dependencies, its exports, and the libraries it replaces.
#![allow(unsafe_code)]

use partage_driver_api::exports::{DriverLibraryKind, DriverVersion, exports};
use partage_elf_rewrite::elf;
use partage_shim::install::{self, StandInPaths};
use partage_testkit::portable_shim::ZigToolchain;
use partage_testkit::skip_or_fail;
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::sync::atomic::AtomicBool;

/// Returns this checkout's shim, built once for all tests here against an old C library.
fn build_shim() -> Option<&'static Path> {
    static BUILT: LazyLock<PathBuf> = LazyLock::new(|| {
        ZigToolchain::ready().unwrap().shim(&AtomicBool::new(false)).unwrap_or_else(|e| panic!("{e}"))
    });
    match ZigToolchain::ready() {
        Ok(_) => Some(&BUILT),
        Err(missing) => {
            skip_or_fail(&missing);
            None
        }
    }
}

fn shim_bytes() -> Option<Vec<u8>> {
    build_shim().map(|file| std::fs::read(file).unwrap())
}

#[test]
fn shim_needs_only_glibc_2_17() {
    let Some(bytes) = shim_bytes() else { return };
    let versions = elf::needed_versions(&bytes).unwrap();
    assert!(!versions.is_empty());
    for (file, version) in versions {
        let numbers = version
            .strip_prefix("GLIBC_")
            .unwrap_or_else(|| panic!("{version} of {file} is not available everywhere"));
        let numbers: Vec<u32> = numbers.split('.').map(|number| number.parse().unwrap()).collect();
        assert!(numbers <= vec![2, 17], "{version} of {file} is too new");
    }
    // All of them are part of the C library; the compiler's own, libgcc_s, is not.
    let family = ["libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0"];
    for needed in elf::needed_libraries(&bytes).unwrap() {
        assert!(
            family.contains(&needed.as_str()) || needed.starts_with("ld-linux-"),
            "{needed} is not available everywhere"
        );
    }
}

#[test]
fn shim_exports_only_hooks_and_name_padding() {
    let Some(bytes) = shim_bytes() else { return };
    let names = elf::exports(&bytes).unwrap();
    let (hooks, rest): (Vec<_>, Vec<_>) = names.iter().partition(|name| name.starts_with("partage_hook_"));
    assert!(!hooks.is_empty());
    assert!(rest.len() == 1 && rest[0].starts_with("partage_room_") && rest[0].len() >= 600, "{rest:?}");
}

#[test]
fn loading_the_shim_runs_no_own_code_and_needs_no_text_relocations() {
    let Some(bytes) = shim_bytes() else { return };
    // Rust's standard library saves the program's arguments: a few instructions.
    assert_eq!(elf::initializer_count(&bytes).unwrap(), 1);
    assert!(!elf::has_text_relocations(&bytes).unwrap());
}

/// A simulated driver in one directory, and the libraries that replace it in another.
struct InstalledShim {
    folder: tempfile::TempDir,
}

impl InstalledShim {
    fn install(shim: &Path) -> InstalledShim {
        let installed = InstalledShim { folder: tempfile::tempdir().unwrap() };
        std::fs::create_dir(installed.driver_dir()).unwrap();
        std::fs::create_dir(installed.stand_in_dir()).unwrap();
        let driver = partage_sim_node::install::shared_object().unwrap();
        partage_sim_node::install::write_libraries(
            &driver,
            &installed.driver_dir(),
            DriverVersion::R550,
            installed.folder.path(),
        )
        .unwrap();
        let settings = StandInPaths {
            region: Path::new("/nowhere/region"),
            real_cuda: &installed.driver_dir().join("libcuda.so.1"),
            real_nvml: &installed.driver_dir().join("libnvidia-ml.so.1"),
            version: Some(DriverVersion::R550.version()),
        };
        install::write_stand_ins(shim, &installed.stand_in_dir(), &settings).unwrap();
        installed
    }

    fn driver_dir(&self) -> PathBuf {
        self.folder.path().join("real")
    }

    fn stand_in_dir(&self) -> PathBuf {
        self.folder.path().join("stand-ins")
    }
}

struct LoadedLibrary(*mut c_void);

impl LoadedLibrary {
    fn open(file: &Path) -> LoadedLibrary {
        let path = CString::new(file.to_str().unwrap()).unwrap();
        // SAFETY: the path is a C string; the only initializer is the standard library's own.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null(), "{path:?} cannot be loaded");
        LoadedLibrary(handle)
    }

    /// Returns a function and the file that contains it.
    fn function(&self, name: &str) -> Option<(*mut c_void, PathBuf)> {
        let name = CString::new(name).unwrap();
        // SAFETY: the handle is open and the name is a C string.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if symbol.is_null() {
            return None;
        }
        // SAFETY: all zeros is a valid `Dl_info`.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: the address is that of a loaded function, and `info` is a local variable.
        assert_ne!(unsafe { libc::dladdr(symbol, &mut info) }, 0);
        // SAFETY: dladdr returned the name of a file that is loaded and stays loaded.
        let file = unsafe { CStr::from_ptr(info.dli_fname) };
        Some((symbol, PathBuf::from(file.to_str().unwrap())))
    }
}

#[test]
fn stand_ins_resolve_every_driver_function() {
    let Some(shim) = build_shim() else { return };
    let installed = InstalledShim::install(shim);
    for library in DriverLibraryKind::ALL {
        let file = installed.stand_in_dir().join(library.soname());
        let bytes = std::fs::read(&file).unwrap();
        assert_eq!(elf::soname(&bytes).unwrap().as_deref(), Some(library.soname()));
        let hooked: BTreeSet<String> = elf::exports(&bytes).unwrap().into_iter().collect();
        let real = installed.driver_dir().join(library.soname());
        assert_eq!(elf::needed_libraries(&bytes).unwrap()[0], real.to_str().unwrap());
        let loaded = LoadedLibrary::open(&file);
        let mut ours = 0;
        for name in exports(library, DriverVersion::R550) {
            let expected = if hooked.contains(name) { &file } else { &real };
            let (_, found) = loaded.function(name).unwrap_or_else(|| panic!("{name} is missing"));
            assert_eq!(found, *expected, "{name}");
            ours += usize::from(hooked.contains(name));
        }
        assert!(ours > 0, "no function is replaced in {library:?}");
    }
}

#[test]
fn hooked_call_returns_the_drivers_answer() {
    let Some(shim) = build_shim() else { return };
    let installed = InstalledShim::install(shim);
    for (library, name) in
        [("libcuda.so.1", "cuDriverGetVersion"), ("libnvidia-ml.so.1", "nvmlSystemGetCudaDriverVersion")]
    {
        let answers = [installed.stand_in_dir(), installed.driver_dir()].map(|folder| {
            let (symbol, _) = LoadedLibrary::open(&folder.join(library)).function(name).unwrap();
            // SAFETY: the version functions of both libraries have this type.
            let call = unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_int) -> c_int>(symbol)
            };
            let mut version = -1;
            // SAFETY: the pointer is valid for one number.
            (unsafe { call(&mut version) }, version)
        });
        assert_eq!(answers[0], answers[1], "{name}");
    }
}

#[test]
fn static_program_is_unaffected_by_preload() {
    let Some(shim) = build_shim() else { return };
    let installed = InstalledShim::install(shim);
    let folder = installed.folder.path();
    let (source, program) = (folder.join("program.c"), folder.join("program"));
    std::fs::write(&source, "#include <stdio.h>\nint main(void) { puts(\"hello\"); return 7; }\n").unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-static", "-o"]).arg(&program).arg(&source);
    let output = cc.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = Command::new(&program)
        .env("LD_PRELOAD", installed.stand_in_dir().join("libcuda.so.1"))
        .env("LD_LIBRARY_PATH", installed.stand_in_dir())
        .output()
        .unwrap();
    assert_eq!(
        (output.status.code(), &output.stdout[..], &output.stderr[..]),
        (Some(7), &b"hello\n"[..], &b""[..])
    );
}

#[test]
fn program_without_gpu_use_is_unaffected_by_preload() {
    let Some(shim) = build_shim() else { return };
    let installed = InstalledShim::install(shim);
    let run = |preload: Option<PathBuf>| {
        let mut command = Command::new("cat");
        command.arg("/proc/self/maps").env("LD_LIBRARY_PATH", installed.stand_in_dir());
        let output = command.envs(preload.map(|file| ("LD_PRELOAD", file))).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(!run(None).contains("stand-ins"), "it is not preloaded");
    let maps = run(Some(installed.stand_in_dir().join("libcuda.so.1")));
    assert!(maps.contains("stand-ins/libcuda.so.1"), "{maps}");
    assert!(!maps.contains("region"), "no region is mapped before a driver is called");
}
