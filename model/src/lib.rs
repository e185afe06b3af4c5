//! The words that every crate shares: sizes, the start ladder, what a VM is made of, who a clone is,
//! and what a template consists of. Types only: nothing here does I/O or reads a clock.

pub mod guest;
mod identity;
mod phase;
mod sandbox;
mod size;
mod spec;
mod template;

pub use identity::{EntropySeed, Identity};
pub use phase::{StartPhase, Timeline};
pub use sandbox::{SandboxId, SandboxIdError};
pub use size::{Bytes, SizeError};
pub use spec::{
    GuestPaths, HypercallPath, MAX_MEMORY, MIN_MEMORY, Platform, RestoreSpec, SpecError, VmSpec,
    WorkingSetPrefault,
};
pub use template::{
    FileSum, MANIFEST_NAME, TEMPLATE_FORMAT, TemplateBase, TemplateManifest, WarmUpRequest,
    template_file,
};
