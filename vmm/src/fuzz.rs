//! Entry points of the fuzz targets, beside [`crate::devices::fuzz`]: parsers of bytes that others wrote.

use std::{fs::File, io::Write, path::Path};

use model::Platform;
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::{devices, platform::ring3, snapshot};

/// Format of state files.
pub const FORMAT: u32 = model::TEMPLATE_FORMAT;

/// A state file. What decodes is restored, as far as no KVM is needed.
pub fn state(bytes: &[u8]) {
    for host in [Platform::Ring3, Platform::Hvm] {
        if let Ok(state) = snapshot::decode(Path::new("state"), bytes, host) {
            devices::fuzz::restore(&state.bus);
        }
    }
}

/// A kernel image.
///
/// # Panics
/// The host has no descriptors or memory left.
pub fn xen_notes(bytes: &[u8]) {
    let fd = memfd_create(c"kernel", MFdFlags::MFD_CLOEXEC).expect("memfd");
    let mut file = File::from(fd);
    file.write_all(bytes).expect("room for a small file");
    let _refused = ring3::elf::xen_notes(&file);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_bytes_break_the_parsers(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            super::state(&bytes);
            super::xen_notes(&[b"\x7fELF\x02\x01\x01".as_slice(), &bytes].concat());
        }
    }
}
