//! One machine, end to end: several users, those who wait, `partage up`, and what survives when keepers are killed.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "local_users/fixture.rs"]
mod fixture;
#[path = "local_users/kills.rs"]
mod kills;
#[path = "local_users/socket.rs"]
mod socket;
#[path = "local/support.rs"]
mod support;
#[path = "local_users/up.rs"]
mod up;
#[path = "local_users/users.rs"]
mod users;
#[path = "local_users/waiting.rs"]
mod waiting;
