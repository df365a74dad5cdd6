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
    let message = Settings::from_yaml(text).unwrap_err().to_string();
    assert!(!message.is_empty());
    message
}

#[test]
fn everything_can_be_said() {
    let settings = Settings::from_yaml(
        "driver: simulated
simulated: {gpus: 3, model: T4}
metrics: 127.0.0.1:9999
policy: binpack
default: {memory: 4Gi, cores: 25, mode: hard}
users:
  - {who: root, whole: true}
  - {who: '@root', shares: 4, memory: 20Gi, cores: 150, gpus: 2, whole: false, only: [0, T4]}
  - {who: '*', shares: 1}
reservations:
  - {for: root, gpu: 1, memory: 10Gi, cores: 40}
",
    )
    .unwrap();
    assert_eq!(settings.default.memory, Some(Bytes(4 << 30)));
    assert_eq!(settings.users[1].memory, Some(Bytes(20 << 30)));
    assert_eq!(settings.reservations[0].gpu(&node()), Some(node().gpus[1].uuid.clone()));
    settings.check_against(&node()).unwrap();
    let somebody = Who { uid: 4242, gids: vec![7] };
    assert_eq!(settings.rule(&somebody).unwrap().unwrap().who, Whom::Everybody);
    assert_eq!(settings.rule(&Who { uid: 4242, gids: vec![7, 0] }).unwrap().unwrap().shares, Some(4));
    assert!(settings.rule(&Who { uid: 0, gids: vec![0] }).unwrap().is_none(), "root may everything");
}

#[test]
fn nothing_said_is_everything_allowed() {
    for text in ["", "# nothing\n\n", "{}"] {
        assert_eq!(Settings::from_yaml(text).unwrap(), Settings::default(), "{text:?}");
    }
    assert!(Settings::default().rule(&Who { uid: 4242, gids: vec![] }).unwrap().is_none());
    let strict = Settings::from_yaml("users: [{who: root}]").unwrap();
    assert!(strict.rule(&Who { uid: 4242, gids: vec![] }).is_err(), "who is not named may nothing");
}

#[test]
fn mistakes_are_named() {
    for (text, words) in [
        ("memroy: 4Gi", "memroy"),
        ("default: {memory: 5gb}", "5gb is no amount of memory"),
        ("default: {memory: 4096}", "less than 1 MiB"),
        ("default: {cores: 150}", "150"),
        ("metrics: 0.0.0.0:9464", "other machines"),
        ("metrics: yes please", "no address"),
        ("policy: fastest", "no policy"),
        ("oversubscribe: sometimes", "sometimes"),
        ("users: [{who: nobody-like-that}]", "there is no user nobody-like-that"),
        ("users: [{who: '@nobody-like-that'}]", "there is no group nobody-like-that"),
        ("users: [{who: root, shares: 0}]", "shares: 0"),
        ("users: [{shares: 2}]", "who"),
        ("reservations: [{for: root, gpu: 0}]", "keeps nothing"),
        ("driver: nvida", "nvida"),
        ("default: {mode: hard}", "write cores, too"),
        ("simulated: {gpus: 0}", "0 GPUs cannot be"),
        ("users: [{who: root, cores: many}]", "many is no percentage"),
    ] {
        let message = refused(text);
        assert!(message.contains(words), "{text}: {message}");
    }
    for (text, words) in [
        (
            "reservations: [{for: root, gpu: 7, memory: 1Gi}]",
            "names no GPU, or several; there are 0 (GPU-00000000",
        ),
        ("reservations: [{for: root, gpu: 0, cores: 60}, {for: 7, gpu: 0, cores: 50}]", "more than 100 %"),
        ("default: {memory: 500Gi}", "no GPU of this machine has 500 GiB"),
        (
            "reservations: [{for: root, gpu: 0, memory: 41Gi}]",
            "41 GiB are kept of it in all, which is more than its 40 GiB",
        ),
    ] {
        let message = Settings::from_yaml(text).unwrap().check_against(&node()).unwrap_err().to_string();
        assert!(message.contains(words), "{text}: {message}");
    }
}

#[test]
fn a_file_that_is_named_must_be_there() {
    let folder = tempfile::tempdir().unwrap();
    let home = Home::at(folder.path()).unwrap();
    assert_eq!(
        Settings::load(None, &home).unwrap(),
        (Settings::default(), None),
        "a home has its own or none"
    );
    std::fs::write(folder.path().join("partage.yaml"), "policy: binpack").unwrap();
    assert_eq!(Settings::load(None, &home).unwrap().0.policy, Policy::Binpack);
    let missing = Settings::load(Some(&folder.path().join("x.yaml")), &home).unwrap_err().to_string();
    assert!(missing.contains("x.yaml: cannot be read"), "{missing}");
    let large = folder.path().join("large.yaml");
    std::fs::write(&large, "#".repeat((1 << 20) + 1)).unwrap();
    let large = describe(&Settings::load(Some(&large), &home).unwrap_err());
    assert!(large.contains("larger than 1 MiB"), "{large}");
}
