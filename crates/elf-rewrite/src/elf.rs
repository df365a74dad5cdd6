//! Rewrites a shared object: exports, soname, a needed library, and embedded settings.
//!
//! Everything that is loaded stays at its address: tables only become shorter, so that code and data remain valid.
//!
//! - Undefined symbols are first in `.dynsym` and keep their index, because relocations refer to it. Defined symbols
//!   follow in the order of their hash buckets. Dropped ones leave no gap, and relocations of kept ones are renumbered.
//!   (Objects that are linked with `-Bsymbolic` have no such relocations.)
//! - A new name is a suffix of the old one: the symbol's name starts later in `.dynstr`.
//! - `.gnu.version` is kept parallel to `.dynsym`; `.gnu.hash` is rebuilt with the same numbers of buckets and filter
//!   words.
//! - In `.dynstr`, bytes that no kept string covers are cleared, and the soname and the needed library are written
//!   there. A linker may store a name as the suffix of a longer one, so bytes are tracked, not strings. An object
//!   that is to need a long path exports a symbol with a long name, which is dropped.
//! - The needed library is inserted first in the dynamic section, so that it is searched next. It uses a spare entry,
//!   or replaces `DT_RELACOUNT`, which is only a hint for the loader.
//! - Everything that is not loaded (static symbol table, debug information) is removed: the directory of a simulated
//!   node may be in memory.

mod bytes;
mod inspect;
mod lookup;
mod strip;

pub use inspect::{
    exports, has_text_relocations, initializer_count, needed_libraries, needed_versions, soname,
};

use std::collections::{BTreeMap, BTreeSet};

/// Why a file cannot be rewritten.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ElfError {
    /// The file is not a shared object of the supported kind, or it is malformed.
    #[error("not a 64-bit little-endian shared object: {0}")]
    NotASharedObject(String),
    /// The shared object was linked with options that are not supported.
    #[error("unsupported shared object: {0}")]
    UnsupportedLinking(String),
    /// The shared object lacks requested symbols.
    #[error("{count} requested symbols are missing: {names}")]
    MissingSymbols {
        /// The number of missing symbols.
        count: usize,
        /// The names of the first few.
        names: String,
    },
}

fn malformed<T>(what: impl Into<String>) -> Result<T, ElfError> {
    Err(ElfError::NotASharedObject(what.into()))
}

fn unsupported_linking<T>(what: impl Into<String>) -> Result<T, ElfError> {
    Err(ElfError::UnsupportedLinking(what.into()))
}

const SYMBOL_SIZE: usize = 24;
const SECTION_SIZE: usize = 64;
const SEGMENT_SIZE: usize = 56;
const RELOCATION_SIZE: usize = 24;

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const SHT_DYNSYM: u32 = 11;
const SHT_NOBITS: u32 = 8;
const SHT_STRTAB: u32 = 3;
const SHT_GNU_HASH: u32 = 0x6fff_fff6;
const SHT_GNU_VERSYM: u32 = 0x6fff_ffff;
const SHF_ALLOC: u64 = 2;

const DT_NEEDED: u64 = 1;
const DT_PLTRELSZ: u64 = 2;
const DT_HASH: u64 = 4;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_RELA: u64 = 7;
const DT_RELASZ: u64 = 8;
const DT_RELAENT: u64 = 9;
const DT_STRSZ: u64 = 10;
const DT_SYMENT: u64 = 11;
const DT_INIT: u64 = 12;
const DT_SONAME: u64 = 14;
const DT_RPATH: u64 = 15;
const DT_REL: u64 = 17;
const DT_PLTREL: u64 = 20;
const DT_TEXTREL: u64 = 22;
const DT_JMPREL: u64 = 23;
const DT_INIT_ARRAYSZ: u64 = 27;
const DT_RUNPATH: u64 = 29;
const DT_FLAGS: u64 = 30;
const DT_GNU_HASH: u64 = 0x6fff_fef5;
const DT_VERSYM: u64 = 0x6fff_fff0;
const DT_RELACOUNT: u64 = 0x6fff_fff9;
const DT_VERDEF: u64 = 0x6fff_fffc;
const DT_VERNEED: u64 = 0x6fff_fffe;
const DT_VERNEEDNUM: u64 = 0x6fff_ffff;
const DT_AUXILIARY: u64 = 0x7fff_fffd;
const DT_FILTER: u64 = 0x7fff_ffff;
const DF_TEXTREL: usize = 4;

/// How a shared object is rewritten.
#[derive(Clone, Debug)]
pub struct RewriteSpec<'a> {
    /// The soname that replaces the object's own.
    pub soname: &'a str,
    /// The exported names, each with the symbol that it refers to. A name must be a suffix of its symbol's name.
    pub exports: BTreeMap<&'a str, &'a str>,
    /// A library that the object needs in addition to its own, and before them: a name or a path.
    pub needed: Option<&'a str>,
    /// Settings that are embedded.
    pub patches: &'a [MarkerPatch<'a>],
}

/// Bytes that are written after a marker in the object's data.
#[derive(Clone, Copy, Debug)]
pub struct MarkerPatch<'a> {
    /// The marker, which must occur exactly once in the loaded segments.
    pub marker: &'a [u8],
    /// The bytes that replace those directly after the marker.
    pub bytes: &'a [u8],
}

impl<'a> RewriteSpec<'a> {
    /// Creates a specification with this soname and no exports.
    pub fn with_soname(soname: &'a str) -> RewriteSpec<'a> {
        RewriteSpec { soname, exports: BTreeMap::new(), needed: None, patches: &[] }
    }
}

/// Returns exports that keep the names of their symbols.
pub fn unrenamed<'a>(names: impl IntoIterator<Item = &'a str>) -> BTreeMap<&'a str, &'a str> {
    names.into_iter().map(|name| (name, name)).collect()
}

/// Returns a rewritten copy of a shared object. The result depends only on the arguments.
pub fn rewrite(object: &[u8], form: &RewriteSpec<'_>) -> Result<Vec<u8>, ElfError> {
    let mut object = ElfObject::read(object)?;
    let kept = object.select_symbols(&form.exports)?;
    object.renumber_relocations(&kept)?;
    object.write_symbols(&kept)?;
    object.write_strings(form)?;
    for patch in form.patches {
        object.write_patch(patch)?;
    }
    object.into_stripped()
}

/// A range of bytes in the file.
#[derive(Clone, Copy, Debug)]
struct FileRange {
    offset: usize,
    size: usize,
}

/// A table of fixed-size entries in the file.
#[derive(Clone, Copy, Debug)]
struct EntryTable {
    offset: usize,
    count: usize,
}

/// A shared object whose tables were located and checked to lie inside the file.
struct ElfObject {
    bytes: Vec<u8>,
    dynamic: FileRange,
    strings: FileRange,
    symbols: EntryTable,
    /// The index of the first defined symbol.
    first_defined: usize,
    hash: FileRange,
    buckets: usize,
    filter_words: usize,
    filter_shift: u32,
    /// The offset of `.gnu.version`, if there is one.
    versions: Option<usize>,
    sections: EntryTable,
}

/// A defined symbol that is kept.
struct KeptSymbol {
    /// The old index in the symbol table.
    index: usize,
    /// The offset of its new name in the string table.
    name: u32,
    hash: u32,
}

impl ElfObject {
    fn read(bytes: &[u8]) -> Result<ElfObject, ElfError> {
        let mut object = ElfObject {
            bytes: bytes.to_vec(),
            dynamic: FileRange { offset: 0, size: 0 },
            strings: FileRange { offset: 0, size: 0 },
            symbols: EntryTable { offset: 0, count: 0 },
            first_defined: 0,
            hash: FileRange { offset: 0, size: 0 },
            buckets: 0,
            filter_words: 0,
            filter_shift: 0,
            versions: None,
            sections: EntryTable { offset: 0, count: 0 },
        };
        object.read_header()?;
        object.read_dynamic()?;
        object.read_symbols()?;
        object.read_hash()?;
        Ok(object)
    }

    fn read_header(&mut self) -> Result<(), ElfError> {
        if self.bytes.get(..4) != Some(b"\x7fELF") {
            return malformed("the ELF magic number is missing");
        }
        if self.bytes.get(4..6) != Some(&[2, 1]) || self.u16(16)? != 3 {
            return malformed("the ELF header has another class, byte order or file type");
        }
        if usize::from(self.u16(54)?) != SEGMENT_SIZE || usize::from(self.u16(58)?) != SECTION_SIZE {
            return malformed("the program or section headers have an unsupported size");
        }
        self.sections = EntryTable { offset: self.offset(40)?, count: usize::from(self.u16(60)?) };
        self.check_range(
            FileRange { offset: self.sections.offset, size: self.sections.count * SECTION_SIZE },
            "its sections",
        )?;
        let segments = self.segments()?;
        let Some(dynamic) = segments.iter().find(|segment| segment.kind == PT_DYNAMIC) else {
            return malformed("it has no dynamic section");
        };
        self.dynamic = FileRange { offset: dynamic.offset, size: dynamic.size };
        self.check_range(self.dynamic, "its dynamic section")
    }

    fn read_dynamic(&mut self) -> Result<(), ElfError> {
        for (tag, what) in
            [(DT_HASH, "a SysV hash table"), (DT_REL, "REL relocations"), (DT_VERDEF, "symbol versions")]
        {
            if self.dynamic_entry(tag)?.is_some() {
                return unsupported_linking(format!("it has {what}"));
            }
        }
        for (tag, size) in
            [(DT_SYMENT, SYMBOL_SIZE), (DT_RELAENT, RELOCATION_SIZE), (DT_PLTREL, DT_RELA as usize)]
        {
            if self.dynamic_entry(tag)?.is_some_and(|(_, value)| value != size) {
                return malformed("the entries of a table have an unsupported size");
            }
        }
        let size = self.required_entry(DT_STRSZ, "string table")?;
        self.strings = FileRange {
            offset: self.file_offset(self.required_entry(DT_STRTAB, "string table")?, size)?,
            size,
        };
        self.check_range(self.strings, "its string table")
    }

    fn read_symbols(&mut self) -> Result<(), ElfError> {
        let address = self.required_entry(DT_SYMTAB, "symbol table")?;
        let Some(section) = self.section_at(SHT_DYNSYM, address)? else {
            return unsupported_linking("no section header describes its dynamic symbol table");
        };
        let count = self.offset(section + 32)? / SYMBOL_SIZE;
        self.symbols = EntryTable { offset: self.file_offset(address, count * SYMBOL_SIZE)?, count };
        self.check_range(
            FileRange { offset: self.symbols.offset, size: count * SYMBOL_SIZE },
            "its symbol table",
        )?;
        if let Some((_, address)) = self.dynamic_entry(DT_VERSYM)? {
            let offset = self.file_offset(address, count * 2)?;
            self.check_range(FileRange { offset, size: count * 2 }, "its version table")?;
            self.versions = Some(offset);
        }
        Ok(())
    }

    fn read_hash(&mut self) -> Result<(), ElfError> {
        let address = self.required_entry(DT_GNU_HASH, "GNU hash table")?;
        let Some(section) = self.section_at(SHT_GNU_HASH, address)? else {
            return unsupported_linking("no section header describes its hash table");
        };
        let size = self.offset(section + 32)?;
        self.hash = FileRange { offset: self.file_offset(address, size)?, size };
        self.check_range(self.hash, "its hash table")?;
        let at = self.hash.offset;
        self.buckets = self.u32(at)? as usize;
        self.first_defined = self.u32(at + 4)? as usize;
        self.filter_words = self.u32(at + 8)? as usize;
        self.filter_shift = self.u32(at + 12)?;
        if self.buckets == 0 || !self.filter_words.is_power_of_two() || self.filter_shift > 31 {
            return malformed("its hash table has invalid parameters");
        }
        // In a table without defined symbols this field may have any value.
        self.first_defined = self.first_defined.min(self.symbols.count);
        let hashed = self.symbols.count - self.first_defined;
        if self.hash_size(hashed).is_none_or(|size| size > self.hash.size) {
            return malformed("its hash table is truncated");
        }
        for index in 0..self.symbols.count {
            let section = self.u16(self.symbol(index) + 6)?;
            let local = self.byte(self.symbol(index) + 4)? >> 4 == 0;
            if index < self.first_defined && section != 0 && !local {
                return unsupported_linking("a defined symbol is among the undefined ones");
            }
            if index >= self.first_defined && section == 0 {
                return unsupported_linking("an undefined symbol is among the defined ones");
            }
        }
        Ok(())
    }

    /// Returns the size of a hash table with this number of symbols.
    fn hash_size(&self, hashed: usize) -> Option<usize> {
        let filter = self.filter_words.checked_mul(8)?;
        let rest = self.buckets.checked_add(hashed)?.checked_mul(4)?;
        filter.checked_add(rest)?.checked_add(16)
    }

    /// Returns the defined symbols that are kept, in the order of their buckets.
    fn select_symbols(&self, exports: &BTreeMap<&str, &str>) -> Result<Vec<KeptSymbol>, ElfError> {
        let mut asked: BTreeMap<&str, &str> = BTreeMap::new();
        for (&name, &symbol) in exports {
            if name.is_empty() || !symbol.ends_with(name) {
                return unsupported_linking(format!(
                    "{name} is not a suffix of {symbol}, so it cannot replace its name"
                ));
            }
            if let Some(other) = asked.insert(symbol, name) {
                return unsupported_linking(format!(
                    "{symbol} cannot be exported both as {other} and as {name}"
                ));
            }
        }
        let mut missing: BTreeSet<&str> = asked.keys().copied().collect();
        let mut kept = Vec::new();
        for index in self.first_defined..self.symbols.count {
            let symbol = self.symbol_name(index)?;
            if let Some(name) = asked.get(symbol.as_str()) {
                if !missing.remove(symbol.as_str()) {
                    return unsupported_linking(format!("it exports {symbol} twice"));
                }
                let start = self.u32(self.symbol(index))? + (symbol.len() - name.len()) as u32;
                kept.push(KeptSymbol { index, name: start, hash: gnu_hash(name) });
            }
        }
        if !missing.is_empty() {
            let mut names = missing.iter().take(5).copied().collect::<Vec<_>>().join(", ");
            if missing.len() > 5 {
                names.push_str(", …");
            }
            return Err(ElfError::MissingSymbols { count: missing.len(), names });
        }
        kept.sort_by_key(|kept| kept.hash as usize % self.buckets);
        Ok(kept)
    }

    /// Updates the symbol indexes of relocations.
    fn renumber_relocations(&mut self, kept: &[KeptSymbol]) -> Result<(), ElfError> {
        let mut moved = vec![None; self.symbols.count - self.first_defined];
        for (new, kept) in kept.iter().enumerate() {
            moved[kept.index - self.first_defined] = Some(self.first_defined + new);
        }
        for (table, size) in [(DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)] {
            let Some((_, address)) = self.dynamic_entry(table)? else { continue };
            let size = self.required_entry(size, "size of its relocations")?;
            let offset = self.file_offset(address, size)?;
            self.check_range(FileRange { offset, size }, "its relocations")?;
            for at in (offset..offset + size / RELOCATION_SIZE * RELOCATION_SIZE).step_by(RELOCATION_SIZE) {
                let symbol = self.u32(at + 12)? as usize;
                if symbol >= self.symbols.count {
                    return malformed("a relocation has an invalid symbol index");
                }
                let Some(defined) = symbol.checked_sub(self.first_defined) else { continue };
                let Some(new) = moved[defined] else {
                    let name = self.symbol_name(symbol)?;
                    return unsupported_linking(format!(
                        "it refers to its own {name} through the symbol table: link with -Bsymbolic"
                    ));
                };
                self.set_u32(at + 12, new as u32)?;
            }
        }
        Ok(())
    }

    /// Writes the kept symbols, their versions and their hash table.
    fn write_symbols(&mut self, kept: &[KeptSymbol]) -> Result<(), ElfError> {
        let old = self.bytes.clone();
        let count = self.first_defined + kept.len();
        for (new, kept) in kept.iter().enumerate() {
            let (from, to) = (self.symbol(kept.index), self.symbol(self.first_defined + new));
            self.copy(&old, from, to, SYMBOL_SIZE)?;
            self.set_u32(to, kept.name)?;
            if let Some(versions) = self.versions {
                self.copy(&old, versions + 2 * kept.index, versions + 2 * (self.first_defined + new), 2)?;
            }
        }
        self.clear(self.symbol(count), (self.symbols.count - count) * SYMBOL_SIZE)?;
        if let Some(versions) = self.versions {
            self.clear(versions + 2 * count, 2 * (self.symbols.count - count))?;
        }
        self.write_hash(kept)?;
        let hash = self.hash_size(kept.len()).unwrap_or(self.hash.size);
        for (kind, size) in
            [(SHT_DYNSYM, count * SYMBOL_SIZE), (SHT_GNU_VERSYM, count * 2), (SHT_GNU_HASH, hash)]
        {
            for section in self.sections() {
                if self.u32(section + 4)? == kind {
                    self.set_u64(section + 32, size as u64)?;
                }
            }
        }
        self.symbols.count = count;
        Ok(())
    }

    fn write_hash(&mut self, kept: &[KeptSymbol]) -> Result<(), ElfError> {
        let filter = self.hash.offset + 16;
        let buckets = filter + 8 * self.filter_words;
        let chains = buckets + 4 * self.buckets;
        self.clear(filter, self.hash.size - 16)?;
        let bucket = |kept: &KeptSymbol| kept.hash as usize % self.buckets;
        let kept_in: Vec<usize> = kept.iter().map(bucket).collect();
        for (position, kept) in kept.iter().enumerate() {
            let word = filter + 8 * ((kept.hash as usize / 64) & (self.filter_words - 1));
            let bits = (1 << (kept.hash % 64)) | (1 << ((kept.hash >> self.filter_shift) % 64));
            self.set_u64(word, self.u64(word)? | bits)?;
            let bucket = kept_in[position];
            if position == 0 || kept_in[position - 1] != bucket {
                self.set_u32(buckets + 4 * bucket, (self.first_defined + position) as u32)?;
            }
            // The lowest bit marks the end of a chain.
            let last = kept_in.get(position + 1) != Some(&bucket);
            self.set_u32(chains + 4 * position, kept.hash & !1 | u32::from(last))?;
        }
        Ok(())
    }

    /// Clears the names of dropped symbols, and writes the soname and the needed library in their place.
    fn write_strings(&mut self, form: &RewriteSpec<'_>) -> Result<(), ElfError> {
        let mut used = vec![false; self.strings.size];
        for at in self.strings_in_use()? {
            let length = self.string(self.strings, at)?.len();
            used[at..=at + length].fill(true);
        }
        for (at, _) in used.iter().enumerate().filter(|(_, used)| !**used) {
            self.set_byte(self.strings.offset + at, 0)?;
        }
        if let Some(needed) = form.needed {
            let place = self.write_string(&mut used, needed)?;
            self.write_needed(place)?;
        }
        let place = self.write_string(&mut used, form.soname)?;
        match self.dynamic_entry(DT_SONAME)? {
            Some((entry, _)) => self.set_u64(entry + 8, place as u64),
            None => unsupported_linking("it has no soname"),
        }
    }

    /// Writes a string into unused bytes and returns its offset.
    fn write_string(&mut self, used: &mut [bool], text: &str) -> Result<usize, ElfError> {
        if text.is_empty() || text.contains('\0') {
            return unsupported_linking(format!("{text:?} is not a valid library name"));
        }
        let length = text.len() + 1;
        // The terminating zero of a kept string is marked as used, so it is not overwritten.
        let Some(place) = used.windows(length).position(|window| !window.contains(&true)) else {
            return unsupported_linking(format!("no {length} bytes are free in its string table for {text}"));
        };
        used[place..place + length].fill(true);
        self.put(self.strings.offset + place, text.as_bytes())?;
        Ok(place)
    }

    /// Inserts a needed library as the first entry. The entries before the unused or replaced one are moved.
    fn write_needed(&mut self, name: usize) -> Result<(), ElfError> {
        let entries = self.dynamic_entries()?;
        let (start, end) = (self.dynamic.offset, self.dynamic.offset + entries.len() * 16);
        let room = match entries.iter().find(|(tag, _, _)| *tag == DT_RELACOUNT) {
            // There is a spare entry if the terminating null entry is followed by another one.
            _ if end + 32 <= start + self.dynamic.size / 16 * 16 && self.u64(end + 16)? == 0 => end,
            Some((_, at, _)) => *at,
            None => {
                return unsupported_linking("its dynamic section has no free entry for a needed library");
            }
        };
        let before = self.part(FileRange { offset: start, size: room - start })?.to_vec();
        self.put(start + 16, &before)?;
        self.set_u64(start, DT_NEEDED)?;
        self.set_u64(start + 8, name as u64)
    }

    /// Writes bytes after a marker.
    fn write_patch(&mut self, patch: &MarkerPatch<'_>) -> Result<(), ElfError> {
        let mut places = Vec::new();
        for segment in self.segments()?.iter().filter(|segment| segment.kind == PT_LOAD) {
            let loaded = FileRange { offset: segment.offset, size: segment.size };
            let (at, size) = (segment.offset, patch.marker.len().max(1));
            let found =
                self.part(loaded)?.windows(size).enumerate().filter(|(_, seen)| *seen == patch.marker);
            // Two segments may share a page of the file, so the same place may be found twice.
            places.extend(found.map(|(start, _)| (at + start + size, at + segment.size)));
        }
        places.dedup();
        match places[..] {
            [(place, end)] if place + patch.bytes.len() <= end => self.put(place, patch.bytes),
            [_] => malformed("the place for its settings exceeds the loaded segment"),
            [] => unsupported_linking("it has no place for settings"),
            _ => unsupported_linking(format!("it has {} places for settings", places.len())),
        }
    }

    /// Returns the offsets of all strings that are still referenced.
    fn strings_in_use(&self) -> Result<Vec<usize>, ElfError> {
        let mut used = vec![0];
        for index in 0..self.symbols.count {
            used.push(self.u32(self.symbol(index))? as usize);
        }
        for (tag, _, value) in self.dynamic_entries()? {
            if [DT_NEEDED, DT_RPATH, DT_RUNPATH, DT_AUXILIARY, DT_FILTER].contains(&tag) {
                used.push(value);
            }
        }
        for (file, versions) in self.versions_needed()? {
            used.push(file);
            used.extend(versions);
        }
        Ok(used)
    }
}

/// A program header: the offset and size in the file, and the address in memory.
struct Segment {
    kind: u32,
    offset: usize,
    address: usize,
    size: usize,
}

/// Computes the hash function of `.gnu.hash`.
fn gnu_hash(name: &str) -> u32 {
    name.bytes().fold(5381, |hash: u32, byte| hash.wrapping_mul(33).wrapping_add(u32::from(byte)))
}
