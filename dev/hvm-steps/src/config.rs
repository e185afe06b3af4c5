//! Options of a run, from the command line or from the kernel command line of the emulated host.

use std::path::PathBuf;

#[derive(Debug)]
pub(crate) struct Config {
    /// The `cube-vmm` under test.
    pub(crate) vmm: PathBuf,
    /// The `cube-verify` that contains the confinement prover.
    pub(crate) verify: PathBuf,
    /// Directory with vmlinux, initramfs.cpio, base.erofs and layer.ext4.
    pub(crate) guest: PathBuf,
    /// An empty directory. Its path is short because the path of a Unix socket is limited to 107 bytes.
    pub(crate) work: PathBuf,
    /// Stop after the first step whose name contains this text.
    pub(crate) only: Option<String>,
    /// `Some`: run the confinement prover instead of the steps, with these cases and classes. Empty: all cases.
    pub(crate) cases: Option<Vec<String>>,
    /// Run only the steps for an additional machine.
    pub(crate) brief: bool,
    /// Steps to skip. A word of the step's name is enough.
    pub(crate) skip: Vec<String>,
    /// On an emulated host: the directory of a disk that the emulated hosts of later runs read.
    pub(crate) kept: Option<PathBuf>,
    /// Keep a template that can be restored, with this name, instead of one that can only be refused.
    pub(crate) keep: Option<String>,
    /// Templates that other emulated hosts have kept, as NAME:OUTCOME; see [`crate::steps`].
    pub(crate) templates: Vec<String>,
}
