//! `partage top`: who uses what on this machine, live.

mod rates;
pub(super) mod view;

pub(crate) use view::{Options, foot, lines};

#[cfg(test)]
mod tests;
