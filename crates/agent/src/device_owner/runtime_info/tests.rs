use super::*;
use partage_kubelet_api::cri::RuntimeHandler;

/// The configuration that containerd 2.3.7 reports on the test bed.
const CONTAINERD_2_3: &str = include_str!("containerd-2.3.json");

fn runtime(name: &str, version: &str, config: Option<&str>) -> RuntimeInfo {
    let version = VersionResponse {
        runtime_name: name.into(),
        runtime_version: version.into(),
        ..VersionResponse::default()
    };
    let config = config.map(|config| ("config".to_string(), config.to_string()));
    RuntimeInfo::new(
        &version,
        &StatusResponse { info: config.into_iter().collect(), ..StatusResponse::default() },
    )
}

fn containerd(version: &str, config: &str) -> RuntimeInfo {
    runtime("containerd", version, Some(config))
}

#[test]
fn configuration_of_a_real_containerd_is_parsed() {
    let info = containerd("v2.3.7", CONTAINERD_2_3);
    assert_eq!(info.cdi, Ok(()));
    assert_eq!(info.cdi_dirs, ["/etc/cdi", "/run/cdi"].map(PathBuf::from));
    assert!(!info.nvidia);
}

#[test]
fn versions_vulnerable_to_checkpoint_images_are_recognized() {
    for (version, trusts) in
        [("v2.3.7", false), ("2.3.1", true), ("v2.2.4", true), ("2.2.5", false), ("2.1.0-rc.1", true)]
    {
        assert_eq!(containerd(version, "{}").trusts_checkpoints, trusts, "{version}");
    }
    assert!(
        !containerd("v2.0.9", "{}").trusts_checkpoints && !runtime("cri-o", "2.2.1", None).trusts_checkpoints
    );
}

#[test]
fn containerd_1_7_needs_cdi_to_be_enabled() {
    let off =
        containerd("1.7.24~ds1", r#"{"enableCDI": false, "cdiSpecDirs": ["/etc/cdi", "/var/run/cdi"]}"#);
    assert_eq!(
        off.cdi.unwrap_err().to_string(),
        "CDI is off in containerd 1.7.24~ds1: set enable_cdi = true under [plugins.\"io.containerd.grpc.v1.cri\"] in \
         /etc/containerd/config.toml and restart containerd"
    );
    assert_eq!(containerd("v1.7.27-k3s1", r#"{"enableCDI": true}"#).cdi, Ok(()));
    assert!(runtime("containerd", "v1.7.27", None).cdi.is_err(), "CDI is disabled by default");
}

#[test]
fn containerd_2_has_cdi_unless_it_is_disabled() {
    for on in [r#"{"enableCDI": null}"#, r#"{"enableCDI": true}"#, "{}", "no json"] {
        assert_eq!(containerd("v2.0.0-rc.1", on).cdi, Ok(()), "{on}");
    }
    let off = containerd("2.1.4", r#"{"enableCDI": false}"#).cdi.unwrap_err().to_string();
    assert!(off.contains("[plugins.'io.containerd.cri.v1.runtime']"), "{off}");
}

#[test]
fn unsupported_runtime_is_refused_with_the_version_to_install() {
    let on = Some(r#"{"enableCDI": true}"#);
    for (name, version, newer) in [
        ("containerd", "1.6.20", "1.7.13"),
        ("containerd", "v1.7.12", "1.7.13"),
        ("cri-o", "1.33.9", "1.34.0"),
        ("cri-o", "1.18.3", "1.34.0"),
    ] {
        let error = runtime(name, version, on).cdi.unwrap_err().to_string();
        assert!(error.contains(version) && error.contains(&format!("{newer} or newer")), "{error}");
    }
    for (name, version) in [("docker", "29.0.1"), ("", "1.0.0")] {
        let error = runtime(name, version, on).cdi.unwrap_err().to_string();
        assert!(error.contains("containerd 1.7.13 or newer, or CRI-O 1.34.0 or newer"), "{error}");
    }
}

#[test]
fn cri_o_and_a_version_without_numbers_are_accepted() {
    for (name, version) in [("cri-o", "1.34.0"), ("cri-o", "1.36.1"), ("containerd", "git-3f2a")] {
        let info = runtime(name, version, Some(r#"{"sandboxImage": "pause"}"#));
        assert_eq!((info.cdi, info.cdi_dirs.len(), info.nvidia), (Ok(()), 2, false), "{name} {version}");
    }
}

#[test]
fn cdi_directories_are_those_of_the_configuration() {
    let info = containerd("v2.0.0", r#"{"cdiSpecDirs": ["/run/cdi"]}"#);
    assert_eq!(info.cdi_dirs, [PathBuf::from("/run/cdi")]);
    // An empty list stands for the defaults.
    assert_eq!(containerd("v2.0.0", r#"{"cdiSpecDirs": []}"#).cdi_dirs.len(), 2);
}

#[test]
fn nvidia_runtime_is_recognized_by_name_or_program() {
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
        let found = containerd("v2.0.0", &config(default, other, binary)).nvidia;
        assert_eq!(found, nvidia, "{default} {other} {binary}");
    }
    // As the default handler it also runs containers that did not choose it.
    let by_default = |default: &str, other: &str, binary: &str| {
        containerd("v2.0.0", &config(default, other, binary)).nvidia_by_default
    };
    assert!(
        by_default("nvidia", "runc", "") && by_default("gpu", "gpu", "/usr/bin/nvidia-container-runtime")
    );
    assert!(!by_default("runc", "nvidia", ""));
}

#[test]
fn nvidia_runtime_is_recognized_among_the_reported_handlers() {
    let version = VersionResponse {
        runtime_name: "cri-o".into(),
        runtime_version: "1.31.0".into(),
        ..VersionResponse::default()
    };
    let with = |names: &[&str]| {
        let handlers = names.iter().map(|name| RuntimeHandler { name: (*name).into() }).collect();
        RuntimeInfo::new(
            &version,
            &StatusResponse { runtime_handlers: handlers, ..StatusResponse::default() },
        )
        .nvidia
    };
    assert!(with(&["", "crun", "nvidia"]) && with(&["nvidia-cdi"]));
    assert!(!with(&["", "crun", "runc"]));
}

#[test]
fn versions_are_parsed_in_every_usual_form() {
    for (text, expected) in [
        ("v2.3.7", Some(RuntimeVersion(2, 3, 7))),
        ("1.7.24~ds1", Some(RuntimeVersion(1, 7, 24))),
        ("v2.0.0-rc.1", Some(RuntimeVersion(2, 0, 0))),
        ("1.31", Some(RuntimeVersion(1, 31, 0))),
        ("1.31-dev", Some(RuntimeVersion(1, 31, 0))),
        ("2.1.4+unknown", Some(RuntimeVersion(2, 1, 4))),
        ("", None),
        ("v", None),
        ("2", None),
        ("99999999999.1", None),
    ] {
        assert_eq!(RuntimeVersion::parse(text), expected, "{text}");
    }
}
