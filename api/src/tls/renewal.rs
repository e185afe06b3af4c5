//! Replaces the certificate of a running server when its files change.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use super::{TlsError, certified};

/// Interval at which the files are examined.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The files of a certificate, and the certificate in use.
#[derive(Debug)]
pub struct Renewal {
    certificates: PathBuf,
    key: PathBuf,
    current: Arc<Current>,
    /// Stamps of the files at the last read, even if they were unusable.
    seen: [Stamp; 2],
}

/// Identifies one version of a file: each replacement or change of mode and owner changes inode or ctime. `None` if it
/// cannot be examined.
type Stamp = Option<(u64, i64, i64)>;

/// The certificate for new connections.
#[derive(Debug)]
pub(super) struct Current(RwLock<Arc<CertifiedKey>>);

impl ResolvesServerCert for Current {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(
            &self.0.read().unwrap_or_else(PoisonError::into_inner),
        ))
    }
}

impl Renewal {
    pub(super) fn begin(certificates: &Path, key: &Path) -> Result<Self, TlsError> {
        // Taken before the files are read, so that a change in between is found later.
        let seen = stamps(certificates, key);
        let current = Arc::new(certified(certificates, key)?);
        Ok(Self {
            certificates: certificates.to_owned(),
            key: key.to_owned(),
            current: Arc::new(Current(RwLock::new(current))),
            seen,
        })
    }

    pub(super) fn current(&self) -> Arc<Current> {
        Arc::clone(&self.current)
    }

    /// Checks the files every second; never returns.
    pub async fn watch(mut self) {
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            match self.renew() {
                Ok(false) => {}
                Ok(true) => {
                    tracing::info!(file = %self.certificates.display(), "using the renewed certificate for new connections");
                }
                // This also happens while only one of the two files has been replaced.
                Err(why) => {
                    let why = model::chain(&why);
                    tracing::warn!(%why, "cannot use the renewed certificate: keeping the previous one");
                }
            }
        }
    }

    /// Uses the files if they have changed. Returns whether they have.
    ///
    /// # Errors
    /// Returns [`TlsError`] once for each change that cannot be used. The previous certificate is kept.
    pub fn renew(&mut self) -> Result<bool, TlsError> {
        let now = stamps(&self.certificates, &self.key);
        if now == self.seen {
            return Ok(false);
        }
        self.seen = now;
        let renewed = Arc::new(certified(&self.certificates, &self.key)?);
        *(self.current.0.write()).unwrap_or_else(PoisonError::into_inner) = renewed;
        Ok(true)
    }
}

fn stamps(certificates: &Path, key: &Path) -> [Stamp; 2] {
    [certificates, key].map(|path| {
        let meta = fs::metadata(path).ok()?;
        Some((meta.ino(), meta.ctime(), meta.ctime_nsec()))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::super::ca;
    use super::*;

    fn in_use(renewal: &Renewal) -> Vec<u8> {
        let current = renewal.current.0.read().unwrap();
        current.end_entity_cert().unwrap().to_vec()
    }

    #[test]
    fn changed_files_are_used_once_both_fit_together() {
        let dir = tempfile::tempdir().unwrap();
        let [old, new] = ["old", "new"].map(|n| ca::init(&dir.path().join(n), "e2b.test").unwrap());
        let mut renewal = Renewal::begin(&old.certificate, &old.key).unwrap();
        let first = in_use(&renewal);
        assert!(!renewal.renew().unwrap());
        // Like an ACME client: one file after the other.
        fs::rename(&new.certificate, &old.certificate).unwrap();
        let why = renewal.renew().unwrap_err();
        assert!(matches!(why, TlsError::Unusable(_)), "{why}");
        assert_eq!(in_use(&renewal), first);
        assert!(!renewal.renew().unwrap(), "reported once");
        fs::rename(&new.key, &old.key).unwrap();
        assert!(renewal.renew().unwrap());
        assert_ne!(in_use(&renewal), first);
        // A key that others can read is fixed by changing its mode.
        let mode = |mode| fs::set_permissions(&old.key, fs::Permissions::from_mode(mode)).unwrap();
        mode(0o644);
        assert!(renewal.renew().is_err());
        mode(0o600);
        assert!(renewal.renew().unwrap());
        // Missing files change nothing, and are reported once.
        let second = in_use(&renewal);
        fs::remove_file(&old.key).unwrap();
        assert!(renewal.renew().is_err());
        assert!(!renewal.renew().unwrap());
        assert_eq!(in_use(&renewal), second);
    }
}
