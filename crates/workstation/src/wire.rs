//! What is said over the keeper's socket: one JSON document per line, a question first, then answers.
//!
//! The keeper believes nothing that is written here but what it can check itself: who asks is told by the kernel.

use crate::report::{Report, ShareReport};
use partage_core::model::{Bytes, Cores};
use partage_enforce::refusal::{Refusal, RefusalReason};
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, ErrorKind, Read, Write};
use std::path::PathBuf;

/// The longest question: more than this is a mistake or an attack.
pub const LONGEST: usize = 1 << 20;
/// The longest answer: a report tells of every share.
pub const LONGEST_ANSWER: usize = 64 << 20;
/// How much of a command is shown, in bytes. People give programs thousands of files, and a report is for all users.
const SHOWN: usize = 1 << 10;

/// What is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "camelCase", deny_unknown_fields)]
pub enum Question {
    /// A share for the process that asks.
    Run(RunRequest),
    /// How everything is.
    Report,
    /// Other amounts for a share that runs.
    Resize {
        /// Which.
        name: String,
        /// What.
        change: Change,
    },
    /// All processes of a share are to end.
    Stop {
        /// Which.
        name: String,
        /// Milliseconds between asking them to end and ending them.
        grace_millis: u64,
    },
    /// The keeper is to make place for the one that asks, which must be its own user.
    HandOver,
}

impl Question {
    /// The name of its kind, for the log.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Question::Run(_) => "run",
            Question::Report => "report",
            Question::Resize { .. } => "resize",
            Question::Stop { .. } => "stop",
            Question::HandOver => "hand over",
        }
    }
}

/// A share, as asked for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RunRequest {
    /// Its name; made from the command where absent.
    pub name: Option<String>,
    /// How many GPUs.
    pub gpus: Option<u32>,
    /// Memory of each.
    pub memory: Option<Bytes>,
    /// Memory of each, as a part of what it has.
    pub memory_percent: Option<u32>,
    /// Compute of each.
    pub cores: Option<Cores>,
    /// All of each, alone.
    pub whole: bool,
    /// Whether memory beyond the limit is placed on the host. Absent where it is not, so that older daemons read the request.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub oversubscribe: bool,
    /// Whether compute ends at what was promised.
    pub mode: Option<Mode>,
    /// Words one of which the model's name must contain.
    pub models: Vec<String>,
    /// Rather wait than be refused.
    pub wait: bool,
    /// The command, to be shown.
    pub command: Vec<String>,
}

/// Whether idle time is lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Mode {
    /// Never more than promised.
    Hard,
    /// What nobody else wants, too.
    Share,
}

/// Other amounts; what is absent stays.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Change {
    /// Memory of each GPU.
    pub memory: Option<Bytes>,
    /// Memory of each GPU, as a part of what it has.
    pub memory_percent: Option<u32>,
    /// Compute of each GPU.
    pub cores: Option<Cores>,
    /// Whether idle time is lent.
    pub mode: Option<Mode>,
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "camelCase")]
pub enum Answer {
    /// To [`Question::Run`], any number of times: not yet.
    Queued {
        /// How many are before it, and it.
        place: usize,
        /// How many wait in all.
        of: usize,
        /// Why not now.
        why: String,
    },
    /// To [`Question::Run`]: the share is there. Who asked binds itself to it and says [`Bound`].
    Granted(Box<Granted>),
    /// To [`Bound`]: the command may start.
    Go {
        /// What should be said before.
        notes: Vec<String>,
    },
    /// To [`Question::Report`].
    Report(Box<Report>),
    /// To [`Question::Resize`]: as it is now.
    Resized(Box<ShareReport>),
    /// To [`Question::Stop`].
    Stopped {
        /// Processes that ended when they were asked to.
        ended: usize,
        /// Processes that had to be killed.
        killed: usize,
    },
    /// To [`Question::HandOver`]: the lock is free once this connection is closed.
    HandedOver,
    /// It cannot be.
    Refused {
        /// What kind of refusal it is.
        kind: RefusalReason,
        /// Why, and what to do.
        message: String,
        /// What would work instead.
        hints: Vec<String>,
    },
}

impl From<Refusal> for Answer {
    fn from(refusal: Refusal) -> Answer {
        Answer::Refused { kind: refusal.reason, message: refusal.message, hints: refusal.hints }
    }
}

/// A share that was given, and where its parts are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Granted {
    /// Its name.
    pub name: String,
    /// What nobody else knows.
    pub id: String,
    /// What it is, in words: `4 GiB and 30 % of GPU 0`.
    pub words: String,
    /// UUIDs of its GPUs, in order.
    pub gpus: Vec<String>,
    /// What the process must bind to.
    pub places: Places,
}

/// Files and folders of a share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Places {
    /// The region.
    pub region: PathBuf,
    /// Where the region is looked for by libraries that stand in for the driver's in a mount namespace.
    pub region_at: PathBuf,
    /// Those libraries.
    pub stand_ins: PathBuf,
    /// Like them, for a process without a mount namespace.
    pub own_stand_ins: PathBuf,
    /// The driver's own libraries, CUDA and NVML.
    pub driver: [PathBuf; 2],
    /// Where they appear in a mount namespace.
    pub driver_at: [PathBuf; 2],
    /// The folder of the simulated machine, where the driver is simulated.
    pub simulated: Option<PathBuf>,
    /// What is covered in a mount namespace besides: what, by what.
    pub covers: Vec<(PathBuf, PathBuf)>,
}

/// Said by who was granted a share, once it has bound itself to it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Bound {
    /// How.
    pub binding: partage_host::binding::Binding,
}

/// A command as far as it is shown; where it goes on, its last word says so.
pub fn shown(command: impl IntoIterator<Item = String>) -> Vec<String> {
    let (mut shown, mut left) = (Vec::new(), SHOWN);
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

/// Writes one document.
pub fn say(to: &mut impl Write, what: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    to.write_all(&line)?;
    to.flush()
}

/// Reads one document; `None` where the other side has nothing more to say.
pub fn hear<T: for<'a> Deserialize<'a>>(from: &mut impl BufRead, longest: usize) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    let most = u64::try_from(longest).unwrap_or(u64::MAX);
    let read = from.by_ref().take(most).read_until(b'\n', &mut line)?;
    if read == 0 {
        return Ok(None);
    }
    if line.last() != Some(&b'\n') {
        return Err(io::Error::new(ErrorKind::InvalidData, "a line that does not end"));
    }
    serde_json::from_slice(&line).map(Some).map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_command_is_cut_and_says_so() {
        let words = |text: &str| text.split(' ').map(String::from).collect::<Vec<_>>();
        assert_eq!(shown(words("python train.py --files a b")), words("python train.py --files a b"));
        let long = shown(words(&format!("cat {}", "ü".repeat(SHOWN))));
        assert!(long.len() == 2 && long[1].ends_with("ü…") && long[1].len() <= SHOWN, "{long:?}");
        let many = shown(vec!["file".to_string(); SHOWN]);
        assert!(many.len() < SHOWN / 4 && many.last().is_some_and(|last| last.ends_with('…')), "{many:?}");
    }

    #[test]
    fn a_line_that_does_not_end_is_none() {
        let error = hear::<Question>(&mut &b"{\"ask\":\"report\"}"[..], LONGEST).unwrap_err();
        assert!(error.to_string().contains("does not end"), "{error}");
        assert_eq!(hear(&mut &b"{\"ask\":\"report\"}\n"[..], LONGEST).unwrap(), Some(Question::Report));
    }
}
