//! Templates on disk: what is written, and what is checked before a byte of it is believed.
//!
//! `state` begins with a fixed header, outside the codec:
//! ```text
//! offset 0  magic "CUBESNAP"            8 bytes
//!        8  format, little-endian       4 bytes
//!       12  platform (3 ring3, 0 hvm)   4 bytes
//!       16  body length, LE             8 bytes, at most 64 MiB
//!       24  SHA-256 of the body        32 bytes
//! ```
//! All files are opened by the client and handed over; the paths here are for messages. The client also puts a
//! snapshot in its place when it is whole, so that one that exists is complete.
//!
//! A *diff* holds of memory and layer only what differs from its base, a whole template elsewhere, and names
//! that by its directory and its manifest's sum. A base is never a diff: a clone of a diff descends from the
//! diff's base, and its own diff holds everything again that differs from that.

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
