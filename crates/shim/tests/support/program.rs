//! Programs and libraries in C, built with the machine's compiler: only a linker takes some routes to a function.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Builds C sources in a directory.
pub struct ProgramBuilder<'a> {
    pub folder: &'a Path,
}

impl ProgramBuilder<'_> {
    fn make(&self, file: &str, text: &str, arguments: &[String]) -> PathBuf {
        let (source, made) = (self.folder.join(format!("{file}.c")), self.folder.join(file));
        std::fs::write(&source, text).unwrap();
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-o"]).arg(&made).arg(&source).args(arguments).arg("-ldl").arg("-lpthread");
        let run = cc.output().unwrap();
        assert!(run.status.success(), "{file}: {}", String::from_utf8_lossy(&run.stderr));
        made
    }

    pub fn build_program(&self, file: &str, text: &str, arguments: &[String]) -> PathBuf {
        self.make(file, text, arguments)
    }

    /// Builds a library whose soname is its file name.
    pub fn build_library(&self, file: &str, text: &str, arguments: &[String]) -> PathBuf {
        let mut all = vec!["-shared".into(), "-fPIC".into(), format!("-Wl,-soname,{file}")];
        all.extend_from_slice(arguments);
        self.make(file, text, &all)
    }
}

/// Returns the output of a command that succeeded.
#[track_caller]
pub fn stdout_of(output: &Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    out.trim().to_string()
}
