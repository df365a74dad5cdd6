//! XID errors: what they mean, and which of them make a GPU unusable.
//!
//! NVIDIA's catalog (docs.nvidia.com/deploy/xid-errors) gives the immediate action for each. If it is to reset the GPU,
//! to restart the machine or to check the hardware, no further share should be placed on the GPU. If it is to restart
//! the program, or nothing, the GPU stays usable: errors that a program causes (13, 31, 43, 45, 68), a memory error
//! that is contained in one program (94), a row that is remapped at the next reset (63).
//!
//! Two differ from the catalog. 109 (context switch timeout) can also be caused by a program, which would then take the
//! GPU from all others; NVIDIA's own device plugin ignores it. 155 also reports NVLinks in a low-power state.

/// A process that has the GPU open prevents a reset, even if it only monitors the GPU.
pub(super) const RESET_ADVICE: &str =
    "end all processes that have it open, then reset it (nvidia-smi --gpu-reset) or restart the machine";
const RESTART_ADVICE: &str =
    "restart the machine; if this recurs, reseat the card and check its power supply";

/// The XID of a GPU that has fallen off the bus and no longer responds.
pub(super) const XID_OFF_THE_BUS: u64 = 79;

/// Returns whether an XID reports that a memory error was contained in one program, or that its row is remapped at the
/// next reset.
pub(super) fn is_contained(xid: u64) -> bool {
    matches!(xid, 63 | 94)
}

/// Returns what an XID that makes a GPU unusable means and what to do; `None` for all other XIDs.
pub(super) fn fatal(xid: u64) -> Option<String> {
    let (what, remedy) = match xid {
        46 => ("the GPU stopped processing", RESET_ADVICE),
        48 => ("uncorrectable memory error", RESET_ADVICE),
        54 => ("auxiliary power is not connected", "connect the power cable and restart the machine"),
        62 => ("internal microcontroller halted", RESET_ADVICE),
        64 => ("row remapping failed", RESET_ADVICE),
        74 => ("NVLink error", RESET_ADVICE),
        XID_OFF_THE_BUS => ("the GPU has fallen off the bus", RESTART_ADVICE),
        95 => ("uncontained memory error, which may have reached all programs on it", RESET_ADVICE),
        110 => ("security fault", RESET_ADVICE),
        119 => ("GPU system processor (GSP) does not respond", RESET_ADVICE),
        120 => ("GPU system processor (GSP) failed", RESET_ADVICE),
        136 => ("NVLink training failed", RESET_ADVICE),
        140 => ("unrecoverable memory error", RESET_ADVICE),
        143 => ("GPU initialization failed", RESET_ADVICE),
        151 => ("key rotation failed", RESTART_ADVICE),
        156 => ("a faulty resource is retired at the next reset", RESET_ADVICE),
        158 => ("GPU timed out", RESET_ADVICE),
        _ => return None,
    };
    Some(format!("XID {xid}: {what}; {remedy}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_programs_are_not_fatal() {
        for xid in [0, 8, 13, 31, 32, 43, 45, 61, 63, 68, 69, 80, 92, 94, 109, 121, 137, 154, 155, 157, 999] {
            assert_eq!(fatal(xid), None, "{xid}");
        }
    }

    #[test]
    fn fatal_xid_has_a_meaning_and_a_remedy() {
        for xid in [48, 62, 64, 74, 79, 95, 119, 120] {
            let words = fatal(xid).unwrap();
            assert!(words.starts_with(&format!("XID {xid}: ")) && words.contains("; "), "{words}");
        }
        assert!(fatal(79).unwrap().contains("fallen off the bus"));
        // The daemon that shares the GPU has it open, too; the advice must fit a node and a workstation.
        let words = fatal(62).unwrap();
        assert!(words.contains("have it open, then reset it") && !words.contains("partage"), "{words}");
    }
}
