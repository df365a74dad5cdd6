use super::*;

#[test]
fn reads_any_domain() {
    for domain in ["tencent.com", "inspur.com", "gpu.example"] {
        let reading = read_one(json!({
            format!("{domain}/vcuda-core"): 50, format!("{domain}/vcuda-memory"): 30,
        }));
        assert_eq!(want(&reading), parts(1, mib(7680), percent(50)));
        assert_eq!(reading.containers[0].dialect, Some(Dialect::Vcuda));
    }
    let reading = read_one(json!({"a.com/vcuda-core": 50, "a.com/vcuda-memory": 1, "b.com/vcuda-memory": 1}));
    assert_eq!(message(&reading), "asks under several domains, a.com and b.com: keep one");
}

#[test]
fn v1_50_cores_and_30_blocks() {
    let reading = read_one(json!({"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 30}));
    assert_eq!(want(&reading), parts(1, MemoryAsk::Exactly(Bytes(8_053_063_680)), percent(50)));
}

#[test]
fn a7_150_cores_are_refused_in_words() {
    let reading = read_one(json!({"tencent.com/vcuda-core": 150, "tencent.com/vcuda-memory": 4}));
    assert_eq!(
        message(&reading),
        "150 is neither a part of a GPU nor whole ones: write 1 to 99 for a part of one GPU or a multiple of 100 for whole GPUs"
    );
    assert_eq!(reading.problems[0].field, "tencent.com/vcuda-core");
    assert_eq!((reading.containers[0].dialect, reading.containers[0].want), (Some(Dialect::Vcuda), None));
    assert_eq!(reading.ask.asks, []);
}

#[test]
fn a16_is_gpu() {
    let is_gpu = |cores: u64, blocks: u64| {
        let reading = read_one(json!({"tencent.com/vcuda-core": cores, "tencent.com/vcuda-memory": blocks}));
        (reading.containers[0].want.is_some(), reading.problems.len())
    };
    assert_eq!(is_gpu(0, 5), (false, 1));
    assert_eq!(is_gpu(50, 0), (false, 1));
    assert_eq!(is_gpu(50, 1), (true, 0));
    assert_eq!(is_gpu(100, 0), (true, 0));
    assert_eq!(is_gpu(0, 0), (false, 0));
    // Upstream adds the two up to a whole GPU that neither gets.
    let half = |name: &str| json!({"name": name, "resources": {"limits": {"tencent.com/vcuda-core": 50}}});
    let reading = read_pod(json!({}), vec![half("a"), half("b")]);
    assert_eq!(reading.ask.asks, []);
    assert_eq!(
        reading.problems[0].message,
        "50 % of a GPU needs memory too, or nothing is given: add tencent.com/vcuda-memory, in blocks of 256 MiB"
    );
}

#[test]
fn whole_cards_are_held_to_the_memory_they_ask() {
    let reading = read_one(json!({"inspur.com/vcuda-core": 200, "inspur.com/vcuda-memory": 60}));
    let limit = MemoryAsk::AtMost(Bytes::gib(15).unwrap());
    assert_eq!(want(&reading), WantedGpus { count: 2, part: whole_gpu(limit) });
    let reading = read_one(json!({"inspur.com/vcuda-core": 100}));
    assert_eq!(want(&reading), WantedGpus { count: 1, part: whole_gpu(MemoryAsk::All) });
    let reading = read_one(json!({"inspur.com/vcuda-core": 1_000_000}));
    assert_eq!(message(&reading), "10000 GPUs are more than one container can have: ask for 16 at the most");
}

fn limited(limit: &str, cores: u32) -> Reading {
    let amounts = json!({"tencent.com/vcuda-core": cores, "tencent.com/vcuda-memory": 1});
    read_one_in(&Settings::default(), json!({"tencent.com/vcuda-core-limit": limit}), amounts)
}

#[test]
fn v2_the_limit_is_a_ceiling_clamped_to_100() {
    let ceiling = |limit| want(&limited(limit, 50)).part.ceiling;
    assert_eq!(ceiling("80"), Cores::percent(80));
    assert_eq!(ceiling("50"), Cores::percent(50));
    assert_eq!(ceiling("150"), Cores::percent(100));
    assert_eq!(want(&limited("100", 200)).part.ceiling, None);
}

#[test]
fn a_limit_that_cannot_be_met_is_refused() {
    assert_eq!(
        message(&limited("half", 50)),
        "\"half\" is no percentage: write a whole number from 1 to 100"
    );
    assert_eq!(message(&limited("30", 50)), "30 % is less than the 50 % asked: write that or more");
    assert_eq!(message(&limited("30", 200)), "30 % is less than the 100 % asked: write that or more");
    let amounts = json!({"inspur.com/vcuda-core": 10, "inspur.com/vcuda-memory": 1});
    let reading = read_one_in(&Settings::default(), json!({"tencent.com/vcuda-core-limit": "80"}), amounts);
    assert_eq!(message(&reading), "no container asks under this domain: write the domain of its resources");
}

#[test]
fn a_limit_is_for_the_parts_beside_whole_cards() {
    let container = |name: &str, cores: u32| json!({"name": name, "resources": {"limits": {"a.com/vcuda-core": cores, "a.com/vcuda-memory": 1}}});
    let annotations = json!({"a.com/vcuda-core-limit": "80"});
    let reading = read_pod(annotations, vec![container("whole", 200), container("part", 50)]);
    assert_eq!(reading.problems, []);
    let ceilings: Vec<_> = reading.ask.asks.iter().map(|ask| ask.want.part.ceiling).collect();
    assert_eq!(ceilings, [None, Cores::percent(80)]);
}
