//! XIDs: what the driver reports about a GPU, and which of them make it unusable.
//!
//! NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors) says for each what to do at once. Where that is to reset the GPU, to
//! restart the machine or to look at the hardware, nothing more should be placed on it. Where it is to restart the
//! program, or nothing, the GPU goes on: what a program causes (13, 31, 43, 45, 68), a memory error that is contained in
//! one program (94), a row that is put aside with the next reset (63).
//!
//! Two are left out against the catalogue. 109 (a change of contexts took too long) also comes from programs, which would
//! then take a GPU from everybody; NVIDIA's own device plugin passes it over. 155 also reports NVLinks that were put to sleep.

/// Whoever has a GPU open hinders its reset, who only watches it too.
pub(super) const RESET: &str =
    "end everything that has it open, then reset it (nvidia-smi --gpu-reset) or restart the machine";
const RESTART: &str = "restart the machine; if it comes again, check its seat and its power";

/// The XID of a GPU that does not answer any more.
pub(super) const OFF_THE_BUS: u64 = 79;

/// Whether an XID says of a memory error that it reached one program only, or that its place is put aside with the next reset.
pub(super) fn is_contained(xid: u64) -> bool {
    matches!(xid, 63 | 94)
}

/// What an XID that makes a GPU unusable means and what to do; `None` for all others.
pub(super) fn fatal(xid: u64) -> Option<String> {
    let (what, remedy) = match xid {
        46 => ("the GPU stopped processing", RESET),
        48 => ("a memory error that could not be corrected", RESET),
        54 => ("its power cable is not attached", "attach it and restart the machine"),
        62 => ("its microcontroller halted", RESET),
        64 => ("a faulty part of its memory could not be put aside", RESET),
        74 => ("an NVLink failed", RESET),
        OFF_THE_BUS => ("the GPU has fallen off the bus", RESTART),
        95 => ("a memory error that may have reached all who use it", RESET),
        110 => ("a security fault", RESET),
        119 => ("its system processor does not answer", RESET),
        120 => ("its system processor failed", RESET),
        136 => ("an NVLink could not be set up", RESET),
        140 => ("a memory error that could not be recovered from", RESET),
        143 => ("it could not be initialised", RESET),
        151 => ("its keys could not be renewed", RESTART),
        156 => ("a faulty part of it is put aside with the next reset", RESET),
        158 => ("it did not answer in time", RESET),
        _ => return None,
    };
    Some(format!("XID {xid}: {what}; {remedy}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_faults_are_no_illness_of_the_gpu() {
        for xid in [0, 8, 13, 31, 32, 43, 45, 61, 63, 68, 69, 80, 92, 94, 109, 121, 137, 154, 155, 157, 999] {
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
        // Who shares it has it open too, and is called otherwise on a node than on a workstation.
        let words = fatal(62).unwrap();
        assert!(words.contains("has it open, then reset it") && !words.contains("partage"), "{words}");
    }
}
