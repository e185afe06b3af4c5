//! Rules of a sandbox for outbound requests (`network.rules`): headers by host name. Performs no I/O.
//!
//! E2B's semantics: the exact host applies first, then the longest `*.` suffix, and rules are not merged. A host has at
//! most one transform. A rule without headers hides the rules for shorter suffixes. The proxy reads its requests and
//! compares their names, as with every rule. A rule does not permit any traffic.

mod template;

use std::collections::{BTreeMap, BTreeSet};

use ::egress::control::{Ask, NOT_FOR_RULES, RuleOutcome};
use hyper::header::{HeaderName, HeaderValue};
use netisolation::NamePattern;
use rest::NetworkConfig;
use serde_json::{Map, Value as Json};

use crate::secrets::Value;
use template::{MASK, Template, TemplateError};

/// Maximum number of hosts with rules.
const MAX_HOSTS: usize = 256;
/// Maximum number of headers for a host.
const MAX_HEADERS: usize = 64;
/// Maximum number of different secrets for a host, as in E2B.
const MAX_SECRETS: usize = 32;
/// Extension of an entry: its headers are also added to requests without TLS.
const PLAIN: &str = "plain";
/// Longest header name, and longest value with placeholders, in bytes.
const MAX_NAME: usize = 256;
const MAX_VALUE: usize = 16 << 10;

/// Why rules are refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuleError {
    /// Names the invalid part.
    #[error("{0}")]
    Invalid(String),
    /// Names the part of E2B's rules that this server does not support.
    #[error("{0}")]
    Unsupported(String),
}

/// The rules of a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules(Vec<Rule>);

/// The rule for a host, or for all names below one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pattern: NamePattern,
    /// The pattern as text, in its normal form.
    key: String,
    /// Names in lower case.
    headers: Vec<(HeaderName, Template)>,
    /// Whether the headers may be sent in clear text.
    is_plain: bool,
}

/// An entry in a host's list.
struct Entry<'a> {
    headers: Option<&'a Map<String, Json>>,
    is_plain: bool,
}

impl Rules {
    /// Parses the option as sent by clients.
    ///
    /// # Errors
    /// Returns [`RuleError`].
    pub fn parse(option: &BTreeMap<String, Json>) -> Result<Self, RuleError> {
        if option.len() > MAX_HOSTS {
            return Err(invalid(format!(
                "network.rules has {} hosts; at most {MAX_HOSTS} are allowed",
                option.len()
            )));
        }
        let rules = option.iter().map(|(host, rules)| Rule::parse(host, rules));
        let rules = rules.collect::<Result<Vec<_>, _>>()?;
        let mut seen = BTreeSet::new();
        match rules.iter().find(|rule| !seen.insert(rule.key.as_str())) {
            Some(rule) => Err(invalid(format!(
                "network.rules names {} twice",
                shown(&rule.key)
            ))),
            None => Ok(Self(rules)),
        }
    }

    /// The patterns of names whose requests the proxy reads.
    #[must_use]
    pub fn ruled(&self) -> Vec<NamePattern> {
        self.0.iter().map(|rule| rule.pattern.clone()).collect()
    }

    /// The hosts with rules, and the secrets that they use.
    pub fn uses(&self) -> impl Iterator<Item = (&str, &str)> {
        let rules = self.0.iter();
        rules.flat_map(|rule| rule.secrets().into_iter().map(|name| (rule.key(), name)))
    }

    /// The rule for a host name in lower case without a trailing dot.
    #[must_use]
    pub fn find(&self, host: &str) -> Option<&Rule> {
        let matching = self.0.iter().filter(|rule| rule.pattern.matches(host));
        // An exact key is as long as the host. The key of a suffix that matches it is not longer, and starts with a
        // star.
        matching.max_by_key(|rule| (!rule.key.starts_with('*'), rule.key.len()))
    }
}

/// Masks the literal parts of header values, because they may be keys. Placeholders stay.
pub fn mask(network: &mut NetworkConfig) {
    let rules = network.rules.iter_mut().flatten();
    rules.for_each(|(_, rules)| mask_headers(rules, false));
}

fn mask_headers(json: &mut Json, is_header: bool) {
    match json {
        Json::Object(entries) => entries
            .iter_mut()
            .for_each(|(key, value)| mask_headers(value, is_header || key == "headers")),
        Json::Array(list) => list
            .iter_mut()
            .for_each(|value| mask_headers(value, is_header)),
        Json::String(text) if is_header => {
            let masked = Template::parse(text).map(|template| template.masked());
            *text = masked.unwrap_or_else(|_| MASK.to_owned());
        }
        Json::Null | Json::Bool(_) | Json::Number(_) | Json::String(_) => {}
    }
}

impl Rule {
    fn parse(host: &str, rules: &Json) -> Result<Self, RuleError> {
        let pattern: NamePattern = host
            .parse()
            .map_err(|why| invalid(format!("invalid host in network.rules: {why}")))?;
        let key = String::from(pattern.clone());
        if key == "*" {
            return Err(invalid(
                "network.rules has the host \"*\": name hosts, or all below one like *.example.com"
                    .to_owned(),
            ));
        }
        let Json::Array(list) = rules else {
            return Err(invalid(format!(
                "network.rules[{}] must be a list of rules",
                shown(host)
            )));
        };
        let entries = list
            .iter()
            .map(|rule| Entry::parse(host, rule))
            .collect::<Result<Vec<_>, _>>()?;
        let mut transforms = entries.iter().filter_map(|entry| entry.headers);
        let (first, second) = (transforms.next(), transforms.next());
        if second.is_some() {
            return Err(invalid(format!(
                "network.rules[{}] has more than one transform: put all headers into one",
                shown(host)
            )));
        }
        let headers = match first {
            Some(headers) => headers_of(host, headers)?,
            None => Vec::new(),
        };
        Ok(Self {
            pattern,
            key,
            headers,
            is_plain: entries.iter().any(|entry| entry.is_plain),
        })
    }

    /// The pattern, in lower case.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The response to a request of the proxy. For `value` see [`Rule::fill`].
    pub fn answer(&self, ask: Ask, value: impl Fn(&str) -> Result<Value, String>) -> RuleOutcome {
        match ask {
            Ask::Existence => self.outcome(),
            Ask::HeadersInClear if !(self.is_plain || self.headers.is_empty()) => {
                RuleOutcome::NeedsTls {
                    rule: self.key.clone(),
                }
            }
            Ask::Headers | Ask::HeadersInClear => self.fill(value),
        }
    }

    /// The rule without its headers.
    fn outcome(&self) -> RuleOutcome {
        RuleOutcome::Headers {
            rule: self.key.clone(),
            headers: Vec::new(),
            secrets: Vec::new(),
        }
    }

    /// The headers for a request, for the proxy. `value` returns the value of a secret by its name, or why there is
    /// none.
    pub fn fill(&self, value: impl Fn(&str) -> Result<Value, String>) -> RuleOutcome {
        let failed = |reason| RuleOutcome::Failed {
            rule: self.key.clone(),
            reason,
        };
        let mut headers = Vec::with_capacity(self.headers.len());
        for (name, template) in &self.headers {
            let filled = match template.fill(&value) {
                Ok(filled) => filled,
                Err(reason) => return failed(reason),
            };
            if HeaderValue::from_bytes(filled.as_bytes()).is_err() {
                return failed(format!(
                    "the value of the header {name} contains a character that a header cannot have, probably a line end of {}",
                    names(template.secrets())
                ));
            }
            headers.push((name.as_str().to_owned(), filled));
        }
        RuleOutcome::Headers {
            rule: self.key.clone(),
            headers,
            secrets: self.secrets().into_iter().map(str::to_owned).collect(),
        }
    }

    /// Names of the secrets in the headers.
    fn secrets(&self) -> BTreeSet<&str> {
        let templates = self.headers.iter().map(|(_, template)| template);
        templates.flat_map(Template::secrets).collect()
    }
}

fn names<'a>(secrets: impl Iterator<Item = &'a str>) -> String {
    let secrets: Vec<_> = secrets.map(|name| format!("the secret {name:?}")).collect();
    secrets.join(" or ")
}

impl<'a> Entry<'a> {
    fn parse(host: &str, entry: &'a Json) -> Result<Self, RuleError> {
        let at = format!("network.rules[{}]", shown(host));
        let [transform, plain] = known(entry, &at, ["transform", PLAIN])?;
        let is_plain = match plain {
            None => false,
            Some(Json::Bool(plain)) => *plain,
            Some(_) => return Err(invalid(format!("{at}.{PLAIN} must be true or false"))),
        };
        let at = format!("{at}.transform");
        let [headers] = match transform {
            None => [None],
            Some(transform) => known(transform, &at, ["headers"])?,
        };
        match headers {
            None => Ok(Self {
                headers: None,
                is_plain,
            }),
            Some(Json::Object(headers)) => Ok(Self {
                headers: Some(headers),
                is_plain,
            }),
            Some(_) => Err(invalid(format!("{at}.headers must be an object"))),
        }
    }
}

/// The values of the only keys that an object may have. `None` for keys that are absent or null.
fn known<'a, const N: usize>(
    object: &'a Json,
    at: &str,
    keys: [&str; N],
) -> Result<[Option<&'a Json>; N], RuleError> {
    let Json::Object(entries) = object else {
        return Err(invalid(format!("{at} must contain objects")));
    };
    // Silently ignoring a part would change nothing although the client expects an effect.
    if let Some(other) = entries.keys().find(|other| !keys.contains(&other.as_str())) {
        return Err(RuleError::Unsupported(format!(
            "{at} has {}: this server rewrites headers only",
            shown(other)
        )));
    }
    Ok(keys.map(|key| entries.get(key).filter(|value| !value.is_null())))
}

fn headers_of(
    host: &str,
    headers: &Map<String, Json>,
) -> Result<Vec<(HeaderName, Template)>, RuleError> {
    let at = format!("network.rules[{}]", shown(host));
    if headers.len() > MAX_HEADERS {
        return Err(invalid(format!(
            "{at} has {} headers; at most {MAX_HEADERS} are allowed",
            headers.len()
        )));
    }
    let mut checked: Vec<(HeaderName, Template)> = Vec::with_capacity(headers.len());
    for (name, value) in headers {
        let header = header_name(&at, name)?;
        if checked.iter().any(|(other, _)| *other == header) {
            return Err(invalid(format!("{at} has the header {header} twice")));
        }
        checked.push((header, template(&at, name, value)?));
    }
    let templates = checked.iter().map(|(_, template)| template);
    let secrets: BTreeSet<_> = templates.flat_map(Template::secrets).collect();
    if secrets.len() > MAX_SECRETS {
        return Err(invalid(format!(
            "{at} uses {} secrets; at most {MAX_SECRETS} are allowed",
            secrets.len()
        )));
    }
    Ok(checked)
}

fn header_name(at: &str, name: &str) -> Result<HeaderName, RuleError> {
    let header = HeaderName::from_bytes(name.as_bytes()).ok();
    let header = header.filter(|_| name.len() <= MAX_NAME);
    let header =
        header.ok_or_else(|| invalid(format!("{at}: {} is not a header name", shown(name))))?;
    if NOT_FOR_RULES.contains(&header.as_str()) {
        return Err(invalid(format!(
            "{at}: the header {header} cannot be set, because it belongs to the connection or the message"
        )));
    }
    Ok(header)
}

fn template(at: &str, name: &str, value: &Json) -> Result<Template, RuleError> {
    let at = format!("{at}: the header {}", shown(name));
    let Json::String(text) = value else {
        return Err(invalid(format!("{at} must have a text as its value")));
    };
    if text.len() > MAX_VALUE {
        return Err(invalid(format!(
            "{at} has {} bytes; at most {MAX_VALUE} are allowed",
            text.len()
        )));
    }
    let template = Template::parse(text).map_err(|why| match why {
        TemplateError::Malformed(_) => invalid(format!("{at} has {why}")),
        TemplateError::Identity(_) => RuleError::Unsupported(format!("{at} has {why}")),
    })?;
    // The values of secrets are checked when a request is made.
    match template.fill(&|_: &str| Ok(String::new())) {
        Ok(text) if HeaderValue::from_str(&text).is_ok() => Ok(template),
        _ => Err(invalid(format!(
            "{at} has a character that a header cannot have"
        ))),
    }
}

fn invalid(what: String) -> RuleError {
    RuleError::Invalid(what)
}

/// The start of a client's text, quoted and escaped.
fn shown(text: &str) -> String {
    format!("{:?}", text.chars().take(64).collect::<String>())
}

#[cfg(test)]
mod tests;
