//! The files and options of a boot.

use std::fs::File;

use model::HypercallPath;

/// The files and options of a boot.
#[derive(Debug)]
pub struct BootFiles<'a> {
    /// An uncompressed ELF file.
    pub kernel: &'a mut File,
    pub initrd: &'a mut File,
    /// The complete kernel command line.
    pub cmdline: &'a str,
    /// How the kernel calls the monitor.
    pub hypercalls: HypercallPath,
}
