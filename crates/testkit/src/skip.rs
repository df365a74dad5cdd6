//! Skips tests whose prerequisites are missing.

use std::io::Write;

/// Skips a test whose prerequisite is missing: on a developer's machine it prints the reason and returns; in CI (`CI`
/// is set and not `false`) it panics, because a check that is always skipped checks nothing.
///
/// `make test` counts the skips: each is a line in the file that `PARTAGE_SKIPPED` names.
///
/// ```no_run
/// use partage_testkit::binaries::Binaries;
/// use partage_testkit::skip_or_fail;
/// # fn test() {
/// let binaries = match Binaries::ready() {
///     Ok(binaries) => binaries,
///     Err(missing) => return skip_or_fail(&missing),
/// };
/// # }
/// ```
pub fn skip_or_fail(missing: &dyn std::fmt::Display) {
    let in_ci = std::env::var("CI").is_ok_and(|value| !value.is_empty() && value != "false");
    assert!(!in_ci, "tests must not be skipped in CI: {missing}");
    let test = std::thread::current().name().unwrap_or("a test").to_string();
    // Written to the file descriptor, which the test runner does not capture: a skip must be visible.
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {missing}");
    if let Some(path) = std::env::var_os("PARTAGE_SKIPPED") {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        let _ = file.and_then(|mut file| writeln!(file, "{test}: {missing}"));
    }
}
