//! Converts errors of NVML into messages that state the remedy.

use super::{NvmlSessionError, xid};
use crate::driver::InstalledDriver;
use nvml_wrapper::error::NvmlError;

/// Converts an error of opening a session.
pub(super) fn open_error(error: NvmlError, driver: &InstalledDriver) -> NvmlSessionError {
    match error {
        NvmlError::LibloadingError(what) => {
            NvmlSessionError::LoadFailed { path: driver.nvml.clone(), what: what.to_string() }
        }
        NvmlError::LibraryNotFound | NvmlError::FailedToLoadSymbol(_) => {
            NvmlSessionError::LoadFailed { path: driver.nvml.clone(), what: error.to_string() }
        }
        other => query_error("its GPUs")(other),
    }
}

/// Converts an error of a query.
pub(super) fn query_error(asked: &'static str) -> impl Fn(NvmlError) -> NvmlSessionError {
    move |error| match error {
        NvmlError::DriverNotLoaded => NvmlSessionError::KernelModuleNotLoaded,
        NvmlError::LibRmVersionMismatch => NvmlSessionError::VersionMismatch,
        NvmlError::NoPermission | NvmlError::OperatingSystem => NvmlSessionError::PermissionDenied,
        NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound => {
            NvmlSessionError::DriverTooOld { asked }
        }
        other => NvmlSessionError::QueryFailed { asked, what: other.to_string() },
    }
}

/// Returns what an error reports about the health of a GPU; `None` if it reports nothing: not every card supports every
/// query.
pub(super) fn health_of(error: &NvmlError) -> Option<String> {
    let words = match error {
        NvmlError::GpuLost => {
            "the GPU has fallen off the bus: restart the machine; if this recurs, reseat the card and check its power supply"
        }
        NvmlError::ResetRequired => return Some(format!("the GPU must be reset: {}", xid::RESET_ADVICE)),
        NvmlError::IrqIssue => "the interrupts of the GPU do not arrive: see dmesg, then restart the machine",
        NvmlError::InsufficientPower => "the GPU has insufficient power: check its power cables",
        NvmlError::DriverNotLoaded | NvmlError::Uninitialized => {
            "the NVIDIA driver is no longer loaded: load it again (sudo modprobe nvidia), or restart the machine"
        }
        NvmlError::Unknown => "the driver cannot reach the GPU: see dmesg, then restart the machine",
        _ => return None,
    };
    Some(words.to_string())
}

/// Returns whether an error means that a GPU is gone until it is reset or returns, or the driver is reloaded. Other
/// errors may be temporary.
pub(super) fn is_gone(error: &NvmlError) -> bool {
    use NvmlError::{DriverNotLoaded, GpuLost, ResetRequired, Uninitialized};
    matches!(error, GpuLost | ResetRequired | DriverNotLoaded | Uninitialized)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::OtherLibraries;
    use std::path::PathBuf;

    #[test]
    fn open_error_says_what_to_do() {
        let driver = InstalledDriver {
            cuda: PathBuf::new(),
            nvml: "/lib/nvml".into(),
            simulated: None,
            others: OtherLibraries::default(),
        };
        for (error, words) in [
            (NvmlError::DriverNotLoaded, "modprobe"),
            (NvmlError::LibRmVersionMismatch, "another version"),
            (NvmlError::NoPermission, "/dev/nvidia"),
            (NvmlError::LibraryNotFound, "/lib/nvml"),
            (NvmlError::FunctionNotFound, "510"),
            (NvmlError::InsufficientMemory, "insufficient memory"),
        ] {
            let message = open_error(error, &driver).to_string();
            assert!(message.contains(words), "{message}");
        }
    }

    #[test]
    fn unsupported_query_does_not_make_a_gpu_unhealthy() {
        for error in [NvmlError::NotSupported, NvmlError::NoPermission, NvmlError::NotFound] {
            assert_eq!(health_of(&error), None);
        }
        assert!(health_of(&NvmlError::GpuLost).is_some() && health_of(&NvmlError::Unknown).is_some());
    }
}
