//! NVML's errors in words that say what to do.

use super::{GpusError, xid};
use crate::driver::Driver;
use nvml_wrapper::error::NvmlError;

/// Why no session began.
pub(super) fn opening(error: NvmlError, driver: &Driver) -> GpusError {
    match error {
        NvmlError::LibloadingError(what) => {
            GpusError::NoLibrary { path: driver.nvml.clone(), what: what.to_string() }
        }
        NvmlError::LibraryNotFound | NvmlError::FailedToLoadSymbol(_) => {
            GpusError::NoLibrary { path: driver.nvml.clone(), what: error.to_string() }
        }
        other => refused("its GPUs")(other),
    }
}

/// Why something was not told.
pub(super) fn refused(asked: &'static str) -> impl Fn(NvmlError) -> GpusError {
    move |error| match error {
        NvmlError::DriverNotLoaded => GpusError::NotLoaded,
        NvmlError::LibRmVersionMismatch => GpusError::VersionMismatch,
        NvmlError::NoPermission | NvmlError::OperatingSystem => GpusError::NoPermission,
        NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound => GpusError::TooOld { asked },
        other => GpusError::Refused { asked, what: other.to_string() },
    }
}

/// What an error says about a GPU's health; `None` where it says nothing: not everything is told of every card.
pub(super) fn ill(error: &NvmlError) -> Option<String> {
    let words = match error {
        NvmlError::GpuLost => {
            "the GPU has fallen off the bus: restart the machine; if it comes again, check its seat and its power"
        }
        NvmlError::ResetRequired => return Some(format!("the GPU must be reset: {}", xid::RESET)),
        NvmlError::IrqIssue => "the GPU's interrupts do not arrive: see dmesg, then restart the machine",
        NvmlError::InsufficientPower => "the GPU has too little power: check its power cables",
        NvmlError::DriverNotLoaded | NvmlError::Uninitialized => {
            "the NVIDIA driver is no longer loaded: load it again (sudo modprobe nvidia), or restart the machine"
        }
        NvmlError::Unknown => "the driver cannot reach the GPU: see dmesg, then restart the machine",
        _ => return None,
    };
    Some(words.to_string())
}

/// Whether an error says that a GPU is gone until it is reset, comes back, or the driver is loaded anew. Others may be of a moment.
pub(super) fn is_gone(error: &NvmlError) -> bool {
    use NvmlError::{DriverNotLoaded, GpuLost, ResetRequired, Uninitialized};
    matches!(error, GpuLost | ResetRequired | DriverNotLoaded | Uninitialized)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::Others;
    use std::path::PathBuf;

    #[test]
    fn what_hinders_a_session_is_told_with_what_helps() {
        let driver = Driver {
            cuda: PathBuf::new(),
            nvml: "/lib/nvml".into(),
            simulated: None,
            others: Others::default(),
        };
        for (error, words) in [
            (NvmlError::DriverNotLoaded, "modprobe"),
            (NvmlError::LibRmVersionMismatch, "another version"),
            (NvmlError::NoPermission, "/dev/nvidia"),
            (NvmlError::LibraryNotFound, "/lib/nvml"),
            (NvmlError::FunctionNotFound, "510"),
            (NvmlError::InsufficientMemory, "insufficient memory"),
        ] {
            let said = opening(error, &driver).to_string();
            assert!(said.contains(words), "{said}");
        }
    }

    #[test]
    fn what_a_card_does_not_tell_is_no_illness() {
        for error in [NvmlError::NotSupported, NvmlError::NoPermission, NvmlError::NotFound] {
            assert_eq!(ill(&error), None);
        }
        assert!(ill(&NvmlError::GpuLost).is_some() && ill(&NvmlError::Unknown).is_some());
    }
}
