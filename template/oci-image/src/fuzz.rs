//! Entry point of the fuzz target `image`: all data that a registry or the author of an image controls.

use crate::{
    config::Config,
    erofs::layout::Layout,
    limits::Limits,
    manifest::Document,
    reference::Reference,
    registry::{challenges, docker_config},
    tar::{self, Budget},
    tree::Tree,
};

/// Passes `bytes` to the parser that their first byte selects.
///
/// # Panics
/// Panics if a parsed value violates an assertion.
pub fn image(bytes: &[u8]) {
    let Some((choice, bytes)) = bytes.split_first() else {
        return;
    };
    let text = || String::from_utf8_lossy(bytes);
    match choice % 8 {
        0 | 1 => layers(bytes),
        2 => drop(Document::parse(
            bytes,
            "application/vnd.oci.image.manifest.v1+json",
        )),
        3 => drop(Document::parse(
            bytes,
            "application/vnd.oci.image.index.v1+json",
        )),
        4 => drop(Config::parse(bytes, 1)),
        5 => reference(&text()),
        6 => drop(challenges(&text())),
        _ => drop(docker_config(&text())),
    }
}

/// Applies an archive twice, as two layers, and lays out the image.
fn layers(archive: &[u8]) {
    let limits = Limits {
        entries: 1000,
        metadata: 1 << 20,
        steps: 100_000,
        apparent: 1 << 40,
        ..Limits::default()
    };
    let mut budget = Budget::new(&limits);
    let mut tree = Tree::new(&limits);
    for layer in 0..2 {
        let Ok(entries) = tar::read(&archive, layer, &mut budget) else {
            return;
        };
        if tree.apply(entries).is_err() {
            return;
        }
    }
    if let Ok(layout) = Layout::of(&tree, &limits) {
        layout.check();
    }
}

fn reference(text: &str) {
    if let Ok(reference) = text.parse::<Reference>() {
        assert_eq!(reference.to_string().parse(), Ok(reference));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fuzz_seeds_pass() {
        let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/../../dev/fuzz/seeds/image");
        let mut count = 0;
        for seed in std::fs::read_dir(seeds).unwrap() {
            image(&std::fs::read(seed.unwrap().path()).unwrap());
            count += 1;
        }
        assert!(count > 10, "{count}");
    }
}
