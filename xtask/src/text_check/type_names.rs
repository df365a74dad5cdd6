//! Finds the types that a source file declares.

use super::rust_source::RustText;

/// A declared type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TypeName {
    /// Its name.
    pub(super) name: String,
    /// Whether it is `pub`, also in test code: readers search for names in all of the workspace.
    pub(super) is_public: bool,
    path: String,
    line: usize,
}

impl TypeName {
    /// Returns file and line.
    pub(super) fn place(&self) -> String {
        format!("{}:{}", self.path, self.line)
    }
}

/// NVIDIA's own type names: the tables repeat them as they are.
const FOREIGN_NAMES: [&str; 2] = ["crates/driver-api/src/cuda/", "crates/driver-api/src/nvml/"];

/// Returns the types of a file: structs, enums, unions, traits, and public type aliases.
pub(super) fn of_file(path: &str, source: &RustText) -> Vec<TypeName> {
    if FOREIGN_NAMES.iter().any(|folder| path.starts_with(folder)) {
        return Vec::new();
    }
    let mut names = Vec::new();
    let mut depth = 0i64;
    for (number, line) in source.code.lines().enumerate() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let Some((name, is_public)) = declared(&words) {
            let is_nested = depth > 0 && line.starts_with(' ') && is_associated(&words);
            if !is_nested {
                names.push(TypeName { name, is_public, path: path.to_string(), line: number + 1 });
            }
        }
        depth += line.matches('{').count() as i64 - line.matches('}').count() as i64;
    }
    names
}

/// Reads `[pub[(…)]] [unsafe] struct NAME`, and returns the name and whether it is plain `pub`.
fn declared(words: &[&str]) -> Option<(String, bool)> {
    let mut rest = words;
    let is_public = rest.first() == Some(&"pub");
    while let [first, tail @ ..] = rest
        && (first.starts_with("pub") || *first == "unsafe" || first.ends_with(')'))
    {
        rest = tail;
    }
    let [keyword, name, ..] = rest else { return None };
    if !matches!(*keyword, "struct" | "enum" | "union" | "trait" | "type") {
        return None;
    }
    let end = name.find(|letter: char| !letter.is_alphanumeric() && letter != '_').unwrap_or(name.len());
    let name = &name[..end];
    name.starts_with(|letter: char| letter.is_ascii_uppercase()).then(|| (name.to_string(), is_public))
}

/// Whether the words declare a `type` that may be an associated type: such a name is its trait's.
fn is_associated(words: &[&str]) -> bool {
    words.contains(&"type")
}
