//! Tests of the arbiter: its decisions in virtual time, and its threads over real regions.

mod model;
mod properties;
mod real_regions;
mod shares;

use super::{
    Arbiter, ContenderView, GateState, MICRO, MILLI, SchedulerDecision, TurnScheduler, doorbell_wait,
    scheduler_thread, tuning,
};
use crate::protocol::{DEFAULT_RUN_AHEAD_NS, HEARTBEAT_INTERVAL_NS, IDLE_HEARTBEAT_INTERVAL_NS, WHOLE_GPU};

/// One percent of a GPU.
const PERCENT: u32 = WHOLE_GPU / 100;
