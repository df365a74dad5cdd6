//! Linker arguments of the fuzz targets.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // `driver_calls` loads the simulated driver with dlopen, as programs do. The shared object is instrumented like all
    // other code here, and libFuzzer sees its counters only if the object resolves the sanitizer symbols of this
    // executable. No other symbol is exported: this executable also contains a copy of the driver, whose functions must
    // not be resolved in place of the library's.
    for symbols in ["__asan_*", "__sanitizer_cov_*", "__sancov_lowest_stack"] {
        println!("cargo::rustc-link-arg-bin=driver_calls=-Wl,--export-dynamic-symbol={symbols}");
    }
}
