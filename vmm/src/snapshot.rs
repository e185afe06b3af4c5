//! Templates on disk: their format, and the checks before a restore and in [`verify`].
//!
//! `state` begins with a fixed header, outside the codec:
//! ```text
//! offset 0  magic "CUBESNAP"            8 bytes
//!        8  format, little-endian       4 bytes
//!       12  platform (3 ring3, 0 hvm)   4 bytes
//!       16  body length, LE             8 bytes, at most 64 MiB
//!       24  SHA-256 of the body        32 bytes
//! ```
//! The client opens all files and sends their descriptors. Paths in this module are for messages. The client also
//! renames a finished snapshot to its place, so that a snapshot with its final name is complete.
//!
//! A *diff* contains only the memory and layer content that differs from its base, a whole template in another
//! directory. It names the base by that directory and the SHA-256 of the base's manifest. A base is never a diff: a
//! clone of a diff descends from the diff's base, and a diff of the clone again contains everything that differs from
//! that base.

mod directory;
mod error;
mod manifest;
mod state_file;
mod sums;
mod template;
mod verify;

pub use directory::Directory;
pub(crate) use error::not_there;
pub use error::{SnapshotError, at};
pub use manifest::Ancestor;
pub use state_file::{MachineState, decode, encode};
pub use sums::{SummedFile, sparse_sum, sum, sum_of};
pub use template::{Diff, Source, Template, open};
pub use verify::verify;
