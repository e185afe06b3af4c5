//! Sends one request and receives the head of its response, on an idle or a new connection.
//!
//! The agent may close an idle connection just as it is reused. The request is then sent again on another connection,
//! but only if none of it was written, or if it has no body and its method is safe (RFC 9110, 9.2.1).

use axum::http::{Method, Request, Response, request};
use hyper::body::{Body as _, Incoming};

use super::connections::RequestPermit;
use super::upload::Upload;
use super::upstream::{self, DialError, Sender};
use crate::registry::Route;

/// A request that got no response.
#[derive(Debug)]
pub(super) struct Failed {
    /// The request, if none of it was sent; it can be sent again.
    pub(super) unsent: Option<Request<Upload>>,
    pub(super) cause: ExchangeError,
}

/// Why a request got no response.
#[derive(Debug, thiserror::Error)]
pub(super) enum ExchangeError {
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error("the connection was lost before a response arrived")]
    Lost(#[source] hyper::Error),
}

impl ExchangeError {
    /// Whether the error shows that the VMM no longer accepts connections, so that the VM has ended.
    pub(super) fn means_gone(&self) -> bool {
        match self {
            Self::Dial(error) => error.means_gone(),
            Self::Lost(_) => false,
        }
    }
}

/// Sends a request and waits for the head of its response, without a time limit.
pub(super) async fn exchange(
    mut request: Request<Upload>,
    route: &Route,
    port: u16,
    permit: &RequestPermit,
) -> Result<(Response<Incoming>, Sender), Failed> {
    if port == api_types::envd::ENVD_PORT {
        while let Some(sender) = permit.take_idle().await {
            let copy = copy_of(&request);
            match send(sender, request).await {
                Ok(answered) => return Ok(answered),
                Err(failed) => match (failed.unsent, copy) {
                    (Some(unsent), _) => request = unsent,
                    (None, Some(copy)) => request = Request::from_parts(copy, Upload::none()),
                    (None, None) => {
                        let (unsent, cause) = (None, failed.cause);
                        return Err(Failed { unsent, cause });
                    }
                },
            }
        }
    }
    match upstream::dial(route, port).await {
        Ok(sender) => send(sender, request).await,
        Err(error) => Err(Failed {
            unsent: Some(request),
            cause: error.into(),
        }),
    }
}

async fn send(
    mut sender: Sender,
    request: Request<Upload>,
) -> Result<(Response<Incoming>, Sender), Failed> {
    match sender.try_send_request(request).await {
        Ok(response) => Ok((response, sender)),
        Err(mut error) => Err(Failed {
            unsent: error.take_message(),
            cause: ExchangeError::Lost(error.into_error()),
        }),
    }
}

/// A copy of the request's head, for sending the request again. `None`: the request has a body or an unsafe method, so
/// it must not be sent twice.
fn copy_of(request: &Request<Upload>) -> Option<request::Parts> {
    let is_safe = matches!(
        *request.method(),
        Method::GET | Method::HEAD | Method::OPTIONS
    );
    if !is_safe || !request.body().is_end_stream() {
        return None;
    }
    let mut copy = Request::new(());
    copy.method_mut().clone_from(request.method());
    copy.uri_mut().clone_from(request.uri());
    copy.headers_mut().clone_from(request.headers());
    Some(copy.into_parts().0)
}
