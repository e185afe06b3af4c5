//! The address of the API for the cases.

use std::path::PathBuf;

use testbed::server::LocalServer;

use super::registry::ImageNames;

/// Address and key of the API, for the cases.
#[derive(Clone, Debug)]
pub(super) struct Address {
    pub(super) url: String,
    pub(super) key: String,
    pub(super) template: String,
    /// A second server, which speaks HTTPS and has the same templates. `None` if no feature needs it.
    pub(super) secure: Option<SecureAddress>,
    /// Images of registries. `None` if no feature needs them, or if this host has no registry.
    pub(super) images: Option<ImageNames>,
}

#[derive(Clone, Debug)]
pub(super) struct SecureAddress {
    pub(super) url: String,
    pub(super) key: String,
    /// Certificate of the authority that signed the server's certificate.
    pub(super) authority: PathBuf,
}

impl SecureAddress {
    pub(super) fn of(server: &LocalServer) -> Self {
        Self {
            url: server.endpoint().to_string(),
            key: server.key().to_owned(),
            authority: server.authority(),
        }
    }
}
