//! Everything on disk that sandboxes start from: templates with their ids and names, the images and VMMs that they
//! need, and the disk space that they may take.
//!
//! The rule of this crate: **a directory has its final name only when its files are complete and synced, and from then
//! on their content never changes.** Files are written under a draft's name, synced and renamed; directories of `images`
//! and `vmms` are named by their content. Links to these files therefore are copies, and a crash leaves a complete
//! template or none. Three things are added to a template later, and none of them changes what a sandbox starts from: its
//! record is replaced when names move, its working set is recorded, and its memory may be stored as a diff, from which
//! the same bytes can be made.
//!
//! This crate decides neither who may start nor what is removed: its user, the pool, does.

// Templates, by id and name.
mod library;

pub mod info;
mod names;
pub mod rebuilt;
pub mod record;
pub mod template;

mod maker;

// The files and programs that they need.
pub mod images;
pub mod manifest;
pub mod store;
pub mod vmms;

// The making of new templates, and of memory.
pub mod copy;
pub mod diff;
pub mod disk;

// Disk space, and the operations on files.
pub mod account;
pub mod durable;
pub mod error;
pub mod host;
pub mod memory_diff;

#[cfg(any(test, feature = "fixtures"))]
pub mod fixtures;

pub use library::{Library, NewTemplate, Renamed};
pub use names::TakenNames;
