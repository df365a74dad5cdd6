//! What can be said of a shared object.

use super::{
    DF_TEXTREL, DT_FLAGS, DT_INIT, DT_INIT_ARRAYSZ, DT_NEEDED, DT_SONAME, DT_TEXTREL, ElfError, Object,
};

/// The names that a shared object exports, sorted.
pub fn exports(object: &[u8]) -> Result<Vec<String>, ElfError> {
    let object = Object::read(object)?;
    let names = (object.first_defined..object.symbols.count).map(|index| object.symbol_name(index));
    let mut names = names.collect::<Result<Vec<_>, _>>()?;
    names.sort();
    Ok(names)
}

/// The soname of a shared object, where it has one.
pub fn soname(object: &[u8]) -> Result<Option<String>, ElfError> {
    let object = Object::read(object)?;
    object.dynamic(DT_SONAME)?.map(|(_, at)| object.string(object.strings, at)).transpose()
}

/// The libraries that a shared object needs, in their order.
pub fn needed(object: &[u8]) -> Result<Vec<String>, ElfError> {
    let object = Object::read(object)?;
    let entries = object.dynamic_entries()?.into_iter().filter(|(tag, _, _)| *tag == DT_NEEDED);
    entries.map(|(_, _, at)| object.string(object.strings, at)).collect()
}

/// The versions that it needs of symbols of others, each with the file that has it.
pub fn versions(object: &[u8]) -> Result<Vec<(String, String)>, ElfError> {
    let object = Object::read(object)?;
    let text = |at| object.string(object.strings, at);
    let mut all = Vec::new();
    for (file, versions) in object.versions_needed()? {
        for version in versions {
            all.push((text(file)?, text(version)?));
        }
    }
    Ok(all)
}

/// How many functions of it run when it is loaded.
pub fn initialisers(object: &[u8]) -> Result<usize, ElfError> {
    let object = Object::read(object)?;
    let listed = object.dynamic(DT_INIT_ARRAYSZ)?.map_or(0, |(_, size)| size / 8);
    Ok(listed + usize::from(object.dynamic(DT_INIT)?.is_some()))
}

/// Whether the loader has to change its code, which some systems forbid.
pub fn has_text_relocations(object: &[u8]) -> Result<bool, ElfError> {
    let object = Object::read(object)?;
    let flagged = object.dynamic(DT_FLAGS)?.is_some_and(|(_, flags)| flags & DF_TEXTREL != 0);
    Ok(flagged || object.dynamic(DT_TEXTREL)?.is_some())
}
