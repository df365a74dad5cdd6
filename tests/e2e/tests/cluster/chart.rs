//! The chart: what its values make of it, and which it refuses; and the plain manifests, which are made from it.

use partage_agent::settings;
use partage_core::dialect::Dialect;
use partage_core::model::Policy;
use partage_testkit::binaries::{Settings, helm};
use partage_testkit::manifests::Manifest;
use partage_testkit::pages::Page;
use partage_testkit::skip_or_fail;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

#[test]
fn plain_manifests_are_those_of_the_chart() {
    for manifest in Manifest::ALL {
        let rendered = match manifest.render(&Settings::from_environment()) {
            Ok(rendered) => rendered,
            Err(missing) => return skip_or_fail(&missing),
        };
        let path = manifest.path();
        let there = fs::read_to_string(&path).unwrap();
        assert!(there == rendered, "{} is not what the chart makes: run `make manifests`", path.display());
    }
}

fn chart() -> PathBuf {
    Manifest::Real.path().with_file_name("chart").join("partage")
}

/// `helm template` with these values.
fn template(values: &[&str]) -> Option<Output> {
    template_with(&values.iter().flat_map(|value| ["--set", value]).collect::<Vec<_>>())
}

fn template_with(arguments: &[&str]) -> Option<Output> {
    let helm = match helm(&Settings::from_environment()) {
        Ok(helm) => helm,
        Err(missing) => {
            skip_or_fail(&missing);
            return None;
        }
    };
    let mut command = Command::new(helm);
    command.args(["template", "partage"]).arg(chart()).args([
        "--namespace",
        "gpus",
        "--kube-version",
        "1.36.4",
    ]);
    Some(command.args(arguments).output().unwrap())
}

/// The files of values that the page shows.
#[test]
fn values_of_the_page_are_taken() {
    let page = Page::read("docs/install.md", &[]).unwrap();
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
fn values_say_what_they_say() {
    let text = |values: &[&str]| {
        let output = template(values)?;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Some(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let Some(usual) = text(&[]) else { return };
    assert!(usual.contains("privileged: true") && usual.contains("scheme: HTTPS"), "{usual}");
    assert!(!usual.contains(", delete]"), "nobody is deleted unless somebody asks for it");
    assert!(usual.contains("'system:serviceaccount:gpus:partage-node'"), "{usual}");
    for words in [
        "priorityClassName: system-node-critical\n",
        "startupProbe:\n            httpGet:\n              path: /healthz\n",
        "livenessProbe:\n            httpGet:\n              path: /healthz\n",
        "readinessProbe:\n            httpGet:\n              path: /readyz\n",
        "limits:\n              memory: 256Mi\n            requests:\n              cpu: 20m\n              memory: 48Mi\n",
    ] {
        assert!(usual.contains(words), "{words}: {usual}");
    }
    let simulated = text(&["settings.driver=simulated"]).unwrap();
    assert!(!simulated.contains("privileged: true") && !simulated.contains("path: /dev}"), "{simulated}");
    // Who is not privileged has to say that it may touch the node's folders; who is does not.
    assert!(simulated.contains("type: spc_t") && !usual.contains("spc_t"), "{simulated}");
    // One node with a real GPU is enough: there is one DaemonSet.
    let mixed =
        ["settings.driver=simulated", "settings.nodes[0].names={gpu-*}", "settings.nodes[0].driver=nvidia"];
    assert!(text(&mixed).unwrap().contains("privileged: true"));
    let open = text(&["settings.metrics.anonymous=true", "settings.metrics.address=0.0.0.0:9000"]).unwrap();
    assert!(open.contains("scheme: HTTP\n") && open.contains("containerPort: 9000"), "{open}");
    let both_families = text(&["settings.metrics.address=[::]:9001"]).unwrap();
    assert!(both_families.contains("containerPort: 9001"), "{both_families}");
    let labelled = text(&[
        "settings.labels.gpushare=yes",
        "settings.nodes[0].names={a}",
        "settings.nodes[0].labels.b=c",
    ]);
    assert!(labelled.is_none_or(|text| text.contains("k in ['b', 'gpushare']")));
    let evicting = text(&["settings.onBypass=evict"]).unwrap();
    assert!(evicting.contains("verbs: [get, list, watch, patch, delete]"), "{evicting}");
    let trusting = text(&["admission.alsoTrusted={volcano}"]).unwrap();
    assert!(trusting.contains("partage-node', 'volcano'])"), "{trusting}");
    assert!(
        usual.contains("- --cdi\n            - /run/cdi\n") && !usual.contains("--runtime-socket"),
        "{usual}"
    );
    let elsewhere = text(&["runtimeSocket=/run/other.sock", "cdi=/etc/cdi"]).unwrap();
    for words in [
        "- --runtime-socket\n            - /host/run/other.sock\n",
        "- --cdi\n            - /etc/cdi\n",
        "{name: cdi, mountPath: /etc/cdi}",
        "{name: cdi, hostPath: {path: /etc/cdi, type: DirectoryOrCreate}}",
    ] {
        assert!(elsewhere.contains(words), "{words}: {elsewhere}");
    }
    assert!(text(&["withdraw=true", "cdi=/etc/cdi"]).unwrap().contains("- /host/etc/cdi\n"));
    // In a file of values `off` is no word, but a truth value.
    for off in ["settings.resize=off", "settings.resize=false", "settings.nodes[0].resize=false"] {
        let text = text(&[off, "settings.nodes[0].names={a}"]).unwrap();
        assert!(text.contains("resize: \"off\"\n"), "{off}: {text}");
    }
    assert!(!text(&["admission.enabled=false"]).unwrap().contains("ValidatingAdmissionPolicy"));
}

#[test]
fn wrong_values_are_refused() {
    for (value, words) in [
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
        // Kubelet would probe the agent in vain.
        ("settings.metrics.address=127.0.0.1:9394", "does not match pattern"),
        ("settings.labels.node\\.kubernetes\\.io/gpu=yes", "invalid propertyName"),
        ("settings.resize=maybe", "value must be one of 'on', 'off', true, false"),
        ("runtimeSocket=unix:///run/other.sock", "does not match pattern"),
        ("cdi=run/cdi", "does not match pattern"),
        // It would end a string of the policy.
        ("admission.alsoTrusted={it's me}", "does not match pattern"),
        ("settings.labels.it's=me", "does not match pattern"),
    ] {
        let Some(output) = template(&[value]) else { return };
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(words), "{value}: {said}");
    }
}

/// What the agent says of a settings file.
fn agent_takes(text: &str) -> Result<(), String> {
    settings::Settings::parse(text, &"gpu-1".into()).map(drop).map_err(|error| error.to_string())
}

/// The keys that the agent knows, as it names them to who writes one that is none.
fn keys_of_the_agent(text: &str) -> BTreeSet<String> {
    let said = agent_takes(text).unwrap_err();
    let (_, list) = said.split_once("expected one of ").expect(&said);
    let list = list.split(" at line ").next().unwrap();
    list.split(", ").map(|key| key.trim_matches('`').to_string()).collect()
}

/// What helm lets through must not be refused on the nodes, and the other way round: every key, and the ends of every range.
#[test]
fn the_schema_says_what_the_agent_says() {
    let schema = fs::read_to_string(chart().join("values.schema.json")).unwrap();
    let schema: Value = serde_json::from_str(&schema).unwrap();
    let (top, one) = (&schema["properties"]["settings"]["properties"], &schema["$defs"]);
    let of_nodes = &top["nodes"]["items"]["properties"];
    let keys = |of: &Value| of.as_object().unwrap().keys().cloned().collect::<BTreeSet<String>>();
    assert_eq!(keys(top), keys_of_the_agent("none: 1"));
    let mut known = keys_of_the_agent("nodes:\n- names: [a]\n  none: 1\n");
    assert!(known.remove("metrics"), "all agents have one port");
    assert_eq!(keys(of_nodes), known);
    known.remove("names");
    for key in &known {
        assert_eq!(top[key], of_nodes[key], "{key} is the same everywhere");
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
            let said = agent_takes(&text);
            assert_eq!(said.is_ok(), right, "{text}: {said:?}");
        }
    }
    let longest = usize::try_from(one["vcudaDomains"]["items"]["maxLength"].as_u64().unwrap()).unwrap();
    for (length, right) in [(longest, true), (longest + 1, false)] {
        let said = agent_takes(&format!("vcudaDomains: [{}]", "a".repeat(length)));
        assert_eq!(said.is_ok(), right, "{length}: {said:?}");
    }

    let words = |of: &Value| -> Vec<String> {
        of["enum"].as_array().unwrap().iter().map(|word| word.as_str().unwrap().to_string()).collect()
    };
    assert_eq!(words(&one["dialects"]["items"]), Dialect::ALL.map(Dialect::name));
    assert_eq!(words(&one["policy"]), Policy::ALL.map(Policy::name));
    for key in ["gpushareUnit", "onBypass", "driver"] {
        for word in words(&one[key]) {
            assert_eq!(agent_takes(&format!("{key}: {word}")), Ok(()));
        }
    }
}
