//! Is there room for what is left to build?

use super::Missing;
use super::catalog::{Program, SETS, Source};
use crate::space;
use std::path::Path;

/// Each of these folders must have room: they may stand on different disks, and any of them may grow by all of it.
pub(super) fn enough(folders: &[&Path], left: &[&Program]) -> Result<(), Missing> {
    let needed_mib = needed_mib(left);
    folders
        .iter()
        .try_for_each(|folder| space::enough(folder, needed_mib, "XDG_CACHE_HOME, GOCACHE and GOMODCACHE"))
}

fn needed_mib(left: &[&Program]) -> u64 {
    let is_left = |name| {
        left.iter().any(|program| matches!(&program.source, Source::Go(source) if source.module.name == name))
    };
    let modules = SETS.iter().flat_map(|set| set.modules);
    modules.filter(|module| is_left(module.name)).map(|module| module.gibibytes * 1024).sum()
}

#[cfg(test)]
mod tests {
    use super::super::catalog::BED;
    use super::*;

    #[test]
    fn only_what_is_left_counts() {
        let all: Vec<_> = BED.programs.iter().collect();
        assert_eq!(needed_mib(&all), 6 * 1024);
        let etcd: Vec<_> = BED.programs.iter().filter(|program| program.name == "etcd").collect();
        assert_eq!(needed_mib(&etcd), 1024);
        assert_eq!(needed_mib(&[]), 0);
    }

    #[test]
    fn a_full_disk_is_named() {
        // proc has no room at all.
        let all: Vec<_> = BED.programs.iter().collect();
        let error = enough(&[Path::new("/proc/none/such")], &all).unwrap_err().to_string();
        assert_eq!(
            error,
            "/proc/none/such has 0 MiB free, and building needs about 6144 MiB there; make room, or point \
             XDG_CACHE_HOME, GOCACHE and GOMODCACHE to a larger disk"
        );
    }
}
