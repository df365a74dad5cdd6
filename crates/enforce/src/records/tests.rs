use super::*;
use crate::error_chain::describe;
use proptest::prelude::*;
use serde::Deserialize;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

/// A record of version 1.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct RecordV1 {
    id: String,
    gpu: String,
}

impl VersionedRecord for RecordV1 {
    const VERSION: u32 = 1;

    fn is_named(&self, name: &str) -> bool {
        self.id == name
    }
}

/// Version 2 has several GPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct RecordV2 {
    id: String,
    gpus: Vec<String>,
}

impl VersionedRecord for RecordV2 {
    const VERSION: u32 = 2;

    fn from_previous(fields: RecordFields) -> Result<Self, serde_json::Error> {
        let RecordV1 { id, gpu } = serde_json::from_value(Value::Object(fields))?;
        Ok(RecordV2 { id, gpus: vec![gpu] })
    }
}

/// A record whose version field has another name, as that of the workstation's shares.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Renamed {
    id: String,
}

impl VersionedRecord for Renamed {
    const VERSION: u32 = 1;
    const VERSION_FIELD: &'static str = "format";
}

fn first(id: &str) -> RecordV1 {
    RecordV1 { id: id.into(), gpu: "GPU-1".into() }
}

struct Fixture {
    root: tempfile::TempDir,
    records: RecordDir,
}

impl Fixture {
    fn new() -> Fixture {
        let root = tempfile::tempdir().unwrap();
        let (directory, quarantine) = (root.path().join("records"), root.path().join("quarantine"));
        let records = RecordDir::open(&directory, &quarantine, Durability::AcrossReboots).unwrap();
        Fixture { root, records }
    }

    fn path(&self, file: &str) -> PathBuf {
        self.root.path().join("records").join(file)
    }

    fn quarantined(&self, file: &str) -> PathBuf {
        self.root.path().join("quarantine").join(file)
    }

    fn load(&self) -> LoadedRecords<RecordV1> {
        self.records.load_all().unwrap()
    }
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn record_is_read_back_and_removed() {
    let fixture = Fixture::new();
    for durability in [Durability::UntilReboot, Durability::AcrossReboots] {
        let path = fixture.path("a.json");
        write_file(&path, &first("a"), durability).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), r#"{"version":1,"gpu":"GPU-1","id":"a"}"#);
        assert_eq!(read_file::<RecordV1>(&path).unwrap(), Some(first("a")));
        assert_eq!(names(&fixture.root.path().join("records")), ["a.json"]);
    }
    fixture.records.store("b", &first("b")).unwrap();
    let loaded = fixture.load();
    assert_eq!(loaded.records.into_values().collect::<Vec<_>>(), [first("a"), first("b")]);
    assert!(loaded.quarantined.is_empty() && loaded.unsupported.is_empty());
    for _ in 0..2 {
        fixture.records.remove::<RecordV1>("a").unwrap();
        fixture.records.remove::<RecordV1>("b").unwrap();
    }
    assert!(fixture.load().records.is_empty());
    assert_eq!(fixture.records.load::<RecordV1>("a").unwrap(), None);
}

#[test]
fn version_field_can_have_another_name() {
    let text = encode(&Renamed { id: "a".into() }).unwrap();
    assert_eq!(text, r#"{"format":1,"id":"a"}"#);
    assert_eq!(decode::<Renamed>(text.as_bytes()).unwrap(), Renamed { id: "a".into() });
    assert!(matches!(decode::<RecordV1>(text.as_bytes()), Err(DecodeError::NoVersion)));
}

#[test]
fn previous_version_is_read_and_rewritten_in_the_current_one() {
    let fixture = Fixture::new();
    fixture.records.store("a", &first("a")).unwrap();
    let loaded: LoadedRecords<RecordV2> = fixture.records.load_all().unwrap();
    let second = RecordV2 { id: "a".into(), gpus: vec!["GPU-1".into()] };
    assert_eq!(loaded.records["a"], second);
    fixture.records.store("a", &second).unwrap();
    assert_eq!(fixture.records.load::<RecordV2>("a").unwrap(), Some(second));
}

#[test]
fn unsupported_version_is_reported_and_not_changed() {
    let fixture = Fixture::new();
    for (version, text) in [(2, r#"{"version":2,"id":"a","gpus":[]}"#), (0, r#"{"version":0,"id":"a"}"#)] {
        fs::write(fixture.path("a.json"), text).unwrap();
        let loaded = fixture.load();
        assert!(loaded.records.is_empty() && loaded.quarantined.is_empty());
        let [UnsupportedRecord { name, reason }] = loaded.unsupported.as_slice() else {
            panic!("{:?}", loaded.unsupported)
        };
        let expected = format!(
            "{}: unsupported record (start the version that wrote it, or remove the file together with what it describes): \
             record of version {version}, this build reads version 1",
            fixture.path("a.json").display()
        );
        assert_eq!((name.as_str(), describe(reason)), ("a", expected));
        let RecordError::Invalid { source: DecodeError::UnsupportedVersion { fields, .. }, .. } = reason
        else {
            panic!("{reason:?}")
        };
        assert_eq!(fields["id"], "a", "the fields are available");

        assert_eq!(fixture.records.load::<RecordV1>("a").unwrap(), None);
        let refused = fixture.records.store("a", &first("a")).unwrap_err();
        assert!(refused.is_unsupported_version(), "{refused}");
        fixture.records.remove::<RecordV1>("a").unwrap();
        assert_eq!(fs::read_to_string(fixture.path("a.json")).unwrap(), text);
    }
    // Two versions behind is not the version before.
    fs::write(fixture.path("a.json"), r#"{"version":1,"id":"a","gpu":""}"#).unwrap();
    #[derive(Debug, Serialize, Deserialize)]
    struct RecordV3 {}
    impl VersionedRecord for RecordV3 {
        const VERSION: u32 = 3;
    }
    let error = read_file::<RecordV3>(&fixture.path("a.json")).unwrap_err();
    assert!(describe(&error).ends_with("record of version 1, this build reads version 3 and 2"), "{error:?}");
}

#[test]
fn damaged_records_are_quarantined_and_others_are_loaded() {
    let fixture = Fixture::new();
    fixture.records.store("good", &first("good")).unwrap();
    for (file, text) in [
        ("cut.json", r#"{"version":1,"i"#),
        ("empty.json", ""),
        ("list.json", "[1]"),
        ("negative.json", r#"{"version":-1}"#),
        ("no-version.json", r#"{"id":"no-version","gpu":""}"#),
        ("other-fields.json", r#"{"version":1}"#),
        ("no-suffix", r#"{"version":1,"id":"no-suffix","gpu":""}"#),
        // A copy under another name would count twice.
        ("copy.json", r#"{"version":1,"id":"good","gpu":"GPU-1"}"#),
    ] {
        fs::write(fixture.path(file), text).unwrap();
    }
    fs::create_dir(fixture.path("directory.json")).unwrap();
    let loaded = fixture.load();
    assert_eq!(loaded.records.into_values().collect::<Vec<_>>(), [first("good")]);
    assert_eq!(loaded.quarantined.len(), 9, "{:?}", loaded.quarantined);
    for QuarantinedRecord { path, reason } in &loaded.quarantined {
        let file = path.file_name().unwrap().to_str().unwrap();
        assert_eq!(*path, fixture.quarantined(file));
        assert!(reason.to_string().starts_with(&fixture.path(file).display().to_string()), "{reason}");
        assert!(reason.to_string().ends_with("(remove it)"), "the message has a remedy: {reason}");
    }
    assert_eq!(fs::read_to_string(fixture.quarantined("cut.json")).unwrap(), r#"{"version":1,"i"#);
    assert_eq!(names(&fixture.root.path().join("records")), ["good.json"]);
    assert!(fixture.load().quarantined.is_empty());
}

#[test]
fn links_are_quarantined_and_not_followed() {
    let fixture = Fixture::new();
    let elsewhere = fixture.root.path().join("elsewhere.json");
    fs::write(&elsewhere, encode(&first("linked")).unwrap()).unwrap();
    symlink(&elsewhere, fixture.path("linked.json")).unwrap();
    symlink("/nowhere/at/all", fixture.path("dangling.json")).unwrap();
    let loaded = fixture.load();
    assert!(loaded.records.is_empty());
    assert_eq!(loaded.quarantined.len(), 2);
    assert!(loaded.quarantined.iter().all(|one| matches!(one.reason, RecordError::NotAFile { .. })));
    assert!(fixture.quarantined("dangling.json").symlink_metadata().is_ok());
    assert!(elsewhere.is_file());
    // The same holds for loading a single record.
    symlink("/nowhere/at/all", fixture.path("single.json")).unwrap();
    assert_eq!(fixture.records.load::<RecordV1>("single").unwrap(), None);
    assert!(fixture.path("single.json").symlink_metadata().is_err());
}

#[test]
fn pipes_and_large_files_are_quarantined() {
    let fixture = Fixture::new();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        fixture.path("pipe.json"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    fs::File::create(fixture.path("large.json")).unwrap().set_len(MAX_RECORD_BYTES + 1).unwrap();
    let loaded = fixture.load();
    let reasons: Vec<bool> = ["pipe.json", "large.json"]
        .iter()
        .map(|file| loaded.quarantined.iter().any(|one| one.path == fixture.quarantined(file)))
        .collect();
    assert_eq!(reasons, [true, true], "{:?}", loaded.quarantined);
}

#[test]
fn record_of_another_user_is_quarantined() {
    if !rustix::process::geteuid().is_root() {
        // Only root can change the owner of a file.
        return;
    }
    let fixture = Fixture::new();
    fixture.records.store("a", &first("a")).unwrap();
    std::os::unix::fs::chown(fixture.path("a.json"), Some(1), None).unwrap();
    let loaded = fixture.load();
    assert!(loaded.records.is_empty());
    assert!(matches!(loaded.quarantined[0].reason, RecordError::WrongOwner { owner: 1, expected: 0, .. }));
}

#[test]
fn quarantine_keeps_earlier_files_and_is_bounded() {
    let fixture = Fixture::new();
    for text in ["one", "two"] {
        fs::write(fixture.path("a.json"), text).unwrap();
        fixture.load();
    }
    assert_eq!(fs::read_to_string(fixture.quarantined("a.json")).unwrap(), "one");
    assert_eq!(fs::read_to_string(fixture.quarantined("a.json.1")).unwrap(), "two");
    for number in 2..MAX_QUARANTINED {
        fs::write(fixture.quarantined(&format!("{number}")), "").unwrap();
    }
    fs::write(fixture.path("b.json"), "three").unwrap();
    let loaded = fixture.load();
    assert_eq!(loaded.quarantined[0].path, fixture.path("b.json"), "it stays where it was");
    assert_eq!(fs::read_to_string(fixture.path("b.json")).unwrap(), "three");
    // A record of the same name replaces it.
    fixture.records.store("b", &first("b")).unwrap();
    assert_eq!(fixture.load().records["b"], first("b"));
}

#[test]
fn half_written_files_are_removed_and_other_hidden_ones_ignored() {
    let fixture = Fixture::new();
    fs::write(fixture.path(".a.json.7-0.unfinished"), "{").unwrap();
    fs::write(fixture.path(".keep"), "").unwrap();
    assert!(fixture.load().quarantined.is_empty());
    assert_eq!(names(&fixture.root.path().join("records")), [".keep"]);
}

#[test]
fn directory_that_cannot_be_read_is_an_error() {
    let fixture = Fixture::new();
    fs::remove_dir(fixture.root.path().join("records")).unwrap();
    fs::write(fixture.root.path().join("records"), "").unwrap();
    let error = fixture.records.load_all::<RecordV1>().unwrap_err();
    assert!(!error.is_damaged() && matches!(error, RecordError::Read { .. }), "{error:?}");
    assert!(error.to_string().contains("check the disk"), "{error}");
}

#[test]
fn name_is_never_a_path() {
    let fixture = Fixture::new();
    for wrong in ["", "..", "a/b", "../../x", "a.b", "é", &"a".repeat(129)] {
        let stored = fixture.records.store(wrong, &first(wrong)).unwrap_err();
        assert!(matches!(stored, RecordError::InvalidName { .. }), "{wrong:?}");
        assert!(fixture.records.remove::<RecordV1>(wrong).is_err(), "{wrong:?}");
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_read_or_quarantined(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let fixture = Fixture::new();
        fs::write(fixture.path("x.json"), bytes).unwrap();
        prop_assert_eq!(fixture.load().quarantined.len(), 1);
    }
}
