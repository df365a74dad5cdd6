//! Which clients, in which versions.

use super::Branch;
use crate::debian::Suites;

/// What pip installs.
pub(super) const REQUIREMENTS: &str = include_str!("../../clients-requirements.txt");

/// One client, or clients that live together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    NvidiaSmi(Branch),
    Nvtop,
    Python,
}

/// A program in a Debian package.
#[derive(Debug)]
pub(super) struct Packaged {
    pub(super) package: &'static str,
    pub(super) version: &'static str,
    /// How versions begin that do as well, should Debian no longer have this one.
    pub(super) branch: &'static str,
    /// Where the program is in the package.
    pub(super) file: &'static str,
    /// Whether its libraries come with it.
    pub(super) libraries: bool,
}

/// The suites that have them, with their components. `main` has the libraries.
pub(super) const SUITES: Suites =
    Suites { suites: &[("bookworm", "main contrib non-free"), ("trixie", "non-free")], foreign: &[] };

/// The C library is the machine's: two in one process do not work.
pub(super) const NOT_UNPACKED: [&str; 3] = ["libc6", "libgcc-s1", "gcc-12-base"];

const SMI_535: Packaged = Packaged {
    package: "nvidia-smi",
    version: "535.261.03-1",
    branch: "535.",
    file: "usr/lib/nvidia/current/nvidia-smi",
    libraries: false,
};
const SMI_550: Packaged = Packaged { version: "550.163.01-2", branch: "550.", ..SMI_535 };
const NVTOP: Packaged =
    Packaged { package: "nvtop", version: "3.0.1-1", branch: "3.0.", file: "usr/bin/nvtop", libraries: true };

impl Part {
    /// The quick ones first: what is wrong shows early.
    pub(super) const ALL: [Self; 4] =
        [Self::NvidiaSmi(Branch::R535), Self::NvidiaSmi(Branch::R550), Self::Nvtop, Self::Python];

    /// Also the name of its folder.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::NvidiaSmi(Branch::R535) => "nvidia-smi-535",
            Self::NvidiaSmi(Branch::R550) => "nvidia-smi-550",
            Self::Nvtop => "nvtop",
            Self::Python => "python",
        }
    }

    /// The program, in its folder.
    pub(super) fn program(self) -> &'static str {
        match self {
            Self::NvidiaSmi(_) => "nvidia-smi",
            Self::Nvtop => "nvtop",
            Self::Python => "bin/python3",
        }
    }

    /// The file whose checksum is kept. Python's program is the system's, and may be updated.
    pub(super) fn sealed(self) -> &'static str {
        match self {
            Self::NvidiaSmi(_) => "nvidia-smi",
            Self::Nvtop => "program",
            Self::Python => "pyvenv.cfg",
        }
    }

    /// Where it comes from, unless from pip.
    pub(super) fn packaged(self) -> Option<&'static Packaged> {
        match self {
            Self::NvidiaSmi(Branch::R535) => Some(&SMI_535),
            Self::NvidiaSmi(Branch::R550) => Some(&SMI_550),
            Self::Nvtop => Some(&NVTOP),
            Self::Python => None,
        }
    }

    /// What makes it show that it runs, without a driver.
    pub(super) fn question(self) -> &'static [&'static str] {
        match self {
            Self::NvidiaSmi(_) => &["-L"],
            Self::Nvtop => &["--version"],
            Self::Python => &["-c", IMPORTS],
        }
    }

    /// What it then says: one of these words.
    pub(super) fn answers(self) -> &'static [&'static str] {
        match self {
            // Without a driver it says which library it lacks, with one it shows the GPUs or a mismatch.
            Self::NvidiaSmi(_) => &["NVIDIA", "NVML"],
            Self::Nvtop => &["nvtop version"],
            Self::Python => &["all there"],
        }
    }

    /// All that decides what is fetched.
    pub(super) fn pins(self) -> Vec<&'static str> {
        match self.packaged() {
            Some(packaged) => vec![self.name(), packaged.package, packaged.version, packaged.file],
            None => vec![self.name(), REQUIREMENTS],
        }
    }
}

/// None of these asks a driver. Numba compiles: that needs every library it was given.
const IMPORTS: &str = "\
import pynvml, gpustat, nvitop, numpy, cuda.bindings.driver, cuda.bindings.nvjitlink
from numba import cuda, float32
from numba.cuda import compile_ptx
def ones(x):
    x[cuda.grid(1)] = 1
ptx, _ = compile_ptx(ones, (float32[:],), cc=(8, 0))
assert '.target sm_80' in ptx, ptx
print('all there')
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_pins_differ() {
        for (at, part) in Part::ALL.iter().enumerate() {
            for other in &Part::ALL[at + 1..] {
                assert_ne!(part.name(), other.name());
                assert_ne!(part.pins(), other.pins());
            }
        }
    }

    #[test]
    fn a_pinned_version_is_of_its_branch() {
        for packaged in Part::ALL.iter().filter_map(|part| part.packaged()) {
            assert!(packaged.version.starts_with(packaged.branch), "{packaged:?}");
        }
    }

    #[test]
    fn every_requirement_is_pinned() {
        let lines = REQUIREMENTS.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        assert!(lines.clone().all(|line| line.matches("==").count() == 1), "{REQUIREMENTS}");
        assert_eq!(lines.count(), 20);
    }
}
