//! Reads documentation pages, so that tests run exactly the commands that users read.

use std::cell::Cell;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Returns the root directory of the repository.
pub fn repository_root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_path_buf()
}

/// A documentation page, and which of its code blocks a test has used.
#[derive(Debug)]
pub struct DocPage {
    name: &'static str,
    blocks: Vec<CodeBlock>,
    /// Prefixes of commands that are not run, each with the reason.
    skipped: &'static [(&'static str, &'static str)],
}

#[derive(Debug)]
struct CodeBlock {
    heading: String,
    kind: String,
    text: String,
    used: Cell<bool>,
}

impl CodeBlock {
    /// Returns the commands as typed in a shell: a line that ends in a backslash continues.
    fn commands(&self) -> Vec<String> {
        let joined = self.text.replace("\\\n", " ");
        joined.lines().filter(|line| !line.trim().is_empty()).map(str::to_string).collect()
    }
}

impl DocPage {
    /// Reads the page at this path. `skipped` lists prefixes of commands that are not run, each with the reason.
    pub fn read(name: &'static str, skipped: &'static [(&'static str, &'static str)]) -> io::Result<DocPage> {
        let text = fs::read_to_string(repository_root().join(name))?;
        let (mut blocks, mut heading) = (Vec::new(), String::new());
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            if let Some(kind) = line.strip_prefix("```") {
                let inside: Vec<_> = lines.by_ref().take_while(|line| *line != "```").collect();
                let text = inside.join("\n") + "\n";
                let (heading, kind) = (heading.clone(), kind.to_string());
                blocks.push(CodeBlock { heading, kind, text, used: Cell::new(false) });
            } else if line.starts_with('#') {
                heading = line.trim_start_matches('#').trim().to_string();
            }
        }
        Ok(DocPage { name, blocks, skipped })
    }

    /// Returns the blocks of a language under a heading, unchanged.
    pub fn blocks(&self, heading: &str, kind: &str) -> Vec<String> {
        self.use_blocks(heading, kind).iter().map(|block| block.text.clone()).collect()
    }

    /// Returns the commands under a heading, block by block, without the skipped ones.
    pub fn commands(&self, heading: &str) -> Vec<Vec<String>> {
        let run = |command: &String| self.skip_reason(command).is_none();
        let blocks = self.use_blocks(heading, "sh");
        blocks.iter().map(|block| block.commands().into_iter().filter(run).collect()).collect()
    }

    fn use_blocks(&self, heading: &str, kind: &str) -> Vec<&CodeBlock> {
        let found = self.blocks.iter().filter(|block| block.heading == heading && block.kind == kind);
        found.inspect(|block| block.used.set(true)).collect()
    }

    fn skip_reason(&self, command: &str) -> Option<&str> {
        self.skipped.iter().find(|(skipped, _)| command.starts_with(skipped)).map(|(_, why)| *why)
    }

    /// Checks that every command of the page was used or is skipped with a reason, and that every skipped prefix
    /// occurs.
    pub fn check_complete(&self) -> Result<(), String> {
        let all: Vec<&CodeBlock> = self.blocks.iter().filter(|block| block.kind == "sh").collect();
        let missed = all.iter().filter(|block| !block.used.get()).flat_map(|block| block.commands());
        if let Some(command) = missed.into_iter().find(|command| self.skip_reason(command).is_none()) {
            return Err(format!("{}: no test runs {command:?}", self.name));
        }
        let there = |skipped: &str| {
            all.iter().any(|block| block.commands().iter().any(|one| one.starts_with(skipped)))
        };
        match self.skipped.iter().find(|(skipped, _)| !there(skipped)) {
            Some((skipped, why)) => {
                Err(format!("{} has no command {skipped:?}, which would be skipped because {why}", self.name))
            }
            None => Ok(()),
        }
    }
}

/// Replaces the placeholders of a documented command by actual values.
pub fn substitute(command: &str, table: &[(&str, &str)]) -> String {
    table.iter().fold(command.to_string(), |command, (word, meaning)| command.replace(word, meaning))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_is_complete_when_all_its_commands_were_used() {
        let page = DocPage::read("docs/install.md", &[("make image", "a test")]).unwrap();
        assert!(page.check_complete().unwrap_err().contains("no test runs \"helm install"));
        let with_helm = page.commands("With Helm");
        assert!(
            with_helm[0][0].starts_with("helm install")
                && with_helm[0][0].contains("--set image.repository=")
        );
        for heading in ["Without Helm", "Update", "Uninstall"] {
            assert!(!page.commands(heading).is_empty(), "{heading}");
        }
        page.check_complete().unwrap();
        assert!(page.blocks("Settings", "yaml")[0].starts_with("settings:\n"));
        let stale = DocPage { skipped: &[("make tea", "it is late")], ..page };
        assert!(stale.check_complete().unwrap_err().contains("make tea"));
        assert_eq!(
            substitute("kubectl describe node gpu-1", &[("gpu-1", "node1")]),
            "kubectl describe node node1"
        );
    }
}
