//! Explains failed pulls to clients: cause and remedy.

use oci_image::{PullError, registry::HttpError, store::StoreError};

/// The message for a client whose image could not be pulled.
pub(super) fn explain(reference: &str, why: &PullError) -> String {
    match why {
        // E2B's words.
        PullError::NotFound(_) => format!(
            "image '{reference}' not found: the image or tag does not exist in the registry"
        ),
        PullError::Unauthorized { host } => format!(
            "image '{reference}' cannot be pulled: {host} denies access; check that the image exists and that the \
             registry's credentials are right"
        ),
        PullError::Http(HttpError::Refused { .. }) => {
            format!("image '{reference}' cannot be pulled: {why} (images.exceptions)")
        }
        PullError::Store(full @ StoreError::Full { .. }) => {
            format!("image '{reference}' cannot be pulled: {}", self::full(full))
        }
        other => format!(
            "image '{reference}' cannot be pulled: {}",
            model::chain(other)
        ),
    }
}

pub(super) fn full(why: &StoreError) -> String {
    format!("{why} (images.quota)")
}
