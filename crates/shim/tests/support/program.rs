//! Programs and libraries in C, made by the machine's compiler: some routes to a function only a linker goes.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// What the compiler makes of a text, in a folder.
pub struct Maker<'a> {
    pub folder: &'a Path,
}

impl Maker<'_> {
    fn make(&self, file: &str, text: &str, arguments: &[String]) -> PathBuf {
        let (source, made) = (self.folder.join(format!("{file}.c")), self.folder.join(file));
        std::fs::write(&source, text).unwrap();
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-o"]).arg(&made).arg(&source).args(arguments).arg("-ldl").arg("-lpthread");
        let run = cc.output().unwrap();
        assert!(run.status.success(), "{file}: {}", String::from_utf8_lossy(&run.stderr));
        made
    }

    pub fn program(&self, file: &str, text: &str, arguments: &[String]) -> PathBuf {
        self.make(file, text, arguments)
    }

    /// Its name for the loader is its file's.
    pub fn library(&self, file: &str, text: &str, arguments: &[String]) -> PathBuf {
        let mut all = vec!["-shared".into(), "-fPIC".into(), format!("-Wl,-soname,{file}")];
        all.extend_from_slice(arguments);
        self.make(file, text, &all)
    }
}

/// What it said, if it ended well.
#[track_caller]
pub fn said(output: &Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    out.trim().to_string()
}
