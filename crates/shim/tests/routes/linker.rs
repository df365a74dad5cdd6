//! Routes through the dynamic linker.

use super::*;
use program::{ProgramBuilder, stdout_of};

const ROUTE: &str = include_str!("route.c");

/// A user's library before the driver's: it counts calls and passes them on.
const INTERPOSER: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
static int depth;
int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes) {
    int (*next)(unsigned long long *, size_t) = dlsym(RTLD_NEXT, "cuMemAlloc_v2");
    for (int again = 0; again < 100; again++)
        if (!next || (void *)next == (void *)cuMemAlloc_v2 || dlsym(RTLD_NEXT, "cuMemAlloc_v2") != (void *)next) abort();
    if (depth++) abort();
    int code = next(pointer, bytes);
    depth--;
    return code;
}
"#;

/// A user's library with a `dlsym` of its own, as profilers and other shims have it: it finds the C library's in the
/// same way as they do.
const DLSYM: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
void *dlsym(void *handle, const char *name) {
    static void *(*next)(void *, const char *);
    if (!next) next = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    if (!next) abort();
    return next(handle, name);
}
"#;

/// As `DLSYM`, and it returns a wrapper for `cuMemAlloc_v2`, which calls the function that it wraps.
const WRAPPING_DLSYM: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
static int (*wrapped)(unsigned long long *, size_t);
static int depth;
static int wrapper(unsigned long long *pointer, size_t bytes) {
    if (depth++) abort();
    int code = wrapped(pointer, bytes);
    depth--;
    return code;
}
void *dlsym(void *handle, const char *name) {
    static void *(*next)(void *, const char *);
    if (!next) next = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    if (!next) abort();
    void *found = next(handle, name);
    if (!found || strcmp(name, "cuMemAlloc_v2")) return found;
    if (!wrapped) wrapped = found;
    return (void *)wrapper;
}
"#;

/// A library that a program opens, and that is linked with the driver's.
const PLUGIN: &str = r#"
#include <stddef.h>
int cuInit(unsigned); int cuCtxCreate_v2(void **, unsigned, int); int cuMemAlloc_v2(unsigned long long *, size_t);
int cuMemGetInfo_v2(size_t *, size_t *);
int plugin(size_t *total) {
    size_t left; void *context; unsigned long long pointer;
    if (cuInit(0) || cuCtxCreate_v2(&context, 0, 0) || cuMemGetInfo_v2(&left, total)) return -1;
    return cuMemAlloc_v2(&pointer, left + 1);
}
"#;

const HOST: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char **words) {
    void *handle = dlopen(words[1], RTLD_NOW | RTLD_DEEPBIND);
    if (!handle) { puts(dlerror()); return 1; }
    int (*plugin)(size_t *) = dlsym(handle, "plugin");
    size_t total = 0;
    int code = plugin(&total);
    printf("%zu %d\n", total, code);
    return 0;
}
"#;

/// Returns a command that runs a program in the container, with a user's libraries preloaded. Its environment has only
/// what the simulated node needs.
pub fn run(container: &TestContainer<'_>, preloaded: &[&Path], program: &Path) -> Command {
    let mut command = Command::new(program);
    container.env(&mut command);
    let preloaded: Vec<_> = preloaded.iter().map(|path| path.to_str().unwrap()).collect();
    command.env("LD_PRELOAD", preloaded.join(":"));
    command
}

/// Arguments that link with the driver's libraries, which are found in the program's search path.
fn linked(libraries: &Path) -> Vec<String> {
    let mut all = vec!["-DLINKED".to_string(), format!("-L{}", libraries.display())];
    all.extend(["-Wl,--no-as-needed", "-lcuda", "-lnvidia-ml"].map(String::from));
    all
}

pub fn route_program(folder: &Path) -> PathBuf {
    ProgramBuilder { folder }.build_program("route", ROUTE, &[])
}

/// Builds the program with the libraries linked. With an `rpath` it searches there, whatever its environment.
pub fn linked_program(folder: &Path, node: &TestNode, rpath: Option<&Path>) -> PathBuf {
    // The linker resolves the driver's names in the driver's own files.
    let mut arguments = linked(&node.0.libraries());
    arguments.extend(rpath.map(|path| format!("-Wl,-rpath,{}", path.display())));
    ProgramBuilder { folder }.build_program("linked", ROUTE, &arguments)
}

#[test]
fn program_that_opens_the_library_is_limited() {
    let (node, folder) = (node(), tempfile::tempdir().unwrap());
    let program = route_program(folder.path());
    for file in ["libcuda.so.1", "libcuda.so", "libcuda.so.550.163.01"] {
        for route in ["handle", "default", "deepbind", "dlmopen", "proc", "proc_v2"] {
            let container = TestContainer::with_memory(&node, CONTEXT_BYTES + FREE_BYTES);
            let output = run(&container, &[], &program).args([route, file]).output().unwrap();
            assert_eq!(stdout_of(&output), expected_output(), "{route} {file}");
        }
    }
    // And by its path.
    let container = TestContainer::with_memory(&node, CONTEXT_BYTES + FREE_BYTES);
    let file = container.libraries().join("libcuda.so.1");
    let output = run(&container, &[], &program).arg("handle").arg(file).output().unwrap();
    assert_eq!(stdout_of(&output), expected_output());
}

#[test]
fn linked_program_is_limited() {
    let (node, folder) = (node(), tempfile::tempdir().unwrap());
    let program = linked_program(folder.path(), &node, None);
    for route in ["linked", "default", "self", "next", "handle", "proc", "proc_v2"] {
        let container = TestContainer::with_memory(&node, CONTEXT_BYTES + FREE_BYTES);
        let output = run(&container, &[], &program).arg(route).output().unwrap();
        assert_eq!(stdout_of(&output), expected_output(), "{route}");
    }
}

/// A real driver's names have no versions, and neither have the shim's: a versioned lookup returns what the driver
/// would return, or the hook.
#[test]
fn versioned_lookup_does_not_bypass_the_hook() {
    let (node, folder) = (node(), tempfile::tempdir().unwrap());
    let text = r#"
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <stdio.h>
        int main(void) {
            void *handle = dlopen("libcuda.so.1", RTLD_NOW), *plain = dlsym(handle, "cuMemAlloc_v2");
            const char *versions[] = {"GLIBC_2.2.5", "libcuda.so.1", "CUDA_12"};
            for (int at = 0; at < 3; at++) {
                void *handles[] = {handle, RTLD_DEFAULT, RTLD_NEXT};
                for (int by = 0; by < 3; by++) {
                    void *found = dlvsym(handles[by], "cuMemAlloc_v2", versions[at]);
                    if (found && found != plain) { printf("%s %d: past the hook\n", versions[at], by); return 1; }
                }
            }
            return plain ? 0 : 2;
        }"#;
    let program = ProgramBuilder { folder: folder.path() }.build_program("versions", text, &[]);
    let container = TestContainer::with_memory(&node, CONTEXT_BYTES + FREE_BYTES);
    stdout_of(&run(&container, &[], &program).output().unwrap());
}

#[test]
fn users_interposer_works_and_is_limited() {
    let (node, folder) = (node(), tempfile::tempdir().unwrap());
    let program = linked_program(folder.path(), &node, None);
    let interposer =
        ProgramBuilder { folder: folder.path() }.build_library("libinterposer.so", INTERPOSER, &[]);
    let container = TestContainer::with_memory(&node, CONTEXT_BYTES + FREE_BYTES);
    let output = run(&container, &[&interposer], &program).arg("linked").output().unwrap();
    assert_eq!(stdout_of(&output), expected_output());
    // An interposer that the program is linked with, before the driver's library.
    let arguments: Vec<_> = std::iter::once(interposer.to_str().unwrap().to_string())
        .chain(linked(&node.0.libraries()))
        .chain([format!("-Wl,-rpath,{}", folder.path().display())])
        .collect();
    let program = ProgramBuilder { folder: folder.path() }.build_program(
        "both",
        ROUTE,
        &["-Wl,--no-as-needed".into()].into_iter().chain(arguments).collect::<Vec<_>>(),
    );
    let container = TestContainer::with_memory(&node, CONTEXT_BYTES + FREE_BYTES);
    let output = run(&container, &[], &program).arg("linked").output().unwrap();
    assert_eq!(stdout_of(&output), expected_output(), "linked");
}

#[test]
fn users_dlsym_works_and_is_limited() {
    let (node, folder) = (node(), tempfile::tempdir().unwrap());
    let program = route_program(folder.path());
    let own = ProgramBuilder { folder: folder.path() }.build_library("libdlsym.so", DLSYM, &[]);
    for route in ["handle", "default", "dlmopen", "proc_v2"] {
        let container = TestContainer::with_memory(&node, CONTEXT_BYTES + FREE_BYTES);
        let output = run(&container, &[&own], &program).arg(route).output().unwrap();
        assert_eq!(stdout_of(&output), expected_output(), "{route}");
    }
}

/// A `dlsym` that returns a wrapper for a driver function's name: the shim must not find the wrapper when it looks up
/// the driver's own function, or each would call the other forever.
#[test]
fn users_wrapping_dlsym_is_not_used_by_the_shim() {
    let (node, folder) = (node(), tempfile::tempdir().unwrap());
    let program = route_program(folder.path());
    let own = ProgramBuilder { folder: folder.path() }.build_library("libwrapping.so", WRAPPING_DLSYM, &[]);
    for route in ["handle", "default"] {
        let container = TestContainer::with_memory(&node, CONTEXT_BYTES + FREE_BYTES);
        let output = run(&container, &[&own], &program).arg(route).output().unwrap();
        assert_eq!(stdout_of(&output), expected_output(), "{route}");
    }
}

/// A library that binds to its own dependencies first binds to the stand-in.
#[test]
fn deep_binding_plugin_is_limited() {
    let (node, folder) = (node(), tempfile::tempdir().unwrap());
    let builder = ProgramBuilder { folder: folder.path() };
    let plugin = builder.build_library("libplugin.so", PLUGIN, &linked(&node.0.libraries()));
    let host = builder.build_program("host", HOST, &[]);
    let container = TestContainer::with_memory(&node, CONTEXT_BYTES + FREE_BYTES);
    let output = run(&container, &[], &host).arg(plugin).output().unwrap();
    assert_eq!(stdout_of(&output), format!("{} 2", CONTEXT_BYTES + FREE_BYTES));
}
