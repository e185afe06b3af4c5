//! TLS between nodes: both sides present a certificate of the cluster's authority.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use cluster::{Member, MemberVerifier, NodeId};
use model::hex;
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    server::{ParsedCertificate, WebPkiClientVerifier},
    sign::CertifiedKey,
};

use sha2::{Digest, Sha256};

use crate::node::settings::{Dir, SettingsError};

use super::authority::host_name;

/// Length of an uncompressed point of P-256 (SEC 1, 2.3.3), which ends its SubjectPublicKeyInfo.
const POINT: usize = 65;
/// This node's certificate, the authority's certificate, and the key. One file, so that a renewal replaces all of them
/// atomically.
pub const OWN: &str = "node.pem";

/// Why the certificates of the cluster cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PeerTlsError {
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error("{0} in the cluster's settings is not PEM of the expected type")]
    Pem(&'static str),
    #[error("cannot use the cluster's certificates")]
    Unusable(#[source] rustls::Error),
    #[error("cannot check clients by the cluster's authority: {0}")]
    Verifier(String),
}

/// This node's current certificate, for both directions.
#[derive(Clone)]
pub struct PeerTls(Arc<Mutex<Both>>);

#[derive(Clone)]
struct Both {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
}

impl std::fmt::Debug for PeerTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PeerTls")
    }
}

impl PeerTls {
    /// # Errors
    /// Returns [`PeerTlsError`] if a file is missing or malformed.
    pub fn load(dir: &Dir) -> Result<Self, PeerTlsError> {
        Ok(Self(Arc::new(Mutex::new(both(dir)?))))
    }

    /// Reloads the files for new connections.
    ///
    /// # Errors
    /// Returns [`PeerTlsError`]; the previous certificate then stays in use.
    pub fn reload(&self, dir: &Dir) -> Result<(), PeerTlsError> {
        let both = both(dir)?;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = both;
        Ok(())
    }

    pub(crate) fn server(&self) -> Arc<ServerConfig> {
        let both = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&both.server)
    }

    pub(super) fn client(&self) -> Arc<ClientConfig> {
        let both = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&both.client)
    }
}

fn both(dir: &Dir) -> Result<Both, PeerTlsError> {
    let (authority, own) = (dir.read("ca.crt")?, dir.read(OWN)?);
    let provider = Arc::new(ring::default_provider());
    let mut roots = RootCertStore::empty();
    for certificate in certificates(&authority, "ca.crt")? {
        roots.add(certificate).map_err(PeerTlsError::Unusable)?;
    }
    let roots = Arc::new(roots);
    let key = PrivateKeyDer::from_pem_slice(own.as_bytes());
    let key = key.map_err(|_| PeerTlsError::Pem(OWN))?;
    let chain = certificates(&own, OWN)?;
    // Checks that certificate and key match.
    CertifiedKey::from_der(chain.clone(), key.clone_key(), &provider)
        .map_err(PeerTlsError::Unusable)?;
    // A host that joins has no certificate yet. It can only join.
    let clients = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), provider.clone())
        .allow_unauthenticated()
        .build()
        .map_err(|why| PeerTlsError::Verifier(why.to_string()))?;
    let mut server = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(PeerTlsError::Unusable)?
        .with_client_cert_verifier(clients)
        .with_single_cert(chain.clone(), key.clone_key())
        .map_err(PeerTlsError::Unusable)?;
    server.alpn_protocols = vec![b"http/1.1".to_vec()];
    let mut client = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(PeerTlsError::Unusable)?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)
        .map_err(PeerTlsError::Unusable)?;
    client.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Both {
        server: Arc::new(server),
        client: Arc::new(client),
    })
}

pub(super) fn certificates(
    pem: &str,
    what: &'static str,
) -> Result<Vec<CertificateDer<'static>>, PeerTlsError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) | Err(_) => Err(PeerTlsError::Pem(what)),
    }
}

/// SHA-256 of the public key in a certificate, in hex, as in [`Member::key`].
pub(super) fn key_of(certificate: &CertificateDer<'_>) -> Option<String> {
    let parsed = ParsedCertificate::try_from(certificate).ok()?;
    Some(hex(&Sha256::digest(parsed.subject_public_key_info())))
}

/// The verifier of certificates that the authority in `dir` has signed.
pub(super) fn verifier(dir: &Dir, cluster: &str) -> Result<MemberVerifier, PeerTlsError> {
    let authority = certificates(&dir.read("ca.crt")?, "ca.crt")?;
    let parsed = ParsedCertificate::try_from(&authority[0]).map_err(PeerTlsError::Unusable)?;
    let spki = parsed.subject_public_key_info();
    let point = spki.len().checked_sub(POINT).map(|at| &spki[at..]);
    let point = point.ok_or(PeerTlsError::Pem("ca.crt"))?;
    Ok(MemberVerifier::new(cluster, point))
}

/// [`Member::key`] of the node whose files are in `dir`.
pub(super) fn own_key(dir: &Dir) -> Result<String, PeerTlsError> {
    let own = certificates(&dir.read(OWN)?, OWN)?;
    key_of(&own[0]).ok_or(PeerTlsError::Pem(OWN))
}

/// The node at the other end of a connection to this one.
#[derive(Debug)]
pub struct Peer {
    /// Verified against the authority, by this process or its predecessor. `None` if the client presented none.
    certificate: Option<CertificateDer<'static>>,
    shown: OnceLock<Shown>,
}

/// Identity in a certificate.
#[derive(Debug)]
struct Shown {
    name: NodeId,
    /// As in [`Member::key`].
    key: String,
}

impl Peer {
    #[must_use]
    pub fn new(certificate: Option<CertificateDer<'static>>) -> Self {
        Self {
            certificate,
            shown: OnceLock::new(),
        }
    }

    /// The certificate that the peer presented, for the process that takes over its connection.
    pub(crate) fn certificate(&self) -> Option<&CertificateDer<'static>> {
        self.certificate.as_ref()
    }

    /// The member with this certificate: name and key must be those of its current record.
    pub(super) fn find(&self, members: &BTreeMap<NodeId, Member>) -> Option<&NodeId> {
        if self.shown.get().is_none() {
            let certificate = self.certificate.as_ref()?;
            let parsed = ParsedCertificate::try_from(certificate).ok()?;
            let is_of = |node: &&NodeId| {
                let name = ServerName::try_from(host_name(node));
                name.is_ok_and(|name| rustls::client::verify_server_name(&parsed, &name).is_ok())
            };
            let shown = Shown {
                name: members.keys().find(is_of)?.clone(),
                key: key_of(certificate)?,
            };
            let _ = self.shown.set(shown);
        }
        let shown = self.shown.get()?;
        let member = members.get(&shown.name)?;
        (member.key == shown.key).then_some(&shown.name)
    }
}

#[cfg(test)]
mod tests {
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    use super::*;
    use crate::peers::{
        authority::{Authority, key_sum},
        join,
    };

    fn id(name: &str) -> NodeId {
        name.parse().unwrap()
    }

    fn founder(state: &std::path::Path) -> (Dir, Authority) {
        let dir = Dir::of(state);
        let address = "127.0.0.1:9".parse().unwrap();
        let etcd = vec!["http://127.0.0.1:2379".to_owned()];
        let settings = join::init(&dir, id("a"), address, etcd).unwrap();
        let authority = Authority::load(&dir, &settings.cluster).unwrap();
        (dir, authority)
    }

    /// The settings of a node with this certificate and key.
    fn with(state: &std::path::Path, ca: &Dir, own: &str) -> Dir {
        let dir = Dir::of(state);
        dir.create().unwrap();
        dir.write("ca.crt", ca.read("ca.crt").unwrap().as_bytes())
            .unwrap();
        dir.write(OWN, own.as_bytes()).unwrap();
        dir
    }

    /// Certificate and key of a node, and its record.
    fn signed(authority: &Authority, node: &str) -> (String, Member) {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
        let applicant = cluster::Applicant {
            id: id(node),
            identity: "i".to_owned(),
            key: key_sum(key.public_key_raw()).unwrap(),
        };
        let slot = cluster::HomeSlot::new(1).unwrap();
        let member = authority.signer().unwrap().member(&applicant, slot);
        let certificate = authority.node(&member, key.public_key_raw()).unwrap();
        (format!("{certificate}{}", key.serialize_pem()), member)
    }

    /// The certificate that the server gets from a client that expects a server of this name.
    async fn shake(
        server: &PeerTls,
        client: Arc<ClientConfig>,
        name: &str,
    ) -> Result<Option<CertificateDer<'static>>, String> {
        let (near, far) = tokio::io::duplex(1 << 16);
        let accept = TlsAcceptor::from(server.server()).accept(far);
        let name = ServerName::try_from(host_name(&id(name))).unwrap();
        let connect = TlsConnector::from(client).connect(name, near);
        let (accepted, connected) = tokio::join!(accept, connect);
        connected.map_err(|why| why.to_string())?;
        let accepted = accepted.map_err(|why| why.to_string())?;
        let chain = accepted.get_ref().1.peer_certificates();
        Ok(chain.and_then(<[_]>::first).cloned())
    }

    #[tokio::test]
    async fn a_member_is_known_by_its_certificate_and_nothing_else_is_one() {
        let [a, b, other, etcd] = [(); 4].map(|()| tempfile::tempdir().unwrap());
        let (dir, authority) = founder(a.path());
        let server = PeerTls::load(&dir).unwrap();
        let (own, record) = signed(&authority, "b");
        let client = PeerTls::load(&with(b.path(), &dir, &own)).unwrap();
        let member = |record: &Member| BTreeMap::from([(record.id.clone(), record.clone())]);
        let members = member(&record);
        assert!(verifier(&dir, "c").is_ok_and(|verifier| !verifier.is_signed(&record)));

        let shown = shake(&server, client.client(), "a").await.unwrap();
        let peer = Peer::new(shown);
        assert_eq!(peer.find(&BTreeMap::new()), None, "it is no member yet");
        assert_eq!(peer.find(&members), Some(&id("b")));
        // Removed, and after another host has joined under its name.
        assert_eq!(peer.find(&BTreeMap::new()), None);
        let (_, successor) = signed(&authority, "b");
        assert_eq!(peer.find(&member(&successor)), None);
        assert_eq!(
            Peer::new(peer.certificate.clone()).find(&member(&successor)),
            None
        );
        // A client detects that it has reached another node.
        assert!(shake(&server, client.client(), "b").await.is_err());

        // etcd's certificate has the same authority, but names no node.
        let own = format!(
            "{}{}",
            dir.read("etcd.crt").unwrap(),
            dir.read("etcd.key").unwrap()
        );
        let client = PeerTls::load(&with(etcd.path(), &dir, &own)).unwrap();
        let shown = shake(&server, client.client(), "a").await.unwrap();
        assert!(shown.is_some() && Peer::new(shown).find(&members).is_none());

        // A node of the same name in another cluster is refused on both sides.
        let (foreign, _) = founder(other.path());
        let client = PeerTls::load(&foreign).unwrap();
        assert!(shake(&server, client.client(), "a").await.is_err());

        // A host without a certificate may connect to join, but is not a member.
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&dir.read("ca.crt").unwrap(), "ca.crt").unwrap() {
            roots.add(certificate).unwrap();
        }
        let plain = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let shown = shake(&server, Arc::new(plain), "a").await.unwrap();
        assert!(Peer::new(shown).find(&members).is_none());
    }

    #[test]
    fn a_renewed_certificate_replaces_the_former_one() {
        let a = tempfile::tempdir().unwrap();
        let (dir, authority) = founder(a.path());
        let tls = PeerTls::load(&dir).unwrap();
        let before = tls.server();
        dir.write(OWN, signed(&authority, "a").0.as_bytes())
            .unwrap();
        tls.reload(&dir).unwrap();
        assert!(!Arc::ptr_eq(&before, &tls.server()));
        dir.write(OWN, b"x").unwrap();
        let now = tls.server();
        assert!(tls.reload(&dir).is_err() && Arc::ptr_eq(&now, &tls.server()));
    }
}
