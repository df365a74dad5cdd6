//! Tests of the arbiter: its decisions in virtual time, and its threads over real regions.

mod model;
mod properties;
mod real_regions;
mod shares;

use super::{
    Arbiter, ContainerView, MICRO, MILLI, TurnDecision, TurnScheduler, doorbell_wait, gpu_thread, tuning,
};
use crate::protocol::{HEARTBEAT_INTERVAL_NS, IDLE_HEARTBEAT_INTERVAL_NS, TIME_CHUNK_NS, WHOLE_GPU};

/// One percent of a GPU.
const PERCENT: u32 = WHOLE_GPU / 100;
