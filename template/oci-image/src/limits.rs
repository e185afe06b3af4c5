//! What one image may cost. Everything in an image is a stranger's.

use serde::{Deserialize, Serialize};

/// Limits of one image. An image that exceeds one is refused with the limit's name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Layers of an image.
    pub layers: usize,
    /// Bytes of all layers as the registry stores them.
    pub compressed: u64,
    /// Bytes of all layers after decompression, blocks of zeros included. Bounds the time.
    pub stream: u64,
    /// Bytes of all layers after decompression, without blocks of zeros. Bounds the disk space.
    pub stored: u64,
    /// How many times larger than its compressed form a layer may be, without blocks of zeros. Applies to what exceeds
    /// [`Limits::ratio_free`].
    pub ratio: u64,
    /// Bytes of a layer for which [`Limits::ratio`] does not apply.
    pub ratio_free: u64,
    /// As [`Limits::ratio_free`], for the same ratio with blocks of zeros: a few MiB of them would take minutes.
    pub zeros_free: u64,
    /// Files, directories and links of all layers, directories that are only implied included.
    pub entries: usize,
    /// Bytes of names, link targets, extended attributes and maps of sparse files of all layers.
    pub metadata: u64,
    /// Path components that are looked up while the layers are merged, those in symbolic links included.
    pub steps: u64,
    /// Sum of the sizes of all files, holes included.
    pub apparent: u64,
}

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

impl Default for Limits {
    fn default() -> Self {
        Self {
            layers: 128,
            compressed: 8 * GIB,
            stream: 64 * GIB,
            stored: 16 * GIB,
            ratio: 100,
            ratio_free: 256 * MIB,
            zeros_free: GIB,
            entries: 2_000_000,
            metadata: 512 * MIB,
            steps: 200_000_000,
            apparent: 1024 * GIB,
        }
    }
}
