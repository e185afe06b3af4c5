//! Images that builds begin with.

use oci_image::{config::Defaults, registry::Credentials};

use super::{cancel::Cancel, log::BuildLog};

/// A disk template of the pool made of an image, and what the image says about its use.
#[derive(Clone, Debug)]
pub struct Base {
    /// Id of a disk template in the pool.
    pub template: String,
    pub defaults: Defaults,
}

#[derive(Clone, Debug)]
pub struct Bases;

impl Bases {
    #[expect(clippy::unused_async, reason = "provisional")]
    pub async fn of_image(
        &self,
        _reference: &str,
        _credentials: Option<Credentials>,
        _log: &BuildLog,
        _cancel: &Cancel,
    ) -> Result<Base, String> {
        Err("this server cannot build from images yet".to_owned())
    }
}
