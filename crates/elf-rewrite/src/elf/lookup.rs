//! Locates sections, segments, dynamic entries and strings of a shared object.

use super::{
    DT_VERNEED, DT_VERNEEDNUM, ElfError, ElfObject, EntryTable, FileRange, PT_LOAD, SECTION_SIZE,
    SEGMENT_SIZE, SYMBOL_SIZE, Segment, malformed, unsupported_linking,
};

impl ElfObject {
    pub(super) fn symbol(&self, index: usize) -> usize {
        self.symbols.offset + index * SYMBOL_SIZE
    }

    pub(super) fn symbol_name(&self, index: usize) -> Result<String, ElfError> {
        self.string(self.strings, self.u32(self.symbol(index))? as usize)
    }

    /// Iterates over the offsets of the section headers.
    pub(super) fn sections(&self) -> impl Iterator<Item = usize> + use<> {
        let EntryTable { offset, count } = self.sections;
        (0..count).map(move |index| offset + index * SECTION_SIZE)
    }

    /// Returns the offset of the header of the section with this type and address.
    pub(super) fn section_at(&self, kind: u32, address: usize) -> Result<Option<usize>, ElfError> {
        for section in self.sections() {
            if self.u32(section + 4)? == kind && self.offset(section + 16)? == address {
                return Ok(Some(section));
            }
        }
        Ok(None)
    }

    pub(super) fn segments(&self) -> Result<Vec<Segment>, ElfError> {
        let (start, count) = (self.offset(32)?, usize::from(self.u16(56)?));
        self.check_range(FileRange { offset: start, size: count * SEGMENT_SIZE }, "its segments")?;
        (0..count)
            .map(|index| {
                let at = start + index * SEGMENT_SIZE;
                let (kind, offset) = (self.u32(at)?, self.offset(at + 8)?);
                Ok(Segment { kind, offset, address: self.offset(at + 16)?, size: self.offset(at + 32)? })
            })
            .collect()
    }

    /// Converts the address of a range of loaded bytes to its offset in the file.
    pub(super) fn file_offset(&self, address: usize, size: usize) -> Result<usize, ElfError> {
        for segment in self.segments()?.iter().filter(|segment| segment.kind == PT_LOAD) {
            if let Some(inside) = address.checked_sub(segment.address)
                && inside.checked_add(size).is_some_and(|end| end <= segment.size)
            {
                return self.add(segment.offset, u32::try_from(inside).unwrap_or(u32::MAX));
            }
        }
        malformed("a table is outside the loaded segments")
    }

    /// Returns the dynamic entries: tag, offset of the entry, value.
    pub(super) fn dynamic_entries(&self) -> Result<Vec<(u64, usize, usize)>, ElfError> {
        let mut entries = Vec::new();
        for at in (self.dynamic.offset..self.dynamic.offset + self.dynamic.size / 16 * 16).step_by(16) {
            match self.u64(at)? {
                0 => break,
                // Entries that are not used may have any value, so it is not checked here.
                tag => entries.push((tag, at, self.u64(at + 8)? as usize)),
            }
        }
        Ok(entries)
    }

    /// Returns the offset and value of the first dynamic entry with this tag.
    pub(super) fn dynamic_entry(&self, tag: u64) -> Result<Option<(usize, usize)>, ElfError> {
        Ok(self.dynamic_entries()?.into_iter().find(|entry| entry.0 == tag).map(|(_, at, value)| (at, value)))
    }

    pub(super) fn required_entry(&self, tag: u64, what: &str) -> Result<usize, ElfError> {
        match self.dynamic_entry(tag)? {
            Some((_, value)) => Ok(value),
            None => unsupported_linking(format!("it has no {what}")),
        }
    }

    /// Reads a string that must be terminated inside its table.
    pub(super) fn string(&self, table: FileRange, at: usize) -> Result<String, ElfError> {
        let bytes = self.part(table)?.get(at..).unwrap_or_default();
        let Some(end) = bytes.iter().position(|&byte| byte == 0) else {
            return malformed("a name is not terminated");
        };
        match std::str::from_utf8(&bytes[..end]) {
            Ok(name) => Ok(name.to_string()),
            Err(_) => malformed("a name is not valid UTF-8"),
        }
    }

    /// Returns the string offsets of the libraries whose versions are needed, each with those of the versions.
    pub(super) fn versions_needed(&self) -> Result<Vec<(usize, Vec<usize>)>, ElfError> {
        let mut needed = Vec::new();
        let Some((_, address)) = self.dynamic_entry(DT_VERNEED)? else { return Ok(needed) };
        let mut file = self.file_offset(address, 16)?;
        for _ in 0..self.required_entry(DT_VERNEEDNUM, "number of versions")? {
            let mut versions = Vec::new();
            let mut version = self.add(file, self.u32(file + 8)?)?;
            for _ in 0..self.u16(file + 2)? {
                versions.push(self.u32(version + 8)? as usize);
                match self.u32(version + 12)? {
                    0 => break,
                    next => version = self.add(version, next)?,
                }
            }
            needed.push((self.u32(file + 4)? as usize, versions));
            match self.u32(file + 12)? {
                0 => break,
                next => file = self.add(file, next)?,
            }
        }
        Ok(needed)
    }
}
