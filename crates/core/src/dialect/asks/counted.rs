//! The shape that native, volcano and hami share: so many GPUs, and of each so much memory and compute.

use super::super::Dialect;
use super::super::absent::Absent;
use super::Read;
use super::lines::{Lines, Unclear};
use super::memory::Counter;
use crate::model::{Bytes, Cores, CoresAsk, MemoryAsk, ShareAsk, WantedGpus};
use crate::quote::short;

/// How a dialect spells it.
pub(super) struct Counted {
    pub(super) dialect: Dialect,
    pub(super) count: &'static str,
    pub(super) memory: &'static str,
    pub(super) percent: &'static str,
    pub(super) cores: &'static str,
    /// Bytes in one unit of memory.
    pub(super) unit: u64,
    /// The least memory that can be meant.
    pub(super) least: Bytes,
    /// A percentage beside an amount of memory wins; otherwise the two contradict each other.
    pub(super) percent_wins: bool,
    /// All of a GPU's cores mean the GPU alone.
    pub(super) full_is_whole: bool,
    /// Zero memory or cores are as good as none written; otherwise they are a mistake.
    pub(super) zero_is_absent: bool,
}

impl Counted {
    pub(super) fn read(&self, lines: &mut Lines<'_>) -> Read {
        // All are read before any decides, so that every mistake shows at once.
        let count = lines.gpus(self.count);
        let memory = self.memory(lines);
        let percent = lines.percent(self.percent, 1);
        let cores = lines.percent(self.cores, u64::from(!self.zero_is_absent));
        let (count, memory, percent, cores) = (count?, memory?, percent?, cores?);

        let absent = Absent::of(self.dialect);
        if count == Some(0) {
            return Err(lines.problem(
                self.count,
                "asks for no GPU, but the lines beside it ask for parts of one: write 1 or more, or leave it out",
            ));
        }
        let memory = match (memory, percent) {
            (Some(_), Some(_)) if !self.percent_wins => {
                let message = format!("says how much memory a second time: keep it or {}", self.memory);
                return Err(lines.problem(self.percent, message));
            }
            (_, Some(percent)) => Some(MemoryAsk::Percent(percent)),
            (Some(bytes), None) => Some(MemoryAsk::Exactly(bytes)),
            (None, None) => absent.memory(false),
        };
        let cores = match cores {
            // Upstream's "no reservation".
            Some(0) | None => absent.cores(),
            Some(percent) => Cores::percent(percent).map(CoresAsk::Exactly),
        };
        let (Some(count), Some(memory), Some(cores)) = (count.or(absent.count()), memory, cores) else {
            return Ok(None);
        };
        let whole = self.full_is_whole && cores == CoresAsk::Exactly(Cores::WHOLE);
        Ok(Some(WantedGpus { count, part: ShareAsk { memory, cores, whole, ceiling: None } }))
    }

    fn memory(&self, lines: &mut Lines<'_>) -> Result<Option<Bytes>, Unclear> {
        let Some(units) = lines.count(self.memory)? else { return Ok(None) };
        let bytes = Counter::of_each(self.memory, self.unit).bytes(units, lines)?;
        if bytes >= self.least {
            return Ok(Some(bytes));
        }
        if self.zero_is_absent {
            return Ok(None);
        }
        let text = short(lines.text(self.memory));
        let digits: String = text.chars().take_while(char::is_ascii_digit).collect();
        let meant = match digits.trim_start_matches('0').len() {
            0 => "write it like 8Gi, or leave it out".to_string(),
            1..=3 => format!("did you mean {digits}Gi?"),
            _ => format!("did you mean {digits}Mi?"),
        };
        let message = format!("\"{text}\" is {bytes} of memory: {meant}");
        Err(lines.problem(self.memory, message))
    }
}
