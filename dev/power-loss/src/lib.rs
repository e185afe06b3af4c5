//! Simulates the states in which a crash of the host can leave a directory, for tests.
//!
//! ```text
//! a program under strace ─► trace::steps ─► Recording ─► crashes ─► Tree::write ─► the recovery under test
//! ```
//! [`Recording`] models only the guarantees of POSIX and journalled file systems:
//! - A change of names (create, link, rename, remove) is atomic. It survives a crash if one of its directories was
//!   synced later. Until then it may or may not survive, independently of all other changes, except that an earlier
//!   change of the same name survives with it.
//! - The contents of a file survive if the file was synced after the last write. Until then the file may be whole,
//!   empty, cut off, or full of zeros.
//!
//! Real file systems leave fewer states: ext4 also orders changes of names among themselves.

mod model;
mod trace;

pub use model::{Crash, Recording, Tree};
pub use trace::{TRACED, TraceError};
