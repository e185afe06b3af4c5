//! Assembles layers to a root image, on open files. Runs in the confined process.

use std::{fs::File, io, ops::Range};

use crate::{
    digest::Digest,
    erofs::{self, ErofsError},
    limits::Limits,
    manifest::Compression,
    provision::{ProvisionError, Userland, provision},
    source::{Source, Unpacked},
    tar::{self, Budget, TarError},
    tree::{MergeError, Tree},
    unpack::{UnpackError, Unpacker},
};

/// A layer of an image.
pub(crate) struct Layer {
    pub(crate) blob: File,
    /// An empty file for the unpacked layer.
    pub(crate) unpacked: File,
    pub(crate) compression: Compression,
    /// Digest of the unpacked layer.
    pub(crate) diff_id: Digest,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum AssembleError {
    #[error("layer {layer} of the image cannot be unpacked")]
    Unpack { layer: usize, source: UnpackError },
    #[error("layer {layer} of the image is not a valid archive")]
    Tar { layer: usize, source: TarError },
    #[error("layer {layer} of the image cannot be applied")]
    Merge { layer: usize, source: MergeError },
    #[error(transparent)]
    Provision(#[from] ProvisionError),
    #[error("root image cannot be written")]
    Erofs(#[source] ErofsError),
}

/// Writes the root image of `layers`, lowest first, into the empty file `out`. Without a `userland`, the image contains
/// the layers and nothing else.
pub(crate) fn assemble(
    layers: Vec<Layer>,
    out: &File,
    limits: &Limits,
    userland: Option<&Userland>,
) -> Result<(), AssembleError> {
    let mut unpacker = Unpacker::new(limits);
    let mut budget = Budget::new(limits);
    let mut tree = Tree::new(limits);
    let mut archives = Vec::new();
    for (number, layer) in layers.into_iter().enumerate() {
        let unpacked = unpacker.unpack(
            layer.blob,
            layer.compression,
            &layer.diff_id,
            layer.unpacked,
        );
        let unpacked = unpacked.map_err(|source| AssembleError::Unpack {
            layer: number,
            source,
        })?;
        // At most `Limits::layers`.
        let index = u32::try_from(number).unwrap_or(u32::MAX);
        let entries = tar::read(&unpacked, index, &mut budget);
        let entries = entries.map_err(|source| AssembleError::Tar {
            layer: number,
            source,
        })?;
        (tree.apply(entries)).map_err(|source| AssembleError::Merge {
            layer: number,
            source,
        })?;
        archives.push(Archive::Unpacked(unpacked));
    }
    if let Some(userland) = userland {
        let index = u32::try_from(archives.len()).unwrap_or(u32::MAX);
        let added = provision(&mut tree, &archives, userland, index)?;
        archives.push(Archive::Added(added));
    }
    erofs::write(&tree, &archives, out, limits).map_err(AssembleError::Erofs)?;
    Ok(())
}

/// Archives to which the contents of a tree refer.
enum Archive {
    Unpacked(Unpacked),
    Added(Vec<u8>),
}

impl Source for Archive {
    fn size(&self) -> u64 {
        match self {
            Self::Unpacked(layer) => layer.size(),
            Self::Added(bytes) => bytes.as_slice().size(),
        }
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            Self::Unpacked(layer) => layer.read_at(buffer, offset),
            Self::Added(bytes) => bytes.as_slice().read_at(buffer, offset),
        }
    }

    fn data(&self, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        match self {
            Self::Unpacked(layer) => layer.data(range),
            Self::Added(bytes) => bytes.as_slice().data(range),
        }
    }
}
