use super::*;
use proptest::prelude::*;

fn parse(text: &str) -> Result<Settings, String> {
    Settings::parse(text, &"gpu-1".into()).map_err(|error| error.to_string())
}

#[test]
fn nothing_written_is_the_default() {
    for text in ["", "\n", "{}", "# only words"] {
        assert_eq!(parse(text), Ok(Settings::default()), "{text:?}");
    }
    assert!(!Settings::default().dialects.contains(&Dialect::Hami), "that is another plugin's resource");
}

#[test]
fn all_keys_are_read() {
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
    assert_eq!(settings.policy, Policy::Spread);
    assert!(settings.extender && settings.metrics.anonymous);
    assert_eq!(settings.resize, Resize::Off);
    assert_eq!(settings.oversubscribe, Oversubscription::Allowed);
    assert_eq!(Settings::default().oversubscribe, Oversubscription::Refused);
    assert_eq!((settings.on_bypass, settings.driver), (OnBypass::Evict, DriverChoice::Simulated));
    assert_eq!(settings.simulated, SimulatedGpus { gpus: 8, model: "H100-SXM5-80GB".into() });
}

#[test]
fn some_nodes_differ_and_the_first_that_names_them_wins() {
    let text = "sharesPerGpu: 5
awsSlots: 3
nodes:
- names: [cpu-*, gpu-1]
  sharesPerGpu: 2
- names: ['*']
  sharesPerGpu: 9
";
    let on = |node: &str| Settings::parse(text, &node.into()).unwrap();
    assert_eq!((on("gpu-1").shares_per_gpu, on("gpu-1").aws_slots), (2, 3));
    assert_eq!(on("other").shares_per_gpu, 9);
}

#[test]
fn what_cannot_be_is_refused_in_words() {
    for (text, words) in [
        ("sharesPerGPU: 3", "sharesPerGPU"),
        ("nodes: [{names: [a], sharesPerGPU: 3}]", "sharesPerGPU"),
        ("nodes: [{names: [], sharesPerGpu: 3}]", "nodes[0].names: names no node"),
        // Of nodes that are none of ours, too.
        (
            "nodes: [{names: [a]}, {names: [b], sharesPerGpu: 0}]",
            "nodes[1].sharesPerGpu: 0 shares of one GPU",
        ),
        ("nodes: [{names: ['*'], dialects: []}]", "nodes[0].dialects: the node would offer nothing"),
        ("nodes: [{names: [b], awsSlots: 49}]", "nodes[0].awsSlots: a GPU split in 49 slots"),
        ("sharesPerGpu: 0\nnodes: [{names: ['*'], sharesPerGpu: 3}]", "sharesPerGpu: 0 shares of one GPU"),
        ("metrics: {port: 3}", "port"),
        ("oversubscribe: yes", "expected one of allowed, refused"),
        ("nodes: [{names: [a], oversubscribe: maybe}]", "maybe"),
        ("sharesPerGpu: 0", "sharesPerGpu: 0 shares of one GPU: write 1 to 1000"),
        ("awsSlots: 49", "awsSlots: a GPU split in 49 slots"),
        ("volcanoMemoryFactor: 0", "volcanoMemoryFactor: "),
        ("memoryOvercommitPercent: 50", "write 100 (none) to 10000"),
        ("dialects: [nativ]", "\"nativ\" is no dialect: write some of native,"),
        ("dialects: []", "dialects: the node would offer nothing"),
        ("dialects: [native, native]", "native is there twice"),
        ("gpushareUnit: KB", "write GiB or MiB"),
        ("vcudaDomains: [kubernetes.io]", "can be no domain"),
        ("vcudaDomains: [A.com]", "can be no domain"),
        (
            "vcudaDomains: [a-very-long-name-of-a-department-of-an-even-longer-company.example.com]",
            "has 70 letters, which makes the path of its plugin's socket longer",
        ),
        ("vcudaDomains: []", "vcuda is spoken in no domain"),
        ("labels: {'a b': c}", "can be no label"),
        ("labels: {a: 'b c'}", "can be no label"),
        ("labels: {kubernetes.io/hostname: a}", "one of Kubernetes' own labels"),
        ("labels: {node.k8s.io/a: b}", "one of Kubernetes' own labels"),
        ("simulated: {model: A1000}", "simulated.model: "),
        ("simulated: {gpus: 0}", "simulated.gpus: 0 simulated GPUs"),
        ("policy: best", "best"),
        ("onBypass: kill", "kill"),
        ("[]", ""),
    ] {
        let error = parse(text).expect_err(text);
        assert!(error.contains(words), "{text}: {error}");
    }
}

proptest! {
    #[test]
    fn any_text_is_settings_or_words(text in ".{0,200}") {
        let _ = parse(&text);
    }
}
