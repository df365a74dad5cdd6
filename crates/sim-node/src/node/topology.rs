//! Types for a GPU's location and links, and their text forms: PCI addresses, CPU lists, PCIe paths, NVLinks.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A PCI address of function 0, formatted as NVML does: `00000000:07:00.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PciAddress {
    /// The PCI domain, written with eight hexadecimal digits.
    pub domain: u32,
    /// The bus number in its domain.
    pub bus: u8,
    /// The device number, below 32.
    pub device: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08X}:{:02X}:{:02X}.0", self.domain, self.bus, self.device)
    }
}

/// A text that is not a PCI address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid PCI address \"{0}\": use the form 00000000:07:00.0")]
pub struct PciAddressError(String);

impl FromStr for PciAddress {
    type Err = PciAddressError;

    fn from_str(text: &str) -> Result<Self, PciAddressError> {
        let hex = |text: &str, letters: std::ops::RangeInclusive<usize>| {
            let fits = letters.contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
            fits.then(|| u32::from_str_radix(text, 16).ok()).flatten()
        };
        let address = || {
            let (domain, rest) = text.split_once(':')?;
            let (bus, device) = rest.strip_suffix(".0")?.split_once(':')?;
            let device = u8::try_from(hex(device, 2..=2)?).ok().filter(|&device| device < 32)?;
            Some(PciAddress {
                domain: hex(domain, 4..=8)?,
                bus: u8::try_from(hex(bus, 2..=2)?).ok()?,
                device,
            })
        };
        address().ok_or_else(|| PciAddressError(text.into()))
    }
}

impl TryFrom<String> for PciAddress {
    type Error = PciAddressError;

    fn try_from(text: String) -> Result<Self, PciAddressError> {
        text.parse()
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> String {
        address.to_string()
    }
}

/// A list of CPUs, formatted as the kernel does: `0-15,32,128-143`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CpuList(Vec<(u32, u32)>);

impl CpuList {
    /// The maximum number of CPUs of a machine.
    pub const MAX_CPUS: u32 = 4096;

    /// Creates a list from ranges of first and last CPU.
    pub(super) fn from_ranges(ranges: &[(u32, u32)]) -> CpuList {
        CpuList(ranges.to_vec())
    }

    /// Iterates over all CPUs of the list.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.iter().flat_map(|&(first, last)| first..=last)
    }

    /// Sets one bit per CPU, as in NVML's affinity masks. CPUs that do not fit into `words` are left out.
    pub fn fill_mask(&self, words: &mut [u64]) {
        words.fill(0);
        for cpu in self.iter() {
            if let Some(word) = words.get_mut(cpu as usize / 64) {
                *word |= 1 << (cpu % 64);
            }
        }
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, (first, last)) in self.0.iter().enumerate() {
            let comma = if position == 0 { "" } else { "," };
            if first == last {
                write!(f, "{comma}{first}")?;
            } else {
                write!(f, "{comma}{first}-{last}")?;
            }
        }
        Ok(())
    }
}

/// A text that is not a list of CPUs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid list of CPUs \"{0}\": use the form 0-15,128-143")]
pub struct CpuListError(String);

impl FromStr for CpuList {
    type Err = CpuListError;

    fn from_str(text: &str) -> Result<Self, CpuListError> {
        let number = |text: &str| text.parse::<u32>().ok().filter(|&cpu| cpu < CpuList::MAX_CPUS);
        let run = |run: &str| {
            let (first, last) = run.split_once('-').unwrap_or((run, run));
            let (first, last) = (number(first)?, number(last)?);
            (first <= last).then_some((first, last))
        };
        let runs: Option<Vec<_>> = text.split(',').map(run).collect();
        runs.map(CpuList).ok_or_else(|| CpuListError(text.into()))
    }
}

impl TryFrom<String> for CpuList {
    type Error = CpuListError;

    fn try_from(text: String) -> Result<Self, CpuListError> {
        text.parse()
    }
}

impl From<CpuList> for String {
    fn from(cpus: CpuList) -> String {
        cpus.to_string()
    }
}

/// The PCIe path between two GPUs, from best to worst, as `nvidia-smi topo -m` distinguishes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PciPath {
    /// Through one PCIe switch.
    Pix,
    /// Through several PCIe switches.
    Pxb,
    /// Through a host bridge.
    Phb,
    /// Between host bridges of one NUMA node.
    Node,
    /// Between NUMA nodes, through the interconnect of the processors.
    System,
}

impl PciPath {
    /// All paths, from best to worst.
    pub const ALL: [PciPath; 5] = [PciPath::Pix, PciPath::Pxb, PciPath::Phb, PciPath::Node, PciPath::System];

    /// Returns the abbreviation of `nvidia-smi topo -m`.
    pub fn name(self) -> &'static str {
        match self {
            PciPath::Pix => "PIX",
            PciPath::Pxb => "PXB",
            PciPath::Phb => "PHB",
            PciPath::Node => "NODE",
            PciPath::System => "SYS",
        }
    }

    /// Returns the value of `nvmlGpuTopologyLevel_t`.
    pub fn nvml(self) -> u32 {
        10 * (self as u32 + 1)
    }
}

/// The PCIe paths between all GPUs of a node. Serialized as rows of [`PciPath::name`]s with `X` on the diagonal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct PciPaths {
    gpus: usize,
    cells: Vec<PciPath>,
}

impl PciPaths {
    /// Creates the matrix from a function of two GPU indexes.
    pub fn from_fn(gpus: usize, path: impl Fn(usize, usize) -> PciPath) -> PciPaths {
        // The diagonal is never read, but equal matrices must compare equal.
        let cell = |a, b| if a == b { PciPath::Pix } else { path(a, b) };
        PciPaths { gpus, cells: (0..gpus * gpus).map(|at| cell(at / gpus, at % gpus)).collect() }
    }

    /// Returns the number of GPUs.
    pub fn gpus(&self) -> usize {
        self.gpus
    }

    /// Returns the path between two GPUs; `None` from a GPU to itself and for an unknown index.
    pub fn between(&self, a: usize, b: usize) -> Option<PciPath> {
        (a != b && a < self.gpus && b < self.gpus).then(|| self.cells[a * self.gpus + b])
    }
}

/// Why rows are not the PCIe paths between the GPUs of a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PciPathsError {
    /// A row has another number of entries than there are rows.
    #[error("pciPaths: row {row} has {entries} entries for {gpus} GPUs")]
    RowLength {
        /// The index of the row.
        row: usize,
        /// The number of entries in it.
        entries: usize,
        /// The number of rows.
        gpus: usize,
    },
    /// An entry is not a path, or the diagonal is not marked.
    #[error("pciPaths: row {row} has \"{found}\" for GPU {column}: use {expected}")]
    UnknownPath {
        /// The index of the row.
        row: usize,
        /// The index of the GPU that the entry is for.
        column: usize,
        /// The entry.
        found: String,
        /// The valid entries.
        expected: &'static str,
    },
    /// The two directions between a pair of GPUs differ.
    #[error("pciPaths: GPU {first} to {second} and GPU {second} to {first} differ")]
    Asymmetric {
        /// The GPU with the lower index.
        first: usize,
        /// The GPU with the higher index.
        second: usize,
    },
}

impl TryFrom<Vec<String>> for PciPaths {
    type Error = PciPathsError;

    fn try_from(rows: Vec<String>) -> Result<Self, PciPathsError> {
        let gpus = rows.len();
        let mut cells = Vec::with_capacity(gpus * gpus);
        for (row, text) in rows.iter().enumerate() {
            let words: Vec<&str> = text.split_whitespace().collect();
            if words.len() != gpus {
                return Err(PciPathsError::RowLength { row, entries: words.len(), gpus });
            }
            for (column, word) in words.into_iter().enumerate() {
                let path = PciPath::ALL.into_iter().find(|path| path.name() == word);
                cells.push(match path {
                    None if row == column && word == "X" => PciPath::Pix,
                    Some(path) if row != column => path,
                    _ => {
                        let expected = if row == column { "X" } else { "PIX, PXB, PHB, NODE or SYS" };
                        return Err(PciPathsError::UnknownPath { row, column, found: word.into(), expected });
                    }
                });
            }
        }
        let paths = PciPaths { gpus, cells };
        for second in 0..gpus {
            let differs = |first: &usize| paths.between(*first, second) != paths.between(second, *first);
            if let Some(first) = (0..second).find(differs) {
                return Err(PciPathsError::Asymmetric { first, second });
            }
        }
        Ok(paths)
    }
}

impl From<PciPaths> for Vec<String> {
    fn from(paths: PciPaths) -> Vec<String> {
        let word = |a, b| paths.between(a, b).map_or("X", PciPath::name);
        let row = |a| (0..paths.gpus).map(|b| word(a, b)).collect::<Vec<_>>().join(" ");
        (0..paths.gpus).map(row).collect()
    }
}

/// The remote end of an NVLink, formatted as `gpu 3 link 2` or `switch 00000000:C4:00.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum NvLinkEnd {
    /// A link of another GPU of the node.
    Gpu {
        /// The index of that GPU.
        gpu: usize,
        /// The index of the link at that GPU.
        link: usize,
    },
    /// An NVSwitch, which connects all GPUs that are linked to it.
    Switch(PciAddress),
}

impl fmt::Display for NvLinkEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NvLinkEnd::Gpu { gpu, link } => write!(f, "gpu {gpu} link {link}"),
            NvLinkEnd::Switch(address) => write!(f, "switch {address}"),
        }
    }
}

/// Why a text is not the end of an NVLink.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NvLinkEndError {
    /// The address of a switch is invalid.
    #[error(transparent)]
    Switch(#[from] PciAddressError),
    /// The text has neither form.
    #[error("invalid NVLink end \"{text}\": use the form \"gpu 3 link 2\" or \"switch 00000000:C4:00.0\"")]
    Malformed {
        /// The text that was given.
        text: String,
    },
}

impl TryFrom<String> for NvLinkEnd {
    type Error = NvLinkEndError;

    fn try_from(text: String) -> Result<Self, NvLinkEndError> {
        if let Some(address) = text.strip_prefix("switch ") {
            return Ok(NvLinkEnd::Switch(address.parse()?));
        }
        let end = || {
            let (gpu, link) = text.strip_prefix("gpu ")?.split_once(" link ")?;
            Some(NvLinkEnd::Gpu { gpu: gpu.parse().ok()?, link: link.parse().ok()? })
        };
        end().ok_or(NvLinkEndError::Malformed { text })
    }
}

impl From<NvLinkEnd> for String {
    fn from(end: NvLinkEnd) -> String {
        end.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_addresses_round_trip() {
        let address = PciAddress { domain: 1, bus: 0x0f, device: 0x1e };
        assert_eq!(address.to_string(), "00000001:0F:1E.0");
        assert_eq!("00000001:0F:1E.0".parse(), Ok(address));
        assert_eq!("0001:0f:1e.0".parse(), Ok(address));
        for wrong in
            ["", "07:00.0", "0000:07:00.1", "0000:07:20.0", "0000:7:00.0", "+000:07:00.0", "0000:07:00.0 "]
        {
            assert!(wrong.parse::<PciAddress>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn cpu_lists_round_trip() {
        let cpus: CpuList = "0-1,5,64-65".parse().unwrap();
        assert_eq!(cpus.to_string(), "0-1,5,64-65");
        let mut words = [u64::MAX; 2];
        cpus.fill_mask(&mut words);
        assert_eq!(words, [0b10_0011, 0b11]);
        for wrong in ["", "1-0", "4096", "a", "1,,2", "-1"] {
            assert!(wrong.parse::<CpuList>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn pci_paths_are_validated() {
        let rows =
            |rows: &[&str]| PciPaths::try_from(rows.iter().map(|row| row.to_string()).collect::<Vec<_>>());
        let good = rows(&["X PIX SYS", "PIX X SYS", "SYS SYS X"]).unwrap();
        assert_eq!(good.between(0, 1), Some(PciPath::Pix));
        assert_eq!(Vec::from(good), ["X PIX SYS", "PIX X SYS", "SYS SYS X"]);
        for (wrong, words) in [
            (&["X PIX"][..], "row 0 has 2 entries for 1 GPUs"),
            (&["X PIX", "SYS X"], "GPU 0 to 1 and GPU 1 to 0 differ"),
            (&["X NV1", "NV1 X"], "\"NV1\" for GPU 1: use PIX"),
            (&["PIX"], "\"PIX\" for GPU 0: use X"),
        ] {
            let error = rows(wrong).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        let asymmetric = rows(&["X PIX", "SYS X"]);
        assert_eq!(asymmetric, Err(PciPathsError::Asymmetric { first: 0, second: 1 }));
    }

    #[test]
    fn invalid_nvlink_end_names_its_text() {
        let end = |text: &str| NvLinkEnd::try_from(text.to_string());
        assert_eq!(end("gpu 3 link 2"), Ok(NvLinkEnd::Gpu { gpu: 3, link: 2 }));
        assert_eq!(end("gpu 3"), Err(NvLinkEndError::Malformed { text: "gpu 3".into() }));
        assert_eq!(end("switch 1"), Err(NvLinkEndError::Switch(PciAddressError("1".into()))));
    }
}
