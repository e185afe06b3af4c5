//! Query strings. The official clients percent-encode the metadata filter three times, which no extractor of axum
//! decodes.

use std::collections::BTreeMap;

use axum::extract::FromRequestParts;
use envd::Timestamp;
use hyper::http::request::Parts;
use percent_encoding::percent_decode_str;
use rest::LogLevel;

use super::{app::App, error::ApiError};

/// The parameters of a query string, decoded once, in their original order.
#[derive(Debug, Default)]
pub(super) struct Query(Vec<(String, String)>);

impl FromRequestParts<App> for Query {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, ApiError> {
        Ok(Self::parse(parts.uri.query().unwrap_or_default()))
    }
}

impl Query {
    /// Parses the text after `?`.
    pub(super) fn parse(text: &str) -> Self {
        let pairs = form_urlencoded::parse(text.as_bytes());
        Self(pairs.into_owned().collect())
    }

    /// The first value of a parameter. An empty value counts as absent.
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        let (_, value) = self.0.iter().find(|(name, _)| name == key)?;
        Some(value.as_str()).filter(|value| !value.is_empty())
    }

    /// All values of a list parameter, which may be repeated, comma-separated, or both.
    pub(super) fn list(&self, key: &str) -> Vec<&str> {
        let named = self.0.iter().filter(|(name, _)| name == key);
        let values = named.flat_map(|(_, value)| value.split(','));
        values.map(str::trim).filter(|v| !v.is_empty()).collect()
    }

    /// The value of a numeric parameter. `None`: the parameter is absent or empty.
    pub(super) fn number<T: std::str::FromStr>(&self, key: &str) -> Result<Option<T>, ApiError> {
        let Some(text) = self.get(key) else {
            return Ok(None);
        };
        let number = text.parse().map(Some);
        number.map_err(|_| ApiError::BadRequest(format!("{key}={text:?} is not a number in range")))
    }

    /// The value of a boolean parameter. An absent or empty one is `false`.
    pub(super) fn flag(&self, key: &str) -> Result<bool, ApiError> {
        match self.get(key) {
            None | Some("false") => Ok(false),
            Some("true") => Ok(true),
            Some(other) => Err(ApiError::BadRequest(format!(
                "{key} is {other:?}: use true or false"
            ))),
        }
    }

    /// The minimum level of log entries from the parameter `level`.
    pub(super) fn level(&self) -> Result<Option<LogLevel>, ApiError> {
        let Some(text) = self.get("level") else {
            return Ok(None);
        };
        let wrong =
            |_| ApiError::BadRequest(format!("level is {text:?}: use debug, info, warn or error"));
        let level = serde_json::from_value(text.into());
        level.map(Some).map_err(wrong)
    }

    /// The value of a time parameter. `None`: the parameter is absent or empty.
    pub(super) fn time(&self, key: &str) -> Result<Option<Timestamp>, ApiError> {
        let Some(text) = self.get(key) else {
            return Ok(None);
        };
        // If the client does not percent-encode the plus sign of a UTC offset, the plus sign is decoded as a space.
        let time = Timestamp::parse(&text.replace(' ', "+")).map(Some);
        time.map_err(|why| ApiError::BadRequest(format!("{key}={text:?} is {why}")))
    }

    /// The metadata filter: a form-encoded list `k=v&k2=v2`, in which the client has percent-encoded each key and value
    /// beforehand.
    pub(super) fn metadata(&self) -> BTreeMap<String, String> {
        let text = self.get("metadata").unwrap_or_default();
        let pairs = form_urlencoded::parse(text.as_bytes());
        let decoded = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
        pairs.map(|(k, v)| (decoded(&k), decoded(&v))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_filters_are_decoded_three_times() {
        let query = Query::parse("metadata=a%3Db%252520c");
        assert_eq!(query.metadata()["a"], "b c");
        let query = Query::parse("metadata=a%3Db%26c%3Dd%25253De&limit=5");
        let metadata = query.metadata();
        assert_eq!(
            (metadata["a"].as_str(), metadata["c"].as_str()),
            ("b", "d=e")
        );
        assert!(Query::parse("metadata=").metadata().is_empty());
    }

    #[test]
    fn lists_numbers_and_times_are_parsed() {
        let query =
            Query::parse("state=running,paused&state=x&limit=7&n=-1&t=2024-03-01T01:00:00+01:00");
        assert_eq!(query.list("state"), ["running", "paused", "x"]);
        assert_eq!(query.number::<u32>("limit").unwrap(), Some(7));
        assert!(query.number::<u32>("n").is_err());
        assert_eq!(query.number::<u32>("absent").unwrap(), None);
        assert!(query.time("t").unwrap().is_some());
        assert!(query.time("limit").is_err());
        let level = |text: &str| Query::parse(text).level();
        assert_eq!(level("level=warn").unwrap(), Some(LogLevel::Warn));
        assert_eq!(level("level=").unwrap(), None);
        assert!(level("level=WARN").is_err());
        assert!(query.flag("limit").is_err() && !query.flag("absent").unwrap());
    }
}
