use super::*;

#[test]
fn memory_uses_the_unit_of_the_cluster() {
    let amounts = json!({"aliyun.com/gpu-mem": 3});
    let reading = read_one(amounts.clone());
    assert_eq!(want(&reading), shares(1, mib(3072), CoresAsk::Uncounted));
    assert_eq!(reading.ask.constraints.colocation, Colocation::Preferred);
    let settings = DialectSettings { gpushare_unit: MemoryUnit::Mib, ..DialectSettings::default() };
    assert_eq!(want(&read_one_in(&settings, json!({}), amounts)).share.memory, mib(3));
}

#[test]
fn b20_each_container_has_its_own_request() {
    let container = |name: &str, units: u32| json!({"name": name, "resources": {"limits": {"aliyun.com/gpu-mem": units}}});
    let reading = read_pod(json!({}), vec![container("a", 1), container("b", 2)]);
    let memory: Vec<_> = reading.ask.asks.iter().map(|ask| ask.want.share.memory).collect();
    assert_eq!(memory, [mib(1024), mib(2048)]);
    assert_eq!(reading.ask.constraints.colocation, Colocation::Preferred);
}

#[test]
fn b22_zero_requests_nothing() {
    let reading = read_one(json!({"aliyun.com/gpu-mem": 0}));
    assert_eq!(reading.problems, []);
    assert_eq!((reading.containers[0].dialect, reading.containers[0].want), (None, None));
}

#[test]
fn count_splits_memory_evenly() {
    let reading = read_one(json!({"aliyun.com/gpu-mem": 8, "aliyun.com/gpu-count": 2}));
    assert_eq!(want(&reading), shares(2, mib(4096), CoresAsk::Uncounted));
    assert_eq!(reading.ask.constraints.colocation, Colocation::Anywhere);
    let reading = read_one(json!({"aliyun.com/gpu-mem": 7, "aliyun.com/gpu-count": 2}));
    assert_eq!(message(&reading), "7 cannot be split evenly over 2 GPUs: write 6 or 8");
    let reading = read_one(json!({"aliyun.com/gpu-mem": 1, "aliyun.com/gpu-count": 2}));
    assert_eq!(message(&reading), "1 cannot be split evenly over 2 GPUs: write 2");
    let reading = read_one(json!({"aliyun.com/gpu-count": 2}));
    assert_eq!(
        message(&reading),
        "splits memory over GPUs, but no memory is requested: add aliyun.com/gpu-mem, the total memory"
    );
}

#[test]
fn count_annotation_on_the_pod_is_read() {
    let amounts = json!({"aliyun.com/gpu-mem": 8});
    let with = |count| {
        read_one_in(&DialectSettings::default(), json!({"aliyun.com/gpu-count": count}), amounts.clone())
    };
    assert_eq!(want(&with("4")).count, 4);
    assert_eq!(message(&with("two")), "\"two\" is not a number of GPUs: write a whole number, 1 or more");
}
