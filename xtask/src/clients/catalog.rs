//! The catalog of clients and their versions.

use super::DriverBranch;
use crate::debian::DebianSuites;

/// The packages that pip installs.
pub(super) const REQUIREMENTS: &str = include_str!("../../clients-requirements.txt");

/// One client, or clients that share a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientBundle {
    NvidiaSmi(DriverBranch),
    Nvtop,
    Python,
}

/// A program in a Debian package.
#[derive(Debug)]
pub(super) struct PackagedClient {
    pub(super) package: &'static str,
    pub(super) version: &'static str,
    /// Prefix of the versions that are used if Debian no longer has the pinned one.
    pub(super) branch: &'static str,
    /// Path of the program in the package.
    pub(super) file: &'static str,
    /// Whether its libraries are fetched too.
    pub(super) libraries: bool,
}

/// The suites that contain the clients, with their components. `main` has the libraries.
pub(super) const SUITES: DebianSuites =
    DebianSuites { suites: &[("bookworm", "main contrib non-free"), ("trixie", "non-free")], foreign: &[] };

/// The C library must be the host's: two in one process do not work.
pub(super) const EXCLUDED_PACKAGES: [&str; 3] = ["libc6", "libgcc-s1", "gcc-12-base"];

const SMI_535: PackagedClient = PackagedClient {
    package: "nvidia-smi",
    version: "535.261.03-1",
    branch: "535.",
    file: "usr/lib/nvidia/current/nvidia-smi",
    libraries: false,
};
const SMI_550: PackagedClient = PackagedClient { version: "550.163.01-2", branch: "550.", ..SMI_535 };
const NVTOP: PackagedClient = PackagedClient {
    package: "nvtop",
    version: "3.0.1-1",
    branch: "3.0.",
    file: "usr/bin/nvtop",
    libraries: true,
};

impl ClientBundle {
    /// All bundles, the quick ones first: failures show early.
    pub(super) const ALL: [Self; 4] =
        [Self::NvidiaSmi(DriverBranch::R535), Self::NvidiaSmi(DriverBranch::R550), Self::Nvtop, Self::Python];

    /// Returns the name, which is also the name of its directory.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::NvidiaSmi(DriverBranch::R535) => "nvidia-smi-535",
            Self::NvidiaSmi(DriverBranch::R550) => "nvidia-smi-550",
            Self::Nvtop => "nvtop",
            Self::Python => "python",
        }
    }

    /// Returns the path of the program in its directory.
    pub(super) fn program(self) -> &'static str {
        match self {
            Self::NvidiaSmi(_) => "nvidia-smi",
            Self::Nvtop => "nvtop",
            Self::Python => "bin/python3",
        }
    }

    /// Returns the file whose checksum is recorded. Python's program is the system's, and may be updated.
    pub(super) fn checksummed_file(self) -> &'static str {
        match self {
            Self::NvidiaSmi(_) => "nvidia-smi",
            Self::Nvtop => "program",
            Self::Python => "pyvenv.cfg",
        }
    }

    /// Returns the Debian package, or `None` for a client from pip.
    pub(super) fn packaged(self) -> Option<&'static PackagedClient> {
        match self {
            Self::NvidiaSmi(DriverBranch::R535) => Some(&SMI_535),
            Self::NvidiaSmi(DriverBranch::R550) => Some(&SMI_550),
            Self::Nvtop => Some(&NVTOP),
            Self::Python => None,
        }
    }

    /// Returns arguments with which it shows that it runs without a driver.
    pub(super) fn probe_arguments(self) -> &'static [&'static str] {
        match self {
            Self::NvidiaSmi(_) => &["-L"],
            Self::Nvtop => &["--version"],
            Self::Python => &["-c", PROBE_SCRIPT],
        }
    }

    /// Returns texts of which its output then contains one.
    pub(super) fn probe_outputs(self) -> &'static [&'static str] {
        match self {
            // Without a driver it names the missing library; with one it shows the GPUs or a version mismatch.
            Self::NvidiaSmi(_) => &["NVIDIA", "NVML"],
            Self::Nvtop => &["nvtop version"],
            Self::Python => &["all there"],
        }
    }

    /// Returns everything that determines what is fetched.
    pub(super) fn cache_key_parts(self) -> Vec<&'static str> {
        match self.packaged() {
            Some(packaged) => vec![self.name(), packaged.package, packaged.version, packaged.file],
            None => vec![self.name(), REQUIREMENTS],
        }
    }
}

/// None of these imports calls a driver. Compiling with numba needs all of its libraries.
const PROBE_SCRIPT: &str = "\
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
    fn bundle_names_and_cache_keys_are_unique() {
        for (at, bundle) in ClientBundle::ALL.iter().enumerate() {
            for other in &ClientBundle::ALL[at + 1..] {
                assert_ne!(bundle.name(), other.name());
                assert_ne!(bundle.cache_key_parts(), other.cache_key_parts());
            }
        }
    }

    #[test]
    fn pinned_version_belongs_to_its_branch() {
        for packaged in ClientBundle::ALL.iter().filter_map(|bundle| bundle.packaged()) {
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
