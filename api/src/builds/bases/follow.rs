//! The log of a pull, in the form of E2B's builds.

use std::sync::atomic::{AtomicBool, Ordering};

use api_types::rest::LogLevel;
use oci_image::{
    Converter,
    digest::Digest,
    registry::{Follow, Need, Origin},
};

use super::{Asker, index::Index};
use crate::builds::{key::Key, plan::At};

/// Follows the pull of a build.
pub(super) struct Follower<'a> {
    asker: Asker<'a>,
    converter: &'a Converter,
    guest: &'a str,
    index: &'a Index,
    /// Whether the index has the image's template.
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
        let size = size(bytes);
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
        note(self.asker, &format!("{prefix} {digest} {}", size(bytes)));
    }
}

/// The content key of an image: its manifest, what converts it, and what boots it.
pub(super) fn key(converter: &Converter, guest: &str, manifest: &Digest) -> String {
    let image = converter.key(manifest).to_string();
    Key::of(&["image", &image, guest]).to_string()
}

/// The first entry of a build.
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

/// `83 MB`, `1.4 GB`: in powers of 1000, as Docker and E2B write sizes.
fn size(bytes: u64) -> String {
    let mut unit = 1;
    let mut names = ["B", "kB", "MB", "GB"].into_iter();
    let mut name = names.next().unwrap_or_default();
    for larger in names {
        if bytes < unit * 1000 {
            break;
        }
        unit *= 1000;
        name = larger;
    }
    // In tenths, rounded.
    let tenths = (u128::from(bytes) * 10 + u128::from(unit) / 2) / u128::from(unit);
    if unit == 1 || tenths >= 100 {
        format!("{} {name}", (tenths + 5) / 10)
    } else {
        format!("{}.{} {name}", tenths / 10, tenths % 10)
    }
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn sizes_are_written_as_by_docker() {
        for (bytes, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.0 kB"),
            (9_949, "9.9 kB"),
            (9_950, "10 kB"),
            (48_500_000, "49 MB"),
            (1_390_000_000, "1.4 GB"),
            (u64::MAX, "18446744074 GB"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }
}
