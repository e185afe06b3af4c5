//! The confined process: a failure ends only one conversion.

use std::{
    fs,
    path::Path,
    sync::atomic::{AtomicU32, Ordering},
};

use oci_image::{ConvertError, Converter, Limits, Resources, Store, store::StoreError};

use crate::{
    archive::{Image, file, gzip, header, image as of_archives, pack},
    mounted::{converter, pulled},
};

fn with(resources: Resources) -> Converter {
    let program = Path::new(env!("CARGO_BIN_EXE_cube-image"));
    Converter::new(program, Limits::default(), resources)
}

/// Converts in a new store, expects an error, and checks that no files are left and that the next image is converted.
fn failure(converter: &Converter, image: &Image, quota: u64) -> ConvertError {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), quota).unwrap();
    let error = converter
        .convert(&pulled(image, &store), &store)
        .unwrap_err();
    for name in ["drafts", "images"] {
        assert_eq!(
            fs::read_dir(dir.path().join(name)).unwrap().count(),
            0,
            "{error}"
        );
    }
    let other = of_archives(&[pack(&[file("a", "")])]);
    let store = Store::open(&dir.path().join("other"), 1 << 30).unwrap();
    self::converter()
        .convert(&pulled(&other, &store), &store)
        .unwrap();
    error
}

/// Gigabytes of zeros in a small layer, which are slow to decompress.
fn long() -> Image {
    let mut image = of_archives(&[pack(&[file("a", "")])]);
    image.layers[0] = gzip(&vec![0; 8 << 20]).repeat(1200);
    image
}

#[test]
fn a_conversion_that_takes_too_long_is_ended() {
    let deadline = Resources {
        deadline_seconds: 0,
        ..Resources::default()
    };
    let error = failure(&with(deadline), &long(), 1 << 30);
    assert!(matches!(error, ConvertError::Deadline(0)), "{error}");
    let cpu = Resources {
        cpu_seconds: 1,
        ..Resources::default()
    };
    let error = failure(&with(cpu), &long(), 1 << 30);
    assert!(matches!(error, ConvertError::Cpu(1)), "{error}");
}

#[test]
fn a_conversion_that_is_cancelled_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), 1 << 30).unwrap();
    let pulled = pulled(&long(), &store);
    let asked = AtomicU32::new(0);
    // Cancels only at the fourth check, when the worker has begun.
    let is_cancelled = || asked.fetch_add(1, Ordering::Relaxed) == 3;
    let error = converter()
        .convert_unless(&pulled, &store, &is_cancelled)
        .unwrap_err();
    assert!(matches!(error, ConvertError::Cancelled), "{error}");
    for name in ["drafts", "images"] {
        assert_eq!(fs::read_dir(dir.path().join(name)).unwrap().count(), 0);
    }
}

#[test]
fn a_conversion_that_takes_too_much_memory_is_ended() {
    let mut archive = Vec::new();
    for i in 0..200_000_u32 {
        archive.extend(header(&file(i.to_string(), ""), 0));
    }
    let small = Resources {
        memory: 24 << 20,
        ..Resources::default()
    };
    let error = failure(&with(small), &of_archives(&[archive]), 1 << 30);
    assert!(matches!(error, ConvertError::Memory(_)), "{error}");
}

#[test]
fn a_conversion_that_writes_more_than_the_quota_is_ended() {
    let noise: Vec<u8> = (0..2_000_000_u32).flat_map(u32::to_le_bytes).collect();
    let image = of_archives(&[pack(&[file("a", noise)])]);
    // Room for the blob and for the bytes that a worker may write between measurements, but not for the image.
    let quota = image.layers[0].len() as u64 + (68 << 20);
    let error = failure(&converter(), &image, quota);
    let full = matches!(error, ConvertError::Store(StoreError::Full { .. }));
    assert!(full, "{error}");
}

#[test]
fn a_converter_that_fails_or_is_missing_ends_one_conversion() {
    let image = of_archives(&[pack(&[file("a", "")])]);
    for (program, expected) in [("/bin/false", "unexpectedly"), ("/missing", "cannot start")] {
        let other = Converter::new(Path::new(program), Limits::default(), Resources::default());
        let error = failure(&other, &image, 1 << 30).to_string();
        assert!(error.contains(expected), "{error}");
    }
}
