//! TLS for the front door: a certificate chain and a key in PEM files, HTTP/2 and HTTP/1.1 offered.

pub mod ca;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// The files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// One cannot be read, or is no PEM of its kind.
    #[error("cannot read {what} from {path}")]
    Read {
        /// What was looked for.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: pem::Error,
    },
    /// There is none.
    #[error("there is no certificate in {0}")]
    Empty(PathBuf),
    /// Key and certificate do not belong together, or are of a kind that is not supported.
    #[error("certificate and key cannot be used")]
    Unusable(#[source] rustls::Error),
}

/// Reads a certificate chain (the server's own first) and its key.
///
/// # Errors
/// See [`TlsError`].
pub fn load(certificates: &Path, key: &Path) -> Result<Arc<ServerConfig>, TlsError> {
    let unreadable = |what, path: &Path| {
        let path = path.to_owned();
        move |source| TlsError::Read { what, path, source }
    };
    let chain: Vec<_> = CertificateDer::pem_file_iter(certificates)
        .and_then(Iterator::collect)
        .map_err(unreadable("certificates", certificates))?;
    if chain.is_empty() {
        return Err(TlsError::Empty(certificates.to_owned()));
    }
    let key = PrivateKeyDer::from_pem_file(key).map_err(unreadable("a private key", key))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Unusable)?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(TlsError::Unusable)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
