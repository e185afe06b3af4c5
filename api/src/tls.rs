//! TLS for the front door: a certificate chain and a key in PEM files, HTTP/2 and HTTP/1.1 offered.

pub mod ca;

use std::fs::File;
use std::io::{self, BufReader};
use std::os::unix::fs::MetadataExt;
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
    /// The key cannot be opened.
    #[error("cannot open the private key {path}")]
    Open {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Others can read the key, or replace it.
    #[error(
        "the private key {path} is open to others (owner {owner}, mode {mode:o}): \
         run `chown {server} {path}` and `chmod 600 {path}`, and make a new key if others may have read it"
    )]
    Exposed {
        /// Where.
        path: PathBuf,
        /// Its owner's number.
        owner: u32,
        /// Its permission bits.
        mode: u32,
        /// The number of the server's user.
        server: u32,
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
    let key = PrivateKeyDer::from_pem_reader(BufReader::new(open_key(key)?))
        .map_err(unreadable("a private key", key))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Unusable)?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(TlsError::Unusable)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// A key that nobody but the server's user and root can read or change. What is looked at is the file that is read.
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
    fn a_key_that_others_can_read_is_refused_with_the_cure() {
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
