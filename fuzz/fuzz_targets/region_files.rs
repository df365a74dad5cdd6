//! Any contents of a region's files, in both layouts: attaching, reserving, reclaiming, reading, changing and growing give an
//! answer.
#![no_main]

#[path = "../../crates/region/tests/support/hostile.rs"]
mod hostile;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (bool, [u64; 4], &[u8])| {
    let (oldest, amounts, bytes) = input;
    // In memory, and gone with it: a fuzzer is ended, it does not end.
    let folder = std::path::Path::new("/dev/shm").join(format!("partage-fuzz-region-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder in memory");
    let _ = std::fs::remove_file(folder.join("usage"));
    let _ = std::fs::remove_file(folder.join("limits"));
    let _owner = hostile::make(&folder, if oldest { 1 } else { 2 });
    hostile::spoil(&hostile::open(&folder), bytes);
    hostile::live(&folder, amounts);
});
