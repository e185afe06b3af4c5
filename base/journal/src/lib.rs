//! How state reaches the disk.
//!
//! ```text
//! durable   files and directories that survive a crash of the process or of the host
//! events    a log of sandboxes' events: the latest in memory, all of them in a file
//! file      that file: rotated by size, with a share for each sandbox
//! ```

pub mod durable;
mod events;
mod file;

pub use events::{EventForm, EventLog, EventLogError, Subscriber};
