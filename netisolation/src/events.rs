//! Refused traffic, as clients of this crate see it.

pub(crate) mod event;
pub(crate) mod log;
