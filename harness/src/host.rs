//! What the host is, how quiet it was, and what its numbers are worth.

pub mod facts;
pub mod grade;
pub mod platform;
