//! Reads properties of a shared object.

use super::{
    DF_TEXTREL, DT_FLAGS, DT_INIT, DT_INIT_ARRAYSZ, DT_NEEDED, DT_SONAME, DT_TEXTREL, ElfError, ElfObject,
};

/// Returns the names that a shared object exports, sorted.
pub fn exports(object: &[u8]) -> Result<Vec<String>, ElfError> {
    let object = ElfObject::read(object)?;
    let names = (object.first_defined..object.symbols.count).map(|index| object.symbol_name(index));
    let mut names = names.collect::<Result<Vec<_>, _>>()?;
    names.sort();
    Ok(names)
}

/// Returns the soname of a shared object, if it has one.
pub fn soname(object: &[u8]) -> Result<Option<String>, ElfError> {
    let object = ElfObject::read(object)?;
    object.dynamic_entry(DT_SONAME)?.map(|(_, at)| object.string(object.strings, at)).transpose()
}

/// Returns the libraries that a shared object needs, in search order.
pub fn needed_libraries(object: &[u8]) -> Result<Vec<String>, ElfError> {
    let object = ElfObject::read(object)?;
    let entries = object.dynamic_entries()?.into_iter().filter(|(tag, _, _)| *tag == DT_NEEDED);
    entries.map(|(_, _, at)| object.string(object.strings, at)).collect()
}

/// Returns the symbol versions that a shared object needs: pairs of library and version.
pub fn needed_versions(object: &[u8]) -> Result<Vec<(String, String)>, ElfError> {
    let object = ElfObject::read(object)?;
    let text = |at| object.string(object.strings, at);
    let mut all = Vec::new();
    for (file, versions) in object.versions_needed()? {
        for version in versions {
            all.push((text(file)?, text(version)?));
        }
    }
    Ok(all)
}

/// Returns the number of functions that run when a shared object is loaded.
pub fn initializer_count(object: &[u8]) -> Result<usize, ElfError> {
    let object = ElfObject::read(object)?;
    let listed = object.dynamic_entry(DT_INIT_ARRAYSZ)?.map_or(0, |(_, size)| size / 8);
    Ok(listed + usize::from(object.dynamic_entry(DT_INIT)?.is_some()))
}

/// Returns whether the loader has to modify the code of a shared object, which some systems forbid.
pub fn has_text_relocations(object: &[u8]) -> Result<bool, ElfError> {
    let object = ElfObject::read(object)?;
    let flagged = object.dynamic_entry(DT_FLAGS)?.is_some_and(|(_, flags)| flags & DF_TEXTREL != 0);
    Ok(flagged || object.dynamic_entry(DT_TEXTREL)?.is_some())
}
