use super::*;
use partage_core::model::Gpu;
use partage_enforce::error_chain::describe;

fn gpu(number: u32, model: &str) -> Gpu {
    Gpu {
        uuid: format!("GPU-{number:08}-0000-0000-0000-000000000000").as_str().into(),
        minor: number,
        model: model.into(),
        memory_bytes: Bytes(40 << 30),
        numa: None,
        pci: None,
        withheld: None,
    }
}

fn node() -> Node {
    Node::new("this machine", vec![gpu(0, "NVIDIA A100-SXM4-40GB"), gpu(1, "Tesla T4")])
}

fn refused(text: &str) -> String {
    let message = WorkstationSettings::from_yaml(text).unwrap_err().to_string();
    assert!(!message.is_empty());
    message
}

#[test]
fn all_settings_are_parsed() {
    let settings = WorkstationSettings::from_yaml(
        "driver: simulated
simulated: {gpus: 3, model: T4}
metrics: 127.0.0.1:9999
policy: binpack
default: {memory: 4Gi, cores: 25, mode: hard}
users:
  - {applyTo: root, whole: true}
  - {applyTo: '@root', shares: 4, memory: 20Gi, cores: 150, gpus: 2, whole: false, only: [0, T4]}
  - {applyTo: '*', shares: 1}
reservations:
  - {applyTo: root, gpu: 1, memory: 10Gi, cores: 40}
",
    )
    .unwrap();
    assert_eq!(settings.default.memory, Some(Bytes(4 << 30)));
    assert_eq!(settings.users[1].memory, Some(Bytes(20 << 30)));
    assert_eq!(settings.users[1].cores.unwrap().to_string(), "150 %");
    assert_eq!(settings.reservations[0].gpu(&node()), Some(node().gpus[1].uuid.clone()));
    settings.check_against(&node()).unwrap();
    let student = UserIdentity { uid: 4242, gids: vec![7] };
    assert_eq!(settings.rule(&student).unwrap().unwrap().apply_to, UserSelector::AllUsers);
    assert_eq!(
        settings.rule(&UserIdentity { uid: 4242, gids: vec![7, 0] }).unwrap().unwrap().shares,
        Some(4)
    );
    assert!(settings.rule(&UserIdentity { uid: 0, gids: vec![0] }).unwrap().is_none(), "root may everything");
}

#[test]
fn empty_settings_allow_everything() {
    for text in ["", "# nothing\n\n", "{}"] {
        assert_eq!(WorkstationSettings::from_yaml(text).unwrap(), WorkstationSettings::default(), "{text:?}");
    }
    assert!(
        WorkstationSettings::default().rule(&UserIdentity { uid: 4242, gids: vec![] }).unwrap().is_none()
    );
    let strict = WorkstationSettings::from_yaml("users: [{applyTo: root}]").unwrap();
    assert!(
        strict.rule(&UserIdentity { uid: 4242, gids: vec![] }).is_err(),
        "a user without a rule gets nothing"
    );
}

#[test]
fn invalid_settings_are_explained() {
    for (text, expected) in [
        ("memroy: 4Gi", "memroy"),
        ("default: {memory: 5gb}", "invalid amount of memory 5gb"),
        ("default: {memory: 4096}", "less than 1 MiB"),
        ("default: {cores: 150}", "150"),
        ("metrics: 0.0.0.0:9464", "other machines"),
        ("metrics: yes please", "invalid address"),
        ("policy: fastest", "unknown policy"),
        ("oversubscribe: sometimes", "sometimes"),
        ("maxPriority: 11", "maxPriority: invalid priority 11: write 0 to 10"),
        ("throttleCopies: allowed", "invalid boolean"),
        ("users: [{applyTo: nobody-like-that}]", "user nobody-like-that not found"),
        ("users: [{applyTo: '@nobody-like-that'}]", "group nobody-like-that not found"),
        ("users: [{applyTo: root, shares: 0}]", "shares: 0"),
        ("users: [{shares: 2}]", "applyTo"),
        ("reservations: [{applyTo: root, gpu: 0}]", "reserves nothing"),
        ("driver: nvida", "nvida"),
        ("default: {mode: hard}", "write cores, too"),
        ("simulated: {gpus: 0}", "invalid number of GPUs 0"),
        ("users: [{applyTo: root, cores: many}]", "invalid percentage many"),
        ("users: [{applyTo: root, cores: 12.3456}]", "at most three decimals"),
    ] {
        let message = refused(text);
        assert!(message.contains(expected), "{text}: {message}");
    }
    for (text, expected) in [
        (
            "reservations: [{applyTo: root, gpu: 7, memory: 1Gi}]",
            "must select exactly one GPU; the GPUs are 0 (GPU-00000000",
        ),
        (
            "reservations: [{applyTo: root, gpu: 0, cores: 60}, {applyTo: 7, gpu: 0, cores: 50}]",
            "more than 100 %",
        ),
        ("default: {memory: 500Gi}", "no GPU of this machine has 500 GiB"),
        (
            "reservations: [{applyTo: root, gpu: 0, memory: 41Gi}]",
            "41 GiB reserved in total, more than its 40 GiB",
        ),
    ] {
        let message =
            WorkstationSettings::from_yaml(text).unwrap().check_against(&node()).unwrap_err().to_string();
        assert!(message.contains(expected), "{text}: {message}");
    }
}

#[test]
fn named_settings_file_must_exist() {
    let folder = tempfile::tempdir().unwrap();
    let state_dir = StateDir::at(folder.path()).unwrap();
    assert_eq!(
        WorkstationSettings::load(None, &state_dir).unwrap(),
        (WorkstationSettings::default(), None),
        "a state directory has its own or none"
    );
    std::fs::write(folder.path().join("partage.yaml"), "policy: binpack").unwrap();
    assert_eq!(WorkstationSettings::load(None, &state_dir).unwrap().0.policy, PlacementPolicy::Binpack);
    let missing =
        WorkstationSettings::load(Some(&folder.path().join("x.yaml")), &state_dir).unwrap_err().to_string();
    assert!(missing.contains("cannot read") && missing.contains("x.yaml"), "{missing}");
    let large = folder.path().join("large.yaml");
    std::fs::write(&large, "#".repeat((1 << 20) + 1)).unwrap();
    let large = describe(&WorkstationSettings::load(Some(&large), &state_dir).unwrap_err());
    assert!(large.contains("larger than 1 MiB"), "{large}");
}

/// Loads a settings file of a state directory that it is not in.
fn load(path: &Path) -> Result<WorkstationSettings, String> {
    let folder = tempfile::tempdir().unwrap();
    let state_dir = StateDir::at(folder.path()).unwrap();
    WorkstationSettings::load(Some(path), &state_dir)
        .map(|(settings, _)| settings)
        .map_err(|error| describe(&error))
}

#[test]
fn settings_are_read_only_from_a_regular_file() {
    use rustix::fs::{CWD, FileType, mknodat};
    let folder = tempfile::tempdir().unwrap();
    let (pipe, socket) = (folder.path().join("pipe.yaml"), folder.path().join("socket.yaml"));
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let _listening = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    for path in [&pipe, &socket, folder.path(), Path::new("/dev/null")] {
        let refused = load(path).unwrap_err();
        let expected = format!("{} is not a regular file: write the settings", path.display());
        assert!(refused.starts_with(&expected), "{refused}");
    }
    let file = folder.path().join("settings.yaml");
    std::fs::write(&file, "policy: binpack").unwrap();
    std::os::unix::fs::symlink(&file, folder.path().join("link.yaml")).unwrap();
    assert_eq!(load(&folder.path().join("link.yaml")).unwrap().policy, PlacementPolicy::Binpack);
}

#[test]
fn daemon_of_root_refuses_settings_that_other_users_can_change() {
    use std::os::unix::fs::{PermissionsExt, chown};
    if !rustix::process::geteuid().is_root() {
        // Only root can change the owner of a file.
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("partage.yaml");
    std::fs::write(&path, "policy: binpack").unwrap();
    let set_mode = |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    for mode in [0o664, 0o646] {
        set_mode(mode);
        let refused = load(&path).unwrap_err();
        assert!(refused.ends_with(&format!("chmod go-w {}", path.display())), "{refused}");
    }
    set_mode(0o644);
    load(&path).unwrap();
    chown(&path, Some(1), None).unwrap();
    let refused = load(&path).unwrap_err();
    assert!(refused.contains("belongs to user 1"), "{refused}");
    assert!(refused.ends_with(&format!("chown root {}", path.display())), "{refused}");
    // The same holds for the settings in a state directory: the defaults would set no limits.
    let state_dir = StateDir::at(folder.path()).unwrap();
    assert!(WorkstationSettings::load(None, &state_dir).is_err());
}
