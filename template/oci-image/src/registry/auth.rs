//! Challenges of registries (RFC 9110, 11.6.1) and tokens (distribution specification, "Token Authentication").

use std::{collections::BTreeMap, sync::Mutex, sync::PoisonError};

use hyper::{StatusCode, Uri, header::WWW_AUTHENTICATE};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;

use super::{
    Credentials, Endpoint, PullError, Scheme, Target,
    http::{Answer, Connector},
};

/// Limit for a token server's response, in bytes.
const MAX_TOKEN: u64 = 1 << 16;

/// An authentication method that a server offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Challenge {
    /// In lower case.
    pub scheme: String,
    /// Names in lower case.
    pub parameters: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

/// Requests to one registry for one repository.
pub(super) struct Session<'a> {
    pub(super) connector: &'a Connector,
    pub(super) target: &'a Target,
    /// Path of the repository.
    pub(super) repository: &'a str,
    /// The last value of `Authorization` that the registry accepted.
    pub(super) authorization: Mutex<Option<String>>,
}

impl Session<'_> {
    /// Sends a GET request. Authenticates if the registry demands it.
    pub(super) async fn get(&self, path: &str, accept: &str) -> Result<Answer, PullError> {
        let endpoint = &self.target.endpoint;
        let present = self.present();
        let answer = (self.connector)
            .get(endpoint, path, accept, present.as_deref())
            .await?;
        // Only a challenge of the registry itself counts, not one of a server that it redirects to.
        let is_own = answer.server == *endpoint;
        if answer.response.status() != StatusCode::UNAUTHORIZED || !is_own {
            return Ok(answer);
        }
        let authorization = self.authenticate(&answer).await?;
        *self.slot() = Some(authorization.clone());
        let again = self
            .connector
            .get(endpoint, path, accept, Some(&authorization));
        Ok(again.await?)
    }

    fn present(&self) -> Option<String> {
        self.slot().clone()
    }

    fn slot(&self) -> std::sync::MutexGuard<'_, Option<String>> {
        self.authorization
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    async fn authenticate(&self, answer: &Answer) -> Result<String, PullError> {
        let host = || self.target.endpoint.host.clone();
        let credentials = self.target.credentials.as_ref();
        let values = answer.response.headers().get_all(WWW_AUTHENTICATE);
        let offered: Vec<_> = (values.iter())
            .filter_map(|value| value.to_str().ok())
            .flat_map(challenges)
            .collect();
        if let Some(challenge) = offered.iter().find(|c| c.scheme == "bearer") {
            return self.token(challenge, credentials).await;
        }
        if offered.iter().any(|c| c.scheme == "basic") {
            let credentials =
                credentials.ok_or_else(|| PullError::Unauthorized { host: host() })?;
            return Ok(credentials.basic());
        }
        Err(PullError::Challenge { host: host() })
    }

    /// Fetches a token from the realm that the registry names.
    async fn token(
        &self,
        challenge: &Challenge,
        credentials: Option<&Credentials>,
    ) -> Result<String, PullError> {
        let host = self.target.endpoint.host.clone();
        let invalid = || PullError::Challenge { host: host.clone() };
        let realm = challenge.parameters.get("realm").ok_or_else(invalid)?;
        let realm: Uri = realm.parse().map_err(|_| invalid())?;
        let server = Endpoint::of(&realm).ok_or_else(invalid)?;
        let own = self.target.endpoint.scheme;
        if own == Scheme::Https && server.scheme == Scheme::Http {
            return Err(invalid());
        }
        let path = self.token_path(challenge, &realm);
        let basic = credentials.map(Credentials::basic);
        let answer = (self.connector)
            .get(&server, &path, "application/json", basic.as_deref())
            .await;
        let mut answer = answer?;
        match answer.response.status() {
            StatusCode::OK => {}
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::BAD_REQUEST => {
                return Err(PullError::Unauthorized { host });
            }
            status => {
                let host = server.host;
                return Err(PullError::Status { host, status });
            }
        }
        let body = self.connector.body(&mut answer, MAX_TOKEN).await?;
        let token: Token = serde_json::from_slice(&body).map_err(|_| invalid())?;
        let token = token.token.or(token.access_token).ok_or_else(invalid)?;
        Ok(format!("Bearer {token}"))
    }

    fn token_path(&self, challenge: &Challenge, realm: &Uri) -> String {
        let encode = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
        let scope = encode(&format!("repository:{}:pull", self.repository));
        let mut path = format!("{}?scope={scope}", realm.path());
        if let Some(service) = challenge.parameters.get("service") {
            path += &format!("&service={}", encode(service));
        }
        match realm.query() {
            Some(query) => format!("{path}&{query}"),
            None => path,
        }
    }
}

/// Parses a `WWW-Authenticate` header. The list ends at the first syntax error.
#[must_use]
pub fn challenges(header: &str) -> Vec<Challenge> {
    let mut found: Vec<Challenge> = Vec::new();
    let mut rest = header;
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        let (word, after) = token(rest);
        if word.is_empty() {
            return found;
        }
        match (after.strip_prefix('='), found.last_mut()) {
            (Some(value), Some(challenge)) => {
                let Some((value, after)) = parameter(value) else {
                    return found;
                };
                challenge
                    .parameters
                    .insert(word.to_ascii_lowercase(), value);
                rest = after;
            }
            (Some(_), None) => return found,
            (None, _) => {
                found.push(Challenge {
                    scheme: word.to_ascii_lowercase(),
                    parameters: BTreeMap::new(),
                });
                rest = after;
            }
        }
    }
}

fn token(text: &str) -> (&str, &str) {
    let is_end = |c: char| !(c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c));
    text.split_at(text.find(is_end).unwrap_or(text.len()))
}

/// A parameter's value, quoted or not, and the text after it.
fn parameter(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let (value, rest) = token(text);
        return Some((value.to_owned(), rest));
    };
    let mut value = String::new();
    let mut chars = quoted.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &quoted[at + 1..])),
            '\\' => value.push(chars.next()?.1),
            c => value.push(c),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_parsed_with_quotes_and_lists() {
        let text =
            r#"Bearer realm="https://a/t?x=1,2",service="r \"s\"" , scope=a, Basic realm="b""#;
        let found = challenges(text);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].parameters["realm"], "https://a/t?x=1,2");
        assert_eq!(found[0].parameters["service"], r#"r "s""#);
        assert_eq!(found[1].scheme, "basic");
        for broken in ["", "=", "Bearer realm=\"", "Bearer realm=\"\\", "\u{e9}"] {
            let parameters = challenges(broken).into_iter().map(|c| c.parameters.len());
            assert_eq!(parameters.sum::<usize>(), 0, "{broken}");
        }
    }
}
