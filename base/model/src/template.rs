//! The manifest of a template, the snapshot that clones start from. It names every other file of the template with its
//! length and SHA-256.

use serde::{Deserialize, Serialize};

use crate::{Bytes, HypercallPath, Platform};

/// Format version of memory, state, layer and extents of a template. A `cube-vmm` refuses every other version, so the
/// pool keeps the `cube-vmm` that made a template as long as the template is needed. The tests of upgrades build VMMs
/// of later formats with `CUBE_TEST_TEMPLATE_FORMAT`.
pub const TEMPLATE_FORMAT: u32 = match option_env!("CUBE_TEST_TEMPLATE_FORMAT") {
    None => 3,
    Some(digits) => match u32::from_str_radix(digits, 10) {
        Ok(format) => format,
        Err(_) => panic!("CUBE_TEST_TEMPLATE_FORMAT is not a number"),
    },
};
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
    /// The VMM that made an installed template: a [`super::MadeBy`] as JSON. The template may also contain that program,
    /// under the name `cube-vmm`.
    pub const MADE_BY: &str = "made-by.json";
}

/// The VMM that made a template. Only this VMM is guaranteed to read it. Later releases may add fields, so unknown ones
/// are ignored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MadeBy {
    /// SHA-256 of the program `cube-vmm`, 64 lower-case hex digits.
    pub vmm_sha256: String,
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
    /// SHA-256 of the base's manifest, 64 lower-case hex digits. The manifest contains the checksums of the base's
    /// files, so this hash identifies the complete base.
    pub manifest_sha256: String,
    /// Checksum of [`template_file::EXTENTS`].
    pub extents_sum: FileSum,
}

/// The manifest, as a VMM writes and reads it. The pool reads a part of it, in every format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateManifest {
    /// The format of the VMM that made the template. In a VMM it is always [`TEMPLATE_FORMAT`].
    pub format: u32,
    /// The platform whose CPU state the template holds.
    pub platform: Platform,
    /// Guest RAM.
    pub memory: Bytes,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// How the guest kernel calls the monitor. `None` on `hvm`.
    pub hypercalls: Option<HypercallPath>,
    /// Wall clock of the host when the guest was paused, in nanoseconds since 1970.
    pub taken_at_unix_ns: u64,
    /// Absolute path of the read-only root image. The guest's memory depends on its content.
    pub root: std::path::PathBuf,
    /// Checksum of the root image.
    pub root_sum: FileSum,
    /// Checksum of the guest kernel (ELF).
    pub kernel_sum: FileSum,
    /// The base, if the template is a diff. `None` for a whole template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<TemplateBase>,
    /// Checksum of [`template_file::MEMORY`]. The hash covers only the 64 KiB blocks that are not all zero, each
    /// preceded by its index.
    pub memory_sum: FileSum,
    /// Checksum of [`template_file::STATE`].
    pub state_sum: FileSum,
    /// Checksum of [`template_file::LAYER`], computed like the one of the memory.
    pub layer_sum: FileSum,
}
