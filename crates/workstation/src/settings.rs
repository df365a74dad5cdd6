//! The settings file: what the machine offers, and who may take how much.

use crate::home::Home;
use crate::users::{self, Who};
use crate::wire::Mode;
use partage_core::model::{Bytes, Cores, Gpu, GpuUuid, Node, Oversubscription, Policy};
use partage_core::place::defaults;
use partage_core::quantity::Quantity;
use partage_enforce::gpus::DriverChoice;
use partage_host::simulated_driver::{self, MAX_SIMULATED_GPUS, SimulatedGpus};
use serde::{Deserialize, Deserializer};
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// The machine's settings.
pub const FILE: &str = "/etc/partage/partage.yaml";

/// The most that a settings file may be.
const LARGEST: u64 = 1 << 20;

/// What the machine offers, and to whom.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Settings {
    /// Which driver.
    pub driver: DriverChoice,
    /// The simulated machine, where the driver is simulated.
    pub simulated: SimulatedGpus,
    /// Where `partage up` serves metrics: an address of this machine, `off` for nowhere.
    #[serde(deserialize_with = "address")]
    pub metrics: Option<SocketAddr>,
    /// How GPUs are chosen.
    #[serde(deserialize_with = "policy")]
    pub policy: Policy,
    /// Whether shares may allocate more memory than their limit, on the host: `allowed` or `refused`.
    pub oversubscribe: Oversubscription,
    /// What a share is that nobody said the size of.
    pub default: DefaultShare,
    /// Who may take how much: the first that matches. Who matches none may take nothing; without any, everybody may
    /// take everything.
    pub users: Vec<Rule>,
    /// What is kept for some.
    pub reservations: Vec<Reservation>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            driver: DriverChoice::default(),
            simulated: SimulatedGpus::default(),
            metrics: Some(SocketAddr::from(([127, 0, 0, 1], 9464))),
            policy: defaults::WORKSTATION_POLICY,
            oversubscribe: Oversubscription::Allowed,
            default: DefaultShare::default(),
            users: Vec::new(),
            reservations: Vec::new(),
        }
    }
}

/// A share that nobody said the size of.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct DefaultShare {
    /// Memory; absent = all of the GPU's.
    #[serde(deserialize_with = "memory")]
    pub memory: Option<Bytes>,
    /// Compute; absent = none promised.
    #[serde(deserialize_with = "cores")]
    pub cores: Option<Cores>,
    /// Whether idle time is lent; absent = it is.
    pub mode: Option<Mode>,
}

/// What some users may take.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Rule {
    /// Whom it is about.
    pub who: Whom,
    /// Shares at a time.
    #[serde(default)]
    pub shares: Option<u32>,
    /// Memory of all their shares together.
    #[serde(default, deserialize_with = "memory")]
    pub memory: Option<Bytes>,
    /// Compute of all their shares together, in percent of one GPU.
    #[serde(default, deserialize_with = "percents")]
    pub cores: Option<u32>,
    /// GPUs of one share.
    #[serde(default)]
    pub gpus: Option<u32>,
    /// Whether they may have GPUs alone; absent = yes.
    #[serde(default)]
    pub whole: Option<bool>,
    /// The GPUs they may use: numbers, UUIDs or words of the model; absent = all.
    #[serde(default)]
    pub only: Option<Vec<GpuWord>>,
}

/// A part of a GPU that is kept for some users.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Reservation {
    /// For whom.
    #[serde(rename = "for")]
    pub whom: Whom,
    /// Which GPU: its number or UUID.
    pub gpu: GpuWord,
    /// Memory.
    #[serde(default, deserialize_with = "memory")]
    pub memory: Option<Bytes>,
    /// Compute.
    #[serde(default, deserialize_with = "cores")]
    pub cores: Option<Cores>,
}

/// A user, a group or everybody.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whom {
    /// A user.
    User(String, u32),
    /// A group: `@students`.
    Group(String, u32),
    /// Everybody: `*`.
    Everybody,
}

impl Whom {
    /// Whether it is about this one.
    pub fn includes(&self, who: &Who) -> bool {
        match self {
            Whom::User(_, uid) => *uid == who.uid,
            Whom::Group(_, gid) => who.gids.contains(gid),
            Whom::Everybody => true,
        }
    }
}

impl std::fmt::Display for Whom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Whom::User(name, _) => f.write_str(name),
            Whom::Group(name, _) => write!(f, "group {name}"),
            Whom::Everybody => f.write_str("everybody"),
        }
    }
}

impl<'de> Deserialize<'de> for Whom {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Word::deserialize(deserializer)?.text();
        let unknown = |kind, name: &str| {
            serde::de::Error::custom(format!(
                "there is no {kind} {name} on this machine: write a user, @group, a number, or * for everybody"
            ))
        };
        match text.strip_prefix('@') {
            _ if text == "*" => Ok(Whom::Everybody),
            Some(group) => users::gid(group)
                .map(|gid| Whom::Group(group.into(), gid))
                .ok_or_else(|| unknown("group", group)),
            None => users::uid(&text)
                .map(|uid| Whom::User(text.clone(), uid))
                .ok_or_else(|| unknown("user", &text)),
        }
    }
}

/// A GPU by number, UUID or a word of its model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuWord(String);

impl<'de> Deserialize<'de> for GpuWord {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(GpuWord(Word::deserialize(deserializer)?.text()))
    }
}

impl GpuWord {
    /// Whether a GPU is meant.
    pub(crate) fn names(&self, index: usize, gpu: &Gpu) -> bool {
        let (model, word) = (gpu.model.to_ascii_lowercase(), self.0.to_ascii_lowercase());
        match self.0.parse::<usize>() {
            Ok(number) => number == index,
            Err(_) => gpu.uuid.as_str() == self.0 || model.contains(&word),
        }
    }
}

impl std::fmt::Display for GpuWord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0.parse::<usize>() {
            Ok(number) => write!(f, "GPU {number}"),
            Err(_) => f.write_str(&self.0),
        }
    }
}

/// A number or a text: YAML makes numbers of words that look like some.
#[derive(Deserialize)]
#[serde(untagged)]
enum Word {
    Number(f64),
    Text(String),
}

impl Word {
    fn text(self) -> String {
        match self {
            Word::Number(number) => number.to_string(),
            Word::Text(text) => text,
        }
    }
}

fn memory<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Bytes>, D::Error> {
    let text = Word::deserialize(deserializer)?.text();
    let bytes = text.parse::<Quantity>().and_then(Quantity::to_count);
    let wrong = |why: String| serde::de::Error::custom(format!("{text} is no amount of memory: {why}"));
    match bytes {
        Ok(bytes) if bytes < 1 << 20 => Err(wrong("it is less than 1 MiB: write 4Gi or 500Mi".into())),
        Ok(bytes) => Ok(Some(Bytes(bytes))),
        Err(error) => Err(wrong(format!("{error}; write 4Gi or 500Mi"))),
    }
}

fn cores<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Cores>, D::Error> {
    let text = Word::deserialize(deserializer)?.text();
    let cores: Cores = text.trim_end_matches('%').trim().parse().map_err(serde::de::Error::custom)?;
    Ok(Some(cores))
}

fn percents<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    let text = Word::deserialize(deserializer)?.text();
    let wrong =
        |_| serde::de::Error::custom(format!("{text} is no percentage: write a whole number, such as 150"));
    text.trim_end_matches('%').trim().parse().map(Some).map_err(wrong)
}

fn policy<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Policy, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

fn address<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<SocketAddr>, D::Error> {
    let text = String::deserialize(deserializer)?;
    metrics_address(&text).map_err(serde::de::Error::custom)
}

/// Why metrics cannot be served at an address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// It is not an address with a port.
    #[error("{text} is no address: write 127.0.0.1:9464, or off")]
    Malformed {
        /// What was written.
        text: String,
    },
    /// Other machines can reach it.
    #[error(
        "{address} can be reached from other machines, and metrics tell who runs what: use 127.0.0.1:{}, and let \
         something that asks for a password stand before it",
        address.port()
    )]
    NotLoopback {
        /// The address.
        address: SocketAddr,
    },
}

/// Reads where metrics are served, from an option or the settings: an address of this machine only, or `off`.
pub fn metrics_address(text: &str) -> Result<Option<SocketAddr>, AddressError> {
    if text == "off" {
        return Ok(None);
    }
    let address: SocketAddr = text.parse().map_err(|_| AddressError::Malformed { text: text.into() })?;
    if !address.ip().is_loopback() {
        return Err(AddressError::NotLoopback { address });
    }
    Ok(Some(address))
}

/// Why settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file cannot be read.
    #[error("{}: cannot be read", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system reported.
        #[source]
        source: io::Error,
    },
    /// What the file says cannot be used.
    #[error("{}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: InvalidSettings,
    },
}

/// Why the content of a settings file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum InvalidSettings {
    /// It is not YAML, has a key that does not exist, or a value of another type. The message shows where.
    #[error("{0}")]
    Syntax(Box<serde_saphyr::Error>),
    /// A value is not possible, or not on this machine.
    #[error("{place}: {problem}")]
    Value {
        /// The key, and what tells one entry of a list from another.
        place: String,
        /// What is wrong, and what to write.
        problem: String,
    },
}

fn invalid<T>(place: impl Into<String>, problem: impl Into<String>) -> Result<T, InvalidSettings> {
    Err(InvalidSettings::Value { place: place.into(), problem: problem.into() })
}

impl Settings {
    /// The settings in a file; where no file is named, those of the home, of the machine or of the user, if there are any.
    pub fn load(file: Option<&Path>, home: &Home) -> Result<(Settings, Option<PathBuf>), SettingsError> {
        let path = match file {
            Some(file) => file.to_path_buf(),
            None => match home.settings().or_else(usual) {
                Some(path) => path,
                None => return Ok((Settings::default(), None)),
            },
        };
        let text = match read(&path) {
            Ok(text) => text,
            // A home that is not one's own has no settings for one.
            Err(error)
                if file.is_none()
                    && matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) =>
            {
                return Ok((Settings::default(), None));
            }
            Err(source) => return Err(SettingsError::Io { path, source }),
        };
        match Settings::from_yaml(&text) {
            Ok(settings) => Ok((settings, Some(path))),
            Err(source) => Err(SettingsError::Invalid { path, source }),
        }
    }

    /// Reads settings; an empty text is the default.
    pub fn from_yaml(text: &str) -> Result<Settings, InvalidSettings> {
        let only_comments = |line: &str| line.trim().is_empty() || line.trim_start().starts_with('#');
        if text.lines().all(only_comments) {
            return Ok(Settings::default());
        }
        let settings: Settings =
            serde_saphyr::from_str(text).map_err(|error| InvalidSettings::Syntax(Box::new(error)))?;
        settings.check()?;
        Ok(settings)
    }

    fn check(&self) -> Result<(), InvalidSettings> {
        if self.default.mode == Some(Mode::Hard) && self.default.cores.is_none() {
            return invalid("default", "hard mode ends compute at what was promised: write cores, too");
        }
        if self.default.cores == Some(Cores::NONE) {
            return invalid("default", "0 % of a GPU is nothing: leave the cores out, or write 1 or more");
        }
        if !(1..=MAX_SIMULATED_GPUS).contains(&self.simulated.gpus) {
            let gpus = self.simulated.gpus;
            return invalid("simulated", format!("{gpus} GPUs cannot be: write 1 to {MAX_SIMULATED_GPUS}"));
        }
        if self.driver == DriverChoice::Simulated
            && let Err(error) = simulated_driver::ensure_built()
        {
            return invalid("driver", error.to_string());
        }
        for rule in &self.users {
            if rule.shares == Some(0) {
                let problem =
                    "shares: 0 lets nobody run anything: leave the rule out to forbid, or write 1 or more";
                return invalid(format!("users, {}", rule.who), problem);
            }
        }
        for reservation in &self.reservations {
            if reservation.memory.is_none() && reservation.cores.is_none() {
                return invalid(reservation.place(), "keeps nothing: write memory, cores or both");
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
                let problem = format!("names no GPU, or several; there are {}", all.join(", "));
                return invalid(reservation.place(), problem);
            };
            let here = self.reservations.iter().filter(|other| other.gpu(node).as_ref() == Some(&gpu.uuid));
            let (memory, cores) = here.fold((0u64, 0u32), |(memory, cores), other| {
                let promised = other.cores.unwrap_or(Cores::NONE).as_millipercent();
                (memory.saturating_add(other.memory.unwrap_or(Bytes::ZERO).0), cores.saturating_add(promised))
            });
            if memory > gpu.memory_bytes.0 {
                let (sum, has) = (Bytes(memory), gpu.memory_bytes);
                let problem = format!("{sum} are kept of it in all, which is more than its {has}");
                return invalid(reservation.place(), problem);
            }
            if cores > Cores::WHOLE.as_millipercent() {
                return invalid(reservation.place(), "more than 100 % of its time are kept in all");
            }
        }
        if let Some(memory) = self.default.memory
            && node.gpus.iter().all(|gpu| gpu.memory_bytes < memory)
        {
            return invalid("default", format!("no GPU of this machine has {memory}"));
        }
        Ok(())
    }

    /// The rule for somebody. `Ok(None)`: everything is allowed. `Err`: nothing is.
    pub(crate) fn rule(&self, who: &Who) -> Result<Option<&Rule>, ()> {
        if self.users.is_empty() || who.uid == 0 {
            return Ok(None);
        }
        self.users.iter().find(|rule| rule.who.includes(who)).map(Some).ok_or(())
    }
}

impl Reservation {
    /// Where it stands in the settings, for messages.
    fn place(&self) -> String {
        format!("reservations, {} for {}", self.gpu, self.whom)
    }

    /// The GPU it is about, if exactly one is named.
    pub(crate) fn gpu(&self, node: &Node) -> Option<GpuUuid> {
        let mut named = node.gpus.iter().enumerate().filter(|(at, gpu)| self.gpu.names(*at, gpu));
        let first = named.next()?;
        named.next().is_none().then(|| first.1.uuid.clone())
    }
}

/// Where settings usually are.
fn usual() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Some(FILE.into());
    }
    let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let folder = variable("XDG_CONFIG_HOME").or_else(|| Some(variable("HOME")?.join(".config")))?;
    Some(folder.join("partage/partage.yaml"))
}

fn read(path: &Path) -> io::Result<String> {
    use std::io::Read;
    let mut text = String::new();
    let read = std::fs::File::open(path)?.take(LARGEST + 1).read_to_string(&mut text)?;
    if u64::try_from(read).unwrap_or(u64::MAX) > LARGEST {
        return Err(io::Error::new(ErrorKind::FileTooLarge, "it is larger than 1 MiB"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests;
