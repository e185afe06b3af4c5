//! A client of registries: distribution specification 1.1, pull only.
//!
//! References are untrusted, and so is all data from a registry: redirects, realms of token servers, sizes. Each
//! connection goes through [`http::Connector`], which resolves a name once, checks the addresses, and connects to a
//! checked address.

mod auth;
mod http;
mod join;
mod pull;

use std::{collections::BTreeMap, fmt, str::FromStr, time::Duration};

use base64::{Engine, prelude::BASE64_STANDARD};
use ranges::ForbiddenAddresses;
use serde::Deserialize;

pub use auth::{Challenge, challenges};
pub use http::{HttpError, tls};
pub use pull::{Client, Follow, Layer, Need, Origin, PullError, Pulled};

use crate::reference::{DOCKER_HUB, Reference};

const DOCKER_HUB_HOST: &str = "registry-1.docker.io";

/// The operator's configuration of registries.
#[derive(Clone, Debug, Default)]
pub struct Registries {
    /// Endpoints from which the images of a domain are pulled, in order. A domain that is not listed is its own
    /// endpoint, over https. Addresses of listed endpoints are not checked.
    pub endpoints: BTreeMap<String, Vec<Endpoint>>,
    /// Repositories (`docker.io/e2bdev/base`) for which a local image is used instead of a pull.
    pub local: BTreeMap<String, String>,
    /// Addresses that no registry may have, nor a server to which a registry refers.
    pub forbidden: ForbiddenAddresses,
    /// Credentials by domain, or by a domain and a prefix of a repository's path (`quay.io/team`), for requests without
    /// credentials. The longest matching entry applies.
    pub credentials: BTreeMap<String, Credentials>,
    pub timeouts: Timeouts,
}

/// Time limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Resolving a name and connecting, including TLS.
    pub connect: Duration,
    /// Waiting for the head of a response, and for each piece of a body.
    pub stall: Duration,
    /// A whole pull.
    pub pull: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            stall: Duration::from_secs(30),
            pull: Duration::from_secs(1800),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    Http,
    Https,
}

/// Scheme, host and port of a server. `http` is used only if the operator configures it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    pub scheme: Scheme,
    /// IPv6 addresses are in brackets.
    pub host: String,
    pub port: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("endpoint {0:?} is not http://HOST[:PORT] or https://HOST[:PORT]")]
pub struct EndpointError(String);

impl Endpoint {
    /// The origin of an absolute URL.
    pub(crate) fn of(url: &hyper::Uri) -> Option<Self> {
        let (scheme, port) = match url.scheme_str()? {
            "http" => (Scheme::Http, 80),
            "https" => (Scheme::Https, 443),
            _ => return None,
        };
        let authority = url.authority()?;
        // `user@host` is rejected: registries do not use it, and it can mislead readers of logs.
        if authority.as_str().contains('@') || authority.host().is_empty() {
            return None;
        }
        Some(Self {
            scheme,
            host: authority.host().to_ascii_lowercase(),
            port: url.port_u16().unwrap_or(port),
        })
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let url: Option<hyper::Uri> = text.parse().ok();
        let plain = url.filter(|url| url.path() == "/" && url.query().is_none());
        let endpoint = plain.and_then(|url| Self::of(&url));
        endpoint.ok_or_else(|| EndpointError(text.chars().take(200).collect()))
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.scheme {
            Scheme::Http => "http",
            Scheme::Https => "https",
        };
        write!(f, "{scheme}://{}:{}", self.host, self.port)
    }
}

/// A name and password, or a token in place of the password.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    pub username: String,
    pub password: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").finish_non_exhaustive()
    }
}

impl Credentials {
    /// The value of the header `Authorization`.
    fn basic(&self) -> String {
        let pair = format!("{}:{}", self.username, self.password);
        format!("Basic {}", BASE64_STANDARD.encode(pair))
    }
}

#[derive(Debug, thiserror::Error)]
pub enum DockerConfigError {
    #[error("docker config is not valid JSON")]
    Json(#[source] serde_json::Error),
    #[error("docker config has invalid credentials for {0:?}")]
    Auth(String),
    #[error(
        "docker config keeps credentials in the helper {0:?}, which is not supported: log in without a helper"
    )]
    Helper(String),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct DockerConfig {
    #[serde(default)]
    auths: BTreeMap<String, DockerAuth>,
    creds_store: Option<String>,
}

#[derive(Deserialize)]
struct DockerAuth {
    #[serde(default)]
    auth: String,
}

/// Parses a Docker `config.json`. Returns its credentials by the domain, or the path below a domain, to which they
/// apply (containers-auth.json(5)).
///
/// # Errors
/// Returns an error if the text is malformed or refers to a credential helper.
pub fn docker_config(text: &str) -> Result<BTreeMap<String, Credentials>, DockerConfigError> {
    let config: DockerConfig = serde_json::from_str(text).map_err(DockerConfigError::Json)?;
    if let Some(helper) = config.creds_store.filter(|helper| !helper.is_empty()) {
        return Err(DockerConfigError::Helper(helper));
    }
    let mut found = BTreeMap::new();
    for (server, DockerAuth { auth }) in config.auths {
        if auth.is_empty() {
            continue;
        }
        let invalid = || DockerConfigError::Auth(server.clone());
        let pair = BASE64_STANDARD.decode(&auth).map_err(|_| invalid())?;
        let pair = String::from_utf8(pair).map_err(|_| invalid())?;
        let (username, password) = pair.split_once(':').ok_or_else(invalid)?;
        let credentials = Credentials {
            username: username.to_owned(),
            password: password.trim_end_matches('\0').to_owned(),
        };
        found.insert(served_by(&server), credentials);
    }
    Ok(found)
}

/// The repositories to which the credentials of a key of `auths` apply. A URL or an API path stands for the whole
/// server.
fn served_by(key: &str) -> String {
    let bare = key.trim_start_matches("https://");
    let bare = bare.trim_start_matches("http://").trim_end_matches('/');
    let (host, path) = bare.split_once('/').unwrap_or((bare, ""));
    let domain = match host {
        // The key of Docker Hub is the URL of its old index.
        "index.docker.io" => DOCKER_HUB,
        other => other,
    };
    if key.contains("://") || matches!(path, "" | "v1" | "v2") {
        return domain.to_owned();
    }
    format!("{domain}/{path}")
}

/// A candidate server for a reference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) endpoint: Endpoint,
    /// Only the registry that the reference names gets its credentials.
    pub(crate) credentials: Option<Credentials>,
}

impl Registries {
    /// The local image that replaces a reference. References with a digest are never replaced. `None` if the image is
    /// pulled.
    #[must_use]
    pub fn local_image(&self, reference: &Reference) -> Option<&str> {
        let local = self.local.get(&reference.repository());
        local
            .filter(|_| reference.digest.is_none())
            .map(String::as_str)
    }

    /// The servers to try for a reference, in order.
    pub(crate) fn targets(
        &self,
        reference: &Reference,
        given: Option<&Credentials>,
    ) -> Result<Vec<Target>, EndpointError> {
        let host = match reference.domain.as_str() {
            DOCKER_HUB => DOCKER_HUB_HOST,
            domain => domain,
        };
        let own: Endpoint = format!("https://{host}").parse()?;
        let credentials = given.or_else(|| self.serving(&reference.domain, &reference.path));
        let listed = self.endpoints.get(&reference.domain);
        let endpoints = listed.cloned().unwrap_or_else(|| vec![own.clone()]);
        let target = |endpoint: Endpoint| {
            // `127.0.0.1:5000` has no scheme, so the port is the one that the user wrote.
            let is_named = reference.domain == format!("{}:{}", endpoint.host, endpoint.port);
            let is_own = endpoint == own || is_named;
            let authority = format!("{}:{}", endpoint.host, endpoint.port);
            let of_mirror = self.serving(&authority, &reference.path);
            let credentials = if is_own { credentials } else { of_mirror };
            Target {
                credentials: credentials.cloned(),
                endpoint,
            }
        };
        Ok(endpoints.into_iter().map(target).collect())
    }

    /// The operator's credentials for a repository.
    fn serving(&self, domain: &str, path: &str) -> Option<&Credentials> {
        let repository = format!("{domain}/{path}");
        let ends = repository.rmatch_indices('/').map(|(at, _)| at);
        let mut names = std::iter::once(repository.len())
            .chain(ends)
            .map(|end| &repository[..end]);
        names.find_map(|name| self.credentials.get(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn credentials(name: &str) -> Credentials {
        Credentials {
            username: name.to_owned(),
            password: "secret".to_owned(),
        }
    }

    #[test]
    fn mirrors_do_not_get_the_credentials_of_the_registry() {
        let mut registries = Registries::default();
        let reference: Reference = "debian".parse().unwrap();
        let given = credentials("u");
        let own = registries.targets(&reference, Some(&given)).unwrap();
        assert_eq!(
            own[0].endpoint.to_string(),
            "https://registry-1.docker.io:443"
        );
        assert_eq!(own[0].credentials.as_ref(), Some(&given));
        let list = ["http://mirror:5000", "https://registry-1.docker.io"];
        let list = list.map(|text| text.parse().unwrap()).to_vec();
        registries.endpoints.insert(DOCKER_HUB.to_owned(), list);
        let targets = registries.targets(&reference, Some(&given)).unwrap();
        assert_eq!(targets[0].credentials, None);
        assert_eq!(targets[1].credentials.as_ref(), Some(&given));
        let of_mirror = credentials("m");
        registries
            .credentials
            .insert("mirror:5000".to_owned(), of_mirror.clone());
        let targets = registries.targets(&reference, None).unwrap();
        assert_eq!(targets[0].credentials.as_ref(), Some(&of_mirror));
        assert!(!format!("{targets:?}").contains("secret"));
    }

    #[test]
    fn credentials_are_read_from_docker_config() {
        let text = r#"{"auths":{"https://index.docker.io/v1/":{"auth":"dTpwOnE="},"a.example:5000":{"auth":"dTpw"},
            "empty.example":{}}}"#;
        let found = docker_config(text).unwrap();
        let hub = &found[DOCKER_HUB];
        assert_eq!((hub.username.as_str(), hub.password.as_str()), ("u", "p:q"));
        assert_eq!(found.len(), 2);
        let helper = docker_config(r#"{"credsStore":"desktop"}"#).unwrap_err();
        assert!(helper.to_string().contains("desktop"), "{helper}");
        assert!(docker_config(r#"{"auths":{"a":{"auth":"!"}}}"#).is_err());
    }

    #[test]
    fn credentials_of_a_repository_are_not_used_for_others() {
        let text = r#"{"auths":{"quay.io/team":{"auth":"dGVhbTpw"},"quay.io/team/app":{"auth":"YXBwOnA="},
            "a.example/v2/":{"auth":"YTpw"},"https://b.example/team":{"auth":"Yjpw"}}}"#;
        let registries = Registries {
            credentials: docker_config(text).unwrap(),
            ..Registries::default()
        };
        for (reference, expected) in [
            ("quay.io/team/x", Some("team")),
            ("quay.io/team/app", Some("app")),
            ("quay.io/team/app/below:tag", Some("app")),
            ("quay.io/team/application", Some("team")),
            ("quay.io/teams/x", None),
            ("quay.io/other/x", None),
            ("a.example/any/x", Some("a")),
            ("b.example/any/x", Some("b")),
        ] {
            let targets = registries
                .targets(&reference.parse().unwrap(), None)
                .unwrap();
            let used = targets[0]
                .credentials
                .as_ref()
                .map(|used| used.username.as_str());
            assert_eq!(used, expected, "{reference}");
        }
    }

    #[test]
    fn endpoints_are_origins() {
        for bad in [
            "mirror:5000",
            "ftp://a",
            "https://a/b",
            "https://u@a",
            "https://a?b",
            "https://",
        ] {
            assert!(bad.parse::<Endpoint>().is_err(), "{bad}");
        }
        let v6: Endpoint = "http://[::1]:5000".parse().unwrap();
        assert_eq!((v6.host.as_str(), v6.port), ("[::1]", 5000));
    }

    #[test]
    fn repositories_can_stand_for_local_images() {
        let mut registries = Registries::default();
        let base = "docker.io/e2bdev/base".to_owned();
        registries.local.insert(base, "base".to_owned());
        let is_local = |text: &str| registries.local_image(&text.parse().unwrap()).is_some();
        assert!(is_local("e2bdev/base") && is_local("e2bdev/base:latest"));
        assert!(!is_local("ghcr.io/e2bdev/base"));
        assert!(!is_local(&format!("e2bdev/base@sha256:{}", "0".repeat(64))));
    }
}
