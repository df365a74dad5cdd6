//! This node's containers: what they hold, and everything that is done to them.

pub(crate) mod lifecycle;
