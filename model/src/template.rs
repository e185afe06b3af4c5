//! The manifest of a template, the snapshot that clones start from. It names every other file of the template with its
//! length and SHA-256.

use serde::{Deserialize, Serialize};

use crate::{Bytes, HypercallPath, Platform};

/// Format version of the template directory. Readers refuse every other version.
pub const TEMPLATE_FORMAT: u32 = 3;
/// File name of the manifest in a template's directory.
pub const MANIFEST_NAME: &str = "manifest.json";

/// File names of the other files in a template's directory.
pub mod template_file {
    /// Guest RAM and the monitor's region. Clones map this file privately. In a diff: the pages that differ from the
    /// base's, one after another, in the order of [`EXTENTS`].
    pub const MEMORY: &str = "memory";
    /// CPU and device state in the format of `cube-vmm`'s `snapshot` module.
    pub const STATE: &str = "state";
    /// The writable layer at the time of the snapshot. In a diff: the blocks that differ from the base's, stored like
    /// the pages of [`MEMORY`].
    pub const LAYER: &str = "layer";
    /// Only in a diff: the positions of the pages in [`MEMORY`] and of the blocks in [`LAYER`].
    pub const EXTENTS: &str = "extents";
    /// The working set: the pages that a first clone made private, and the 2 MiB blocks that it touched. Pairs of
    /// little-endian u64, offset and length in bytes.
    pub const WORKING_SET: &str = "working-set";
    /// Requests that warm up a clone's servers: a list of [`super::WarmUpRequest`] as JSON. The file is absent if there
    /// are none.
    pub const WARM_UP: &str = "warm-up.json";
}

/// A `POST` to a server in the guest, which loads the pages that a user's first request needs. The request must have no
/// lasting effect in the guest. If the status is not 200, the clone is discarded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WarmUpRequest {
    /// The vsock port on which the server listens.
    pub port: u16,
    /// The request target, such as `/execute`.
    pub path: String,
    /// The request body, JSON.
    pub body: String,
}

/// Length and SHA-256 of a file. The hash covers the whole file unless the field's description differs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileSum {
    /// Length in bytes.
    pub bytes: u64,
    /// SHA-256, 64 lower-case hex digits.
    pub sha256: String,
}

/// The base of a diff.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateBase {
    /// Absolute path of the base's directory. A base is never a diff itself.
    pub dir: std::path::PathBuf,
    /// SHA-256 of the base's manifest, 64 lower-case hex digits. The manifest holds the sums of the base's files, so
    /// this hash identifies all of the base.
    pub manifest_sha256: String,
    /// Sum of [`template_file::EXTENTS`].
    pub extents_sum: FileSum,
}

/// The manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateManifest {
    /// Always [`TEMPLATE_FORMAT`].
    pub format: u32,
    /// The platform whose CPU state the template holds.
    pub platform: Platform,
    /// Guest RAM.
    pub memory: Bytes,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// How the guest kernel calls the monitor; `None` on `hvm`.
    pub hypercalls: Option<HypercallPath>,
    /// Wall clock of the host when the guest was paused, in nanoseconds since 1970.
    pub taken_at_unix_ns: u64,
    /// Absolute path of the read-only root image. The guest's memory depends on its content.
    pub root: std::path::PathBuf,
    /// Sum of the root image.
    pub root_sum: FileSum,
    /// Sum of the guest kernel (ELF).
    pub kernel_sum: FileSum,
    /// The base, if the template is a diff; `None` for a whole template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<TemplateBase>,
    /// Sum of [`template_file::MEMORY`]. The hash covers only the 64 KiB blocks that are not all zero, each preceded by
    /// its index.
    pub memory_sum: FileSum,
    /// Sum of [`template_file::STATE`].
    pub state_sum: FileSum,
    /// Sum of [`template_file::LAYER`], computed like that of the memory.
    pub layer_sum: FileSum,
}
