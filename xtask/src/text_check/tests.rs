use super::prose::{check_markdown, check_sentences, check_words};
use super::*;

fn words(offenses: &[Offense]) -> Vec<(usize, &str)> {
    offenses.iter().map(|offense| (offense.line, offense.what.as_str())).collect()
}

#[test]
fn phrase_of_the_word_list_is_found_as_whole_words() {
    let found = check_words("a daemon\nNobody holds it\nnobodys_name and nobody_else");
    assert_eq!(words(&found), [(2, "\"nobody\": name the component")]);
}

#[test]
fn word_of_the_list_is_found_only_where_it_is_a_word() {
    let found = check_words("an ill GPU\nskill, promised_bytes, promisedCores\nbonds\nA Bond.");
    assert_eq!(words(&found), [(1, "\"ill\": unhealthy"), (4, "\"bond\": confinement")]);
}

#[test]
fn sentence_with_a_relative_pronoun_as_subject_is_found() {
    let found = check_sentences(
        "The agent reads it. What is held\nis released. Who is asked? What a pod holds is its grant.",
    );
    assert_eq!(words(&found), [(1, "sentence without a named subject: \"What is held is released.\"")]);
}

#[test]
fn doc_comment_that_only_points_elsewhere_is_found() {
    assert_eq!(check_sentences("The same.").len(), 1);
}

#[test]
fn doc_comment_that_starts_with_the_same_is_found() {
    let source = RustText::parse(concat!(
        "/// The ratio of CPU to GPU.\nconst A: f64 = 1.0;\n",
        "/// The same ratio for shares.\nconst B: f64 = 1.0;\n// The same again.\n",
    ));
    let found = check_rust(&source);
    assert_eq!(
        words(&found),
        [(3, "doc comment that depends on its neighbor: \"The same ratio for shares.\"")]
    );
}

#[test]
fn comments_and_strings_of_c_are_checked() {
    let source = RustText::parse(
        "/* Who reads it is refused. */\nint nobody = '\"'; // fine\nconst char *a = \"nobody\";\n",
    );
    let expected = [
        (1, "sentence without a named subject: \"Who reads it is refused.\""),
        (3, "\"nobody\": name the component"),
    ];
    assert_eq!(words(&check_comments(&source)), expected);
}

#[test]
fn every_kind_of_source_has_its_check() {
    let kinds = [
        ("crates/a/src/lib.rs", Some(FileKind::Rust)),
        ("crates/a/tests/a.c", Some(FileKind::CommentedSource)),
        ("crates/a/proto/a.proto", Some(FileKind::CommentedSource)),
        ("deploy/chart/partage/templates/NOTES.txt", Some(FileKind::Data)),
        ("tools/release", Some(FileKind::Data)),
        ("xtask/src/init.sh", Some(FileKind::Data)),
        ("crates/a/src/generated/a.rs", None),
        ("traces/README.md", None),
        ("LICENSE", None),
    ];
    for (path, kind) in kinds {
        assert_eq!(FileKind::of(path), kind, "{path}");
    }
}

#[test]
fn markdown_code_blocks_are_not_checked() {
    assert!(check_markdown("```sh\nnobody\n```\n").is_empty());
    assert_eq!(check_markdown("# What is new\n\n```sh\n```\nnobody\n").len(), 1);
}

#[test]
fn comments_strings_and_code_are_distinguished() {
    let source = RustText::parse(concat!(
        "//! Module.\n//! More.\n",
        "const A: &str = \"text // no comment\"; // trailing\n",
        "const B: &str = r#\"raw \"quoted\" text\"#;\n",
        "const C: char = '\"';\nfn f<'a>(b'\\'': &'a str) {}\n",
        "/* block /* nested */ */ struct Thing;\n",
    ));
    let comments: Vec<(usize, &str)> =
        source.comments.iter().map(|comment| (comment.line, comment.text.as_str())).collect();
    assert_eq!(comments, [(1, "Module.\nMore."), (3, "trailing"), (7, "/* block /* nested */ */")]);
    assert_eq!(
        source.strings,
        [(3, "text // no comment".to_string()), (4, "raw \"quoted\" text".to_string())]
    );
    assert!(source.code.contains("struct Thing"), "{}", source.code);
    assert_eq!(source.code.lines().count(), 7);
}

#[test]
fn types_are_found_with_their_visibility() {
    let source = RustText::parse(concat!(
        "pub struct Outer<T>(T);\npub(crate) enum Inner { A }\n",
        "impl Iterator for Outer<u8> {\n    type Item = u8;\n}\n",
        "fn f() { /* struct Comment; */ }\npub type Alias = u8;\n",
    ));
    let names: Vec<(String, bool)> = type_names::of_file("a/src/lib.rs", &source)
        .into_iter()
        .map(|name| (name.name, name.is_public))
        .collect();
    assert_eq!(
        names,
        [("Outer".to_string(), true), ("Inner".to_string(), false), ("Alias".to_string(), true)]
    );
}

#[test]
fn exception_needs_a_path_a_phrase_and_a_reason() {
    let list = AllowList::parse("# comment\n\ncrates/a/: \"nobody\" # the user name of the system account\n")
        .unwrap();
    assert!(list.permits("crates/a/src/lib.rs", "\"nobody\": name the component"));
    assert!(!list.permits("crates/b/src/lib.rs", "\"nobody\": name the component"));
    assert!(matches!(AllowList::parse("crates/a: nobody"), Err(TextCheckError::AllowList { line: 1 })));
}

#[test]
fn repository_with_offenses_is_not_clean() {
    let root = tempfile::tempdir().unwrap();
    let git = Command::new("git").arg("-C").arg(root.path()).args(["init", "--quiet"]).status().unwrap();
    assert!(git.success());
    let write = |path: &str, text: &str| {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write(
        "crates/a/src/lib.rs",
        "/// A lease on a GPU that expires.\npub struct LeaseHolder;\nconst PATIENCE: u8 = 1;\n",
    );
    write("crates/b/src/lib.rs", "/// A holder of a lease on a node.\npub struct LeaseHolder;\n");
    write("docs/a.md", "The daemon starts.\n");
    let mut out = Vec::new();
    let summary = run(root.path(), &[], &mut out).unwrap();
    let expected =
        TextCheckSummary { offenses: 1, shared_type_names: 1, terse_docs: (0, 2), short_type_names: (0, 2) };
    assert_eq!(summary, expected, "{}", String::from_utf8_lossy(&out));
    assert!(!summary.is_clean());
    write("crates/a/src/lib.rs", "/// A lease on a GPU that expires.\npub struct GpuLease;\n");
    assert!(run(root.path(), &[], &mut Vec::new()).unwrap().is_clean());
}
