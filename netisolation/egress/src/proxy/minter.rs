//! Certificates for the names of rules, signed by the server's authority. The key of all of them is made at the start and
//! never stored.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use egress::{control::Authority, name::HostName};
use rcgen::{
    CertificateParams, DistinguishedName, DnType, DnValue, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PublicKeyData, SerialNumber, string::PrintableString,
};
use rustls::{
    RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, pem::PemObject},
    server::NoServerSessionStorage,
    sign::{CertifiedKey, SigningKey, SingleCertAndKey},
};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// Validity before and after now: clocks of guests may differ.
const BACKDATED: Duration = DAY;
const VALID: Duration = DAY.saturating_mul(7);
/// A certificate is used for new connections this long.
const USED: Duration = DAY;
const CACHED: usize = 1024;

#[derive(Debug, thiserror::Error)]
pub(crate) enum MinterError {
    #[error("the authority's certificate is not a certificate in PEM")]
    Certificate,
    #[error("the subject of the authority's certificate is not made of plain texts")]
    Subject,
    #[error("the authority's key is not a private key in PEM, or not the certificate's")]
    Key,
    #[error("cannot make a certificate")]
    Make(#[source] rcgen::Error),
    #[error("cannot use a certificate")]
    Use(#[source] rustls::Error),
    #[error("cannot make random numbers")]
    Random,
}

pub(crate) struct Minter {
    issuer: Issuer<'static, KeyPair>,
    authority: CertificateDer<'static>,
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
        let mut params = CertificateParams::default();
        params.distinguished_name = subject(&anchor.subject).ok_or(MinterError::Subject)?;
        let leaf = KeyPair::generate().map_err(MinterError::Make)?;
        let leaf_key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(leaf.serialize_der()));
        let signing = ring::sign::any_supported_type(&leaf_key).map_err(MinterError::Use)?;
        let minter = Self {
            issuer: Issuer::new(params, key),
            authority: certificate,
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
        let mut params = CertificateParams::new([name.to_string()]).map_err(MinterError::Make)?;
        let now = SystemTime::now();
        params.not_before = (now - BACKDATED).into();
        params.not_after = (now + VALID).into();
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.distinguished_name = DistinguishedName::new();
        // A common name has at most 64 characters (RFC 5280, appendix A.1). Clients compare the alternative name.
        let common: String = name.as_str().chars().take(64).collect();
        params.distinguished_name.push(DnType::CommonName, common);
        // The key is the same for all names, and a pair of issuer and serial number may not be.
        let mut serial = [0; 16];
        let random = ring::default_provider().secure_random;
        random.fill(&mut serial).map_err(|_| MinterError::Random)?;
        serial[0] &= 0x7f;
        params.serial_number = Some(SerialNumber::from(serial.to_vec()));
        let certificate = params
            .signed_by(&self.leaf, &self.issuer)
            .map_err(MinterError::Make)?;
        let chain = vec![certificate.der().clone(), self.authority.clone()];
        Ok(CertifiedKey::new(chain, Arc::clone(&self.signing)))
    }
}

/// Reads the content of a name (X.501, `RDNSequence`) whose parts are single UTF-8 or printable strings.
fn subject(mut bytes: &[u8]) -> Option<DistinguishedName> {
    const SEQUENCE: u8 = 0x30;
    const SET: u8 = 0x31;
    const OBJECT: u8 = 0x06;
    const UTF8: u8 = 0x0c;
    const PRINTABLE: u8 = 0x13;
    let mut name = DistinguishedName::new();
    while !bytes.is_empty() {
        let (part, rest) = element(bytes, SET)?;
        let (pair, []) = element(part, SEQUENCE)? else {
            return None;
        };
        let (object, text) = element(pair, OBJECT)?;
        let kind = DnType::from_oid(&arcs(object)?);
        let value = match *text.first()? {
            UTF8 => {
                let (text, []) = element(text, UTF8)? else {
                    return None;
                };
                DnValue::Utf8String(String::from_utf8(text.to_vec()).ok()?)
            }
            PRINTABLE => {
                let (text, []) = element(text, PRINTABLE)? else {
                    return None;
                };
                let text = std::str::from_utf8(text).ok()?;
                DnValue::PrintableString(PrintableString::try_from(text).ok()?)
            }
            _ => return None,
        };
        name.push(kind, value);
        bytes = rest;
    }
    Some(name)
}

/// The content of the first element, which must have this tag, and what follows it. Lengths up to 255 are enough here.
fn element(bytes: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (length, rest) = match bytes {
        [found, 0x81, length, rest @ ..] if *found == tag => (*length, rest),
        [found, length @ ..=0x7f, rest @ ..] if *found == tag => (*length, rest),
        _ => return None,
    };
    rest.split_at_checked(usize::from(length))
}

/// The numbers of an object identifier (X.690, 8.19).
fn arcs(bytes: &[u8]) -> Option<Vec<u64>> {
    let mut arcs = Vec::new();
    let mut arc: u64 = 0;
    for byte in bytes {
        arc = arc.checked_mul(128)? | u64::from(byte & 0x7f);
        if byte & 0x80 == 0 {
            if arcs.is_empty() {
                let first = (arc / 40).min(2);
                arcs.extend([first, arc - first * 40]);
            } else {
                arcs.push(arc);
            }
            arc = 0;
        }
    }
    Some(arcs)
}

#[cfg(test)]
mod tests {
    use rcgen::BasicConstraints;

    use super::*;

    fn authority(parts: &[(DnType, &str)]) -> Authority {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.distinguished_name = DistinguishedName::new();
        for (kind, text) in parts {
            params.distinguished_name.push(kind.clone(), *text);
        }
        let key = KeyPair::generate().unwrap();
        Authority {
            certificate: params.self_signed(&key).unwrap().pem(),
            key: key.serialize_pem(),
        }
    }

    #[test]
    fn certificates_are_cached_and_bounded() {
        let parts = [
            (DnType::OrganizationName, "cube"),
            (DnType::CommonName, "cube egress \u{fc}"),
        ];
        let minter = Minter::new(&authority(&parts)).ok().unwrap();
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
    fn a_key_of_another_authority_is_refused() {
        let parts = [(DnType::CommonName, "cube")];
        let mut one = authority(&parts);
        one.key = authority(&parts).key;
        assert!(matches!(Minter::new(&one), Err(MinterError::Key)));
        one.key = "none".to_owned();
        assert!(matches!(Minter::new(&one), Err(MinterError::Key)));
        one.certificate = "none".to_owned();
        assert!(matches!(Minter::new(&one), Err(MinterError::Certificate)));
    }
}
