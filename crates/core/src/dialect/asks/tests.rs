mod any_dialect;
mod aws_dialect;
mod gpushare_dialect;
mod hami_dialect;
mod native_dialect;
mod properties;
mod vcuda_dialect;
mod volcano_dialect;

use super::*;
use crate::dialect::MemoryUnit;
use crate::model::{Bytes, MilliCpu, PlacementPolicy, Selector};
use serde_json::{Value, json};

fn limits(limits: Value) -> Value {
    json!({"name": "main", "resources": {"limits": limits}})
}

fn pod(annotations: Value, containers: Vec<Value>) -> PodManifest {
    let (pod, problems) =
        PodManifest::read(&json!({"annotations": annotations}), &json!({"containers": containers}));
    assert_eq!(problems, []);
    pod
}

fn read_pod(annotations: Value, containers: Vec<Value>) -> PodReading {
    read(&pod(annotations, containers), &DialectSettings::default())
}

/// One container called "main" with these limits.
fn read_one_in(settings: &DialectSettings, annotations: Value, amounts: Value) -> PodReading {
    read(&pod(annotations, vec![limits(amounts)]), settings)
}

fn read_one(amounts: Value) -> PodReading {
    read_one_in(&DialectSettings::default(), json!({}), amounts)
}

/// Returns the only request; panics if there are problems.
fn want(reading: &PodReading) -> WantedGpus {
    assert_eq!(reading.problems, []);
    reading.containers[0].want.expect("an ask")
}

/// Returns the message of the only problem.
fn message(reading: &PodReading) -> &str {
    assert_eq!(reading.problems.len(), 1, "{:?}", reading.problems);
    &reading.problems[0].message
}

fn mib(n: u64) -> MemoryAsk {
    MemoryAsk::Exactly(Bytes::mib(n).unwrap())
}

fn percent(n: u32) -> CoresAsk {
    CoresAsk::Exactly(Cores::percent(n).unwrap())
}

fn shares(count: u32, memory: MemoryAsk, cores: CoresAsk) -> WantedGpus {
    WantedGpus { count, share: ShareAsk { memory, cores, whole: false, ceiling: None } }
}
