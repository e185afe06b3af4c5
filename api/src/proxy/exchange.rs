//! One request and the head of its response, on a connection that waited or on a new one.
//!
//! A connection that waited may end in the very moment it is used. The request is then sent again, on
//! another one, if nothing of it was written, or if it has no body and only asks (RFC 9110, 9.2.1).

use axum::http::{Method, Request, Response, request};
use hyper::body::{Body as _, Incoming};

use super::lanes::Pass;
use super::upload::Upload;
use super::upstream::{self, DialError, Sender};
use crate::registry::Route;

/// There is no response.
#[derive(Debug)]
pub(super) struct Failed {
    /// The request, if nothing of it was sent.
    pub(super) unsent: Option<Request<Upload>>,
    pub(super) cause: ExchangeError,
}

/// Why there is no response.
#[derive(Debug, thiserror::Error)]
pub(super) enum ExchangeError {
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error("the connection was lost before a response came")]
    Lost(#[source] hyper::Error),
}

impl ExchangeError {
    /// Whether only a VM that has ended explains it.
    pub(super) fn means_gone(&self) -> bool {
        match self {
            Self::Dial(error) => error.means_gone(),
            Self::Lost(_) => false,
        }
    }
}

/// Sends a request and waits for the head of its response, without a limit.
pub(super) async fn exchange(
    mut request: Request<Upload>,
    route: &Route,
    port: u16,
    pass: &Pass,
) -> Result<(Response<Incoming>, Sender), Failed> {
    if port == api_types::envd::ENVD_PORT {
        while let Some(sender) = pass.take().await {
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
    match upstream::dial(&route.vsock, port).await {
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

/// The head of a request that may be sent twice.
fn copy_of(request: &Request<Upload>) -> Option<request::Parts> {
    let only_asks = matches!(
        *request.method(),
        Method::GET | Method::HEAD | Method::OPTIONS
    );
    if !only_asks || !request.body().is_end_stream() {
        return None;
    }
    let mut copy = Request::new(());
    copy.method_mut().clone_from(request.method());
    copy.uri_mut().clone_from(request.uri());
    copy.headers_mut().clone_from(request.headers());
    Some(copy.into_parts().0)
}
