//! The pages of the documentation, so that tests run the very commands that people read.

use std::cell::Cell;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Where the pages and what they name are.
pub fn repository() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_path_buf()
}

/// A page, and what of it was taken to be run.
#[derive(Debug)]
pub struct Page {
    name: &'static str,
    blocks: Vec<Block>,
    /// How commands begin that are not run here, and why.
    left: &'static [(&'static str, &'static str)],
}

#[derive(Debug)]
struct Block {
    heading: String,
    kind: String,
    text: String,
    taken: Cell<bool>,
}

impl Block {
    /// As a person types them: one goes on after a line that ends in a backslash.
    fn commands(&self) -> Vec<String> {
        let joined = self.text.replace("\\\n", " ");
        joined.lines().filter(|line| !line.trim().is_empty()).map(str::to_string).collect()
    }
}

impl Page {
    /// The page of this path. `left` has how commands begin that are not to be run, each with the reason.
    pub fn read(name: &'static str, left: &'static [(&'static str, &'static str)]) -> io::Result<Page> {
        let text = fs::read_to_string(repository().join(name))?;
        let (mut blocks, mut heading) = (Vec::new(), String::new());
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            if let Some(kind) = line.strip_prefix("```") {
                let inside: Vec<_> = lines.by_ref().take_while(|line| *line != "```").collect();
                let text = inside.join("\n") + "\n";
                let (heading, kind) = (heading.clone(), kind.to_string());
                blocks.push(Block { heading, kind, text, taken: Cell::new(false) });
            } else if line.starts_with('#') {
                heading = line.trim_start_matches('#').trim().to_string();
            }
        }
        Ok(Page { name, blocks, left })
    }

    /// The blocks of a kind under a heading, each as it stands.
    pub fn blocks(&self, heading: &str, kind: &str) -> Vec<String> {
        self.under(heading, kind).iter().map(|block| block.text.clone()).collect()
    }

    /// The commands under a heading, block by block, but for those that are left to others.
    pub fn commands(&self, heading: &str) -> Vec<Vec<String>> {
        let run = |command: &String| self.reason(command).is_none();
        let blocks = self.under(heading, "sh");
        blocks.iter().map(|block| block.commands().into_iter().filter(run).collect()).collect()
    }

    fn under(&self, heading: &str, kind: &str) -> Vec<&Block> {
        let found = self.blocks.iter().filter(|block| block.heading == heading && block.kind == kind);
        found.inspect(|block| block.taken.set(true)).collect()
    }

    fn reason(&self, command: &str) -> Option<&str> {
        self.left.iter().find(|(left, _)| command.starts_with(left)).map(|(_, why)| *why)
    }

    /// Whether every command of the page was taken, or is named with a reason why not; and what is named is there.
    pub fn is_done(&self) -> Result<(), String> {
        let all: Vec<&Block> = self.blocks.iter().filter(|block| block.kind == "sh").collect();
        let missed = all.iter().filter(|block| !block.taken.get()).flat_map(|block| block.commands());
        if let Some(command) = missed.into_iter().find(|command| self.reason(command).is_none()) {
            return Err(format!("{}: nobody runs {command:?}", self.name));
        }
        let there =
            |left: &str| all.iter().any(|block| block.commands().iter().any(|one| one.starts_with(left)));
        match self.left.iter().find(|(left, _)| !there(left)) {
            Some((left, why)) => {
                Err(format!("{} has no {left:?} that could be left because {why}", self.name))
            }
            None => Ok(()),
        }
    }
}

/// A command with what is meant in place of what stands for it.
pub fn meant(command: &str, table: &[(&str, &str)]) -> String {
    table.iter().fold(command.to_string(), |command, (word, meaning)| command.replace(word, meaning))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_done_when_all_its_commands_are() {
        let page = Page::read("docs/install.md", &[("make image", "a test")]).unwrap();
        assert!(page.is_done().unwrap_err().contains("nobody runs \"helm install"));
        let with_helm = page.commands("With helm");
        assert!(
            with_helm[0][0].starts_with("helm install")
                && with_helm[0][0].contains("--set image.repository=")
        );
        for heading in ["Without helm", "Update", "Uninstall"] {
            assert!(!page.commands(heading).is_empty(), "{heading}");
        }
        page.is_done().unwrap();
        assert!(page.blocks("Settings", "yaml")[0].starts_with("settings:\n"));
        let stale = Page { left: &[("make tea", "it is late")], ..page };
        assert!(stale.is_done().unwrap_err().contains("make tea"));
        assert_eq!(
            meant("kubectl describe node gpu-1", &[("gpu-1", "node1")]),
            "kubectl describe node node1"
        );
    }
}
