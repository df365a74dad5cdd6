//! Finding things in a shared object.

use super::{
    DT_VERNEED, DT_VERNEEDNUM, ElfError, Object, PT_LOAD, Part, SECTION, SEGMENT, SYMBOL, Segment, Table,
    broken, linked,
};

impl Object {
    pub(super) fn symbol(&self, index: usize) -> usize {
        self.symbols.offset + index * SYMBOL
    }

    pub(super) fn symbol_name(&self, index: usize) -> Result<String, ElfError> {
        self.string(self.strings, self.u32(self.symbol(index))? as usize)
    }

    /// Where the section headers are.
    pub(super) fn sections(&self) -> impl Iterator<Item = usize> + use<> {
        let Table { offset, count } = self.sections;
        (0..count).map(move |index| offset + index * SECTION)
    }

    /// The header of the section of this kind at this address.
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
        self.inside(Part { offset: start, size: count * SEGMENT }, "its segments")?;
        (0..count)
            .map(|index| {
                let at = start + index * SEGMENT;
                let (kind, offset) = (self.u32(at)?, self.offset(at + 8)?);
                Ok(Segment { kind, offset, address: self.offset(at + 16)?, size: self.offset(at + 32)? })
            })
            .collect()
    }

    /// Where in the file an address is, with so many bytes behind it.
    pub(super) fn mapped(&self, address: usize, size: usize) -> Result<usize, ElfError> {
        for segment in self.segments()?.iter().filter(|segment| segment.kind == PT_LOAD) {
            if let Some(inside) = address.checked_sub(segment.address)
                && inside.checked_add(size).is_some_and(|end| end <= segment.size)
            {
                return self.add(segment.offset, u32::try_from(inside).unwrap_or(u32::MAX));
            }
        }
        broken("a table lies outside of what is loaded")
    }

    /// Tag, place of the entry, value.
    pub(super) fn dynamic_entries(&self) -> Result<Vec<(u64, usize, usize)>, ElfError> {
        let mut entries = Vec::new();
        for at in (self.dynamic.offset..self.dynamic.offset + self.dynamic.size / 16 * 16).step_by(16) {
            match self.u64(at)? {
                0 => break,
                // Flags and addresses that are not looked at may be anything.
                tag => entries.push((tag, at, self.u64(at + 8)? as usize)),
            }
        }
        Ok(entries)
    }

    /// Where an entry of the dynamic section is, and its value.
    pub(super) fn dynamic(&self, tag: u64) -> Result<Option<(usize, usize)>, ElfError> {
        Ok(self.dynamic_entries()?.into_iter().find(|entry| entry.0 == tag).map(|(_, at, value)| (at, value)))
    }

    pub(super) fn needed(&self, tag: u64, what: &str) -> Result<usize, ElfError> {
        match self.dynamic(tag)? {
            Some((_, value)) => Ok(value),
            None => linked(format!("it has no {what}")),
        }
    }

    /// A string that ends inside its table.
    pub(super) fn string(&self, table: Part, at: usize) -> Result<String, ElfError> {
        let bytes = self.part(table)?.get(at..).unwrap_or_default();
        let Some(end) = bytes.iter().position(|&byte| byte == 0) else {
            return broken("a name has no end");
        };
        match std::str::from_utf8(&bytes[..end]) {
            Ok(name) => Ok(name.to_string()),
            Err(_) => broken("a name is no text"),
        }
    }

    /// Where the names are of the files whose versions are needed, each with those of the versions.
    pub(super) fn versions_needed(&self) -> Result<Vec<(usize, Vec<usize>)>, ElfError> {
        let mut needed = Vec::new();
        let Some((_, address)) = self.dynamic(DT_VERNEED)? else { return Ok(needed) };
        let mut file = self.mapped(address, 16)?;
        for _ in 0..self.needed(DT_VERNEEDNUM, "number of versions")? {
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
