//! Forwards a request to the successor of this process, which has taken over all sandboxes.
//!
//! Each request uses its own connection to the internal socket ([`super::internal`]), so a request that could not be
//! sent has never reached the successor. Bodies, trailers and upgrades pass in both directions with back-pressure.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep};

use super::Came;
use super::internal::forward_line;
use super::limits::{FIELDS, HEAD};
use crate::proxy::{Refusal, Relay, Upload};

/// How long to wait for a server behind the internal socket. After a crash, the next server binds it again.
const DIAL_LIMIT: Duration = Duration::from_secs(10);
const DIAL_AGAIN: Duration = Duration::from_millis(50);
/// Extra header fields, beyond a request's limit, for those that this server adds.
const ADDED: usize = 64;

/// Forwards a request of `peer` to the server behind the internal socket at `path`. `host` is the host that the request
/// names. If the response upgrades the connection, `held` is kept until the upgraded connection ends.
///
/// # Errors
/// Returns [`Refusal::NoSuccessor`] if there is no response.
pub(super) async fn forward(
    path: &Path,
    request: Request<Upload>,
    peer: SocketAddr,
    came: &Came,
    host: &str,
    held: impl Send + 'static,
) -> Result<Response<Body>, Refusal> {
    let (relay, request) = Relay::of(request, host);
    let mut sender = dial(path, peer, came)
        .await
        .map_err(|error| refused(&error))?;
    let response = sender.send_request(request).await;
    let response = response.map_err(|error| refused(&error))?;
    // The connection lives as long as its sender.
    let open = |body: Incoming| {
        Body::new(body.map_frame(move |frame| {
            let _open = &sender;
            frame
        }))
    };
    let response = relay.response(response, held, open);
    response.ok_or(Refusal::NoSuccessor)
}

fn refused(error: &dyn std::error::Error) -> Refusal {
    let why = model::chain(error);
    tracing::warn!(why, "cannot forward a request to the successor process");
    Refusal::NoSuccessor
}

#[derive(Debug, thiserror::Error)]
enum DialError {
    #[error("cannot connect to the server's internal socket")]
    Connect(#[source] io::Error),
    #[error("cannot start HTTP on the connection")]
    Unusable(#[source] hyper::Error),
}

async fn dial(
    path: &Path,
    peer: SocketAddr,
    came: &Came,
) -> Result<SendRequest<Upload>, DialError> {
    let mut stream = connect(path).await.map_err(DialError::Connect)?;
    let line = forward_line(peer, came);
    let written = stream.write_all(line.as_bytes()).await;
    written.map_err(DialError::Connect)?;
    let (sender, connection) = http1::Builder::new()
        .max_headers(FIELDS + ADDED)
        .max_header_size(2 * HEAD)
        .max_buf_size(2 * HEAD)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(DialError::Unusable)?;
    tasks::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "a connection to the successor failed");
        }
    });
    Ok(sender)
}

/// Connects to the internal socket. Retries until [`DIAL_LIMIT`] if no process listens.
async fn connect(path: &Path) -> io::Result<UnixStream> {
    let deadline = Instant::now() + DIAL_LIMIT;
    loop {
        match UnixStream::connect(path).await {
            Err(error)
                if Instant::now() < deadline
                    && matches!(
                        error.kind(),
                        io::ErrorKind::ConnectionRefused
                            | io::ErrorKind::NotFound
                            | io::ErrorKind::WouldBlock
                    ) =>
            {
                sleep(DIAL_AGAIN).await;
            }
            done => return done,
        }
    }
}
