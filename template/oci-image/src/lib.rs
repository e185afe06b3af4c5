//! OCI images as root images of guests: pulled from a registry, merged to one tree, written as an EROFS file.
//!
//! ```text
//! Client::pull ─► Store (blobs) ─► Converter ─► Store (images)
//! worker, a confined process for each image: Unpacker ─► tar::read ─► Tree::apply ─► provision ─► erofs::write
//! ```
//! A layer is never extracted to a file system: its unpacked archive is one file, and a file's content in the tree is a
//! range of it. So conversion needs no privileges, and no path of an image ever reaches the host's kernel.

mod assemble;
pub mod config;
mod convert;
pub mod digest;
pub mod erofs;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod limits;
pub mod manifest;
mod program;
pub mod provision;
pub mod reference;
pub mod registry;
mod source;
pub mod store;
pub mod tar;
pub mod tree;
pub mod unpack;
pub mod worker;

pub use convert::{ConvertError, Converter};
pub use limits::Limits;
pub use program::Program;
pub use registry::{Client, Layer, PullError, Pulled, Registries};
pub use source::{Source, Unpacked};
pub use store::Store;
pub use worker::confine::Resources;
