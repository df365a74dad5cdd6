//! The tables of functions in docs/enforcement.md are correct: every function of `driver-api` is in them once, and
//! those marked as enforced are the hooks of the shared object.
#![allow(clippy::unwrap_used, missing_docs)]

use partage_driver_api::exports::{DriverLibraryKind, DriverVersion, exports};
use partage_elf_rewrite::elf;
use partage_shim::install;
use std::collections::BTreeSet;

/// A row: how some functions of a family are handled.
struct TableRow {
    enforced: bool,
    reason: String,
    names: Vec<String>,
}

/// Parses the rows of the tables whose header is `| family | what | functions |`.
fn rows(text: &str) -> Vec<TableRow> {
    let mut rows = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        match cells[..] {
            ["family", "what", "functions"] => inside = true,
            [_, what, functions] if inside && !what.starts_with("---") => {
                let enforced = what.strip_prefix("**enforced**");
                let reason = enforced.or(what.strip_prefix("waived")).unwrap_or_default();
                rows.push(TableRow {
                    enforced: enforced.is_some(),
                    reason: reason.trim_start_matches(':').trim().to_string(),
                    names: functions
                        .split_whitespace()
                        .map(|name| name.trim_matches('`').to_string())
                        .collect(),
                });
            }
            [_, _, _] => {}
            _ => inside = false,
        }
    }
    rows
}

#[test]
fn tables_list_every_function_once_with_its_treatment() {
    let text = include_str!("../../../docs/enforcement.md");
    let rows = rows(text);
    let mut named = BTreeSet::new();
    for row in &rows {
        assert!(!row.reason.is_empty(), "no reason for {:?}", row.names);
        for name in &row.names {
            assert!(named.insert(name.clone()), "{name} is listed twice");
        }
    }
    let known: BTreeSet<String> = DriverLibraryKind::ALL
        .into_iter()
        .flat_map(|library| exports(library, DriverVersion::R550))
        .map(String::from)
        .collect();
    assert_eq!(known.difference(&named).collect::<Vec<_>>(), Vec::<&String>::new(), "not in the tables");
    assert_eq!(named.difference(&known).collect::<Vec<_>>(), Vec::<&String>::new(), "not in the driver");

    let object = std::fs::read(install::shared_object().unwrap()).unwrap();
    let hooks: BTreeSet<String> = elf::exports(&object)
        .unwrap()
        .iter()
        .filter_map(|symbol| symbol.strip_prefix("partage_hook_"))
        .map(String::from)
        .collect();
    let enforced: BTreeSet<String> =
        rows.iter().filter(|row| row.enforced).flat_map(|row| row.names.clone()).collect();
    assert_eq!(
        hooks.difference(&enforced).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "hooks that are marked as waived"
    );
    assert_eq!(
        enforced.difference(&hooks).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "marked as enforced, but without a hook"
    );
}
