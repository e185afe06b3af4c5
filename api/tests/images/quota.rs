//! The disk space of images.

use std::{fs, os::unix::fs::MetadataExt, path::Path};

use model::Bytes;

use crate::{
    archive::{Image, file, image, pack},
    world::{World, images, registries, run, serve, state, until},
};

/// Text of 16 KiB, which differs for each `seed`.
pub(crate) fn noise(seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = (0..2048).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.collect()
}

/// An image of 8 MiB on disk, which differs for each `seed`. Its layer is small.
fn large(seed: u64) -> Image {
    image(&[pack(&[file("noise", noise(seed).repeat(512))])])
}

/// Disk space of all files below the store, and of those linked by the pool.
fn used(dir: &Path) -> [u64; 2] {
    let parts = ["drafts", "blobs", "images"].map(|name| dir.join(name));
    let files = parts.iter().flat_map(|part| fs::read_dir(part).unwrap());
    files.fold([0, 0], |[all, linked], file| {
        let found = file.unwrap().metadata().unwrap();
        let bytes = found.blocks() * 512;
        let is_linked = u64::from(found.nlink() > 1);
        [all + bytes, linked + bytes * is_linked]
    })
}

pub(crate) fn kvm_images_stay_within_their_quota() {
    run(async {
        let state = state();
        let store = state.path().join("builds/images");
        let mut servers = Vec::new();
        for seed in 1..=10 {
            servers.push(serve(&large(seed)).await.1);
        }
        // It is refused before its first byte is requested.
        let mut refused = large(11);
        let size = |bytes: usize| format!("\"size\":{bytes}");
        let text = String::from_utf8(refused.manifest).unwrap();
        let text = text.replace(&size(refused.layers[0].len()), &size(190 << 20));
        refused.manifest = text.into_bytes();
        servers.push(serve(&refused).await.1);
        let addresses: Vec<_> = servers.iter().map(|a| a.parse().unwrap()).collect();
        let mut spec = images(registries(&addresses));
        // A conversion reserves 64 MiB in advance.
        spec.quota = Bytes::mib(200);
        let world = World::open(state.path(), spec.clone()).await;
        for address in &servers[..10] {
            world.ask(&format!("{address}/r")).await.base();
            assert!(used(&store)[0] <= spec.quota.0);
            until("the pool has removed what is too much", || {
                used(&store)[1] <= spec.quota.0 / 2
            })
            .await;
        }
        let kept = world.bases.templates().len();
        assert!((2..10).contains(&kept), "{kept}");
        let asked = world.ask(&format!("{}/r", servers[10])).await;
        assert!(
            asked.reason().contains("images.quota"),
            "{}",
            asked.reason()
        );
        // The most recent ones are still there.
        let last = world.ask(&format!("{}/r", servers[9])).await;
        assert_eq!(last.count("CACHED [base]"), 1, "{:?}", last.log);
        let first = world.ask(&format!("{}/r", servers[0])).await;
        assert_eq!(first.count("CACHED [base]"), 0, "{:?}", first.log);
        world.close().await;
    });
}
