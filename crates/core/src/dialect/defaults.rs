//! The meaning of absent amounts in each dialect: one table for the parsers and the documentation.

use super::Dialect;
use crate::model::{CoresAsk, MemoryAsk};
use std::fmt;

/// The meaning of absent amounts in one dialect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DialectDefaults {
    /// The dialect of this row.
    pub dialect: Dialect,
    /// Number of GPUs if only amounts are set.
    pub count: DefaultCount,
    /// Memory if none is set.
    pub memory: DefaultMemory,
    /// Compute if none is set.
    pub cores: DefaultCores,
}

/// The meaning of an absent number of GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DefaultCount {
    /// The default is one GPU.
    One,
    /// The dialect has no count; the cores determine it.
    FromCores,
}

/// The meaning of absent memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DefaultMemory {
    /// All memory of the GPU, accounted for.
    All,
    /// No limit and no accounting.
    Unlimited,
    /// All memory of a whole GPU; a share requires an amount.
    AllOfWhole,
    /// No GPU is requested.
    NoRequest,
}

/// The meaning of absent compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DefaultCores {
    /// No guarantee and no limit.
    Uncounted,
    /// No GPU is requested.
    NoRequest,
}

/// The table, in the order of [`Dialect::ALL`].
pub const DIALECT_DEFAULTS: [DialectDefaults; 6] = [
    DialectDefaults {
        dialect: Dialect::Native,
        count: DefaultCount::One,
        memory: DefaultMemory::All,
        cores: DefaultCores::Uncounted,
    },
    DialectDefaults {
        dialect: Dialect::Gpushare,
        count: DefaultCount::One,
        memory: DefaultMemory::NoRequest,
        cores: DefaultCores::Uncounted,
    },
    DialectDefaults {
        dialect: Dialect::Volcano,
        count: DefaultCount::One,
        memory: DefaultMemory::All,
        cores: DefaultCores::Uncounted,
    },
    DialectDefaults {
        dialect: Dialect::Vcuda,
        count: DefaultCount::FromCores,
        memory: DefaultMemory::AllOfWhole,
        cores: DefaultCores::NoRequest,
    },
    DialectDefaults {
        dialect: Dialect::Aws,
        count: DefaultCount::One,
        memory: DefaultMemory::Unlimited,
        cores: DefaultCores::NoRequest,
    },
    DialectDefaults {
        dialect: Dialect::Hami,
        count: DefaultCount::One,
        memory: DefaultMemory::All,
        cores: DefaultCores::Uncounted,
    },
];

impl DialectDefaults {
    /// Returns the row of a dialect.
    pub fn of(dialect: Dialect) -> DialectDefaults {
        DIALECT_DEFAULTS[dialect as usize]
    }

    /// Returns the default number of GPUs; `None` if the dialect has no count.
    pub fn count(self) -> Option<u32> {
        match self.count {
            DefaultCount::One => Some(1),
            DefaultCount::FromCores => None,
        }
    }

    /// Returns the default memory of a whole GPU or a share; `None` if no GPU is requested without memory.
    pub fn memory(self, whole: bool) -> Option<MemoryAsk> {
        match self.memory {
            DefaultMemory::All => Some(MemoryAsk::All),
            DefaultMemory::Unlimited => Some(MemoryAsk::Unlimited),
            DefaultMemory::AllOfWhole => whole.then_some(MemoryAsk::All),
            DefaultMemory::NoRequest => None,
        }
    }

    /// Returns the default compute; `None` if no GPU is requested without compute.
    pub fn cores(self) -> Option<CoresAsk> {
        match self.cores {
            DefaultCores::Uncounted => Some(CoresAsk::Uncounted),
            DefaultCores::NoRequest => None,
        }
    }
}

/// Returns the table as Markdown, as in `docs/dialects.md`.
pub fn markdown() -> String {
    let mut text = String::from("| dialect | no count | no memory | no cores |\n|---|---|---|---|\n");
    for DialectDefaults { dialect, count, memory, cores } in DIALECT_DEFAULTS {
        text += &format!("| {dialect} | {count} | {memory} | {cores} |\n");
    }
    text
}

impl fmt::Display for DefaultCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DefaultCount::One => "1 GPU",
            DefaultCount::FromCores => "from the cores: 100 is one GPU",
        })
    }
}

impl fmt::Display for DefaultMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DefaultMemory::All => "all memory of the GPU",
            DefaultMemory::Unlimited => "no limit; never on a GPU with memory-limited shares",
            DefaultMemory::AllOfWhole => {
                "whole GPUs: all memory of the GPU; a share: refused, an amount is required"
            }
            DefaultMemory::NoRequest => "no GPU is requested",
        })
    }
}

impl fmt::Display for DefaultCores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DefaultCores::Uncounted => "no guarantee and no limit",
            DefaultCores::NoRequest => "no GPU is requested",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dialect_has_a_row() {
        for dialect in Dialect::ALL {
            assert_eq!(DialectDefaults::of(dialect).dialect, dialect);
        }
    }

    #[test]
    fn docs_contain_this_table() {
        let docs = include_str!("../../../../docs/dialects.md");
        assert!(docs.contains(&markdown()), "docs/dialects.md must contain:\n{}", markdown());
    }
}
