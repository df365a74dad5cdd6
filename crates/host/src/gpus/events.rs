//! Collects the events of the driver: critical XIDs.
//!
//! Every GPU has an event set of its own: if registering a GPU fails, NVML frees the set, and the events of the others
//! in it would be lost.
#![allow(unsafe_code)]

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, EventSet, Nvml};
use std::sync::Arc;

/// The maximum number of events read per sample, so that a GPU that reports without end cannot block the caller.
const MAX_EVENTS_PER_SAMPLE: usize = 256;

/// The events of one GPU.
#[derive(Debug)]
pub(super) struct XidEvents {
    /// Declared before `nvml`, because it must be dropped first.
    set: Option<EventSet<'static>>,
    /// Whether the GPU has no events, as some cards and systems.
    unsupported: bool,
    nvml: Arc<Nvml>,
}

impl XidEvents {
    pub(super) fn new(nvml: &Arc<Nvml>) -> Self {
        Self { set: None, unsupported: false, nvml: Arc::clone(nvml) }
    }

    /// Registers for the events of a GPU, unless that was done before.
    pub(super) fn register(&mut self, device: &Device<'_>) {
        if self.set.is_some() || self.unsupported {
            return;
        }
        // SAFETY: the session is behind an `Arc` that lives as long as this value. The event set, which borrows the
        // session, is a field that is declared and so dropped before the `Arc`, and no reference with this lifetime
        // leaves this file.
        let nvml: &'static Nvml = unsafe { &*Arc::as_ptr(&self.nvml) };
        // The device is looked up again, because a registered set borrows the session for the device's lifetime.
        let set = device.index().and_then(|index| {
            let set = nvml.create_event_set()?;
            let device = nvml.device_by_index(index)?;
            device.register_events(EventTypes::CRITICAL_XID_ERROR, set).map_err(|failed| failed.error)
        });
        match set {
            Ok(set) => self.set = Some(set),
            // Other errors may be temporary: the next sample tries again.
            Err(error) => self.unsupported = matches!(error, NvmlError::NotSupported),
        }
    }

    /// Returns the XIDs since the last call, oldest first. It does not block.
    pub(super) fn xids(&self) -> Vec<u64> {
        let mut xids = Vec::new();
        let Some(set) = &self.set else { return xids };
        for _ in 0..MAX_EVENTS_PER_SAMPLE {
            match set.wait(0) {
                Ok(event) => match event.event_data {
                    Some(XidError::Value(xid)) => xids.push(xid),
                    Some(XidError::Unknown) | None => {}
                },
                // No event is left, or the GPU is lost, which the sample itself reports.
                Err(_) => break,
            }
        }
        xids
    }
}
