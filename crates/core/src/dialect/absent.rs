//! What an amount that is not written means, per dialect: the one table, for the readers and for the docs.

use super::Dialect;
use crate::model::{CoresAsk, MemoryAsk};
use std::fmt;

/// What a dialect means by leaving something out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Absent {
    /// The dialect.
    pub dialect: Dialect,
    /// No count of GPUs beside an amount.
    pub count: AbsentCount,
    /// No memory.
    pub memory: AbsentMemory,
    /// No cores.
    pub cores: AbsentCores,
}

/// No count of GPUs beside an amount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AbsentCount {
    /// One GPU.
    One,
    /// There is no count to write: the cores say it.
    SaidByCores,
}

/// No memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AbsentMemory {
    /// All the GPU has, counted so.
    All,
    /// No limit, none counted.
    Unlimited,
    /// All of a whole GPU; a part of one must say its memory.
    AllOfWhole,
    /// Nothing is asked.
    NotAsked,
}

/// No cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AbsentCores {
    /// Nothing counted, no cap.
    Uncounted,
    /// Nothing is asked.
    NotAsked,
}

/// The table.
pub const ABSENT: [Absent; 6] = [
    Absent {
        dialect: Dialect::Native,
        count: AbsentCount::One,
        memory: AbsentMemory::All,
        cores: AbsentCores::Uncounted,
    },
    Absent {
        dialect: Dialect::Gpushare,
        count: AbsentCount::One,
        memory: AbsentMemory::NotAsked,
        cores: AbsentCores::Uncounted,
    },
    Absent {
        dialect: Dialect::Volcano,
        count: AbsentCount::One,
        memory: AbsentMemory::All,
        cores: AbsentCores::Uncounted,
    },
    Absent {
        dialect: Dialect::Vcuda,
        count: AbsentCount::SaidByCores,
        memory: AbsentMemory::AllOfWhole,
        cores: AbsentCores::NotAsked,
    },
    Absent {
        dialect: Dialect::Aws,
        count: AbsentCount::One,
        memory: AbsentMemory::Unlimited,
        cores: AbsentCores::NotAsked,
    },
    Absent {
        dialect: Dialect::Hami,
        count: AbsentCount::One,
        memory: AbsentMemory::All,
        cores: AbsentCores::Uncounted,
    },
];

impl Absent {
    /// The row of a dialect.
    pub fn of(dialect: Dialect) -> Absent {
        ABSENT[dialect as usize]
    }

    /// How many GPUs are meant by writing no count; `None` where there is no count to write.
    pub fn count(self) -> Option<u32> {
        match self.count {
            AbsentCount::One => Some(1),
            AbsentCount::SaidByCores => None,
        }
    }

    /// The memory meant by writing none, on a whole GPU or a part of one; `None` where that is no ask.
    pub fn memory(self, whole: bool) -> Option<MemoryAsk> {
        match self.memory {
            AbsentMemory::All => Some(MemoryAsk::All),
            AbsentMemory::Unlimited => Some(MemoryAsk::Unlimited),
            AbsentMemory::AllOfWhole => whole.then_some(MemoryAsk::All),
            AbsentMemory::NotAsked => None,
        }
    }

    /// The cores meant by writing none; `None` where that is no ask.
    pub fn cores(self) -> Option<CoresAsk> {
        match self.cores {
            AbsentCores::Uncounted => Some(CoresAsk::Uncounted),
            AbsentCores::NotAsked => None,
        }
    }
}

/// The table as Markdown, as it stands in `docs/dialects.md`.
pub fn markdown() -> String {
    let mut text = String::from("| dialect | no count | no memory | no cores |\n|---|---|---|---|\n");
    for Absent { dialect, count, memory, cores } in ABSENT {
        text += &format!("| {dialect} | {count} | {memory} | {cores} |\n");
    }
    text
}

impl fmt::Display for AbsentCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AbsentCount::One => "1 GPU",
            AbsentCount::SaidByCores => "the cores say it: 100 is one GPU",
        })
    }
}

impl fmt::Display for AbsentMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AbsentMemory::All => "the whole GPU's memory, counted so",
            AbsentMemory::Unlimited => "no limit, none counted, never on one GPU with memory-limited shares",
            AbsentMemory::AllOfWhole => {
                "whole GPUs: the whole GPU's memory; a part of one: refused, say how much"
            }
            AbsentMemory::NotAsked => "no GPU is asked",
        })
    }
}

impl fmt::Display for AbsentCores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AbsentCores::Uncounted => "nothing counted, no cap",
            AbsentCores::NotAsked => "no GPU is asked",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dialect_has_its_own_row() {
        for dialect in Dialect::ALL {
            assert_eq!(Absent::of(dialect).dialect, dialect);
        }
    }

    #[test]
    fn the_docs_show_this_table() {
        let docs = include_str!("../../../../docs/dialects.md");
        assert!(docs.contains(&markdown()), "docs/dialects.md must contain:\n{}", markdown());
    }
}
