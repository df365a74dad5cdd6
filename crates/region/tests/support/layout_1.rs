//! Regions as the last release with layout 1 wrote them: see `fixtures/layout-1/README.md`.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use partage_region::GpuShare;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;

/// Lengths of the two files. Fixtures are stored without the zeros at the end.
const LIMITS_LENGTH: u64 = 8_192;
const USAGE_LENGTH: u64 = 2_367_488;

/// A region that no process has used.
pub const FRESH: [&[u8]; 2] = [
    include_bytes!("../fixtures/layout-1/fresh/limits.prefix"),
    include_bytes!("../fixtures/layout-1/fresh/usage.prefix"),
];

/// A region whose process was killed.
pub const USED: [&[u8]; 2] = [
    include_bytes!("../fixtures/layout-1/used/limits.prefix"),
    include_bytes!("../fixtures/layout-1/used/usage.prefix"),
];

/// Writes a region into a directory, as its daemon left it.
pub fn put([limits, usage]: [&[u8]; 2], folder: &Path) {
    for (name, bytes, length, mode) in
        [("limits", limits, LIMITS_LENGTH, 0o644), ("usage", usage, USAGE_LENGTH, 0o666)]
    {
        let path = folder.join(name);
        fs::write(&path, bytes).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(length).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    }
}

/// Replaces the UUID of a region's GPU.
pub fn set_uuid(folder: &Path, gpu: u64, uuid: [u8; 16]) {
    let file = File::options().write(true).open(folder.join("limits")).unwrap();
    file.write_all_at(&uuid, 128 + gpu * 256).unwrap();
}

/// Returns the user that owns a directory.
pub fn owner_of(folder: &Path) -> u32 {
    fs::metadata(folder).unwrap().uid()
}

/// Returns the shares of the regions `used` as the daemon has them in its records. The fixtures differ in the compute of the
/// first GPU.
pub fn used_shares(cores: u32) -> [GpuShare; 2] {
    let elastic = GpuShare {
        uuid: [0x22; 16],
        memory: 8 << 30,
        context: 300 << 20,
        cores,
        ceiling: 50_010,
        priority: 3,
        waits_for_turns: true,
        low_latency: false,
    };
    [elastic, GpuShare { uuid: [0x33; 16], ..GpuShare::default() }]
}
