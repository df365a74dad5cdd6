//! Encoded grants are decoded again: completely from the native record, and as far as the format allows from others.

use super::*;
use crate::dialect::asks::vcuda::BLOCK;
use crate::testing;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::subsequence;

type RoundTripCase = (Node, PodManifest, PodGrant);
/// Role, limits and shares of a container.
type ContainerCase = (ContainerRole, Vec<(String, u64)>, Vec<Share>);

/// Builds a pod whose containers hold `shares`, with containers without requests in between.
fn case(node: Node, containers: Vec<ContainerCase>) -> RoundTripCase {
    let mut grant = PodGrant { node: node.name.clone(), grants: Vec::new() };
    let mut pod = PodManifest::default();
    for (index, (role, limits, shares)) in containers.into_iter().enumerate() {
        let name = format!("c{index}");
        let amounts: Vec<(String, String)> =
            limits.into_iter().map(|(resource, amount)| (resource, amount.to_string())).collect();
        let limits: Vec<(&str, &str)> = amounts.iter().map(|(r, a)| (r.as_str(), a.as_str())).collect();
        pod.containers.push(container(&name, role, &limits));
        pod.containers.push(container(&format!("{name}-beside"), role, &[("cpu", "1")]));
        grant.grants.push(Grant { init: role == ContainerRole::Init, ..granted(&name, shares) });
    }
    // Init containers are first in a spec.
    pod.containers.sort_by_key(|container| container.role == ContainerRole::App);
    let place = |grant: &Grant| pod.containers.iter().position(|c| c.name == grant.container);
    grant.grants.sort_by_key(place);
    (node, pod, grant)
}

/// A subset of the node's GPUs, in order.
fn some_gpus(node: &Node) -> impl Strategy<Value = Vec<usize>> + use<> {
    let indexes: Vec<usize> = (0..node.gpus.len()).collect();
    subsequence(indexes, 1..=node.gpus.len())
}

/// Seeds from which a container's amounts are drawn.
fn seeds() -> impl Strategy<Value = (u64, u32, bool)> {
    (any::<u64>(), 0u32..=100, any::<bool>())
}

/// Returns a number from 1 to `max`, derived from a seed.
fn within(seed: u64, max: u64) -> u64 {
    seed % max + 1
}

fn role() -> impl Strategy<Value = ContainerRole> {
    prop::sample::select(vec![ContainerRole::Init, ContainerRole::Sidecar, ContainerRole::App])
}

/// Any number of app containers on several GPUs, or any containers on one.
fn gpushare_case(unit: u64) -> impl Strategy<Value = RoundTripCase> {
    testing::node("n1", 1..9).prop_flat_map(move |node| {
        let on_one = (some_gpus(&node), vec((role(), seeds()), 1..4)).prop_map(|(gpus, containers)| {
            let with_gpu = |(role, seed)| (role, vec![gpus[0]], seed);
            containers.into_iter().map(with_gpu).collect::<Vec<_>>()
        });
        let on_several = vec((Just(ContainerRole::App), some_gpus(&node), seeds()), 1..4);
        prop_oneof![on_one, on_several].prop_map(move |containers| {
            let containers = containers.into_iter().map(|(role, gpus, (seed, ..))| {
                let shares: Vec<Share> = gpus
                    .into_iter()
                    .map(|index| {
                        let units = within(seed, node.gpus[index].memory_bytes.0 / unit);
                        super::share(node.gpus[index].uuid.as_str(), Some(Bytes(units * unit)), None)
                    })
                    .collect();
                let total = shares.iter().map(|share| share.memory_bytes.unwrap().0 / unit).sum();
                (role, vec![(gpushare::MEMORY.to_string(), total)], shares)
            });
            case(node.clone(), containers.collect())
        })
    })
}

/// App containers with whole units of memory, or all of it, and whole percentages of compute.
fn volcano_case(factor: u32) -> impl Strategy<Value = RoundTripCase> {
    let unit = volcano::unit(factor);
    testing::node("n1", 1..9).prop_flat_map(move |node| {
        vec((some_gpus(&node), seeds()), 1..4).prop_map(move |containers| {
            let containers = containers.into_iter().map(|(gpus, (seed, percent, all))| {
                let count = gpus.len() as u64;
                let share = |index: usize| {
                    let memory = node.gpus[index].memory_bytes;
                    let units = within(seed, memory.0 / unit - 1);
                    let memory = if all { memory } else { Bytes(units * unit) };
                    let cores = Some(percent).filter(|&percent| percent > 0);
                    super::share(node.gpus[index].uuid.as_str(), Some(memory), cores)
                };
                let limits = vec![("volcano.sh/vgpu-number".to_string(), count)];
                (ContainerRole::App, limits, gpus.into_iter().map(share).collect())
            });
            case(node.clone(), containers.collect())
        })
    })
}

/// App containers with a share of one GPU, or whole GPUs with or without a memory limit.
fn vcuda_case() -> impl Strategy<Value = RoundTripCase> {
    testing::node("n1", 1..9).prop_flat_map(|node| {
        let containers = vec((some_gpus(&node), seeds()), 1..4);
        (containers, option::of(0u32..=100)).prop_map(move |(containers, limit)| {
            let ceiling = limit.map(|limit| Cores::percent(limit).unwrap());
            let containers = containers.into_iter().map(|(mut gpus, (seed, percent, limited))| {
                let whole = !(1..100).contains(&percent);
                if !whole {
                    gpus.truncate(1);
                }
                let cores = if whole { 100 * gpus.len() as u64 } else { percent.into() };
                let blocks = within(seed, node.gpus[gpus[0]].memory_bytes.0 / BLOCK);
                let limited = limited || !whole;
                let share = |index: usize| {
                    let memory = node.gpus[index].memory_bytes;
                    let limit = Bytes(blocks * BLOCK).min(memory);
                    let memory = if limited { limit } else { memory };
                    let cores = if whole { 100 } else { percent };
                    let share = super::share(node.gpus[index].uuid.as_str(), Some(memory), Some(cores));
                    // The guarantee takes precedence over a lower ceiling of the pod.
                    let ceiling = ceiling.filter(|_| !whole).map(|ceiling| Some(ceiling).max(share.cores));
                    let ceiling = ceiling.flatten();
                    Share { ceiling, ..share }
                };
                let mut limits = vec![("example.com/vcuda-core".to_string(), cores)];
                if limited {
                    limits.push(("example.com/vcuda-memory".to_string(), blocks));
                }
                (ContainerRole::App, limits, gpus.into_iter().map(share).collect())
            });
            let (node, mut pod, grant) = case(node.clone(), containers.collect());
            if let Some(limit) = limit {
                pod.annotations.insert("example.com/vcuda-core-limit".into(), limit.to_string());
            }
            (node, pod, grant)
        })
    })
}

fn check_round_trip(
    (node, pod, grant): RoundTripCase,
    dialect: Dialect,
    settings: &DialectSettings,
) -> Result<(), TestCaseError> {
    let written = written_on(&node, &pod, &grant, dialect, settings);
    let both = PodManifest { annotations: written.annotations.clone(), ..pod.clone() };
    let native = read(&both, Some(&node.name), &node, settings).unwrap();
    prop_assert_eq!(native, Some((Dialect::Native, grant.clone())));
    let foreign = read(&as_foreign(pod, &written), Some(&node.name), &node, settings);
    prop_assert_eq!(foreign, Ok(Some((dialect, grant))));
    Ok(())
}

proptest! {
    #[test]
    fn native_record_round_trips((node, grant) in testing::node_and_grant()) {
        let text = native::encode(&grant).unwrap();
        prop_assert_eq!(native::decode(&text), Ok(grant.clone()));
        let role = |grant: &Grant| if grant.init { ContainerRole::Init } else { ContainerRole::App };
        let containers = grant.grants.iter().map(|grant| container(grant.container.as_str(), role(grant), &[]));
        let pod = pod(containers.collect());
        // The native record is written in every dialect, even if the dialect's own record cannot express the grant.
        for dialect in [Dialect::Native, Dialect::Gpushare, Dialect::Volcano, Dialect::Aws, Dialect::Hami] {
            let written = written_on(&node, &pod, &grant, dialect, &DialectSettings::default());
            prop_assert_eq!(&written.annotations[native::ANNOTATION], &text);
            for grant in &grant.grants {
                let visible = &written.env[&grant.container]["NVIDIA_VISIBLE_DEVICES"];
                prop_assert!(visible.split(',').all(|uuid| uuids(&node).contains(&uuid.into())));
                prop_assert_eq!(visible.split(',').count(), grant.shares.len());
            }
            let carried = annotated(pod.clone(), &[(native::ANNOTATION, &text)]);
            let read = read(&carried, Some(&node.name), &node, &DialectSettings::default());
            prop_assert_eq!(read, Ok(Some((Dialect::Native, grant.clone()))));
        }
    }

    #[test]
    fn gpushare_record_in_gib_round_trips(case in gpushare_case(MemoryUnit::Gib.bytes())) {
        check_round_trip(case, Dialect::Gpushare, &DialectSettings::default())?;
    }

    #[test]
    fn gpushare_record_in_mib_round_trips(case in gpushare_case(MemoryUnit::Mib.bytes())) {
        check_round_trip(case, Dialect::Gpushare, &in_mib())?;
    }

    #[test]
    fn volcano_record_with_any_factor_round_trips(
        (factor, case) in (1u32..64).prop_flat_map(|factor| (Just(factor), volcano_case(factor)))
    ) {
        check_round_trip(case, Dialect::Volcano, &with_factor(factor))?;
    }

    #[test]
    fn vcuda_record_under_any_domain_round_trips(case in vcuda_case()) {
        check_round_trip(case, Dialect::Vcuda, &DialectSettings::default())?;
    }
}
