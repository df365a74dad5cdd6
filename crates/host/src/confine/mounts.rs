//! Creates the mounts of a share in the mount namespace of the calling process.

use super::{ConfinementError, ConfinementPlan, STAND_IN_NAMES, USAGE_FILE};
use rustix::fs::{StatVfsMountFlags, statvfs};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount_bind, mount_remount};
use std::path::Path;

pub(super) fn apply(plan: &ConfinementPlan) -> Result<(), ConfinementError> {
    // The driver comes first: its files cannot be reached once the stand-ins cover them.
    for (driver, at) in plan.driver.iter().zip(&plan.driver_at) {
        bind_mount(driver, at)?;
    }
    for (name, driver) in STAND_IN_NAMES.iter().zip(&plan.driver) {
        let stand_in = plan.stand_ins.join(name);
        bind_mount(&stand_in, driver)?;
        remount_read_only(driver, true).map_err(|error| match error {
            RemountError::NoExec => ConfinementError::NoExec(stand_in),
            RemountError::Errno(error) => read_only_error(driver)(error),
        })?;
    }
    // The directory is read-only, so that tenants cannot replace `limits` and `usage`; `usage` itself is mounted again,
    // writable.
    bind_mount(&plan.region, &plan.region_at)?;
    seal_read_only(&plan.region_at)?;
    bind_mount(&plan.region.join(USAGE_FILE), &plan.region_at.join(USAGE_FILE))?;
    for (what, by) in &plan.covers {
        bind_mount(by, what)?;
        seal_read_only(what)?;
    }
    Ok(())
}

fn bind_mount(source: &Path, target: &Path) -> Result<(), ConfinementError> {
    mount_bind(source, target).map_err(ConfinementError::incomplete(format!(
        "bind-mounting {} at {}",
        source.display(),
        target.display()
    )))
}

fn seal_read_only(target: &Path) -> Result<(), ConfinementError> {
    remount_read_only(target, false).map_err(|error| match error {
        RemountError::NoExec => ConfinementError::NoExec(target.into()),
        RemountError::Errno(error) => read_only_error(target)(error),
    })
}

fn read_only_error(target: &Path) -> impl FnOnce(Errno) -> ConfinementError {
    ConfinementError::incomplete(format!("remounting {} read-only", target.display()))
}

enum RemountError {
    NoExec,
    Errno(Errno),
}

/// Makes a mount read-only and keeps its other flags, as the kernel requires in a user namespace. With `executable`
/// it also clears `noexec`: programs must be able to load a stand-in from any file system.
fn remount_read_only(target: &Path, executable: bool) -> Result<(), RemountError> {
    let has = statvfs(target).map_err(RemountError::Errno)?.f_flag;
    let mut flags = MountFlags::BIND | MountFlags::RDONLY;
    let pairs = [
        (StatVfsMountFlags::NOSUID, MountFlags::NOSUID),
        (StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
        (StatVfsMountFlags::NODEV, MountFlags::NODEV),
    ];
    for (flag, kept) in pairs {
        flags.set(kept, has.contains(flag));
    }
    if executable {
        flags.remove(MountFlags::NOEXEC);
    }
    mount_remount(target, flags, c"").map_err(|error| match error {
        Errno::PERM if executable && has.contains(StatVfsMountFlags::NOEXEC) => RemountError::NoExec,
        error => RemountError::Errno(error),
    })
}
