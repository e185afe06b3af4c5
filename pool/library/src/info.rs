//! Properties of a template that callers can see.

use std::{collections::BTreeMap, path::PathBuf};

use model::{Bytes, SandboxId};
use serde::{Deserialize, Serialize};

use crate::vmms::VmmId;

/// The contents of a template, which determine how its sandboxes start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TemplateKind {
    /// Files that were made elsewhere, with memory. Sandboxes are clones of it.
    Installed,
    /// The state of a sandbox that a client kept. Sandboxes are clones of it.
    Snapshot,
    /// A root image and a writable layer, without memory. Each sandbox boots from it.
    Disk,
    /// The state of a sandbox in which a template was built. Sandboxes are clones of it, with its
    /// [`TemplateDefaults`].
    Built,
}

/// The largest disk of guests.
pub const MAX_DISK: Bytes = Bytes::mib(256 << 10);

/// Files and VM size of a new disk template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSpec {
    /// The root image. The pool links or copies it, so it may be removed afterwards. It must not be changed.
    pub root: PathBuf,
    /// The writable layer, which contains a file system. `None`: an empty one. Like the root image, it is linked or
    /// copied.
    pub layer: Option<PathBuf>,
    /// Guest RAM.
    pub memory: Bytes,
    pub vcpus: u8,
}

/// Settings that a built template gives to the agent of each of its sandboxes. `None` keeps the agent's default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateDefaults {
    /// The user of processes whose request does not name one.
    #[serde(default)]
    pub user: Option<String>,
    /// The working directory of processes whose request does not name one.
    #[serde(default)]
    pub workdir: Option<String>,
    /// Variables of all processes. Variables of a create take precedence.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
}

/// A template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Recorded")]
pub struct TemplateInfo {
    /// 20 lower-case letters and digits. The id of an installed template is derived from its name, so it never changes.
    pub id: String,
    /// Names, `name` or `name:tag`; empty for an unnamed template.
    pub names: Vec<String>,
    /// Guest RAM.
    pub memory: Bytes,
    pub vcpus: u8,
    /// Size of the disk as seen by the guest.
    pub disk: Bytes,
    pub created_unix_s: u64,
    pub kind: TemplateKind,
    /// The sandbox from which the template was made, which may have ended. `None` for templates that were made
    /// otherwise, and for snapshots made by servers that did not record it.
    pub source: Option<SandboxId>,
    /// Number of creates and forks of its sandboxes since the pool was opened.
    pub spawned: u64,
    /// Current number of warm slots.
    pub warm: u32,
    /// The VMM that made the template, and in which its sandboxes run. `None` for a disk template, whose sandboxes run
    /// in the current VMM, and in records of older releases.
    pub vmm: Option<VmmId>,
    /// Space of its memory, state and layer on the host's disk. Root images, which templates share, do not count. Zero
    /// in records of older releases.
    pub bytes: Bytes,
}

/// A [`TemplateInfo`] in the record of a sandbox, written by this or an older release.
#[derive(Deserialize)]
struct Recorded {
    id: String,
    names: Vec<String>,
    memory: Bytes,
    vcpus: u8,
    disk: Bytes,
    created_unix_s: u64,
    /// `None` in records before version 5.
    kind: Option<TemplateKind>,
    /// Only in records before version 5.
    #[serde(default)]
    is_snapshot: bool,
    source: Option<SandboxId>,
    spawned: u64,
    warm: u32,
    vmm: Option<VmmId>,
    #[serde(default = "zero")]
    bytes: Bytes,
}

fn zero() -> Bytes {
    Bytes(0)
}

impl From<Recorded> for TemplateInfo {
    fn from(recorded: Recorded) -> Self {
        let former = if recorded.is_snapshot {
            TemplateKind::Snapshot
        } else {
            TemplateKind::Installed
        };
        Self {
            id: recorded.id,
            names: recorded.names,
            memory: recorded.memory,
            vcpus: recorded.vcpus,
            disk: recorded.disk,
            created_unix_s: recorded.created_unix_s,
            kind: recorded.kind.unwrap_or(former),
            source: recorded.source,
            spawned: recorded.spawned,
            warm: recorded.warm,
            vmm: recorded.vmm,
            bytes: recorded.bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::info;

    #[test]
    fn the_template_in_a_record_of_a_former_release_has_a_kind() {
        for (is_snapshot, kind) in [
            (true, TemplateKind::Snapshot),
            (false, TemplateKind::Installed),
        ] {
            let mut former = serde_json::to_value(info()).unwrap();
            let fields = former.as_object_mut().unwrap();
            for later in ["kind", "bytes"] {
                fields.remove(later);
            }
            fields.insert("is_snapshot".into(), is_snapshot.into());
            let read: TemplateInfo = serde_json::from_value(former).unwrap();
            assert_eq!(read, TemplateInfo { kind, ..info() });
        }
        let disk = TemplateInfo {
            kind: TemplateKind::Disk,
            bytes: Bytes::mib(3),
            ..info()
        };
        let text = serde_json::to_string(&disk).unwrap();
        assert_eq!(serde_json::from_str::<TemplateInfo>(&text).unwrap(), disk);
    }
}
