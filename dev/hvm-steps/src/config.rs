//! Options of a run, from the command line or from the kernel command line of the emulated host.

use std::path::PathBuf;

#[derive(Debug)]
pub(crate) struct Config {
    /// The `cube-vmm` under test.
    pub(crate) vmm: PathBuf,
    /// The `cube-bench` that contains the confinement prover.
    pub(crate) bench: PathBuf,
    /// Directory with vmlinux, initramfs.cpio, base.erofs and layer.ext4.
    pub(crate) guest: PathBuf,
    /// An empty directory. Its path is short because the path of a Unix socket is limited to 107 bytes.
    pub(crate) work: PathBuf,
    /// Stop after the first step whose name contains this text.
    pub(crate) only: Option<String>,
    /// `Some`: run the confinement prover instead of the steps, with these cases and classes. Empty: all cases.
    pub(crate) cases: Option<Vec<String>>,
    /// On an emulated host: the directory of a disk that the second emulated host, with another CPU, reads.
    pub(crate) kept: Option<PathBuf>,
    /// On the second emulated host: CPU features, separated by commas, that the first one had and this one lacks.
    pub(crate) lacking: Option<String>,
}
