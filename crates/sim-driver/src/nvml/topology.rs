//! Places: PCI addresses, NUMA nodes and their processors, ways between GPUs.

use super::call::{self, Gpu};
use super::session::{Card, session};
use super::{NvmlError, c_ulong};

/// NVLinks between two GPUs.
pub(super) fn links(gpu: Gpu, other: usize) -> u32 {
    gpu.session.config().nvlinks(gpu.index, other) as u32
}

/// NVML's number for the way between two GPUs over PCIe: tens, the nearest first.
pub(super) fn level(gpu: Gpu, other: usize) -> u32 {
    gpu.session.config().pci_path(gpu.index, other).map_or(0, |path| path.nvml())
}

/// The GPU at a PCI address, which may leave out the domain and the function: `0000:07:00.0`, `07:00`.
pub(super) fn by_address(text: &str) -> Result<Gpu, NvmlError> {
    session()?;
    let (domain, bus, device) = parse(text).ok_or(NvmlError::INVALID_ARGUMENT)?;
    by_place(domain, bus, device)
}

/// The same, by the parts of the address.
pub(super) fn by_place(domain: u32, bus: u32, device: u32) -> Result<Gpu, NvmlError> {
    let session = session()?;
    let is_there = |card: &Card| {
        let pci = card.gpu.pci;
        (pci.domain, u32::from(pci.bus), u32::from(pci.device)) == (domain, bus, device)
    };
    let index = session.find(is_there)?;
    Ok(Gpu { session, index })
}

fn parse(text: &str) -> Option<(u32, u32, u32)> {
    let number = |text: &str| u32::from_str_radix(text, 16).ok();
    let mut parts = text.rsplitn(3, ':');
    let device = parts.next()?.split('.').next()?;
    let bus = parts.next()?;
    let domain = parts.next().unwrap_or("0");
    Some((number(domain)?, number(bus)?, number(device)?))
}

/// The GPUs that `accept` takes, but not this one.
pub(super) fn others(gpu: Gpu, accept: impl Fn(usize) -> bool) -> Vec<super::nvmlDevice_t> {
    let all = gpu.session.shown.iter().copied();
    all.filter(|&other| other != gpu.index && accept(other)).map(call::handle).collect()
}

/// A set of numbers as NVML writes it into `words` words.
pub(super) fn set(words: u32, numbers: impl Iterator<Item = usize>) -> Vec<c_ulong> {
    let bits = c_ulong::BITS as usize;
    let mut set = vec![0; words as usize];
    for number in numbers {
        if let Some(word) = set.get_mut(number / bits) {
            *word |= 1 << (number % bits);
        }
    }
    set
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_in_all_forms() {
        for text in ["00000000:07:00.0", "0000:07:00.0", "07:00.0", "07:00", "0:7:0"] {
            assert_eq!(parse(text), Some((0, 7, 0)), "{text}");
        }
        for text in ["", "07", "x:07:00.0", "GPU-1"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn sets_fill_their_words_and_no_more() {
        assert_eq!(set(2, [0, 3, 64, 200].into_iter()), [0b1001, 1]);
        assert!(set(0, 0..8).is_empty());
    }
}
