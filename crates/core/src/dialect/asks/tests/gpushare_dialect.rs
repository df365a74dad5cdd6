use super::*;

#[test]
fn memory_is_in_the_clusters_unit() {
    let amounts = json!({"aliyun.com/gpu-mem": 3});
    let reading = read_one(amounts.clone());
    assert_eq!(want(&reading), parts(1, mib(3072), CoresAsk::Uncounted));
    assert_eq!(reading.ask.constraints.together, Together::Preferred);
    let settings = Settings { gpushare_unit: MemoryUnit::Mib, ..Settings::default() };
    assert_eq!(want(&read_one_in(&settings, json!({}), amounts)).part.memory, mib(3));
}

#[test]
fn b20_every_container_asks_for_itself() {
    let container = |name: &str, units: u32| json!({"name": name, "resources": {"limits": {"aliyun.com/gpu-mem": units}}});
    let reading = read_pod(json!({}), vec![container("a", 1), container("b", 2)]);
    let memory: Vec<_> = reading.ask.asks.iter().map(|ask| ask.want.part.memory).collect();
    assert_eq!(memory, [mib(1024), mib(2048)]);
    assert_eq!(reading.ask.constraints.together, Together::Preferred);
}

#[test]
fn b22_zero_asks_nothing() {
    let reading = read_one(json!({"aliyun.com/gpu-mem": 0}));
    assert_eq!(reading.problems, []);
    assert_eq!((reading.containers[0].dialect, reading.containers[0].want), (None, None));
}

#[test]
fn a_count_spreads_evenly() {
    let reading = read_one(json!({"aliyun.com/gpu-mem": 8, "aliyun.com/gpu-count": 2}));
    assert_eq!(want(&reading), parts(2, mib(4096), CoresAsk::Uncounted));
    assert_eq!(reading.ask.constraints.together, Together::Anywhere);
    let reading = read_one(json!({"aliyun.com/gpu-mem": 7, "aliyun.com/gpu-count": 2}));
    assert_eq!(message(&reading), "7 cannot be split evenly over 2 GPUs: write 6 or 8");
    let reading = read_one(json!({"aliyun.com/gpu-mem": 1, "aliyun.com/gpu-count": 2}));
    assert_eq!(message(&reading), "1 cannot be split evenly over 2 GPUs: write 2");
    let reading = read_one(json!({"aliyun.com/gpu-count": 2}));
    assert_eq!(
        message(&reading),
        "says over how many GPUs to spread, but not what: add aliyun.com/gpu-mem, the memory in all"
    );
}

#[test]
fn the_count_may_stand_on_the_pod() {
    let amounts = json!({"aliyun.com/gpu-mem": 8});
    let with =
        |count| read_one_in(&Settings::default(), json!({"aliyun.com/gpu-count": count}), amounts.clone());
    assert_eq!(want(&with("4")).count, 4);
    assert_eq!(message(&with("two")), "\"two\" is no number of GPUs: write a whole number, 1 or more");
}
