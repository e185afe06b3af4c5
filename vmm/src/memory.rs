//! Guest memory: a mapping and a KVM slot for each part that lies together, which is one, or two around a hole
//! in guest-physical addresses. Here and in files it is one row of bytes: offsets skip the hole.
//!
//! A booted VM has anonymous memory; a clone has the template's
//! file, mapped privately: what it writes is its own, what it only reads is the host's page cache. A clone
//! of a diff has the base's file so, and over it runs of pages from the diff's file.

mod diff;
mod guest_memory;
mod pages;
mod working_set;

#[cfg(test)]
mod tests;

pub use guest_memory::{Hole, Memory, MemoryError};
pub use pages::{PAGE, Ranges, WorkingSet};
pub use working_set::{read_working_set, write_working_set};
