//! From a pulled image to a root image in the store.

use std::{io, ops::Range};

use crate::{
    Pulled,
    digest::Digest,
    erofs::{self, ErofsError},
    limits::Limits,
    provision::{ProvisionError, Userland, provision},
    source::{Source, Unpacked},
    store::{Lease, Object, Store, StoreError},
    tar::{self, Budget, TarError},
    tree::{MergeError, Tree},
    unpack::{UnpackError, Unpacker},
};

/// Part of every image's key. Raise it when the same layers give another image.
const CONVERTER: &str = "oci-image 1";

#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
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
    #[error("cannot use a draft of the store")]
    Draft(#[source] std::io::Error),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The key of an image's root image in the store.
#[must_use]
pub fn key(manifest: &Digest, userland: Option<&Userland>) -> Digest {
    let additions = userland.map_or("none".to_owned(), |u| u.digest().to_string());
    Digest::of(format!("{CONVERTER}\n{manifest}\n{additions}\n").as_bytes())
}

/// Makes the root image of a pulled image, unless the store has it. Blocks: call it on a thread for blocking work.
/// Without a `userland`, the root image has what the layers have, and nothing more: for comparisons.
///
/// # Errors
/// Returns an error if a layer is malformed or hostile, a limit is exceeded, or the store fails.
pub fn convert(
    pulled: &Pulled,
    store: &Store,
    limits: &Limits,
    userland: Option<&Userland>,
) -> Result<Lease, ConvertError> {
    let key = key(&pulled.digest, userland);
    if let Some(image) = store.take(Object::Image(key)) {
        return Ok(image);
    }
    let mut unpacker = Unpacker::new(limits);
    let mut budget = Budget::new(limits);
    let mut tree = Tree::new(limits);
    // The drafts hold the unpacked layers until the image is written.
    let (mut drafts, mut layers) = (Vec::new(), Vec::new());
    for (number, layer) in pulled.layers.iter().enumerate() {
        let blob = layer.blob.open()?;
        let draft = store.draft(blob.metadata().map_or(0, |metadata| metadata.len()))?;
        let out = draft.file().try_clone().map_err(ConvertError::Draft)?;
        let unpacked = unpacker.unpack(blob, layer.compression, &layer.diff_id, out);
        let unpacked = unpacked.map_err(|source| ConvertError::Unpack {
            layer: number,
            source,
        })?;
        // At most `Limits::layers`.
        let index = u32::try_from(number).unwrap_or(u32::MAX);
        let entries = tar::read(&unpacked, index, &mut budget);
        let entries = entries.map_err(|source| ConvertError::Tar {
            layer: number,
            source,
        })?;
        (tree.apply(entries)).map_err(|source| ConvertError::Merge {
            layer: number,
            source,
        })?;
        drafts.push(draft);
        layers.push(Archive::Unpacked(unpacked));
    }
    if let Some(userland) = userland {
        let index = u32::try_from(layers.len()).unwrap_or(u32::MAX);
        let added = provision(&mut tree, &layers, userland, index)?;
        layers.push(Archive::Added(added));
    }
    let draft = store.draft(0)?;
    erofs::write(&tree, &layers, draft.file(), limits).map_err(ConvertError::Erofs)?;
    Ok(draft.finish_image(key)?)
}

/// What contents of a tree refer to.
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
