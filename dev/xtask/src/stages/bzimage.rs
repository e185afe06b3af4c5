//! Extracts the ELF kernel from a bzImage.
//!
//! The payload is located by the setup header ("The Linux/x86 Boot Protocol", fields `setup_sects`, `version`,
//! `payload_offset`, `payload_length`), not by a search for magic bytes, which occur by chance in a file of this size.
//! The last four bytes of the payload are the length of the uncompressed kernel. In a gzip stream, they are the
//! stream's own last field; to every other compressed stream, the kernel's build appends them.

use std::process::Command;

use anyhow::{Context, Result};

use crate::tool;

/// The reason why a file is not a bzImage that can be unpacked.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum BzImageError {
    #[error("not a bzImage: no \"HdrS\" at offset 0x202")]
    NoHeader,
    #[error("boot protocol {0:#06x} has no payload fields: 0x0208 or newer is required")]
    Protocol(u16),
    #[error("the payload ({length} bytes at offset {offset}) is outside the file ({file} bytes)")]
    Outside {
        offset: u64,
        length: u64,
        file: usize,
    },
    #[error("unknown compression: the payload begins with {0:02x?}")]
    Compression([u8; 6]),
    #[error("the uncompressed length is {0} bytes: the limit is {MAX_KERNEL}")]
    TooLong(usize),
    #[error("unpacked to {got} bytes, but the image states {want}")]
    Length { got: usize, want: usize },
    #[error("the payload is not an ELF file")]
    NotElf,
}

/// Limit for the uncompressed kernel. No distribution kernel is this large.
const MAX_KERNEL: usize = 512 << 20;
const ELF: &[u8] = b"\x7fELF";

/// Compression of a payload, recognized by its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compression {
    None,
    Gzip,
    Xz,
    Lzma,
    Zstd,
    Lz4,
    Bzip2,
    Lzo,
}

/// Magic bytes, in the order of `lib/decompress.c` of the kernel.
const MAGICS: [(&[u8], Compression); 8] = [
    (ELF, Compression::None),
    (&[0x1f, 0x8b], Compression::Gzip),
    (&[0xfd, b'7', b'z', b'X', b'Z', 0], Compression::Xz),
    (&[0x5d, 0, 0], Compression::Lzma),
    (&[0x28, 0xb5, 0x2f, 0xfd], Compression::Zstd),
    (&[0x02, 0x21, 0x4c, 0x18], Compression::Lz4),
    (b"BZh", Compression::Bzip2),
    (&[0x89, b'L', b'Z', b'O'], Compression::Lzo),
];

impl Compression {
    fn of(payload: &[u8]) -> Result<Self, BzImageError> {
        let found = MAGICS.iter().find(|(magic, _)| payload.starts_with(magic));
        found.map(|(_, kind)| *kind).ok_or_else(|| {
            let mut first = [0; 6];
            let n = payload.len().min(6);
            first[..n].copy_from_slice(&payload[..n]);
            BzImageError::Compression(first)
        })
    }

    /// The program that decompresses standard input to standard output. `None` if the payload is not compressed.
    fn program(self) -> Option<(&'static str, &'static [&'static str])> {
        Some(match self {
            Self::None => return None,
            Self::Gzip => ("gzip", &["-dc"]),
            Self::Xz => ("xz", &["-dc"]),
            Self::Lzma => ("xz", &["-dc", "--format=lzma"]),
            Self::Zstd => ("zstd", &["-dcq"]),
            Self::Lz4 => ("lz4", &["-dcq"]),
            Self::Bzip2 => ("bzip2", &["-dc"]),
            Self::Lzo => ("lzop", &["-dc"]),
        })
    }
}

/// Returns the uncompressed ELF kernel.
pub(crate) fn extract(image: &[u8]) -> Result<Vec<u8>> {
    let payload = payload(image)?;
    let compression = Compression::of(payload)?;
    let Some((program, arguments)) = compression.program() else {
        return Ok(payload.to_vec());
    };
    let (stream, want) = split(payload, compression)?;
    let kernel = tool::filter(Command::new(program).args(arguments), stream)
        .with_context(|| format!("cannot decompress the kernel ({compression:?})"))?;
    check(&kernel, want)?;
    Ok(kernel)
}

/// Decompresses a kernel module file, which distributions may compress as a whole. Returns an uncompressed ELF file
/// unchanged, and fails for any other content.
pub(crate) fn unpack_file(data: Vec<u8>) -> Result<Vec<u8>> {
    match Compression::of(&data)?.program() {
        None => Ok(data),
        Some((program, arguments)) => tool::filter(Command::new(program).args(arguments), &data),
    }
}

/// The payload of the image: the kernel, usually compressed. At least eight bytes.
fn payload(image: &[u8]) -> Result<&[u8], BzImageError> {
    if bytes::<4>(image, 0x202) != Some(*b"HdrS") {
        return Err(BzImageError::NoHeader);
    }
    let number = |at| bytes(image, at).map_or(0, u32::from_le_bytes);
    let protocol = bytes(image, 0x206).map_or(0, u16::from_le_bytes);
    if protocol < 0x0208 {
        return Err(BzImageError::Protocol(protocol));
    }
    // The boot protocol defines that zero means four.
    let setup_sectors = match image[0x1f1] {
        0 => 4,
        n => u64::from(n),
    };
    let offset = (setup_sectors + 1) * 512 + u64::from(number(0x248));
    let length = u64::from(number(0x24c));
    let outside = BzImageError::Outside {
        offset,
        length,
        file: image.len(),
    };
    let (Ok(from), Ok(to)) = (usize::try_from(offset), usize::try_from(offset + length)) else {
        return Err(outside);
    };
    image.get(from..to).filter(|p| p.len() >= 8).ok_or(outside)
}

/// Splits a payload into the compressed stream and the length of the uncompressed kernel, which must not exceed
/// [`MAX_KERNEL`].
fn split(payload: &[u8], kind: Compression) -> Result<(&[u8], usize), BzImageError> {
    let (stream, word) = payload.split_at(payload.len() - 4);
    let word = bytes(word, 0).map_or(0, u32::from_le_bytes);
    let want = usize::try_from(word).unwrap_or(usize::MAX);
    if want > MAX_KERNEL {
        return Err(BzImageError::TooLong(want));
    }
    // In gzip, the length is part of the stream and must stay in it.
    let stream = if kind == Compression::Gzip {
        payload
    } else {
        stream
    };
    Ok((stream, want))
}

fn check(kernel: &[u8], want: usize) -> Result<(), BzImageError> {
    if kernel.len() != want {
        let got = kernel.len();
        return Err(BzImageError::Length { got, want });
    }
    if !kernel.starts_with(ELF) {
        return Err(BzImageError::NotElf);
    }
    Ok(())
}

fn bytes<const N: usize>(data: &[u8], at: usize) -> Option<[u8; N]> {
    data.get(at..)?.first_chunk().copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An image with one setup sector and the given payload.
    fn image(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 1024 + 16];
        image[0x1f1] = 1;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x206..0x208].copy_from_slice(&0x020f_u16.to_le_bytes());
        image[0x248..0x24c].copy_from_slice(&16_u32.to_le_bytes());
        let length = u32::try_from(payload.len()).unwrap();
        image[0x24c..0x250].copy_from_slice(&length.to_le_bytes());
        image.extend_from_slice(payload);
        image.extend_from_slice(b"trailing signature");
        image
    }

    fn kernel() -> Vec<u8> {
        let mut kernel = ELF.to_vec();
        kernel.extend((0_u32..20_000).flat_map(|n| (n / 7).to_le_bytes()));
        kernel
    }

    fn packed(program: &str, arguments: &[&str]) -> Vec<u8> {
        let kernel = kernel();
        let mut packed = tool::filter(Command::new(program).args(arguments), &kernel).unwrap();
        if program != "gzip" {
            packed.extend(u32::try_from(kernel.len()).unwrap().to_le_bytes());
        }
        packed
    }

    fn refusal(image: &[u8]) -> BzImageError {
        extract(image).unwrap_err().downcast().unwrap()
    }

    #[test]
    fn gzip_xz_and_uncompressed_kernels_are_extracted() {
        let gzip = packed("gzip", &["-c"]);
        let xz = packed("xz", &["-c", "--check=crc32"]);
        for payload in [gzip, xz, kernel()] {
            assert_eq!(extract(&image(&payload)).unwrap(), kernel());
        }
    }

    #[test]
    fn every_compression_is_recognized_by_its_magic() {
        for (magic, kind) in MAGICS {
            assert_eq!(Compression::of(magic), Ok(kind));
        }
        assert_eq!(
            Compression::of(b"zz"),
            Err(BzImageError::Compression([b'z', b'z', 0, 0, 0, 0]))
        );
    }

    #[test]
    fn hostile_headers_are_refused() {
        assert_eq!(refusal(b""), BzImageError::NoHeader);
        assert_eq!(refusal(&vec![0; 4096]), BzImageError::NoHeader);
        let good = image(&kernel());
        let with = |at: usize, bytes: &[u8]| {
            let mut bad = good.clone();
            bad[at..at + bytes.len()].copy_from_slice(bytes);
            refusal(&bad)
        };
        assert_eq!(with(0x206, &[7, 2]), BzImageError::Protocol(0x0207));
        for at in [0x248, 0x24c] {
            let outside = with(at, &[0xff; 4]);
            assert!(matches!(outside, BzImageError::Outside { .. }));
        }
        let outside = with(0x24c, &[0; 4]);
        assert!(matches!(outside, BzImageError::Outside { .. }));
        let unknown = with(1024 + 16, b"zz");
        assert!(matches!(unknown, BzImageError::Compression(_)));
    }

    #[test]
    fn a_truncated_image_is_refused() {
        let good = image(&kernel());
        for length in [0x201, 0x207, 0x24e, 1024, good.len() - 100] {
            assert!(extract(&good[..length]).is_err(), "{length} bytes");
        }
    }

    #[test]
    fn a_wrong_length_word_is_refused() {
        let mut payload = packed("xz", &["-c", "--check=crc32"]);
        let at = payload.len() - 4;
        payload[at] ^= 1;
        assert!(matches!(
            refusal(&image(&payload)),
            BzImageError::Length { .. }
        ));
        payload[at..].copy_from_slice(&[0xff; 4]);
        assert!(matches!(
            refusal(&image(&payload)),
            BzImageError::TooLong(_)
        ));
    }

    proptest! {
        #[test]
        fn any_header_gives_a_payload_inside_the_image_or_an_error(
            fields in proptest::collection::vec(any::<u8>(), 0x60),
            length in 0x250_usize..2048,
        ) {
            let mut image = vec![0; length];
            image[0x1f1..0x251.min(length)].copy_from_slice(&fields[..0x251.min(length) - 0x1f1]);
            image[0x202..0x206].copy_from_slice(b"HdrS");
            if let Ok(payload) = payload(&image) {
                prop_assert!(payload.len() >= 8 && payload.len() < image.len());
            }
        }
    }
}
