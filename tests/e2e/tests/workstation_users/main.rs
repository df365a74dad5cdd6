//! One machine, end to end: several users, those who wait, `partage up`, and what survives when keepers are killed.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod fixture;
mod kills;
mod socket;
#[path = "../workstation/support.rs"]
mod support;
mod up;
mod upgrade;
mod users;
mod waiting;
