//! Volcano vGPU: the annotations that its scheduler and its device plugin exchange.

use super::device_list::{self, DeviceEntry, NVIDIA};
use super::{
    BindContext, EncodedGrant, GrantError, PlacedGrant, RecordReader, ShareOnGpu, environment, memory_of,
    quoted,
};
use crate::dialect::asks::volcano::{CORES, MEMORY, MEMORY_PERCENTAGE, NUMBER, RESOURCES};
use crate::model::{Cores, Grant, Share};
use crate::pod::ContainerManifest;
use crate::truncate;

/// The annotation with the chosen node.
pub const NODE: &str = "volcano.sh/vgpu-node";
/// The annotation with the time of the decision, in seconds since the Unix epoch.
pub const TIME: &str = "volcano.sh/vgpu-time";
/// The annotation with the devices of every container, which is the permanent record.
pub const IDS: &str = "volcano.sh/vgpu-ids-new";
/// A copy of the record, which the node erases container by container while it prepares the pod.
pub const TO_ALLOCATE: &str = "volcano.sh/devices-to-allocate";
/// The annotation with the phase: `allocating` when the pod is bound, `success` when it is prepared.
pub const BIND_PHASE: &str = "volcano.sh/bind-phase";
/// The annotation with the time of the binding, in seconds since the Unix epoch.
pub const BIND_TIME: &str = "volcano.sh/bind-time";

/// Volcano's scheduler lists a container in the record if it has one of these resources. For Partage, compute or a
/// percentage of memory alone is an ask, too.
const LISTED_RESOURCES: [&str; 2] = [NUMBER, MEMORY];

/// Adds the annotations of the pod and the environment of its containers.
pub(super) fn write(placed: &[&PlacedGrant<'_>], bind: &BindContext<'_>, written: &mut EncodedGrant) {
    let unit = unit(bind.settings.volcano_memory_factor);
    let device = |on_gpu: &ShareOnGpu<'_>| DeviceEntry {
        gpu: on_gpu.gpu.uuid.clone(),
        mig: None,
        kind: NVIDIA.into(),
        memory: u32::try_from(on_gpu.units(unit)).unwrap_or(u32::MAX),
        // Volcano's scheduler treats only 100 as exclusive.
        cores: if on_gpu.share.whole { 100 } else { on_gpu.percent() },
    };
    // Volcano's tools match the list with spec.containers, so all other containers are in the native record only.
    let apps = placed.iter().filter(|placed| placed.app_index.is_some());
    let devices: Vec<Vec<DeviceEntry>> =
        apps.map(|placed| placed.shares.iter().map(device).collect()).collect();
    let list = device_list::encode(&devices);
    let seconds = bind.now.seconds().to_string();
    for (key, value) in [
        (NODE, bind.node.name.to_string()),
        (TIME, seconds.clone()),
        (IDS, list.clone()),
        (TO_ALLOCATE, list),
        (BIND_PHASE, "allocating".into()),
        (BIND_TIME, seconds),
    ] {
        written.annotations.insert(key.into(), value);
    }
    for placed in placed {
        environment::enforcement_limits(placed, written.env_of(placed));
    }
}

/// Decodes the permanent record.
///
/// It lacks the compute ceiling, amounts finer than a unit of memory or a percent, a compute limit on an exclusive GPU, and
/// the shares of init containers and sidecars.
pub(super) fn read(record: &RecordReader<'_>) -> Result<Option<Vec<Grant>>, GrantError> {
    let Some(text) = record.annotation(IDS)? else { return Ok(None) };
    let names = ResourceNames { count: NUMBER, memory: MEMORY, percent: MEMORY_PERCENTAGE, cores: CORES };
    let unit = unit(record.settings.volcano_memory_factor);
    let list = DeviceListRecord { key: IDS, node_key: NODE, text, unit, names };
    list.read(record, &[record.requesting(&RESOURCES)?, record.requesting(&LISTED_RESOURCES)?])
}

/// An annotation with a device list.
pub(super) struct DeviceListRecord<'a> {
    pub(super) key: &'a str,
    /// The annotation with the node of the record.
    pub(super) node_key: &'a str,
    pub(super) text: &'a str,
    /// Size of one unit of memory in bytes.
    pub(super) unit: u64,
    pub(super) names: ResourceNames,
}

/// The resources whose requested amounts a list must cover.
pub(super) struct ResourceNames {
    pub(super) count: &'static str,
    pub(super) memory: &'static str,
    pub(super) percent: &'static str,
    pub(super) cores: &'static str,
}

/// Returns the size of one unit of `volcano.sh/vgpu-memory` in bytes.
pub(super) fn unit(factor: u32) -> u64 {
    // Zero stands for the default of 1.
    u64::from(factor.max(1)) << 20
}

impl DeviceListRecord<'_> {
    /// Decodes the list into grants. The list omits containers without a GPU or leaves their entries empty. `asking` has
    /// alternatives for the containers that it lists; the first alternative of the right length is used.
    pub(super) fn read(
        &self,
        record: &RecordReader<'_>,
        asking: &[Vec<&ContainerManifest>],
    ) -> Result<Option<Vec<Grant>>, GrantError> {
        // A record on a pod that requests no GPU is not a grant.
        if asking.iter().all(Vec::is_empty) {
            return Ok(None);
        }
        record.check_node(self.node_key)?;
        let list = device_list::decode(self.text);
        // Other tools may skip an invalid entry. Partage must not, because it would count held GPUs as free.
        if let Some(entry) = list.skipped.first() {
            let count = list.skipped.len();
            return Err(self.error(format!("{count} entries are invalid, the first is {entry}")));
        }
        let listed: Vec<Vec<DeviceEntry>> =
            list.containers.into_iter().filter(|list| !list.is_empty()).collect();
        let fits = |asking: &&Vec<&ContainerManifest>| !asking.is_empty() && asking.len() == listed.len();
        let containers = asking.iter().find(fits).ok_or_else(|| {
            let asked = asking.first().map_or(0, Vec::len);
            self.error(format!("lists {} containers, but {asked} of the pod request GPUs", listed.len()))
        })?;
        let grant = |(container, devices): (&&ContainerManifest, &Vec<DeviceEntry>)| {
            self.check_covers_limits(record, container, devices)?;
            let mut shares: Vec<Share> = Vec::new();
            for device in devices {
                let share = self.share(record, device)?;
                if shares.iter().any(|other| other.gpu == share.gpu) {
                    let name = truncate::shorten(container.name.as_str());
                    return Err(self.error(format!("allocates GPU {} to container {name} twice", share.gpu)));
                }
                shares.push(share);
            }
            Ok(Grant { container: container.name.clone(), init: false, shares })
        };
        containers.iter().zip(&listed).map(grant).collect::<Result<_, _>>().map(Some)
    }

    /// Refuses a record with less than the container's limits, because the container holds the rest, too.
    fn check_covers_limits(
        &self,
        record: &RecordReader<'_>,
        container: &ContainerManifest,
        devices: &[DeviceEntry],
    ) -> Result<(), GrantError> {
        let ResourceNames { count, memory, percent, cores } = self.names;
        let less = |resource: &str, given: u64, asked: u64| {
            let name = quoted(container.name.as_str());
            self.error(format!(
                "allocates {given} {resource} to container {name}, but its limits request {asked}"
            ))
        };
        let asked = record.amount(container, count)?.unwrap_or(1);
        let given = devices.len() as u64;
        if given < asked {
            return Err(less(count, given, asked));
        }
        // A percentage refers to a total that the other scheduler may have rounded differently.
        let memory_asked = match record.amount(container, percent)? {
            Some(_) => None,
            None => record.amount(container, memory)?,
        };
        for device in devices {
            let (memory_given, cores_given) = (u64::from(device.memory), u64::from(device.cores));
            if let Some(asked) = memory_asked.filter(|&asked| memory_given < asked) {
                return Err(less(memory, memory_given, asked));
            }
            if let Some(asked) = record.amount(container, cores)?.filter(|&asked| cores_given < asked) {
                return Err(less(cores, cores_given, asked));
            }
        }
        Ok(())
    }

    fn share(&self, record: &RecordReader<'_>, device: &DeviceEntry) -> Result<Share, GrantError> {
        let uuid = quoted(device.gpu.as_str());
        if let Some(mig) = &device.mig {
            let slot = quoted(&format!("{}-{}", mig.group, mig.position));
            return Err(
                self.error(format!("names MIG instance {slot} of GPU {uuid}: MIG is not supported yet"))
            );
        }
        let index = record.node.gpu_index(&device.gpu);
        let gpu = index.map(|index| &record.node.gpus[index]).ok_or_else(|| {
            self.error(format!("names GPU {uuid}, which node {} does not have", record.node.name))
        })?;
        let cores = Cores::percent(device.cores).ok_or_else(|| {
            self.error(format!("allocates {} % of GPU {uuid}: the maximum is 100", device.cores))
        })?;
        let memory = match u64::from(device.memory) {
            // The enforcement library treats 0 as no limit.
            0 => None,
            // The last, partial unit of a GPU cannot be expressed, so all units mean all memory.
            units if units == gpu.memory_bytes.0 / self.unit => Some(gpu.memory_bytes),
            units => Some(memory_of(self.key, units, self.unit)?),
        };
        Ok(Share {
            gpu: gpu.uuid.clone(),
            memory_bytes: memory,
            cores: Some(cores).filter(|&cores| cores > Cores::NONE),
            ceiling: None,
            whole: cores == Cores::WHOLE,
        })
    }

    fn error(&self, message: String) -> GrantError {
        GrantError::new(self.key, message)
    }
}
