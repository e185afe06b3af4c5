//! Entry points of the fuzz targets for parsers of untrusted bytes. The entry points for the devices are in
//! [`crate::devices::fuzz`].

use std::{fs::File, io::Write, path::Path};

use model::Platform;
use nix::sys::memfd::{MFdFlags, memfd_create};

use sha2::{Digest, Sha256};

use crate::{
    devices,
    extents::{self, Found},
    platform::ring3,
    snapshot,
};

/// Format version of state files.
pub const FORMAT: u32 = model::TEMPLATE_FORMAT;

/// Decodes a state file. If this succeeds, restores the devices from it, as far as this needs no KVM.
pub fn state(bytes: &[u8]) {
    for host in [Platform::Ring3, Platform::Hvm] {
        if let Ok(state) = snapshot::decode(Path::new("state"), bytes, host) {
            devices::fuzz::restore(&state.bus);
        }
    }
}

/// Decodes a list of extents, first as it is and then with a valid header before it. Accepted extents must lie in
/// range, and [`extents::Extents::find`] must find them.
///
/// # Panics
/// If an accepted list breaks these rules.
pub fn extents(bytes: &[u8]) {
    const LENGTHS: (u64, u64) = (64 << 20, 1 << 30);
    let _refused = extents::decode(bytes, FORMAT, LENGTHS);
    let Some((split, pairs)) = bytes.split_first() else {
        return;
    };
    let all = pairs.len() / 16;
    let of_memory = usize::from(*split).min(all);
    let pairs = &pairs[..all * 16];
    let mut file = b"CUBEDIFF".to_vec();
    file.extend(FORMAT.to_le_bytes());
    file.extend([0; 4]);
    file.extend((of_memory as u64).to_le_bytes());
    file.extend(((all - of_memory) as u64).to_le_bytes());
    file.extend(Sha256::digest(pairs));
    file.extend(pairs);
    let Ok((memory, layer)) = extents::decode(&file, FORMAT, LENGTHS) else {
        return;
    };
    for (extents, limit) in [(memory, LENGTHS.0), (layer, LENGTHS.1)] {
        for e in extents.iter() {
            assert!(e.at + e.bytes <= limit && e.stored + e.bytes <= extents.bytes());
            let found = extents.find(e.at + e.bytes - 1);
            assert!(matches!(found, Found::Here { end, .. } if end == e.at + e.bytes));
        }
    }
}

/// Parses the notes of a kernel image.
///
/// # Panics
/// If the host has no free descriptor or memory.
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
        fn random_bytes_do_not_break_the_parsers(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            super::state(&bytes);
            super::extents(&bytes);
            super::xen_notes(&[b"\x7fELF\x02\x01\x01".as_slice(), &bytes].concat());
        }
    }
}
