//! Gives a shared object other names, another soname, another library that it needs, and settings.
//!
//! Everything stays where it is in memory: tables only get shorter, so that no address in code or data changes.
//!
//! - Undefined symbols stand first in `.dynsym` and stay there, because relocations name them by their index. The
//!   defined ones follow in the order of their hash buckets; those that go leave no gap, and a relocation that names
//!   one that stays is told its new index. (Linked with `-Bsymbolic` there is none.)
//! - A new name is the end of the old one: the symbol's name starts further on in `.dynstr`.
//! - `.gnu.version` follows `.dynsym`; `.gnu.hash` is built anew with the same number of buckets and filter words.
//! - In `.dynstr`, bytes that no kept string covers are cleared, and the soname and the needed library are put there: a
//!   linker may store a name as the end of a longer one, so it is bytes that are kept, not strings. A library that is to
//!   need a long path exports something with a long name that goes.
//! - The needed library takes a spare entry of the dynamic section, or the place of `DT_RELACOUNT`, which only tells the
//!   loader how many relocations it may do without looking. It stands first, so that it is searched next.
//! - What is not loaded (symbol table, debug information) is cut off. A node's folder may lie in memory.

mod bytes;
mod facts;
mod find;
mod trim;

pub use facts::{exports, has_text_relocations, initialisers, needed, soname, versions};

use std::collections::{BTreeMap, BTreeSet};

/// Why a file cannot be rewritten.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ElfError {
    /// It is something else, or broken.
    #[error("it is no 64-bit little-endian shared object: {0}")]
    NoSharedObject(String),
    /// It is one, but linked in a way that this does not handle.
    #[error("it was linked in a way that cannot be rewritten: {0}")]
    Linked(String),
    /// It lacks names that are wanted.
    #[error("it lacks {count} of the names wanted: {names}")]
    Missing {
        /// How many.
        count: usize,
        /// The first of them.
        names: String,
    },
}

fn broken<T>(what: impl Into<String>) -> Result<T, ElfError> {
    Err(ElfError::NoSharedObject(what.into()))
}

fn linked<T>(what: impl Into<String>) -> Result<T, ElfError> {
    Err(ElfError::Linked(what.into()))
}

const SYMBOL: usize = 24;
const SECTION: usize = 64;
const SEGMENT: usize = 56;
const RELOCATION: usize = 24;

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

/// What a shared object becomes.
#[derive(Clone, Debug)]
pub struct Form<'a> {
    /// What it is called.
    pub soname: &'a str,
    /// The names it exports, each with the symbol of the object that it means; the name is the end of the symbol's.
    pub exports: BTreeMap<&'a str, &'a str>,
    /// A library that it needs besides those it needs anyway, and before them: a name, or a path.
    pub needed: Option<&'a str>,
    /// What is written into it.
    pub patches: &'a [Patch<'a>],
}

/// Bytes for a place that the object was made with.
#[derive(Clone, Copy, Debug)]
pub struct Patch<'a> {
    /// Stands before the place, and nowhere else in what is loaded.
    pub marker: &'a [u8],
    /// What is written right behind the marker.
    pub bytes: &'a [u8],
}

impl<'a> Form<'a> {
    /// Has a name and nothing else.
    pub fn called(soname: &'a str) -> Form<'a> {
        Form { soname, exports: BTreeMap::new(), needed: None, patches: &[] }
    }
}

/// Exports under the names that the object has for them.
pub fn as_they_are<'a>(names: impl IntoIterator<Item = &'a str>) -> BTreeMap<&'a str, &'a str> {
    names.into_iter().map(|name| (name, name)).collect()
}

/// A copy of `object` in this form.
pub fn rewrite(object: &[u8], form: &Form<'_>) -> Result<Vec<u8>, ElfError> {
    let mut object = Object::read(object)?;
    let kept = object.choose(&form.exports)?;
    object.move_relocations(&kept)?;
    object.write_symbols(&kept)?;
    object.write_strings(form)?;
    for patch in form.patches {
        object.write_patch(patch)?;
    }
    object.without_what_is_not_loaded()
}

/// A part of the file.
#[derive(Clone, Copy, Debug)]
struct Part {
    offset: usize,
    size: usize,
}

/// The dynamic symbols, and how many there are.
#[derive(Clone, Copy, Debug)]
struct Table {
    offset: usize,
    count: usize,
}

/// A shared object whose tables were found and lie inside it.
struct Object {
    bytes: Vec<u8>,
    dynamic: Part,
    strings: Part,
    symbols: Table,
    /// The index of the first symbol that is defined here.
    first_defined: usize,
    hash: Part,
    buckets: usize,
    filter_words: usize,
    filter_shift: u32,
    /// `.gnu.version`, where there is one.
    versions: Option<usize>,
    sections: Table,
}

/// A defined symbol that stays.
struct Kept {
    /// Where it stood.
    index: usize,
    /// Where its name starts.
    name: u32,
    hash: u32,
}

impl Object {
    fn read(bytes: &[u8]) -> Result<Object, ElfError> {
        let mut object = Object {
            bytes: bytes.to_vec(),
            dynamic: Part { offset: 0, size: 0 },
            strings: Part { offset: 0, size: 0 },
            symbols: Table { offset: 0, count: 0 },
            first_defined: 0,
            hash: Part { offset: 0, size: 0 },
            buckets: 0,
            filter_words: 0,
            filter_shift: 0,
            versions: None,
            sections: Table { offset: 0, count: 0 },
        };
        object.read_header()?;
        object.read_dynamic()?;
        object.read_symbols()?;
        object.read_hash()?;
        Ok(object)
    }

    fn read_header(&mut self) -> Result<(), ElfError> {
        if self.bytes.get(..4) != Some(b"\x7fELF") {
            return broken("it does not start with the letters of an ELF file");
        }
        if self.bytes.get(4..6) != Some(&[2, 1]) || self.u16(16)? != 3 {
            return broken("its header says otherwise");
        }
        if usize::from(self.u16(54)?) != SEGMENT || usize::from(self.u16(58)?) != SECTION {
            return broken("its headers have another size");
        }
        self.sections = Table { offset: self.offset(40)?, count: usize::from(self.u16(60)?) };
        self.inside(
            Part { offset: self.sections.offset, size: self.sections.count * SECTION },
            "its sections",
        )?;
        let segments = self.segments()?;
        let Some(dynamic) = segments.iter().find(|segment| segment.kind == PT_DYNAMIC) else {
            return broken("it has no dynamic section");
        };
        self.dynamic = Part { offset: dynamic.offset, size: dynamic.size };
        self.inside(self.dynamic, "its dynamic section")
    }

    fn read_dynamic(&mut self) -> Result<(), ElfError> {
        for (tag, what) in
            [(DT_HASH, "a SysV hash table"), (DT_REL, "short relocations"), (DT_VERDEF, "symbol versions")]
        {
            if self.dynamic(tag)?.is_some() {
                return linked(format!("it has {what}"));
            }
        }
        for (tag, size) in [(DT_SYMENT, SYMBOL), (DT_RELAENT, RELOCATION), (DT_PLTREL, DT_RELA as usize)] {
            if self.dynamic(tag)?.is_some_and(|(_, value)| value != size) {
                return broken("its tables have another size");
            }
        }
        let size = self.needed(DT_STRSZ, "string table")?;
        self.strings = Part { offset: self.mapped(self.needed(DT_STRTAB, "string table")?, size)?, size };
        self.inside(self.strings, "its string table")
    }

    fn read_symbols(&mut self) -> Result<(), ElfError> {
        let address = self.needed(DT_SYMTAB, "symbol table")?;
        let Some(section) = self.section_at(SHT_DYNSYM, address)? else {
            return linked("no section says where its dynamic symbols end");
        };
        let count = self.offset(section + 32)? / SYMBOL;
        self.symbols = Table { offset: self.mapped(address, count * SYMBOL)?, count };
        self.inside(Part { offset: self.symbols.offset, size: count * SYMBOL }, "its symbol table")?;
        if let Some((_, address)) = self.dynamic(DT_VERSYM)? {
            let offset = self.mapped(address, count * 2)?;
            self.inside(Part { offset, size: count * 2 }, "its version table")?;
            self.versions = Some(offset);
        }
        Ok(())
    }

    fn read_hash(&mut self) -> Result<(), ElfError> {
        let address = self.needed(DT_GNU_HASH, "GNU hash table")?;
        let Some(section) = self.section_at(SHT_GNU_HASH, address)? else {
            return linked("no section says where its hash table ends");
        };
        let size = self.offset(section + 32)?;
        self.hash = Part { offset: self.mapped(address, size)?, size };
        self.inside(self.hash, "its hash table")?;
        let at = self.hash.offset;
        self.buckets = self.u32(at)? as usize;
        self.first_defined = self.u32(at + 4)? as usize;
        self.filter_words = self.u32(at + 8)? as usize;
        self.filter_shift = self.u32(at + 12)?;
        if self.buckets == 0 || !self.filter_words.is_power_of_two() || self.filter_shift > 31 {
            return broken("its hash table has no shape");
        }
        // A table without defined symbols may say anything here.
        self.first_defined = self.first_defined.min(self.symbols.count);
        let hashed = self.symbols.count - self.first_defined;
        if self.hash_size(hashed).is_none_or(|size| size > self.hash.size) {
            return broken("its hash table is shorter than it says");
        }
        for index in 0..self.symbols.count {
            let section = self.u16(self.symbol(index) + 6)?;
            let local = self.byte(self.symbol(index) + 4)? >> 4 == 0;
            if index < self.first_defined && section != 0 && !local {
                return linked("a defined symbol stands among the undefined ones");
            }
            if index >= self.first_defined && section == 0 {
                return linked("an undefined symbol stands among the defined ones");
            }
        }
        Ok(())
    }

    /// The bytes of a hash table for so many symbols.
    fn hash_size(&self, hashed: usize) -> Option<usize> {
        let filter = self.filter_words.checked_mul(8)?;
        let rest = self.buckets.checked_add(hashed)?.checked_mul(4)?;
        filter.checked_add(rest)?.checked_add(16)
    }

    /// The defined symbols that stay, in the order of their buckets.
    fn choose(&self, exports: &BTreeMap<&str, &str>) -> Result<Vec<Kept>, ElfError> {
        let mut asked: BTreeMap<&str, &str> = BTreeMap::new();
        for (&name, &symbol) in exports {
            if name.is_empty() || !symbol.ends_with(name) {
                return linked(format!("{name} is not the end of {symbol}, and so cannot be its name"));
            }
            if let Some(other) = asked.insert(symbol, name) {
                return linked(format!("{symbol} cannot be both {other} and {name}"));
            }
        }
        let mut missing: BTreeSet<&str> = asked.keys().copied().collect();
        let mut kept = Vec::new();
        for index in self.first_defined..self.symbols.count {
            let symbol = self.symbol_name(index)?;
            if let Some(name) = asked.get(symbol.as_str()) {
                if !missing.remove(symbol.as_str()) {
                    return linked(format!("it exports {symbol} twice"));
                }
                let start = self.u32(self.symbol(index))? + (symbol.len() - name.len()) as u32;
                kept.push(Kept { index, name: start, hash: gnu_hash(name) });
            }
        }
        if !missing.is_empty() {
            let mut names = missing.iter().take(5).copied().collect::<Vec<_>>().join(", ");
            if missing.len() > 5 {
                names.push_str(", …");
            }
            return Err(ElfError::Missing { count: missing.len(), names });
        }
        kept.sort_by_key(|kept| kept.hash as usize % self.buckets);
        Ok(kept)
    }

    /// Relocations name symbols by their index.
    fn move_relocations(&mut self, kept: &[Kept]) -> Result<(), ElfError> {
        let mut moved = vec![None; self.symbols.count - self.first_defined];
        for (new, kept) in kept.iter().enumerate() {
            moved[kept.index - self.first_defined] = Some(self.first_defined + new);
        }
        for (table, size) in [(DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)] {
            let Some((_, address)) = self.dynamic(table)? else { continue };
            let size = self.needed(size, "size of its relocations")?;
            let offset = self.mapped(address, size)?;
            self.inside(Part { offset, size }, "its relocations")?;
            for at in (offset..offset + size / RELOCATION * RELOCATION).step_by(RELOCATION) {
                let symbol = self.u32(at + 12)? as usize;
                if symbol >= self.symbols.count {
                    return broken("a relocation names a symbol that is not there");
                }
                let Some(defined) = symbol.checked_sub(self.first_defined) else { continue };
                let Some(new) = moved[defined] else {
                    let name = self.symbol_name(symbol)?;
                    return linked(format!(
                        "it needs its own {name} through the symbol table: link with -Bsymbolic"
                    ));
                };
                self.set_u32(at + 12, new as u32)?;
            }
        }
        Ok(())
    }

    /// Writes the symbols that stay, their versions and their hash table.
    fn write_symbols(&mut self, kept: &[Kept]) -> Result<(), ElfError> {
        let old = self.bytes.clone();
        let count = self.first_defined + kept.len();
        for (new, kept) in kept.iter().enumerate() {
            let (from, to) = (self.symbol(kept.index), self.symbol(self.first_defined + new));
            self.copy(&old, from, to, SYMBOL)?;
            self.set_u32(to, kept.name)?;
            if let Some(versions) = self.versions {
                self.copy(&old, versions + 2 * kept.index, versions + 2 * (self.first_defined + new), 2)?;
            }
        }
        self.clear(self.symbol(count), (self.symbols.count - count) * SYMBOL)?;
        if let Some(versions) = self.versions {
            self.clear(versions + 2 * count, 2 * (self.symbols.count - count))?;
        }
        self.write_hash(kept)?;
        let hash = self.hash_size(kept.len()).unwrap_or(self.hash.size);
        for (kind, size) in [(SHT_DYNSYM, count * SYMBOL), (SHT_GNU_VERSYM, count * 2), (SHT_GNU_HASH, hash)]
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

    fn write_hash(&mut self, kept: &[Kept]) -> Result<(), ElfError> {
        let filter = self.hash.offset + 16;
        let buckets = filter + 8 * self.filter_words;
        let chains = buckets + 4 * self.buckets;
        self.clear(filter, self.hash.size - 16)?;
        let bucket = |kept: &Kept| kept.hash as usize % self.buckets;
        let kept_in: Vec<usize> = kept.iter().map(bucket).collect();
        for (position, kept) in kept.iter().enumerate() {
            let word = filter + 8 * ((kept.hash as usize / 64) & (self.filter_words - 1));
            let bits = (1 << (kept.hash % 64)) | (1 << ((kept.hash >> self.filter_shift) % 64));
            self.set_u64(word, self.u64(word)? | bits)?;
            let bucket = kept_in[position];
            if position == 0 || kept_in[position - 1] != bucket {
                self.set_u32(buckets + 4 * bucket, (self.first_defined + position) as u32)?;
            }
            // The lowest bit ends a chain.
            let last = kept_in.get(position + 1) != Some(&bucket);
            self.set_u32(chains + 4 * position, kept.hash & !1 | u32::from(last))?;
        }
        Ok(())
    }

    /// Clears the names that went, and writes the soname and the needed library into their place.
    fn write_strings(&mut self, form: &Form<'_>) -> Result<(), ElfError> {
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
        match self.dynamic(DT_SONAME)? {
            Some((entry, _)) => self.set_u64(entry + 8, place as u64),
            None => linked("it has no soname that could be changed"),
        }
    }

    /// Writes a string where none is; says where.
    fn write_string(&mut self, used: &mut [bool], text: &str) -> Result<usize, ElfError> {
        if text.is_empty() || text.contains('\0') {
            return linked(format!("{text:?} is no name"));
        }
        let length = text.len() + 1;
        // Right behind a kept string or at the end of nothing: both leave its own zero untouched.
        let Some(place) = used.windows(length).position(|window| !window.contains(&true)) else {
            return linked(format!("no {length} bytes of its strings are free for {text}"));
        };
        used[place..place + length].fill(true);
        self.put(self.strings.offset + place, text.as_bytes())?;
        Ok(place)
    }

    /// Needs one library more, first: the entries before the one that makes room for it move on.
    fn write_needed(&mut self, name: usize) -> Result<(), ElfError> {
        let entries = self.dynamic_entries()?;
        let (start, end) = (self.dynamic.offset, self.dynamic.offset + entries.len() * 16);
        let room = match entries.iter().find(|(tag, _, _)| *tag == DT_RELACOUNT) {
            // What ends the entries may be there twice.
            _ if end + 32 <= start + self.dynamic.size / 16 * 16 && self.u64(end + 16)? == 0 => end,
            Some((_, at, _)) => *at,
            None => return linked("its dynamic section has no room for a library that it needs"),
        };
        let before = self.part(Part { offset: start, size: room - start })?.to_vec();
        self.put(start + 16, &before)?;
        self.set_u64(start, DT_NEEDED)?;
        self.set_u64(start + 8, name as u64)
    }

    /// Writes bytes behind a marker.
    fn write_patch(&mut self, patch: &Patch<'_>) -> Result<(), ElfError> {
        let mut places = Vec::new();
        for segment in self.segments()?.iter().filter(|segment| segment.kind == PT_LOAD) {
            let loaded = Part { offset: segment.offset, size: segment.size };
            let (at, size) = (segment.offset, patch.marker.len().max(1));
            let found =
                self.part(loaded)?.windows(size).enumerate().filter(|(_, seen)| *seen == patch.marker);
            // Two segments may share a page of the file, not what is in it.
            places.extend(found.map(|(start, _)| (at + start + size, at + segment.size)));
        }
        places.dedup();
        match places[..] {
            [(place, end)] if place + patch.bytes.len() <= end => self.put(place, patch.bytes),
            [_] => broken("the place for its settings ends behind what is loaded"),
            [] => linked("it has no place for settings"),
            _ => linked(format!("it has {} places for settings", places.len())),
        }
    }

    /// Where the strings start that something still names.
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

/// A segment: where it is in the file and in memory, and how much of it is in the file.
struct Segment {
    kind: u32,
    offset: usize,
    address: usize,
    size: usize,
}

/// The hash that `.gnu.hash` is ordered by.
fn gnu_hash(name: &str) -> u32 {
    name.bytes().fold(5381, |hash: u32, byte| hash.wrapping_mul(33).wrapping_add(u32::from(byte)))
}
