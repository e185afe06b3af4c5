//! Descriptors and their roles.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use model::{MANIFEST_NAME, template_file};
use serde::{Deserialize, Serialize};

use crate::frame::FrameError;

/// A file in a template's directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TemplateFile {
    /// [`MANIFEST_NAME`].
    Manifest,
    /// [`template_file::STATE`].
    State,
    /// [`template_file::MEMORY`].
    Memory,
    /// [`template_file::LAYER`].
    Layer,
    /// [`template_file::EXTENTS`].
    Extents,
    /// [`template_file::WORKING_SET`].
    WorkingSet,
}

impl TemplateFile {
    /// Every file, in the order of their roles.
    pub const ALL: [Self; 6] = [
        Self::Manifest,
        Self::State,
        Self::Memory,
        Self::Layer,
        Self::Extents,
        Self::WorkingSet,
    ];

    /// File name in the template's directory.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Manifest => MANIFEST_NAME,
            Self::State => template_file::STATE,
            Self::Memory => template_file::MEMORY,
            Self::Layer => template_file::LAYER,
            Self::Extents => template_file::EXTENTS,
            Self::WorkingSet => template_file::WORKING_SET,
        }
    }
}

/// The purpose of a descriptor that accompanies a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileRole {
    /// `/dev/kvm`.
    Kvm,
    /// The TAP of the VM's network device.
    Tap,
    /// The listening unix socket at which host processes connect to guest ports.
    Vsock,
    /// A file that receives the console output.
    Console,
    /// The kernel of a boot.
    Kernel,
    /// The initramfs of a boot.
    Initrd,
    /// The root image, opened for reading.
    Root,
    /// The layer of a boot, opened for reading.
    Layer,
    /// An unlinked file that receives the guest's disk writes.
    Scratch,
    /// A file of the template: opened for reading in a restore, for writing in a snapshot.
    Template(TemplateFile),
    /// A file of the base of a diff, opened for reading.
    Base(TemplateFile),
}

/// Descriptors by role.
#[derive(Debug, Default)]
pub struct Files(BTreeMap<FileRole, OwnedFd>);

impl Files {
    /// Combines the descriptors of a frame with the roles that its body names.
    ///
    /// # Errors
    /// Returns [`FrameError::Files`] if the numbers differ or a role is named twice.
    pub fn received(roles: &[FileRole], fds: Vec<OwnedFd>) -> Result<Self, FrameError> {
        let (named, came) = (roles.len(), fds.len());
        let files: BTreeMap<_, _> = roles.iter().copied().zip(fds).collect();
        if named == came && files.len() == named {
            Ok(Self(files))
        } else {
            Err(FrameError::Files { named, came })
        }
    }

    pub fn insert(&mut self, role: FileRole, file: impl Into<OwnedFd>) {
        self.0.insert(role, file.into());
    }

    /// Removes and returns a descriptor.
    #[must_use]
    pub fn take(&mut self, role: FileRole) -> Option<OwnedFd> {
        self.0.remove(&role)
    }

    pub(crate) fn roles(&self) -> Vec<FileRole> {
        self.0.keys().copied().collect()
    }

    pub(crate) fn borrowed(&self) -> Vec<BorrowedFd<'_>> {
        self.0.values().map(AsFd::as_fd).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_descriptor_has_one_role() {
        let fds = |n: usize| -> Vec<OwnedFd> {
            let file = || tempfile::tempfile().unwrap().into();
            (0..n).map(|_| file()).collect()
        };
        let roles = [FileRole::Kvm, FileRole::Root];
        assert!(Files::received(&roles, fds(2)).is_ok());
        assert!(Files::received(&roles, fds(1)).is_err());
        assert!(Files::received(&roles, fds(3)).is_err());
        assert!(Files::received(&[FileRole::Kvm, FileRole::Kvm], fds(2)).is_err());
    }
}
