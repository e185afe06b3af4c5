//! The manifest of a template: a snapshot that clones start from. It is the one file of a template that
//! a person reads; every other file is named and summed in it.

use serde::{Deserialize, Serialize};

use crate::{Bytes, HypercallPath, Platform};

/// Format of the template directory; a reader refuses every other number.
pub const TEMPLATE_FORMAT: u32 = 3;
/// Name of the manifest in a template's directory.
pub const MANIFEST_NAME: &str = "manifest.json";

/// Names of the other files in a template's directory.
pub mod template_file {
    /// Guest RAM and the monitor's memory, mapped privately by clones. In a diff: the pages that differ from
    /// the base's, one after another in the order of [`EXTENTS`].
    pub const MEMORY: &str = "memory";
    /// CPU and device state in the snapshot codec.
    pub const STATE: &str = "state";
    /// The writable layer at snapshot time. In a diff: the blocks written over the base's, as in [`MEMORY`].
    pub const LAYER: &str = "layer";
    /// In a diff only: where the pages of [`MEMORY`] and the blocks of [`LAYER`] belong.
    pub const EXTENTS: &str = "extents";
    /// Pages that a first restore made private: pairs of little-endian u64 (offset, length) in bytes.
    pub const WORKING_SET: &str = "working-set";
    /// What its servers are asked in a clone that is to be warm: a list of [`super::WarmUpRequest`] as JSON. Absent
    /// when there is nothing to ask.
    pub const WARM_UP: &str = "warm-up.json";
}

/// A `POST` to a server in the guest that leaves no trace there, but has its pages in place: what users ask first
/// is then quick. Any status but 200 means that the clone is not fit for use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WarmUpRequest {
    /// The vsock port on which the server listens.
    pub port: u16,
    /// The request's target, such as `/execute`.
    pub path: String,
    /// The request's body, JSON.
    pub body: String,
}

/// Length and SHA-256 (hex) of a file; over all of it unless the field says otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileSum {
    /// Length in bytes.
    pub bytes: u64,
    /// SHA-256, 64 lower-case hex digits.
    pub sha256: String,
}

/// What a diff leaves out, and where that is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateBase {
    /// Directory of the base, absolute path. A base is never a diff itself.
    pub dir: std::path::PathBuf,
    /// SHA-256 of the base's manifest, 64 lower-case hex digits: with the sums in it, of all of the base.
    pub manifest_sha256: String,
    /// Sum of [`template_file::EXTENTS`].
    pub extents_sum: FileSum,
}

/// What a template is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateManifest {
    /// [`TEMPLATE_FORMAT`].
    pub format: u32,
    /// The platform whose CPU state it holds.
    pub platform: Platform,
    /// Guest RAM.
    pub memory: Bytes,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// How its kernel reaches the monitor; absent on `hvm`.
    pub hypercalls: Option<HypercallPath>,
    /// Wall clock of the host when the guest was stopped, nanoseconds since 1970.
    pub taken_at_unix_ns: u64,
    /// The read-only root image that its memory refers to, absolute path.
    pub root: std::path::PathBuf,
    /// Sum of the root image.
    pub root_sum: FileSum,
    /// Sum of the guest kernel (ELF).
    pub kernel_sum: FileSum,
    /// What memory and layer are to be laid over; absent if they are whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<TemplateBase>,
    /// Sum of [`template_file::MEMORY`]: over its 64 KiB blocks that are not zero, each led by its index.
    pub memory_sum: FileSum,
    /// Sum of [`template_file::STATE`].
    pub state_sum: FileSum,
    /// Sum of [`template_file::LAYER`], made like that of the memory.
    pub layer_sum: FileSum,
}
