//! The cluster's certificate authority. It signs the certificates of nodes and of etcd, and only the cluster trusts it.
//!
//! A node's certificate is valid for one name, `<node>.node.cube.internal`, as server and as client. Other nodes
//! compare that name and the public key with the member records, so the certificate of etcd or of a removed host grants
//! no access. The common name is the node's user in etcd ([`Member::user`]).

use cluster::{Member, MemberSigner, NodeId};
use model::hex;
use pki::{
    CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData, Purpose, SignatureAlgorithm,
    leaf,
};
use sha2::{Digest, Sha256};

use crate::node::settings::{Dir, SettingsError};

/// Validity in days of the authority, and of the certificates that it signs for nodes.
const CA_DAYS: u32 = 3650;
const DAYS: u32 = 90;
/// Age at which a node renews its certificate.
pub const RENEW_AFTER: std::time::Duration = std::time::Duration::from_secs(60 * 24 * 3600);
/// Nodes and etcd are servers as well as clients.
const PURPOSES: [Purpose; 2] = [Purpose::ServerAuth, Purpose::ClientAuth];
/// Length of an uncompressed P-256 public key: the byte 4 and two coordinates (SEC 1, 2.3.3).
const POINT: usize = 65;

/// An error that prevents a certificate from being created.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error(
        "this node does not have the key of the cluster's authority: run the command on the node that founded the cluster"
    )]
    Elsewhere,
    #[error("cannot create a certificate")]
    Make(#[from] pki::Error),
    #[error("the public key is not an uncompressed P-256 point, or is not the member's key")]
    Key,
}

/// The authority with its key.
pub struct Authority {
    cluster: String,
    signing: pki::Authority,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Authority")
    }
}

/// A public key that another host sent.
struct Point(Vec<u8>);

impl PublicKeyData for Point {
    fn der_bytes(&self) -> &[u8] {
        &self.0
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

/// The name in the certificate of a node.
#[must_use]
pub fn host_name(node: &NodeId) -> String {
    format!("{node}.node.cube.internal")
}

/// SHA-256 of a public key in the form that certificates use, in hex.
///
/// # Errors
/// Returns [`AuthorityError::Key`] if it is not an uncompressed point of P-256.
pub fn key_sum(public_key: &[u8]) -> Result<String, AuthorityError> {
    if public_key.len() != POINT || public_key[0] != 4 {
        return Err(AuthorityError::Key);
    }
    let spki = Point(public_key.to_vec()).subject_public_key_info();
    Ok(hex(&Sha256::digest(spki)))
}

impl Authority {
    /// Creates the authority of a new cluster in `dir`.
    ///
    /// # Errors
    /// Returns [`AuthorityError`] if it cannot be created or written.
    pub fn create(dir: &Dir, cluster: &str) -> Result<Self, AuthorityError> {
        let signing = pki::Authority::create(params(cluster), KeyPair::generate()?)?;
        dir.write("ca.key", signing.key().serialize_pem().as_bytes())?;
        dir.write("ca.crt", signing.certificate().as_bytes())?;
        Ok(Self {
            cluster: cluster.to_owned(),
            signing,
        })
    }

    /// Loads the authority whose key is in `dir`.
    ///
    /// # Errors
    /// Returns [`AuthorityError::Elsewhere`] if the key is not there.
    pub fn load(dir: &Dir, cluster: &str) -> Result<Self, AuthorityError> {
        if !dir.has("ca.key") {
            return Err(AuthorityError::Elsewhere);
        }
        let key = KeyPair::from_pem(&dir.read("ca.key")?)?;
        Ok(Self {
            cluster: cluster.to_owned(),
            signing: pki::Authority::load(params(cluster), key, dir.read("ca.crt")?),
        })
    }

    /// Returns the signer of member records.
    ///
    /// # Errors
    /// Returns [`AuthorityError::Key`] if the authority's key has another type.
    pub fn signer(&self) -> Result<MemberSigner, AuthorityError> {
        let key = self.signing.key().serialize_der();
        MemberSigner::new(&self.cluster, &key).ok_or(AuthorityError::Key)
    }

    /// Signs a certificate for a member's public key. Returns it followed by the authority's, in PEM.
    ///
    /// # Errors
    /// Returns [`AuthorityError::Key`] if the key is not the member's, and [`AuthorityError::Make`].
    pub fn node(&self, member: &Member, public_key: &[u8]) -> Result<String, AuthorityError> {
        if key_sum(public_key)? != member.key {
            return Err(AuthorityError::Key);
        }
        let leaf = leaf(&member.user(), [host_name(&member.id)], DAYS, &PURPOSES)?;
        self.sign(&leaf, &Point(public_key.to_vec()))
    }

    /// Creates certificate and key of etcd's user `root`, which creates the members' users.
    ///
    /// # Errors
    /// Returns [`AuthorityError::Make`].
    pub fn etcd_root(&self) -> Result<String, AuthorityError> {
        let key = KeyPair::generate()?;
        let certificate = self.sign(
            &leaf("root", Vec::<String>::new(), CA_DAYS, &PURPOSES)?,
            &key,
        )?;
        Ok(format!("{certificate}{}", key.serialize_pem()))
    }

    /// Creates certificate and key for etcd on these hosts.
    ///
    /// # Errors
    /// Returns [`AuthorityError::Make`].
    pub fn etcd(&self, hosts: &[String]) -> Result<(String, String), AuthorityError> {
        let key = KeyPair::generate()?;
        let leaf = leaf("etcd of a cube cluster", hosts, CA_DAYS, &PURPOSES)?;
        Ok((self.sign(&leaf, &key)?, key.serialize_pem()))
    }

    fn sign(
        &self,
        leaf: &CertificateParams,
        key: &impl PublicKeyData,
    ) -> Result<String, AuthorityError> {
        let pem = self.signing.sign(leaf, key)?.pem();
        Ok(format!("{pem}{}", self.signing.certificate()))
    }
}

/// The authority's name is derived from the cluster's, so its key alone is enough to sign further certificates.
fn params(cluster: &str) -> CertificateParams {
    pki::authority(&format!("cube cluster {cluster}"), CA_DAYS)
}
