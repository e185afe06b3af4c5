//! Sends one request and receives the head of its response, on an idle or a new connection.
//!
//! The agent may close an idle connection just as it is reused. The request is then sent again on another connection,
//! but only if none of it was written ([`super::line`]), or if it only reads (RFC 9110, 9.2.1), and if no byte of its
//! body is lost.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{Method, Request, Response, request};
use hyper::body::Incoming;

use super::connections::RequestPermit;
use super::line::Line;
use super::upload::{KeepUntil, Progress, Upload};
use super::upstream::{self, DialError, Sender};
use crate::registry::Route;

/// Calls of the agent that only read. Their method is POST, as for all calls of the Connect protocol.
const READING_CALLS: [&str; 3] = [
    "/process.Process/List",
    "/filesystem.Filesystem/Stat",
    "/filesystem.Filesystem/ListDir",
];

/// A request that got no response.
#[derive(Debug)]
pub(super) struct Failed {
    /// The request, if it may be sent again.
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
    if port == envd::ENVD_PORT {
        let progress = request.body().progress();
        while let Some(sender) = permit.take_idle().await {
            match send_again(sender, request).await {
                Ok(answered) => {
                    progress.forget();
                    return Ok(answered);
                }
                Err(Failed {
                    unsent: Some(unsent),
                    ..
                }) => request = unsent,
                Err(failed) => return Err(failed),
            }
        }
        progress.forget();
    }
    match upstream::dial(route, port).await {
        Ok(sender) => send(sender, request).await.map_err(|(failed, _)| failed),
        Err(error) => Err(Failed {
            unsent: Some(request),
            cause: error.into(),
        }),
    }
}

/// Sends a request on a connection that was idle. Returns the request if it fails and may be sent again.
async fn send_again(
    sender: Sender,
    request: Request<Upload>,
) -> Result<(Response<Incoming>, Sender), Failed> {
    let (original, request) = Original::of(request, sender.line());
    let (mut failed, sender) = match send(sender, request).await {
        Ok(answered) => return Ok(answered),
        Err(failed) => failed,
    };
    if failed.unsent.is_none() && original.may_be_sent(&failed.cause) {
        sender.end().await;
        failed.unsent = original.request();
    }
    Err(failed)
}

async fn send(
    mut sender: Sender,
    request: Request<Upload>,
) -> Result<(Response<Incoming>, Sender), (Failed, Sender)> {
    match sender.send(request).await {
        Ok(response) => Ok((response, sender)),
        Err(mut error) => {
            let failed = Failed {
                unsent: error.take_message(),
                cause: ExchangeError::Lost(error.into_error()),
            };
            Err((failed, sender))
        }
    }
}

/// Keeps a request for as long as it may have to be sent again.
struct Original {
    head: request::Parts,
    progress: Progress,
    patience: Option<Duration>,
    line: Arc<Line>,
    only_reads: bool,
}

impl Original {
    fn of(request: Request<Upload>, line: &Arc<Line>) -> (Self, Request<Upload>) {
        line.begin();
        let (head, mut body) = request.into_parts();
        let original = Self {
            only_reads: only_reads(&head),
            head: head.clone(),
            progress: body.progress(),
            patience: body.patience(),
            line: Arc::clone(line),
        };
        body.keep(if original.only_reads {
            KeepUntil::Answered
        } else {
            KeepUntil::Written(Arc::clone(line))
        });
        (original, Request::from_parts(head, body))
    }

    /// A response that is not HTTP shows that the sandbox has seen the request.
    fn may_be_sent(&self, cause: &ExchangeError) -> bool {
        let is_answered = matches!(cause, ExchangeError::Lost(error) if error.is_parse());
        !self.line.is_used() || (self.only_reads && !is_answered)
    }

    fn request(self) -> Option<Request<Upload>> {
        let body = self.progress.rewind(self.patience)?;
        Some(Request::from_parts(self.head, body))
    }
}

fn only_reads(head: &request::Parts) -> bool {
    match head.method {
        Method::GET | Method::HEAD | Method::OPTIONS => true,
        Method::POST => READING_CALLS.contains(&head.uri.path()),
        _ => false,
    }
}
