//! Extractors for request bodies and path parameters.

use axum::{
    body::Bytes,
    extract::{FromRequest, FromRequestParts, Path, Request},
};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::{HeaderMap, header, http::request::Parts};
use model::SandboxId;
use serde::de::DeserializeOwned;

use super::{app::App, error::ApiError};

/// Maximum size of a request body in bytes. The stored properties of a sandbox are limited to 256 KiB.
pub(super) const MAX_BODY: usize = 1 << 20;

/// A JSON body with a JSON content type. Other content types are refused, since a browser sends some of them for pages
/// of other origins without a preflight. The parser limits the nesting depth to 128.
#[derive(Debug)]
pub(super) struct Body<T>(pub(super) T);

/// Like [`Body`], for bodies with secrets: the response to a malformed body does not quote it.
#[derive(Debug)]
pub(super) struct SecretBody<T>(pub(super) T);

/// Like [`Body`], but an empty body yields the default value, whatever its content type.
#[derive(Debug)]
pub(super) struct MaybeBody<T>(pub(super) T);

async fn read(request: Request) -> Result<Bytes, ApiError> {
    let collected = Limited::new(request.into_body(), MAX_BODY).collect().await;
    match collected {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(why) if why.is::<LengthLimitError>() => Err(ApiError::TooLarge(MAX_BODY)),
        Err(why) => Err(ApiError::BadRequest(format!(
            "cannot read the request body: {why}"
        ))),
    }
}

/// Accepts `application/json` and `application/*+json` (RFC 6839, 3.1), with any parameters.
fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(value) = headers.get(header::CONTENT_TYPE) else {
        return Err(ApiError::NotJson("no content type".to_owned()));
    };
    let text = value.to_str().unwrap_or("?").to_ascii_lowercase();
    let essence = text.split(';').next().unwrap_or_default().trim();
    let is_written_as_json = essence.starts_with("application/") && essence.ends_with("+json");
    if essence == "application/json" || is_written_as_json {
        Ok(())
    } else {
        Err(ApiError::NotJson(format!(
            "{:?}",
            essence.chars().take(100).collect::<String>()
        )))
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(bytes).map_err(|why| {
        ApiError::BadRequest(format!("the request body does not match this route: {why}"))
    })
}

impl<T: DeserializeOwned> FromRequest<App> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &App) -> Result<Self, ApiError> {
        check_type(request.headers())?;
        parse(&read(request).await?).map(Self)
    }
}

impl<T: DeserializeOwned> FromRequest<App> for SecretBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &App) -> Result<Self, ApiError> {
        check_type(request.headers())?;
        parse_quietly(&read(request).await?).map(Self)
    }
}

fn parse_quietly<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(bytes).map_err(|why| {
        let (line, column) = (why.line(), why.column());
        ApiError::BadRequest(format!(
            "the request body does not match this route at line {line}, column {column}"
        ))
    })
}

impl<T: DeserializeOwned + Default> FromRequest<App> for MaybeBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &App) -> Result<Self, ApiError> {
        let typed = check_type(request.headers());
        let bytes = read(request).await?;
        if bytes.trim_ascii().is_empty() {
            return Ok(Self(T::default()));
        }
        typed.and_then(|()| parse(&bytes)).map(Self)
    }
}

/// The sandbox id in a path. A segment that is not a valid id is rejected with "not found", which clients expect for
/// unknown ids.
#[derive(Debug)]
pub(super) struct OfSandbox(pub(super) SandboxId);

impl FromRequestParts<App> for OfSandbox {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let Segment(text) = Segment::from_request_parts(parts, app).await?;
        match text.parse() {
            Ok(id) => Ok(Self(id)),
            Err(_) => Err(ApiError::NoSandbox(text.chars().take(64).collect())),
        }
    }
}

/// The single parameter of a path, percent-decoded.
#[derive(Debug)]
pub(super) struct Segment(pub(super) String);

impl FromRequestParts<App> for Segment {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let path = Path::<String>::from_request_parts(parts, app).await;
        let Path(text) = path.map_err(|why| ApiError::BadRequest(why.to_string()))?;
        Ok(Self(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_a_secret_body_contains_nothing_of_it() {
        for body in [
            r#""hunter2""#,
            r#"{"name":"n","value":"v","metadata":"hunter2"}"#,
            "hunter2",
        ] {
            let why = parse_quietly::<rest::NewSecret>(body.as_bytes()).unwrap_err();
            let why = why.to_string();
            assert!(why.contains("column") && !why.contains("hunter2"), "{why}");
        }
    }

    #[test]
    fn only_json_content_types_are_accepted() {
        let is_json = |value: &str| {
            let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, value.parse().unwrap())]);
            check_type(&headers).is_ok()
        };
        for json in [
            "application/json",
            "Application/JSON; charset=utf-8",
            "application/problem+json",
        ] {
            assert!(is_json(json), "{json}");
        }
        // Browsers send the first three types to any origin without a preflight.
        for other in [
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "text/plain; application/json",
            "application/jsonx",
            "text/x+json",
            "",
        ] {
            assert!(!is_json(other), "{other}");
        }
        assert!(check_type(&HeaderMap::new()).is_err());
    }
}
