//! Resource limits of one image. All of an image is untrusted.

use serde::{Deserialize, Serialize};

/// Limits of one image. An image that exceeds a limit is rejected with the limit's name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Layers of an image.
    pub layers: usize,
    /// Total size of all layers as stored by the registry, in bytes.
    pub compressed: u64,
    /// Total size of all layers after decompression, including blocks of zeros, in bytes. Bounds the time.
    pub stream: u64,
    /// Total size of all layers after decompression, without blocks of zeros, in bytes. Bounds the disk space.
    pub stored: u64,
    /// Maximum ratio of a layer's decompressed size, without blocks of zeros, to its compressed size. Applies beyond
    /// [`Limits::ratio_free`].
    pub ratio: u64,
    /// Number of bytes of a layer that are exempt from [`Limits::ratio`].
    pub ratio_free: u64,
    /// Like [`Limits::ratio_free`], for the same ratio including blocks of zeros: a few compressed MiB of them would
    /// take minutes.
    pub zeros_free: u64,
    /// Files, directories and links of all layers, including implied directories.
    pub entries: usize,
    /// Total size of names, link targets, extended attributes and maps of sparse files of all layers, in bytes.
    pub metadata: u64,
    /// Path components that are looked up while the layers are merged, including components of symbolic links.
    pub steps: u64,
    /// Total size of all files, including holes, in bytes.
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
