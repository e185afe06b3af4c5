//! The files of a VM. A VMM opens nothing by path: its client opens what the VM needs and hands the descriptors
//! over beside the request, each under a [`FileRole`].
//!
//! A file that does not exist is left out, and the VMM says which of its files are missing: it knows which of
//! them a template must have. What a manifest names (root image, base) is opened as well, so a client must not
//! hand in a template whose manifest somebody else wrote; see [`Lineage`].

mod error;
mod lineage;
mod opening;
mod regular;
mod roles;
mod sys;

#[cfg(test)]
mod tests;

pub use error::FilesError;
pub(crate) use error::failed;
pub use lineage::{Home, Lineage, Size};
pub use opening::{of_boot, of_restore, of_template};
pub use roles::{FileRole, Files, TemplateFile};
