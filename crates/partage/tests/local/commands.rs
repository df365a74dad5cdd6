//! A command in a share is as it would be without one.

use super::support::*;
use std::os::unix::process::ExitStatusExt;

#[test]
fn the_exit_code_is_the_commands() {
    let home = Home::new();
    let run =
        |script: &str| home.partage(&["run", "-q", "--memory", "1Gi", "--", "sh", "-c", script]).status();
    assert_eq!(run("exit 0").unwrap().code(), Some(0));
    assert_eq!(run("exit 3").unwrap().code(), Some(3));
    for signal in [libc::SIGKILL, libc::SIGSEGV, libc::SIGTERM] {
        assert_eq!(run(&format!("kill -{signal} $$")).unwrap().signal(), Some(signal));
    }
    home.nothing_left();
}
