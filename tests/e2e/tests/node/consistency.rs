//! Checks that all sources agree on which pod holds what: the pods, kubelet, the agent's files and audit, and the
//! containers.

use crate::test_node::{GPU_QUERY, TestNode};
use partage_agent::device_owner::{ContainerRuntime, DeviceHolder, DeviceOwners};
use partage_core::dialect::grants::native;
use partage_core::model::{Cores, PodGrant, Share};
use partage_host::gpus::uuid_bytes;
use partage_region::RegionHandle;
use partage_testkit::eventually;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Memory of a GPU of these tests, as a pod sees it that has the whole GPU.
const GPU_MEMORY: u64 = 40 << 30;

/// A pod that holds a grant.
pub(crate) struct GrantedPod {
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) grant: PodGrant,
    /// Whether its container reports the GPUs that it sees: [`crate::test_node::report_gpus_command`].
    pub(crate) witness: bool,
}

impl GrantedPod {
    /// Returns what a container with one share should report.
    pub(crate) fn expected_view(&self) -> String {
        let share = &self.grant.grants[0].shares[0];
        format!("{}, {} MiB", share.gpu, share.memory_bytes.map_or(GPU_MEMORY, |bytes| bytes.0) >> 20)
    }
}

impl TestNode<'_> {
    /// Waits until all sources agree, and returns the pods that hold grants.
    pub(crate) async fn wait_until_consistent(&self) -> Vec<GrantedPod> {
        eventually("the pods, kubelet, the files, the audit and the containers agree", async || {
            self.check_consistency().map_err(|why| format!("{why}\n{}", self.agent.log()))
        })
        .await
    }

    fn check_consistency(&self) -> Result<Vec<GrantedPod>, String> {
        let held = self.granted_pods()?;
        let holders =
            DeviceOwners::new(&self.node_path("/var/lib/kubelet"), ContainerRuntime::new(Path::new("/none")))
                .all();
        let holders = holders.ok_or("kubelet's checkpoint cannot be read")?;
        let mut expected: BTreeMap<String, &[Share]> = BTreeMap::new();
        for pod in &held {
            for grant in &pod.grant.grants {
                let is_it =
                    |one: &&DeviceHolder| one.uid.as_str() == pod.uid && one.container == grant.container;
                let holder = holders.iter().find(is_it).and_then(|one| one.key.clone());
                let key = holder.ok_or(format!("kubelet has no devices for {}", pod.name))?;
                expected.insert(key.to_string(), &grant.shares);
            }
        }
        let keys: BTreeSet<String> = expected.keys().cloned().collect();
        check_same_names("CDI files", &keys, &self.file_names("/run/cdi", "partage.dev-grant-"))?;
        check_same_names("regions", &keys, &self.file_names("/run/partage/regions", ""))?;
        let uids = held.iter().map(|pod| pod.uid.clone()).collect();
        check_same_names("records", &uids, &self.file_names("/var/lib/partage/pods", ""))?;
        for (key, shares) in &expected {
            let limits = self.region_limits(key)?;
            if limits != expected_limits(shares) {
                return Err(format!("region {key}: {limits:?}, but the grant is {shares:?}"));
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
                return Err(format!("{bytes} bytes of {} are granted", gpu.uuid));
            }
        }
        if !given.is_empty() {
            return Err(format!("grants on unknown GPUs: {given:?}"));
        }
        for pod in held.iter().filter(|pod| pod.witness) {
            match self.reported_gpus(pod) {
                Some(output) if output == pod.expected_view() => {}
                output => {
                    return Err(format!(
                        "{} reports {output:?}, but was granted {}",
                        pod.name,
                        pod.expected_view()
                    ));
                }
            }
        }
        match self.metric_sum("partage_ledger_mismatch")? {
            0.0 => Ok(held),
            mismatches => Err(format!("{mismatches} mismatches")),
        }
    }

    /// Returns the pods whose containers have started and not finished; all of them must have a grant annotation.
    fn granted_pods(&self) -> Result<Vec<GrantedPod>, String> {
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
            let text = text.ok_or(format!("{name} has no grant annotation"))?;
            let grant = native::decode(text).map_err(|error| error.to_string())?;
            let uid = pod["metadata"]["uid"].as_str().unwrap_or_default().to_string();
            let witness = pod["spec"]["containers"][0]["command"].to_string().contains(GPU_QUERY);
            held.push(GrantedPod { name, uid, grant, witness });
        }
        Ok(held)
    }

    /// Returns the GPU line that a pod's container printed after its last start, from the node's log files:
    /// [`crate::test_node::report_gpus_command`].
    pub(crate) fn reported_gpus(&self, pod: &GrantedPod) -> Option<String> {
        let folder = self.node_path(&format!("/var/log/pods/default_{}_{}/main", pod.name, pod.uid));
        let logs =
            std::fs::read_dir(folder).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let last = logs.filter_map(|name| name.strip_suffix(".log")?.parse::<u32>().ok()).max()?;
        let folder = format!("/var/log/pods/default_{}_{}/main/{last}.log", pod.name, pod.uid);
        let text = std::fs::read_to_string(self.node_path(&folder)).ok()?;
        let mut output = text.lines().filter_map(|line| Some(line.split_once(" stdout F ")?.1));
        output.find(|line| line.starts_with("GPU-")).map(str::to_string)
    }

    /// Makes a container with [`crate::test_node::report_gpus_command`] exit; kubelet restarts it.
    pub(crate) fn crash_container(&self, name: &str) {
        let file = self.node_path(&format!("/var/lib/programs/{name}"));
        let rounds = std::fs::read_to_string(&file).unwrap_or_default();
        std::fs::write(file, format!("{}x\n", rounds.trim())).unwrap();
    }

    pub(crate) fn node_path(&self, inside: &str) -> PathBuf {
        self.agent.path(inside).unwrap()
    }

    fn file_names(&self, folder: &str, beginning: &str) -> BTreeSet<String> {
        let entries = std::fs::read_dir(self.node_path(folder)).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names
            .filter_map(|name| Some(name.strip_prefix(beginning)?.trim_end_matches(".json").to_string()))
            .collect()
    }

    fn region_limits(&self, key: &str) -> Result<Vec<RegionLimits>, String> {
        let folder = self.node_path(&format!("/run/partage/regions/{key}"));
        let region = RegionHandle::open(&folder).map_err(|error| format!("region {key}: {error}"))?;
        let shares = (0..region.owner().gpus()).filter_map(|gpu| region.owner().share(gpu));
        let limits = shares.map(|share| RegionLimits {
            gpu: share.uuid,
            memory: share.memory,
            cores: share.cores,
            ceiling: share.ceiling,
        });
        Ok(limits.collect())
    }
}

/// The limits of one GPU in a region. Compute is in thousandths of a percent: 0 is no guarantee, 100,000 no ceiling.
#[derive(Debug, PartialEq, Eq)]
struct RegionLimits {
    gpu: [u8; 16],
    memory: u64,
    cores: u32,
    ceiling: u32,
}

fn expected_limits(shares: &[Share]) -> Vec<RegionLimits> {
    let one = |share: &Share| {
        let millipercent = |cores: Cores| cores.as_millipercent();
        // A container that has the whole GPU needs no guarantee.
        let cores = share.cores.filter(|_| !share.whole);
        RegionLimits {
            gpu: uuid_bytes(&share.gpu).unwrap(),
            memory: share.memory_bytes.map_or(u64::MAX, |bytes| bytes.0),
            cores: cores.map_or(0, millipercent),
            ceiling: share.ceiling.or(share.cores).map_or(100_000, millipercent),
        }
    };
    shares.iter().map(one).collect()
}

fn check_same_names(what: &str, expected: &BTreeSet<String>, there: &BTreeSet<String>) -> Result<(), String> {
    if expected == there {
        Ok(())
    } else {
        let (missing, more) = (expected - there, there - expected);
        Err(format!("{what}: missing {missing:?}, orphaned {more:?}"))
    }
}
