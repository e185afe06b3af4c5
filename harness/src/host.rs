//! Facts about the host, and the grade of measurements on it.

pub(crate) mod cgroup;
pub mod facts;
pub mod grade;
mod kernel_threads;
pub mod listener;
pub mod platform;
pub mod usage;
