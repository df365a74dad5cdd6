//! Whether a GPU is well, over time: what it reported, until it was reset.
//!
//! The driver reports an XID once and never takes it back. One that calls for a reset holds until a reset is seen: the GPU was gone
//! and answers again, or what it counts has begun anew.
//!
//! Memory errors that could not be corrected are counted by the card, whether they reached one program or all. Where it reported
//! what became of them, that is believed; the counter alone is for those who were not there when it did.

use super::look::Found;
use super::{Seen, words, xid};
use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError};
use nvml_wrapper::error::NvmlError;
use partage_core::model::GpuUuid;
use serde::{Deserialize, Serialize};

/// What a GPU reported that is to be known until it is reset: most often what makes it unusable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Fatal {
    /// Which GPU.
    pub uuid: GpuUuid,
    /// The XID that it reported.
    pub xid: u64,
    /// Whether it was gone when it was last looked at.
    pub gone: bool,
    /// What it had drawn then since it was set up, in millijoules, where it tells: less later means that it was reset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy: Option<u64>,
}

impl Fatal {
    /// Whether the GPU is not to be used. Otherwise it is known why its counter of memory errors is not to be judged by.
    pub fn is_fatal(&self) -> bool {
        xid::fatal(self.xid).is_some()
    }
}

/// What is remembered of a GPU from look to look.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Health {
    /// The first XID since it was set up that makes it unusable.
    xid: Option<u64>,
    /// The first XID since then that says that a memory error was contained.
    contained: Option<u64>,
    /// Whether it did not answer in the last look.
    gone: bool,
    /// The last that it told.
    energy: Option<u64>,
}

impl Health {
    /// What there is to remember.
    pub(super) fn fatal(&self, uuid: &GpuUuid) -> Option<Fatal> {
        let xid = self.xid.or(self.contained)?;
        Some(Fatal { uuid: uuid.clone(), xid, gone: self.gone, energy: self.energy })
    }

    /// The reverse. One that is known to be unusable stays so for its own reason.
    pub(super) fn remember(&mut self, fatal: &Fatal) {
        let xid = Some(fatal.xid).filter(|_| fatal.is_fatal());
        let contained = Some(fatal.xid).filter(|xid| xid::is_contained(*xid));
        if self.xid.is_none() && (xid.is_some() || contained.is_some()) {
            *self = Health { xid, contained, gone: fatal.gone, energy: fatal.energy };
        }
    }

    /// Takes in what was seen and reported; what is to be said of it.
    fn take(&mut self, gone: bool, energy: Option<u64>, xids: &[u64]) -> Option<String> {
        let less = self.energy.zip(energy).is_some_and(|(before, now)| now < before);
        let anew = !gone && (self.gone || less);
        if anew {
            (self.xid, self.contained) = (None, None);
        }
        for xid in xids {
            // That it was gone is over; the report may come after the return.
            let is_over = anew && *xid == xid::OFF_THE_BUS;
            if self.xid.is_none() && !is_over && xid::fatal(*xid).is_some() {
                self.xid = Some(*xid);
            }
            if xid::is_contained(*xid) {
                self.contained = self.contained.or(Some(*xid));
            }
        }
        self.gone = gone;
        self.energy = energy.or(self.energy);
        self.xid.and_then(xid::fatal)
    }
}

/// What is wrong with a GPU. What it reported is taken in, and what was not known of it is asked for.
pub(super) fn of(seen: &mut Seen, device: &Found<'_>) -> Option<String> {
    let mut energy = None;
    let (now, gone) = match device {
        Ok(device) => {
            seen.meet(device);
            energy = device.total_energy_consumption().ok();
            ill(device)
        }
        Err(error) => of_error(error),
    };
    let xids = seen.events.xids();
    log_xids(seen.identity.as_ref().map(|identity| &identity.gpu.uuid), &xids);
    let reported = seen.health.take(gone, energy, &xids);
    // The XID says why; what is seen now may be all there is.
    reported.or_else(|| match now {
        Now::Well => None,
        Now::Ill(why) => why,
        Now::MemoryErrors if seen.health.contained.is_some() => None,
        // How many is left out: one more is no other illness.
        Now::MemoryErrors => Some(format!("memory errors could not be corrected: {}", xid::RESET)),
    })
}

/// Logs what the driver reports once and never again. Most XIDs are faults of programs, and the GPU goes on.
fn log_xids(gpu: Option<&GpuUuid>, xids: &[u64]) {
    let gpu = gpu.map(tracing::field::display);
    for &xid in xids {
        if xid::fatal(xid).is_some() {
            tracing::warn!(gpu, xid, "GPU reported a fatal XID");
        } else {
            tracing::info!(gpu, xid, "GPU reported an XID");
        }
    }
}

/// What can be seen of a GPU.
enum Now {
    Well,
    /// It does not answer as it should; some answers mean nothing.
    Ill(Option<String>),
    /// It counts errors that could not be corrected.
    MemoryErrors,
}

fn of_error(error: &NvmlError) -> (Now, bool) {
    (Now::Ill(words::ill(error)), words::is_gone(error))
}

/// What can be seen to be wrong, and whether it is gone.
fn ill(device: &Device<'_>) -> (Now, bool) {
    // Something that only a GPU that is there can answer.
    if let Err(error) = device.uuid() {
        return of_error(&error);
    }
    match device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile) {
        Ok(0) => (Now::Well, false),
        Ok(_) => (Now::MemoryErrors, false),
        Err(error) => of_error(&error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_ill(health: &mut Health, gone: bool, energy: u64, xids: &[u64]) -> bool {
        health.take(gone, (!gone).then_some(energy), xids).is_some()
    }

    #[test]
    fn an_xid_holds_until_a_reset_is_seen() {
        let mut health = Health::default();
        assert!(!is_ill(&mut health, false, 100, &[13]));
        assert!(is_ill(&mut health, false, 200, &[62, 119]));
        // The same energy, and more of it, is the same life.
        assert!(is_ill(&mut health, false, 200, &[]) && is_ill(&mut health, false, 300, &[]));
        assert!(!is_ill(&mut health, false, 5, &[]));
        // What is reported after the reset is new.
        assert!(is_ill(&mut health, false, 6, &[79]));
        assert!(is_ill(&mut health, true, 0, &[]));
        assert!(is_ill(&mut health, false, 7, &[62]));
        assert_eq!(health.xid, Some(62));
    }

    #[test]
    fn a_report_that_comes_after_the_return_is_over() {
        let mut health = Health::default();
        // Gone between two looks, and gone in one that came before the report.
        assert!(!is_ill(&mut health, false, 100, &[]) && !is_ill(&mut health, false, 1, &[79]));
        is_ill(&mut health, true, 0, &[]);
        assert!(!is_ill(&mut health, false, 2, &[79]));
        // Of a GPU that answers all the time it is not.
        assert!(is_ill(&mut health, false, 3, &[79]) && is_ill(&mut health, false, 4, &[]));
    }

    #[test]
    fn a_card_that_tells_no_energy_is_well_after_it_was_gone() {
        let mut health = Health::default();
        assert!(health.take(false, None, &[48]).is_some());
        assert!(health.take(false, None, &[]).is_some());
        health.take(true, None, &[]);
        assert_eq!(health.take(false, None, &[]), None);
    }

    #[test]
    fn what_is_remembered_is_judged_by_the_next_look() {
        let uuid = GpuUuid::from("GPU-1");
        for (gone, energy, now, ill) in [(false, 50, 60, true), (false, 50, 4, false), (true, 50, 60, false)]
        {
            let fatal = Fatal { uuid: uuid.clone(), xid: 79, gone, energy: Some(energy) };
            let text = serde_json::to_string(&fatal).unwrap();
            let mut health = Health::default();
            health.remember(&serde_json::from_str(&text).unwrap());
            assert_eq!(health.fatal(&uuid), Some(fatal));
            assert_eq!(is_ill(&mut health, false, now, &[]), ill, "{text}");
            assert_eq!(health.fatal(&uuid).is_some(), ill);
        }
        // That an error was contained is remembered, too, and makes nobody ill.
        let mut health = Health::default();
        assert!(!is_ill(&mut health, false, 50, &[94, 63]));
        let kept = health.fatal(&uuid).unwrap();
        assert!((kept.xid, kept.is_fatal()) == (94, false));
        let mut later = Health::default();
        later.remember(&kept);
        assert!(!is_ill(&mut later, false, 60, &[]) && later.contained == Some(94));
        assert!(!is_ill(&mut later, false, 1, &[]) && later.contained.is_none(), "it was reset");
        // An older program's judgement of an XID is not ours.
        let mut health = Health::default();
        health.remember(&Fatal { uuid, xid: 13, gone: false, energy: None });
        assert_eq!(health, Health::default());
    }
}
