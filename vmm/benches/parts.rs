//! Costs that every clone pays: the snapshot codec, and serving a virtio queue.

use std::path::PathBuf;

use criterion::{Criterion, criterion_group, criterion_main};
use model::Platform;
use vmm::{devices, snapshot};

/// A driver program from the seeds of the fuzz target.
const BLOCK_DRIVER: &[u8] = include_bytes!("../../dev/fuzz/seeds/virtio/slot1");

fn benches(c: &mut Criterion) {
    codec(c);
    c.bench_function("devices: create, serve one queue, save, restore", |b| {
        b.iter(|| devices::fuzz::drive(BLOCK_DRIVER));
    });
}

/// Uses the state file of the template that `cargo xtask prepare` makes.
fn codec(c: &mut Criterion) {
    let artifacts = std::env::var_os("CUBE_ARTIFACTS").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/cube")),
        PathBuf::from,
    );
    let path = artifacts.join("templates/base/state");
    let Ok(bytes) = std::fs::read(&path) else {
        println!(
            "skipped: {} does not exist (run: cargo xtask prepare)",
            path.display()
        );
        return;
    };
    let decode = || snapshot::decode(&path, &bytes, Platform::Ring3);
    let Ok(state) = decode() else {
        println!(
            "skipped: {} has another layout (run: cargo xtask prepare)",
            path.display()
        );
        return;
    };
    c.bench_function("decode a state file, including its hash", |b| {
        b.iter(decode)
    });
    c.bench_function("encode a state file, including its hash", |b| {
        b.iter(|| snapshot::encode(&state, Platform::Ring3));
    });
}

criterion_group!(group, benches);
criterion_main!(group);
