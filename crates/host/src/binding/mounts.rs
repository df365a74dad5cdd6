//! The mounts of a share, made in a namespace of the process's own.

use super::{BindError, Plan, STAND_INS, USAGE};
use rustix::fs::{StatVfsMountFlags, statvfs};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount_bind, mount_remount};
use std::path::Path;

pub(super) fn apply(plan: &Plan) -> Result<(), BindError> {
    // The driver first: once the stand-in is in its place, there is no way to it.
    for (driver, at) in plan.driver.iter().zip(&plan.driver_at) {
        bind(driver, at)?;
    }
    for (name, driver) in STAND_INS.iter().zip(&plan.driver) {
        let stand_in = plan.stand_ins.join(name);
        bind(&stand_in, driver)?;
        fix(driver, true).map_err(|error| match error {
            Refused::NoExec => BindError::NoExec(stand_in),
            Refused::By(error) => read_only(driver)(error),
        })?;
    }
    // The folder read-only, so that nobody can put other files in the place of `limits` and `usage`; `usage` is bound
    // again from where it can be written.
    bind(&plan.region, &plan.region_at)?;
    seal(&plan.region_at)?;
    bind(&plan.region.join(USAGE), &plan.region_at.join(USAGE))?;
    for (what, by) in &plan.covers {
        bind(by, what)?;
        seal(what)?;
    }
    Ok(())
}

fn bind(source: &Path, target: &Path) -> Result<(), BindError> {
    mount_bind(source, target).map_err(BindError::half_way(format!(
        "binding {} to {}",
        source.display(),
        target.display()
    )))
}

fn seal(target: &Path) -> Result<(), BindError> {
    fix(target, false).map_err(|error| match error {
        Refused::NoExec => BindError::NoExec(target.into()),
        Refused::By(error) => read_only(target)(error),
    })
}

fn read_only(target: &Path) -> impl FnOnce(Errno) -> BindError {
    BindError::half_way(format!("making {} read-only", target.display()))
}

enum Refused {
    NoExec,
    By(Errno),
}

/// Makes a mount read-only, and keeps what else holds for it: in a user namespace the kernel wants that. A stand-in
/// must be executable, wherever it is kept.
fn fix(target: &Path, executable: bool) -> Result<(), Refused> {
    let has = statvfs(target).map_err(Refused::By)?.f_flag;
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
        Errno::PERM if executable && has.contains(StatVfsMountFlags::NOEXEC) => Refused::NoExec,
        error => Refused::By(error),
    })
}
