//! Whether everybody says the same of who holds what: the pods, kubelet, the agent's files, its audit, and the containers.

use crate::stage::{SEES, Stage};
use partage_agent::identity::{Holder, Kubelet, Runtime};
use partage_core::dialect::grants::native;
use partage_core::model::{Cores, PodGrant, Share};
use partage_host::gpus::uuid_bytes;
use partage_region::RegionHandle;
use partage_testkit::eventually;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// What one GPU of these tests shows to who has it whole.
const MEMORY: u64 = 40 << 30;

/// A pod that holds something.
pub(crate) struct Held {
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) grant: PodGrant,
    /// Whether it says what it sees: [`crate::stage::witness`].
    pub(crate) witness: bool,
}

impl Held {
    /// What a container with one share sees.
    pub(crate) fn sees(&self) -> String {
        let share = &self.grant.grants[0].shares[0];
        format!("{}, {} MiB", share.gpu, share.memory_bytes.map_or(MEMORY, |bytes| bytes.0) >> 20)
    }
}

impl Stage<'_> {
    /// Waits until everybody agrees, and returns the pods that hold something.
    pub(crate) async fn agrees(&self) -> Vec<Held> {
        eventually("the pods, kubelet, the files, the audit and the containers agree", async || {
            self.agreement().map_err(|why| format!("{why}\n{}", self.agent.log()))
        })
        .await
    }

    fn agreement(&self) -> Result<Vec<Held>, String> {
        let held = self.held()?;
        let holders =
            Kubelet::new(&self.node_path("/var/lib/kubelet"), Runtime::new(Path::new("/none"))).all();
        let holders = holders.ok_or("kubelet's checkpoint cannot be read")?;
        let mut expected: BTreeMap<String, &[Share]> = BTreeMap::new();
        for pod in &held {
            for grant in &pod.grant.grants {
                let is_it = |one: &&Holder| one.uid.as_str() == pod.uid && one.container == grant.container;
                let holder = holders.iter().find(is_it).and_then(|one| one.key.clone());
                let key = holder.ok_or(format!("kubelet gave {} nothing", pod.name))?;
                expected.insert(key.to_string(), &grant.shares);
            }
        }
        let keys: BTreeSet<String> = expected.keys().cloned().collect();
        same("CDI files", &keys, &self.files("/run/cdi", "partage.dev-grant-"))?;
        same("regions", &keys, &self.files("/run/partage/regions", ""))?;
        let uids = held.iter().map(|pod| pod.uid.clone()).collect();
        same("records", &uids, &self.files("/var/lib/partage/pods", ""))?;
        for (key, shares) in &expected {
            let limits = self.limits(key)?;
            if limits != told(shares) {
                return Err(format!("region {key}: {limits:?}, granted was {shares:?}"));
            }
        }
        let mut given: BTreeMap<&str, u64> = BTreeMap::new();
        for share in expected.values().copied().flatten() {
            *given.entry(share.gpu.as_str()).or_default() += share.memory_bytes.map_or(0, |bytes| bytes.0);
        }
        let node = self.inventory()?;
        for gpu in &node.gpus {
            let bytes = given.remove(gpu.uuid.as_str()).unwrap_or_default();
            if bytes > node.memory_overcommit_percent.of(gpu.memory_bytes).0 {
                return Err(format!("{bytes} bytes of {} are given", gpu.uuid));
            }
        }
        if !given.is_empty() {
            return Err(format!("GPUs are given that are not there: {given:?}"));
        }
        for pod in held.iter().filter(|pod| pod.witness) {
            match self.said(pod) {
                Some(said) if said == pod.sees() => {}
                said => return Err(format!("{} sees {said:?}, and was granted {}", pod.name, pod.sees())),
            }
        }
        match self.metric("partage_ledger_mismatch")? {
            0.0 => Ok(held),
            mismatches => Err(format!("{mismatches} mismatches")),
        }
    }

    /// The pods whose containers have started and not ended for good; all of them say what they were granted.
    fn held(&self) -> Result<Vec<Held>, String> {
        let text = self.bed.kubectl(&["get", "pods", "-o", "json"]).map_err(|error| error.to_string())?;
        let pods: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        let mut held = Vec::new();
        for pod in pods["items"].as_array().into_iter().flatten() {
            let status = &pod["status"];
            let started = status["containerStatuses"].as_array().is_some_and(|all| {
                all.iter().any(|one| one["started"] == true || one["restartCount"].as_u64() > Some(0))
            });
            let ended = status["phase"] == "Failed" || status["phase"] == "Succeeded";
            if ended || !started {
                continue;
            }
            let name = pod["metadata"]["name"].as_str().unwrap_or_default().to_string();
            let text = pod["metadata"]["annotations"][native::ANNOTATION].as_str();
            let text = text.ok_or(format!("{name} does not say its grant"))?;
            let grant = native::decode(text).map_err(|error| error.to_string())?;
            let uid = pod["metadata"]["uid"].as_str().unwrap_or_default().to_string();
            let witness = pod["spec"]["containers"][0]["command"].to_string().contains(SEES);
            held.push(Held { name, uid, grant, witness });
        }
        Ok(held)
    }

    /// The first line that a pod's container said since it was last started, as the node has it: [`crate::stage::witness`].
    pub(crate) fn said(&self, pod: &Held) -> Option<String> {
        let folder = self.node_path(&format!("/var/log/pods/default_{}_{}/main", pod.name, pod.uid));
        let logs =
            std::fs::read_dir(folder).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let last = logs.filter_map(|name| name.strip_suffix(".log")?.parse::<u32>().ok()).max()?;
        let folder = format!("/var/log/pods/default_{}_{}/main/{last}.log", pod.name, pod.uid);
        let text = std::fs::read_to_string(self.node_path(&folder)).ok()?;
        let mut said = text.lines().filter_map(|line| Some(line.split_once(" stdout F ")?.1));
        said.find(|line| line.starts_with("GPU-")).map(str::to_string)
    }

    /// Ends a [`crate::stage::witness`]; kubelet starts it again.
    pub(crate) fn crash(&self, name: &str) {
        let file = self.node_path(&format!("/var/lib/programs/{name}"));
        let rounds = std::fs::read_to_string(&file).unwrap_or_default();
        std::fs::write(file, format!("{}x\n", rounds.trim())).unwrap();
    }

    pub(crate) fn node_path(&self, inside: &str) -> PathBuf {
        self.agent.path(inside).unwrap()
    }

    fn files(&self, folder: &str, beginning: &str) -> BTreeSet<String> {
        let entries = std::fs::read_dir(self.node_path(folder)).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names
            .filter_map(|name| Some(name.strip_prefix(beginning)?.trim_end_matches(".json").to_string()))
            .collect()
    }

    fn limits(&self, key: &str) -> Result<Vec<Limits>, String> {
        let folder = self.node_path(&format!("/run/partage/regions/{key}"));
        let region = RegionHandle::open(&folder).map_err(|error| format!("region {key}: {error}"))?;
        let shares = (0..region.owner().gpus()).filter_map(|gpu| region.owner().share(gpu));
        let limits = shares.map(|share| Limits {
            gpu: share.uuid,
            memory: share.memory,
            cores: share.cores,
            ceiling: share.ceiling,
        });
        Ok(limits.collect())
    }
}

/// What a region says of one GPU. Compute is in thousandths of a percent: no guarantee is 0, and all may be reached.
#[derive(Debug, PartialEq, Eq)]
struct Limits {
    gpu: [u8; 16],
    memory: u64,
    cores: u32,
    ceiling: u32,
}

fn told(shares: &[Share]) -> Vec<Limits> {
    let one = |share: &Share| {
        let millipercent = |cores: Cores| cores.as_millipercent();
        // Who has a GPU alone needs no promise.
        let cores = share.cores.filter(|_| !share.whole);
        Limits {
            gpu: uuid_bytes(&share.gpu).unwrap(),
            memory: share.memory_bytes.map_or(u64::MAX, |bytes| bytes.0),
            cores: cores.map_or(0, millipercent),
            ceiling: share.ceiling.or(share.cores).map_or(100_000, millipercent),
        }
    };
    shares.iter().map(one).collect()
}

fn same(what: &str, expected: &BTreeSet<String>, there: &BTreeSet<String>) -> Result<(), String> {
    match expected == there {
        true => Ok(()),
        false => {
            let (missing, more) = (expected - there, there - expected);
            Err(format!("{what}: missing {missing:?}, nobody's {more:?}"))
        }
    }
}
