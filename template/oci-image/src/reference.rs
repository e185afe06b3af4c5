//! Names of images as users write them: `[DOMAIN/]PATH[:TAG][@DIGEST]`. Grammar and defaults follow the `distribution`
//! project: the default domain is Docker Hub, the default tag `latest`.

use std::{fmt, str::FromStr};

use crate::digest::{Digest, DigestError};

/// The default domain.
pub const DOCKER_HUB: &str = "docker.io";
/// Limit for the total length of domain and path, in bytes.
const MAX_NAME: usize = 255;
const MAX_TAG: usize = 128;

/// A parsed reference with all defaults filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// Host and optional port, `docker.io` for Docker Hub.
    pub domain: String,
    /// Path of the repository, for example `library/debian`.
    pub path: String,
    /// `None` only if there is a digest.
    pub tag: Option<String>,
    pub digest: Option<Digest>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReferenceError {
    #[error("image reference is empty")]
    Empty,
    #[error("image reference has {0} bytes: the limit for the name is {MAX_NAME}")]
    TooLong(usize),
    #[error("image reference has the invalid registry {0:?}: give HOST or HOST:PORT")]
    Domain(String),
    #[error(
        "image reference has the invalid repository {0:?}: use lower-case letters, digits and single separators (. _ -)"
    )]
    Path(String),
    #[error("image reference has the invalid tag {0:?}: use letters, digits, '_', '.' and '-'")]
    Tag(String),
    #[error("image reference has an invalid digest")]
    Digest(#[source] DigestError),
}

impl Reference {
    /// The part of a manifest's URL after `manifests/`: the digest if there is one, otherwise the tag.
    #[must_use]
    pub fn version(&self) -> String {
        match (&self.digest, &self.tag) {
            (Some(digest), _) => digest.to_string(),
            (None, Some(tag)) => tag.clone(),
            (None, None) => "latest".to_owned(),
        }
    }

    /// Domain and path without tag and digest: the key of `Registries::local`.
    #[must_use]
    pub fn repository(&self) -> String {
        format!("{}/{}", self.domain, self.path)
    }
}

impl FromStr for Reference {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        if text.is_empty() {
            return Err(ReferenceError::Empty);
        }
        // Room for the longest tag and digest.
        if text.len() > MAX_NAME + MAX_TAG + 80 {
            return Err(ReferenceError::TooLong(text.len()));
        }
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => (rest, Some(digest.parse().map_err(ReferenceError::Digest)?)),
            None => (text, None),
        };
        let (name, tag) = match rest.rsplit_once(':') {
            // A colon before the last slash belongs to the port.
            Some((name, tag)) if !tag.contains('/') => (name, Some(tag.to_owned())),
            _ => (rest, None),
        };
        let (domain, path) = split_domain(name);
        let name_len = domain.len() + 1 + path.len();
        if name_len > MAX_NAME {
            return Err(ReferenceError::TooLong(name_len));
        }
        if !is_domain(&domain) {
            return Err(ReferenceError::Domain(domain));
        }
        if !path.split('/').all(is_component) {
            return Err(ReferenceError::Path(path));
        }
        let tag = match (tag, digest) {
            (Some(tag), _) if !is_tag(&tag) => return Err(ReferenceError::Tag(tag)),
            (Some(tag), _) => Some(tag),
            (None, Some(_)) => None,
            (None, None) => Some("latest".to_owned()),
        };
        Ok(Self {
            domain,
            path,
            tag,
            digest,
        })
    }
}

/// The first component is a domain if it could not be part of a path: it has a dot, a colon or an upper-case letter, or
/// it is `localhost`.
fn split_domain(name: &str) -> (String, String) {
    let (domain, path) = match name.split_once('/') {
        Some((first, rest))
            if first.contains(['.', ':'])
                || first == "localhost"
                || first.bytes().any(|c| c.is_ascii_uppercase()) =>
        {
            (first.to_owned(), rest.to_owned())
        }
        _ => (DOCKER_HUB.to_owned(), name.to_owned()),
    };
    let domain = match domain.as_str() {
        "index.docker.io" => DOCKER_HUB.to_owned(),
        _ => domain,
    };
    if domain == DOCKER_HUB && !path.contains('/') {
        return (domain, format!("library/{path}"));
    }
    (domain, path)
}

/// A host name or an IPv4 address with an optional port, or an IPv6 address in brackets.
fn is_domain(domain: &str) -> bool {
    let (host, port) = match domain.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, Some(port)),
        _ => (domain, None),
    };
    let port_is_valid = port.is_none_or(|port| {
        port.bytes().all(|c| c.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|p| p != 0)
    });
    let is_label = |label: &str| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label
                .bytes()
                .all(|c| c.is_ascii_alphanumeric() || c == b'-')
    };
    let in_brackets = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
    let host_is_valid = match in_brackets {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => host.split('.').all(is_label),
    };
    port_is_valid && host_is_valid
}

/// Lower-case letters and digits, separated by `.`, `_`, `__` or any number of `-`.
fn is_component(component: &str) -> bool {
    let is_alphanumeric = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    let bytes = component.as_bytes();
    let ends_well = |c: Option<&u8>| c.is_some_and(|c| is_alphanumeric(*c));
    let separators_are_valid = component
        .split(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
        .all(|run| matches!(run, "" | "." | "_" | "__") || run.bytes().all(|c| c == b'-'));
    ends_well(bytes.first()) && ends_well(bytes.last()) && separators_are_valid
}

fn is_tag(tag: &str) -> bool {
    let is_word = |c: u8| c.is_ascii_alphanumeric() || c == b'_';
    tag.len() <= MAX_TAG
        && tag.bytes().next().is_some_and(is_word)
        && tag.bytes().all(|c| is_word(c) || c == b'.' || c == b'-')
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.domain, self.path)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        match &self.digest {
            Some(digest) => write!(f, "@{digest}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn references_get_the_defaults_of_docker() {
        let long = format!("debian@{DIGEST}");
        let both = format!("ghcr.io/a/b:c@{DIGEST}");
        for (text, want) in [
            ("debian", "docker.io/library/debian:latest"),
            ("debian:12", "docker.io/library/debian:12"),
            ("e2bdev/base", "docker.io/e2bdev/base:latest"),
            ("index.docker.io/debian", "docker.io/library/debian:latest"),
            ("docker.io/a/b:V1", "docker.io/a/b:V1"),
            ("localhost/a", "localhost/a:latest"),
            ("127.0.0.1:5000/a/b", "127.0.0.1:5000/a/b:latest"),
            ("[::1]:5000/a", "[::1]:5000/a:latest"),
            ("Host/a__b---c.d", "Host/a__b---c.d:latest"),
            (&long, &format!("docker.io/library/debian@{DIGEST}")),
            (&both, &both),
        ] {
            let reference: Reference = text.parse().unwrap();
            assert_eq!(reference.to_string(), want, "{text}");
            assert_eq!(reference.to_string().parse(), Ok(reference), "{text}");
        }
    }

    #[test]
    fn invalid_references_are_refused_by_part() {
        let long = "a/".repeat(128) + "a";
        for (text, part) in [
            ("", "empty"),
            ("A", "repository"),
            ("a//b", "repository"),
            ("../etc", "registry"),
            ("a b", "repository"),
            ("a?x=y", "repository"),
            ("a.-b", "repository"),
            ("a___b", "repository"),
            ("a:", "tag"),
            ("a:.b", "tag"),
            ("a:b#c", "tag"),
            ("-x.example/a", "registry"),
            ("x.example:99999/a", "registry"),
            ("x.example:0/a", "registry"),
            ("x.example:/a", "registry"),
            ("user:pw@x.example/a", "digest"),
            ("[::1/a", "registry"),
            ("http://x/a", "registry"),
            ("a@sha256:00", "digest"),
            (&long, "limit"),
        ] {
            let error = text.parse::<Reference>().unwrap_err().to_string();
            assert!(error.contains(part), "{text:?}: {error}");
        }
    }
}
