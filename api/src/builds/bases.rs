//! Images that builds begin with: from a reference to a disk template of the pool.

use oci_image::{config::Defaults, registry::Credentials};

use super::{cancel::Cancel, log::BuildLog};

/// A disk template of the pool made of an image, and the image's defaults. It stays in the pool at least until the build
/// ends that asked for it.
#[derive(Clone, Debug)]
pub struct Base {
    /// Id of a disk template in the pool. The caller does not remove it.
    pub template: String,
    /// Equal keys mean equal disks, also if the template's id has changed.
    pub key: String,
    pub defaults: Defaults,
}

/// Makes disk templates of images. Clones share the store of images.
#[derive(Clone, Debug)]
pub struct Bases {}

impl Bases {
    /// The disk templates that images have in the pool.
    #[must_use]
    pub fn templates(&self) -> std::collections::BTreeSet<String> {
        std::collections::BTreeSet::new()
    }

    /// The disk template of an image. Access to the image is checked with its registry each time.
    ///
    /// # Errors
    /// Returns a message for the client, also if the build is cancelled.
    #[expect(clippy::unused_async, reason = "pulls and conversions are waited for")]
    pub async fn of_image(
        &self,
        reference: &str,
        _credentials: Option<Credentials>,
        _log: &BuildLog,
        _cancel: &Cancel,
    ) -> Result<Base, String> {
        Err(format!(
            "image '{reference}' cannot be used: this server builds from templates only"
        ))
    }
}
