//! Topology: PCI addresses, CPU sets and distances between GPUs.

use super::arguments::{self, VisibleGpu};
use super::session::{GpuCard, session};
use super::{NvmlError, c_ulong};

/// Returns the number of NVLinks between two GPUs.
pub(super) fn links(gpu: VisibleGpu, other: usize) -> u32 {
    gpu.session.config().nvlinks(gpu.index, other) as u32
}

/// Returns NVML's topology level for the PCIe path between two GPUs: multiples of ten, nearest first.
pub(super) fn level(gpu: VisibleGpu, other: usize) -> u32 {
    gpu.session.config().pci_path(gpu.index, other).map_or(0, |path| path.nvml())
}

/// Resolves a PCI address to a GPU. The domain and the function may be omitted: `0000:07:00.0`, `07:00`.
pub(super) fn by_address(text: &str) -> Result<VisibleGpu, NvmlError> {
    session()?;
    let (domain, bus, device) = parse(text).ok_or(NvmlError::INVALID_ARGUMENT)?;
    by_pci_location(domain, bus, device)
}

/// Resolves the components of a PCI address to a GPU.
pub(super) fn by_pci_location(domain: u32, bus: u32, device: u32) -> Result<VisibleGpu, NvmlError> {
    let session = session()?;
    let is_there = |card: &GpuCard| {
        let pci = card.gpu.pci;
        (pci.domain, u32::from(pci.bus), u32::from(pci.device)) == (domain, bus, device)
    };
    let index = session.find(is_there)?;
    Ok(VisibleGpu { session, index })
}

fn parse(text: &str) -> Option<(u32, u32, u32)> {
    let number = |text: &str| u32::from_str_radix(text, 16).ok();
    let mut parts = text.rsplitn(3, ':');
    let device = parts.next()?.split('.').next()?;
    let bus = parts.next()?;
    let domain = parts.next().unwrap_or("0");
    Some((number(domain)?, number(bus)?, number(device)?))
}

/// Returns the handles of the other GPUs for which `accept` returns true.
pub(super) fn others(gpu: VisibleGpu, accept: impl Fn(usize) -> bool) -> Vec<super::nvmlDevice_t> {
    let all = gpu.session.visible.iter().copied();
    all.filter(|&other| other != gpu.index && accept(other)).map(arguments::handle).collect()
}

/// Encodes a set of numbers as a bit mask of `words` words.
pub(super) fn bit_set(words: u32, numbers: impl Iterator<Item = usize>) -> Vec<c_ulong> {
    let bits = c_ulong::BITS as usize;
    let mut bit_set = vec![0; words as usize];
    for number in numbers {
        if let Some(word) = bit_set.get_mut(number / bits) {
            *word |= 1 << (number % bits);
        }
    }
    bit_set
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_addresses_parse_in_all_forms() {
        for text in ["00000000:07:00.0", "0000:07:00.0", "07:00.0", "07:00", "0:7:0"] {
            assert_eq!(parse(text), Some((0, 7, 0)), "{text}");
        }
        for text in ["", "07", "x:07:00.0", "GPU-1"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn bit_sets_fill_only_their_words() {
        assert_eq!(bit_set(2, [0, 3, 64, 200].into_iter()), [0b1001, 1]);
        assert!(bit_set(0, 0..8).is_empty());
    }
}
