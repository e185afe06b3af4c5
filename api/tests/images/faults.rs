//! Registries and images that fail, and builds that are cancelled.

use builds::{cancel::cancellation, log::BuildLog};
use oci_image::{digest::Digest, registry::Registries};

use crate::{
    archive::{Image, MANIFEST, file, gzip, image, pack},
    server::{Reply, Server, answer},
    world::{World, images, messages, registries, run, serve, state, until},
};

const LATEST: &str = "/v2/r/manifests/latest";

fn small() -> Image {
    image(&[pack(&[file("a", "1")])])
}

fn layer(image: &Image) -> String {
    format!("/v2/r/blobs/{}", Digest::of(&image.layers[0]))
}

fn manifest(text: &str) -> Reply {
    answer(200, &[("Content-Type", MANIFEST)], text.as_bytes())
}

/// The image, and a change of what its registry answers.
type Fault = (&'static str, fn(&Image, &Server), &'static str);

const FAULTS: [Fault; 9] = [
    (
        "no image",
        |_, server| server.set(LATEST, answer(404, &[], b"")),
        "not found: the image or tag does not exist",
    ),
    (
        "no access",
        |_, server| {
            let basic = [("WWW-Authenticate", "Basic realm=\"r\"")];
            server.set(LATEST, answer(401, &basic, b""));
        },
        "check that the image exists and that the registry's credentials are right",
    ),
    (
        "link-local address",
        |image, server| {
            let to = [("Location", "http://169.254.169.254/latest/meta-data")];
            server.set(&layer(image), answer(307, &to, b""));
        },
        "169.254.169.254 is in a forbidden range",
    ),
    (
        "other processor",
        |_, server| {
            let kind = [("Content-Type", "application/vnd.oci.image.index.v1+json")];
            let digest = Digest::of(b"");
            let index = format!(
                r#"{{"manifests":[{{"digest":"{digest}","size":1,"platform":{{"os":"linux","architecture":"arm64"}}}}]}}"#
            );
            server.set(LATEST, answer(200, &kind, index.as_bytes()));
        },
        "no variant for linux/amd64",
    ),
    (
        "too large",
        |image, server| {
            let text = String::from_utf8(image.manifest.clone()).unwrap();
            let size = format!("\"size\":{}", image.layers[0].len());
            server.set(
                LATEST,
                manifest(&text.replace(&size, "\"size\":99000000000")),
            );
        },
        "have 99000000000 bytes: the limit is",
    ),
    (
        "larger than announced",
        |image, server| {
            let head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
            let piece = [&b"10000\r\n"[..], &[0; 0x10000], b"\r\n0\r\n\r\n"].concat();
            server.set(&layer(image), Reply::Raw([head, piece].concat()));
        },
        "bytes in the registry, but",
    ),
    (
        "other bytes",
        |image, server| {
            let mut bytes = image.layers[0].clone();
            bytes[20] ^= 1;
            server.set(&layer(image), answer(200, &[], &bytes));
        },
        "has different content",
    ),
    (
        "not a layer",
        |image, server| {
            // With the right digest: the converter refuses it.
            let noise = gzip(b"not an archive");
            let text = String::from_utf8(image.manifest.clone()).unwrap();
            let (old, new) = (&image.layers[0], &noise);
            let text = text.replace(&Digest::of(old).to_string(), &Digest::of(new).to_string());
            let text = text.replace(
                &format!("\"size\":{}", old.len()),
                &format!("\"size\":{}", new.len()),
            );
            server.set(LATEST, manifest(&text));
            server.set(
                &format!("/v2/r/blobs/{}", Digest::of(new)),
                answer(200, &[], new),
            );
        },
        "cannot be converted",
    ),
    (
        "broken",
        |_, server| server.set(LATEST, Reply::Raw(Vec::new())),
        "closed the connection early",
    ),
];

pub(crate) fn kvm_a_registry_that_refuses_or_lies_ends_a_build_with_a_reason() {
    run(async {
        let state = state();
        let image = small();
        let mut servers = Vec::new();
        for (_, change, _) in FAULTS {
            let (server, address) = serve(&image).await;
            change(&image, &server);
            servers.push(address);
        }
        let addresses: Vec<_> = servers
            .iter()
            .map(|address| address.parse().unwrap())
            .collect();
        let world = World::open(state.path(), images(registries(&addresses))).await;
        for ((what, _, expected), address) in FAULTS.iter().zip(&servers) {
            let asked = world.ask(&format!("{address}/r")).await;
            let reason = asked.reason();
            assert!(reason.contains(expected), "{what}: {reason}");
            assert!(
                reason.contains(&format!("'{address}/r'")),
                "{what}: {reason}"
            );
            let [drafts, _, images] = world.stored();
            assert_eq!((drafts, images), (0, 0), "{what}");
        }
        // Private addresses are refused by name, by number and in a mapped form.
        for reference in [
            "localhost:1/r",
            "10.0.0.1/r",
            "[::ffff:169.254.169.254]:80/r",
        ] {
            let asked = world.ask(reference).await;
            let reason = asked.reason();
            assert!(reason.contains("forbidden range"), "{reference}: {reason}");
            assert!(
                reason.contains("images.exceptions"),
                "{reference}: {reason}"
            );
        }
        assert!(
            world
                .ask("NOT an image")
                .await
                .reason()
                .contains("'NOT an image' is not the name")
        );
        assert!(world.bases.templates().is_empty());
        world.close().await;
    });
}

/// Gigabytes of zeros in a small layer, which take long to convert.
fn long() -> Image {
    let zeros = vec![0; 8 << 20];
    let mut image = image(std::slice::from_ref(&zeros));
    let (old, new) = (image.layers[0].clone(), gzip(&zeros).repeat(1200));
    let text = String::from_utf8(image.manifest).unwrap();
    let text = text.replace(&Digest::of(&old).to_string(), &Digest::of(&new).to_string());
    let text = text.replace(
        &format!("\"size\":{}", old.len()),
        &format!("\"size\":{}", new.len()),
    );
    image.manifest = text.into_bytes();
    image.layers[0] = new;
    image
}

pub(crate) fn kvm_a_cancelled_build_ends_at_once_and_leaves_nothing() {
    run(async {
        let state = state();
        let (stalled, slow) = (small(), long());
        let (server, one) = serve(&stalled).await;
        let head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n";
        server.set(&layer(&stalled), Reply::Stall(head.to_vec()));
        let (_, other) = serve(&slow).await;
        let addresses = [&one, &other].map(|address| address.parse().unwrap());
        let world = World::open(state.path(), images(registries(&addresses))).await;
        // While a registry sends nothing, and while a layer is converted.
        for (address, until_then) in [(&one, "Creating file system"), (&other, "Uncompressing")] {
            let log = BuildLog::default();
            let (canceller, cancel) = cancellation();
            let asking = tokio::spawn({
                let (bases, log, reference) =
                    (world.bases.clone(), log.clone(), format!("{address}/r"));
                async move { bases.of_image(&reference, None, &log, &cancel).await }
            });
            until(until_then, || {
                messages(&log)
                    .iter()
                    .any(|line| line.starts_with(until_then))
            })
            .await;
            canceller.cancel();
            assert_eq!(asking.await.unwrap().unwrap_err(), "build was cancelled");
            // Completely received files, such as the config, may still be synced.
            until("no draft is left", || world.stored()[0] == 0).await;
            assert_eq!(world.stored()[2], 0, "{until_then}");
        }
        server.set(&layer(&stalled), answer(200, &[], &stalled.layers[0]));
        world.ask(&format!("{one}/r")).await.base();
        world.close().await;
    });
}

pub(crate) fn kvm_a_server_without_the_converter_names_it() {
    run(async {
        let state = state();
        let (_server, address) = serve(&small()).await;
        let spec = images(registries(&[address.parse().unwrap()]));
        let nowhere = state.path().join("nowhere");
        for (part, option) in [
            ("cube-image", "images.converter"),
            ("busybox", "images.userland"),
        ] {
            let mut spec = spec.clone();
            match part {
                "cube-image" => spec.converter = nowhere.clone(),
                _ => spec.userland = nowhere.clone(),
            }
            let world = World::open(state.path(), spec).await;
            let asked = world.ask(&format!("{address}/r")).await;
            let reason = asked.reason();
            for wanted in [part, option, "/nowhere", "cargo xtask prepare"] {
                assert!(reason.contains(wanted), "{reason}");
            }
            // Everything else works.
            world.ask("e2bdev/base").await.base();
            world.close().await;
        }
        let plain = World::open(state.path(), images(Registries::default())).await;
        plain.close().await;
    });
}
