//! Writes the progress of a pull to the build log, in E2B's form.

use std::sync::atomic::{AtomicBool, Ordering};

use model::Bytes;
use oci_image::{
    Converter,
    digest::Digest,
    registry::{Follow, Need, Origin},
};
use rest::LogLevel;

use super::{Asker, index::Index};
use crate::{key::Key, plan::At};

/// Follows a build's pull.
pub(super) struct Follower<'a> {
    asker: Asker<'a>,
    converter: &'a Converter,
    guest: &'a str,
    index: &'a Index,
    /// Whether the index contains the image's template.
    pub(super) has_found: AtomicBool,
}

impl<'a> Follower<'a> {
    pub(super) fn new(
        asker: Asker<'a>,
        converter: &'a Converter,
        guest: &'a str,
        index: &'a Index,
    ) -> Self {
        Self {
            asker,
            converter,
            guest,
            index,
            has_found: AtomicBool::new(false),
        }
    }
}

impl Follow for Follower<'_> {
    fn found(&self, digest: &Digest, layers: usize, bytes: u64) -> Need {
        let key = key(self.converter, self.guest, digest);
        let is_known = self.index.has(&key);
        self.has_found.store(is_known, Ordering::Relaxed);
        announce(self.asker, &key, is_known);
        if is_known {
            return Need::Config;
        }
        let size = Bytes(bytes).rounded();
        note(
            self.asker,
            &format!("Base Docker image size: {size} in {layers} layers"),
        );
        note(self.asker, "Creating file system and pulling Docker image");
        Need::Layers
    }

    fn layer(&self, digest: &Digest, bytes: u64, origin: Origin) {
        let prefix = match origin {
            Origin::Store => "CACHED layer",
            Origin::Registry => "Pulled layer",
        };
        note(
            self.asker,
            &format!("{prefix} {digest} {}", Bytes(bytes).rounded()),
        );
    }
}

/// The content key of an image. Depends on its manifest, the converter, and the guest that boots it.
pub(super) fn key(converter: &Converter, guest: &str, manifest: &Digest) -> String {
    let image = converter.key(manifest).to_string();
    Key::of(&["image", &image, guest]).to_string()
}

/// Writes the first log entry of a build.
pub(super) fn announce(asker: Asker<'_>, key: &str, is_cached: bool) {
    let cached = if is_cached { "CACHED " } else { "" };
    note(
        asker,
        &format!("{cached}[base] FROM {} [{key}]", asker.reference),
    );
}

pub(super) fn note(asker: Asker<'_>, text: &str) {
    asker.log.push(LogLevel::Info, At::Base, text);
}
