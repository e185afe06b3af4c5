//! What a VM is made of, validated.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::Bytes;

/// The least guest RAM that is accepted.
pub const MIN_MEMORY: Bytes = Bytes::mib(128);
/// The most guest RAM that is accepted.
pub const MAX_MEMORY: Bytes = Bytes::mib(8192);

/// How the CPU runs guest code on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Platform {
    /// Ring 3 is native and ring 0 emulated: the kernel runs in ring 3 through its Xen PV entry.
    Ring3,
    /// VMX or SVM: the kernel runs in ring 0.
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

/// How the guest kernel reaches the monitor (platform `ring3` only).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HypercallPath {
    /// The kernel's two hypercall sites are rewritten in memory into calls of the monitor.
    #[default]
    Call,
    /// The kernel's text is untouched; its `syscall` instruction traps to the monitor.
    Trap,
}

/// Files a boot needs, as absolute paths on the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestPaths {
    /// The guest kernel as an uncompressed ELF file.
    pub kernel: PathBuf,
    /// The initramfs (cpio, any compression the kernel reads).
    pub initrd: PathBuf,
    /// The root image, attached read-only as the first block device and shared by all VMs.
    pub root: PathBuf,
    /// The template's writable layer, attached copy-on-write as the second block device.
    pub layer: PathBuf,
}

/// A VM to boot from its kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmSpec {
    /// Guest RAM, a multiple of 2 MiB from [`MIN_MEMORY`] to [`MAX_MEMORY`].
    pub memory: Bytes,
    /// Number of vCPUs. `ring3` has one.
    pub vcpus: u8,
    /// The files it boots from.
    pub guest: GuestPaths,
    /// Appended to the kernel command line that the VMM writes; empty for nothing.
    #[serde(default)]
    pub cmdline: String,
    /// See [`HypercallPath`].
    #[serde(default)]
    pub hypercalls: HypercallPath,
    /// Unix socket path where guest ports are reached (`CONNECT <port>\n`).
    pub vsock: PathBuf,
    /// File that receives the console, bounded; absent: the console is dropped.
    #[serde(default)]
    pub console: Option<PathBuf>,
    /// Most bytes that the layer may take of the host's disk beyond its file; absent: its size. A guest that
    /// writes more gets I/O errors.
    #[serde(default)]
    pub layer_limit: Option<Bytes>,
}

/// Whether a clone's recorded private pages are copied before it runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkingSetPrefault {
    /// Copy the template's recorded pages at restore.
    #[default]
    On,
    /// Take each page's fault when the guest touches it.
    Off,
}

/// A clone of a template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RestoreSpec {
    /// The template's directory.
    pub template: PathBuf,
    /// For a diff: where its base is, in place of the directory that its manifest names. Usually a copy
    /// loaded for cloning. It must be the base of the same sum; a template that is whole does not look at it.
    #[serde(default)]
    pub base: Option<PathBuf>,
    /// As in [`VmSpec::vsock`].
    pub vsock: PathBuf,
    /// As in [`VmSpec::console`].
    #[serde(default)]
    pub console: Option<PathBuf>,
    /// As in [`VmSpec::layer_limit`].
    #[serde(default)]
    pub layer_limit: Option<Bytes>,
    /// See [`WorkingSetPrefault`].
    #[serde(default)]
    pub prefault: WorkingSetPrefault,
}

/// Why a spec is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// RAM out of range.
    #[error("guest memory {given} is outside {min} to {max}", min = MIN_MEMORY, max = MAX_MEMORY)]
    MemoryRange {
        /// What was asked for.
        given: Bytes,
    },
    /// RAM not a multiple of 2 MiB.
    #[error("guest memory {given} is not a multiple of 2MiB")]
    MemoryAlignment {
        /// What was asked for.
        given: Bytes,
    },
    /// More vCPUs than the platform has, or none.
    #[error("{given} vCPUs asked for, but platform {} runs {max} at most", platform.name())]
    Vcpus {
        /// What was asked for.
        given: u8,
        /// What the platform offers.
        max: u8,
        /// The platform.
        platform: Platform,
    },
}

impl VmSpec {
    /// Checks what can be checked without touching a file.
    ///
    /// # Errors
    /// The first rule that the spec breaks.
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
    fn ranges_are_enforced() {
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
            "2 vCPUs asked for, but platform ring3 runs 1 at most"
        );
    }
}
