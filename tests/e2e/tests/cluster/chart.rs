//! The chart: what its values change, and which it refuses; and the plain manifests, which are generated from it.

use partage_agent::settings;
use partage_core::dialect::Dialect;
use partage_core::model::PlacementPolicy;
use partage_testkit::binaries::{BuildPaths, helm};
use partage_testkit::doc_pages::DocPage;
use partage_testkit::manifests::DeployManifest;
use partage_testkit::skip_or_fail;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

#[test]
fn plain_manifests_match_the_chart() {
    for manifest in DeployManifest::ALL {
        let rendered = match manifest.render(&BuildPaths::from_environment()) {
            Ok(rendered) => rendered,
            Err(missing) => return skip_or_fail(&missing),
        };
        let path = manifest.path();
        let there = fs::read_to_string(&path).unwrap();
        assert!(there == rendered, "{} differs from the chart: run `make manifests`", path.display());
    }
}

fn chart_dir() -> PathBuf {
    DeployManifest::Real.path().with_file_name("chart").join("partage")
}

/// Runs `helm template` with these values.
fn template(values: &[&str]) -> Option<Output> {
    template_with(&values.iter().flat_map(|value| ["--set", value]).collect::<Vec<_>>())
}

fn template_with(arguments: &[&str]) -> Option<Output> {
    let helm = match helm(&BuildPaths::from_environment()) {
        Ok(helm) => helm,
        Err(missing) => {
            skip_or_fail(&missing);
            return None;
        }
    };
    let mut command = Command::new(helm);
    command.args(["template", "partage"]).arg(chart_dir()).args([
        "--namespace",
        "gpus",
        "--kube-version",
        "1.36.4",
    ]);
    Some(command.args(arguments).output().unwrap())
}

/// The files of values that the page shows.
#[test]
fn values_in_the_documentation_are_accepted() {
    let page = DocPage::read("docs/install.md", &[]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for (heading, words) in [
        ("Settings", &["sharesPerGpu: 40\n", "- inference-*\n", "awsSlots: 48\n", "k in ['gpushare']"][..]),
        (
            "Metrics",
            &["name: partage-metrics-reader\nsubjects:\n  - kind: ServiceAccount\n    name: prometheus\n"],
        ),
    ] {
        let file = folder.path().join("values.yaml");
        fs::write(&file, &page.blocks(heading, "yaml")[0]).unwrap();
        let Some(output) = template_with(&["--values", file.to_str().unwrap()]) else { return };
        assert!(output.status.success(), "{heading}: {}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        for word in words {
            assert!(text.contains(word), "{heading}, {word}: {text}");
        }
    }
}

#[test]
fn values_change_the_rendered_manifests() {
    let text = |values: &[&str]| {
        let output = template(values)?;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Some(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let Some(defaults) = text(&[]) else { return };
    assert!(defaults.contains("privileged: true") && defaults.contains("scheme: HTTPS"), "{defaults}");
    assert!(!defaults.contains(", delete]"), "the permission to delete pods is only given on request");
    assert!(defaults.contains("'system:serviceaccount:gpus:partage-node'"), "{defaults}");
    for expected in [
        "priorityClassName: system-node-critical\n",
        "startupProbe:\n            httpGet:\n              path: /healthz\n",
        "livenessProbe:\n            httpGet:\n              path: /healthz\n",
        "readinessProbe:\n            httpGet:\n              path: /readyz\n",
        "limits:\n              memory: 256Mi\n            requests:\n              cpu: 20m\n              memory: 48Mi\n",
    ] {
        assert!(defaults.contains(expected), "{expected}: {defaults}");
    }
    let simulated = text(&["settings.driver=simulated"]).unwrap();
    assert!(!simulated.contains("privileged: true") && !simulated.contains("path: /dev}"), "{simulated}");
    // An unprivileged container must declare its access to the node's directories; a privileged one need not.
    assert!(simulated.contains("type: spc_t") && !defaults.contains("spc_t"), "{simulated}");
    // One node with a real GPU is enough: there is one DaemonSet.
    let mixed =
        ["settings.driver=simulated", "settings.nodes[0].names={gpu-*}", "settings.nodes[0].driver=nvidia"];
    assert!(text(&mixed).unwrap().contains("privileged: true"));
    let open = text(&["settings.metrics.anonymous=true", "settings.metrics.address=0.0.0.0:9000"]).unwrap();
    assert!(open.contains("scheme: HTTP\n") && open.contains("containerPort: 9000"), "{open}");
    let both_families = text(&["settings.metrics.address=[::]:9001"]).unwrap();
    assert!(both_families.contains("containerPort: 9001"), "{both_families}");
    let labeled = text(&[
        "settings.labels.gpushare=yes",
        "settings.nodes[0].names={a}",
        "settings.nodes[0].labels.b=c",
    ]);
    assert!(labeled.is_none_or(|text| text.contains("k in ['b', 'gpushare']")));
    let evicting = text(&["settings.onBypass=evict"]).unwrap();
    assert!(evicting.contains("verbs: [get, list, watch, patch, delete]"), "{evicting}");
    let trusting = text(&["admission.alsoTrusted={volcano}"]).unwrap();
    assert!(trusting.contains("partage-node', 'volcano'])"), "{trusting}");
    assert!(
        defaults.contains("- --cdi-dir\n            - /run/cdi\n") && !defaults.contains("--runtime-socket"),
        "{defaults}"
    );
    let elsewhere = text(&["runtimeSocket=/run/other.sock", "cdiDir=/etc/cdi"]).unwrap();
    for expected in [
        "- --runtime-socket\n            - /host/run/other.sock\n",
        "- --cdi-dir\n            - /etc/cdi\n",
        "{name: cdi, mountPath: /etc/cdi}",
        "{name: cdi, hostPath: {path: /etc/cdi, type: DirectoryOrCreate}}",
    ] {
        assert!(elsewhere.contains(expected), "{expected}: {elsewhere}");
    }
    assert!(text(&["cleanup=true", "cdiDir=/etc/cdi"]).unwrap().contains("- /host/etc/cdi\n"));
    // In a YAML file `off` is a boolean, not a string.
    for off in ["settings.resize=off", "settings.resize=false", "settings.nodes[0].resize=false"] {
        let text = text(&[off, "settings.nodes[0].names={a}"]).unwrap();
        assert!(text.contains("resize: \"off\"\n"), "{off}: {text}");
    }
    assert!(!text(&["admission.enabled=false"]).unwrap().contains("ValidatingAdmissionPolicy"));
}

#[test]
fn invalid_values_are_refused() {
    for (value, expected) in [
        ("setings.driver=nvidia", "additional properties 'setings' not allowed"),
        ("settings.driver=amd", "value must be one of 'nvidia', 'simulated'"),
        ("settings.sharesPerGPU=3", "additional properties 'sharesPerGPU' not allowed"),
        ("settings.awsSlots=49", "maximum: got 49, want 48"),
        ("settings.nodes[0].driver=nvidia", "missing property 'names'"),
        (
            "settings.nodes[0].names={a},settings.nodes[0].sharesPerGPU=3",
            "additional properties 'sharesPerGPU' not allowed",
        ),
        ("settings.nodes[0].names={a},settings.nodes[0].awsSlots=49", "maximum: got 49, want 48"),
        // There is one DaemonSet, with one port.
        (
            "settings.nodes[0].names={a},settings.nodes[0].metrics.anonymous=true",
            "additional properties 'metrics' not allowed",
        ),
        // Kubelet's probes would not reach the agent.
        ("settings.metrics.address=127.0.0.1:9394", "does not match pattern"),
        ("settings.labels.node\\.kubernetes\\.io/gpu=yes", "invalid propertyName"),
        ("settings.resize=maybe", "value must be one of 'on', 'off', true, false"),
        ("runtimeSocket=unix:///run/other.sock", "does not match pattern"),
        ("cdiDir=run/cdi", "does not match pattern"),
        // It would end a string of the policy.
        ("admission.alsoTrusted={it's me}", "does not match pattern"),
        ("settings.labels.it's=me", "does not match pattern"),
    ] {
        let Some(output) = template(&[value]) else { return };
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && message.contains(expected), "{value}: {message}");
    }
}

/// Returns the agent's error for a settings file.
fn parse_agent_settings(text: &str) -> Result<(), String> {
    settings::AgentSettings::parse(text, &"gpu-1".into()).map(drop).map_err(|error| error.to_string())
}

/// Returns the keys that the agent accepts, from its error message for an unknown key.
fn known_agent_keys(text: &str) -> BTreeSet<String> {
    let message = parse_agent_settings(text).unwrap_err();
    let (_, list) = message.split_once("expected one of ").expect(&message);
    let list = list.split(" at line ").next().unwrap();
    list.split(", ").map(|key| key.trim_matches('`').to_string()).collect()
}

/// Values that helm accepts must not be refused on the nodes, and the other way round: every key, and the ends of every
/// range.
#[test]
fn schema_matches_the_agents_settings() {
    let schema = fs::read_to_string(chart_dir().join("values.schema.json")).unwrap();
    let schema: Value = serde_json::from_str(&schema).unwrap();
    let (top, one) = (&schema["properties"]["settings"]["properties"], &schema["$defs"]);
    let of_nodes = &top["nodes"]["items"]["properties"];
    let keys = |of: &Value| of.as_object().unwrap().keys().cloned().collect::<BTreeSet<String>>();
    assert_eq!(keys(top), known_agent_keys("none: 1"));
    let mut known = known_agent_keys("nodes:\n- names: [a]\n  none: 1\n");
    assert!(known.remove("metrics"), "all agents use the same port");
    assert_eq!(keys(of_nodes), known);
    known.remove("names");
    for key in &known {
        assert_eq!(top[key], of_nodes[key], "{key} has the same schema everywhere");
    }

    for (range, before, after) in [
        (&one["sharesPerGpu"], "sharesPerGpu: ", ""),
        (&one["awsSlots"], "awsSlots: ", ""),
        (&one["volcanoMemoryFactor"], "volcanoMemoryFactor: ", ""),
        (&one["memoryOvercommitPercent"], "memoryOvercommitPercent: ", ""),
        (&one["simulated"]["properties"]["gpus"], "simulated: {gpus: ", "}"),
    ] {
        let end = |name: &str| range[name].as_i64().unwrap();
        let (least, most) = (end("minimum"), end("maximum"));
        for (number, right) in [(least - 1, false), (least, true), (most, true), (most + 1, false)] {
            let text = format!("{before}{number}{after}");
            let output = parse_agent_settings(&text);
            assert_eq!(output.is_ok(), right, "{text}: {output:?}");
        }
    }
    let longest = usize::try_from(one["vcudaDomains"]["items"]["maxLength"].as_u64().unwrap()).unwrap();
    for (length, right) in [(longest, true), (longest + 1, false)] {
        let output = parse_agent_settings(&format!("vcudaDomains: [{}]", "a".repeat(length)));
        assert_eq!(output.is_ok(), right, "{length}: {output:?}");
    }

    let words = |of: &Value| -> Vec<String> {
        of["enum"].as_array().unwrap().iter().map(|word| word.as_str().unwrap().to_string()).collect()
    };
    assert_eq!(words(&one["dialects"]["items"]), Dialect::ALL.map(Dialect::name));
    assert_eq!(words(&one["policy"]), PlacementPolicy::ALL.map(PlacementPolicy::name));
    for key in ["gpushareUnit", "onBypass", "driver"] {
        for word in words(&one[key]) {
            assert_eq!(parse_agent_settings(&format!("{key}: {word}")), Ok(()));
        }
    }
}
