//! OCI images as root images of guests: pulled from a registry, merged to one tree, written as an EROFS file.
//!
//! ```text
//! Client::pull ─► Store (blobs) ─► Converter ─► Store (images)
//! worker, a confined process for each image: Unpacker ─► tar::read ─► Tree::apply ─► provision ─► erofs::write
//! ```
//! A layer is never extracted to a file system. Its unpacked archive is one file, and a file's content in the tree is a
//! range of it. Conversion therefore needs no privileges, and no path of an image ever reaches the host's kernel.

// From a name to blobs.
pub mod reference;
pub mod registry;

pub mod config;
pub mod digest;
pub mod manifest;
pub mod store;

// From blobs to a root image, in a confined process.
mod convert;
mod program;
pub mod worker;

mod assemble;
mod limits;
mod source;
pub mod unpack;

pub mod tar;
pub mod tree;

pub mod provision;

pub mod erofs;

#[cfg(any(test, fuzzing))]
pub mod fuzz;

pub use convert::{ConvertError, Converter};
pub use limits::Limits;
pub use program::Program;
pub use registry::{Client, Layer, PullError, Pulled, Registries};
pub use source::{Source, Unpacked};
pub use store::Store;
pub use worker::confine::Resources;
