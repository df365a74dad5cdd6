//! Rewrites shared objects of several linkers and loads the results with the dynamic loader.
#![allow(unsafe_code, clippy::unwrap_used, clippy::expect_used)]

use partage_elf_rewrite::elf::{self, ElfError, MarkerPatch, RewriteSpec};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CString, c_void};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// Enough to fill hash buckets. Some names are suffixes of others, which linkers store only once.
const FUNCTION_COUNT: usize = 300;

fn name(number: usize) -> String {
    match number % 3 {
        0 => format!("cuFunction{number}"),
        1 => format!("Function{}", number - 1),
        _ => format!("nvmlAnother{number}_v2"),
    }
}

fn names() -> Vec<String> {
    (0..FUNCTION_COUNT)
        .map(name)
        .chain(["probe".to_string(), "settings".to_string(), padding_name()])
        .collect()
}

struct TestLibrary {
    bytes: Vec<u8>,
    folder: tempfile::TempDir,
}

/// A long name whose removal frees the space for a long path.
fn padding_name() -> String {
    format!("padding_{}", "x".repeat(600))
}

const MARKER: &str = "a place for settings, exactly one:";
/// The value after the marker as compiled: the number of the function that returns it.
const DEFAULT_SETTING: i32 = FUNCTION_COUNT as i32 + 1;

const LINK_ARGUMENTS: &str =
    "-Wl,-Bsymbolic,-z,nodelete,--hash-style=gnu,-soname,libbefore_it_was_changed.so";

/// Built by the Rust compiler, like the real shared objects, with everything that the loader must do for a Rust
/// library.
static RUST_LIBRARY: LazyLock<TestLibrary> = LazyLock::new(|| {
    let mut source = String::from("#![allow(non_snake_case)]\n");
    for number in 0..FUNCTION_COUNT {
        let name = name(number);
        writeln!(source, "#[unsafe(no_mangle)] pub extern \"C\" fn {name}() -> i32 {{ {number} }}").unwrap();
    }
    source
        .push_str("static ALL: [extern \"C\" fn() -> i32; 3] = [cuFunction0, Function0, nvmlAnother2_v2];\n");
    source.push_str("thread_local!(static COUNT: std::cell::RefCell<Vec<i32>> = const { std::cell::RefCell::new(Vec::new()) });\n");
    source.push_str(
        "#[unsafe(no_mangle)] pub extern \"C\" fn probe() -> i32 {
            std::panic::set_hook(Box::new(|_| {}));
            let caught = std::panic::catch_unwind(|| panic!(\"{}\", std::env::args().count())).is_err();
            let told = std::thread::spawn(|| COUNT.with_borrow_mut(|c| { c.push(4); c.len() })).join().unwrap();
            ALL.iter().map(|f| f()).sum::<i32>() + i32::from(caught) + told as i32
        }\n",
    );
    writeln!(source, "#[repr(C)] struct Place {{ marker: [u8; {}], value: [u8; 4] }}", MARKER.len()).unwrap();
    let value = DEFAULT_SETTING.to_le_bytes();
    writeln!(source, "#[used] static PLACE: Place = Place {{ marker: *b\"{MARKER}\", value: {value:?} }};")
        .unwrap();
    source.push_str(
        "#[unsafe(no_mangle)] pub extern \"C\" fn settings() -> i32 {
            i32::from_le_bytes(unsafe { std::ptr::read_volatile(&raw const PLACE.value) })
        }\n",
    );
    writeln!(
        source,
        "#[unsafe(no_mangle)] pub extern \"C\" fn {}() -> i32 {{ {} }}",
        padding_name(),
        DEFAULT_SETTING + 1
    )
    .unwrap();
    let build = |source: &Path, library: &Path| {
        let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()));
        rustc.args(["--edition", "2024", "--crate-type", "cdylib", "--crate-name", "before"]);
        rustc.arg(format!("-Clink-arg={LINK_ARGUMENTS}")).arg("-o").arg(library).arg(source);
        rustc
    };
    library("before.rs", &source, build)
});

/// Built by the C compiler with its default linker, which uses another file layout.
static C_LIBRARY: LazyLock<TestLibrary> = LazyLock::new(|| {
    let mut source = String::new();
    for number in 0..FUNCTION_COUNT {
        writeln!(source, "int {}(void) {{ return {number}; }}", name(number)).unwrap();
    }
    source.push_str(
        "#include <stdio.h>
        static int (*all[])(void) = { cuFunction0, Function0, nvmlAnother2_v2 };
        static __thread int told = 1;
        int probe(void) {
            char text[8];
            snprintf(text, sizeof text, \"%d\", told);
            return all[0]() + all[1]() + all[2]() + told + (text[0] == '1');
        }\n",
    );
    let value: String = DEFAULT_SETTING.to_le_bytes().iter().map(|byte| format!("\\{byte:03o}")).collect();
    writeln!(source, "static const volatile unsigned char place[] = \"{MARKER}{value}\";").unwrap();
    let at = MARKER.len();
    writeln!(source, "int settings(void) {{ return place[{at}] | place[{at} + 1] << 8; }}").unwrap();
    writeln!(source, "int {}(void) {{ return {}; }}", padding_name(), DEFAULT_SETTING + 1).unwrap();
    let build = |source: &Path, library: &Path| {
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-O1", LINK_ARGUMENTS, "-o"]).arg(library).arg(source);
        cc
    };
    library("before.c", &source, build)
});

fn library(file: &str, source: &str, build: impl Fn(&Path, &Path) -> Command) -> TestLibrary {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join(file), folder.path().join("libbefore.so"));
    std::fs::write(&from, source).unwrap();
    let output = build(&from, &to).output().expect("the compiler that builds this test is available");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    TestLibrary { bytes: std::fs::read(&to).unwrap(), folder }
}

/// A library that is loaded into this process.
struct LoadedLibrary(*mut c_void);

impl LoadedLibrary {
    fn open(file: &Path) -> LoadedLibrary {
        let file = CString::new(file.to_str().unwrap()).unwrap();
        // SAFETY: the path is a C string; the library has only the initializers of its language runtime.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: dlerror has no preconditions.
            let error = unsafe { libc::dlerror() };
            // SAFETY: after a failure dlerror returns a C string, which is valid until the next call of this thread.
            let error = unsafe { std::ffi::CStr::from_ptr(error) };
            panic!("{file:?}: {error:?}");
        }
        LoadedLibrary(handle)
    }

    fn call(&self, name: &str) -> Option<i32> {
        let name = CString::new(name).unwrap();
        // SAFETY: the handle is open and the name is a C string.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if symbol.is_null() {
            return None;
        }
        // SAFETY: all functions of the test libraries have this type.
        let function = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> i32>(symbol) };
        Some(function())
    }
}

static NEXT_FILE: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

fn write_library(library: &TestLibrary, bytes: &[u8]) -> PathBuf {
    let number = NEXT_FILE.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let file = library.folder.path().join(format!("libafter{number}.so"));
    std::fs::write(&file, bytes).unwrap();
    file
}

/// Rewrites an object so that it exports these symbols under their own names.
fn rewrite_with(object: &[u8], soname: &str, wanted: &BTreeSet<&str>) -> Result<Vec<u8>, ElfError> {
    elf::rewrite(
        object,
        &RewriteSpec { exports: elf::unrenamed(wanted.iter().copied()), ..RewriteSpec::with_soname(soname) },
    )
}

fn assert_keeps_exactly(library: &TestLibrary, wanted: &BTreeSet<&str>) {
    let after = rewrite_with(&library.bytes, "libnvidia-ml.so.1", wanted).unwrap();
    assert_eq!(elf::exports(&after).unwrap(), wanted.iter().map(|name| name.to_string()).collect::<Vec<_>>());
    assert_eq!(elf::soname(&after).unwrap().as_deref(), Some("libnvidia-ml.so.1"));
    assert!(after.len() < library.bytes.len());
    let file = write_library(library, &after);
    let loaded = LoadedLibrary::open(&file);
    for (number, name) in names().iter().enumerate() {
        let answer = if name == "probe" { 5 } else { number as i32 };
        let expected = wanted.contains(name.as_str()).then_some(answer);
        assert_eq!(loaded.call(name), expected, "{name}");
    }
    std::fs::remove_file(file).unwrap();
}

fn assert_renames_exactly(library: &TestLibrary, exports: &BTreeMap<&str, &str>) {
    let form = RewriteSpec { exports: exports.clone(), ..RewriteSpec::with_soname("libcuda.so.1") };
    let after = elf::rewrite(&library.bytes, &form).unwrap();
    assert_eq!(
        elf::exports(&after).unwrap(),
        exports.keys().map(|name| name.to_string()).collect::<Vec<_>>()
    );
    let file = write_library(library, &after);
    let loaded = LoadedLibrary::open(&file);
    let all = names();
    let number = |symbol: &str| match all.iter().position(|name| name == symbol).unwrap() {
        FUNCTION_COUNT => 5,
        number => number as i32,
    };
    for (name, symbol) in exports {
        assert_eq!(loaded.call(name), Some(number(symbol)), "{name}");
    }
    for name in all.iter().filter(|name| !exports.contains_key(name.as_str())) {
        assert_eq!(loaded.call(name), None, "{name}");
    }
    std::fs::remove_file(file).unwrap();
}

#[test]
fn exports_may_drop_a_prefix() {
    let exports = BTreeMap::from([
        ("ction0", "cuFunction0"),
        ("Function0", "Function0"),
        ("Another2_v2", "nvmlAnother2_v2"),
        ("robe", "probe"),
        ("nvmlAnother5_v2", "nvmlAnother5_v2"),
    ]);
    assert_renames_exactly(&RUST_LIBRARY, &exports);
    assert_renames_exactly(&C_LIBRARY, &exports);
}

#[test]
fn export_that_is_not_a_suffix_is_refused() {
    let error = |pairs: &[(&'static str, &'static str)]| {
        let exports = pairs.iter().copied().collect();
        elf::rewrite(&C_LIBRARY.bytes, &RewriteSpec { exports, ..RewriteSpec::with_soname("lib.so") })
            .unwrap_err()
            .to_string()
    };
    assert!(error(&[("other", "probe")]).contains("other is not a suffix of probe"));
    assert!(error(&[("", "probe")]).contains("is not a suffix of"));
    assert!(
        error(&[("obe", "probe"), ("probe", "probe")])
            .contains("probe cannot be exported both as obe and as probe")
    );
}

/// Builds a library that another one will need. It has one symbol that the other lacks and one that both have.
fn next_library(folder: &Path) -> PathBuf {
    let (source, library) = (folder.join("next.c"), folder.join("libnext.so"));
    let text = "int only_behind(void) { return 77; } int probe(void) { return 78; }";
    std::fs::write(&source, text).unwrap();
    // It has the same soname as the other: the loader distinguishes them by their files.
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"]).arg(&library).arg(&source);
    assert!(cc.status().unwrap().success());
    library
}

#[test]
fn library_needed_by_path_is_searched_next() {
    for library in [&*RUST_LIBRARY, &*C_LIBRARY] {
        let folder = tempfile::tempdir().unwrap();
        // The maximum length of a path in the shim.
        let mut place = folder.path().to_path_buf();
        while place.as_os_str().len() < 490 {
            place.push("d".repeat((490 - place.as_os_str().len()).clamp(1, 200)));
        }
        std::fs::create_dir_all(&place).unwrap();
        let next_library = next_library(&place);
        let needed = next_library.to_str().unwrap();
        assert!(needed.len() > 500, "{}", needed.len());
        let exports = elf::unrenamed(["probe", "cuFunction0"]);
        let form = RewriteSpec { exports, needed: Some(needed), ..RewriteSpec::with_soname("libcuda.so.1") };
        let after = elf::rewrite(&library.bytes, &form).unwrap();
        let before = elf::needed_libraries(&library.bytes).unwrap();
        assert_eq!(elf::needed_libraries(&after).unwrap(), [vec![needed.to_string()], before].concat());
        let loaded = LoadedLibrary::open(&write_library(library, &after));
        assert_eq!(loaded.call("only_behind"), Some(77));
        assert_eq!(loaded.call("probe"), Some(5), "the first library has precedence");
        assert_eq!(loaded.call("nvmlAnother2_v2"), None);
        // If the needed library is missing, loading fails.
        let form =
            RewriteSpec { needed: Some("/nowhere/libcuda.so.1"), ..RewriteSpec::with_soname("libcuda.so.1") };
        let file = write_library(library, &elf::rewrite(&library.bytes, &form).unwrap());
        let file = CString::new(file.to_str().unwrap()).unwrap();
        // SAFETY: the path is a C string; the library has only the initializers of its language runtime.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(handle.is_null());
    }
}

#[test]
fn rtld_next_finds_the_needed_library() {
    let source = "#define _GNU_SOURCE
        #include <dlfcn.h>
        int a_hook_probe(void) {
            int (*next)(void) = (int (*)(void))dlsym(RTLD_NEXT, \"probe\");
            return next ? next() + 100 : -1;
        }
        int some_room_for_a_path_some_room_for_a_path_some_room_for_a_path_some_room_for_a_path;";
    let library = library("hook.c", source, |source, library| {
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", LINK_ARGUMENTS, "-o"]).arg(library).arg(source).arg("-ldl");
        cc
    });
    let next_library = next_library(library.folder.path());
    let exports = BTreeMap::from([("probe", "a_hook_probe")]);
    let form =
        RewriteSpec { exports, needed: next_library.to_str(), ..RewriteSpec::with_soname("libcuda.so.1") };
    let after = elf::rewrite(&library.bytes, &form).unwrap();
    let loaded = LoadedLibrary::open(&write_library(&library, &after));
    assert_eq!(loaded.call("probe"), Some(178));
    assert_eq!(loaded.call("only_behind"), Some(77));
    assert_eq!(loaded.call("a_hook_probe"), None);
}

#[test]
fn needed_path_without_free_space_is_refused() {
    let long = format!("/{}", "p".repeat(2000));
    let form = RewriteSpec { needed: Some(&long), ..RewriteSpec::with_soname("lib.so") };
    let names = names();
    let kept = names.iter().map(String::as_str).filter(|name| !name.starts_with("padding_"));
    let error = elf::rewrite(&C_LIBRARY.bytes, &RewriteSpec { exports: elf::unrenamed(kept), ..form })
        .unwrap_err()
        .to_string();
    assert!(error.contains("no 2002 bytes are free in its string table"), "{error}");
}

#[test]
fn settings_are_written_after_their_marker() {
    for library in [&*RUST_LIBRARY, &*C_LIBRARY] {
        let exports = elf::unrenamed(["settings"]);
        let patch = |marker, bytes| MarkerPatch { marker, bytes };
        let made = |patches: &[MarkerPatch<'_>]| {
            elf::rewrite(
                &library.bytes,
                &RewriteSpec { exports: exports.clone(), patches, ..RewriteSpec::with_soname("lib.so") },
            )
        };
        let after = made(&[patch(MARKER.as_bytes(), &[0x34, 0x12, 0, 0])]).unwrap();
        assert_eq!(LoadedLibrary::open(&write_library(library, &after)).call("settings"), Some(0x1234));
        let error = |patches: &[MarkerPatch<'_>]| made(patches).unwrap_err().to_string();
        assert!(error(&[patch(b"a marker that is nowhere", &[1])]).contains("it has no place for settings"));
        assert!(error(&[patch(b"", &[1])]).contains("no place"));
        assert!(error(&[patch(&[0; 4], &[1])]).contains("places for settings"));
        let endless = vec![1; library.bytes.len()];
        assert!(error(&[patch(MARKER.as_bytes(), &endless)]).contains("exceeds the loaded segment"));
    }
}

#[test]
fn all_none_or_one_export_is_kept() {
    let names = names();
    for library in [&*RUST_LIBRARY, &*C_LIBRARY] {
        assert_keeps_exactly(library, &names.iter().map(String::as_str).collect());
        assert_keeps_exactly(library, &BTreeSet::new());
        assert_keeps_exactly(library, &BTreeSet::from(["probe"]));
    }
}

#[test]
fn rewritten_library_can_be_rewritten() {
    let once =
        rewrite_with(&RUST_LIBRARY.bytes, "libonce.so", &BTreeSet::from(["probe", "cuFunction0"])).unwrap();
    let twice = rewrite_with(&once, "libtwice.so", &BTreeSet::from(["probe"])).unwrap();
    assert_eq!(elf::exports(&twice).unwrap(), ["probe"]);
    assert_eq!(LoadedLibrary::open(&write_library(&RUST_LIBRARY, &twice)).call("probe"), Some(5));
}

#[test]
fn nm_lists_the_same_names() {
    let wanted = BTreeSet::from(["probe", "cuFunction0", "Function0"]);
    for library in [&*RUST_LIBRARY, &*C_LIBRARY] {
        let file = write_library(library, &rewrite_with(&library.bytes, "libafter.so", &wanted).unwrap());
        let Ok(output) =
            Command::new("nm").args(["-D", "--defined-only", "--format=just-symbols"]).arg(&file).output()
        else {
            // The compiler may bring its own linker without nm.
            return;
        };
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        let seen = String::from_utf8(output.stdout).unwrap();
        assert_eq!(seen.lines().collect::<BTreeSet<_>>(), wanted);
    }
}

#[test]
fn dropped_names_are_erased() {
    let after = rewrite_with(&RUST_LIBRARY.bytes, "libafter.so", &BTreeSet::from(["probe"])).unwrap();
    let text = String::from_utf8_lossy(&after);
    assert!(
        !text.contains("nvmlAnother2_v2") && !text.contains("libbefore"),
        "a dropped name is still in the file"
    );
}

#[test]
fn other_files_are_refused_with_a_reason() {
    for (bytes, words) in [
        (&b""[..], "magic number is missing"),
        (b"#!/bin/sh\n", "magic number is missing"),
        (b"\x7fELF", "another class, byte order or file type"),
        (b"\x7fELF\x01\x01", "another class, byte order or file type"),
    ] {
        let error = rewrite_with(bytes, "lib.so", &BTreeSet::new()).unwrap_err().to_string();
        assert!(
            error.contains("not a 64-bit little-endian shared object") && error.contains(words),
            "{error}"
        );
    }
    let program = std::fs::read("/proc/self/exe").unwrap();
    assert!(rewrite_with(&program, "lib.so", &BTreeSet::new()).is_err(), "a program has no soname");
}

#[test]
fn missing_names_are_listed() {
    let wanted = BTreeSet::from(["probe", "cuNever", "nvmlNever"]);
    let error = rewrite_with(&RUST_LIBRARY.bytes, "lib.so", &wanted).unwrap_err().to_string();
    assert_eq!(error, "2 requested symbols are missing: cuNever, nvmlNever");
}

#[test]
fn truncated_file_is_refused() {
    let wanted = BTreeSet::from(["probe"]);
    for library in [&*RUST_LIBRARY, &*C_LIBRARY] {
        let step = library.bytes.len() / 500 + 1;
        for end in (0..library.bytes.len()).step_by(step).chain(0..1024) {
            // The section headers are at the end of the file.
            assert!(rewrite_with(&library.bytes[..end], "lib.so", &wanted).is_err(), "{end}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_subset_loads_and_exports_exactly_its_names(kept in prop::collection::vec(any::<bool>(), FUNCTION_COUNT + 1)) {
        let names = names();
        let wanted = names.iter().zip(kept).filter(|(_, kept)| *kept).map(|(name, _)| name.as_str()).collect();
        assert_keeps_exactly(&RUST_LIBRARY, &wanted);
        assert_keeps_exactly(&C_LIBRARY, &wanted);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    // Most bytes of a file are code, so the header and the tables are changed more often.
    #[test]
    fn changed_bytes_do_not_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4_u8), 1..8),
        of_c in any::<bool>(),
    ) {
        let mut bytes = if of_c { C_LIBRARY.bytes.clone() } else { RUST_LIBRARY.bytes.clone() };
        for (index, value, place) in changes {
            let at = match place {
                0 => index.index(64),
                1 => index.index(1024),
                2 => index.index(16 * 1024),
                _ => bytes.len() - 1 - index.index(40 * 64),
            };
            bytes[at] = value;
        }
        let form = RewriteSpec {
            exports: BTreeMap::from([("robe", "probe"), ("Function0", "Function0")]),
            needed: Some("/somewhere/else/libcuda.so.1"),
            patches: &[MarkerPatch { marker: MARKER.as_bytes(), bytes: &[1, 2, 3, 4] }],
            ..RewriteSpec::with_soname("lib.so")
        };
        if let Ok(after) = elf::rewrite(&bytes, &form) {
            let _ = (elf::needed_versions(&after), elf::initializer_count(&after), elf::needed_libraries(&after));
        }
    }
}
