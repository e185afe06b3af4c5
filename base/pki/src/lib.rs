//! Certificates that this project signs itself. All keys are ECDSA keys on P-256.
//!
//! An authority signs only leaves: its path length is 0. A leaf is valid for the names and addresses that it lists. The
//! validity of all certificates begins a day in the past, for clients whose clocks are behind.

use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, Certificate, DistinguishedName, DnType, IsCa, Issuer, KeyUsagePurpose,
};

pub use rcgen::{
    CertificateParams, CidrSubnet, Error, ExtendedKeyUsagePurpose as Purpose, GeneralSubtree,
    KeyPair, NameConstraints, PKCS_ECDSA_P256_SHA256, PublicKeyData, SerialNumber,
    SignatureAlgorithm,
};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// An authority with its key.
#[derive(Debug)]
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
}

impl Authority {
    /// Creates an authority whose key is `key`.
    ///
    /// # Errors
    /// Returns an error if the parameters cannot be encoded.
    pub fn create(params: CertificateParams, key: KeyPair) -> Result<Self, Error> {
        let certificate = params.self_signed(&key)?.pem();
        Ok(Self::load(params, key, certificate))
    }

    /// An authority that exists: `params` have the subject of its `certificate`.
    #[must_use]
    pub fn load(params: CertificateParams, key: KeyPair, certificate: String) -> Self {
        Self {
            issuer: Issuer::new(params, key),
            certificate,
        }
    }

    /// The authority's certificate in PEM.
    #[must_use]
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    #[must_use]
    pub fn key(&self) -> &KeyPair {
        self.issuer.key()
    }

    /// Signs a certificate for a public key.
    ///
    /// # Errors
    /// Returns an error if the parameters cannot be encoded.
    pub fn sign(
        &self,
        leaf: &CertificateParams,
        key: &impl PublicKeyData,
    ) -> Result<Certificate, Error> {
        leaf.signed_by(key, &self.issuer)
    }
}

/// The certificate of an authority.
#[must_use]
pub fn authority(common_name: &str, days: u32) -> CertificateParams {
    let mut params = dated(CertificateParams::default(), common_name, days);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

/// A certificate for these names and IP addresses.
///
/// # Errors
/// Returns an error if a name is not ASCII.
pub fn leaf(
    common_name: &str,
    hosts: impl Into<Vec<String>>,
    days: u32,
    purposes: &[Purpose],
) -> Result<CertificateParams, Error> {
    let mut params = dated(CertificateParams::new(hosts)?, common_name, days);
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = purposes.to_vec();
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

fn dated(mut params: CertificateParams, common_name: &str, days: u32) -> CertificateParams {
    let now = SystemTime::now();
    params.not_before = (now - DAY).into();
    params.not_after = (now + DAY * days).into();
    params.distinguished_name = DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::CommonName, common_name);
    params
}
