//! JSON bodies of requests and responses.
//!
//! Unlike axum's `Json`, this reads and writes with the same serde types as the rest of the server, so that the compiler
//! generates the code of each body once. It does not record the path of a wrong field.

use axum::{
    body::Bytes,
    extract::{FromRequest, Request},
    response::{IntoResponse, Response},
};
use hyper::{StatusCode, header};
use serde::{Serialize, de::DeserializeOwned};

#[derive(Debug)]
pub(crate) struct Json<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Json<T> {
    type Rejection = Response;

    /// Reads at most what the route's `DefaultBodyLimit` permits, of any content type.
    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        let bytes = Bytes::from_request(request, state).await;
        let bytes = bytes.map_err(IntoResponse::into_response)?;
        serde_json::from_slice(&bytes)
            .map(Self)
            .map_err(|why| malformed(&why))
    }
}

fn malformed(why: &serde_json::Error) -> Response {
    let message = format!("the request body does not match this route: {why}");
    (StatusCode::UNPROCESSABLE_ENTITY, message).into_response()
}

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        response(serde_json::to_vec(&self.0))
    }
}

fn response(written: serde_json::Result<Vec<u8>>) -> Response {
    match written {
        Ok(bytes) => ([(header::CONTENT_TYPE, "application/json")], bytes).into_response(),
        Err(why) => (StatusCode::INTERNAL_SERVER_ERROR, why.to_string()).into_response(),
    }
}
