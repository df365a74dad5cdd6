use super::*;

#[test]
fn a15_slots_come_from_one_gpu_where_they_fit() {
    let reading = read_one(json!({"k8s.amazonaws.com/vgpu": 5}));
    assert_eq!(want(&reading), parts(1, MemoryAsk::Unlimited, CoresAsk::Slots(5)));
    assert_eq!(reading.ask.constraints.together, Together::Preferred);
    let reading = read_one(json!({"k8s.amazonaws.com/vgpu": 0}));
    assert_eq!((reading.problems.len(), reading.ask.asks.len()), (0, 0));
}
