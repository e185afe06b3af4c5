//! The files and options of a boot.

use std::fs::File;

use model::HypercallPath;

/// What booting needs beside memory.
#[derive(Debug)]
pub struct BootFiles<'a> {
    /// The kernel, an uncompressed ELF file.
    pub kernel: &'a mut File,
    /// The initramfs.
    pub initrd: &'a mut File,
    /// The whole command line.
    pub cmdline: &'a str,
    /// How the kernel is to reach the monitor.
    pub hypercalls: HypercallPath,
}
