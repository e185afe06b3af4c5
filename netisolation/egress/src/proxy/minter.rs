//! Certificates for the names of rules, signed by the server's authority. The key of all of them is made at the start and
//! never stored.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use egress::{
    control::{Authority, authority_name},
    name::HostName,
};
use pki::{KeyPair, PublicKeyData, Purpose, SerialNumber};
use rustls::{
    RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, pem::PemObject},
    server::NoServerSessionStorage,
    sign::{CertifiedKey, SigningKey, SingleCertAndKey},
};

const VALID_DAYS: u32 = 7;
/// A certificate is used for new connections this long.
const USED: Duration = Duration::from_secs(24 * 60 * 60);
const CACHED: usize = 1024;

#[derive(Debug, thiserror::Error)]
pub(crate) enum MinterError {
    #[error("the authority's certificate is not a certificate in PEM")]
    Certificate,
    #[error(
        "the subject of the authority's certificate does not name its key: move the server's directory egress-ca away, \
         and restart the server, which makes a new one"
    )]
    Subject,
    #[error("the authority's key is not a private key in PEM, or not the certificate's")]
    Key,
    #[error("cannot make a certificate")]
    Make(#[source] pki::Error),
    #[error("cannot use a certificate")]
    Use(#[source] rustls::Error),
    #[error("cannot make random numbers")]
    Random,
}

pub(crate) struct Minter {
    authority: pki::Authority,
    certificate: CertificateDer<'static>,
    leaf: KeyPair,
    signing: Arc<dyn SigningKey>,
    cache: Mutex<HashMap<HostName, Minted>>,
}

struct Minted {
    at: Instant,
    key: Arc<CertifiedKey>,
}

impl Minter {
    pub(crate) fn new(authority: &Authority) -> Result<Self, MinterError> {
        let certificate = CertificateDer::from_pem_slice(authority.certificate.as_bytes());
        let certificate = certificate.map_err(|_| MinterError::Certificate)?;
        let key = KeyPair::from_pem(&authority.key).map_err(|_| MinterError::Key)?;
        let mut anchors = RootCertStore::empty();
        anchors
            .add(certificate.clone())
            .map_err(|_| MinterError::Certificate)?;
        let anchor = anchors.roots.pop().ok_or(MinterError::Certificate)?;
        if !key
            .subject_public_key_info()
            .ends_with(&anchor.subject_public_key_info)
        {
            return Err(MinterError::Key);
        }
        let params = pki::authority(&authority_name(key.public_key_raw()), VALID_DAYS);
        let leaf = KeyPair::generate().map_err(MinterError::Make)?;
        let leaf_key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(leaf.serialize_der()));
        let signing = ring::sign::any_supported_type(&leaf_key).map_err(MinterError::Use)?;
        let minter = Self {
            authority: pki::Authority::load(params, key, authority.certificate.clone()),
            certificate,
            leaf,
            signing,
            cache: Mutex::default(),
        };
        // Clients compare these bytes.
        let probe = minter
            .mint(&HostName::parse("cube-egress.invalid").map_err(|_| MinterError::Subject)?)?;
        let issuer = &*anchor.subject;
        let is_same = probe.cert[0]
            .windows(issuer.len())
            .any(|part| part == issuer);
        if is_same {
            Ok(minter)
        } else {
            Err(MinterError::Subject)
        }
    }

    /// The configuration of a connection for this name that offers these protocols.
    pub(crate) fn config(
        &self,
        name: &HostName,
        protocols: Vec<Vec<u8>>,
    ) -> Result<ServerConfig, MinterError> {
        let key = self.certificate(name)?;
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(MinterError::Use)?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(SingleCertAndKey::from(key)));
        config.alpn_protocols = protocols;
        // A session could be resumed with another name. Without tickets there is no early data either.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        config.max_early_data_size = 0;
        Ok(config)
    }

    fn certificate(&self, name: &HostName) -> Result<Arc<CertifiedKey>, MinterError> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(minted) = cache.get(name).filter(|minted| minted.at.elapsed() < USED) {
            return Ok(Arc::clone(&minted.key));
        }
        if cache.len() >= CACHED {
            let oldest = cache.iter().min_by_key(|(_, minted)| minted.at);
            if let Some(oldest) = oldest.map(|(name, _)| name.clone()) {
                cache.remove(&oldest);
            }
        }
        let key = Arc::new(self.mint(name)?);
        let minted = Minted {
            at: Instant::now(),
            key: Arc::clone(&key),
        };
        cache.insert(name.clone(), minted);
        Ok(key)
    }

    fn mint(&self, name: &HostName) -> Result<CertifiedKey, MinterError> {
        // A common name has at most 64 characters (RFC 5280, appendix A.1). Clients compare the alternative name.
        let common: String = name.as_str().chars().take(64).collect();
        let mut params = pki::leaf(
            &common,
            [name.to_string()],
            VALID_DAYS,
            &[Purpose::ServerAuth],
        )
        .map_err(MinterError::Make)?;
        // The key is the same for all names, and a pair of issuer and serial number may not be.
        let mut serial = [0; 16];
        let random = ring::default_provider().secure_random;
        random.fill(&mut serial).map_err(|_| MinterError::Random)?;
        serial[0] &= 0x7f;
        params.serial_number = Some(SerialNumber::from(serial.to_vec()));
        let signed = self.authority.sign(&params, &self.leaf);
        let leaf = signed.map_err(MinterError::Make)?.der().clone();
        let chain = vec![leaf, self.certificate.clone()];
        Ok(CertifiedKey::new(chain, Arc::clone(&self.signing)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn authority(name: impl FnOnce(&[u8]) -> String) -> Authority {
        let key = KeyPair::generate().unwrap();
        let params = pki::authority(&name(key.public_key_raw()), 1);
        let made = pki::Authority::create(params, key).unwrap();
        Authority {
            certificate: made.certificate().to_owned(),
            key: made.key().serialize_pem(),
        }
    }

    #[test]
    fn certificates_are_cached_and_bounded() {
        let minter = Minter::new(&authority(authority_name)).ok().unwrap();
        let name = HostName::parse("api.test").unwrap();
        let first = minter.certificate(&name).ok().unwrap();
        assert!(Arc::ptr_eq(
            &first,
            &minter.certificate(&name).ok().unwrap()
        ));
        for n in 0..CACHED + 10 {
            let name = HostName::parse(&format!("n{n}.test")).unwrap();
            minter.certificate(&name).ok().unwrap();
        }
        assert_eq!(minter.cache.lock().unwrap().len(), CACHED);
        let again = minter.certificate(&name).ok().unwrap();
        assert!(!Arc::ptr_eq(&first, &again));
        assert_ne!(first.cert[0], again.cert[0]);
    }

    #[test]
    fn an_authority_of_another_name_or_key_is_refused() {
        let other = Minter::new(&authority(|_| "cube".to_owned()));
        assert!(matches!(other, Err(MinterError::Subject)));
        let mut one = authority(authority_name);
        one.key = authority(authority_name).key;
        assert!(matches!(Minter::new(&one), Err(MinterError::Key)));
        one.key = "none".to_owned();
        assert!(matches!(Minter::new(&one), Err(MinterError::Key)));
        one.certificate = "none".to_owned();
        assert!(matches!(Minter::new(&one), Err(MinterError::Certificate)));
    }
}
