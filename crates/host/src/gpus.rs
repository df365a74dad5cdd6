//! The GPUs of the machine, from NVML: their identity, their health, and the processes on them.

mod errors;
mod events;
mod health;
mod identity;
mod process_utilization;
mod sample;
mod xid;

pub use health::FatalGpuError;
pub use sample::{GpuProcess, GpuSample};

use crate::driver::InstalledDriver;
use events::XidEvents;
use health::HealthTracker;
use identity::GpuIdentity;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use partage_core::model::{Gpu, GpuLink, GpuUuid, LinkMatrix, Node};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

/// Why NVML cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NvmlSessionError {
    /// The library cannot be loaded.
    #[error("{}: cannot load NVML: {what}; reinstall the driver's package", path.display())]
    LoadFailed {
        /// The path of the library.
        path: PathBuf,
        /// The error of the loader.
        what: String,
    },
    /// The kernel module is not loaded.
    #[error(
        "the NVIDIA driver's kernel module is not loaded: load it (sudo modprobe nvidia), or restart the machine"
    )]
    KernelModuleNotLoaded,
    /// The kernel module and the libraries have different versions.
    #[error(
        "the NVIDIA kernel module has another version than the driver's libraries, as after an update: restart the machine, or load the new module"
    )]
    VersionMismatch,
    /// This user may not use the driver.
    #[error(
        "no permission to use the NVIDIA driver: its device files (/dev/nvidiactl, /dev/nvidia*) must be readable and writable for this user"
    )]
    PermissionDenied,
    /// The driver has no GPUs.
    #[error(
        "the NVIDIA driver found no GPU: check that the card is on the bus (lspci -d 10de:) and what the driver logged (dmesg)"
    )]
    NoGpu,
    /// The driver lacks a function that is needed.
    #[error("the NVIDIA driver is too old to report {asked}: install version 510 or newer")]
    DriverTooOld {
        /// The property that was queried.
        asked: &'static str,
    },
    /// A query of NVML failed.
    #[error("the NVIDIA driver cannot report {asked}: {what}")]
    QueryFailed {
        /// The property that was queried.
        asked: &'static str,
        /// The error of NVML.
        what: String,
    },
}

/// A session with NVML. Dropping it ends the session, so that the driver can be unloaded.
#[derive(Debug)]
pub struct NvmlSession {
    nvml: Arc<Nvml>,
    version: String,
    /// The GPUs in the driver's order.
    gpus: Mutex<Vec<TrackedGpu>>,
}

/// The state of a GPU that is kept between samples.
#[derive(Debug)]
struct TrackedGpu {
    /// Known from the first answer of the GPU on: a lost GPU does not even report its UUID.
    identity: Option<GpuIdentity>,
    events: XidEvents,
    health: HealthTracker,
    utilization: process_utilization::ProcessUtilization,
}

impl TrackedGpu {
    /// Registers for the events of a GPU that answers, and reads its identity if it is not known yet.
    fn on_answer(&mut self, device: &Device<'_>) {
        self.events.register(device);
        if self.identity.is_none() {
            self.identity = GpuIdentity::of(device).ok();
        }
    }
}

impl NvmlSession {
    /// Opens a session. The driver must be loaded and have GPUs. Events of the GPUs are collected from here on.
    pub fn open(driver: &InstalledDriver) -> Result<NvmlSession, NvmlSessionError> {
        let nvml = Nvml::builder().lib_path(driver.nvml.as_os_str()).init();
        let nvml = Arc::new(nvml.map_err(|error| errors::open_error(error, driver))?);
        let version = nvml.sys_driver_version().map_err(errors::query_error("its version"))?;
        let count = nvml.device_count().map_err(errors::query_error("how many GPUs it has"))?;
        if count == 0 {
            return Err(NvmlSessionError::NoGpu);
        }
        let tracked = |_| TrackedGpu {
            identity: None,
            events: XidEvents::new(&nvml),
            health: HealthTracker::default(),
            utilization: process_utilization::ProcessUtilization::default(),
        };
        let mut gpus: Vec<TrackedGpu> = (0..count).map(tracked).collect();
        for (index, tracked) in gpus.iter_mut().enumerate() {
            // A GPU that is lost is queried again with every sample.
            if let Ok(device) = nvml.device_by_index(index as u32) {
                tracked.events.register(&device);
                tracked.identity = match GpuIdentity::of(&device) {
                    Ok(identity) => Some(identity),
                    Err(NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound) => {
                        return Err(NvmlSessionError::DriverTooOld { asked: "the identity of its GPUs" });
                    }
                    Err(_) => None,
                };
            }
        }
        tracing::debug!(driver = version, gpus = count, "NVML session opened");
        Ok(NvmlSession { nvml, version, gpus: Mutex::new(gpus) })
    }

    /// Returns the version of the driver, such as `550.163.01`.
    pub fn driver_version(&self) -> &str {
        &self.version
    }

    /// Returns how many GPUs the driver counts now, whether they answer or not; `None` if the query fails.
    pub fn device_count(&self) -> Option<usize> {
        self.nvml.device_count().ok().map(|count| count as usize)
    }

    /// Returns the machine as a node: every GPU that has answered since the session began, and the links between them.
    /// GPUs in MIG mode are withheld. Health is not part of it: see [`NvmlSession::sample`].
    pub fn node(&self, name: &str) -> Result<Node, NvmlSessionError> {
        let mut tracked = self.tracked();
        let mut gpus = Vec::new();
        let mut indexes = Vec::new();
        for (index, tracked) in tracked.iter_mut().enumerate() {
            let device = self.nvml.device_by_index(index as u32);
            if let Ok(device) = &device {
                tracked.on_answer(device);
            }
            let Some(identity) = &tracked.identity else { continue };
            let mig = device.as_ref().is_ok_and(|device| identity::is_split(device) == Some(true));
            let withheld = mig.then(|| identity::split(&identity.gpu.uuid));
            gpus.push(Gpu { withheld, ..identity.gpu.clone() });
            indexes.push(index as u32);
        }
        if gpus.is_empty() {
            return Err(NvmlSessionError::QueryFailed {
                asked: "the identity of its GPUs",
                what: "no GPU responds; see dmesg for the cause, and restart the machine".into(),
            });
        }
        let mut node = Node::new(name, gpus);
        // Links of GPUs that do not respond are derived from NUMA nodes.
        let far = |a: usize, b: usize| node.link(a, b);
        node.links = Some(LinkMatrix::from_fn(indexes.len(), |a, b| {
            if a == b {
                return GpuLink::NvLink;
            }
            // Queried in one direction, so that both directions agree.
            let link = identity::link(&self.nvml, indexes[a.min(b)], indexes[a.max(b)]);
            link.unwrap_or_else(|| far(a, b))
        }));
        Ok(node)
    }

    /// Samples all GPUs, in the driver's order. The sample of a GPU that does not respond has the reason; a GPU that has
    /// never answered since the session began has no known UUID, and is left out.
    pub fn sample(&self) -> Vec<GpuSample> {
        let mut tracked = self.tracked();
        let sample = |(index, tracked): (usize, &mut TrackedGpu)| {
            sample::take(tracked, self.nvml.device_by_index(index as u32))
        };
        tracked.iter_mut().enumerate().filter_map(sample).collect()
    }

    /// Returns the errors that make GPUs unusable until they are reset, as of the last sample, for a later session.
    pub fn fatal_errors(&self) -> Vec<FatalGpuError> {
        let of = |tracked: &TrackedGpu| tracked.health.fatal(&tracked.identity.as_ref()?.gpu.uuid);
        self.tracked().iter().filter_map(of).collect()
    }

    /// Restores the errors that an earlier session of this boot found. The next sample clears those of a GPU that was
    /// reset meanwhile; a GPU that does not respond now counts as reset when it responds again.
    pub fn restore_fatal_errors(&self, fatal: Vec<FatalGpuError>) {
        let mut tracked = self.tracked();
        for fatal in fatal {
            let is = |tracked: &&mut TrackedGpu| {
                tracked.identity.as_ref().is_some_and(|id| id.gpu.uuid == fatal.uuid)
            };
            if let Some(tracked) = tracked.iter_mut().find(is) {
                tracked.health.remember(&fatal);
            }
        }
    }

    fn tracked(&self) -> MutexGuard<'_, Vec<TrackedGpu>> {
        // Every change under the lock leaves a valid state, also if a thread panics.
        self.gpus.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Returns the bytes of a UUID of the form `GPU-…`, as CUDA has them; `None` for any other text.
pub fn uuid_bytes(uuid: &GpuUuid) -> Option<[u8; 16]> {
    let text = uuid.as_str().strip_prefix("GPU-")?;
    let parts: Vec<&str> = text.split('-').collect();
    let lengths = parts.iter().map(|part| part.len());
    if !lengths.eq([8, 4, 4, 4, 12]) || !text.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit()) {
        return None;
    }
    Some(u128::from_str_radix(&parts.concat(), 16).ok()?.to_be_bytes())
}

/// Returns the UUID with these bytes: the inverse of [`uuid_bytes`].
pub fn uuid_from_bytes(bytes: [u8; 16]) -> GpuUuid {
    let digits = format!("{:032x}", u128::from_be_bytes(bytes));
    let part = |range: std::ops::Range<usize>| &digits[range];
    format!("GPU-{}-{}-{}-{}-{}", part(0..8), part(8..12), part(12..16), part(16..20), part(20..32)).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_converts_to_bytes_and_back() {
        let uuid = GpuUuid::from("GPU-0123abcd-4567-89ef-fedc-ba9876543210");
        let bytes = uuid_bytes(&uuid).unwrap();
        assert_eq!(bytes[..6], [0x01, 0x23, 0xab, 0xcd, 0x45, 0x67]);
        assert_eq!(uuid_from_bytes(bytes), uuid);
        assert_eq!(uuid_bytes(&"GPU-0123ABCD-4567-89EF-FEDC-BA9876543210".into()), Some(bytes));
    }

    #[test]
    fn malformed_uuid_has_no_bytes() {
        for wrong in [
            "",
            "GPU-",
            "MIG-0123abcd-4567-89ef-fedc-ba9876543210",
            "0123abcd-4567-89ef-fedc-ba9876543210",
            "GPU-0123abcd456789effedcba9876543210",
            "GPU-+123abcd-4567-89ef-fedc-ba9876543210",
            "GPU-0123abcd-4567-89ef-fedc-ba98765432101",
            "GPU-0123abcg-4567-89ef-fedc-ba9876543210",
            "GPU-é123ab-4567-89ef-fedc-ba9876543210",
        ] {
            assert_eq!(uuid_bytes(&wrong.into()), None, "{wrong}");
        }
    }

    #[test]
    fn session_is_send_and_sync() {
        fn is_shared<T: Send + Sync>() {}
        is_shared::<NvmlSession>();
    }
}
