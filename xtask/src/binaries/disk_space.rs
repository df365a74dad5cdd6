//! Checks the free disk space for the programs that are missing.

use super::MissingPrerequisite;
use super::catalog::{PROGRAM_SETS, ProgramSource, ProgramSpec};
use crate::disk_space;
use std::path::Path;

/// Checks each of these directories: they may be on different disks, and any of them may grow by the whole amount.
pub(super) fn check_free(folders: &[&Path], missing: &[&ProgramSpec]) -> Result<(), MissingPrerequisite> {
    let needed_mib = needed_mib(missing);
    folders.iter().try_for_each(|folder| {
        disk_space::check_free(folder, needed_mib, "XDG_CACHE_HOME, GOCACHE and GOMODCACHE")
    })
}

fn needed_mib(missing: &[&ProgramSpec]) -> u64 {
    let is_left = |name| {
        missing
            .iter()
            .any(|program| matches!(&program.source, ProgramSource::Go(source) if source.module.name == name))
    };
    let modules = PROGRAM_SETS.iter().flat_map(|set| set.modules);
    modules.filter(|module| is_left(module.name)).map(|module| module.gibibytes * 1024).sum()
}

#[cfg(test)]
mod tests {
    use super::super::catalog::BED_PROGRAMS;
    use super::*;

    #[test]
    fn only_missing_programs_need_space() {
        let all: Vec<_> = BED_PROGRAMS.programs.iter().collect();
        assert_eq!(needed_mib(&all), 6 * 1024);
        let etcd: Vec<_> = BED_PROGRAMS.programs.iter().filter(|program| program.name == "etcd").collect();
        assert_eq!(needed_mib(&etcd), 1024);
        assert_eq!(needed_mib(&[]), 0);
    }

    #[test]
    fn full_disk_is_reported_with_its_directory() {
        // proc has no free space.
        let all: Vec<_> = BED_PROGRAMS.programs.iter().collect();
        let error = check_free(&[Path::new("/proc/none/such")], &all).unwrap_err().to_string();
        assert_eq!(
            error,
            "/proc/none/such has 0 MiB free, and building needs about 6144 MiB; free some space, or set \
             XDG_CACHE_HOME, GOCACHE and GOMODCACHE to a larger disk"
        );
    }
}
