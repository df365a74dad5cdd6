//! How the shared object is linked.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    for argument in [
        // Calls inside the driver stay inside it, as in NVIDIA's: a preloaded library must not answer them.
        "-Bsymbolic",
        // Threads of ours may still run when a program closes the library.
        "-z,nodelete",
        // The one hash table that `install` rebuilds.
        "--hash-style=gnu",
        "-soname,libpartage_sim.so",
    ] {
        println!("cargo::rustc-cdylib-link-arg=-Wl,{argument}");
    }
}
