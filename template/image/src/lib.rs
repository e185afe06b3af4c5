//! OCI images as root images of guests: pulled from a registry, merged to one tree, written as an EROFS file.
//!
//! ```text
//! Client::pull ─► Store (blobs) ─► convert: Unpacker ─► tar::read ─► Tree::apply ─► erofs::write ─► Store (images)
//! ```
//! A layer is never extracted to a file system: its unpacked archive is one file, and a file's content in the tree is a
//! range of it. So conversion needs no privileges, and no path of an image ever reaches the host's kernel.

pub mod config;
mod convert;
pub mod digest;
pub mod erofs;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod limits;
pub mod manifest;
pub mod provision;
pub mod reference;
pub mod registry;
mod source;
pub mod store;
pub mod tar;
pub mod tree;
pub mod unpack;

pub use convert::{ConvertError, convert, key};
pub use limits::Limits;
pub use registry::{Client, Layer, PullError, Pulled, Registries};
pub use source::{Source, Unpacked};
pub use store::Store;
