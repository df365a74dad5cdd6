//! Words for where a GPU sits and what it is linked to.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A PCI address of a first function, written as NVML does: `00000000:07:00.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PciAddress {
    /// Domain.
    pub domain: u32,
    /// Bus.
    pub bus: u8,
    /// Device, below 32.
    pub device: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08X}:{:02X}:{:02X}.0", self.domain, self.bus, self.device)
    }
}

impl FromStr for PciAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
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
        address().ok_or_else(|| format!("\"{text}\" is no PCI address: write it like 00000000:07:00.0"))
    }
}

impl TryFrom<String> for PciAddress {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> String {
        address.to_string()
    }
}

/// CPUs, written as the kernel does: `0-15,32,128-143`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Cpus(Vec<(u32, u32)>);

impl Cpus {
    /// The most CPUs a machine has.
    pub const MOST: u32 = 4096;

    /// CPUs in runs, first and last.
    pub(super) fn runs(runs: &[(u32, u32)]) -> Cpus {
        Cpus(runs.to_vec())
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.iter().flat_map(|&(first, last)| first..=last)
    }

    /// One bit per CPU, as NVML's masks are; CPUs beyond the words are left out.
    pub fn mask(&self, words: &mut [u64]) {
        words.fill(0);
        for cpu in self.iter() {
            if let Some(word) = words.get_mut(cpu as usize / 64) {
                *word |= 1 << (cpu % 64);
            }
        }
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, (first, last)) in self.0.iter().enumerate() {
            let comma = if position == 0 { "" } else { "," };
            match first == last {
                true => write!(f, "{comma}{first}")?,
                false => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

impl FromStr for Cpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse::<u32>().ok().filter(|&cpu| cpu < Cpus::MOST);
        let run = |run: &str| {
            let (first, last) = run.split_once('-').unwrap_or((run, run));
            let (first, last) = (number(first)?, number(last)?);
            (first <= last).then_some((first, last))
        };
        let runs: Option<Vec<_>> = text.split(',').map(run).collect();
        runs.map(Cpus).ok_or_else(|| format!("\"{text}\" is no list of CPUs: write it like 0-15,128-143"))
    }
}

impl TryFrom<String> for Cpus {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Cpus> for String {
    fn from(cpus: Cpus) -> String {
        cpus.to_string()
    }
}

/// The way over PCIe between two GPUs, best first, in the words of `nvidia-smi topo -m`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PciPath {
    /// One PCIe switch.
    Pix,
    /// Several PCIe switches.
    Pxb,
    /// A host bridge.
    Phb,
    /// Between host bridges of one NUMA node.
    Node,
    /// Between NUMA nodes.
    System,
}

impl PciPath {
    /// Every way, best first.
    pub const ALL: [PciPath; 5] = [PciPath::Pix, PciPath::Pxb, PciPath::Phb, PciPath::Node, PciPath::System];

    /// Its word.
    pub fn word(self) -> &'static str {
        match self {
            PciPath::Pix => "PIX",
            PciPath::Pxb => "PXB",
            PciPath::Phb => "PHB",
            PciPath::Node => "NODE",
            PciPath::System => "SYS",
        }
    }

    /// NVML's `nvmlGpuTopologyLevel_t`.
    pub fn nvml(self) -> u32 {
        10 * (self as u32 + 1)
    }
}

/// The ways over PCIe between all GPUs of a node: rows of words, `X` where a GPU meets itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct PciPaths {
    gpus: usize,
    cells: Vec<PciPath>,
}

impl PciPaths {
    /// The ways that a function of two GPU indexes says.
    pub fn from_fn(gpus: usize, path: impl Fn(usize, usize) -> PciPath) -> PciPaths {
        // Nobody asks for the way of a GPU to itself; equal nodes have the same there all the same.
        let cell = |a, b| if a == b { PciPath::Pix } else { path(a, b) };
        PciPaths { gpus, cells: (0..gpus * gpus).map(|at| cell(at / gpus, at % gpus)).collect() }
    }

    /// For how many GPUs.
    pub fn gpus(&self) -> usize {
        self.gpus
    }

    /// The way between two GPUs; `None` from a GPU to itself and beyond the last.
    pub fn between(&self, a: usize, b: usize) -> Option<PciPath> {
        (a != b && a < self.gpus && b < self.gpus).then(|| self.cells[a * self.gpus + b])
    }
}

impl TryFrom<Vec<String>> for PciPaths {
    type Error = String;

    fn try_from(rows: Vec<String>) -> Result<Self, String> {
        let gpus = rows.len();
        let mut cells = Vec::with_capacity(gpus * gpus);
        for (row, text) in rows.iter().enumerate() {
            let words: Vec<&str> = text.split_whitespace().collect();
            if words.len() != gpus {
                return Err(format!("pciPaths: row {row} has {} words for {gpus} GPUs", words.len()));
            }
            for (column, word) in words.into_iter().enumerate() {
                let path = PciPath::ALL.into_iter().find(|path| path.word() == word);
                cells.push(match path {
                    None if row == column && word == "X" => PciPath::Pix,
                    Some(path) if row != column => path,
                    _ => {
                        let right = if row == column { "X" } else { "PIX, PXB, PHB, NODE or SYS" };
                        return Err(format!(
                            "pciPaths: row {row} has \"{word}\" for GPU {column}: use {right}"
                        ));
                    }
                });
            }
        }
        let paths = PciPaths { gpus, cells };
        for a in 0..gpus {
            if let Some(b) = (0..a).find(|&b| paths.between(a, b) != paths.between(b, a)) {
                return Err(format!("pciPaths: GPU {b} to {a} and GPU {a} to {b} differ"));
            }
        }
        Ok(paths)
    }
}

impl From<PciPaths> for Vec<String> {
    fn from(paths: PciPaths) -> Vec<String> {
        let word = |a, b| paths.between(a, b).map_or("X", PciPath::word);
        let row = |a| (0..paths.gpus).map(|b| word(a, b)).collect::<Vec<_>>().join(" ");
        (0..paths.gpus).map(row).collect()
    }
}

/// Where an NVLink ends, written `gpu 3 link 2` or `switch 00000000:C4:00.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum LinkEnd {
    /// At a link of another GPU of the node.
    Gpu {
        /// Its index.
        gpu: usize,
        /// The link there.
        link: usize,
    },
    /// At an NVSwitch, which reaches every other GPU that is linked to it.
    Switch(PciAddress),
}

impl fmt::Display for LinkEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LinkEnd::Gpu { gpu, link } => write!(f, "gpu {gpu} link {link}"),
            LinkEnd::Switch(address) => write!(f, "switch {address}"),
        }
    }
}

impl TryFrom<String> for LinkEnd {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if let Some(address) = text.strip_prefix("switch ") {
            return address.parse().map(LinkEnd::Switch);
        }
        let end = || {
            let (gpu, link) = text.strip_prefix("gpu ")?.split_once(" link ")?;
            Some(LinkEnd::Gpu { gpu: gpu.parse().ok()?, link: link.parse().ok()? })
        };
        end().ok_or_else(|| {
            format!(
                "\"{text}\" is no end of an NVLink: write \"gpu 3 link 2\" or \"switch 00000000:C4:00.0\""
            )
        })
    }
}

impl From<LinkEnd> for String {
    fn from(end: LinkEnd) -> String {
        end.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
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
    fn cpus_are_read_as_they_are_written() {
        let cpus: Cpus = "0-1,5,64-65".parse().unwrap();
        assert_eq!(cpus.to_string(), "0-1,5,64-65");
        let mut words = [u64::MAX; 2];
        cpus.mask(&mut words);
        assert_eq!(words, [0b10_0011, 0b11]);
        for wrong in ["", "1-0", "4096", "a", "1,,2", "-1"] {
            assert!(wrong.parse::<Cpus>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn paths_are_checked() {
        let rows =
            |rows: &[&str]| PciPaths::try_from(rows.iter().map(|row| row.to_string()).collect::<Vec<_>>());
        let good = rows(&["X PIX SYS", "PIX X SYS", "SYS SYS X"]).unwrap();
        assert_eq!(good.between(0, 1), Some(PciPath::Pix));
        assert_eq!(Vec::from(good), ["X PIX SYS", "PIX X SYS", "SYS SYS X"]);
        for (wrong, words) in [
            (&["X PIX"][..], "row 0 has 2 words for 1 GPUs"),
            (&["X PIX", "SYS X"], "GPU 0 to 1 and GPU 1 to 0 differ"),
            (&["X NV1", "NV1 X"], "\"NV1\" for GPU 1: use PIX"),
            (&["PIX"], "\"PIX\" for GPU 0: use X"),
        ] {
            let error = rows(wrong).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
