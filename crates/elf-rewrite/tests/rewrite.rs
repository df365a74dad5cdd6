//! Shared objects in another form: what comes out must still be what the dynamic loader takes.
#![allow(unsafe_code, clippy::unwrap_used, clippy::expect_used)]

use partage_elf_rewrite::elf::{self, ElfError, Form, Patch};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CString, c_void};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// Enough for full buckets; some names are the end of others, which linkers store only once.
const NAMES: usize = 300;

fn name(number: usize) -> String {
    match number % 3 {
        0 => format!("cuFunction{number}"),
        1 => format!("Function{}", number - 1),
        _ => format!("nvmlAnother{number}_v2"),
    }
}

fn names() -> Vec<String> {
    (0..NAMES).map(name).chain(["probe".to_string(), "settings".to_string(), room()]).collect()
}

struct Library {
    bytes: Vec<u8>,
    folder: tempfile::TempDir,
}

/// Makes room for a long path.
fn room() -> String {
    format!("room_{}", "x".repeat(600))
}

const MARKER: &str = "a place for settings, exactly one:";
/// What stands behind it at first: the number of the function that reads it.
const SETTINGS: i32 = NAMES as i32 + 1;

const LINK: &str = "-Wl,-Bsymbolic,-z,nodelete,--hash-style=gnu,-soname,libbefore_it_was_changed.so";

/// As ours is made: by the Rust compiler, with everything that the loader has to do for a Rust library.
static RUST: LazyLock<Library> = LazyLock::new(|| {
    let mut source = String::from("#![allow(non_snake_case)]\n");
    for number in 0..NAMES {
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
    let value = SETTINGS.to_le_bytes();
    writeln!(source, "#[used] static PLACE: Place = Place {{ marker: *b\"{MARKER}\", value: {value:?} }};")
        .unwrap();
    source.push_str(
        "#[unsafe(no_mangle)] pub extern \"C\" fn settings() -> i32 {
            i32::from_le_bytes(unsafe { std::ptr::read_volatile(&raw const PLACE.value) })
        }\n",
    );
    writeln!(source, "#[unsafe(no_mangle)] pub extern \"C\" fn {}() -> i32 {{ {} }}", room(), SETTINGS + 1)
        .unwrap();
    let build = |source: &Path, library: &Path| {
        let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()));
        rustc.args(["--edition", "2024", "--crate-type", "cdylib", "--crate-name", "before"]);
        rustc.arg(format!("-Clink-arg={LINK}")).arg("-o").arg(library).arg(source);
        rustc
    };
    library("before.rs", &source, build)
});

/// By the C compiler with its own linker, which lays files out in another way.
static C: LazyLock<Library> = LazyLock::new(|| {
    let mut source = String::new();
    for number in 0..NAMES {
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
    let value: String = SETTINGS.to_le_bytes().iter().map(|byte| format!("\\{byte:03o}")).collect();
    writeln!(source, "static const volatile unsigned char place[] = \"{MARKER}{value}\";").unwrap();
    let at = MARKER.len();
    writeln!(source, "int settings(void) {{ return place[{at}] | place[{at} + 1] << 8; }}").unwrap();
    writeln!(source, "int {}(void) {{ return {}; }}", room(), SETTINGS + 1).unwrap();
    let build = |source: &Path, library: &Path| {
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-O1", LINK, "-o"]).arg(library).arg(source);
        cc
    };
    library("before.c", &source, build)
});

fn library(file: &str, source: &str, build: impl Fn(&Path, &Path) -> Command) -> Library {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join(file), folder.path().join("libbefore.so"));
    std::fs::write(&from, source).unwrap();
    let output = build(&from, &to).output().expect("the compiler that builds this test is there");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Library { bytes: std::fs::read(&to).unwrap(), folder }
}

/// A library loaded into this process.
struct Loaded(*mut c_void);

impl Loaded {
    fn open(file: &Path) -> Loaded {
        let file = CString::new(file.to_str().unwrap()).unwrap();
        // SAFETY: the path is a C string; the library's initialisers are the language's own.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: it has no conditions.
            let error = unsafe { libc::dlerror() };
            // SAFETY: after a failure there is a text, which lives until the next call of this thread.
            let error = unsafe { std::ffi::CStr::from_ptr(error) };
            panic!("{file:?}: {error:?}");
        }
        Loaded(handle)
    }

    fn call(&self, name: &str) -> Option<i32> {
        let name = CString::new(name).unwrap();
        // SAFETY: the handle is open and the name is a C string.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if symbol.is_null() {
            return None;
        }
        // SAFETY: every function of the libraries above has this type.
        let function = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> i32>(symbol) };
        Some(function())
    }
}

static FILES: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

fn written(library: &Library, bytes: &[u8]) -> PathBuf {
    let number = FILES.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let file = library.folder.path().join(format!("libafter{number}.so"));
    std::fs::write(&file, bytes).unwrap();
    file
}

/// Under the names they have.
fn fewer(object: &[u8], soname: &str, wanted: &BTreeSet<&str>) -> Result<Vec<u8>, ElfError> {
    elf::rewrite(object, &Form { exports: elf::as_they_are(wanted.iter().copied()), ..Form::called(soname) })
}

fn keeps_exactly(library: &Library, wanted: &BTreeSet<&str>) {
    let after = fewer(&library.bytes, "libnvidia-ml.so.1", wanted).unwrap();
    assert_eq!(elf::exports(&after).unwrap(), wanted.iter().map(|name| name.to_string()).collect::<Vec<_>>());
    assert_eq!(elf::soname(&after).unwrap().as_deref(), Some("libnvidia-ml.so.1"));
    assert!(after.len() < library.bytes.len());
    let file = written(library, &after);
    let loaded = Loaded::open(&file);
    for (number, name) in names().iter().enumerate() {
        let answer = if name == "probe" { 5 } else { number as i32 };
        let expected = wanted.contains(name.as_str()).then_some(answer);
        assert_eq!(loaded.call(name), expected, "{name}");
    }
    std::fs::remove_file(file).unwrap();
}

fn renames_exactly(library: &Library, exports: &BTreeMap<&str, &str>) {
    let form = Form { exports: exports.clone(), ..Form::called("libcuda.so.1") };
    let after = elf::rewrite(&library.bytes, &form).unwrap();
    assert_eq!(
        elf::exports(&after).unwrap(),
        exports.keys().map(|name| name.to_string()).collect::<Vec<_>>()
    );
    let file = written(library, &after);
    let loaded = Loaded::open(&file);
    let all = names();
    let number = |symbol: &str| match all.iter().position(|name| name == symbol).unwrap() {
        NAMES => 5,
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
fn names_may_lose_their_beginnings() {
    let exports = BTreeMap::from([
        ("ction0", "cuFunction0"),
        ("Function0", "Function0"),
        ("Another2_v2", "nvmlAnother2_v2"),
        ("robe", "probe"),
        ("nvmlAnother5_v2", "nvmlAnother5_v2"),
    ]);
    renames_exactly(&RUST, &exports);
    renames_exactly(&C, &exports);
}

#[test]
fn what_cannot_be_a_name_is_said() {
    let error = |pairs: &[(&'static str, &'static str)]| {
        let exports = pairs.iter().copied().collect();
        elf::rewrite(&C.bytes, &Form { exports, ..Form::called("lib.so") }).unwrap_err().to_string()
    };
    assert!(error(&[("other", "probe")]).contains("other is not the end of probe"));
    assert!(error(&[("", "probe")]).contains("is not the end of"));
    assert!(error(&[("obe", "probe"), ("probe", "probe")]).contains("probe cannot be both obe and probe"));
}

/// A library that another will need: it has what that one lacks, and one name that both have.
fn behind(folder: &Path) -> PathBuf {
    let (source, library) = (folder.join("behind.c"), folder.join("libbehind.so"));
    let text = "int only_behind(void) { return 77; } int probe(void) { return 78; }";
    std::fs::write(&source, text).unwrap();
    // Under the very name of the one before it: the loader takes them apart by their files.
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"]).arg(&library).arg(&source);
    assert!(cc.status().unwrap().success());
    library
}

#[test]
fn a_library_that_is_needed_by_its_path_is_searched_next() {
    for library in [&*RUST, &*C] {
        let folder = tempfile::tempdir().unwrap();
        // As long as a path may be in the shim.
        let mut place = folder.path().to_path_buf();
        while place.as_os_str().len() < 490 {
            place.push("d".repeat((490 - place.as_os_str().len()).clamp(1, 200)));
        }
        std::fs::create_dir_all(&place).unwrap();
        let behind = behind(&place);
        let needed = behind.to_str().unwrap();
        assert!(needed.len() > 500, "{}", needed.len());
        let exports = elf::as_they_are(["probe", "cuFunction0"]);
        let form = Form { exports, needed: Some(needed), ..Form::called("libcuda.so.1") };
        let after = elf::rewrite(&library.bytes, &form).unwrap();
        let before = elf::needed(&library.bytes).unwrap();
        assert_eq!(elf::needed(&after).unwrap(), [vec![needed.to_string()], before].concat());
        let loaded = Loaded::open(&written(library, &after));
        assert_eq!(loaded.call("only_behind"), Some(77));
        assert_eq!(loaded.call("probe"), Some(5), "the one before answers what it has");
        assert_eq!(loaded.call("nvmlAnother2_v2"), None);
        // Where it is not there, neither is the other.
        let form = Form { needed: Some("/nowhere/libcuda.so.1"), ..Form::called("libcuda.so.1") };
        let file = written(library, &elf::rewrite(&library.bytes, &form).unwrap());
        let file = CString::new(file.to_str().unwrap()).unwrap();
        // SAFETY: the path is a C string; the library's initialisers are the language's own.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(handle.is_null());
    }
}

#[test]
fn what_comes_next_is_the_needed_library() {
    let source = "#define _GNU_SOURCE
        #include <dlfcn.h>
        int a_hook_probe(void) {
            int (*next)(void) = (int (*)(void))dlsym(RTLD_NEXT, \"probe\");
            return next ? next() + 100 : -1;
        }
        int some_room_for_a_path_some_room_for_a_path_some_room_for_a_path_some_room_for_a_path;";
    let library = library("hook.c", source, |source, library| {
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", LINK, "-o"]).arg(library).arg(source).arg("-ldl");
        cc
    });
    let behind = behind(library.folder.path());
    let exports = BTreeMap::from([("probe", "a_hook_probe")]);
    let form = Form { exports, needed: behind.to_str(), ..Form::called("libcuda.so.1") };
    let after = elf::rewrite(&library.bytes, &form).unwrap();
    let loaded = Loaded::open(&written(&library, &after));
    assert_eq!(loaded.call("probe"), Some(178));
    assert_eq!(loaded.call("only_behind"), Some(77));
    assert_eq!(loaded.call("a_hook_probe"), None);
}

#[test]
fn a_path_that_finds_no_room_is_refused() {
    let long = format!("/{}", "p".repeat(2000));
    let form = Form { needed: Some(&long), ..Form::called("lib.so") };
    let names = names();
    let kept = names.iter().map(String::as_str).filter(|name| !name.starts_with("room"));
    let error =
        elf::rewrite(&C.bytes, &Form { exports: elf::as_they_are(kept), ..form }).unwrap_err().to_string();
    assert!(error.contains("no 2002 bytes of its strings are free"), "{error}");
}

#[test]
fn settings_are_written_behind_their_marker() {
    for library in [&*RUST, &*C] {
        let exports = elf::as_they_are(["settings"]);
        let patch = |marker, bytes| Patch { marker, bytes };
        let made = |patches: &[Patch<'_>]| {
            elf::rewrite(
                &library.bytes,
                &Form { exports: exports.clone(), patches, ..Form::called("lib.so") },
            )
        };
        let after = made(&[patch(MARKER.as_bytes(), &[0x34, 0x12, 0, 0])]).unwrap();
        assert_eq!(Loaded::open(&written(library, &after)).call("settings"), Some(0x1234));
        let error = |patches: &[Patch<'_>]| made(patches).unwrap_err().to_string();
        assert!(error(&[patch(b"a marker that is nowhere", &[1])]).contains("it has no place for settings"));
        assert!(error(&[patch(b"", &[1])]).contains("no place"));
        assert!(error(&[patch(&[0; 4], &[1])]).contains("places for settings"));
        let endless = vec![1; library.bytes.len()];
        assert!(error(&[patch(MARKER.as_bytes(), &endless)]).contains("ends behind what is loaded"));
    }
}

#[test]
fn all_of_them_and_none_of_them() {
    let names = names();
    for library in [&*RUST, &*C] {
        keeps_exactly(library, &names.iter().map(String::as_str).collect());
        keeps_exactly(library, &BTreeSet::new());
        keeps_exactly(library, &BTreeSet::from(["probe"]));
    }
}

#[test]
fn a_rewritten_library_can_be_rewritten() {
    let once = fewer(&RUST.bytes, "libonce.so", &BTreeSet::from(["probe", "cuFunction0"])).unwrap();
    let twice = fewer(&once, "libtwice.so", &BTreeSet::from(["probe"])).unwrap();
    assert_eq!(elf::exports(&twice).unwrap(), ["probe"]);
    assert_eq!(Loaded::open(&written(&RUST, &twice)).call("probe"), Some(5));
}

#[test]
fn tools_of_others_see_the_same_names() {
    let wanted = BTreeSet::from(["probe", "cuFunction0", "Function0"]);
    for library in [&*RUST, &*C] {
        let file = written(library, &fewer(&library.bytes, "libafter.so", &wanted).unwrap());
        let Ok(output) =
            Command::new("nm").args(["-D", "--defined-only", "--format=just-symbols"]).arg(&file).output()
        else {
            // Where there is a linker there is nm; a compiler may bring its own linker.
            return;
        };
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        let seen = String::from_utf8(output.stdout).unwrap();
        assert_eq!(seen.lines().collect::<BTreeSet<_>>(), wanted);
    }
}

#[test]
fn names_that_go_leave_no_trace() {
    let after = fewer(&RUST.bytes, "libafter.so", &BTreeSet::from(["probe"])).unwrap();
    let text = String::from_utf8_lossy(&after);
    assert!(
        !text.contains("nvmlAnother2_v2") && !text.contains("libbefore"),
        "a dropped name is still there"
    );
}

#[test]
fn what_is_no_shared_object_is_refused_in_words() {
    for (bytes, words) in [
        (&b""[..], "does not start with"),
        (b"#!/bin/sh\n", "does not start with"),
        (b"\x7fELF", "its header says otherwise"),
        (b"\x7fELF\x01\x01", "its header says otherwise"),
    ] {
        let error = fewer(bytes, "lib.so", &BTreeSet::new()).unwrap_err().to_string();
        assert!(error.contains("no 64-bit little-endian shared object") && error.contains(words), "{error}");
    }
    let program = std::fs::read("/proc/self/exe").unwrap();
    assert!(fewer(&program, "lib.so", &BTreeSet::new()).is_err(), "a program has no soname");
}

#[test]
fn names_that_are_not_there_are_named() {
    let wanted = BTreeSet::from(["probe", "cuNever", "nvmlNever"]);
    let error = fewer(&RUST.bytes, "lib.so", &wanted).unwrap_err().to_string();
    assert_eq!(error, "it lacks 2 of the names wanted: cuNever, nvmlNever");
}

#[test]
fn every_truncated_file_is_refused_or_still_whole() {
    let wanted = BTreeSet::from(["probe"]);
    for library in [&*RUST, &*C] {
        let step = library.bytes.len() / 500 + 1;
        for end in (0..library.bytes.len()).step_by(step).chain(0..1024) {
            // The section headers stand at the end.
            assert!(fewer(&library.bytes[..end], "lib.so", &wanted).is_err(), "{end}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_subset_loads_and_is_exactly_what_was_kept(kept in prop::collection::vec(any::<bool>(), NAMES + 1)) {
        let names = names();
        let wanted = names.iter().zip(kept).filter(|(_, kept)| *kept).map(|(name, _)| name.as_str()).collect();
        keeps_exactly(&RUST, &wanted);
        keeps_exactly(&C, &wanted);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    // Most bytes of a file are code; the first ones, and the tables, decide.
    #[test]
    fn changed_bytes_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4_u8), 1..8),
        of_c in any::<bool>(),
    ) {
        let mut bytes = if of_c { C.bytes.clone() } else { RUST.bytes.clone() };
        for (index, value, place) in changes {
            let at = match place {
                0 => index.index(64),
                1 => index.index(1024),
                2 => index.index(16 * 1024),
                _ => bytes.len() - 1 - index.index(40 * 64),
            };
            bytes[at] = value;
        }
        let form = Form {
            exports: BTreeMap::from([("robe", "probe"), ("Function0", "Function0")]),
            needed: Some("/somewhere/else/libcuda.so.1"),
            patches: &[Patch { marker: MARKER.as_bytes(), bytes: &[1, 2, 3, 4] }],
            ..Form::called("lib.so")
        };
        if let Ok(after) = elf::rewrite(&bytes, &form) {
            let _ = (elf::versions(&after), elf::initialisers(&after), elf::needed(&after));
        }
    }
}
