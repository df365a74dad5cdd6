use super::*;

#[test]
fn any_domain_is_read() {
    for domain in ["tencent.com", "inspur.com", "gpu.example"] {
        let reading = read_one(json!({
            format!("{domain}/vcuda-core"): 50, format!("{domain}/vcuda-memory"): 30,
        }));
        assert_eq!(want(&reading), shares(1, mib(7680), percent(50)));
        assert_eq!(reading.containers[0].dialect, Some(Dialect::Vcuda));
    }
    let reading = read_one(json!({"a.com/vcuda-core": 50, "a.com/vcuda-memory": 1, "b.com/vcuda-memory": 1}));
    assert_eq!(message(&reading), "uses several domains, a.com and b.com: keep one");
}

#[test]
fn v1_50_cores_with_30_blocks_are_read() {
    let reading = read_one(json!({"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 30}));
    assert_eq!(want(&reading), shares(1, MemoryAsk::Exactly(Bytes(8_053_063_680)), percent(50)));
}

#[test]
fn a7_150_cores_are_a_problem() {
    let reading = read_one(json!({"tencent.com/vcuda-core": 150, "tencent.com/vcuda-memory": 4}));
    assert_eq!(
        message(&reading),
        "150 is neither a share of one GPU nor whole GPUs: write 1 to 99 for a share or a multiple of 100 for whole GPUs"
    );
    assert_eq!(reading.problems[0].field, "tencent.com/vcuda-core");
    assert_eq!((reading.containers[0].dialect, reading.containers[0].want), (Some(Dialect::Vcuda), None));
    assert_eq!(reading.ask.asks, []);
}

#[test]
fn a16_requests_without_cores_or_memory_are_problems() {
    let is_gpu = |cores: u64, blocks: u64| {
        let reading = read_one(json!({"tencent.com/vcuda-core": cores, "tencent.com/vcuda-memory": blocks}));
        (reading.containers[0].want.is_some(), reading.problems.len())
    };
    assert_eq!(is_gpu(0, 5), (false, 1));
    assert_eq!(is_gpu(50, 0), (false, 1));
    assert_eq!(is_gpu(50, 1), (true, 0));
    assert_eq!(is_gpu(100, 0), (true, 0));
    assert_eq!(is_gpu(0, 0), (false, 0));
    // Upstream adds both to one whole GPU, which neither container receives.
    let half = |name: &str| json!({"name": name, "resources": {"limits": {"tencent.com/vcuda-core": 50}}});
    let reading = read_pod(json!({}), vec![half("a"), half("b")]);
    assert_eq!(reading.ask.asks, []);
    assert_eq!(
        reading.problems[0].message,
        "50 % of a GPU needs memory, too, or nothing is granted: add tencent.com/vcuda-memory, in blocks of 256 MiB"
    );
}

#[test]
fn memory_of_whole_gpus_is_a_limit() {
    let reading = read_one(json!({"inspur.com/vcuda-core": 200, "inspur.com/vcuda-memory": 60}));
    let limit = MemoryAsk::AtMost(Bytes::gib(15).unwrap());
    assert_eq!(want(&reading), WantedGpus { count: 2, share: whole_gpu(limit) });
    let reading = read_one(json!({"inspur.com/vcuda-core": 100}));
    assert_eq!(want(&reading), WantedGpus { count: 1, share: whole_gpu(MemoryAsk::All) });
    let reading = read_one(json!({"inspur.com/vcuda-core": 1_000_000}));
    assert_eq!(message(&reading), "10000 GPUs are more than one container can have: request at most 16");
}

fn limited(limit: &str, cores: u32) -> PodReading {
    let amounts = json!({"tencent.com/vcuda-core": cores, "tencent.com/vcuda-memory": 1});
    read_one_in(&DialectSettings::default(), json!({"tencent.com/vcuda-core-limit": limit}), amounts)
}

#[test]
fn v2_limit_is_a_ceiling_clamped_to_100() {
    let ceiling = |limit| want(&limited(limit, 50)).share.ceiling;
    assert_eq!(ceiling("80"), Cores::percent(80));
    assert_eq!(ceiling("50"), Cores::percent(50));
    assert_eq!(ceiling("150"), Cores::percent(100));
    assert_eq!(want(&limited("100", 200)).share.ceiling, None);
}

#[test]
fn impossible_limit_is_a_problem() {
    assert_eq!(
        message(&limited("half", 50)),
        "\"half\" is not a percentage: write a whole number from 1 to 100"
    );
    assert_eq!(message(&limited("30", 50)), "30 % is less than the 50 % requested: write 50 % or more");
    assert_eq!(message(&limited("30", 200)), "30 % is less than the 100 % requested: write 100 % or more");
    let amounts = json!({"inspur.com/vcuda-core": 10, "inspur.com/vcuda-memory": 1});
    let reading =
        read_one_in(&DialectSettings::default(), json!({"tencent.com/vcuda-core-limit": "80"}), amounts);
    assert_eq!(
        message(&reading),
        "no container has resources of this domain: write the domain of its resources"
    );
}

#[test]
fn limit_applies_to_shares_and_not_to_whole_gpus() {
    let container = |name: &str, cores: u32| json!({"name": name, "resources": {"limits": {"a.com/vcuda-core": cores, "a.com/vcuda-memory": 1}}});
    let annotations = json!({"a.com/vcuda-core-limit": "80"});
    let reading = read_pod(annotations, vec![container("whole", 200), container("part", 50)]);
    assert_eq!(reading.problems, []);
    let ceilings: Vec<_> = reading.ask.asks.iter().map(|ask| ask.want.share.ceiling).collect();
    assert_eq!(ceilings, [None, Cores::percent(80)]);
}
