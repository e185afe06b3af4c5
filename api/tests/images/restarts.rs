//! A server that is killed while it receives an image.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

use crate::{
    archive::{file, image, pack},
    server::{Reply, answer},
    world::{World, images, registries, run, serve, state, until},
};
use oci_image::digest::Digest;

/// Makes this program a server that will be killed; the value is its state directory.
pub(crate) const KILLED: &str = "CUBE_TEST_IMAGES";
/// Set together with [`KILLED`]: the address of the registry.
const REGISTRY: &str = "CUBE_TEST_IMAGES_REGISTRY";

/// Requests an image from a registry that never sends all of it.
pub(crate) fn be_killed(state: &Path) {
    run(async {
        let address = std::env::var(REGISTRY).unwrap();
        let spec = images(registries(&[address.parse().unwrap()]));
        let world = World::open(state, spec).await;
        let asked = world.ask(&format!("{address}/r")).await;
        panic!("not killed: {:?}", asked.base);
    });
}

pub(crate) fn kvm_a_killed_server_leaves_nothing_of_an_image() {
    run(async {
        let state = state();
        let image = image(&[pack(&[file("a", "1")])]);
        let (server, address) = serve(&image).await;
        let layer = format!("/v2/r/blobs/{}", Digest::of(&image.layers[0]));
        let head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n";
        server.set(&layer, Reply::Stall(head.to_vec()));
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(KILLED, state.path())
            .env(REGISTRY, &address)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let store = state.path().join("builds/images");
        let lengths = |part: &str| {
            let files = fs::read_dir(store.join(part))
                .into_iter()
                .flatten()
                .flatten();
            let lengths = files.filter_map(|file| Some(file.metadata().ok()?.len()));
            lengths.collect::<Vec<_>>()
        };
        until("the config has arrived, and a part of the layer", || {
            lengths("blobs").len() == 1 && lengths("drafts").iter().any(|len| *len > 0)
        })
        .await;
        child.kill().unwrap();
        child.wait().unwrap();

        server.set(&layer, answer(200, &[], &image.layers[0]));
        let spec = images(registries(&[address.parse().unwrap()]));
        let world = World::open(state.path(), spec).await;
        until("the draft is removed", || world.stored() == [0, 1, 0]).await;
        let asked = world.ask(&format!("{address}/r")).await;
        assert_eq!(world.sh(&asked.base().template, "cat /a").await, "1");
        world.close().await;
    });
}
