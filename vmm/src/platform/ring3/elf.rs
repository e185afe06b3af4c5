//! The Xen notes of a kernel image (Xen public headers, `elfnote.h`).

use std::{fs::File, io, os::unix::fs::FileExt};

const ENTRY: u32 = 1;
const VIRT_BASE: u32 = 3;
const PT_NOTE: u32 = 4;
/// Limits on the number of program headers and on the length of a note segment. Further headers and bytes are ignored;
/// real kernels are far below the limits.
const MAX_HEADERS: u16 = 64;
const MAX_NOTES: u64 = 1 << 16;

/// The notes that the domain builder needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct XenNotes {
    /// Virtual address of the PV entry point.
    pub entry: u64,
    /// Virtual address of guest-physical address 0.
    pub virt_base: u64,
}

/// Reasons why this platform cannot start a file as a kernel.
#[derive(Debug, thiserror::Error)]
pub enum ElfError {
    /// The file cannot be read, or ends early.
    #[error("cannot read the kernel")]
    Read(#[source] io::Error),
    #[error("the kernel is not a 64-bit little-endian x86-64 ELF file (unpack a bzImage first)")]
    NotElf,
    #[error("the kernel has no Xen PV entry (CONFIG_XEN_PV)")]
    NoXenEntry,
}

fn read<const N: usize>(file: &File, at: u64) -> Result<[u8; N], ElfError> {
    let mut bytes = [0; N];
    file.read_exact_at(&mut bytes, at).map_err(ElfError::Read)?;
    Ok(bytes)
}

/// Reads the notes of a kernel.
///
/// # Errors
/// Returns [`ElfError`] if the file cannot be read, is not an x86-64 ELF file, or lacks the notes.
pub(crate) fn xen_notes(file: &File) -> Result<XenNotes, ElfError> {
    let header: [u8; 64] = read(file, 0)?;
    if header[..6] != *b"\x7fELF\x02\x01" || header[18..20] != [62, 0] {
        return Err(ElfError::NotElf);
    }
    let u64_at =
        |b: &[u8], i: usize| u64::from_le_bytes(b[i..i + 8].try_into().unwrap_or_default());
    let headers = u64_at(&header, 32);
    let count = u16::from_le_bytes([header[56], header[57]]).min(MAX_HEADERS);
    let mut found = (None, None);
    for i in 0..u64::from(count) {
        let program: [u8; 56] = read(file, headers.saturating_add(i * 56))?;
        if program[..4] == PT_NOTE.to_le_bytes() {
            let len = u64_at(&program, 32).min(MAX_NOTES);
            let mut notes = vec![0; usize::try_from(len).unwrap_or(0)];
            file.read_exact_at(&mut notes, u64_at(&program, 8))
                .map_err(ElfError::Read)?;
            scan(&notes, &mut found);
        }
    }
    match found {
        (Some(entry), Some(virt_base)) => Ok(XenNotes { entry, virt_base }),
        _ => Err(ElfError::NoXenEntry),
    }
}

/// Scans a note segment. Each note has name length, description length and type, then name and description, each padded
/// to 4 bytes.
fn scan(mut notes: &[u8], found: &mut (Option<u64>, Option<u64>)) {
    let u32_at =
        |b: &[u8], i: usize| u32::from_le_bytes(b[i..i + 4].try_into().unwrap_or_default());
    let padded = |n: u32| usize::try_from(n).unwrap_or(usize::MAX).saturating_add(3) & !3;
    while notes.len() >= 12 {
        let (name_len, desc_len, kind) = (u32_at(notes, 0), u32_at(notes, 4), u32_at(notes, 8));
        let name_end = 12_usize.saturating_add(padded(name_len));
        let end = name_end.saturating_add(padded(desc_len));
        let (Some(name), Some(desc)) = (notes.get(12..name_end), notes.get(name_end..end)) else {
            return;
        };
        if name.starts_with(b"Xen\0") && desc_len == 8 {
            let value = u64::from_le_bytes(desc[..8].try_into().unwrap_or_default());
            match kind {
                ENTRY => found.0 = Some(value),
                VIRT_BASE => found.1 = Some(value),
                _ => {}
            }
        }
        notes = &notes[end..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn scanning_random_notes_terminates(notes in proptest::collection::vec(any::<u8>(), 0..512)) {
            scan(&notes, &mut (None, None));
        }
    }

    #[test]
    fn xen_notes_are_found() {
        let mut notes = Vec::new();
        for (kind, value) in [(ENTRY, 0x1234_u64), (VIRT_BASE, 0xffff_ffff_8000_0000)] {
            notes.extend(4_u32.to_le_bytes());
            notes.extend(8_u32.to_le_bytes());
            notes.extend(kind.to_le_bytes());
            notes.extend(b"Xen\0");
            notes.extend(value.to_le_bytes());
        }
        let mut found = (None, None);
        scan(&notes, &mut found);
        assert_eq!(found, (Some(0x1234), Some(0xffff_ffff_8000_0000)));
    }
}
