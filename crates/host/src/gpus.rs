//! The machine's GPUs, as NVML tells of them: what they are, how they are, and who uses them.

mod busy;
mod events;
mod health;
mod identity;
mod look;
mod words;
mod xid;

pub use health::Fatal;
pub use look::{Look, Working};

use crate::driver::Driver;
use events::Events;
use health::Health;
use identity::Identity;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use partage_core::model::{Gpu, GpuUuid, Link, Links, Node};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

/// Why the driver tells nothing about its GPUs.
#[derive(Debug, thiserror::Error)]
pub enum GpusError {
    /// The library cannot be loaded.
    #[error("{}: NVML cannot be loaded: {what}; install the driver's package again", path.display())]
    NoLibrary {
        /// The file.
        path: PathBuf,
        /// What the loader said.
        what: String,
    },
    /// The kernel has no driver.
    #[error(
        "the NVIDIA driver's libraries are installed, and its kernel module is not loaded: load it (sudo modprobe nvidia), or restart the machine"
    )]
    NotLoaded,
    /// The kernel has another driver than the libraries'.
    #[error(
        "the NVIDIA driver in the kernel has another version than its libraries, as after an update: restart the machine, or load the new module"
    )]
    VersionMismatch,
    /// This user may not.
    #[error(
        "the NVIDIA driver refuses this user: its device files (/dev/nvidiactl, /dev/nvidia*) must be readable and writable for you"
    )]
    NoPermission,
    /// A driver without GPUs.
    #[error(
        "the NVIDIA driver has no GPU: look whether the card is seen (lspci -d 10de:) and what the driver says (dmesg)"
    )]
    NoGpu,
    /// The driver is older than its questions.
    #[error("the NVIDIA driver is too old to tell {asked}: install 510 or newer")]
    TooOld {
        /// What was asked.
        asked: &'static str,
    },
    /// Something else.
    #[error("the NVIDIA driver does not tell {asked}: {what}")]
    Refused {
        /// What was asked.
        asked: &'static str,
        /// Its answer.
        what: String,
    },
}

/// One session with NVML. Ended with the value, so that a driver can be unloaded.
#[derive(Debug)]
pub struct Gpus {
    nvml: Arc<Nvml>,
    version: String,
    /// In the driver's order.
    gpus: Mutex<Vec<Seen>>,
}

/// What is known of a GPU from looks at it.
#[derive(Debug)]
struct Seen {
    /// From its first answer on: a GPU that is lost does not even tell its name.
    identity: Option<Identity>,
    events: Events,
    health: Health,
    busy: busy::Busy,
}

impl Seen {
    /// A GPU that answers: asks for its reports, and what was not known of it.
    fn meet(&mut self, device: &Device<'_>) {
        self.events.register(device);
        if self.identity.is_none() {
            self.identity = Identity::of(device).ok();
        }
    }
}

impl Gpus {
    /// Begins a session with a driver that is loaded and has GPUs. What happens to them is remembered from here on.
    pub fn open(driver: &Driver) -> Result<Gpus, GpusError> {
        let nvml = Nvml::builder().lib_path(driver.nvml.as_os_str()).init();
        let nvml = Arc::new(nvml.map_err(|error| words::opening(error, driver))?);
        let version = nvml.sys_driver_version().map_err(words::refused("its version"))?;
        let count = nvml.device_count().map_err(words::refused("how many GPUs it has"))?;
        if count == 0 {
            return Err(GpusError::NoGpu);
        }
        let seen = |_| Seen {
            identity: None,
            events: Events::new(&nvml),
            health: Health::default(),
            busy: busy::Busy::default(),
        };
        let mut gpus: Vec<Seen> = (0..count).map(seen).collect();
        for (index, seen) in gpus.iter_mut().enumerate() {
            // One that is lost is asked again with every look.
            if let Ok(device) = nvml.device_by_index(index as u32) {
                seen.events.register(&device);
                seen.identity = match Identity::of(&device) {
                    Ok(identity) => Some(identity),
                    Err(NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound) => {
                        return Err(GpusError::TooOld { asked: "what its GPUs are" });
                    }
                    Err(_) => None,
                };
            }
        }
        tracing::debug!(driver = version, gpus = count, "NVML session opened");
        Ok(Gpus { nvml, version, gpus: Mutex::new(gpus) })
    }

    /// The driver's version, such as `550.163.01`.
    pub fn driver_version(&self) -> &str {
        &self.version
    }

    /// How many GPUs the driver counts now, whether they answer or not; `None` where it does not tell.
    pub fn counted(&self) -> Option<usize> {
        self.nvml.device_count().ok().map(|count| count as usize)
    }

    /// The machine as a node: every GPU that has answered since the session began, and how they are linked. Those in MIG
    /// mode are withheld. How they are changes from look to look: [`Gpus::look`] tells.
    pub fn node(&self, name: &str) -> Result<Node, GpusError> {
        let mut seen = self.seen();
        let mut gpus = Vec::new();
        let mut indexes = Vec::new();
        for (index, seen) in seen.iter_mut().enumerate() {
            let device = self.nvml.device_by_index(index as u32);
            if let Ok(device) = &device {
                seen.meet(device);
            }
            let Some(identity) = &seen.identity else { continue };
            let mig = device.as_ref().is_ok_and(|device| identity::is_split(device) == Some(true));
            let withheld = mig.then(|| identity::split(&identity.gpu.uuid));
            gpus.push(Gpu { withheld, ..identity.gpu.clone() });
            indexes.push(index as u32);
        }
        if gpus.is_empty() {
            return Err(GpusError::Refused {
                asked: "what its GPUs are",
                what: "none of them answers; see dmesg for what happened to them, and restart the machine"
                    .into(),
            });
        }
        let mut node = Node::new(name, gpus);
        // Links of GPUs that do not answer are as the node has them without: by NUMA.
        let far = |a: usize, b: usize| node.link(a, b);
        node.links = Some(Links::from_fn(indexes.len(), |a, b| match a == b {
            true => Link::NvLink,
            // Asked one way, so that both ways are the same.
            false => {
                identity::link(&self.nvml, indexes[a.min(b)], indexes[a.max(b)]).unwrap_or_else(|| far(a, b))
            }
        }));
        Ok(node)
    }

    /// How the GPUs are at this moment, in the driver's order. A GPU that does not answer is told with what is wrong;
    /// one that has never answered since the session began has no name to tell it by, and is left out.
    pub fn look(&self) -> Vec<Look> {
        let mut seen = self.seen();
        let look =
            |(index, seen): (usize, &mut Seen)| look::at(seen, self.nvml.device_by_index(index as u32));
        seen.iter_mut().enumerate().filter_map(look).collect()
    }

    /// What makes GPUs unusable until they are reset, as of the last look: for who begins a session later.
    pub fn fatal(&self) -> Vec<Fatal> {
        let of = |seen: &Seen| seen.health.fatal(&seen.identity.as_ref()?.gpu.uuid);
        self.seen().iter().filter_map(of).collect()
    }

    /// Takes up what an earlier session in this boot knew. A GPU that was reset meanwhile is found to be with the next look; one
    /// that does not answer now has been gone when it does.
    pub fn remember(&self, fatal: Vec<Fatal>) {
        let mut seen = self.seen();
        for fatal in fatal {
            let is = |seen: &&mut Seen| seen.identity.as_ref().is_some_and(|id| id.gpu.uuid == fatal.uuid);
            if let Some(seen) = seen.iter_mut().find(is) {
                seen.health.remember(&fatal);
            }
        }
    }

    fn seen(&self) -> MutexGuard<'_, Vec<Seen>> {
        // Every change to it is whole.
        self.gpus.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// The bytes of a UUID as CUDA has them: of `GPU-…`, `None` for anything else.
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
pub fn uuid_of(bytes: [u8; 16]) -> GpuUuid {
    let digits = format!("{:032x}", u128::from_be_bytes(bytes));
    let part = |range: std::ops::Range<usize>| &digits[range];
    format!("GPU-{}-{}-{}-{}-{}", part(0..8), part(8..12), part(12..16), part(16..20), part(20..32)).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_bytes_and_back() {
        let uuid = GpuUuid::from("GPU-0123abcd-4567-89ef-fedc-ba9876543210");
        let bytes = uuid_bytes(&uuid).unwrap();
        assert_eq!(bytes[..6], [0x01, 0x23, 0xab, 0xcd, 0x45, 0x67]);
        assert_eq!(uuid_of(bytes), uuid);
        assert_eq!(uuid_bytes(&"GPU-0123ABCD-4567-89EF-FEDC-BA9876543210".into()), Some(bytes));
    }

    #[test]
    fn what_is_no_uuid_has_no_bytes() {
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
    fn a_session_may_be_used_by_all_threads() {
        fn is_shared<T: Send + Sync>() {}
        is_shared::<Gpus>();
    }
}
