//! What the parts cost that every clone pays for: the snapshot codec, and serving a virtio queue.

use std::path::PathBuf;

use criterion::{Criterion, criterion_group, criterion_main};
use model::Platform;
use vmm::{devices, snapshot};

/// A driver program that the fuzz target starts from.
const BLOCK_DRIVER: &[u8] = include_bytes!("../../dev/fuzz/seeds/virtio/slot1");

fn benches(c: &mut Criterion) {
    codec(c);
    c.bench_function(
        "devices: made, driven through a queue, saved, restored",
        |b| {
            b.iter(|| devices::fuzz::drive(BLOCK_DRIVER));
        },
    );
}

/// The state file of the template that `cargo xtask prepare` makes.
fn codec(c: &mut Criterion) {
    let artifacts = std::env::var_os("CUBE_ARTIFACTS").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/cube")),
        PathBuf::from,
    );
    let path = artifacts.join("templates/base/state");
    let Ok(bytes) = std::fs::read(&path) else {
        println!(
            "skipped: no {} (make it: cargo xtask prepare)",
            path.display()
        );
        return;
    };
    let decode = || snapshot::decode(&path, &bytes, Platform::Ring3);
    let Ok(state) = decode() else {
        println!(
            "skipped: {} is of another layout (cargo xtask prepare)",
            path.display()
        );
        return;
    };
    c.bench_function("decode a state file, sum included", |b| b.iter(decode));
    c.bench_function("encode a state file, sum included", |b| {
        b.iter(|| snapshot::encode(&state, Platform::Ring3));
    });
}

criterion_group!(group, benches);
criterion_main!(group);
