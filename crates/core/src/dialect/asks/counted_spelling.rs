//! The form of requests in the native, volcano and hami dialects: a number of GPUs with memory and compute of each.

use super::super::Dialect;
use super::super::defaults::DialectDefaults;
use super::WantResult;
use super::memory::MemoryCounter;
use super::resource_list::{ResourceList, UnclearAsk};
use crate::model::{Bytes, Cores, CoresAsk, MemoryAsk, ShareAsk, WantedGpus};
use crate::truncate::shorten;

/// The resource names and rules of one such dialect.
pub(super) struct CountedSpelling {
    pub(super) dialect: Dialect,
    pub(super) count: &'static str,
    pub(super) memory: &'static str,
    pub(super) percent: &'static str,
    pub(super) cores: &'static str,
    /// Bytes in one unit of memory.
    pub(super) unit: u64,
    /// Minimum amount of memory. Smaller amounts are mistakes or, with `zero_is_absent`, none.
    pub(super) min_memory: Bytes,
    /// Whether a percentage takes precedence over an amount of memory. Otherwise both together are a problem.
    pub(super) percent_wins: bool,
    /// Whether a request for 100 % of the cores is for an exclusive GPU.
    pub(super) full_is_whole: bool,
    /// Whether zero memory or cores mean the same as no amount. Otherwise they are a problem.
    pub(super) zero_is_absent: bool,
}

impl CountedSpelling {
    /// Reads the request of one container.
    pub(super) fn read(&self, list: &mut ResourceList<'_>) -> WantResult {
        // Read all amounts before returning, so that every problem is reported at once.
        let count = list.gpu_count(self.count);
        let memory = self.memory(list);
        let percent = list.percent(self.percent, 1);
        let cores = list.percent(self.cores, u64::from(!self.zero_is_absent));
        let (count, memory, percent, cores) = (count?, memory?, percent?, cores?);

        let defaults = DialectDefaults::of(self.dialect);
        if count == Some(0) {
            return Err(list.problem(
                self.count,
                "requests 0 GPUs, but other resources of the container request a share: write 1 or more, or remove it",
            ));
        }
        let memory = match (memory, percent) {
            (Some(_), Some(_)) if !self.percent_wins => {
                let message = format!("sets the memory a second time: keep this or {}", self.memory);
                return Err(list.problem(self.percent, message));
            }
            (_, Some(percent)) => Some(MemoryAsk::Percent(percent)),
            (Some(bytes), None) => Some(MemoryAsk::Exactly(bytes)),
            (None, None) => defaults.memory(false),
        };
        let cores = match cores {
            // 0 means no reservation in the upstream project.
            Some(0) | None => defaults.cores(),
            Some(percent) => Cores::percent(percent).map(CoresAsk::Exactly),
        };
        let (Some(count), Some(memory), Some(cores)) = (count.or(defaults.count()), memory, cores) else {
            return Ok(None);
        };
        let whole = self.full_is_whole && cores == CoresAsk::Exactly(Cores::WHOLE);
        Ok(Some(WantedGpus { count, share: ShareAsk { memory, cores, whole, ceiling: None } }))
    }

    fn memory(&self, list: &mut ResourceList<'_>) -> Result<Option<Bytes>, UnclearAsk> {
        let Some(units) = list.count(self.memory)? else { return Ok(None) };
        let bytes = MemoryCounter::per_gpu(self.memory, self.unit).bytes(units, list)?;
        if bytes >= self.min_memory {
            return Ok(Some(bytes));
        }
        if self.zero_is_absent {
            return Ok(None);
        }
        let text = shorten(list.text(self.memory));
        let digits: String = text.chars().take_while(char::is_ascii_digit).collect();
        let meant = match digits.trim_start_matches('0').len() {
            0 => "write a value like 8Gi, or remove it".to_string(),
            1..=3 => format!("did you mean {digits}Gi?"),
            _ => format!("did you mean {digits}Mi?"),
        };
        let message = format!("\"{text}\" is {bytes} of memory: {meant}");
        Err(list.problem(self.memory, message))
    }
}
