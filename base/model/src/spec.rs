//! The specification of a VM and its validation.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::Bytes;

/// Smallest accepted guest RAM.
pub const MIN_MEMORY: Bytes = Bytes::mib(128);
/// Largest accepted guest RAM.
pub const MAX_MEMORY: Bytes = Bytes::mib(8192);

/// How KVM on this host executes guest code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Platform {
    /// Guest ring 3 runs natively and guest ring 0 is emulated. The guest kernel runs in ring 3 through its Xen PV
    /// entry.
    Ring3,
    /// VMX or SVM: the guest kernel runs in ring 0.
    Hvm,
}

impl Platform {
    /// The name used in text and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ring3 => "ring3",
            Self::Hvm => "hvm",
        }
    }
}

/// How the guest kernel calls the monitor (platform `ring3` only).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HypercallPath {
    /// The kernel's two hypercall sites are rewritten in memory into calls of the monitor.
    #[default]
    Call,
    /// The kernel's text is untouched; its `syscall` instruction traps to the monitor.
    Trap,
}

/// The files that a boot needs, as absolute paths on the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestPaths {
    /// The guest kernel, an uncompressed ELF file.
    pub kernel: PathBuf,
    /// The initramfs, a cpio archive with any compression that the kernel supports.
    pub initrd: PathBuf,
    /// The root image, attached read-only as the first block device. All VMs share it.
    pub root: PathBuf,
    /// The template's writable layer, attached copy-on-write as the second block device.
    pub layer: PathBuf,
}

/// A VM to boot from a kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmSpec {
    /// Guest RAM, a multiple of 2 MiB from [`MIN_MEMORY`] to [`MAX_MEMORY`].
    pub memory: Bytes,
    /// Number of vCPUs: 1 on `ring3`, 1 to 8 on `hvm`.
    pub vcpus: u8,
    pub guest: GuestPaths,
    /// Text to append to the kernel command line that the VMM generates.
    #[serde(default)]
    pub cmdline: String,
    #[serde(default)]
    pub hypercalls: HypercallPath,
    /// Path of the unix socket at which host processes connect to guest ports (`CONNECT <port>\n`).
    pub vsock: PathBuf,
    /// File that receives the console output, limited in size. `None`: the output is discarded.
    #[serde(default)]
    pub console: Option<PathBuf>,
    /// Maximum number of bytes that the guest's writes to the layer may occupy on the host's disk. Writes beyond the
    /// limit fail with I/O errors in the guest. `None`: the size of the layer.
    #[serde(default)]
    pub layer_limit: Option<Bytes>,
}

/// Whether a restore copies the pages of the template's recorded working set before the clone runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkingSetPrefault {
    /// Copy the recorded pages during the restore.
    #[default]
    On,
    /// Copy each page when the guest first writes to it.
    Off,
}

/// A clone to restore from a template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RestoreSpec {
    /// Directory of the template.
    pub template: PathBuf,
    /// Directory of the base of a diff, if it is not the one in the diff's manifest. Usually a copy loaded into huge
    /// pages. The checksum of its manifest must match the diff's manifest. Ignored for a template that is not a diff.
    #[serde(default)]
    pub base: Option<PathBuf>,
    /// The root image, if it is not at the path in the manifest. Only the client uses this path: it opens the file.
    #[serde(skip)]
    pub root: Option<PathBuf>,
    /// Like [`VmSpec::vsock`].
    pub vsock: PathBuf,
    /// Like [`VmSpec::console`].
    #[serde(default)]
    pub console: Option<PathBuf>,
    /// Like [`VmSpec::layer_limit`].
    #[serde(default)]
    pub layer_limit: Option<Bytes>,
    #[serde(default)]
    pub prefault: WorkingSetPrefault,
}

/// Reason why a specification is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    #[error("guest memory {given} is outside {min} to {max}", min = MIN_MEMORY, max = MAX_MEMORY)]
    MemoryRange { given: Bytes },
    #[error("guest memory {given} is not a multiple of 2MiB")]
    MemoryAlignment { given: Bytes },
    #[error("cannot run {given} vCPUs: platform {} supports 1 to {max}", platform.name())]
    Vcpus {
        given: u8,
        /// Maximum number of vCPUs that the platform supports.
        max: u8,
        platform: Platform,
    },
}

impl VmSpec {
    /// Checks every rule that needs no file access.
    ///
    /// # Errors
    /// Returns the first rule of [`SpecError`] that the specification breaks.
    pub fn check(&self, platform: Platform) -> Result<(), SpecError> {
        let given = self.memory;
        if given < MIN_MEMORY || given > MAX_MEMORY {
            return Err(SpecError::MemoryRange { given });
        }
        if !given.0.is_multiple_of(2 << 20) {
            return Err(SpecError::MemoryAlignment { given });
        }
        let max = match platform {
            Platform::Ring3 => 1,
            Platform::Hvm => 8,
        };
        if self.vcpus == 0 || self.vcpus > max {
            return Err(SpecError::Vcpus {
                given: self.vcpus,
                max,
                platform,
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(memory: Bytes, vcpus: u8) -> VmSpec {
        VmSpec {
            memory,
            vcpus,
            guest: GuestPaths {
                kernel: "k".into(),
                initrd: "i".into(),
                root: "r".into(),
                layer: "l".into(),
            },
            cmdline: String::new(),
            hypercalls: HypercallPath::default(),
            vsock: "v".into(),
            console: None,
            layer_limit: None,
        }
    }

    #[test]
    fn memory_and_vcpus_are_checked_against_their_ranges() {
        assert_eq!(spec(Bytes::mib(256), 1).check(Platform::Ring3), Ok(()));
        assert!(spec(Bytes::mib(126), 1).check(Platform::Ring3).is_err());
        assert!(spec(Bytes::mib(8194), 1).check(Platform::Ring3).is_err());
        assert!(spec(Bytes::mib(129), 1).check(Platform::Ring3).is_err());
        assert!(spec(Bytes::mib(256), 0).check(Platform::Hvm).is_err());
        assert_eq!(
            spec(Bytes::mib(256), 2)
                .check(Platform::Ring3)
                .unwrap_err()
                .to_string(),
            "cannot run 2 vCPUs: platform ring3 supports 1 to 1"
        );
    }
}
