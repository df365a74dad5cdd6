//! What the driver reports of its own accord: critical XIDs, collected whenever somebody looks.
//!
//! Every GPU has a set of its own. A set that one GPU cannot be added to is lost with what it had of the others.
#![allow(unsafe_code)]

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, EventSet, Nvml};
use std::sync::Arc;

/// The most that is taken in one look. A card that reports without end does not keep anybody.
const MOST: usize = 256;

/// The reports of one GPU.
#[derive(Debug)]
pub(super) struct Events {
    /// Before the session in this list: it must go first.
    set: Option<EventSet<'static>>,
    /// Some cards and systems have none.
    unsupported: bool,
    nvml: Arc<Nvml>,
}

impl Events {
    pub(super) fn new(nvml: &Arc<Nvml>) -> Self {
        Self { set: None, unsupported: false, nvml: Arc::clone(nvml) }
    }

    /// Asks for a GPU's reports from now on, once.
    pub(super) fn register(&mut self, device: &Device<'_>) {
        if self.set.is_some() || self.unsupported {
            return;
        }
        // SAFETY: the session is behind an `Arc` that lives as long as this value, which holds the set and drops it
        // first; no reference with this lifetime leaves this file.
        let nvml: &'static Nvml = unsafe { &*Arc::as_ptr(&self.nvml) };
        // The GPU is asked for again because what a set is for has its lifetime.
        let set = device.index().and_then(|index| {
            let set = nvml.create_event_set()?;
            let device = nvml.device_by_index(index)?;
            device.register_events(EventTypes::CRITICAL_XID_ERROR, set).map_err(|failed| failed.error)
        });
        match set {
            Ok(set) => self.set = Some(set),
            // What is lost now is tried again.
            Err(error) => self.unsupported = matches!(error, NvmlError::NotSupported),
        }
    }

    /// The XIDs since the last call, oldest first. Does not wait.
    pub(super) fn xids(&self) -> Vec<u64> {
        let mut xids = Vec::new();
        let Some(set) = &self.set else { return xids };
        for _ in 0..MOST {
            match set.wait(0) {
                Ok(event) => match event.event_data {
                    Some(XidError::Value(xid)) => xids.push(xid),
                    Some(XidError::Unknown) | None => {}
                },
                // None is left, or the GPU is lost: the look at it finds that out by itself.
                Err(_) => break,
            }
        }
        xids
    }
}
