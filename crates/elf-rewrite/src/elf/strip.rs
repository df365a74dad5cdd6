//! Removes everything that is not loaded.

use super::{
    ElfError, ElfObject, FileRange, PT_LOAD, SECTION_SIZE, SEGMENT_SIZE, SHF_ALLOC, SHT_NOBITS, SHT_STRTAB,
    malformed,
};

impl ElfObject {
    /// Returns the file up to the end of the loaded segments, followed by the headers of the loaded sections.
    pub(super) fn into_stripped(mut self) -> Result<Vec<u8>, ElfError> {
        let (headers, count) = (self.offset(32)?, usize::from(self.u16(56)?));
        let segments = self.segments()?;
        let end = segments
            .iter()
            .filter(|segment| segment.kind == PT_LOAD)
            .map(|s| s.offset.saturating_add(s.size));
        let end = end.fold((headers + count * SEGMENT_SIZE).max(64), usize::max);
        self.check_range(FileRange { offset: 0, size: end }, "its loaded segments")?;
        let is_loaded = |section: usize| Ok::<_, ElfError>(self.u64(section + 8)? & SHF_ALLOC != 0);
        let names = self.sections.offset + SECTION_SIZE * usize::from(self.u16(62)?);
        let names = FileRange { offset: self.offset(names + 24)?, size: self.offset(names + 32)? };
        self.check_range(names, "its section names")?;

        let mut strings = vec![0];
        let mut kept = Vec::new();
        // Symbols refer to sections by index, so sections before the last loaded one keep their index.
        for section in self.sections() {
            let mut header = [0; SECTION_SIZE];
            if is_loaded(section)? {
                header.copy_from_slice(self.part(FileRange { offset: section, size: SECTION_SIZE })?);
                let place =
                    FileRange { offset: self.offset(section + 24)?, size: self.offset(section + 32)? };
                if self.u32(section + 4)? != SHT_NOBITS && place.offset.saturating_add(place.size) > end {
                    return malformed("a section is outside the loaded segments");
                }
                header[..4].copy_from_slice(&(strings.len() as u32).to_le_bytes());
                strings.extend(self.string(names, self.u32(section)? as usize)?.bytes());
                strings.push(0);
            }
            kept.push(header);
        }
        while kept.last().is_some_and(|header| header[4..8] == [0; 4]) {
            kept.pop();
        }
        if kept.is_empty() {
            return malformed("it has no loaded section");
        }
        let name = strings.len() as u32;
        strings.extend(b".shstrtab\0");

        self.bytes.truncate(end);
        let mut header = [0; SECTION_SIZE];
        header[..4].copy_from_slice(&name.to_le_bytes());
        header[4..8].copy_from_slice(&SHT_STRTAB.to_le_bytes());
        header[24..32].copy_from_slice(&(end as u64).to_le_bytes());
        header[32..40].copy_from_slice(&(strings.len() as u64).to_le_bytes());
        header[48..56].copy_from_slice(&1_u64.to_le_bytes());
        kept.push(header);
        self.bytes.extend(strings);
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
        let start = self.bytes.len() as u64;
        self.bytes.extend(kept.as_flattened());
        self.set_u64(40, start)?;
        self.set_u16(60, kept.len() as u16)?;
        self.set_u16(62, kept.len() as u16 - 1)?;
        Ok(self.bytes)
    }
}
