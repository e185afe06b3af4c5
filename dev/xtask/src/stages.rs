//! Build stages of `prepare`. The output of a stage is rebuilt only when one of its inputs changes.

pub(crate) mod stage;

// From packages to the files that a VMM boots from.
pub(crate) mod guest_module;
pub(crate) mod initramfs;
pub(crate) mod kernel;
pub(crate) mod layer;
pub(crate) mod root_image;
pub(crate) mod userland;

// Programs, templates, and the directory in which users find them.
pub(crate) mod binaries;
pub(crate) mod guest_dir;
pub(crate) mod interpreter;
pub(crate) mod template;

// The documents as a web site.
pub(crate) mod site;

// Programs of other projects, for tests.
pub(crate) mod etcd;
pub(crate) mod sdks;
pub(crate) mod suites;

// Formats and mechanisms of these stages.
pub(crate) mod archive;
mod bzimage;
pub(crate) mod cpio;
mod modules;
mod mounts;
