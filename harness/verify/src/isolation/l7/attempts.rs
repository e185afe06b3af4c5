//! The attempts, from `harness/verify/isolation/l7.toml`. `l7.py` in the same directory makes them in a sandbox.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::setup::ListError;

const FILE: &str = "l7.toml";
const LIST: &str = include_str!("../../../isolation/l7.toml");
/// The guest's program.
pub(super) const PROGRAM: &str = include_str!("../../../isolation/l7.py");
/// Placeholder for the name of the case.
const NAME: &str = "{}";
/// Placeholder for CR LF in `send` and `then`.
const LINE_END: &str = "$";
/// Placeholder for a long run of bytes.
const LONG: &str = "%70000%";

/// Expected outcome of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Expect {
    /// It arrives with the rule's header instead of the guest's own.
    Ruled,
    /// It arrives without the rule's header.
    Bare,
    /// It does not arrive.
    Refused,
    RuledOrRefused,
    /// It arrives, and the guest receives the rule's header from the server.
    Echoed,
}

/// A field of a request in HTTP/2: name and value.
type Field = (String, String);

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Attempt {
    pub(super) name: String,
    /// The meaning of any other outcome, or why it is tried.
    pub(super) why: String,
    /// Name to whose address the guest connects.
    #[serde(default = "ruled")]
    pub(super) to: String,
    #[serde(default = "https")]
    pub(super) port: u16,
    /// Server name (SNI); `to` by default. Empty: none.
    #[serde(default)]
    sni: Option<String>,
    /// Replaces bytes of the ClientHello with the same number of other bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    patch: Option<(String, String)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    second_name: Option<String>,
    /// Number and length of an extension that is added to the ClientHello.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    extension: Option<(u16, u16)>,
    #[serde(default)]
    fragments: bool,
    /// Protocols that the client offers in ALPN, and the number of additional long ones.
    #[serde(default)]
    alpn: Vec<String>,
    #[serde(default)]
    padding: u16,
    /// The bytes are sent without TLS, even to port 443.
    #[serde(default)]
    raw: bool,
    /// Bytes to send, as Latin-1. `None`: `requests` are sent over HTTP/2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    send: Option<String>,
    /// Bytes to send after the first response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    then: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    requests: Option<Vec<Vec<Field>>>,
    /// Number of responses to wait for before the connection is closed.
    #[serde(default = "one")]
    answers: u16,
    /// The guest follows a redirect.
    #[serde(default)]
    pub(super) follow: bool,
    pub(super) expect: Expect,
    /// Statuses that the last response may have. Empty: 200 for an attempt that arrives, any other end for a
    /// refused one.
    #[serde(default)]
    pub(super) status: Vec<u16>,
    /// Issuer of the certificate that the guest gets: `proxy` or `origin`.
    #[serde(default)]
    pub(super) issuer: Option<String>,
    /// Protocol negotiated with ALPN.
    #[serde(default)]
    pub(super) protocol: Option<String>,
    /// Whether the guest gets a session ticket.
    #[serde(default)]
    pub(super) ticket: Option<bool>,
    /// Texts that the guest must not receive.
    #[serde(default)]
    pub(super) never: Vec<String>,
    /// Text that must not arrive.
    #[serde(default)]
    pub(super) arrives_without: Option<String>,
    /// The server sees one request.
    #[serde(default)]
    pub(super) once: bool,
}

fn ruled() -> String {
    "ruled.l7.test".to_owned()
}

fn https() -> u16 {
    443
}

fn one() -> u16 {
    1
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Attempts {
    /// Names that the guest resolves before its first attempt.
    names: Vec<String>,
    /// Options of the sandbox, as in the body of E2B's create request.
    pub(super) create: Map<String, Value>,
    #[serde(rename = "case")]
    pub(super) cases: Vec<Attempt>,
}

/// # Errors
/// Returns a [`ListError`] if the list is invalid, which is a bug in this program.
pub(super) fn load() -> Result<Attempts, ListError> {
    let list: Attempts =
        toml::from_str(LIST).map_err(|source| ListError::Toml { list: FILE, source })?;
    let mut names = BTreeSet::new();
    for case in &list.cases {
        let fault = case.fault(names.insert(&case.name));
        if let Some(fault) = fault {
            return Err(ListError::Entry {
                list: FILE,
                entry: case.name.clone(),
                fault: fault.to_owned(),
            });
        }
    }
    Ok(list)
}

impl Attempts {
    /// Removes and returns the attempts that reveal the secret to the guest.
    pub(super) fn split_off_echoed(&mut self) -> Self {
        let is_echoed = |case: &Attempt| case.expect == Expect::Echoed;
        let (echoed, others) = self.cases.drain(..).partition(is_echoed);
        self.cases = others;
        Self {
            names: self.names.clone(),
            create: self.create.clone(),
            cases: echoed,
        }
    }

    /// Input of the guest's program.
    pub(super) fn order(&self) -> Value {
        let attempts = self.cases.iter().map(|case| case.order(None));
        json!({ "names": self.names, "attempts": attempts.collect::<Vec<_>>() })
    }

    /// Like [`Self::order`], for a client that connects to the addresses and ports given by `place`. Attempts
    /// without an address are skipped.
    pub(super) fn order_to(&self, place: impl Fn(&Attempt) -> Option<(String, u16)>) -> Value {
        let placed = self
            .cases
            .iter()
            .filter_map(|case| Some((case, place(case)?)));
        let attempts = placed.map(|(case, place)| case.order(Some(place)));
        json!({ "names": [], "attempts": attempts.collect::<Vec<_>>() })
    }
}

impl Attempt {
    fn fault(&self, is_new: bool) -> Option<&'static str> {
        // Arriving requests are recognized by the name.
        let texts = [&self.send, &self.then, &self.sni, &self.second_name];
        let requests = self.requests.iter().flatten().flatten();
        let values = requests.map(|(_, value)| value);
        let mut texts = texts.into_iter().flatten().chain(values);
        match self {
            _ if !is_new => Some("another case has the same name"),
            _ if !self.name.starts_with("l7-") || self.name.len() > 48 => {
                Some("the name must begin with l7- and have at most 48 characters")
            }
            _ if self.send.is_some() == self.requests.is_some() => {
                Some("exactly one of `send` and `requests` must be given")
            }
            _ if !self.follow && !texts.any(|text| text.contains(NAME)) => {
                Some("nothing that is sent has the case's name")
            }
            _ => None,
        }
    }

    /// `place` replaces the address of `to` and its port as the client's destination.
    fn order(&self, place: Option<(String, u16)>) -> Value {
        let mut order = serde_json::to_value(self).unwrap_or_default();
        self.fill(&mut order);
        order["raw"] = (self.raw || (self.port == 80 && self.sni.is_none())).into();
        order["sni"] = match &self.sni {
            None => self.to.clone().into(),
            Some(name) if name.is_empty() => Value::Null,
            Some(name) => name.replace(NAME, &self.name).into(),
        };
        if let Some((address, port)) = place {
            order["address"] = address.into();
            order["port"] = port.into();
        }
        order
    }

    fn fill(&self, value: &mut Value) {
        match value {
            Value::String(text) => {
                *text = text
                    .replace(NAME, &self.name)
                    .replace(LINE_END, "\r\n")
                    .replace(LONG, &"a".repeat(70_000));
            }
            Value::Array(values) => values.iter_mut().for_each(|value| self.fill(value)),
            Value::Object(values) => values.values_mut().for_each(|value| self.fill(value)),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    /// The attempt and its expected outcome, in one line.
    pub(super) fn summary(&self) -> String {
        let name = match &self.sni {
            None => self.to.clone(),
            Some(name) if name.is_empty() => "none".to_owned(),
            Some(name) => name.replace(NAME, &self.name),
        };
        let port = self.port;
        format!("to {} port {port}, server name {name}", self.to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_attempts_load_and_each_kind_has_a_control() {
        let list = load().unwrap();
        assert!(list.cases.len() > 80);
        let has = |expect| list.cases.iter().any(|case| case.expect == expect);
        assert!(
            [Expect::Ruled, Expect::Bare, Expect::Refused]
                .into_iter()
                .all(has)
        );
        let order = list.order();
        let first = &order["attempts"][0];
        let send = first["send"].as_str().unwrap();
        assert!(send.starts_with("GET /l7-rule-applies HTTP/1.1\r\nHost: ruled.l7.test\r\n"));
        assert_eq!(first["sni"], "ruled.l7.test");
        assert_eq!(first["raw"], false);
    }
}
