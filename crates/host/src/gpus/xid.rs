//! XIDs: what the driver reports about a GPU, and which of them make it unusable.
//!
//! NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors) says for each what to do at once. Where that is to restart the
//! program, the GPU goes on: those a program causes (13, 31, 43, 45, 68, 69, 109), a contained memory error (94), and a row or
//! page that was put aside (63), after which new work may start. Where it is to reset the GPU, to restart the machine or
//! to look at the hardware, nothing more should be placed on it.

const RESET: &str = "end what runs on it, then reset it (nvidia-smi --gpu-reset) or restart the machine";
const RESTART: &str = "restart the machine; if it comes again, check its seat and its power";
const SERVICE: &str = "reset it (nvidia-smi --gpu-reset); if it comes again, have it replaced";

/// What an XID that makes a GPU unusable means and what to do; `None` for all others.
pub(super) fn fatal(xid: u64) -> Option<String> {
    let (what, remedy) = match xid {
        46 => ("the GPU stopped processing", RESET),
        48 => ("a memory error that could not be corrected", RESET),
        54 => ("its power cable is not attached", "attach it and restart the machine"),
        61 => ("its microcontroller met a breakpoint", RESET),
        62 => ("its microcontroller halted", RESET),
        64 => ("a faulty part of its memory could not be put aside", SERVICE),
        74 => ("an NVLink failed", "reset it (nvidia-smi --gpu-reset), and check its NVLink bridges"),
        79 => ("the GPU has fallen off the bus", RESTART),
        80 => ("data on their way to it were damaged", RESET),
        95 => ("a memory error that may have reached all who use it", RESET),
        110 => ("a security fault", RESTART),
        119 => ("its system processor does not answer", RESET),
        120 => ("its system processor failed", RESET),
        140 => ("a memory error that could not be recovered from", RESET),
        143 => ("it cannot be initialised", RESET),
        _ => return None,
    };
    Some(format!("XID {xid}: {what}; {remedy}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_faults_are_no_illness_of_the_gpu() {
        for xid in [0, 8, 13, 31, 32, 43, 45, 63, 68, 69, 94, 109, 154, 999] {
            assert_eq!(fatal(xid), None, "{xid}");
        }
    }

    #[test]
    fn the_gpus_own_are_told_with_what_to_do() {
        for xid in [48, 62, 64, 74, 79, 95, 119, 120] {
            let words = fatal(xid).unwrap();
            assert!(words.starts_with(&format!("XID {xid}: ")) && words.contains("; "), "{words}");
        }
        assert!(fatal(79).unwrap().contains("fallen off the bus"));
    }
}
