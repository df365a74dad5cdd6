//! The command line as people use it: golden files, and the console blocks of the docs.

#[test]
fn commands() {
    // The docs speak from the top of the repository.
    std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
        .expect("the top of the repository");
    trycmd::TestCases::new()
        .case("crates/partage/tests/cmd/*.toml")
        .case("README.md")
        .case("docs/*.md")
        .case("docs/migrate/*.md");
}
