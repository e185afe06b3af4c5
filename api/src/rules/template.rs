//! Header values with placeholders: `Bearer ${e2b.secrets.NAME}`.

use crate::secrets::SecretName;

const START: &str = "${e2b";
const SECRETS: &str = "${e2b.secrets.";
const IDENTITY: &str = "${e2b.identity";
/// Placeholder for hidden text.
pub(super) const MASK: &str = "***";

/// Why a value is rejected. Contains the start of the placeholder.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum TemplateError {
    #[error(
        "the malformed placeholder {0:?}: write ${{e2b.secrets.NAME}} with the name of a secret"
    )]
    Malformed(String),
    #[error("the placeholder {0:?}: this server has no workload identities")]
    Identity(String),
}

/// A header value. Everything except E2B's placeholders is literal text, including other forms of `${…}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Template(Vec<Part>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    /// The name of a secret.
    Secret(SecretName),
}

impl Template {
    /// # Errors
    /// Returns [`TemplateError`].
    pub(super) fn parse(mut text: &str) -> Result<Self, TemplateError> {
        let mut parts = Vec::new();
        while let Some(at) = text.find(START) {
            let (before, placeholder) = text.split_at(at);
            if !before.is_empty() {
                parts.push(Part::Text(before.to_owned()));
            }
            let end = placeholder.find('}').map(|end| end + 1);
            let whole = &placeholder[..end.unwrap_or(placeholder.len())];
            let shown = || whole.chars().take(160).collect::<String>();
            if whole.starts_with(IDENTITY) {
                return Err(TemplateError::Identity(shown()));
            }
            let name = whole
                .strip_prefix(SECRETS)
                .and_then(|rest| rest.strip_suffix('}'));
            let name = name.and_then(|name| SecretName::parse(name).ok());
            let name = name.ok_or_else(|| TemplateError::Malformed(shown()))?;
            parts.push(Part::Secret(name));
            text = &placeholder[whole.len()..];
        }
        if !text.is_empty() {
            parts.push(Part::Text(text.to_owned()));
        }
        Ok(Self(parts))
    }

    /// Names of the secrets, in order and with repetitions.
    pub(super) fn secrets(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(|part| match part {
            Part::Text(_) => None,
            Part::Secret(name) => Some(name.as_str()),
        })
    }

    /// The text with its placeholders, and stars in place of all other parts.
    pub(super) fn masked(&self) -> String {
        let parts = self.0.iter().map(|part| match part {
            Part::Text(_) => MASK.to_owned(),
            Part::Secret(name) => format!("{SECRETS}{}}}", name.as_str()),
        });
        parts.collect()
    }

    /// Replaces each placeholder with the value of its secret.
    ///
    /// # Errors
    /// Returns the first error of `value`.
    pub(super) fn fill<T: Exposed>(
        &self,
        value: &impl Fn(&str) -> Result<T, String>,
    ) -> Result<String, String> {
        let mut filled = String::new();
        for part in &self.0 {
            match part {
                Part::Text(text) => filled.push_str(text),
                Part::Secret(name) => filled.push_str(value(name.as_str())?.exposed()),
            }
        }
        Ok(filled)
    }
}

/// The value of a secret, or its substitute while a template is checked.
pub(super) trait Exposed {
    fn exposed(&self) -> &str;
}

impl Exposed for crate::secrets::Value {
    fn exposed(&self) -> &str {
        self.expose()
    }
}

impl Exposed for String {
    fn exposed(&self) -> &str {
        self
    }
}
