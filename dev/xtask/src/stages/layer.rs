//! The empty writable layer that a VM mounts over its root image: a sparse ext4 file system. A clone reads this file
//! and writes to a private file.
//!
//! The options keep the number of blocks, and so of pages, that a clone touches small: no journal (the layer does not
//! outlive its VM), all metadata at the front, inode tables marked as initialized so that no kernel thread of the guest
//! writes them in the background, no blocks reserved for root.

use std::{fs::File, process::Command};

use anyhow::Result;

use crate::{
    stages::stage::{Built, Recipe, Store},
    tool,
};

pub(crate) const FILE: &str = "layer.ext4";
const BYTES: u64 = 4 << 30;
const UUID: &str = "c0bec0be-0000-4000-8000-000000000002";
const OPTIONS: [&str; 12] = [
    "-O",
    "^has_journal,^resize_inode,^orphan_file,^metadata_csum_seed",
    "-b",
    "4096",
    "-i",
    "32768",
    "-m",
    "0",
    "-E",
    "lazy_itable_init=0,packed_meta_blocks=1,nodiscard",
    "-L",
    "layer",
];

pub(crate) fn build(store: &Store) -> Result<Built> {
    let recipe = Recipe::new("layer")
        .text("bytes", &BYTES.to_string())
        .text("options", &format!("{OPTIONS:?} {UUID}"));
    store.build(&recipe, "stages/layer", |out, log| {
        let file = out.join(FILE);
        File::create(&file)?.set_len(BYTES)?;
        let mut mkfs = Command::new("mkfs.ext4");
        // A fixed time and hash seed make the layer identical on every host.
        mkfs.env("E2FSPROGS_FAKE_TIME", "1704067200")
            .args(["-q", "-F", "-U", UUID])
            .args(OPTIONS)
            .args(["-E", &format!("hash_seed={UUID}")])
            .arg(&file);
        tool::run(&mut mkfs, log)
    })
}
