//! What comes in with a request: bodies and ids.

use axum::{
    body::Bytes,
    extract::{FromRequest, FromRequestParts, Path, Request},
};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::http::request::Parts;
use model::SandboxId;
use serde::de::DeserializeOwned;

use super::{ApiError, App};

/// The largest body of the control plane. What a create says is kept in 256 KiB at most.
pub(super) const MAX_BODY: usize = 1 << 20;

/// A JSON body. Its content type is not looked at: clients differ. Its depth is bounded by the parser (128).
#[derive(Debug)]
pub(super) struct Body<T>(pub(super) T);

/// As [`Body`], but nothing at all means a body without keys.
#[derive(Debug)]
pub(super) struct MaybeBody<T>(pub(super) T);

async fn read(request: Request) -> Result<Bytes, ApiError> {
    let collected = Limited::new(request.into_body(), MAX_BODY).collect().await;
    match collected {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(why) if why.is::<LengthLimitError>() => Err(ApiError::TooLarge(MAX_BODY)),
        Err(why) => Err(ApiError::BadRequest(format!(
            "the body could not be read: {why}"
        ))),
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(bytes).map_err(|why| {
        ApiError::BadRequest(format!("the body is not what this route takes: {why}"))
    })
}

impl<T: DeserializeOwned> FromRequest<App> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &App) -> Result<Self, ApiError> {
        parse(&read(request).await?).map(Self)
    }
}

impl<T: DeserializeOwned + Default> FromRequest<App> for MaybeBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &App) -> Result<Self, ApiError> {
        let bytes = read(request).await?;
        if bytes.trim_ascii().is_empty() {
            return Ok(Self(T::default()));
        }
        parse(&bytes).map(Self)
    }
}

/// The sandbox that a path names. What is no id is not found, as clients expect of a made-up one.
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

/// The one parameter of a path, percent-decoded.
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
