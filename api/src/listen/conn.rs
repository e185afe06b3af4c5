//! One connection, from the TLS handshake to its end.

use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use axum::http::{Request, StatusCode};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::activity::{Activity, Answer, Noticed, OverTcp, Overdue};
use super::limits::{FIELDS, HEAD, STREAMS};
use super::seats::Seat;
use super::{Server, limits::Limits};
use crate::proxy::Routes;

/// Bytes that a client may send ahead on one HTTP/2 stream, and on all streams of a connection.
const STREAM_WINDOW: u32 = 512 << 10;
const CONNECTION_WINDOW: u32 = 1 << 20;
/// Bytes that wait to be sent on one HTTP/2 stream.
const STREAM_BUFFER: usize = 128 << 10;
const FRAME: u32 = 64 << 10;

/// Serves one connection, until it has to make room for another at the latest. Nobody waits for the result: what goes
/// wrong concerns only this client.
pub(super) async fn serve<R: Routes>(
    server: Arc<Server<R>>,
    stream: TcpStream,
    peer: SocketAddr,
    seat: Seat,
    stopping: watch::Receiver<bool>,
) {
    tokio::select! {
        biased;
        () = seat.evicted() => tracing::debug!(%peer, "closed to make room for another client"),
        () = open(&server, stream, peer, &seat, stopping) => {}
    }
}

async fn open<R: Routes>(
    server: &Arc<Server<R>>,
    stream: TcpStream,
    peer: SocketAddr,
    seat: &Seat,
    stopping: watch::Receiver<bool>,
) {
    // Commands and their output are small and wanted at once.
    let set = stream
        .set_nodelay(true)
        .and(super::probe(&stream).map_err(Into::into));
    if let Err(error) = set {
        tracing::debug!(%peer, %error, "a client has gone at once");
        return;
    }
    let Some(tls) = &server.tls else {
        return speak(server, stream, peer, seat, stopping).await;
    };
    let handshake = tokio::time::timeout(server.limits.handshake, tls.accept(stream));
    match handshake.await {
        Ok(Ok(stream)) => speak(server, stream, peer, seat, stopping).await,
        Ok(Err(error)) => tracing::debug!(%peer, %error, "no TLS"),
        Err(_) => tracing::debug!(%peer, "the TLS handshake took too long"),
    }
}

async fn speak<R: Routes, S>(
    server: &Arc<Server<R>>,
    stream: S,
    peer: SocketAddr,
    seat: &Seat,
    mut stopping: watch::Receiver<bool>,
) where
    S: AsyncRead + AsyncWrite + OverTcp + Unpin + Send + 'static,
{
    let activity = seat.activity();
    activity.opened();
    let io = TokioIo::new(Noticed::new(stream, Arc::clone(activity)));
    let service = hyper::service::service_fn(|request: Request<Incoming>| {
        let under_way = activity.begin(request.version());
        let dispatch = server.dispatch.clone();
        let seat = seat.clone();
        let client = server.clients.enter(peer, request.headers());
        async move {
            let (response, client) = match client {
                Ok(client) => {
                    let held = (seat.clone(), client.clone());
                    (dispatch.answer(request, peer, held).await, client)
                }
                Err(crowded) => (crowded.answer(request.headers()), None),
            };
            if response.status() == StatusCode::SWITCHING_PROTOCOLS {
                seat.pin();
            }
            let whole = response.map(|body| Answer::new(body, under_way, client));
            Ok::<_, std::convert::Infallible>(whole)
        }
    });
    let builder = protocols();
    let mut connection = pin!(builder.serve_connection_with_upgrades(io, service));
    let mut watched = pin!(overdue(activity, &server.limits));
    let mut told = false;
    let mut stop = pin!(stopping.wait_for(|is_stopping| *is_stopping));
    let ended = poll_fn(|cx| {
        if !told && stop.as_mut().poll(cx).is_ready() {
            told = true;
            connection.as_mut().graceful_shutdown();
        }
        if let Poll::Ready(ended) = connection.as_mut().poll(cx) {
            return Poll::Ready(Ok(ended));
        }
        watched.as_mut().poll(cx).map(Err)
    });
    match ended.await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%peer, error, "a connection ended badly"),
        Err(why) => tracing::debug!(%peer, ?why, "a client took too long"),
    }
}

fn protocols() -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        // `Activity` tells heads from idle times, which this does not.
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

/// Ends when what the connection does is overdue. Polled whenever the connection is, so it sees each change
/// of state; a deadline that has moved away is only noticed when the old one comes.
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
