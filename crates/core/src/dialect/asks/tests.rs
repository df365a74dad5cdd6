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
use crate::model::{Bytes, MilliCpu, Policy, Selector};
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
fn want(reading: &Reading) -> WantedGpus {
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

fn parts(count: u32, memory: MemoryAsk, cores: CoresAsk) -> WantedGpus {
    WantedGpus { count, part: ShareAsk { memory, cores, whole: false, ceiling: None } }
}
