//! The connection to the server of a flow. Only one guest connection uses it, for one name, and it always leads to the
//! address of that guest connection.
//!
//! A server that ignores the body of a request interprets the body as the next request, and the real next request as
//! the rest of that one (CL.0). A guest could use this to have the rule's headers of its next request stored as text.
//! HTTP/1 connections are therefore not reused after a body that a server is likely to ignore: see [`Reuse`].

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use egress::{
    control::{Credentials, Flow, Way, WayTls},
    framing::MAX_HEAD,
    name::HostName,
};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Body, Incoming},
    client::conn::{TrySendError, http1, http2},
};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::Mutex,
    time::timeout,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::{
    HEAD_TIME, Shared,
    body::ToServer,
    link::LinkError,
    socks::{self, SocksError},
    tasks::Tasks,
};

/// Bytes that a server may send ahead of the guest, for a stream and for all streams of a connection.
const WINDOW: u32 = 512 << 10;
const PING_INTERVAL: Duration = Duration::from_secs(60);

/// The version of HTTP on both sides of a guest's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Http1,
    Http2,
}

impl Protocol {
    /// Its name in ALPN.
    pub(crate) fn alpn(self) -> &'static [u8] {
        match self {
            Self::Http1 => b"http/1.1",
            Self::Http2 => b"h2",
        }
    }
}

/// Errors whose texts are shown to the guest.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UpstreamError {
    #[error("cannot connect to {0}: {1}")]
    Connect(SocketAddr, #[source] io::Error),
    #[error("cannot connect to {0} in time")]
    Timeout(SocketAddr),
    #[error("cannot set up TLS with {0}: {1}")]
    Tls(SocketAddr, #[source] io::Error),
    #[error("the name of {0} cannot be used in TLS")]
    Name(HostName),
    #[error("{0} does not speak the HTTP version of this connection")]
    Protocol(SocketAddr),
    #[error("cannot use the egress proxy of the sandbox: {0}")]
    Way(String),
    #[error("the HTTP connection to {0} failed: {1}")]
    Http(SocketAddr, #[source] hyper::Error),
}

/// Connects one guest connection to its servers.
pub(crate) struct Upstream {
    dialer: Dialer,
    remote: SocketAddr,
    tls: Option<Tls>,
    protocol: Protocol,
    kept: Mutex<Option<Kept>>,
    tasks: Tasks,
}

/// A connection that may carry further requests, all for this name.
struct Kept {
    name: HostName,
    sender: Sender,
}

struct Tls {
    config: ClientConfig,
    name: ServerName<'static>,
}

enum Sender {
    Http1(http1::SendRequest<ToServer>),
    Http2(http2::SendRequest<ToServer>),
}

/// Whether an HTTP/1 connection may carry another request after this one.
enum Reuse {
    /// The request has no body.
    Always,
    /// The body has ended, and the server has read all of it and has not refused the request.
    AfterBody(Arc<AtomicBool>),
    /// Servers ignore bodies of such methods (RFC 9110, section 9.3.1: they have no defined meaning).
    Never,
}

impl Reuse {
    fn of(request: &Request<ToServer>) -> Self {
        let body = request.body();
        match *request.method() {
            _ if body.is_end_stream() => Self::Always,
            Method::POST | Method::PUT | Method::PATCH => Self::AfterBody(body.ended()),
            _ => Self::Never,
        }
    }

    fn is_allowed(&self, status: StatusCode) -> bool {
        match self {
            Self::Always => true,
            Self::AfterBody(ended) => status.is_success() && ended.load(Ordering::Acquire),
            Self::Never => false,
        }
    }
}

/// Whether a connection has already carried requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Age {
    Kept,
    New,
}

impl Upstream {
    /// A server that uses HTTP/1 without TLS. Connects with the first request.
    pub(crate) fn plain(dialer: Dialer, tasks: &Tasks) -> Self {
        Self::new(dialer, None, Protocol::Http1, tasks)
    }

    /// A server with TLS. Connects now, to find out which protocol it supports. If this fails, each request tries again
    /// with the first of `offered`, and fails with the reason.
    pub(crate) async fn tls(
        dialer: Dialer,
        name: &HostName,
        config: &ClientConfig,
        offered: &[Protocol],
        tasks: &Tasks,
    ) -> Result<Self, UpstreamError> {
        let fallback = offered.last().copied().unwrap_or(Protocol::Http1);
        let unusable = |_| UpstreamError::Name(name.clone());
        let tls = Tls {
            config: config.clone(),
            name: ServerName::try_from(name.to_string()).map_err(unusable)?,
        };
        let mut upstream = Self::new(dialer, Some(tls), fallback, tasks);
        if let Ok((sender, protocol)) = upstream.connect(offered).await {
            upstream.protocol = protocol;
            *upstream.kept.get_mut() = Some(Kept {
                name: name.clone(),
                sender,
            });
        }
        Ok(upstream)
    }

    fn new(dialer: Dialer, tls: Option<Tls>, protocol: Protocol, tasks: &Tasks) -> Self {
        Self {
            remote: dialer.remote,
            dialer,
            tls,
            protocol,
            kept: Mutex::default(),
            tasks: tasks.clone(),
        }
    }

    pub(crate) fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Sends a request. If a kept connection rejects it because the server has closed it, sends it again over a new
    /// one.
    pub(crate) async fn send(
        &self,
        name: &HostName,
        request: Request<ToServer>,
    ) -> Result<Response<Incoming>, UpstreamError> {
        let failed = |error| UpstreamError::Http(self.remote, error);
        let (sender, age) = self.sender(name).await?;
        let mut refused = match self.try_send(name, sender, request).await {
            Ok(response) => return Ok(response),
            Err(refused) => refused,
        };
        let request = match (age, refused.take_message()) {
            (Age::Kept, Some(request)) => request,
            (Age::Kept | Age::New, _) => return Err(failed(refused.into_error())),
        };
        let (sender, _) = self.sender(name).await?;
        let sent = self.try_send(name, sender, request).await;
        sent.map_err(|refused| failed(refused.into_error()))
    }

    /// The sender of the name's connection, or of a new one. An HTTP/1 sender is removed, because it serves one request
    /// at a time. Requests that need a new connection wait for each other, so that they share one.
    async fn sender(&self, name: &HostName) -> Result<(Sender, Age), UpstreamError> {
        let mut kept = self.kept.lock().await;
        match kept.take().filter(|kept| kept.name == *name) {
            Some(Kept {
                sender: Sender::Http1(mut sender),
                ..
            }) => {
                if sender.ready().await.is_ok() {
                    return Ok((Sender::Http1(sender), Age::Kept));
                }
            }
            Some(Kept {
                name,
                sender: Sender::Http2(sender),
            }) if !sender.is_closed() => {
                let (kept_sender, used) = (Sender::Http2(sender.clone()), Sender::Http2(sender));
                *kept = Some(Kept {
                    name,
                    sender: kept_sender,
                });
                return Ok((used, Age::Kept));
            }
            Some(_) | None => {}
        }
        let (sender, _) = self.connect(&[self.protocol]).await?;
        if let Sender::Http2(sender) = &sender {
            *kept = Some(Kept {
                name: name.clone(),
                sender: Sender::Http2(sender.clone()),
            });
        }
        Ok((sender, Age::New))
    }

    async fn try_send(
        &self,
        name: &HostName,
        sender: Sender,
        request: Request<ToServer>,
    ) -> Result<Response<Incoming>, TrySendError<Request<ToServer>>> {
        match sender {
            Sender::Http1(mut sender) => {
                let reuse = Reuse::of(&request);
                let response = sender.try_send_request(request).await?;
                // A connection that is not kept ends with this response.
                if reuse.is_allowed(response.status()) {
                    *self.kept.lock().await = Some(Kept {
                        name: name.clone(),
                        sender: Sender::Http1(sender),
                    });
                }
                Ok(response)
            }
            Sender::Http2(mut sender) => sender.try_send_request(request).await,
        }
    }

    async fn connect(&self, offered: &[Protocol]) -> Result<(Sender, Protocol), UpstreamError> {
        let connected = timeout(HEAD_TIME, self.connect_now(offered)).await;
        connected.unwrap_or(Err(UpstreamError::Timeout(self.remote)))
    }

    async fn connect_now(&self, offered: &[Protocol]) -> Result<(Sender, Protocol), UpstreamError> {
        match self.dialer.connect().await? {
            Wire::Tcp(stream) => self.over(stream, offered).await,
            Wire::Tls(stream) => self.over(*stream, offered).await,
        }
    }

    async fn over<S>(
        &self,
        stream: S,
        offered: &[Protocol],
    ) -> Result<(Sender, Protocol), UpstreamError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let Some(tls) = &self.tls else {
            return Ok((self.http1(stream).await?, Protocol::Http1));
        };
        let mut config = tls.config.clone();
        config.alpn_protocols = offered
            .iter()
            .map(|protocol| protocol.alpn().to_vec())
            .collect();
        let connector = TlsConnector::from(Arc::new(config));
        let stream = connector.connect(tls.name.clone(), stream).await;
        let stream = stream.map_err(|error| UpstreamError::Tls(self.remote, error))?;
        let chosen = match stream.get_ref().1.alpn_protocol() {
            Some(b"h2") => Protocol::Http2,
            // A server without ALPN uses HTTP/1.
            Some(_) | None => Protocol::Http1,
        };
        if !offered.contains(&chosen) {
            return Err(UpstreamError::Protocol(self.remote));
        }
        let sender = match chosen {
            Protocol::Http1 => self.http1(stream).await?,
            Protocol::Http2 => self.http2(stream).await?,
        };
        Ok((sender, chosen))
    }

    async fn http1<S>(&self, stream: S) -> Result<Sender, UpstreamError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let handshake = http1::Builder::new()
            .preserve_header_case(true)
            .max_buf_size(MAX_HEAD)
            .handshake(TokioIo::new(stream))
            .await;
        let (sender, connection) =
            handshake.map_err(|error| UpstreamError::Http(self.remote, error))?;
        self.tasks.spawn(async move {
            // Its error is reported by the request.
            let _ = connection.with_upgrades().await;
        });
        Ok(Sender::Http1(sender))
    }

    async fn http2<S>(&self, stream: S) -> Result<Sender, UpstreamError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let handshake = http2::Builder::new(self.tasks.clone())
            .timer(TokioTimer::new())
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .max_header_list_size(u32::try_from(MAX_HEAD).unwrap_or(u32::MAX))
            .max_send_buf_size(MAX_HEAD)
            .keep_alive_interval(PING_INTERVAL)
            .handshake(TokioIo::new(stream))
            .await;
        let (sender, connection) =
            handshake.map_err(|error| UpstreamError::Http(self.remote, error))?;
        self.tasks.spawn(async move {
            // Its error is reported by the requests.
            let _ = connection.await;
        });
        Ok(Sender::Http2(sender))
    }
}

/// A connection to a server.
pub(crate) enum Wire {
    Tcp(TcpStream),
    /// Inside the TLS connection of the sandbox's proxy.
    Tls(Box<TlsStream<TcpStream>>),
}

/// Connects to the address of a flow, and to no other, either directly or through the sandbox's proxy.
#[derive(Clone)]
pub(crate) struct Dialer {
    shared: Arc<Shared>,
    remote: SocketAddr,
    /// The guest's end of the flow, if the sandbox's way must be requested.
    asks_for: Option<SocketAddr>,
}

impl Dialer {
    pub(crate) fn of(shared: &Arc<Shared>, flow: &Flow, peer: SocketAddr) -> Self {
        Self {
            shared: Arc::clone(shared),
            remote: flow.remote,
            asks_for: flow.has_own_way.then_some(peer),
        }
    }

    pub(crate) async fn connect(&self) -> Result<Wire, UpstreamError> {
        let connected = timeout(HEAD_TIME, self.connect_now()).await;
        connected.unwrap_or(Err(UpstreamError::Timeout(self.remote)))
    }

    async fn connect_now(&self) -> Result<Wire, UpstreamError> {
        let remote = self.remote;
        let Some(peer) = self.asks_for else {
            let stream = TcpStream::connect(remote).await;
            return stream
                .map(|stream| Wire::Tcp(immediate(stream)))
                .map_err(|error| UpstreamError::Connect(remote, error));
        };
        let unknown = |error: LinkError| UpstreamError::Way(error.to_string());
        match self.shared.link.way(peer).await.map_err(unknown)? {
            // The policy redirects every flow because the sandbox has a proxy. Without a proxy, no flow may leave.
            Way::Direct => Err(UpstreamError::Way("it is no longer configured".to_owned())),
            Way::Failed { reason } => Err(UpstreamError::Way(reason)),
            Way::Socks {
                addresses,
                credentials,
                tls,
            } => {
                let asked = self.by_proxy(&addresses, credentials.as_ref(), tls.as_ref());
                asked
                    .await
                    .map_err(|error| UpstreamError::Way(error.to_string()))
            }
        }
    }

    async fn by_proxy(
        &self,
        addresses: &[SocketAddr],
        credentials: Option<&Credentials>,
        tls: Option<&WayTls>,
    ) -> Result<Wire, SocksError> {
        let mut stream = immediate(TcpStream::connect(addresses).await?);
        let Some(tls) = tls else {
            socks::connect(&mut stream, self.remote, credentials).await?;
            return Ok(Wire::Tcp(stream));
        };
        let mut stream = socks::secured(stream, tls, &self.shared.client).await?;
        socks::connect(&mut stream, self.remote, credentials).await?;
        Ok(Wire::Tls(Box::new(stream)))
    }
}

fn immediate(stream: TcpStream) -> TcpStream {
    let _ = stream.set_nodelay(true);
    stream
}
