use super::*;
use proptest::prelude::*;

fn parse(text: &str) -> Result<AgentSettings, String> {
    AgentSettings::parse(text, &"gpu-1".into()).map_err(|error| error.to_string())
}

#[test]
fn empty_file_has_the_defaults() {
    for text in ["", "\n", "{}", "# only a comment"] {
        assert_eq!(parse(text), Ok(AgentSettings::default()), "{text:?}");
    }
}

/// Fails for a new dialect: decide whether its resource may belong to another device plugin, as `nvidia.com/gpu` does.
#[test]
fn default_dialects_are_those_whose_resources_no_other_plugin_serves() {
    let expected = [Dialect::Native, Dialect::Gpushare, Dialect::Volcano, Dialect::Vcuda, Dialect::Aws];
    assert_eq!(AgentSettings::default().dialects, expected);
}

#[test]
fn chart_accepts_every_dialect() {
    let schema = include_str!("../../../../deploy/chart/partage/values.schema.json");
    let schema: serde_json::Value = serde_json::from_str(schema).unwrap();
    let accepted = &schema["$defs"]["dialects"]["items"]["enum"];
    assert_eq!(*accepted, serde_json::json!(Dialect::ALL.map(Dialect::name)));
}

#[test]
fn every_key_is_parsed() {
    let settings = parse(
        "dialects: [native, hami]
vcudaDomains: [example.com]
sharesPerGpu: 7
awsSlots: 4
gpushareUnit: MiB
volcanoMemoryFactor: 10
memoryOvercommitPercent: 150
labels: {gpushare: 'true', k8s.amazonaws.com/accelerator: vgpu}
policy: spread
extender: true
resize: off
oversubscribe: allowed
maxPriority: 7
throttleCopies: true
onBypass: evict
driver: simulated
simulated: {gpus: 8, model: H100-SXM5-80GB}
metrics: {address: '127.0.0.1:9000', anonymous: true}
",
    )
    .unwrap();
    assert_eq!(settings.dialects, [Dialect::Native, Dialect::Hami]);
    assert_eq!(settings.vcuda_domains, ["example.com"]);
    assert_eq!((settings.shares_per_gpu, settings.aws_slots, settings.volcano_memory_factor), (7, 4, 10));
    assert_eq!(settings.gpushare_unit, MemoryUnit::Mib);
    assert_eq!(Some(settings.memory_overcommit), Overcommit::percent(150));
    assert_eq!(settings.labels["gpushare"], "true");
    assert_eq!(settings.policy, PlacementPolicy::Spread);
    assert!(settings.extender && settings.metrics.anonymous);
    assert_eq!(settings.resize, ResizePolicy::Off);
    assert_eq!(settings.oversubscribe, Oversubscription::Allowed);
    assert_eq!(AgentSettings::default().oversubscribe, Oversubscription::Refused);
    assert_eq!((settings.max_priority, settings.throttle_copies), (7, true));
    assert_eq!(AgentSettings::default().max_priority, 0, "a tenant must not outrank others at will");
    assert_eq!((settings.on_bypass, settings.driver), (BypassAction::Evict, DriverSetting::Simulated));
    assert_eq!(settings.simulated, SimulatedGpus { gpus: 8, model: "H100-SXM5-80GB".into() });
}

#[test]
fn first_override_that_names_a_node_applies() {
    let text = "sharesPerGpu: 5
awsSlots: 3
nodes:
- names: [cpu-*, gpu-1]
  sharesPerGpu: 2
- names: ['*']
  sharesPerGpu: 9
";
    let on = |node: &str| AgentSettings::parse(text, &node.into()).unwrap();
    assert_eq!((on("gpu-1").shares_per_gpu, on("gpu-1").aws_slots), (2, 3));
    assert_eq!(on("other").shares_per_gpu, 9);
}

#[test]
fn invalid_settings_are_refused_with_the_key() {
    for (text, expected) in [
        ("sharesPerGPU: 3", "sharesPerGPU"),
        ("nodes: [{names: [a], sharesPerGPU: 3}]", "sharesPerGPU"),
        ("nodes: [{names: [], sharesPerGpu: 3}]", "nodes[0].names: the list is empty"),
        // Overrides of other nodes are checked, too.
        (
            "nodes: [{names: [a]}, {names: [b], sharesPerGpu: 0}]",
            "nodes[1].sharesPerGpu: 0 shares of one GPU",
        ),
        ("nodes: [{names: ['*'], dialects: []}]", "nodes[0].dialects: the node would offer nothing"),
        ("nodes: [{names: [b], awsSlots: 49}]", "nodes[0].awsSlots: 49 slots per GPU"),
        ("sharesPerGpu: 0\nnodes: [{names: ['*'], sharesPerGpu: 3}]", "sharesPerGpu: 0 shares of one GPU"),
        ("metrics: {port: 3}", "port"),
        ("oversubscribe: yes", "expected one of allowed, refused"),
        ("nodes: [{names: [a], oversubscribe: maybe}]", "maybe"),
        ("maxPriority: 11", "maxPriority: 11: write 0 (priorities are ignored) to 10"),
        ("nodes: [{names: [a], maxPriority: 11}]", "nodes[0].maxPriority: 11"),
        ("throttleCopies: allowed", "invalid boolean"),
        ("sharesPerGpu: 0", "sharesPerGpu: 0 shares of one GPU: write 1 to 1000"),
        ("awsSlots: 49", "awsSlots: 49 slots per GPU"),
        ("volcanoMemoryFactor: 0", "volcanoMemoryFactor: "),
        ("memoryOvercommitPercent: 50", "write 100 (none) to 10000"),
        ("dialects: [nativ]", "\"nativ\" is not a dialect: use some of native,"),
        ("dialects: []", "dialects: the node would offer nothing"),
        ("dialects: [native, native]", "native is listed twice"),
        ("gpushareUnit: KB", "write GiB or MiB"),
        ("vcudaDomains: [kubernetes.io]", "is not a valid domain"),
        ("vcudaDomains: [A.com]", "is not a valid domain"),
        (
            "vcudaDomains: [a-very-long-name-of-a-department-of-an-even-longer-company.example.com]",
            "has 70 characters, which makes the path of its plugin's socket longer",
        ),
        ("vcudaDomains: []", "vcuda has no domain"),
        ("labels: {'a b': c}", "is not a valid node label"),
        ("labels: {a: 'b c'}", "is not a valid node label"),
        ("labels: {kubernetes.io/hostname: a}", "is reserved for Kubernetes"),
        ("labels: {node.k8s.io/a: b}", "is reserved for Kubernetes"),
        ("simulated: {model: A1000}", "simulated.model: "),
        ("simulated: {gpus: 0}", "simulated.gpus: 0 simulated GPUs"),
        ("policy: best", "best"),
        ("onBypass: kill", "kill"),
        ("[]", ""),
    ] {
        let error = parse(text).expect_err(text);
        assert!(error.contains(expected), "{text}: {error}");
    }
}

proptest! {
    #[test]
    fn any_text_is_parsed_or_refused(text in ".{0,200}") {
        let _ = parse(&text);
    }
}
