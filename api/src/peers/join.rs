//! How a host becomes a node. The founder issues a join token and shows it once. In exchange for it the host gets a
//! certificate, the key of home tags and the addresses of etcd.
//!
//! ```text
//! founder: cube-api cluster token ─► tokens/<SHA-256 of the secret>, one use, one hour
//! host:    cube-api cluster join TOKEN ─ TLS; the authority's SHA-256 is in the token ─► POST /cluster/join
//! founder: check token ─► sign the member record, write it and a user to etcd ─► sign the certificate
//! ```

mod ask;

use std::{
    io,
    net::SocketAddr,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use cluster::{Applicant, ClusterError, HomeSlot, Member, NodeId};
use model::hex;
use pki::KeyPair;
use rustls::pki_types::{PrivateKeyDer, pem::PemObject};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{
    authority::{Authority, AuthorityError, key_sum},
    tls::{OWN, PeerTlsError, certificates},
};
use crate::{
    auth::random_hex,
    node::settings::{Dir, ETCD_ROOT, Settings, SettingsError, Shared},
};
use ask::ask;

/// Hex digits of [`Member::identity`].
const IDENTITY: usize = 32;
const TOKENS: &str = "tokens";
const PREFIX: &str = "cube-join-1.";
/// Timeout of a join.
const LIMIT: Duration = Duration::from_secs(20);

/// An error in joining or in creating a token.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    #[error(transparent)]
    Tls(#[from] PeerTlsError),
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error(
        "this is not a join token: make one with `cube-api cluster token` on the founder's host"
    )]
    Malformed,
    #[error("the token is unknown, expired or used: make another with `cube-api cluster token`")]
    Spent,
    #[error("cannot reach the founder at {address}")]
    Unreachable {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("the identity of the host is not {IDENTITY} hex digits")]
    Identity,
    #[error("the founder refused: {0}")]
    Refused(String),
    #[error("cannot read the boot of this host from /proc/sys/kernel/random/boot_id")]
    Boot(#[source] cluster::NameError),
    #[error("cannot create an id: the kernel provides no random numbers")]
    Random(#[from] getrandom::Error),
}

/// The content of a token.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Token {
    node: NodeId,
    address: SocketAddr,
    /// SHA-256 of the authority's certificate (DER), in hex.
    authority: String,
    secret: String,
}

#[derive(Serialize, Deserialize)]
struct Kept {
    expires_unix_s: u64,
}

/// Body of `POST /cluster/join`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Join {
    secret: String,
    pub(crate) node: NodeId,
    pub(crate) identity: String,
    public_key: String,
}

impl Join {
    /// Checks the parts of a host's member record.
    ///
    /// # Errors
    /// Returns [`JoinError::Identity`] or [`AuthorityError::Key`] if they are malformed.
    pub(crate) fn applicant(&self) -> Result<Applicant, JoinError> {
        let is_hex = self.identity.bytes().all(|b| b.is_ascii_hexdigit());
        if self.identity.len() != IDENTITY || !is_hex {
            return Err(JoinError::Identity);
        }
        Ok(Applicant {
            id: self.node.clone(),
            identity: self.identity.clone(),
            key: key_sum(&point(&self.public_key)?)?,
        })
    }
}

/// Body of `POST /cluster/renew`. The public key must equal the one in the member record.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Renew {
    public_key: String,
}

/// The response to both.
#[derive(Serialize, Deserialize)]
pub(crate) struct Signed {
    certificate: String,
    authority: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    shared: Option<Shared>,
    #[serde(skip_serializing_if = "Option::is_none")]
    member: Option<Member>,
}

/// Creates a token for one host.
///
/// # Errors
/// Returns [`JoinError`] if this node does not have the authority's key, or a file cannot be written.
pub fn token(dir: &Dir, valid: Duration) -> Result<String, JoinError> {
    let settings = dir.load()?;
    Authority::load(dir, &settings.cluster)?;
    let secret = random_hex::<16>()?;
    let kept = Kept {
        expires_unix_s: now_unix_s() + valid.as_secs(),
    };
    dir.below(TOKENS)?;
    let bytes = serde_json::to_vec(&kept).unwrap_or_default();
    dir.write(&file_of(&secret), &bytes)?;
    let token = Token {
        node: settings.node,
        address: settings.address,
        authority: fingerprint(&dir.read("ca.crt")?)?,
        secret,
    };
    let json = serde_json::to_vec(&token).unwrap_or_default();
    Ok(format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(json)))
}

fn read_token(text: &str) -> Result<Token, JoinError> {
    let encoded = text
        .trim()
        .strip_prefix(PREFIX)
        .ok_or(JoinError::Malformed)?;
    let json = URL_SAFE_NO_PAD
        .decode(encoded)
        .map_err(|_| JoinError::Malformed)?;
    serde_json::from_slice(&json).map_err(|_| JoinError::Malformed)
}

fn file_of(secret: &str) -> String {
    format!("{TOKENS}/{}", hex(&Sha256::digest(secret.as_bytes())))
}

fn fingerprint(pem: &str) -> Result<String, PeerTlsError> {
    let found = certificates(pem, "ca.crt")?;
    Ok(hex(&Sha256::digest(&found[0])))
}

fn now_unix_s() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// Redeems a token. No other request can use it afterwards.
///
/// # Errors
/// Returns [`JoinError::Spent`] if it is unknown, expired or used.
pub(crate) fn take_token(dir: &Dir, join: &Join) -> Result<(), JoinError> {
    if join.secret.len() != 32 || !join.secret.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(JoinError::Spent);
    }
    let name = file_of(&join.secret);
    let kept = dir.read(&name).map_err(|_| JoinError::Spent)?;
    // Of concurrent requests, the one that removes the file redeems the token.
    if !dir.remove(&name)? {
        return Err(JoinError::Spent);
    }
    let kept: Kept = serde_json::from_str(&kept).map_err(|_| JoinError::Spent)?;
    if kept.expires_unix_s < now_unix_s() {
        return Err(JoinError::Spent);
    }
    Ok(())
}

/// Signs the key of a joining node.
pub(crate) fn sign_join(
    authority: &Authority,
    dir: &Dir,
    settings: &Settings,
    join: &Join,
    member: Member,
) -> Result<Signed, JoinError> {
    let mut signed = sign(authority, dir, &member, &join.public_key)?;
    signed.shared = Some(settings.shared());
    signed.member = Some(member);
    Ok(signed)
}

pub(crate) fn sign_renewal(
    authority: &Authority,
    dir: &Dir,
    member: &Member,
    renew: &Renew,
) -> Result<Signed, JoinError> {
    sign(authority, dir, member, &renew.public_key)
}

fn sign(
    authority: &Authority,
    dir: &Dir,
    member: &Member,
    public_key: &str,
) -> Result<Signed, JoinError> {
    Ok(Signed {
        certificate: authority.node(member, &point(public_key)?)?,
        authority: dir.read("ca.crt")?,
        shared: None,
        member: None,
    })
}

fn point(public_key: &str) -> Result<Vec<u8>, AuthorityError> {
    let point = URL_SAFE_NO_PAD.decode(public_key);
    point.map_err(|_| AuthorityError::Key)
}

/// This node's key, for a new certificate.
pub(crate) struct NodeKey(KeyPair);

impl NodeKey {
    fn generate() -> Result<Self, AuthorityError> {
        Ok(Self(KeyPair::generate()?))
    }

    /// Loads the node's key. The member record names it, so a renewal keeps it.
    pub(crate) fn load(dir: &Dir) -> Result<Self, JoinError> {
        let key = PrivateKeyDer::from_pem_slice(dir.read(OWN)?.as_bytes());
        let key = key.map_err(|_| PeerTlsError::Pem(OWN))?;
        Ok(Self(KeyPair::try_from(&key).map_err(AuthorityError::from)?))
    }

    fn public(&self) -> String {
        URL_SAFE_NO_PAD.encode(self.0.public_key_raw())
    }

    pub(crate) fn renewal(&self) -> Renew {
        Renew {
            public_key: self.public(),
        }
    }

    /// Writes certificate and key.
    pub(crate) fn keep(&self, dir: &Dir, signed: &Signed) -> Result<(), SettingsError> {
        self.store(dir, &signed.certificate)
    }

    fn store(&self, dir: &Dir, certificate: &str) -> Result<(), SettingsError> {
        let both = format!("{certificate}{}", self.0.serialize_pem());
        dir.write(OWN, both.as_bytes())
    }
}

/// Founds a cluster: creates its authority, the certificates of this node and of its etcd, and the settings. Sends
/// nothing.
///
/// # Errors
/// Returns [`JoinError`] if settings exist already or a file cannot be created.
pub fn init(
    dir: &Dir,
    node: NodeId,
    address: SocketAddr,
    etcd: Vec<String>,
) -> Result<Settings, JoinError> {
    dir.create()?;
    let id = random_hex::<16>()?;
    let (a, b, c, d, e) = (&id[..8], &id[8..12], &id[13..16], &id[17..20], &id[20..]);
    // UUID version 8 (RFC 9562): the format is ours.
    let cluster = format!("{a}-{b}-8{c}-a{d}-{e}");
    let authority = Authority::create(dir, &cluster)?;
    let (key, identity) = (NodeKey::generate()?, random_hex::<16>()?);
    let applicant = Applicant {
        id: node.clone(),
        identity: identity.clone(),
        key: key_sum(key.0.public_key_raw())?,
    };
    let slot = HomeSlot::new(0).ok_or(JoinError::Malformed)?;
    let member = authority.signer()?.member(&applicant, slot);
    key.store(dir, &authority.node(&member, key.0.public_key_raw())?)?;
    dir.write(ETCD_ROOT, authority.etcd_root()?.as_bytes())?;
    let (certificate, etcd_key) = authority.etcd(&hosts(&etcd))?;
    dir.write("etcd.crt", certificate.as_bytes())?;
    dir.write("etcd.key", etcd_key.as_bytes())?;
    let shared = Shared {
        cluster,
        etcd,
        home_key: random_hex::<32>()?,
    };
    let settings = Settings::new(shared, node, identity, address);
    dir.store(&settings)?;
    Ok(settings)
}

/// The hosts of these URLs without duplicates, and the loopback address.
fn hosts(urls: &[String]) -> Vec<String> {
    let mut hosts = vec!["127.0.0.1".to_owned()];
    for url in urls {
        let authority = url.split("://").nth(1).unwrap_or(url);
        let authority = authority.split('/').next().unwrap_or_default();
        let host = match authority.strip_prefix('[') {
            Some(v6) => v6.split(']').next().unwrap_or_default(),
            None => authority.split(':').next().unwrap_or_default(),
        };
        if !host.is_empty() && !hosts.iter().any(|known| known == host) {
            hosts.push(host.to_owned());
        }
    }
    hosts
}

/// Joins the cluster that issued a token.
///
/// # Errors
/// Returns [`JoinError`] if settings exist already, the founder does not respond, or it refuses the token or the name.
pub async fn join(
    dir: &Dir,
    token: &str,
    node: NodeId,
    address: SocketAddr,
) -> Result<Settings, JoinError> {
    let token = read_token(token)?;
    dir.create()?;
    let (key, identity) = (NodeKey::generate()?, random_hex::<16>()?);
    let body = Join {
        secret: token.secret.clone(),
        node: node.clone(),
        identity: identity.clone(),
        public_key: key.public(),
    };
    let body = serde_json::to_vec(&body).unwrap_or_default();
    let asked = tokio::time::timeout(LIMIT, ask(&token, body)).await;
    let late = |_| JoinError::Unreachable {
        address: token.address,
        source: io::ErrorKind::TimedOut.into(),
    };
    let signed = asked.map_err(late)??;
    let malformed = || JoinError::Refused("it sent no settings".to_owned());
    let shared = signed.shared.clone().ok_or_else(malformed)?;
    if fingerprint(&signed.authority)? != token.authority {
        return Err(JoinError::Refused("it sent another authority".to_owned()));
    }
    dir.write("ca.crt", signed.authority.as_bytes())?;
    key.keep(dir, &signed)?;
    let mut settings = Settings::new(shared, node, identity, address);
    settings.member = Some(signed.member.clone().ok_or_else(malformed)?);
    dir.store(&settings)?;
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn founder(state: &std::path::Path) -> (Dir, Settings) {
        let dir = Dir::of(state);
        let address = "127.0.0.1:9".parse().unwrap();
        let etcd = vec![
            "https://10.0.0.1:2379".to_owned(),
            "https://[fd00::1]:2379/".to_owned(),
        ];
        let settings = init(&dir, "a".parse().unwrap(), address, etcd).unwrap();
        (dir, settings)
    }

    fn request(token: &Token) -> Join {
        Join {
            secret: token.secret.clone(),
            node: "b".parse().unwrap(),
            identity: "0a".repeat(16),
            public_key: NodeKey::generate().unwrap().public(),
        }
    }

    #[test]
    fn a_token_is_used_once_and_expires() {
        let state = tempfile::tempdir().unwrap();
        let (dir, settings) = founder(state.path());
        let text = token(&dir, Duration::from_secs(60)).unwrap();
        let made = read_token(&text).unwrap();
        let join = request(&made);
        take_token(&dir, &join).unwrap();
        assert!(matches!(take_token(&dir, &join), Err(JoinError::Spent)));
        let authority = Authority::load(&dir, &settings.cluster).unwrap();
        let slot = HomeSlot::new(1).unwrap();
        let signer = authority.signer().unwrap();
        let member = signer.member(&join.applicant().unwrap(), slot);
        // A renewal requires the key of the member record.
        let renewal = NodeKey::generate().unwrap().renewal();
        assert!(sign_renewal(&authority, &dir, &member, &renewal).is_err());
        let signed = sign_join(&authority, &dir, &settings, &join, member).unwrap();
        assert!(
            signed.shared.is_some() && fingerprint(&signed.authority).unwrap() == made.authority
        );
        let mut other = request(&made);
        other.secret = "0".repeat(32);
        assert!(matches!(take_token(&dir, &other), Err(JoinError::Spent)));
        other.secret = "../../cluster.json".to_owned();
        assert!(matches!(take_token(&dir, &other), Err(JoinError::Spent)));
        assert!(dir.has("cluster.json"));
        let late = read_token(&token(&dir, Duration::ZERO).unwrap()).unwrap();
        std::thread::sleep(Duration::from_millis(1100));
        assert!(matches!(
            take_token(&dir, &request(&late)),
            Err(JoinError::Spent)
        ));
    }

    #[test]
    fn malformed_tokens_and_keys_are_refused() {
        let state = tempfile::tempdir().unwrap();
        let (dir, settings) = founder(state.path());
        for text in ["", "cube-join-1.", "cube-join-1.!!", "x"] {
            assert!(read_token(text).is_err(), "{text}");
        }
        let authority = Authority::load(&dir, &settings.cluster).unwrap();
        let node: NodeId = "b".parse().unwrap();
        for key in [&[][..], &[4; 64], &[2; 65]] {
            assert!(key_sum(key).is_err());
        }
        let mut join = request(&read_token(&token(&dir, Duration::ZERO).unwrap()).unwrap());
        let applicant = join.applicant().unwrap();
        let member = authority
            .signer()
            .unwrap()
            .member(&applicant, HomeSlot::new(1).unwrap());
        let other = NodeKey::generate().unwrap();
        assert!(authority.node(&member, other.0.public_key_raw()).is_err());
        // The identity is part of a user name in etcd.
        for identity in ["", "root", &"x".repeat(32)] {
            join.identity = identity.to_owned();
            assert!(matches!(join.applicant(), Err(JoinError::Identity)));
        }
        assert!(
            init(&dir, node, settings.address, Vec::new()).is_err(),
            "settings are overwritten"
        );
    }

    #[test]
    fn certificates_of_etcd_name_its_hosts() {
        let urls = [
            "https://10.0.0.1:2379",
            "https://[fd00::1]:2379/",
            "https://e.test",
        ];
        let urls: Vec<_> = urls.iter().map(|url| (*url).to_owned()).collect();
        assert_eq!(hosts(&urls), ["127.0.0.1", "10.0.0.1", "fd00::1", "e.test"]);
    }
}
