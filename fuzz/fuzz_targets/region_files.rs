//! Region files with arbitrary contents, in every layout: attaching, reserving, marking, reclaiming, reading, changing and
//! growing return without a panic.
#![no_main]

#[path = "../../crates/region/tests/support/hostile.rs"]
mod hostile;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, [u64; 4], &[u8])| {
    let (layout, amounts, bytes) = input;
    // In memory, because a fuzzer is killed and runs no destructors: the files disappear at the next boot at the latest.
    let directory =
        std::path::Path::new("/dev/shm").join(format!("partage-fuzz-region-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("/dev/shm is writable");
    let _ = std::fs::remove_file(directory.join("usage"));
    let _ = std::fs::remove_file(directory.join("limits"));
    let _owner = hostile::make(&directory, u32::from(layout % 3) + 1);
    hostile::corrupt(&hostile::open(&directory), bytes);
    hostile::use_region(&directory, amounts);
});
