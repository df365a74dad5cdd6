//! Volcano vGPU: the annotations between its scheduler and its device plugin.

use super::device_list::{self, Device, NVIDIA};
use super::{Bind, GrantError, Placed, PlacedShare, Record, Written, environment, memory_of, quoted};
use crate::dialect::asks::volcano::{CORES, MEMORY, MEMORY_PERCENTAGE, NUMBER, RESOURCES};
use crate::model::{Cores, Grant, Share};
use crate::pod::Container;
use crate::quote;

/// The node chosen.
pub const NODE: &str = "volcano.sh/vgpu-node";
/// When, in seconds.
pub const TIME: &str = "volcano.sh/vgpu-time";
/// The devices of every container: the lasting record.
pub const IDS: &str = "volcano.sh/vgpu-ids-new";
/// The same, erased container by container while the node sets the pod up.
pub const TO_ALLOCATE: &str = "volcano.sh/devices-to-allocate";
/// `allocating` from the bind on.
pub const BIND_PHASE: &str = "volcano.sh/bind-phase";
/// When the pod was bound, in seconds.
pub const BIND_TIME: &str = "volcano.sh/bind-time";

/// The resources that make a container one of those the record lists, for Volcano's own scheduler.
/// To us, compute or a percentage of memory alone is an ask, too.
const COUNTED: [&str; 2] = [NUMBER, MEMORY];

pub(super) fn write(placed: &[&Placed<'_>], bind: &Bind<'_>, written: &mut Written) {
    let unit = unit(bind.settings.volcano_memory_factor);
    let device = |part: &PlacedShare<'_>| Device {
        gpu: part.gpu.uuid.clone(),
        mig: None,
        kind: NVIDIA.into(),
        memory: u32::try_from(part.units(unit)).unwrap_or(u32::MAX),
        // To Volcano's scheduler 100 alone means that nobody else fits.
        cores: if part.share.whole { 100 } else { part.percent() },
    };
    // Volcano's tools match the list against spec.containers, so the other containers are only in the native
    // record.
    let apps = placed.iter().filter(|placed| placed.app_index.is_some());
    let devices: Vec<Vec<Device>> = apps.map(|placed| placed.parts.iter().map(device).collect()).collect();
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

/// Reads the lasting record.
///
/// Not in it: the ceiling of compute, amounts finer than a unit of memory or a percent, a cap on the compute of a
/// GPU nobody else is on, the shares of init containers and sidecars.
pub(super) fn read(record: &Record<'_>) -> Result<Option<Vec<Grant>>, GrantError> {
    let Some(text) = record.annotation(IDS)? else { return Ok(None) };
    let names = Names { count: NUMBER, memory: MEMORY, percent: MEMORY_PERCENTAGE, cores: CORES };
    let unit = unit(record.settings.volcano_memory_factor);
    let list = List { key: IDS, node_key: NODE, text, unit, names };
    list.read(record, &[record.asking(&RESOURCES)?, record.asking(&COUNTED)?])
}

/// An annotation with a device list.
pub(super) struct List<'a> {
    pub(super) key: &'a str,
    /// The annotation that says for which node it is.
    pub(super) node_key: &'a str,
    pub(super) text: &'a str,
    /// One unit of memory in bytes.
    pub(super) unit: u64,
    pub(super) names: Names,
}

/// The resources whose amounts a list must come up to.
pub(super) struct Names {
    pub(super) count: &'static str,
    pub(super) memory: &'static str,
    pub(super) percent: &'static str,
    pub(super) cores: &'static str,
}

/// One unit of `volcano.sh/vgpu-memory` in bytes.
pub(super) fn unit(factor: u32) -> u64 {
    // Zero would count nothing: it stands for the default.
    u64::from(factor.max(1)) << 20
}

impl List<'_> {
    /// Reads it as grants. `asking` are the ways to tell which containers it lists, the first that fits its length
    /// decides: the list leaves out containers without a GPU, or leaves them empty.
    pub(super) fn read(
        &self,
        record: &Record<'_>,
        asking: &[Vec<&Container>],
    ) -> Result<Option<Vec<Grant>>, GrantError> {
        // Text on a pod that asks for nothing is no grant.
        if asking.iter().all(Vec::is_empty) {
            return Ok(None);
        }
        record.made_for_this_node(self.node_key)?;
        let list = device_list::decode(self.text);
        // A tool may go on without an entry; who counts what is held may not.
        if let Some(entry) = list.skipped.first() {
            let count = list.skipped.len();
            return Err(self.wrong(format!("{count} entries are no devices, the first is {entry}")));
        }
        let listed: Vec<Vec<Device>> = list.containers.into_iter().filter(|list| !list.is_empty()).collect();
        let fits = |asking: &&Vec<&Container>| !asking.is_empty() && asking.len() == listed.len();
        let containers = asking.iter().find(fits).ok_or_else(|| {
            let asked = asking.first().map_or(0, Vec::len);
            self.wrong(format!("lists {} containers, but {asked} of the pod's ask for GPUs", listed.len()))
        })?;
        let grant = |(container, devices): (&&Container, &Vec<Device>)| {
            self.gives_what_is_asked(record, container, devices)?;
            let mut shares: Vec<Share> = Vec::new();
            for device in devices {
                let share = self.share(record, device)?;
                if shares.iter().any(|other| other.gpu == share.gpu) {
                    let name = quote::short(container.name.as_str());
                    return Err(self.wrong(format!("gives container {name} twice GPU {}", share.gpu)));
                }
                shares.push(share);
            }
            Ok(Grant { container: container.name.clone(), init: false, shares })
        };
        containers.iter().zip(&listed).map(grant).collect::<Result<_, _>>().map(Some)
    }

    /// Refuses a record of less than the container's limits: what it leaves out is held all the same.
    fn gives_what_is_asked(
        &self,
        record: &Record<'_>,
        container: &Container,
        devices: &[Device],
    ) -> Result<(), GrantError> {
        let Names { count, memory, percent, cores } = self.names;
        let less = |resource: &str, given: u64, asked: u64| {
            let name = quoted(container.name.as_str());
            self.wrong(format!("gives container {name} {given} {resource}, and its limits ask for {asked}"))
        };
        let asked = record.amount(container, count)?.unwrap_or(1);
        let given = devices.len() as u64;
        if given < asked {
            return Err(less(count, given, asked));
        }
        // A percentage is of a total that the other scheduler rounded in its own way.
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

    fn share(&self, record: &Record<'_>, device: &Device) -> Result<Share, GrantError> {
        let uuid = quoted(device.gpu.as_str());
        if let Some(mig) = &device.mig {
            let slot = quoted(&format!("{}-{}", mig.group, mig.position));
            return Err(
                self.wrong(format!("names MIG instance {slot} of GPU {uuid}: MIG is not supported yet"))
            );
        }
        let index = record.node.gpu_index(&device.gpu);
        let gpu = index.map(|index| &record.node.gpus[index]).ok_or_else(|| {
            self.wrong(format!("names GPU {uuid}, which node {} does not have", record.node.name))
        })?;
        let cores = Cores::percent(device.cores)
            .ok_or_else(|| self.wrong(format!("gives {} % of GPU {uuid}: there are 100", device.cores)))?;
        let memory = match u64::from(device.memory) {
            // The enforcement library takes 0 for no limit.
            0 => None,
            // The last, partial unit of a GPU cannot be written: all units are all its memory.
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

    fn wrong(&self, message: String) -> GrantError {
        GrantError::new(self.key, message)
    }
}
