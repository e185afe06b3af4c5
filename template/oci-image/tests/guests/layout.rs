//! Images made by `umoci`, as registries would deliver them.

use std::{fs, path::Path, process::Command};

use oci_image::{
    Converter, Layer, Limits, Pulled, Resources, Store, config::Config, digest::Digest,
    manifest::Document, store::Lease,
};

pub(crate) fn run(command: &mut Command) {
    let output = command.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {error}");
}

/// Packs a tree as an image with `umoci`, and converts it to a root image.
pub(crate) fn root_image_of(tree: &Path, dir: &Path, userland: &Path) -> Lease {
    let layout = dir.join("layout");
    let image = format!("{}:latest", layout.display());
    run(Command::new("umoci")
        .args(["init", "--layout"])
        .arg(&layout));
    run(Command::new("umoci").args(["new", "--image", &image]));
    run(Command::new("umoci")
        .args(["insert", "--image", &image])
        .arg(tree)
        .arg("/"));
    let store = Store::open(&dir.join("store"), 8 << 30).unwrap();
    let pulled = pulled(&layout, &store);
    let program = Path::new(env!("CARGO_BIN_EXE_cube-image"));
    let converter = Converter::new(program, Limits::default(), Resources::default());
    let converter = converter.with_userland(userland).unwrap();
    converter.convert(&pulled, &store).unwrap()
}

/// Puts the blobs of a layout into the store, as a pull does.
fn pulled(layout: &Path, store: &Store) -> Pulled {
    let read = |digest: &Digest| fs::read(layout.join("blobs/sha256").join(digest.hex())).unwrap();
    let index = fs::read_to_string(layout.join("index.json")).unwrap();
    let digest = index.split_once("sha256:").unwrap().1;
    let digest: Digest = format!("sha256:{}", &digest[..64]).parse().unwrap();
    let kind = "application/vnd.oci.image.manifest.v1+json";
    let Document::Manifest(manifest) = Document::parse(&read(&digest), kind).unwrap() else {
        panic!("an index");
    };
    let config = Config::parse(&read(&manifest.config.digest), manifest.layers.len()).unwrap();
    let layers = manifest.layers.iter().zip(&config.diff_ids);
    let layers = layers.map(|((layer, compression), diff_id)| Layer {
        blob: store.put(layer.digest, &read(&layer.digest)).unwrap(),
        compression: *compression,
        diff_id: *diff_id,
    });
    Pulled {
        digest,
        layers: layers.collect(),
        config,
    }
}
