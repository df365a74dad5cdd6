//! Tracks the health of a GPU over time.
//!
//! The driver reports an XID once and never withdraws it. An XID that requires a reset makes the GPU unhealthy until a
//! reset is observed: the GPU was gone and responds again, or its energy counter started over.
//!
//! The card counts uncorrectable memory errors, whether they reached one program or all. An XID that reports what became
//! of them takes precedence; the counter alone decides only if the XID was reported before this session.

use super::sample::DeviceResult;
use super::{TrackedGpu, errors, xid};
use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError};
use nvml_wrapper::error::NvmlError;
use partage_core::model::GpuUuid;
use serde::{Deserialize, Serialize};

/// An XID of a GPU that matters until the GPU is reset: usually one that makes it unusable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FatalGpuError {
    /// The UUID of the GPU.
    pub uuid: GpuUuid,
    /// The XID that the GPU reported.
    pub xid: u64,
    /// Whether the GPU did not answer in the last sample.
    pub gone: bool,
    /// The energy counter of the GPU at that time in millijoules, if it has one. A lower value later means a reset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy: Option<u64>,
}

impl FatalGpuError {
    /// Returns whether the GPU is unusable. Otherwise the XID reports that its uncorrectable memory errors were contained.
    pub fn is_fatal(&self) -> bool {
        xid::fatal(self.xid).is_some()
    }
}

/// The health of a GPU that is kept between samples.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct HealthTracker {
    /// The first XID since the last reset that makes the GPU unusable.
    xid: Option<u64>,
    /// The first XID since the last reset that reports that a memory error was contained.
    contained: Option<u64>,
    /// Whether the GPU did not answer in the last sample.
    gone: bool,
    /// The last known value of the energy counter, in millijoules.
    energy: Option<u64>,
}

impl HealthTracker {
    /// Returns the error that a later session has to know.
    pub(super) fn fatal(&self, uuid: &GpuUuid) -> Option<FatalGpuError> {
        let xid = self.xid.or(self.contained)?;
        Some(FatalGpuError { uuid: uuid.clone(), xid, gone: self.gone, energy: self.energy })
    }

    /// Restores an error of an earlier session. An error that this session found stays.
    pub(super) fn remember(&mut self, fatal: &FatalGpuError) {
        let xid = Some(fatal.xid).filter(|_| fatal.is_fatal());
        let contained = Some(fatal.xid).filter(|xid| xid::is_contained(*xid));
        if self.xid.is_none() && (xid.is_some() || contained.is_some()) {
            *self = HealthTracker { xid, contained, gone: fatal.gone, energy: fatal.energy };
        }
    }

    /// Updates the health with a sample and new XIDs. Returns the reason if an XID makes the GPU unusable.
    fn take(&mut self, gone: bool, energy: Option<u64>, xids: &[u64]) -> Option<String> {
        let less = self.energy.zip(energy).is_some_and(|(before, now)| now < before);
        let was_reset = !gone && (self.gone || less);
        if was_reset {
            (self.xid, self.contained) = (None, None);
        }
        for xid in xids {
            // The report that the GPU was gone may arrive after the GPU is back.
            let is_over = was_reset && *xid == xid::XID_OFF_THE_BUS;
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

/// Returns why a GPU is unhealthy; `None` while it is healthy. Reads its new events, and its identity if unknown.
pub(super) fn of(tracked: &mut TrackedGpu, device: &DeviceResult<'_>) -> Option<String> {
    let mut energy = None;
    let (now, gone) = match device {
        Ok(device) => {
            tracked.on_answer(device);
            energy = device.total_energy_consumption().ok();
            current_state(device)
        }
        Err(error) => of_error(error),
    };
    let xids = tracked.events.xids();
    log_xids(tracked.identity.as_ref().map(|identity| &identity.gpu.uuid), &xids);
    let reported = tracked.health.take(gone, energy, &xids);
    // An XID has the reason; without one, the current state is all that is known.
    reported.or_else(|| match now {
        CurrentState::Healthy => None,
        CurrentState::Unhealthy(why) => why,
        CurrentState::MemoryErrors if tracked.health.contained.is_some() => None,
        // The count is left out, so that one more error does not change the message.
        CurrentState::MemoryErrors => Some(format!("uncorrectable memory errors: {}", xid::RESET_ADVICE)),
    })
}

/// Logs XIDs, which the driver reports only once. Most are caused by programs, and the GPU stays usable.
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

/// The state of a GPU that NVML reports now.
enum CurrentState {
    Healthy,
    /// A query failed. The reason is `None` for errors that do not concern health.
    Unhealthy(Option<String>),
    /// The GPU counts uncorrectable memory errors.
    MemoryErrors,
}

fn of_error(error: &NvmlError) -> (CurrentState, bool) {
    (CurrentState::Unhealthy(errors::health_of(error)), errors::is_gone(error))
}

/// Queries the current state of a GPU, and whether it is gone.
fn current_state(device: &Device<'_>) -> (CurrentState, bool) {
    // Only a GPU that is present can answer this query.
    if let Err(error) = device.uuid() {
        return of_error(&error);
    }
    match device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile) {
        Ok(0) => (CurrentState::Healthy, false),
        Ok(_) => (CurrentState::MemoryErrors, false),
        Err(error) => of_error(&error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_unhealthy(health: &mut HealthTracker, gone: bool, energy: u64, xids: &[u64]) -> bool {
        health.take(gone, (!gone).then_some(energy), xids).is_some()
    }

    #[test]
    fn xid_stays_until_a_reset_is_observed() {
        let mut health = HealthTracker::default();
        assert!(!is_unhealthy(&mut health, false, 100, &[13]));
        assert!(is_unhealthy(&mut health, false, 200, &[62, 119]));
        // The same or more energy: no reset.
        assert!(is_unhealthy(&mut health, false, 200, &[]) && is_unhealthy(&mut health, false, 300, &[]));
        assert!(!is_unhealthy(&mut health, false, 5, &[]));
        // An XID after the reset is new.
        assert!(is_unhealthy(&mut health, false, 6, &[79]));
        assert!(is_unhealthy(&mut health, true, 0, &[]));
        assert!(is_unhealthy(&mut health, false, 7, &[62]));
        assert_eq!(health.xid, Some(62));
    }

    #[test]
    fn off_the_bus_report_after_the_return_is_ignored() {
        let mut health = HealthTracker::default();
        // Gone between two samples, and gone in a sample before the report.
        assert!(!is_unhealthy(&mut health, false, 100, &[]) && !is_unhealthy(&mut health, false, 1, &[79]));
        is_unhealthy(&mut health, true, 0, &[]);
        assert!(!is_unhealthy(&mut health, false, 2, &[79]));
        // The report counts for a GPU that answered all the time.
        assert!(is_unhealthy(&mut health, false, 3, &[79]) && is_unhealthy(&mut health, false, 4, &[]));
    }

    #[test]
    fn gpu_without_energy_counter_recovers_after_it_was_gone() {
        let mut health = HealthTracker::default();
        assert!(health.take(false, None, &[48]).is_some());
        assert!(health.take(false, None, &[]).is_some());
        health.take(true, None, &[]);
        assert_eq!(health.take(false, None, &[]), None);
    }

    #[test]
    fn restored_error_is_cleared_by_a_reset() {
        let uuid = GpuUuid::from("GPU-1");
        for (gone, energy, now, unhealthy) in
            [(false, 50, 60, true), (false, 50, 4, false), (true, 50, 60, false)]
        {
            let fatal = FatalGpuError { uuid: uuid.clone(), xid: 79, gone, energy: Some(energy) };
            let text = serde_json::to_string(&fatal).unwrap();
            let mut health = HealthTracker::default();
            health.remember(&serde_json::from_str(&text).unwrap());
            assert_eq!(health.fatal(&uuid), Some(fatal));
            assert_eq!(is_unhealthy(&mut health, false, now, &[]), unhealthy, "{text}");
            assert_eq!(health.fatal(&uuid).is_some(), unhealthy);
        }
        // A contained error is restored, too, and does not make the GPU unhealthy.
        let mut health = HealthTracker::default();
        assert!(!is_unhealthy(&mut health, false, 50, &[94, 63]));
        let kept = health.fatal(&uuid).unwrap();
        assert!((kept.xid, kept.is_fatal()) == (94, false));
        let mut later = HealthTracker::default();
        later.remember(&kept);
        assert!(!is_unhealthy(&mut later, false, 60, &[]) && later.contained == Some(94));
        assert!(!is_unhealthy(&mut later, false, 1, &[]) && later.contained.is_none(), "reset");
        // An XID that an older version considered fatal is not restored.
        let mut health = HealthTracker::default();
        health.remember(&FatalGpuError { uuid, xid: 13, gone: false, energy: None });
        assert_eq!(health, HealthTracker::default());
    }
}
