//! A guest's connection whose requests the proxy reads: HTTP/1 or HTTP/2, with or without TLS.

use std::{
    convert::Infallible,
    net::SocketAddr,
    pin::{Pin, pin},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use egress::{
    control::{Ask, Flow},
    framing::MAX_HEAD,
    name::HostName,
};
use hyper::{
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    task::JoinSet,
};

use super::{
    HEAD_TIME, IDLE_TIME, Shared, TUNNEL_IDLE_TIME, exchange,
    record::refuse_connection,
    sandboxes::Membership,
    stream::{Activity, Followed, Framed},
    tasks::Tasks,
    upstream::{Protocol, Upstream},
};

/// Maximum number of concurrent requests on one HTTP/2 connection.
const STREAMS: u32 = 100;
/// Bytes that a guest may send ahead of the server, for a stream and for all streams of a connection.
const WINDOW: u32 = 256 << 10;
const PING_INTERVAL: Duration = Duration::from_secs(60);

/// The transport below a session's HTTP.
pub(crate) enum Security {
    Plain,
    /// Each request must be for this name, the SNI.
    Tls {
        name: HostName,
    },
}

impl Security {
    pub(crate) fn scheme(&self) -> &'static str {
        match self {
            Self::Plain => "http",
            Self::Tls { .. } => "https",
        }
    }

    /// The kind of rule request for the headers of an HTTP request.
    pub(crate) fn ask(&self) -> Ask {
        match self {
            Self::Plain => Ask::HeadersInClear,
            Self::Tls { .. } => Ask::Headers,
        }
    }
}

/// State that the requests of one connection share.
pub(crate) struct Session {
    pub(crate) shared: Arc<Shared>,
    pub(crate) flow: Flow,
    /// The guest's end of the flow, which identifies the sandbox in rule requests.
    pub(crate) peer: SocketAddr,
    pub(crate) membership: Membership,
    pub(crate) security: Security,
    pub(crate) upstream: Upstream,
    pub(crate) framed: Arc<Framed>,
    /// WebSockets, which end with the session.
    tunnels: Mutex<JoinSet<()>>,
}

impl Session {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        flow: Flow,
        peer: SocketAddr,
        membership: Membership,
        security: Security,
        upstream: Upstream,
    ) -> Arc<Self> {
        Arc::new(Self {
            shared: Arc::clone(shared),
            flow,
            peer,
            membership,
            security,
            upstream,
            framed: Framed::new(),
            tunnels: Mutex::default(),
        })
    }

    /// Whether the resolver has resolved this name to the flow's address.
    pub(crate) fn is_answered(&self, name: &HostName) -> bool {
        self.flow
            .names
            .iter()
            .any(|answered| answered == name.as_str())
    }

    pub(crate) fn tunnel(&self, tunnel: impl Future<Output = ()> + Send + 'static) {
        self.tunnels().spawn(tunnel);
    }

    /// No code panics while it holds the lock.
    fn tunnels(&self) -> std::sync::MutexGuard<'_, JoinSet<()>> {
        self.tunnels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves the connection until it ends, is idle, or violates HTTP. Dropping the future ends all parts of it.
pub(crate) async fn serve<S>(session: Arc<Session>, stream: S, activity: &Activity, tasks: &Tasks)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let framed = Arc::clone(&session.framed);
    let failed = match session.upstream.protocol() {
        Protocol::Http1 => {
            let slow = framed.slow_head(HEAD_TIME);
            let stream = Followed {
                stream,
                framed: Arc::clone(&framed),
            };
            tokio::select! {
                failed = http1(&session, stream) => failed,
                () = slow => Some("the head of a request took too long".to_owned()),
                () = activity.idle(IDLE_TIME) => None,
            }
        }
        Protocol::Http2 => tokio::select! {
            failed = http2(&session, stream, tasks) => failed,
            () = activity.idle(IDLE_TIME) => None,
        },
    };
    if let Some(reason) = failed {
        refuse_connection(&session.shared.link, &session.flow, &reason);
    }
    let mut tunnels = std::mem::take(&mut *session.tunnels());
    tokio::select! {
        () = async { while tunnels.join_next().await.is_some() {} } => {}
        () = activity.idle(TUNNEL_IDLE_TIME) => {}
    }
}

/// Returns the reason if the connection ended because a request could not be read.
async fn http1<S>(session: &Arc<Session>, stream: S) -> Option<String>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(|request| {
        let session = Arc::clone(session);
        async move { Ok::<_, Infallible>(exchange::answer(&session, request).await) }
    });
    let connection = http1::Builder::new()
        .preserve_header_case(true)
        .max_buf_size(MAX_HEAD)
        .auto_date_header(false)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let error = ended(session, connection, |connection| {
        connection.graceful_shutdown();
    });
    error.await.map(|error| match session.framed.violation() {
        Some(violation) => violation.to_string(),
        None => format!("a request cannot be read: {error}"),
    })
}

async fn http2<S>(session: &Arc<Session>, stream: S, tasks: &Tasks) -> Option<String>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(|request| {
        let session = Arc::clone(session);
        async move { Ok::<_, Infallible>(exchange::answer(&session, request).await) }
    });
    let connection = http2::Builder::new(tasks.clone())
        .timer(TokioTimer::new())
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .max_concurrent_streams(STREAMS)
        .max_header_list_size(u32::try_from(MAX_HEAD).unwrap_or(u32::MAX))
        .max_send_buf_size(MAX_HEAD)
        .keep_alive_interval(PING_INTERVAL)
        .auto_date_header(false)
        .serve_connection(TokioIo::new(stream), service);
    let error = ended(session, connection, |connection| {
        connection.graceful_shutdown();
    });
    error
        .await
        .map(|error| format!("a request cannot be read: {error}"))
}

/// Waits for the end of a connection. Once `cube-api` is gone, the connection accepts no further request. Returns the
/// error if a request could not be read.
async fn ended<C>(
    session: &Session,
    connection: C,
    shut_down: impl FnOnce(Pin<&mut C>),
) -> Option<hyper::Error>
where
    C: Future<Output = hyper::Result<()>>,
{
    let mut connection = pin!(connection);
    let mut closed = session.shared.link.closed();
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = closed.wait() => {
            shut_down(connection.as_mut());
            connection.await
        }
    };
    ended.err().filter(hyper::Error::is_parse)
}
