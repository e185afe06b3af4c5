//! Serves one connection, from the TLS handshake to its end.
//!
//! After a handover, an HTTP/1.1 connection stays open until its next response, which tells the client to close it. If
//! the server closed an idle connection, a request could already be in transit. HTTP/2 has a message for this purpose.

use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use axum::http::{HeaderValue, Request, StatusCode, Version, header};
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tokio_rustls::TlsAcceptor;

use super::activity::{Activity, ClientStream, Overdue, TrackedBody, TrackedStream};
use super::limits::{FIELDS, HEAD, STREAMS};
use super::permits::Permit;
use super::{Came, Shared, limits::Limits};
use crate::peers::Peer;
use crate::proxy::Routes;
use crate::tcp;

/// HTTP/2 flow-control windows in bytes: how much data that the server has not read yet a client may send on one
/// stream, and on all streams of a connection together.
const STREAM_WINDOW: u32 = 512 << 10;
const CONNECTION_WINDOW: u32 = 1 << 20;
/// Maximum number of bytes buffered for sending on one HTTP/2 stream.
const STREAM_BUFFER: usize = 128 << 10;
const FRAME: u32 = 64 << 10;

/// How the server treats connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Serving,
    /// Another process accepts the connections of clients.
    Moved,
    /// Requests in progress are completed, and no more are accepted.
    Stopping,
}

/// Serves one connection until it ends or is evicted. Errors are logged and not returned, since they concern this
/// client only.
pub(super) async fn serve<R: Routes>(
    server: Arc<Shared<R>>,
    stream: TcpStream,
    peer: SocketAddr,
    permit: Permit,
    phase: watch::Receiver<Phase>,
) {
    until_evicted(&permit, peer, open(&server, stream, peer, &permit, phase)).await;
}

/// Like [`serve`], for a connection forwarded by another process.
pub(super) async fn serve_forwarded<R: Routes>(
    server: Arc<Shared<R>>,
    stream: UnixStream,
    (peer, came): (SocketAddr, Came),
    permit: Permit,
    phase: watch::Receiver<Phase>,
) {
    let served = serve_http(&server, Box::new(stream), (peer, came), &permit, phase);
    until_evicted(&permit, peer, served).await;
}

/// Like [`serve`], for a connection to the cluster listener.
pub(super) async fn serve_node<R: Routes>(
    server: Arc<Shared<R>>,
    stream: TcpStream,
    peer: SocketAddr,
    permit: Permit,
    phase: watch::Receiver<Phase>,
) {
    until_evicted(
        &permit,
        peer,
        open_node(&server, stream, peer, &permit, phase),
    )
    .await;
}

async fn open_node<R: Routes>(
    server: &Arc<Shared<R>>,
    stream: TcpStream,
    peer: SocketAddr,
    permit: &Permit,
    phase: watch::Receiver<Phase>,
) {
    let Some(nodes) = &server.nodes else {
        return;
    };
    if stream.set_nodelay(true).is_err() || tcp::probe(&stream).is_err() {
        return;
    }
    // The current configuration, because certificates are renewed.
    let accept = TlsAcceptor::from(nodes.server()).accept(stream);
    match tokio::time::timeout(server.limits.handshake, accept).await {
        Ok(Ok(stream)) => {
            let chain = stream.get_ref().1.peer_certificates();
            let certificate = chain.and_then(<[_]>::first).cloned();
            let came = Came::Node(Arc::new(Peer::new(certificate.map(|c| c.into_owned()))));
            serve_http(server, Box::new(stream), (peer, came), permit, phase).await;
        }
        Ok(Err(error)) => tracing::warn!(%peer, %error, "TLS handshake with another node failed"),
        Err(_) => tracing::debug!(%peer, "TLS handshake with another node timed out"),
    }
}

async fn until_evicted(permit: &Permit, peer: SocketAddr, served: impl Future<Output = ()>) {
    tokio::select! {
        biased;
        () = permit.evicted() => tracing::debug!(%peer, "connection closed to make room for another client"),
        () = served => {}
    }
}

async fn open<R: Routes>(
    server: &Arc<Shared<R>>,
    stream: TcpStream,
    peer: SocketAddr,
    permit: &Permit,
    phase: watch::Receiver<Phase>,
) {
    // Commands and their output are small and latency matters: disable Nagle's algorithm.
    let set = stream
        .set_nodelay(true)
        .and(tcp::probe(&stream).map_err(Into::into));
    if let Err(error) = set {
        tracing::debug!(%peer, %error, "cannot set socket options: the client has already disconnected");
        return;
    }
    let Some(tls) = &server.tls else {
        let stream = Box::new(stream);
        return serve_http(server, stream, (peer, Came::Client), permit, phase).await;
    };
    let handshake = tokio::time::timeout(server.limits.handshake, tls.accept(stream));
    match handshake.await {
        Ok(Ok(stream)) => {
            let stream = Box::new(stream);
            serve_http(server, stream, (peer, Came::Client), permit, phase).await;
        }
        Ok(Err(error)) => tracing::debug!(%peer, %error, "TLS handshake failed"),
        Err(_) => tracing::debug!(%peer, "TLS handshake timed out"),
    }
}

async fn serve_http<R: Routes>(
    server: &Arc<Shared<R>>,
    stream: Box<dyn ClientStream>,
    (peer, came): (SocketAddr, Came),
    permit: &Permit,
    phase: watch::Receiver<Phase>,
) {
    let activity = permit.activity();
    activity.note_opened();
    let io = TokioIo::new(TrackedStream::new(stream, Arc::clone(activity)));
    let service = hyper::service::service_fn(|request: Request<Incoming>| {
        let under_way = activity.begin(request.version());
        let dispatch = server.dispatch.clone();
        let permit = permit.clone();
        let came = came.clone();
        let client = match came {
            Came::Client => server.clients.admit(peer, request.headers()),
            // The forwarding node has already admitted the client.
            Came::Node(_) => Ok(None),
        };
        let version = request.version();
        let phase = phase.clone();
        async move {
            let (response, client) = match client {
                Ok(client) => {
                    let held = (permit.clone(), client.clone());
                    (dispatch.answer(request, (peer, came), held).await, client)
                }
                Err(refused) => (refused.answer(request.headers()), None),
            };
            let has_moved = *phase.borrow() != Phase::Serving;
            let mut response = response;
            if response.status() == StatusCode::SWITCHING_PROTOCOLS {
                permit.pin();
            } else if has_moved && version != Version::HTTP_2 {
                let close = HeaderValue::from_static("close");
                response.headers_mut().insert(header::CONNECTION, close);
            }
            let whole = response.map(|body| TrackedBody::new(body, under_way, client));
            Ok::<_, std::convert::Infallible>(whole)
        }
    });
    let builder = protocols();
    let mut connection = pin!(builder.serve_connection_with_upgrades(io, service));
    let mut watched = pin!(overdue(activity, &server.limits));
    let mut shutdown_started = false;
    let mut changes = phase.clone();
    let mut moved = pin!(changes.wait_for(|phase| *phase != Phase::Serving));
    let mut has_moved = false;
    let mut changes = phase.clone();
    let mut stop = pin!(changes.wait_for(|phase| *phase == Phase::Stopping));
    let mut is_stopping = false;
    let ended = poll_fn(|cx| {
        has_moved = has_moved || moved.as_mut().poll(cx).is_ready();
        is_stopping = is_stopping || stop.as_mut().poll(cx).is_ready();
        loop {
            if let Poll::Ready(ended) = connection.as_mut().poll(cx) {
                return Poll::Ready(Ok(ended));
            }
            // The poll may have shown that the connection speaks HTTP/2.
            if shutdown_started || !(is_stopping || (has_moved && activity.is_http2())) {
                break;
            }
            shutdown_started = true;
            connection.as_mut().graceful_shutdown();
        }
        watched.as_mut().poll(cx).map(Err)
    });
    match ended.await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%peer, error, "connection failed"),
        Err(why) => tracing::debug!(%peer, ?why, "connection timed out"),
    }
}

/// Starts hyper's tasks, of which there is one per HTTP/2 stream.
#[derive(Clone, Copy, Debug)]
struct Executor;

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for Executor {
    fn execute(&self, task: F) {
        tasks::spawn(task);
    }
}

fn protocols() -> auto::Builder<Executor> {
    let mut builder = auto::Builder::new(Executor);
    builder
        .http1()
        .timer(TokioTimer::new())
        // `Activity` enforces this limit: hyper's timer does not distinguish reading a head from waiting for one.
        .header_read_timeout(None)
        .max_buf_size(HEAD)
        .max_headers(FIELDS);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(u32::try_from(HEAD).unwrap_or(u32::MAX))
        .max_concurrent_streams(STREAMS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME)
        .max_send_buf_size(STREAM_BUFFER);
    builder
}

/// Completes when the current state of the connection exceeds its limit. The future is polled together with the
/// connection, so it sees each change of state. If the deadline moves further away, the timer is reset only after the
/// old deadline has passed.
async fn overdue(activity: &Activity, limits: &Limits) -> Overdue {
    let far = || Instant::now() + limits.idle;
    let first = activity.deadline(limits).map_or_else(far, |(at, _)| at);
    let mut sleep = pin!(sleep_until(first));
    poll_fn(|cx| {
        loop {
            let due = activity.deadline(limits);
            if let Some((at, _)) = due
                && at < sleep.deadline()
            {
                sleep.as_mut().reset(at);
            }
            if sleep.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            match due {
                Some((at, why)) if at <= Instant::now() => return Poll::Ready(why),
                _ => {
                    let next = due.map_or_else(far, |(at, _)| at);
                    sleep.as_mut().reset(next);
                }
            }
        }
    })
    .await
}
