//! Decompression and its limits.

use std::{fs::File, io::Write};

use oci_image::{
    Limits, Source, Unpacked,
    digest::Digest,
    manifest::Compression,
    unpack::{UnpackError, Unpacker},
};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

use crate::archive::gzip;

fn unpack(
    limits: &Limits,
    blob: &[u8],
    compression: Compression,
    content: &[u8],
) -> Result<Unpacked, UnpackError> {
    let mut packed = tempfile::NamedTempFile::new().unwrap();
    packed.write_all(blob).unwrap();
    let out = tempfile::tempfile().unwrap();
    let blob = File::open(packed.path()).unwrap();
    Unpacker::new(limits).unpack(blob, compression, &Digest::of(content), out)
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    compress_to_vec(bytes, CompressionLevel::Fastest)
}

/// Bytes that do not repeat within a block.
fn noise(len: u32) -> Vec<u8> {
    (0..len)
        .flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes())
        .collect()
}

#[test]
fn layers_of_several_members_and_frames_are_unpacked_whole() {
    let (a, b) = (noise(100_000), noise(7));
    let whole = [&a[..], &b].concat();
    let skippable = [
        &0x184d_2a53_u32.to_le_bytes()[..],
        &3_u32.to_le_bytes(),
        b"abc",
    ]
    .concat();
    let blobs = [
        (whole.clone(), Compression::None),
        ([gzip(&a), gzip(&b)].concat(), Compression::Gzip),
        (
            [skippable.clone(), zstd(&a), skippable, zstd(&b)].concat(),
            Compression::Zstd,
        ),
    ];
    for (blob, compression) in blobs {
        let unpacked = unpack(&Limits::default(), &blob, compression, &whole).unwrap();
        let mut found = vec![0; whole.len()];
        unpacked.read_at(&mut found, 0).unwrap();
        assert_eq!(
            (unpacked.size(), found == whole),
            (whole.len() as u64, true)
        );
        let other = unpack(&Limits::default(), &blob, compression, b"other");
        assert!(matches!(other, Err(UnpackError::DiffId { .. })));
        if compression != Compression::None {
            let cut = unpack(
                &Limits::default(),
                &blob[..blob.len() - 3],
                compression,
                &whole,
            );
            assert!(
                matches!(cut, Err(UnpackError::Decompress(_))),
                "{compression:?}"
            );
        }
    }
}

#[test]
fn bombs_are_refused_and_zeros_take_no_space() {
    let zeros = vec![0; 64 << 20];
    let ones = vec![1; 4 << 20];
    let small = Limits {
        stored: 8 << 20,
        ratio: 100,
        ratio_free: 1 << 20,
        stream: 100 << 20,
        ..Limits::default()
    };
    for (blob, compression) in [
        (gzip(&zeros), Compression::Gzip),
        (zstd(&zeros), Compression::Zstd),
    ] {
        let unpacked = unpack(&small, &blob, compression, &zeros).unwrap();
        assert_eq!(unpacked.data(0..zeros.len() as u64).unwrap(), []);
        let short = Limits {
            stream: 63 << 20,
            ..small.clone()
        };
        let error = unpack(&short, &blob, compression, &zeros).unwrap_err();
        assert!(matches!(error, UnpackError::Stream(_)), "{error}");
        // A layer of zeros takes no space, but it takes time.
        let brief = Limits {
            zeros_free: 16 << 20,
            ..small.clone()
        };
        let error = unpack(&brief, &blob, compression, &zeros).unwrap_err();
        assert!(matches!(error, UnpackError::Ratio(100)), "{error}");
    }
    for (blob, compression) in [
        (gzip(&ones), Compression::Gzip),
        (zstd(&ones), Compression::Zstd),
    ] {
        let error = unpack(&small, &blob, compression, &ones).unwrap_err();
        assert!(matches!(error, UnpackError::Ratio(100)), "{error}");
    }
    let large = noise(3 << 20);
    let error = unpack(&small, &large, Compression::None, &large).unwrap_err();
    assert!(matches!(error, UnpackError::Stored(_)), "{error}");
}
