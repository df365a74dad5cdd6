//! Bounds-checked reading and writing of a shared object's bytes.

use super::{ElfError, ElfObject, FileRange, malformed};

impl ElfObject {
    pub(super) fn check_range(&self, part: FileRange, what: &str) -> Result<(), ElfError> {
        match part.offset.checked_add(part.size) {
            Some(end) if end <= self.bytes.len() => Ok(()),
            _ => malformed(format!("{what} exceed the end of the file")),
        }
    }

    pub(super) fn part(&self, part: FileRange) -> Result<&[u8], ElfError> {
        self.check_range(part, "its tables")?;
        Ok(&self.bytes[part.offset..part.offset + part.size])
    }

    pub(super) fn part_mut(&mut self, part: FileRange) -> Result<&mut [u8], ElfError> {
        self.check_range(part, "its tables")?;
        Ok(&mut self.bytes[part.offset..part.offset + part.size])
    }

    pub(super) fn take<const N: usize>(&self, offset: usize) -> Result<[u8; N], ElfError> {
        let mut value = [0; N];
        value.copy_from_slice(self.part(FileRange { offset, size: N })?);
        Ok(value)
    }

    pub(super) fn byte(&self, at: usize) -> Result<u8, ElfError> {
        self.take::<1>(at).map(|[byte]| byte)
    }

    pub(super) fn u16(&self, at: usize) -> Result<u16, ElfError> {
        self.take(at).map(u16::from_le_bytes)
    }

    pub(super) fn u32(&self, at: usize) -> Result<u32, ElfError> {
        self.take(at).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&self, at: usize) -> Result<u64, ElfError> {
        self.take(at).map(u64::from_le_bytes)
    }

    /// Reads an offset, address or size. It is limited to 32 bits, so that sums of two do not overflow.
    pub(super) fn offset(&self, at: usize) -> Result<usize, ElfError> {
        match usize::try_from(self.u64(at)?) {
            Ok(number) if number <= u32::MAX as usize => Ok(number),
            _ => malformed("an offset, address or size is out of range"),
        }
    }

    pub(super) fn add(&self, at: usize, more: u32) -> Result<usize, ElfError> {
        match at.checked_add(more as usize) {
            Some(sum) if sum <= self.bytes.len() => Ok(sum),
            _ => malformed("a table exceeds the end of the file"),
        }
    }

    pub(super) fn put(&mut self, offset: usize, value: &[u8]) -> Result<(), ElfError> {
        self.part_mut(FileRange { offset, size: value.len() })?.copy_from_slice(value);
        Ok(())
    }

    pub(super) fn set_byte(&mut self, at: usize, value: u8) -> Result<(), ElfError> {
        self.put(at, &[value])
    }

    pub(super) fn set_u16(&mut self, at: usize, value: u16) -> Result<(), ElfError> {
        self.put(at, &value.to_le_bytes())
    }

    pub(super) fn set_u32(&mut self, at: usize, value: u32) -> Result<(), ElfError> {
        self.put(at, &value.to_le_bytes())
    }

    pub(super) fn set_u64(&mut self, at: usize, value: u64) -> Result<(), ElfError> {
        self.put(at, &value.to_le_bytes())
    }

    pub(super) fn clear(&mut self, offset: usize, size: usize) -> Result<(), ElfError> {
        self.part_mut(FileRange { offset, size })?.fill(0);
        Ok(())
    }

    /// Copies bytes from the original file.
    pub(super) fn copy(&mut self, old: &[u8], from: usize, to: usize, size: usize) -> Result<(), ElfError> {
        match old.get(from..from + size) {
            Some(bytes) => self.put(to, bytes),
            None => malformed("its tables exceed the end of the file"),
        }
    }
}
