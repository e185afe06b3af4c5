//! Guest memory. It consists of one or two parts, before and after a hole in guest-physical addresses. Each part is one
//! mapping and one KVM slot. Offsets in this module and in files do not count the hole.
//!
//! A booted VM has anonymous memory. A clone maps the template's file privately: pages that it writes become private
//! copies, and pages that it only reads stay in the host's page cache. A clone of a diff maps the base's file in the
//! same way, with the pages of the diff's file over it.

mod diff;
mod guest_memory;
mod pages;
mod working_set;

#[cfg(test)]
mod tests;

pub use guest_memory::{Hole, Memory, MemoryError};
pub use pages::{PAGE, Ranges, WorkingSet};
pub use working_set::{read_working_set, write_working_set};
