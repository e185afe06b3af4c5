//! The certificate authority for the certificates that the proxy presents to sandboxes with rules. Created at the first
//! start, below `<state>/egress-ca`: `ca.crt`, and `ca.key` with mode 0600. The key is sent only to the proxy, and the
//! certificate only to sandboxes with rules.

use std::{
    io,
    path::{Path, PathBuf},
};

use ::egress::control::{Authority, authority_name};
use pki::KeyPair;
use pool::durable::{Durability, private_dir, read_bounded, replace, sync_dir};

const DIR: &str = "egress-ca";
const CERTIFICATE: &str = "ca.crt";
const KEY: &str = "ca.key";
/// Maximum file size in bytes.
const MAX_PEM: u64 = 64 << 10;
/// The authority is bound to the state directory, and no program outside of sandboxes trusts it.
const VALID_DAYS: u32 = 3650;

/// The authority could not be loaded or created.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    #[error("cannot read or create the certificate authority in {}", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} has no valid certificate and key: move the directory away, and the next server creates new ones", path.display())]
    Malformed { path: PathBuf },
    #[error("cannot create a certificate authority")]
    Make(#[from] pki::Error),
}

/// The authority of the state directory.
///
/// # Errors
/// Returns [`AuthorityError`].
pub(super) fn load(state: &Path) -> Result<Authority, AuthorityError> {
    let dir = state.join(DIR);
    let failed = |source| AuthorityError::Io {
        path: dir.clone(),
        source,
    };
    let made = !dir.exists();
    private_dir(&dir).map_err(failed)?;
    if made {
        sync_dir(state).map_err(failed)?;
    }
    // The certificate is written last. If it is missing, a crash interrupted the first start.
    if !dir.join(CERTIFICATE).exists() {
        let authority = make()?;
        for (name, text) in [(KEY, &authority.key), (CERTIFICATE, &authority.certificate)] {
            replace(&dir, name, text.as_bytes(), Durability::Host).map_err(failed)?;
        }
        return Ok(authority);
    }
    let read = |name: &str| {
        let bytes = read_bounded(&dir.join(name), MAX_PEM)?;
        String::from_utf8(bytes).map_err(io::Error::other)
    };
    let authority = Authority {
        certificate: read(CERTIFICATE).map_err(failed)?,
        key: read(KEY).map_err(failed)?,
    };
    let is_certificate = authority
        .certificate
        .contains("-----BEGIN CERTIFICATE-----");
    if is_certificate && KeyPair::from_pem(&authority.key).is_ok() {
        Ok(authority)
    } else {
        Err(AuthorityError::Malformed { path: dir })
    }
}

fn make() -> Result<Authority, pki::Error> {
    let key = KeyPair::generate()?;
    let params = pki::authority(&authority_name(key.public_key_raw()), VALID_DAYS);
    let made = pki::Authority::create(params, key)?;
    Ok(Authority {
        certificate: made.certificate().to_owned(),
        key: made.key().serialize_pem(),
    })
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    #[test]
    fn an_authority_is_made_once_and_its_key_is_private() {
        let state = tempfile::tempdir().unwrap();
        let first = load(state.path()).unwrap();
        assert!(load(state.path()).unwrap() == first);
        let dir = state.path().join(DIR);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&dir), mode(&dir.join(KEY))), (0o700, 0o600));
        // A crash before the certificate was written.
        fs::remove_file(dir.join(CERTIFICATE)).unwrap();
        assert!(load(state.path()).unwrap() != first);
        fs::write(dir.join(KEY), "torn").unwrap();
        let torn = load(state.path());
        assert!(matches!(torn, Err(AuthorityError::Malformed { .. })));
    }
}
