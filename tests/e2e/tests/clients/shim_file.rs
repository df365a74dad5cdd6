//! The shim as a file that is put into images nobody here knows: what it needs, what it shows, what it stands before.
#![allow(unsafe_code)]

use partage_driver_api::exports::{DriverVersion, Library, exports};
use partage_elf_rewrite::elf;
use partage_shim::install::{self, Settings};
use partage_testkit::portable::Zig;
use partage_testkit::skip_or_fail;
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::sync::atomic::AtomicBool;

/// Built once for all tests here: this checkout's shim, against an old C library.
fn shim() -> Option<&'static Path> {
    static BUILT: LazyLock<PathBuf> = LazyLock::new(|| {
        Zig::ready().unwrap().shim(&AtomicBool::new(false)).unwrap_or_else(|e| panic!("{e}"))
    });
    match Zig::ready() {
        Ok(_) => Some(&BUILT),
        Err(missing) => {
            skip_or_fail(&missing);
            None
        }
    }
}

fn bytes() -> Option<Vec<u8>> {
    shim().map(|file| std::fs::read(file).unwrap())
}

#[test]
fn it_needs_a_c_library_of_2012_and_nothing_else() {
    let Some(bytes) = bytes() else { return };
    let versions = elf::versions(&bytes).unwrap();
    assert!(!versions.is_empty());
    for (file, version) in versions {
        let numbers =
            version.strip_prefix("GLIBC_").unwrap_or_else(|| panic!("{file} has no {version} everywhere"));
        let numbers: Vec<u32> = numbers.split('.').map(|number| number.parse().unwrap()).collect();
        assert!(numbers <= vec![2, 17], "{version} of {file} is too new");
    }
    // All of them come with the C library; the compiler's own, libgcc_s, does not.
    let family = ["libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0"];
    for needed in elf::needed(&bytes).unwrap() {
        assert!(
            family.contains(&needed.as_str()) || needed.starts_with("ld-linux-"),
            "{needed} is not everywhere"
        );
    }
}

#[test]
fn it_shows_its_hooks_and_makes_room() {
    let Some(bytes) = bytes() else { return };
    let names = elf::exports(&bytes).unwrap();
    let (hooks, rest): (Vec<_>, Vec<_>) = names.iter().partition(|name| name.starts_with("partage_hook_"));
    assert!(!hooks.is_empty());
    assert!(rest.len() == 1 && rest[0].starts_with("partage_room_") && rest[0].len() >= 600, "{rest:?}");
}

#[test]
fn loading_it_runs_nothing_of_ours_and_leaves_code_alone() {
    let Some(bytes) = bytes() else { return };
    // Rust's library notes the program's arguments: a few instructions.
    assert_eq!(elf::initialisers(&bytes).unwrap(), 1);
    assert!(!elf::has_text_relocations(&bytes).unwrap());
}

/// A simulated driver in one folder, and the stand-ins before it in another.
struct Stood {
    folder: tempfile::TempDir,
}

impl Stood {
    fn up(shim: &Path) -> Stood {
        let stood = Stood { folder: tempfile::tempdir().unwrap() };
        std::fs::create_dir(stood.real()).unwrap();
        std::fs::create_dir(stood.stand_ins()).unwrap();
        let driver = partage_sim_node::install::shared_object().unwrap();
        partage_sim_node::install::libraries(
            &driver,
            &stood.real(),
            DriverVersion::R550,
            stood.folder.path(),
        )
        .unwrap();
        let settings = Settings {
            region: Path::new("/nowhere/region"),
            real_cuda: &stood.real().join("libcuda.so.1"),
            real_nvml: &stood.real().join("libnvidia-ml.so.1"),
            version: Some(DriverVersion::R550.version()),
        };
        install::stand_in(shim, &stood.stand_ins(), &settings).unwrap();
        stood
    }

    fn real(&self) -> PathBuf {
        self.folder.path().join("real")
    }

    fn stand_ins(&self) -> PathBuf {
        self.folder.path().join("stand-ins")
    }
}

struct Loaded(*mut c_void);

impl Loaded {
    fn open(file: &Path) -> Loaded {
        let path = CString::new(file.to_str().unwrap()).unwrap();
        // SAFETY: the path is a C string; initialisers are the language's own.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null(), "{path:?} is not loaded");
        Loaded(handle)
    }

    /// A function and the file that has it.
    fn function(&self, name: &str) -> Option<(*mut c_void, PathBuf)> {
        let name = CString::new(name).unwrap();
        // SAFETY: the handle is open and the name is a C string.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if symbol.is_null() {
            return None;
        }
        // SAFETY: all zeros is a value of it.
        let mut told: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: the address is one of a loaded function, and `told` is ours.
        assert_ne!(unsafe { libc::dladdr(symbol, &mut told) }, 0);
        // SAFETY: dladdr gave the name of a file that is loaded and stays.
        let file = unsafe { CStr::from_ptr(told.dli_fname) };
        Some((symbol, PathBuf::from(file.to_str().unwrap())))
    }
}

#[test]
fn the_simulated_driver_is_reached_through_it_by_every_name() {
    let Some(shim) = shim() else { return };
    let stood = Stood::up(shim);
    for library in Library::ALL {
        let file = stood.stand_ins().join(library.soname());
        let bytes = std::fs::read(&file).unwrap();
        assert_eq!(elf::soname(&bytes).unwrap().as_deref(), Some(library.soname()));
        let hooked: BTreeSet<String> = elf::exports(&bytes).unwrap().into_iter().collect();
        let real = stood.real().join(library.soname());
        assert_eq!(elf::needed(&bytes).unwrap()[0], real.to_str().unwrap());
        let loaded = Loaded::open(&file);
        let mut ours = 0;
        for name in exports(library, DriverVersion::R550) {
            let expected = if hooked.contains(name) { &file } else { &real };
            let (_, found) = loaded.function(name).unwrap_or_else(|| panic!("{name} is gone"));
            assert_eq!(found, *expected, "{name}");
            ours += usize::from(hooked.contains(name));
        }
        assert!(ours > 0, "nothing stands before {library:?}");
    }
}

#[test]
fn the_driver_answers_a_hook_as_it_answers_anybody() {
    let Some(shim) = shim() else { return };
    let stood = Stood::up(shim);
    for (library, name) in
        [("libcuda.so.1", "cuDriverGetVersion"), ("libnvidia-ml.so.1", "nvmlSystemGetCudaDriverVersion")]
    {
        let answers = [stood.stand_ins(), stood.real()].map(|folder| {
            let (symbol, _) = Loaded::open(&folder.join(library)).function(name).unwrap();
            // SAFETY: the version functions of both libraries have this type.
            let call = unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_int) -> c_int>(symbol)
            };
            let mut version = -1;
            // SAFETY: the number is ours.
            (unsafe { call(&mut version) }, version)
        });
        assert_eq!(answers[0], answers[1], "{name}");
    }
}

#[test]
fn a_program_without_a_loader_does_not_notice() {
    let Some(shim) = shim() else { return };
    let stood = Stood::up(shim);
    let folder = stood.folder.path();
    let (source, program) = (folder.join("program.c"), folder.join("program"));
    std::fs::write(&source, "#include <stdio.h>\nint main(void) { puts(\"hello\"); return 7; }\n").unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-static", "-o"]).arg(&program).arg(&source);
    let output = cc.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = Command::new(&program)
        .env("LD_PRELOAD", stood.stand_ins().join("libcuda.so.1"))
        .env("LD_LIBRARY_PATH", stood.stand_ins())
        .output()
        .unwrap();
    assert_eq!(
        (output.status.code(), &output.stdout[..], &output.stderr[..]),
        (Some(7), &b"hello\n"[..], &b""[..])
    );
}

#[test]
fn a_program_that_asks_for_no_gpu_does_not_notice() {
    let Some(shim) = shim() else { return };
    let stood = Stood::up(shim);
    let run = |preload: Option<PathBuf>| {
        let mut command = Command::new("cat");
        command.arg("/proc/self/maps").env("LD_LIBRARY_PATH", stood.stand_ins());
        let output = command.envs(preload.map(|file| ("LD_PRELOAD", file))).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(!run(None).contains("stand-ins"), "nobody asked for it");
    let maps = run(Some(stood.stand_ins().join("libcuda.so.1")));
    assert!(maps.contains("stand-ins/libcuda.so.1"), "{maps}");
    assert!(!maps.contains("region"), "no region is mapped before a driver is called");
}
