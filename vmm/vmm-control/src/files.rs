//! The files of a VM. A VMM opens nothing by path: its client opens all files that the VM needs and sends the
//! descriptors with the request, each with a [`FileRole`].
//!
//! The client omits files that do not exist. The VMM decides which of them the template must have, and reports missing
//! ones. The client also opens the files that a manifest names (root image, base), so it must not restore a template
//! whose manifest an untrusted process wrote. See [`Lineage`].

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
pub use opening::{Places, of_boot, of_restore, of_template};
pub use roles::{FileRole, Files, TemplateFile};
