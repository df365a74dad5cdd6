//! How the fuzz targets are linked.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // `driver_calls` loads the simulated driver as programs do. The shared object is instrumented like everything else
    // here, and its counters are the fuzzer's to look at only if it finds the fuzzer's runtime in the program. Nothing
    // more is shown: the program has a copy of the driver too, which must not answer in the library's place.
    for symbols in ["__asan_*", "__sanitizer_cov_*", "__sancov_lowest_stack"] {
        println!("cargo::rustc-link-arg-bin=driver_calls=-Wl,--export-dynamic-symbol={symbols}");
    }
}
