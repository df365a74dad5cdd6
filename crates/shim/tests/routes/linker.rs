//! Routes that the dynamic linker goes.

use super::*;
use program::{Maker, said};

const ROUTE: &str = include_str!("route.c");

/// A library of the user's own before the driver's: it counts, and goes on to the next.
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

/// A library of the user's own that has a `dlsym` of its own, as profilers and other shims do: it finds the C library's in
/// the way that they do.
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

/// As `DLSYM`, and it answers for `cuMemAlloc_v2` with a wrapper of its own, which goes on to what it stands before.
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

/// A program in the container, with libraries of the user's own preloaded. Of its environment only what the simulated node
/// needs.
pub fn run(container: &Container<'_>, preloaded: &[&Path], program: &Path) -> Command {
    let mut command = Command::new(program);
    container.env(&mut command);
    let preloaded: Vec<_> = preloaded.iter().map(|path| path.to_str().unwrap()).collect();
    command.env("LD_PRELOAD", preloaded.join(":"));
    command
}

/// Arguments that link with the driver's libraries, which are found where a program is led to.
fn linked(libraries: &Path) -> Vec<String> {
    let mut all = vec!["-DLINKED".to_string(), format!("-L{}", libraries.display())];
    all.extend(["-Wl,--no-as-needed", "-lcuda", "-lnvidia-ml"].map(String::from));
    all
}

pub fn route_program(folder: &Path) -> PathBuf {
    Maker { folder }.program("route", ROUTE, &[])
}

/// The same, linked. With an `rpath` it looks there, whatever its environment.
pub fn linked_program(folder: &Path, node: &Node, rpath: Option<&Path>) -> PathBuf {
    // The linker finds the driver's names in the driver's own files.
    let mut arguments = linked(&node.0.libraries());
    arguments.extend(rpath.map(|path| format!("-Wl,-rpath,{}", path.display())));
    Maker { folder }.program("linked", ROUTE, &arguments)
}

#[test]
fn a_program_that_opens_the_library_is_held() {
    let (node, folder) = (node(), tempfile::tempdir().unwrap());
    let program = route_program(folder.path());
    for file in ["libcuda.so.1", "libcuda.so", "libcuda.so.550.163.01"] {
        for route in ["handle", "default", "deepbind", "dlmopen", "proc", "proc_v2"] {
            let container = Container::with_memory(&node, CONTEXT + ROOM);
            let output = run(&container, &[], &program).args([route, file]).output().unwrap();
            assert_eq!(said(&output), held(), "{route} {file}");
        }
    }
    // And by its path.
    let container = Container::with_memory(&node, CONTEXT + ROOM);
    let file = container.libraries().join("libcuda.so.1");
    let output = run(&container, &[], &program).arg("handle").arg(file).output().unwrap();
    assert_eq!(said(&output), held());
}

#[test]
fn a_program_that_is_linked_is_held() {
    let (node, folder) = (node(), tempfile::tempdir().unwrap());
    let program = linked_program(folder.path(), &node, None);
    for route in ["linked", "default", "self", "next", "handle", "proc", "proc_v2"] {
        let container = Container::with_memory(&node, CONTEXT + ROOM);
        let output = run(&container, &[], &program).arg(route).output().unwrap();
        assert_eq!(said(&output), held(), "{route}");
    }
}

/// A real driver's names have no versions, and neither have ours: who asks for one gets what the driver would give, or
/// the hook.
#[test]
fn a_name_with_a_version_is_no_way_past() {
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
    let program = Maker { folder: folder.path() }.program("versions", text, &[]);
    let container = Container::with_memory(&node, CONTEXT + ROOM);
    said(&run(&container, &[], &program).output().unwrap());
}

#[test]
fn a_users_interposer_works_and_is_held() {
    let (node, folder) = (node(), tempfile::tempdir().unwrap());
    let program = linked_program(folder.path(), &node, None);
    let interposer = Maker { folder: folder.path() }.library("libinterposer.so", INTERPOSER, &[]);
    let container = Container::with_memory(&node, CONTEXT + ROOM);
    let output = run(&container, &[&interposer], &program).arg("linked").output().unwrap();
    assert_eq!(said(&output), held());
    // One that the program is linked with, before the driver's.
    let arguments: Vec<_> = std::iter::once(interposer.to_str().unwrap().to_string())
        .chain(linked(&node.0.libraries()))
        .chain([format!("-Wl,-rpath,{}", folder.path().display())])
        .collect();
    let program = Maker { folder: folder.path() }.program(
        "both",
        ROUTE,
        &["-Wl,--no-as-needed".into()].into_iter().chain(arguments).collect::<Vec<_>>(),
    );
    let container = Container::with_memory(&node, CONTEXT + ROOM);
    let output = run(&container, &[], &program).arg("linked").output().unwrap();
    assert_eq!(said(&output), held(), "linked");
}

#[test]
fn a_users_own_dlsym_works_and_is_held() {
    let (node, folder) = (node(), tempfile::tempdir().unwrap());
    let program = route_program(folder.path());
    let own = Maker { folder: folder.path() }.library("libdlsym.so", DLSYM, &[]);
    for route in ["handle", "default", "dlmopen", "proc_v2"] {
        let container = Container::with_memory(&node, CONTEXT + ROOM);
        let output = run(&container, &[&own], &program).arg(route).output().unwrap();
        assert_eq!(said(&output), held(), "{route}");
    }
}

/// A `dlsym` that answers a driver function's name with a wrapper: the shim must not find the wrapper when it looks for the
/// driver's own function, or each would call the other for ever.
#[test]
fn users_dlsym_that_wraps_driver_functions_is_not_asked_by_the_shim() {
    let (node, folder) = (node(), tempfile::tempdir().unwrap());
    let program = route_program(folder.path());
    let own = Maker { folder: folder.path() }.library("libwrapping.so", WRAPPING_DLSYM, &[]);
    for route in ["handle", "default"] {
        let container = Container::with_memory(&node, CONTEXT + ROOM);
        let output = run(&container, &[&own], &program).arg(route).output().unwrap();
        assert_eq!(said(&output), held(), "{route}");
    }
}

/// A library that binds to its own dependencies first does so to the stand-in.
#[test]
fn a_plugin_that_binds_deeply_is_held() {
    let (node, folder) = (node(), tempfile::tempdir().unwrap());
    let maker = Maker { folder: folder.path() };
    let plugin = maker.library("libplugin.so", PLUGIN, &linked(&node.0.libraries()));
    let host = maker.program("host", HOST, &[]);
    let container = Container::with_memory(&node, CONTEXT + ROOM);
    let output = run(&container, &[], &host).arg(plugin).output().unwrap();
    assert_eq!(said(&output), format!("{} 2", CONTEXT + ROOM));
}
