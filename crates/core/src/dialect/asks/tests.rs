use super::*;
use crate::dialect::MemoryUnit;
use crate::model::{Bytes, MilliCpu, Policy, Selector};
use proptest::prelude::*;
use serde_json::{Value, json};

fn limits(limits: Value) -> Value {
    json!({"name": "main", "resources": {"limits": limits}})
}

fn pod(annotations: Value, containers: Vec<Value>) -> Pod {
    let (pod, problems) = Pod::read(&json!({"annotations": annotations}), &json!({"containers": containers}));
    assert_eq!(problems, []);
    pod
}

fn read_pod(annotations: Value, containers: Vec<Value>) -> Reading {
    read(&pod(annotations, containers), &Settings::default())
}

/// One container called "main" with these limits.
fn read_one_in(settings: &Settings, annotations: Value, amounts: Value) -> Reading {
    read(&pod(annotations, vec![limits(amounts)]), settings)
}

fn read_one(amounts: Value) -> Reading {
    read_one_in(&Settings::default(), json!({}), amounts)
}

/// The only want, where nothing is wrong.
fn want(reading: &Reading) -> Want {
    assert_eq!(reading.problems, []);
    reading.containers[0].want.expect("an ask")
}

/// The only message.
fn message(reading: &Reading) -> &str {
    assert_eq!(reading.problems.len(), 1, "{:?}", reading.problems);
    &reading.problems[0].message
}

fn mib(n: u64) -> MemoryAsk {
    MemoryAsk::Exactly(Bytes::mib(n).unwrap())
}

fn percent(n: u32) -> CoresAsk {
    CoresAsk::Exactly(Cores::percent(n).unwrap())
}

fn parts(count: u32, memory: MemoryAsk, cores: CoresAsk) -> Want {
    Want { count, part: Part { memory, cores, whole: false, ceiling: None } }
}

mod vcuda_dialect {
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
        let reading =
            read_one(json!({"a.com/vcuda-core": 50, "a.com/vcuda-memory": 1, "b.com/vcuda-memory": 1}));
        assert_eq!(message(&reading), "asks under several domains, a.com and b.com: keep one");
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
            let reading =
                read_one(json!({"tencent.com/vcuda-core": cores, "tencent.com/vcuda-memory": blocks}));
            (reading.containers[0].want.is_some(), reading.problems.len())
        };
        assert_eq!(is_gpu(0, 5), (false, 1));
        assert_eq!(is_gpu(50, 0), (false, 1));
        assert_eq!(is_gpu(50, 1), (true, 0));
        assert_eq!(is_gpu(100, 0), (true, 0));
        assert_eq!(is_gpu(0, 0), (false, 0));
        // Upstream adds the two up to a whole GPU that neither gets.
        let half =
            |name: &str| json!({"name": name, "resources": {"limits": {"tencent.com/vcuda-core": 50}}});
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
        assert_eq!(want(&reading), Want { count: 2, part: whole_gpu(limit) });
        let reading = read_one(json!({"inspur.com/vcuda-core": 100}));
        assert_eq!(want(&reading), Want { count: 1, part: whole_gpu(MemoryAsk::All) });
        let reading = read_one(json!({"inspur.com/vcuda-core": 1_000_000}));
        assert_eq!(message(&reading), "10000 is more than any node has: ask for 1024 at the most");
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
        let reading =
            read_one_in(&Settings::default(), json!({"tencent.com/vcuda-core-limit": "80"}), amounts);
        assert_eq!(
            message(&reading),
            "no container asks under this domain: write the domain of its resources"
        );
    }
}

mod gpushare_dialect {
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
        let with = |count| {
            read_one_in(&Settings::default(), json!({"aliyun.com/gpu-count": count}), amounts.clone())
        };
        assert_eq!(want(&with("4")).count, 4);
        assert_eq!(message(&with("two")), "\"two\" is no number of GPUs: write a whole number, 1 or more");
    }
}

mod volcano_dialect {
    use super::*;

    fn asked(
        number: Option<u32>,
        memory: Option<u32>,
        percentage: Option<u32>,
        cores: Option<u32>,
    ) -> Reading {
        let mut amounts = serde_json::Map::new();
        let names = ["number", "memory", "memory-percentage", "cores"];
        for (name, amount) in names.into_iter().zip([number, memory, percentage, cores]) {
            amounts.extend(amount.map(|amount| (format!("volcano.sh/vgpu-{name}"), json!(amount))));
        }
        read_one(amounts.into())
    }

    #[test]
    fn c01_number_and_memory() {
        assert_eq!(want(&asked(Some(1), Some(3000), None, None)), parts(1, mib(3000), CoresAsk::Uncounted));
        assert_eq!(want(&asked(Some(3), Some(5000), None, None)), parts(3, mib(5000), CoresAsk::Uncounted));
        assert_eq!(want(&asked(Some(2), Some(3000), None, Some(50))), parts(2, mib(3000), percent(50)));
    }

    #[test]
    fn c02_memory_only_is_one_gpu() {
        assert_eq!(want(&asked(None, Some(1024), None, None)), parts(1, mib(1024), CoresAsk::Uncounted));
    }

    #[test]
    fn c03_number_only_is_all_memory() {
        assert_eq!(want(&asked(Some(2), None, None, None)), parts(2, MemoryAsk::All, CoresAsk::Uncounted));
        assert_eq!(want(&asked(Some(2), Some(0), None, Some(0))).part.memory, MemoryAsk::All);
    }

    #[test]
    fn c04_percentage_wins_over_memory() {
        let want = want(&asked(Some(1), Some(3000), Some(50), None));
        assert_eq!(want.part.memory, MemoryAsk::Percent(50));
    }

    #[test]
    fn c05_cores_only_is_one_gpu() {
        assert_eq!(want(&asked(None, None, None, Some(30))), parts(1, MemoryAsk::All, percent(30)));
    }

    #[test]
    fn c26_100_cores_are_exclusive() {
        let want = want(&asked(Some(1), Some(3000), None, Some(100)));
        assert_eq!((want.part.whole, want.part.cores, want.part.memory), (true, percent(100), mib(3000)));
        assert_eq!(
            message(&asked(Some(1), None, None, Some(101))),
            "101 is not a part of one GPU: write 1 to 100, in percent, or leave it out"
        );
    }

    #[test]
    fn c97_no_number_never_means_every_gpu() {
        assert_eq!(
            want(&asked(None, None, Some(20), None)),
            parts(1, MemoryAsk::Percent(20), CoresAsk::Uncounted)
        );
        let reading = asked(Some(0), None, None, None);
        assert_eq!((reading.problems.len(), reading.ask.asks.len()), (0, 0));
        assert_eq!(
            message(&asked(Some(0), Some(100), None, None)),
            "asks for no GPU, but the lines beside it ask for parts of one: write 1 or more, or leave it out"
        );
    }

    #[test]
    fn c95_memory_in_units_of_the_factor() {
        let settings = Settings { volcano_memory_factor: 10, ..Settings::default() };
        let reading = read_one_in(&settings, json!({}), json!({"volcano.sh/vgpu-memory": 300}));
        assert_eq!(want(&reading).part.memory, mib(3000));
    }

    fn constrained(annotations: Value) -> Reading {
        read_one_in(&Settings::default(), annotations, json!({"volcano.sh/vgpu-number": 1}))
    }

    fn strings(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| word.to_string()).collect()
    }

    #[test]
    fn c40_types_are_a_list() {
        let models = |key: &str, list| constrained(json!({key: list})).ask.constraints.models;
        for list in ["NVIDIA", "nvidia", "AMD,NVIDIA,INTEL"] {
            assert!(models("nvidia.com/use-gputype", list).admits_model("NVIDIA-Tesla T4"), "{list}");
            assert!(!models("nvidia.com/nouse-gputype", list).admits_model("NVIDIA-Tesla T4"), "{list}");
        }
        assert!(!models("nvidia.com/use-gputype", "AMD,INTEL,MLU").admits_model("NVIDIA-Tesla T4"));
        assert!(constrained(json!({})).ask.constraints.models.is_open());
    }

    #[test]
    fn c41_uuids_are_exact_and_trimmed() {
        let only = |list| constrained(json!({"volcano.sh/vgpu-use-gpuuuid": list})).ask.constraints.uuids;
        for list in ["", "  ", ", ,"] {
            assert!(only(list).is_open(), "{list:?}");
        }
        for list in ["GPU-0, GPU-1", "GPU-0,, GPU-1,"] {
            assert_eq!(only(list).only, strings(&["GPU-0", "GPU-1"]));
            assert!(only(list).admits_uuid("GPU-1"));
            assert!(!only(list).admits_uuid(""));
        }
        assert!(!only("GPU-10").admits_uuid("GPU-1"));
        let both = json!({"volcano.sh/vgpu-use-gpuuuid": "GPU-1", "volcano.sh/vgpu-nouse-gpuuuid": "GPU-1"});
        assert!(!constrained(both).ask.constraints.uuids.admits_uuid("GPU-1"));
    }

    #[test]
    fn c42_lists_are_kept_whatever_they_name() {
        let reading = constrained(json!({
            "volcano.sh/vgpu-use-gpuuuid": "GPU-unknown", "volcano.sh/vgpu-nouse-gpuuuid": "GPU-0,GPU-1",
        }));
        assert_eq!(reading.problems, []);
        let uuids = Selector { only: strings(&["GPU-unknown"]), never: strings(&["GPU-0", "GPU-1"]) };
        assert_eq!(reading.ask.constraints.uuids, uuids);
    }

    #[test]
    fn c30_only_one_mode() {
        assert_eq!(constrained(json!({"volcano.sh/vgpu-mode": "hami-core"})).problems, []);
        let reading = constrained(json!({"volcano.sh/vgpu-mode": "mig"}));
        assert_eq!(message(&reading), "MIG is not supported yet: write \"hami-core\" or leave it out");
        assert!(message(&constrained(json!({"volcano.sh/vgpu-mode": "mps"}))).contains("\"mps\""));
        assert_eq!(constrained(json!({"volcano.sh/vgpu-podgroup-policy": "spread"})).problems.len(), 1);
    }

    #[test]
    fn a_choice_made_twice_is_a_problem() {
        let same = json!({"partage.dev/models": "T4", "nvidia.com/use-gputype": " T4"});
        assert_eq!(constrained(same).problems, []);
        let other = json!({"partage.dev/models": "T4", "nvidia.com/use-gputype": "A100"});
        assert_eq!(message(&constrained(other)), "partage.dev/models says otherwise: keep one of the two");
        let never = json!({"partage.dev/not-models": "T4", "nvidia.com/nouse-gputype": "A100,T4"});
        assert_eq!(constrained(never).ask.constraints.models.never, strings(&["T4", "A100"]));
    }
}

mod aws_dialect {
    use super::*;

    #[test]
    fn a15_slots_come_from_one_gpu_where_they_fit() {
        let reading = read_one(json!({"k8s.amazonaws.com/vgpu": 5}));
        assert_eq!(want(&reading), parts(1, MemoryAsk::Unlimited, CoresAsk::Slots(5)));
        assert_eq!(reading.ask.constraints.together, Together::Preferred);
        let reading = read_one(json!({"k8s.amazonaws.com/vgpu": 0}));
        assert_eq!((reading.problems.len(), reading.ask.asks.len()), (0, 0));
    }
}

mod hami_dialect {
    use super::*;

    #[test]
    fn reads_counts_memory_and_cores() {
        let reading =
            read_one(json!({"nvidia.com/gpu": 2, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30}));
        assert_eq!(want(&reading), parts(2, mib(3000), percent(30)));
        let reading = read_one(json!({"nvidia.com/gpumem-percentage": 50}));
        assert_eq!(want(&reading), parts(1, MemoryAsk::Percent(50), CoresAsk::Uncounted));
        assert!(want(&read_one(json!({"nvidia.com/gpu": 1, "nvidia.com/gpucores": 100}))).part.whole);
        let reading = read_one(json!({"nvidia.com/gpumem-percentage": 50, "nvidia.com/gpumem": 3000}));
        assert_eq!(message(&reading), "says how much memory a second time: keep it or nvidia.com/gpumem");
    }

    #[test]
    fn mig_is_named_as_missing() {
        let reading = read_one(json!({"nvidia.com/mig-1g.5gb": 1}));
        assert!(message(&reading).starts_with("MIG devices are not shared by Partage (yet)"));
        assert_eq!(reading.containers[0].dialect, None);
        // NVIDIA's network devices are nobody's GPU.
        assert_eq!(read_one(json!({"nvidia.com/hostdev": 1})).problems, []);
    }

    #[test]
    fn annotations_choose_gpus_and_policy() {
        let constrained =
            |annotations| read_one_in(&Settings::default(), annotations, json!({"nvidia.com/gpu": 1}));
        let reading = constrained(json!({
            "nvidia.com/use-gputype": "A100,V100", "nvidia.com/nouse-gputype": "T4",
            "nvidia.com/use-gpuuuid": "GPU-a", "nvidia.com/nouse-gpuuuid": "GPU-b",
            "hami.io/gpu-scheduler-policy": "spread", "hami.io/node-scheduler-policy": "spread",
        }));
        assert_eq!(reading.problems, []);
        assert_eq!(reading.ask.constraints.models.only, ["A100", "V100"]);
        assert_eq!(reading.ask.constraints.uuids.never, ["GPU-b"]);
        assert_eq!(reading.ask.constraints.policy, Some(Policy::Spread));
        let reading = constrained(json!({"hami.io/node-scheduler-policy": "random"}));
        assert_eq!(message(&reading), "\"random\" is no policy here: write \"binpack\" or \"spread\"");
        let reading = constrained(json!({
            "hami.io/gpu-scheduler-policy": "spread", "hami.io/node-scheduler-policy": "binpack",
        }));
        assert!(message(&reading).starts_with("nodes by binpack and GPUs by spread"));
    }
}

mod native_dialect {
    use super::*;

    #[test]
    fn reads_every_resource() {
        let reading =
            read_one(json!({"partage.dev/gpu": 2, "partage.dev/memory": "8Gi", "partage.dev/cores": 30}));
        assert_eq!(want(&reading), parts(2, mib(8192), percent(30)));
        assert_eq!(
            want(&read_one(json!({"partage.dev/gpu": 1}))),
            parts(1, MemoryAsk::All, CoresAsk::Uncounted)
        );
        assert_eq!(
            want(&read_one(json!({"partage.dev/memory-percent": 25}))),
            parts(1, MemoryAsk::Percent(25), CoresAsk::Uncounted)
        );
        assert_eq!(
            want(&read_one(json!({"partage.dev/memory": "8G"}))).part.memory,
            MemoryAsk::Exactly(Bytes(8_000_000_000))
        );
        assert!(!want(&read_one(json!({"partage.dev/cores": 100}))).part.whole);
    }

    #[test]
    fn slips_of_the_pen_are_named() {
        let said = |resource: &str, amount: Value| message(&read_one(json!({resource: amount}))).to_string();
        assert_eq!(said("partage.dev/memory", json!(8)), "\"8\" is 8 B of memory: did you mean 8Gi?");
        assert_eq!(
            said("partage.dev/memory", json!("8192")),
            "\"8192\" is 8 KiB of memory: did you mean 8192Mi?"
        );
        assert_eq!(
            said("partage.dev/gpu", json!("500m")),
            "500m is not a whole number: write a whole number, Kubernetes does not split this resource"
        );
        assert_eq!(said("partage.dev/gpu", json!(-1)), "-1 is negative: write 1 or more");
        assert!(said("partage.dev/memory", json!("8gb")).contains("no Kubernetes suffix"));
        assert_eq!(
            said("partage.dev/cores", json!(101)),
            "101 is not a part of one GPU: write 1 to 100, in percent, or leave it out"
        );
        assert_eq!(
            said("partage.dev/memroy", json!("8Gi")),
            "Partage knows no such resource: did you mean partage.dev/memory?"
        );
        let reading = read_one(json!({"partage.dev/memory": "8Gi", "partage.dev/memory-percent": 10}));
        assert_eq!(message(&reading), "says how much memory a second time: keep it or partage.dev/memory");
        let reading = read_one(json!({"partage.dev/gpu": 1, "partage.dev/cores": 0}));
        assert_eq!(reading.problems.len(), 1);
        assert_eq!(read_one(json!({"partage.dev/attachable": 1})).problems, []);
    }

    fn annotated(annotations: Value) -> Reading {
        let amounts = json!({"partage.dev/memory": "8Gi", "partage.dev/cores": 30});
        read_one_in(&Settings::default(), annotations, amounts)
    }

    #[test]
    fn annotations_choose_gpus() {
        let reading = annotated(json!({
            "partage.dev/policy": "topology", "partage.dev/models": "A100", "partage.dev/not-models": "PCIE",
            "partage.dev/gpus": "GPU-a, GPU-b", "partage.dev/not-gpus": "GPU-c",
            "partage.dev/same-gpu": "true", "partage.dev/exclusive": "true", "partage.dev/cores-limit": "60",
        }));
        let want = want(&reading);
        let constraints = &reading.ask.constraints;
        assert_eq!(constraints.policy, Some(Policy::Topology));
        assert_eq!((constraints.models.only.len(), constraints.models.never.len()), (1, 1));
        assert_eq!((constraints.uuids.only.len(), constraints.uuids.never.len()), (2, 1));
        assert_eq!(constraints.together, Together::Required);
        assert_eq!((want.part.whole, want.part.ceiling), (true, Cores::percent(60)));
    }

    #[test]
    fn wrong_annotations_are_named() {
        let said = |key: &str, value: &str| message(&annotated(json!({key: value}))).to_string();
        assert_eq!(
            said("partage.dev/policy", "random"),
            "\"random\" is no policy: use fragmentation, binpack, spread or topology"
        );
        assert_eq!(
            said("partage.dev/exclusive", "yes"),
            "\"yes\" is neither yes nor no: write \"true\" or \"false\""
        );
        assert_eq!(
            said("partage.dev/model", "A100"),
            "Partage knows no such annotation: did you mean partage.dev/models?"
        );
        assert_eq!(
            said("partage.dev/cores-limit", "20"),
            "20 % is less than the 30 % asked: write that or more"
        );
        let reading = read_one_in(
            &Settings::default(),
            json!({"partage.dev/cores-limit": "20"}),
            json!({"partage.dev/gpu": 1}),
        );
        assert_eq!(message(&reading), "there are no cores to stretch: add partage.dev/cores or the like");
        for known in ["partage.dev/grant", "partage.dev/attachable"] {
            assert_eq!(annotated(json!({known: "true"})).problems, []);
        }
    }

    #[test]
    fn they_hold_for_every_dialect() {
        let annotations = json!({"partage.dev/exclusive": "true", "partage.dev/same-gpu": "false"});
        let reading = read_one_in(&Settings::default(), annotations, json!({"aliyun.com/gpu-mem": 8}));
        assert!(want(&reading).part.whole);
        assert_eq!(reading.ask.constraints.together, Together::Anywhere);
    }

    #[test]
    fn the_same_gpu_must_be_possible() {
        let annotations = json!({"partage.dev/same-gpu": "true"});
        let reading = read_one_in(&Settings::default(), annotations.clone(), json!({"partage.dev/gpu": 2}));
        assert!(message(&reading).starts_with("container \"main\" asks for 2 GPUs, which cannot be one"));
        let whole =
            |name: &str| json!({"name": name, "resources": {"limits": {"tencent.com/vcuda-core": 100}}});
        let reading = read_pod(annotations, vec![whole("a"), whole("b")]);
        assert!(message(&reading).starts_with("container \"a\" wants its GPU for itself"));
    }
}

mod any_dialect {
    use super::*;

    #[test]
    fn two_dialects_in_one_container_are_named() {
        let reading =
            read_one(json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 10, "volcano.sh/vgpu-number": 1}));
        assert_eq!(
            message(&reading),
            "this container asks in 2 dialects, volcano (volcano.sh/vgpu-number) and hami (nvidia.com/gpu, nvidia.com/gpumem): keep one"
        );
        assert_eq!((reading.containers[0].dialect, reading.containers[0].want), (None, None));
        // Zero asks nothing, and each container may have its own.
        assert_eq!(read_one(json!({"nvidia.com/gpu": 0, "partage.dev/gpu": 1})).problems, []);
        let other = json!({"name": "other", "resources": {"limits": {"aliyun.com/gpu-mem": 1}}});
        let reading = read_pod(json!({}), vec![limits(json!({"nvidia.com/gpu": 1})), other]);
        assert_eq!((reading.problems.len(), reading.ask.asks.len()), (0, 2));
    }

    #[test]
    fn a_marked_carrier_is_no_dialect() {
        let carried = |mark: &str, amounts: Value| {
            read_one_in(&Settings::default(), json!({"partage.dev/carrier": mark}), amounts)
        };
        let both = json!({"partage.dev/gpu": 1, "aliyun.com/gpu-mem": 2});
        let reading = carried("main=partage.dev/gpu", both.clone());
        assert_eq!(want(&reading), parts(1, mib(2048), CoresAsk::Uncounted));
        let memory = json!({"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 2});
        assert_eq!(want(&carried("main = volcano.sh/vgpu-number,", memory)).count, 1);

        let reading = carried("other=partage.dev/gpu", json!({"aliyun.com/gpu-mem": 2}));
        assert!(message(&reading).starts_with("there is no container \"other\""));
        let reading = carried("main=partage.dev/gpu", json!({"partage.dev/gpu": 2}));
        assert_eq!(
            message(&reading),
            "partage.dev/gpu is marked as carrying another ask, but there is no other: unmark it"
        );
        assert!(
            message(&carried("main", json!({"partage.dev/gpu": 1}))).starts_with("\"main\" marks nothing")
        );
        let reading = carried("main=aliyun.com/gpu-mem", json!({"aliyun.com/gpu-mem": 2}));
        assert!(message(&reading).starts_with("aliyun.com/gpu-mem cannot carry an ask"));
    }

    #[test]
    fn requests_must_equal_limits() {
        let with = |limits: Value, requests: Value| {
            read_pod(
                json!({}),
                vec![json!({"name": "main", "resources": {"limits": limits, "requests": requests}})],
            )
        };
        let reading = with(json!({"partage.dev/gpu": 2}), json!({"partage.dev/gpu": "2000m"}));
        assert_eq!(want(&reading).count, 2);
        let reading = with(json!({"partage.dev/gpu": 2}), json!({"partage.dev/gpu": 1}));
        assert!(
            message(&reading).starts_with("the request is 1, the limit 2, and Kubernetes wants them equal")
        );
        assert_eq!(reading.ask.asks[0].want.count, 2);
        let reading = with(json!({}), json!({"partage.dev/gpu": 1}));
        assert_eq!(
            message(&reading),
            "requested but not limited, which Kubernetes refuses: write partage.dev/gpu: 1 under limits too"
        );
        assert_eq!(reading.ask.asks[0].want.count, 1);
    }

    #[test]
    fn b21_init_containers_and_sidecars_ask_too() {
        let container = |name: &str, policy: Option<&str>| {
            json!({"name": name, "restartPolicy": policy, "resources": {
                "limits": {"aliyun.com/gpu-mem": 2, "cpu": "500m"}, "requests": {"memory": "1Gi"},
            }})
        };
        let spec = json!({
            "initContainers": [container("fetch", None), container("proxy", Some("Always"))],
            "containers": [container("main", None)],
        });
        let reading = read(&Pod::read(&json!({}), &spec).0, &Settings::default());
        assert_eq!(reading.problems, []);
        let roles: Vec<Role> = reading.ask.asks.iter().map(|ask| ask.role).collect();
        assert_eq!(roles, [Role::Init, Role::Sidecar, Role::App]);
        assert_eq!((reading.ask.cpu, reading.ask.memory), (MilliCpu(1000), Bytes(2 << 30)));
    }

    #[test]
    fn c99_containers_between_keep_their_place() {
        let plain = json!({"name": "plain"});
        let asking =
            |name: &str| json!({"name": name, "resources": {"limits": {"volcano.sh/vgpu-number": 1}}});
        let reading = read_pod(json!({}), vec![asking("a"), plain, asking("b")]);
        let names: Vec<_> = reading.containers.iter().map(|c| (c.name.as_str(), c.want.is_some())).collect();
        assert_eq!(names, [("a", true), ("plain", false), ("b", true)]);
        assert_eq!(reading.ask.asks.len(), 2);
    }
}

fn any_resource() -> impl Strategy<Value = String> {
    let known = prop::sample::select(
        native::RESOURCES
            .into_iter()
            .chain(gpushare::RESOURCES)
            .chain(volcano::RESOURCES)
            .chain(hami::RESOURCES)
            .chain([aws::VGPU, "a.com/vcuda-core", "a.com/vcuda-memory", "cpu", "memory", "nvidia.com/mig-1"])
            .map(String::from)
            .collect::<Vec<_>>(),
    );
    prop_oneof![6 => known, 1 => "[a-z./-]{0,20}"]
}

fn any_amount() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => (0u32..300).prop_map(|n| n.to_string()),
        1 => any::<i64>().prop_map(|n| n.to_string()),
        1 => "[0-9.]{1,6}[a-zA-Z]{0,2}",
        1 => ".{0,6}",
    ]
}

fn any_annotation() -> impl Strategy<Value = (String, String)> {
    let known = prop::sample::select(vec![
        "partage.dev/policy",
        "partage.dev/models",
        "partage.dev/gpus",
        "partage.dev/same-gpu",
        "partage.dev/exclusive",
        "partage.dev/cores-limit",
        "partage.dev/carrier",
        "a.com/vcuda-core-limit",
        "volcano.sh/vgpu-mode",
        "nvidia.com/use-gputype",
        "hami.io/gpu-scheduler-policy",
        "aliyun.com/gpu-count",
    ]);
    let value = prop_oneof![
        Just("true".to_string()),
        Just("main=partage.dev/gpu".to_string()),
        (0u32..200).prop_map(|n| n.to_string()),
        ".{0,12}",
    ];
    (prop_oneof![6 => known.prop_map(String::from), 1 => "partage[.]dev/.{0,8}"], value)
}

fn any_pod() -> impl Strategy<Value = Pod> {
    let amounts = || prop::collection::btree_map(any_resource(), any_amount(), 0..5);
    let roles = prop::sample::select(vec![Role::Init, Role::Sidecar, Role::App]);
    let container = (roles, amounts(), amounts()).prop_map(|(role, limits, requests)| {
        crate::pod::Container { name: "main".into(), role, limits, requests, env: Default::default() }
    });
    let annotations = prop::collection::btree_map(any_annotation(), Just(()), 0..5);
    (annotations, prop::collection::vec(container, 0..4)).prop_map(|(annotations, containers)| Pod {
        labels: Default::default(),
        annotations: annotations.into_keys().collect(),
        containers,
    })
}

proptest! {
    #[test]
    fn reading_never_panics_and_wants_are_within_range(pod in any_pod()) {
        let reading = read(&pod, &Settings::default());
        prop_assert_eq!(reading.containers.len(), pod.containers.len());
        for container in &reading.containers {
            let Some(want) = container.want else { continue };
            prop_assert!(container.dialect.is_some());
            prop_assert!((1..=1024).contains(&want.count));
            match want.part.memory {
                MemoryAsk::Exactly(bytes) | MemoryAsk::AtMost(bytes) => prop_assert!(bytes.0 >= 1 << 20),
                MemoryAsk::Percent(percent) => prop_assert!((1..=100).contains(&percent)),
                MemoryAsk::All | MemoryAsk::Unlimited => {}
            }
            match want.part.cores {
                CoresAsk::Exactly(cores) => prop_assert!(Cores::NONE < cores && cores <= Cores::WHOLE),
                CoresAsk::Slots(slots) => prop_assert!(slots >= 1),
                CoresAsk::Uncounted => {}
            }
        }
        let asking = reading.containers.iter().filter(|c| c.want.is_some()).count();
        prop_assert_eq!(reading.ask.asks.len(), asking);
    }

    #[test]
    fn the_order_of_lines_does_not_matter(
        amounts in prop::collection::btree_map(any_resource(), any_amount(), 0..6),
        annotations in prop::collection::vec(any_annotation(), 0..5),
    ) {
        let text = |pairs: &[(String, String)]| {
            let lines: Vec<String> = pairs.iter().map(|(k, v)| format!("{}:{}", json!(k), json!(v))).collect();
            format!("{{{}}}", lines.join(","))
        };
        let build = |reversed: bool| {
            let mut amounts: Vec<_> = amounts.clone().into_iter().collect();
            let mut annotations = annotations.clone();
            annotations.sort();
            annotations.dedup_by(|a, b| a.0 == b.0);
            if reversed {
                amounts.reverse();
                annotations.reverse();
            }
            let (limits, annotations) = (text(&amounts), text(&annotations));
            let metadata: Value = serde_json::from_str(&format!("{{\"annotations\":{annotations}}}")).unwrap();
            let spec: Value = serde_json::from_str(&format!(
                "{{\"containers\":[{{\"name\":\"main\",\"resources\":{{\"limits\":{limits}}}}}]}}"
            )).unwrap();
            read(&Pod::read(&metadata, &spec).0, &Settings::default())
        };
        prop_assert_eq!(build(false), build(true));
    }

    #[test]
    fn what_is_wrong_is_always_said(pod in any_pod()) {
        let reading = read(&pod, &Settings::default());
        for container in reading.containers {
            if container.dialect.is_some() && container.want.is_none() {
                prop_assert!(!reading.problems.is_empty());
            }
        }
    }
}
