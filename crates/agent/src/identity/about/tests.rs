use super::*;
use partage_kubelet_api::cri::RuntimeHandler;

/// What containerd 2.3.7 told of itself on the test bed.
const CONTAINERD_2_3: &str = include_str!("containerd-2.3.json");

fn asked(name: &str, version: &str, config: Option<&str>) -> About {
    let version = VersionResponse {
        runtime_name: name.into(),
        runtime_version: version.into(),
        ..VersionResponse::default()
    };
    let config = config.map(|config| ("config".to_string(), config.to_string()));
    about(&version, &StatusResponse { info: config.into_iter().collect(), ..StatusResponse::default() })
}

fn containerd(version: &str, config: &str) -> About {
    asked("containerd", version, Some(config))
}

#[test]
fn the_real_containerd_is_read() {
    let about = containerd("v2.3.7", CONTAINERD_2_3);
    assert_eq!(about.cdi, Ok(()));
    assert_eq!(about.cdi_dirs, ["/etc/cdi", "/run/cdi"].map(PathBuf::from));
    assert!(!about.nvidia);
}

#[test]
fn versions_that_believe_checkpoint_images_are_known() {
    for (version, trusts) in
        [("v2.3.7", false), ("2.3.1", true), ("v2.2.4", true), ("2.2.5", false), ("2.1.0-rc.1", true)]
    {
        assert_eq!(containerd(version, "{}").trusts_checkpoints, trusts, "{version}");
    }
    assert!(
        !containerd("v2.0.9", "{}").trusts_checkpoints && !asked("cri-o", "2.2.1", None).trusts_checkpoints
    );
}

#[test]
fn containerd_1_7_has_to_be_told() {
    let off =
        containerd("1.7.24~ds1", r#"{"enableCDI": false, "cdiSpecDirs": ["/etc/cdi", "/var/run/cdi"]}"#);
    assert_eq!(
        off.cdi.unwrap_err(),
        "CDI is off in containerd 1.7.24~ds1: set enable_cdi = true under [plugins.\"io.containerd.grpc.v1.cri\"] in \
         /etc/containerd/config.toml and restart containerd"
    );
    assert_eq!(containerd("v1.7.27-k3s1", r#"{"enableCDI": true}"#).cdi, Ok(()));
    assert!(asked("containerd", "v1.7.27", None).cdi.is_err(), "it is off where nothing is said");
}

#[test]
fn containerd_2_can_be_told_not_to() {
    for on in [r#"{"enableCDI": null}"#, r#"{"enableCDI": true}"#, "{}", "no json"] {
        assert_eq!(containerd("v2.0.0-rc.1", on).cdi, Ok(()), "{on}");
    }
    let off = containerd("2.1.4", r#"{"enableCDI": false}"#).cdi.unwrap_err();
    assert!(off.contains("[plugins.'io.containerd.cri.v1.runtime']"), "{off}");
}

#[test]
fn runtimes_that_cannot_are_refused_in_words() {
    let on = Some(r#"{"enableCDI": true}"#);
    for (name, version, newer) in [
        ("containerd", "1.6.20", "1.7.13"),
        ("containerd", "v1.7.12", "1.7.13"),
        ("cri-o", "1.33.9", "1.34.0"),
        ("cri-o", "1.18.3", "1.34.0"),
    ] {
        let why = asked(name, version, on).cdi.unwrap_err();
        assert!(why.contains(version) && why.contains(&format!("{newer} or newer")), "{why}");
    }
    for (name, version) in [("docker", "29.0.1"), ("", "1.0.0")] {
        let why = asked(name, version, on).cdi.unwrap_err();
        assert!(why.contains("containerd 1.7.13 or newer, or CRI-O 1.34.0 or newer"), "{why}");
    }
}

#[test]
fn cri_o_is_taken_at_its_word_and_what_has_no_number_for_new() {
    for (name, version) in [("cri-o", "1.34.0"), ("cri-o", "1.36.1"), ("containerd", "git-3f2a")] {
        let about = asked(name, version, Some(r#"{"sandboxImage": "pause"}"#));
        assert_eq!((about.cdi, about.cdi_dirs.len(), about.nvidia), (Ok(()), 2, false), "{name} {version}");
    }
}

#[test]
fn folders_are_those_of_the_configuration() {
    let about = containerd("v2.0.0", r#"{"cdiSpecDirs": ["/run/cdi"]}"#);
    assert_eq!(about.cdi_dirs, [PathBuf::from("/run/cdi")]);
    // Nobody means that none are read.
    assert_eq!(containerd("v2.0.0", r#"{"cdiSpecDirs": []}"#).cdi_dirs.len(), 2);
}

#[test]
fn nvidias_runtime_is_seen_wherever_a_pod_may_choose_it() {
    let config = |default: &str, other: &str, binary: &str| {
        format!(
            r#"{{"containerd": {{"defaultRuntimeName": "{default}", "runtimes": {{
                "{other}": {{"options": {{"BinaryName": "{binary}", "SystemdCgroup": true}}}},
                "bare": {{"options": null}}}}}}}}"#
        )
    };
    for (default, other, binary, nvidia) in [
        ("runc", "runc", "", false),
        ("runc", "runc", "/usr/sbin/runc", false),
        ("bare", "kata", "", false),
        ("nvidia", "runc", "", true),
        ("runc", "nvidia", "", true),
        ("runc", "gpu", "/usr/local/nvidia/toolkit/nvidia-container-runtime", true),
        ("runc", "runc", "/usr/bin/nvidia-container-runtime.cdi", true),
        ("runc", "runc", "/opt/nvidia-container-runtime/runc", false),
    ] {
        let said = containerd("v2.0.0", &config(default, other, binary)).nvidia;
        assert_eq!(said, nvidia, "{default} {other} {binary}");
    }
    // Whether it runs what nobody asked it to run.
    let by_default = |default: &str, other: &str, binary: &str| {
        containerd("v2.0.0", &config(default, other, binary)).nvidia_by_default
    };
    assert!(
        by_default("nvidia", "runc", "") && by_default("gpu", "gpu", "/usr/bin/nvidia-container-runtime")
    );
    assert!(!by_default("runc", "nvidia", ""));
}

#[test]
fn nvidias_runtime_is_seen_where_only_its_name_is_told() {
    let version = VersionResponse {
        runtime_name: "cri-o".into(),
        runtime_version: "1.31.0".into(),
        ..VersionResponse::default()
    };
    let with = |names: &[&str]| {
        let handlers = names.iter().map(|name| RuntimeHandler { name: (*name).into() }).collect();
        about(&version, &StatusResponse { runtime_handlers: handlers, ..StatusResponse::default() }).nvidia
    };
    assert!(with(&["", "crun", "nvidia"]) && with(&["nvidia-cdi"]));
    assert!(!with(&["", "crun", "runc"]));
}

#[test]
fn versions_are_read_as_people_write_them() {
    for (said, expected) in [
        ("v2.3.7", Some(Version(2, 3, 7))),
        ("1.7.24~ds1", Some(Version(1, 7, 24))),
        ("v2.0.0-rc.1", Some(Version(2, 0, 0))),
        ("1.31", Some(Version(1, 31, 0))),
        ("1.31-dev", Some(Version(1, 31, 0))),
        ("2.1.4+unknown", Some(Version(2, 1, 4))),
        ("", None),
        ("v", None),
        ("2", None),
        ("99999999999.1", None),
    ] {
        assert_eq!(Version::parse(said), expected, "{said}");
    }
}
