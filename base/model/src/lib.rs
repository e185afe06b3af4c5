//! Vocabulary that several crates share: sizes, start phases, the specification of a VM, the identity of a clone,
//! the manifest of a template, the paths of an installed server, hex digits, words for shells,
//! and a line of /proc/PID/stat. The only system call is in [`clock`]; nothing here does I/O.

mod chain;
pub mod clock;
pub mod guest;
mod hex;
mod identity;
mod installation;
mod phase;
mod process;
mod sandbox;
mod shell;
mod size;
mod spec;
mod template;

pub use chain::chain;
pub use hex::{hex, is_sha256};
pub use identity::{EntropySeed, Identity};
pub use installation::{CONFIG_FILE, STATE_DIR};
pub use phase::{StartPhase, Timeline};
pub use process::ProcessStat;
pub use sandbox::{SandboxId, SandboxIdError};
pub use shell::quoted;
pub use size::{Bytes, SizeError};
pub use spec::{
    GuestPaths, HypercallPath, MAX_MEMORY, MIN_MEMORY, Platform, RestoreSpec, SpecError, VmSpec,
    WorkingSetPrefault,
};
pub use template::{
    FileSum, MANIFEST_NAME, MadeBy, TEMPLATE_FORMAT, TemplateBase, TemplateManifest, WarmUpRequest,
    template_file,
};
