//! The protocol of the daemon's socket: one JSON document per line, a request first, then responses.
//!
//! The daemon verifies everything that it can: the identity of a caller comes from the kernel, not from a message.

use crate::report::{MachineReport, ShareReport};
use partage_core::model::{Bytes, Cores};
use partage_enforce::refusal::{Refusal, RefusalReason};
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, ErrorKind, Read, Write};
use std::path::PathBuf;

/// The maximum size of a request: a larger one is a mistake or an attack.
pub const MAX_REQUEST_BYTES: usize = 1 << 20;
/// The maximum size of a response: a report contains all shares.
pub const MAX_RESPONSE_BYTES: usize = 64 << 20;
/// The maximum size of a command in a report, in bytes. A command can have thousands of arguments, and all users read
/// reports.
const MAX_SHOWN_COMMAND_BYTES: usize = 1 << 10;

/// A request to the daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "camelCase", deny_unknown_fields)]
pub enum DaemonRequest {
    /// Requests a share for the calling process.
    Run(RunRequest),
    /// Requests the report about all GPUs, shares and waiting requests.
    Report,
    /// Resizes a running share.
    Resize {
        /// The name of the share.
        name: String,
        /// The amounts to change.
        change: ResizeChange,
    },
    /// Ends all processes of a share.
    Stop {
        /// The name of the share.
        name: String,
        /// The time between SIGTERM and SIGKILL, in milliseconds.
        grace_millis: u64,
    },
    /// Asks the daemon to hand over to the caller, which must run as the daemon's user.
    HandOver,
}

impl DaemonRequest {
    /// Returns the name of the request, for the log.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            DaemonRequest::Run(_) => "run",
            DaemonRequest::Report => "report",
            DaemonRequest::Resize { .. } => "resize",
            DaemonRequest::Stop { .. } => "stop",
            DaemonRequest::HandOver => "hand over",
        }
    }
}

/// The properties of a requested share.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RunRequest {
    /// The name; derived from the command if absent.
    pub name: Option<String>,
    /// The number of GPUs.
    pub gpus: Option<u32>,
    /// The memory of each GPU.
    pub memory: Option<Bytes>,
    /// The memory of each GPU, in percent of its total.
    pub memory_percent: Option<u32>,
    /// The compute of each GPU.
    pub cores: Option<Cores>,
    /// Whether the share gets whole GPUs exclusively.
    pub whole: bool,
    /// Whether memory above the limit is allocated on the host. It is serialized only if true, so that older daemons
    /// can parse the request.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub oversubscribe: bool,
    /// Whether launches should start soon beside long kernels of others. It is serialized only if true, as above.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub low_latency: bool,
    /// The priority among shares that want the same turn; absent for the lowest, 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u32>,
    /// Whether the guaranteed compute is also the limit.
    pub mode: Option<ComputeMode>,
    /// Texts of which the model name must contain at least one.
    pub models: Vec<String>,
    /// Whether to wait for capacity instead of being refused.
    pub wait: bool,
    /// The command, for reports.
    pub command: Vec<String>,
}

/// Whether a share may use idle GPU time in addition to its guarantee.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ComputeMode {
    /// The share never gets more than its guarantee.
    Hard,
    /// The share may use idle time of other shares.
    WorkConserving,
}

/// The changes of a resize. An absent amount stays the same.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ResizeChange {
    /// The memory of each GPU.
    pub memory: Option<Bytes>,
    /// The memory of each GPU, in percent of its total.
    pub memory_percent: Option<u32>,
    /// The compute of each GPU.
    pub cores: Option<Cores>,
    /// Whether a share may use idle GPU time in addition to its guarantee.
    pub mode: Option<ComputeMode>,
}

/// A response of the daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "camelCase")]
pub enum DaemonResponse {
    /// The request waits. Sent any number of times in response to [`DaemonRequest::Run`].
    Queued {
        /// The position in the queue, starting at 1.
        place: usize,
        /// The length of the queue.
        of: usize,
        /// Why the request does not fit now.
        why: String,
    },
    /// The share is granted. The caller confines itself to it and sends [`ConfinedNotice`].
    Granted(Box<GrantedShare>),
    /// The command may start. The response to [`ConfinedNotice`].
    Go {
        /// Notes to print before the command starts.
        notes: Vec<String>,
    },
    /// The response to [`DaemonRequest::Report`].
    Report(Box<MachineReport>),
    /// The new state of the share, in response to [`DaemonRequest::Resize`].
    Resized(Box<ShareReport>),
    /// The response to [`DaemonRequest::Stop`].
    Stopped {
        /// The number of processes that exited after SIGTERM.
        ended: usize,
        /// The number of processes that had to be killed.
        killed: usize,
    },
    /// The daemon exits, in response to [`DaemonRequest::HandOver`]. The lock is free once this connection is closed.
    HandedOver,
    /// The request is refused.
    Refused {
        /// The kind of the refusal.
        kind: RefusalReason,
        /// The reason, and what to do.
        message: String,
        /// Requests that would be granted instead.
        hints: Vec<String>,
    },
}

impl From<Refusal> for DaemonResponse {
    fn from(refusal: Refusal) -> DaemonResponse {
        DaemonResponse::Refused { kind: refusal.reason, message: refusal.message, hints: refusal.hints }
    }
}

/// A granted share, and the paths of its files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GrantedShare {
    /// The name of the share.
    pub name: String,
    /// A random id that only the share's processes know.
    pub id: String,
    /// A description of the share, such as `4 GiB and 30 % of GPU 0`.
    pub description: String,
    /// The UUIDs of its GPUs, in order.
    pub gpus: Vec<String>,
    /// The files to which the process must confine itself.
    pub places: SharePaths,
}

/// The paths of the files of a share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SharePaths {
    /// The directory of the region.
    pub region: PathBuf,
    /// Where the stand-in libraries expect the region in a mount namespace.
    pub region_at: PathBuf,
    /// The directory of the stand-in libraries.
    pub stand_ins: PathBuf,
    /// The directory of stand-in libraries for a process without a mount namespace.
    pub own_stand_ins: PathBuf,
    /// The driver's own libraries, CUDA and NVML.
    pub driver: [PathBuf; 2],
    /// Where the driver's libraries are mounted in a mount namespace.
    pub driver_at: [PathBuf; 2],
    /// The directory of the simulated machine, if the driver is simulated.
    pub simulated: Option<PathBuf>,
    /// Further mounts: the path to cover, and the file or directory to cover it with.
    pub covers: Vec<(PathBuf, PathBuf)>,
}

/// The message that a caller sends once it has confined itself to its share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ConfinedNotice {
    /// The kind of confinement.
    #[serde(rename = "binding")]
    pub confinement: partage_host::confine::Confinement,
}

/// Shortens a command for reports. A shortened command ends with an ellipsis.
pub fn shorten_command(command: impl IntoIterator<Item = String>) -> Vec<String> {
    let (mut shown, mut left) = (Vec::new(), MAX_SHOWN_COMMAND_BYTES);
    for mut word in command {
        if word.len() >= left {
            word.truncate(word.floor_char_boundary(left));
            word.push('…');
            shown.push(word);
            break;
        }
        left -= word.len() + 1;
        shown.push(word);
    }
    shown
}

/// Writes one message as a line of JSON.
pub fn write_message(to: &mut impl Write, what: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    to.write_all(&line)?;
    to.flush()
}

/// Reads one message. Returns `None` at the end of the stream.
pub fn read_message<T: for<'a> Deserialize<'a>>(
    from: &mut impl BufRead,
    longest: usize,
) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    let most = u64::try_from(longest).unwrap_or(u64::MAX);
    let read = from.by_ref().take(most).read_until(b'\n', &mut line)?;
    if read == 0 {
        return Ok(None);
    }
    if line.last() != Some(&b'\n') {
        return Err(io::Error::new(ErrorKind::InvalidData, "unterminated line"));
    }
    serde_json::from_slice(&line).map(Some).map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_command_is_shortened_with_an_ellipsis() {
        let words = |text: &str| text.split(' ').map(String::from).collect::<Vec<_>>();
        assert_eq!(
            shorten_command(words("python train.py --files a b")),
            words("python train.py --files a b")
        );
        let long = shorten_command(words(&format!("cat {}", "ü".repeat(MAX_SHOWN_COMMAND_BYTES))));
        assert!(
            long.len() == 2 && long[1].ends_with("ü…") && long[1].len() <= MAX_SHOWN_COMMAND_BYTES,
            "{long:?}"
        );
        let many = shorten_command(vec!["file".to_string(); MAX_SHOWN_COMMAND_BYTES]);
        assert!(
            many.len() < MAX_SHOWN_COMMAND_BYTES / 4 && many.last().is_some_and(|last| last.ends_with('…')),
            "{many:?}"
        );
    }

    #[test]
    fn unterminated_line_is_refused() {
        let error =
            read_message::<DaemonRequest>(&mut &b"{\"ask\":\"report\"}"[..], MAX_REQUEST_BYTES).unwrap_err();
        assert!(error.to_string().contains("unterminated line"), "{error}");
        assert_eq!(
            read_message(&mut &b"{\"ask\":\"report\"}\n"[..], MAX_REQUEST_BYTES).unwrap(),
            Some(DaemonRequest::Report)
        );
    }
}
