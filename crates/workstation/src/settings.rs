//! The settings file: the GPUs that the machine shares, and the limits of its users.

use crate::protocol::ComputeMode;
use crate::state_dir::StateDir;
use crate::users::{self, UserIdentity};
use partage_core::model::{
    Bytes, Cores, Gpu, GpuUuid, MAX_PRIORITY, Node, Oversubscription, PlacementPolicy, TotalCores,
};
use partage_core::place::defaults;
use partage_core::quantity::Quantity;
use partage_enforce::gpus::DriverChoice;
use partage_host::simulated_driver::{self, MAX_SIMULATED_GPUS, SimulatedGpus};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Deserializer};
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The settings file of root's daemon.
pub const MACHINE_SETTINGS_FILE: &str = "/etc/partage/partage.yaml";

/// The maximum size of a settings file, in bytes.
const MAX_SETTINGS_BYTES: u64 = 1 << 20;

/// The mode bits that let the group and other users write a file.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// The settings of a workstation.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct WorkstationSettings {
    /// The driver to use.
    pub driver: DriverChoice,
    /// The simulated GPUs, if the driver is simulated.
    pub simulated: SimulatedGpus,
    /// The loopback address where `partage up` serves metrics; `off` disables them.
    #[serde(deserialize_with = "address")]
    pub metrics: Option<SocketAddr>,
    /// The policy for placing shares.
    #[serde(deserialize_with = "policy")]
    pub policy: PlacementPolicy,
    /// Whether shares may allocate memory above their limit on the host: `allowed` or `refused`.
    pub oversubscribe: Oversubscription,
    /// The highest priority that users other than root and the daemon's own may request.
    pub max_priority: u32,
    /// Whether copies and fills wait for turns as launches do.
    pub throttle_copies: bool,
    /// The size of a share that is requested without one.
    pub default: DefaultShare,
    /// The rules for users, of which the first that matches applies. A user without a matching rule gets nothing;
    /// without any rules there are no limits.
    pub users: Vec<UserRule>,
    /// The parts of GPUs that are reserved for users.
    pub reservations: Vec<Reservation>,
}

impl Default for WorkstationSettings {
    fn default() -> Self {
        WorkstationSettings {
            driver: DriverChoice::default(),
            simulated: SimulatedGpus::default(),
            metrics: Some(SocketAddr::from(([127, 0, 0, 1], 9464))),
            policy: defaults::WORKSTATION_POLICY,
            oversubscribe: Oversubscription::Allowed,
            max_priority: 0,
            throttle_copies: false,
            default: DefaultShare::default(),
            users: Vec::new(),
            reservations: Vec::new(),
        }
    }
}

/// The size of a share that is requested without one.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct DefaultShare {
    /// The memory limit; if absent, all of the GPU's memory.
    #[serde(deserialize_with = "memory")]
    pub memory: Option<Bytes>,
    /// The guaranteed compute; if absent, none.
    #[serde(deserialize_with = "cores")]
    pub cores: Option<Cores>,
    /// Whether idle time may be used; if absent, it may.
    pub mode: Option<ComputeMode>,
}

/// The limits of a user or a group.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct UserRule {
    /// The users that the rule applies to.
    pub apply_to: UserSelector,
    /// The maximum number of shares at a time.
    #[serde(default)]
    pub shares: Option<u32>,
    /// The maximum memory of all shares of a user together.
    #[serde(default, deserialize_with = "memory")]
    pub memory: Option<Bytes>,
    /// The maximum compute of all shares of a user together.
    #[serde(default, deserialize_with = "total_cores")]
    pub cores: Option<TotalCores>,
    /// The maximum number of GPUs of one share.
    #[serde(default)]
    pub gpus: Option<u32>,
    /// Whether whole GPUs may be requested; if absent, they may.
    #[serde(default)]
    pub whole: Option<bool>,
    /// The GPUs that may be used: indexes, UUIDs or parts of the model name; if absent, all.
    #[serde(default)]
    pub only: Option<Vec<GpuSelector>>,
}

/// A part of a GPU that is reserved for a user or a group.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Reservation {
    /// The users that it is reserved for.
    pub apply_to: UserSelector,
    /// The GPU, by index or UUID.
    pub gpu: GpuSelector,
    /// The memory that is reserved.
    #[serde(default, deserialize_with = "memory")]
    pub memory: Option<Bytes>,
    /// The compute that is reserved.
    #[serde(default, deserialize_with = "cores")]
    pub cores: Option<Cores>,
}

/// Selects a user, the members of a group, or all users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UserSelector {
    /// A user, by name and id.
    User(String, u32),
    /// A group, by name and id: `@students`.
    Group(String, u32),
    /// All users, written as `*`.
    AllUsers,
}

impl UserSelector {
    /// Returns whether a user is selected.
    pub fn includes(&self, who: &UserIdentity) -> bool {
        match self {
            UserSelector::User(_, uid) => *uid == who.uid,
            UserSelector::Group(_, gid) => who.gids.contains(gid),
            UserSelector::AllUsers => true,
        }
    }
}

impl std::fmt::Display for UserSelector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            UserSelector::User(name, _) => f.write_str(name),
            UserSelector::Group(name, _) => write!(f, "group {name}"),
            UserSelector::AllUsers => f.write_str("all users"),
        }
    }
}

impl<'de> Deserialize<'de> for UserSelector {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = NumberOrText::deserialize(deserializer)?.text();
        let unknown = |kind, name: &str| {
            serde::de::Error::custom(format!(
                "{kind} {name} not found on this machine: write a user, @group, an id, or * for all users"
            ))
        };
        match text.strip_prefix('@') {
            _ if text == "*" => Ok(UserSelector::AllUsers),
            Some(group) => users::gid(group)
                .map(|gid| UserSelector::Group(group.into(), gid))
                .ok_or_else(|| unknown("group", group)),
            None => users::uid(&text)
                .map(|uid| UserSelector::User(text.clone(), uid))
                .ok_or_else(|| unknown("user", &text)),
        }
    }
}

/// Selects GPUs by index, UUID or a part of the model name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuSelector(String);

impl<'de> Deserialize<'de> for GpuSelector {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(GpuSelector(NumberOrText::deserialize(deserializer)?.text()))
    }
}

impl GpuSelector {
    /// Returns whether a GPU is selected.
    pub(crate) fn matches(&self, index: usize, gpu: &Gpu) -> bool {
        let (model, word) = (gpu.model.to_ascii_lowercase(), self.0.to_ascii_lowercase());
        match self.0.parse::<usize>() {
            Ok(number) => number == index,
            Err(_) => gpu.uuid.as_str() == self.0 || model.contains(&word),
        }
    }
}

impl std::fmt::Display for GpuSelector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0.parse::<usize>() {
            Ok(number) => write!(f, "GPU {number}"),
            Err(_) => f.write_str(&self.0),
        }
    }
}

/// A number or a text: YAML parses unquoted digits as a number.
#[derive(Deserialize)]
#[serde(untagged)]
enum NumberOrText {
    Number(f64),
    Text(String),
}

impl NumberOrText {
    fn text(self) -> String {
        match self {
            NumberOrText::Number(number) => number.to_string(),
            NumberOrText::Text(text) => text,
        }
    }
}

fn memory<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Bytes>, D::Error> {
    let text = NumberOrText::deserialize(deserializer)?.text();
    let bytes = text.parse::<Quantity>().and_then(Quantity::to_count);
    let wrong = |why: String| serde::de::Error::custom(format!("invalid amount of memory {text}: {why}"));
    match bytes {
        Ok(bytes) if bytes < 1 << 20 => Err(wrong("it is less than 1 MiB: write 4Gi or 500Mi".into())),
        Ok(bytes) => Ok(Some(Bytes(bytes))),
        Err(error) => Err(wrong(format!("{error}; write 4Gi or 500Mi"))),
    }
}

fn cores<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Cores>, D::Error> {
    let text = NumberOrText::deserialize(deserializer)?.text();
    let cores: Cores = text.trim_end_matches('%').trim().parse().map_err(serde::de::Error::custom)?;
    Ok(Some(cores))
}

fn total_cores<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<TotalCores>, D::Error> {
    let text = NumberOrText::deserialize(deserializer)?.text();
    text.trim_end_matches('%').trim().parse().map(Some).map_err(serde::de::Error::custom)
}

fn policy<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PlacementPolicy, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

fn address<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<SocketAddr>, D::Error> {
    let text = String::deserialize(deserializer)?;
    metrics_address(&text).map_err(serde::de::Error::custom)
}

/// Why metrics cannot be served at an address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MetricsAddressError {
    /// It is not an address with a port.
    #[error("invalid address {text}: write 127.0.0.1:9464, or off")]
    Malformed {
        /// The text that was given.
        text: String,
    },
    /// Other machines can reach it.
    #[error(
        "{address} can be reached from other machines, and metrics show who runs what: use 127.0.0.1:{}, behind a proxy that \
         authenticates users",
        address.port()
    )]
    NotLoopback {
        /// The address that was given.
        address: SocketAddr,
    },
}

/// Parses the address of the metrics, from an option or the settings: a loopback address, or `off`.
pub fn metrics_address(text: &str) -> Result<Option<SocketAddr>, MetricsAddressError> {
    if text == "off" {
        return Ok(None);
    }
    let address: SocketAddr =
        text.parse().map_err(|_| MetricsAddressError::Malformed { text: text.into() })?;
    if !address.ip().is_loopback() {
        return Err(MetricsAddressError::NotLoopback { address });
    }
    Ok(Some(address))
}

/// Why settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WorkstationSettingsError {
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Io {
        /// The path of the file.
        path: PathBuf,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// The path names a directory, a pipe or a device.
    #[error("{} is not a regular file: write the settings to a file, or link to one", path.display())]
    NotAFile {
        /// The path of the settings.
        path: PathBuf,
    },
    /// The daemon of root would read a file that another user owns.
    #[error("{} belongs to user {owner}, and root's daemon trusts only root: chown root {}", path.display(), path.display())]
    ForeignOwner {
        /// The path of the file.
        path: PathBuf,
        /// Its owner's user id.
        owner: u32,
    },
    /// The daemon of root would read a file that other users can change.
    #[error("{} can be changed by users other than root: chmod go-w {}", path.display(), path.display())]
    Writable {
        /// The path of the file.
        path: PathBuf,
    },
    /// The content of the file is invalid.
    #[error("{}", path.display())]
    Invalid {
        /// The path of the file.
        path: PathBuf,
        /// Why the content is invalid.
        #[source]
        source: InvalidSettings,
    },
}

/// Why the content of a settings file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum InvalidSettings {
    /// The text is not YAML, has an unknown key, or a value of the wrong type. The message shows where.
    #[error("{0}")]
    Syntax(Box<serde_saphyr::Error>),
    /// A value is not possible, or does not fit this machine.
    #[error("{place}: {problem}")]
    Value {
        /// The key, and what identifies an entry of a list.
        place: String,
        /// The problem, and what to write instead.
        problem: String,
    },
}

fn invalid<T>(place: impl Into<String>, problem: impl Into<String>) -> Result<T, InvalidSettings> {
    Err(InvalidSettings::Value { place: place.into(), problem: problem.into() })
}

impl WorkstationSettings {
    /// Loads the settings from a file. If no file is named, those of the state directory, of the machine or of the
    /// user, or the defaults if there are none.
    pub fn load(
        file: Option<&Path>,
        state_dir: &StateDir,
    ) -> Result<(WorkstationSettings, Option<PathBuf>), WorkstationSettingsError> {
        let path = match file {
            Some(file) => file.to_path_buf(),
            None => match state_dir.settings().or_else(default_path) {
                Some(path) => path,
                None => return Ok((WorkstationSettings::default(), None)),
            },
        };
        let text = match read(&path) {
            Ok(text) => text,
            // The settings in another user's state directory may not be readable.
            Err(WorkstationSettingsError::Io { source, .. })
                if file.is_none()
                    && matches!(source.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) =>
            {
                return Ok((WorkstationSettings::default(), None));
            }
            Err(error) => return Err(error),
        };
        match WorkstationSettings::from_yaml(&text) {
            Ok(settings) => Ok((settings, Some(path))),
            Err(source) => Err(WorkstationSettingsError::Invalid { path, source }),
        }
    }

    /// Parses settings. An empty text gives the defaults.
    pub fn from_yaml(text: &str) -> Result<WorkstationSettings, InvalidSettings> {
        let only_comments = |line: &str| line.trim().is_empty() || line.trim_start().starts_with('#');
        if text.lines().all(only_comments) {
            return Ok(WorkstationSettings::default());
        }
        let settings: WorkstationSettings =
            serde_saphyr::from_str(text).map_err(|error| InvalidSettings::Syntax(Box::new(error)))?;
        settings.check()?;
        Ok(settings)
    }

    fn check(&self) -> Result<(), InvalidSettings> {
        if self.default.mode == Some(ComputeMode::Hard) && self.default.cores.is_none() {
            return invalid("default", "mode hard requires cores: write cores, too");
        }
        if self.default.cores == Some(Cores::NONE) {
            return invalid("default", "cores must not be 0: omit them, or write 1 or more");
        }
        if self.max_priority > MAX_PRIORITY {
            let problem = format!("invalid priority {}: write 0 to {MAX_PRIORITY}", self.max_priority);
            return invalid("maxPriority", problem);
        }
        if !(1..=MAX_SIMULATED_GPUS).contains(&self.simulated.gpus) {
            let gpus = self.simulated.gpus;
            return invalid(
                "simulated",
                format!("invalid number of GPUs {gpus}: write 1 to {MAX_SIMULATED_GPUS}"),
            );
        }
        if self.driver == DriverChoice::Simulated
            && let Err(error) = simulated_driver::ensure_built()
        {
            return invalid("driver", error.to_string());
        }
        for rule in &self.users {
            if rule.shares == Some(0) {
                let problem =
                    "shares: 0 allows no shares: omit the rule to forbid shares, or write 1 or more";
                return invalid(format!("users, {}", rule.apply_to), problem);
            }
        }
        for reservation in &self.reservations {
            if reservation.memory.is_none() && reservation.cores.is_none() {
                return invalid(reservation.place(), "reserves nothing: write memory, cores or both");
            }
        }
        Ok(())
    }

    /// Checks that the settings are possible on this machine.
    pub(crate) fn check_against(&self, node: &Node) -> Result<(), InvalidSettings> {
        for reservation in &self.reservations {
            let named = reservation.gpu(node);
            let Some(gpu) = named.and_then(|uuid| node.gpus.iter().find(|gpu| gpu.uuid == uuid)) else {
                let all: Vec<String> =
                    node.gpus.iter().enumerate().map(|(at, gpu)| format!("{at} ({})", gpu.uuid)).collect();
                let problem = format!("must select exactly one GPU; the GPUs are {}", all.join(", "));
                return invalid(reservation.place(), problem);
            };
            let here = self.reservations.iter().filter(|other| other.gpu(node).as_ref() == Some(&gpu.uuid));
            let (memory, cores) = here.fold((0u64, 0u32), |(memory, cores), other| {
                let guaranteed = other.cores.unwrap_or(Cores::NONE).as_millipercent();
                (
                    memory.saturating_add(other.memory.unwrap_or(Bytes::ZERO).0),
                    cores.saturating_add(guaranteed),
                )
            });
            if memory > gpu.memory_bytes.0 {
                let (sum, has) = (Bytes(memory), gpu.memory_bytes);
                let problem = format!("{sum} reserved in total, more than its {has}");
                return invalid(reservation.place(), problem);
            }
            if cores > Cores::WHOLE.as_millipercent() {
                return invalid(reservation.place(), "more than 100 % of its time reserved in total");
            }
        }
        if let Some(memory) = self.default.memory
            && node.gpus.iter().all(|gpu| gpu.memory_bytes < memory)
        {
            return invalid("default", format!("no GPU of this machine has {memory}"));
        }
        Ok(())
    }

    /// Returns the rule for a user. `Ok(None)` means that there are no limits, `Err` that no shares are allowed.
    pub(crate) fn rule(&self, who: &UserIdentity) -> Result<Option<&UserRule>, ()> {
        if self.users.is_empty() || who.uid == 0 {
            return Ok(None);
        }
        self.users.iter().find(|rule| rule.apply_to.includes(who)).map(Some).ok_or(())
    }
}

impl Reservation {
    /// Returns where the reservation is in the settings, for messages.
    fn place(&self) -> String {
        format!("reservations, {} for {}", self.gpu, self.apply_to)
    }

    /// Returns the GPU of the reservation, if exactly one is selected.
    pub(crate) fn gpu(&self, node: &Node) -> Option<GpuUuid> {
        let mut named = node.gpus.iter().enumerate().filter(|(at, gpu)| self.gpu.matches(*at, gpu));
        let first = named.next()?;
        named.next().is_none().then(|| first.1.uuid.clone())
    }
}

/// Returns the default path of the settings file.
fn default_path() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Some(MACHINE_SETTINGS_FILE.into());
    }
    let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let folder = variable("XDG_CONFIG_HOME").or_else(|| Some(variable("HOME")?.join(".config")))?;
    Some(folder.join("partage/partage.yaml"))
}

/// Reads the text of a settings file. Links are followed: the file that they lead to is checked.
fn read(path: &Path) -> Result<String, WorkstationSettingsError> {
    let failed = |source: io::Error| WorkstationSettingsError::Io { path: path.into(), source };
    // A pipe without a writer would block.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        // A socket.
        Err(Errno::NXIO) => return Err(WorkstationSettingsError::NotAFile { path: path.into() }),
        Err(error) => return Err(failed(error.into())),
    };
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(WorkstationSettingsError::NotAFile { path: path.into() });
    }
    if rustix::process::geteuid().is_root() {
        // The settings limit users, who must not be able to change them.
        if metadata.uid() != 0 {
            return Err(WorkstationSettingsError::ForeignOwner { path: path.into(), owner: metadata.uid() });
        }
        if metadata.mode() & WRITABLE_BY_OTHERS != 0 {
            return Err(WorkstationSettingsError::Writable { path: path.into() });
        }
    }
    let mut text = String::new();
    let read = file.take(MAX_SETTINGS_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
    if u64::try_from(read).unwrap_or(u64::MAX) > MAX_SETTINGS_BYTES {
        return Err(failed(io::Error::new(ErrorKind::FileTooLarge, "larger than 1 MiB")));
    }
    Ok(text)
}

#[cfg(test)]
mod tests;
