//! TLS configuration of the listener: certificate chain and key in PEM files; ALPN offers HTTP/2 and HTTP/1.1. A renewed
//! certificate is used for new connections without a restart ([`Renewal`]).

pub mod ca;
mod renewal;

use std::fs::File;
use std::io::{self, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;

pub use renewal::Renewal;

/// Why the certificate chain or the private key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The file cannot be read, or is not valid PEM.
    #[error("cannot read {what} from {path}")]
    Read {
        /// The expected content.
        what: &'static str,
        path: PathBuf,
        #[source]
        source: pem::Error,
    },
    #[error("cannot open the private key {path}")]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Other users can read or replace the key.
    #[error(
        "other users can access the private key {path} (owner {owner}, mode {mode:o}): \
         run `chown {server} {path}` and `chmod 600 {path}`, and replace the key if others may have read it"
    )]
    Exposed {
        path: PathBuf,
        /// The uid of the file's owner.
        owner: u32,
        /// The permission bits of the file.
        mode: u32,
        /// The uid of the server.
        server: u32,
    },
    /// The certificate file contains no certificate.
    #[error("no certificate found in {0}: expected a PEM certificate chain")]
    Empty(PathBuf),
    /// The key does not match the certificate, or its type is not supported.
    #[error("cannot use the certificate with the private key")]
    Unusable(#[source] rustls::Error),
}

/// Loads a certificate chain, leaf first, and its key. The configuration uses them until the [`Renewal`] replaces them.
///
/// # Errors
/// Returns [`TlsError::Exposed`] if other users can access the key, and another [`TlsError`] if a file cannot be read
/// or the two do not match.
pub fn load(certificates: &Path, key: &Path) -> Result<(Arc<ServerConfig>, Renewal), TlsError> {
    let renewal = Renewal::begin(certificates, key)?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Unusable)?
        .with_no_client_auth()
        .with_cert_resolver(renewal.current());
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok((Arc::new(config), renewal))
}

/// Reads the files and checks that certificate and key match.
fn certified(certificates: &Path, key: &Path) -> Result<CertifiedKey, TlsError> {
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
    let key = PrivateKeyDer::from_pem_reader(BufReader::new(open_key(key)?))
        .map_err(unreadable("a private key", key))?;
    CertifiedKey::from_der(chain, key, &ring::default_provider()).map_err(TlsError::Unusable)
}

/// Opens a private key, which must belong to root or to the server's user and be accessible to its owner only. The
/// check examines the opened file, so a concurrent replacement at `path` cannot evade it.
fn open_key(path: &Path) -> Result<File, TlsError> {
    let failed = |source| TlsError::Open {
        path: path.to_owned(),
        source,
    };
    let file = File::open(path).map_err(failed)?;
    let meta = file.metadata().map_err(failed)?;
    let (owner, mode) = (meta.uid(), meta.mode() & 0o7777);
    let server = nix::unistd::geteuid().as_raw();
    if (owner == 0 || owner == server) && mode & 0o077 == 0 {
        Ok(file)
    } else {
        Err(TlsError::Exposed {
            path: path.to_owned(),
            owner,
            mode,
            server,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_key_that_others_can_access_is_refused_with_instructions() {
        let dir = tempfile::tempdir().unwrap();
        let files = ca::init(dir.path(), "e2b.test").unwrap();
        let link = dir.path().join("link");
        symlink(&files.key, &link).unwrap();
        for mode in [0o644, 0o640, 0o604, 0o620, 0o601] {
            set_permissions(&files.key, Permissions::from_mode(mode)).unwrap();
            for path in [&files.key, &link] {
                let refused = load(&files.certificate, path).unwrap_err();
                let cure = format!("chmod 600 {}", path.display());
                assert!(refused.to_string().contains(&cure), "{mode:o}: {refused}");
            }
        }
        for mode in [0o600, 0o400] {
            set_permissions(&files.key, Permissions::from_mode(mode)).unwrap();
            assert!(load(&files.certificate, &link).is_ok(), "{mode:o}");
        }
    }
}
