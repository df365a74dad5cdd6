//! Shared objects that lose names: what is left must still be what the dynamic loader takes.
#![allow(unsafe_code, clippy::unwrap_used, clippy::expect_used)]

use partage_sim::install::elf;
use proptest::prelude::*;
use std::collections::BTreeSet;
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
    (0..NAMES).map(name).chain(["probe".to_string()]).collect()
}

struct Library {
    bytes: Vec<u8>,
    folder: tempfile::TempDir,
}

const LINK: &str = "-Wl,-Bsymbolic,-z,nodelete,--hash-style=gnu,-soname,libpartage_sim.so";

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
        }",
    );
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
        }",
    );
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

fn keeps_exactly(library: &Library, wanted: &BTreeSet<&str>) {
    let after = elf::rewrite(&library.bytes, "libnvidia-ml.so.1", wanted).unwrap();
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
    let once = elf::rewrite(&RUST.bytes, "libonce.so", &BTreeSet::from(["probe", "cuFunction0"])).unwrap();
    let twice = elf::rewrite(&once, "libtwice.so", &BTreeSet::from(["probe"])).unwrap();
    assert_eq!(elf::exports(&twice).unwrap(), ["probe"]);
    assert_eq!(Loaded::open(&written(&RUST, &twice)).call("probe"), Some(5));
}

#[test]
fn tools_of_others_see_the_same_names() {
    let wanted = BTreeSet::from(["probe", "cuFunction0", "Function0"]);
    for library in [&*RUST, &*C] {
        let file = written(library, &elf::rewrite(&library.bytes, "libafter.so", &wanted).unwrap());
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
    let after = elf::rewrite(&RUST.bytes, "libafter.so", &BTreeSet::from(["probe"])).unwrap();
    let text = String::from_utf8_lossy(&after);
    assert!(
        !text.contains("nvmlAnother2_v2") && !text.contains("libpartage_sim"),
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
        let error = elf::rewrite(bytes, "lib.so", &BTreeSet::new()).unwrap_err().to_string();
        assert!(error.contains("no 64-bit little-endian shared object") && error.contains(words), "{error}");
    }
    let program = std::fs::read("/proc/self/exe").unwrap();
    assert!(elf::rewrite(&program, "lib.so", &BTreeSet::new()).is_err(), "a program has no soname");
}

#[test]
fn names_that_are_not_there_are_named() {
    let wanted = BTreeSet::from(["probe", "cuNever", "nvmlNever"]);
    let error = elf::rewrite(&RUST.bytes, "lib.so", &wanted).unwrap_err().to_string();
    assert_eq!(error, "it lacks 2 of the names wanted: cuNever, nvmlNever");
}

#[test]
fn every_truncated_file_is_refused_or_still_whole() {
    let wanted = BTreeSet::from(["probe"]);
    for library in [&*RUST, &*C] {
        let step = library.bytes.len() / 500 + 1;
        for end in (0..library.bytes.len()).step_by(step).chain(0..1024) {
            // The section headers stand at the end.
            assert!(elf::rewrite(&library.bytes[..end], "lib.so", &wanted).is_err(), "{end}");
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
        let _ = elf::rewrite(&bytes, "lib.so", &BTreeSet::from(["probe", "Function0"]));
    }
}
