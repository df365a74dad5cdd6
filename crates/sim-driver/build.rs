//! Sets the linker options of the shared object.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    for argument in [
        // Binds calls inside the driver to the driver, as NVIDIA does: a preloaded library must not intercept them.
        "-Bsymbolic",
        // Driver threads may still run after a program closes the library.
        "-z,nodelete",
        // `install` rebuilds only the GNU hash table.
        "--hash-style=gnu",
        "-soname,libpartage_sim.so",
    ] {
        println!("cargo::rustc-cdylib-link-arg=-Wl,{argument}");
    }
}
