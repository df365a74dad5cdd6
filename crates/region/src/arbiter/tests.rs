//! Tests of the arbiter: its decisions in virtual time, and its threads over real regions.

mod model;
mod properties;
mod real_regions;
mod shares;

use super::{
    Arbiter, ContainerView, MICRO, MILLI, TurnDecision, TurnScheduler, WHOLE, doorbell_wait, gpu_thread,
    tuning,
};
