//! A sandbox's SOCKS5 proxy (`network.egressProxy`), through which all its TCP connections leave.
//!
//! The password is encrypted before the option is stored with the sandbox, and decrypted for each connection. The
//! proxy's name is also resolved for each connection. Its address must be neither forbidden to sandboxes nor one of
//! this host, because clients could otherwise use this option to reach it. With `tls`, the connection to the proxy uses
//! TLS.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use ::egress::control::{Credentials, Way, WayTls};
use netisolation::{ForbiddenAddresses, Refused};
use rest::NetworkConfig;
use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use tokio::{net::lookup_host, time::timeout};

use super::session::LOOKUP;
use crate::secrets::Secrets;

/// Longest user name and password, in bytes (RFC 1929).
const MAX_CREDENTIAL: usize = 255;
/// Longest host name, in bytes.
const MAX_HOST: usize = 253;

/// Maximum size of a text with certificates in bytes, and maximum number of certificates.
const MAX_CA: usize = 64 << 10;
const MAX_CERTIFICATES: usize = 32;

/// Why the option is rejected.
#[derive(Debug, thiserror::Error)]
pub enum SocksOptionError {
    #[error(
        "network.egressProxy is not {{\"address\": \"host:port\", \"username\"?, \"password\"?, \"tls\"?}}"
    )]
    Form,
    #[error("invalid network.egressProxy.address {0:?}: write host:port")]
    Address(String),
    #[error("network.egressProxy.address: {0}: the operator denies it to all sandboxes")]
    Refused(#[from] Refused),
    #[error(
        "network.egressProxy needs both username and password, each of 1 to {MAX_CREDENTIAL} bytes, or neither"
    )]
    Credentials,
    #[error(
        "network.egressProxy.tls is not {{\"enabled\": true or false, \"serverName\"?, \"caCert\"?}}"
    )]
    Tls,
    #[error("invalid network.egressProxy.tls.serverName {0:?}: write a host name or an IP address")]
    ServerName(String),
    #[error(
        "network.egressProxy.tls.caCert must be 1 to {MAX_CERTIFICATES} certificates of authorities in PEM, of at most {MAX_CA} bytes"
    )]
    CaCert,
}

/// The option as sent by clients.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    address: String,
    username: Option<String>,
    password: Option<String>,
    tls: Option<Json>,
}

/// TLS settings of the proxy, as sent by clients and as stored.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Tls {
    enabled: bool,
    /// The name in the proxy's certificate. Defaults to the host in the address.
    #[serde(skip_serializing_if = "Option::is_none")]
    server_name: Option<String>,
    /// Authorities in PEM that replace those of the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    ca_cert: Option<String>,
}

/// The option as stored.
#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    address: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    username: Option<String>,
    /// The encrypted password. Not shown to clients.
    #[serde(skip_serializing_if = "Option::is_none")]
    sealed: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tls: Option<Tls>,
}

/// Whether the options contain a proxy.
#[must_use]
pub fn is_given(network: &NetworkConfig) -> bool {
    network.egress_proxy.as_ref().is_some_and(|p| !p.is_null())
}

/// Checks the option of a request.
///
/// # Errors
/// Returns [`SocksOptionError`].
pub fn check(option: &Json, forbidden: &ForbiddenAddresses) -> Result<(), SocksOptionError> {
    read(option, forbidden).map(drop)
}

fn read(option: &Json, forbidden: &ForbiddenAddresses) -> Result<Asked, SocksOptionError> {
    let asked: Asked =
        serde_json::from_value(option.clone()).map_err(|_| SocksOptionError::Form)?;
    let (host, port) = host_and_port(&asked.address)?;
    if let Some(tls) = read_tls(asked.tls.as_ref())? {
        check_tls(host, &tls)?;
    }
    if let Ok(address) = host.parse::<IpAddr>() {
        forbidden.check_connection((address, port).into())?;
    }
    let is_valid = |text: &String| (1..=MAX_CREDENTIAL).contains(&text.len());
    match (&asked.username, &asked.password) {
        (None, None) => {}
        (Some(user), Some(password)) if is_valid(user) && is_valid(password) => {}
        _ => return Err(SocksOptionError::Credentials),
    }
    Ok(asked)
}

fn read_tls(option: Option<&Json>) -> Result<Option<Tls>, SocksOptionError> {
    let tls = option.map(Tls::deserialize);
    tls.transpose().map_err(|_| SocksOptionError::Tls)
}

fn check_tls(host: &str, tls: &Tls) -> Result<(), SocksOptionError> {
    let name = tls.server_name.as_deref().unwrap_or(host);
    if ServerName::try_from(name).is_err() {
        let shown = name.chars().take(64).collect();
        return Err(SocksOptionError::ServerName(shown));
    }
    let Some(text) = &tls.ca_cert else {
        return Ok(());
    };
    if text.len() > MAX_CA {
        return Err(SocksOptionError::CaCert);
    }
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(text.as_bytes()) {
        let added = certificate.ok().and_then(|found| roots.add(found).ok());
        added.ok_or(SocksOptionError::CaCert)?;
    }
    match roots.len() {
        1..=MAX_CERTIFICATES => Ok(()),
        _ => Err(SocksOptionError::CaCert),
    }
}

fn host_and_port(address: &str) -> Result<(&str, u16), SocksOptionError> {
    let wrong = || SocksOptionError::Address(address.chars().take(64).collect());
    let (host, port) = address.rsplit_once(':').ok_or_else(wrong)?;
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    let host = match bare {
        Some(bare) if bare.parse::<std::net::Ipv6Addr>().is_ok() => bare,
        Some(_) => return Err(wrong()),
        None => host,
    };
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    let is_host = bare.is_some() || (!host.is_empty() && host.bytes().all(is_name));
    let is_number = port.bytes().all(|byte| byte.is_ascii_digit());
    match port.parse() {
        Ok(port) if port > 0 && is_host && is_number && host.len() <= MAX_HOST => Ok((host, port)),
        Ok(_) | Err(_) => Err(wrong()),
    }
}

/// Replaces the password in the options with its encrypted form. The option must have passed [`check`].
///
/// # Errors
/// Returns an error if the password cannot be encrypted.
pub fn seal(network: &mut NetworkConfig, secrets: &Secrets) -> io::Result<()> {
    let Some(option) = network.egress_proxy.take().filter(|p| !p.is_null()) else {
        return Ok(());
    };
    let asked: Asked = serde_json::from_value(option)?;
    let sealed = asked.password.map(|password| secrets.seal_text(&password));
    let kept = Kept {
        tls: read_tls(asked.tls.as_ref()).map_err(io::Error::other)?,
        address: asked.address,
        username: asked.username,
        sealed: sealed.transpose()?,
    };
    network.egress_proxy = Some(serde_json::to_value(kept)?);
    Ok(())
}

/// The options without the password.
#[must_use]
pub fn shown(mut network: NetworkConfig) -> NetworkConfig {
    if let Some(Json::Object(option)) = &mut network.egress_proxy {
        option.remove("sealed");
    }
    network
}

/// How connections of a sandbox with these options are routed out.
pub(super) async fn way(
    option: Option<&Json>,
    secrets: &Secrets,
    forbidden: &ForbiddenAddresses,
) -> Way {
    let failed = |reason: String| Way::Failed { reason };
    let Some(option) = option else {
        return Way::Direct;
    };
    let Ok(kept) = serde_json::from_value::<Kept>(option.clone()) else {
        return failed("its settings cannot be read".to_owned());
    };
    let credentials = match (kept.username, kept.sealed) {
        (Some(user), Some(sealed)) => match secrets.open_text(&sealed) {
            Some(password) => Some(Credentials {
                user,
                password: password.to_string(),
            }),
            None => return failed("its password cannot be decrypted".to_owned()),
        },
        _ => None,
    };
    let (host, port) = match host_and_port(&kept.address) {
        Ok(place) => place,
        Err(why) => return failed(why.to_string()),
    };
    let found = match timeout(LOOKUP, lookup_host((host, port))).await {
        Ok(Ok(found)) => found.collect::<Vec<SocketAddr>>(),
        Ok(Err(why)) => return failed(format!("{host} cannot be resolved: {why}")),
        Err(_) => return failed(format!("{host} could not be resolved in time")),
    };
    let allowed = found
        .iter()
        .filter(|address| forbidden.check_connection(**address).is_ok());
    let addresses: Vec<_> = allowed.copied().collect();
    if addresses.is_empty() {
        return failed(format!("{host} has no address that sandboxes may reach"));
    }
    let tls = kept.tls.filter(|tls| tls.enabled).map(|tls| WayTls {
        server_name: tls.server_name.unwrap_or_else(|| host.to_owned()),
        authorities: tls.ca_cert,
    });
    Way::Socks {
        addresses,
        credentials,
        tls,
    }
}

#[cfg(test)]
mod tests {
    use netisolation::Destinations;
    use serde_json::json;

    use super::*;

    #[test]
    fn addresses_and_credentials_are_checked() {
        let check = |option: Json| super::check(&option, &ForbiddenAddresses::default());
        for good in [
            json!({"address": "proxy.example.com:1080"}),
            json!({"address": "203.0.113.9:1080", "username": "a", "password": "b"}),
            json!({"address": "[2606:4700::1]:1080", "username": null}),
        ] {
            assert!(check(good.clone()).is_ok(), "{good}");
        }
        for bad in [
            json!({}),
            json!("h:1"),
            json!({"address": "h:1", "more": 1}),
            json!({"address": "h"}),
            json!({"address": ":1"}),
            json!({"address": "h:0"}),
            json!({"address": "h:+1"}),
            json!({"address": "h:65536"}),
            json!({"address": "2606:4700::1:1080"}),
            json!({"address": "a@b:1"}),
            json!({"address": "h:1", "username": "a"}),
            json!({"address": "h:1", "password": "a"}),
            json!({"address": "h:1", "username": "", "password": "a"}),
            json!({"address": "h:1", "username": "a", "password": "b".repeat(256)}),
        ] {
            assert!(check(bad.clone()).is_err(), "{bad}");
        }
        let authority = authority();
        let tls = |tls: Json| check(json!({"address": "proxy.example.com:1080", "tls": tls}));
        for good in [
            json!(null),
            json!({"enabled": false}),
            json!({"enabled": true, "serverName": "other.example.com", "caCert": authority}),
            json!({"enabled": true, "serverName": "203.0.113.9", "caCert": null}),
        ] {
            assert!(tls(good.clone()).is_ok(), "{good}");
        }
        let many = authority.repeat(MAX_CERTIFICATES + 1);
        for (bad, part) in [
            (json!({}), "egressProxy.tls is not"),
            (json!({"enabled": "yes"}), "egressProxy.tls is not"),
            (
                json!({"enabled": true, "more": 1}),
                "egressProxy.tls is not",
            ),
            (
                json!({"enabled": true, "serverName": "a b"}),
                "tls.serverName \"a b\"",
            ),
            (json!({"enabled": true, "caCert": ""}), "tls.caCert"),
            (json!({"enabled": true, "caCert": "none"}), "tls.caCert"),
            (json!({"enabled": true, "caCert": many}), "tls.caCert"),
            (
                json!({"enabled": true, "caCert": "-".repeat(MAX_CA + 1)}),
                "tls.caCert",
            ),
        ] {
            let why = tls(bad.clone()).unwrap_err().to_string();
            assert!(why.contains(part), "{bad}: {why}");
        }
        for denied in ["127.0.0.1:1", "10.0.0.1:1", "169.254.169.254:80", "[::1]:1"] {
            let denied = check(json!({"address": denied}));
            assert!(
                matches!(denied, Err(SocksOptionError::Refused(_))),
                "{denied:?}"
            );
        }
    }

    fn authority() -> String {
        let mut params = rcgen::CertificateParams::default();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().unwrap();
        params.self_signed(&key).unwrap().pem()
    }

    #[tokio::test]
    async fn tls_to_the_proxy_is_kept_and_passed_on() {
        let dir = tempfile::tempdir().unwrap();
        let source = crate::secrets::KeySource::Generated;
        let secrets = Secrets::open(dir.path(), &source).unwrap();
        let forbidden = ForbiddenAddresses::default();
        let authority = authority();
        for (tls, expected) in [
            (json!({"enabled": false, "serverName": "a.test"}), None),
            (json!({"enabled": true}), Some(("203.0.113.9", None))),
            (
                json!({"enabled": true, "serverName": "a.test", "caCert": authority}),
                Some(("a.test", Some(&authority))),
            ),
        ] {
            let option = json!({"address": "203.0.113.9:1080", "tls": tls});
            let mut network = NetworkConfig {
                egress_proxy: Some(option.clone()),
                ..NetworkConfig::default()
            };
            seal(&mut network, &secrets).unwrap();
            let kept = network.egress_proxy.clone().unwrap();
            assert_eq!(shown(network).egress_proxy, Some(option));
            let Way::Socks { tls, .. } = way(Some(&kept), &secrets, &forbidden).await else {
                panic!("no way");
            };
            let expected = expected.map(|(name, authorities)| WayTls {
                server_name: name.to_owned(),
                authorities: authorities.cloned(),
            });
            assert_eq!(tls, expected);
        }
    }

    #[tokio::test]
    async fn a_password_is_kept_encrypted_and_not_shown() {
        let dir = tempfile::tempdir().unwrap();
        let source = crate::secrets::KeySource::Generated;
        let secrets = Secrets::open(dir.path(), &source).unwrap();
        let option =
            json!({"address": "203.0.113.9:1080", "username": "me", "password": "hunter2"});
        let mut network = NetworkConfig {
            egress_proxy: Some(option),
            ..NetworkConfig::default()
        };
        seal(&mut network, &secrets).unwrap();
        let kept = network.egress_proxy.clone().unwrap();
        assert!(!kept.to_string().contains("hunter2"));
        assert_eq!(
            shown(network).egress_proxy,
            Some(json!({"address": "203.0.113.9:1080", "username": "me"}))
        );
        let forbidden = ForbiddenAddresses::default();
        let Way::Socks {
            addresses,
            credentials,
            ..
        } = way(Some(&kept), &secrets, &forbidden).await
        else {
            panic!("no way");
        };
        assert_eq!(addresses, ["203.0.113.9:1080".parse().unwrap()]);
        assert_eq!(credentials.unwrap().password, "hunter2");
        // A name that has only addresses of this host.
        let local = json!({"address": "localhost:1080"});
        let refused = way(Some(&local), &secrets, &forbidden).await;
        assert!(matches!(refused, Way::Failed { .. }));
        assert_eq!(way(None, &secrets, &forbidden).await, Way::Direct);
    }

    #[test]
    fn net_denied_addresses_and_those_of_the_host_are_no_proxies() {
        use crate::namespace::{IN_LOCAL_PREFIX, SECONDARY, in_namespace};
        in_namespace(|| {
            let dir = tempfile::tempdir().unwrap();
            let source = crate::secrets::KeySource::Generated;
            let secrets = Secrets::open(dir.path(), &source).unwrap();
            let denied = Destinations {
                block: "192.0.2.0/24".parse().unwrap(),
                access: Vec::new(),
            };
            let forbidden = ForbiddenAddresses::new(Vec::new(), vec![denied]);
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            let runtime = runtime.unwrap();
            for (host, is_used) in [
                ("203.0.113.4", true),
                ("192.0.2.1", false),
                (SECONDARY, false),
                (IN_LOCAL_PREFIX, false),
            ] {
                let option = json!({"address": format!("{host}:1080")});
                assert_eq!(check(&option, &forbidden).is_ok(), is_used, "{host}");
                let way = runtime.block_on(way(Some(&option), &secrets, &forbidden));
                assert_eq!(matches!(way, Way::Socks { .. }), is_used, "{host}");
            }
        });
    }
}
