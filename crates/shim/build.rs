//! Linker options of the shared object.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    for argument in [
        // Calls inside the shim stay inside it, whatever library a tenant loads before it.
        "-Bsymbolic",
        // Threads in the shim's code may still run when a program closes the library.
        "-z,nodelete",
        // The only hash table that `install` rebuilds.
        "--hash-style=gnu",
        "-soname,libpartage_shim.so",
    ] {
        println!("cargo::rustc-cdylib-link-arg=-Wl,{argument}");
    }
}
