//! Requests to other nodes.
//!
//! Each request uses its own connection from a pool, with HTTP/1.1. HTTP/2 would save handshakes, but its requests
//! share one window per connection: a client that does not read its response would stall the responses of all others.

use std::{
    future::Future,
    io,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::{body::Body, http::Uri};
use cluster::{Cluster, NodeId};
use hyper::{Request, Response, body::Incoming};
use hyper_util::{
    client::legacy::{
        self, Client,
        connect::{Connected, Connection},
    },
    rt::{TokioExecutor, TokioIo, TokioTimer},
};
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::{
    authority::host_name,
    tls::{PeerTls, key_of},
};

/// Timeout for opening a connection to a node.
const DIAL: Duration = Duration::from_secs(3);
/// Maximum number of idle connections per node, and how long they are kept. Servers close them later.
const IDLE: usize = 64;
const IDLE_LIMIT: Duration = Duration::from_secs(60);
/// Allowance above the limits of a request for the header fields that a server adds to a response.
const HEAD: usize = 2 * crate::proxy::head::MAX_SIZE;
const FIELDS: usize = crate::proxy::head::MAX_FIELDS + 64;

/// A request to a node that got no response.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// Nothing was sent.
    #[error("node {node} cannot be reached")]
    Unreachable {
        node: NodeId,
        #[source]
        source: legacy::Error,
    },
    /// The node may have received the request.
    #[error("node {node} did not respond")]
    NoAnswer {
        node: NodeId,
        #[source]
        source: legacy::Error,
    },
    #[error("node {node} did not respond within {limit_s} s")]
    Late { node: NodeId, limit_s: u64 },
    /// Its lease has ended: its server has exited, is stopped, or is cut off from etcd.
    #[error("node {node} is unreachable: its lease ended {limit_s} s ago")]
    Away { node: NodeId, limit_s: u64 },
    #[error("node {node} sent a malformed response: {why}")]
    Malformed { node: NodeId, why: String },
}

impl PeerError {
    #[must_use]
    pub fn node(&self) -> &NodeId {
        match self {
            Self::Unreachable { node, .. }
            | Self::NoAnswer { node, .. }
            | Self::Late { node, .. }
            | Self::Away { node, .. }
            | Self::Malformed { node, .. } => node,
        }
    }
}

/// Connections to the other nodes. Clones share them.
#[derive(Clone, Debug)]
pub struct PeerClient {
    client: Client<Dialer, Body>,
    cluster: Cluster,
}

impl PeerClient {
    #[must_use]
    pub fn new(cluster: Cluster, tls: PeerTls) -> Self {
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_LIMIT)
            .pool_max_idle_per_host(IDLE)
            .http1_max_buf_size(HEAD)
            .http1_max_headers(FIELDS)
            .set_host(false)
            .build(Dialer {
                cluster: cluster.clone(),
                tls,
            });
        Self { client, cluster }
    }

    /// The host part of URIs: a member's name and key. A name without a member resolves to nothing.
    fn membership(&self, node: &NodeId) -> String {
        let view = self.cluster.view();
        let key = view
            .members
            .get(node)
            .map_or("none", |member| member.key.as_str());
        format!("{node}.{key}")
    }

    /// Sends a request. Its URI must be in origin form, its header fields those of the next hop. A request that was not
    /// sent is retried on another connection. A request that the node may have received is never retried.
    ///
    /// # Errors
    /// Returns [`PeerError::Unreachable`] or [`PeerError::NoAnswer`].
    pub async fn send(
        &self,
        node: &NodeId,
        mut request: Request<Body>,
    ) -> Result<Response<Incoming>, PeerError> {
        let path = request
            .uri()
            .path_and_query()
            .map_or("/", |path| path.as_str());
        let absolute = format!("http://{}{path}", self.membership(node));
        // A valid path follows a valid name. Connections to a host that had the name before are not reused.
        if let Ok(uri) = absolute.parse() {
            *request.uri_mut() = uri;
        }
        self.client.request(request).await.map_err(|source| {
            let node = node.clone();
            if source.is_connect() {
                PeerError::Unreachable { node, source }
            } else {
                PeerError::NoAnswer { node, source }
            }
        })
    }
}

/// Opens connections to nodes by name and key, because a node's address may change while it is unreachable.
#[derive(Clone, Debug)]
struct Dialer {
    cluster: Cluster,
    tls: PeerTls,
}

impl Dialer {
    async fn dial(self, to: Uri) -> io::Result<Stream> {
        let (name, key) = to
            .host()
            .and_then(|host| host.split_once('.'))
            .unwrap_or_default();
        let node: NodeId = name.parse().map_err(io::Error::other)?;
        let view = self.cluster.view();
        let found = view.nodes.get(&node);
        let found = found.ok_or_else(|| io::Error::other("the node is unreachable"))?;
        let address: SocketAddr = found.address.parse().map_err(io::Error::other)?;
        let dialed = tokio::time::timeout(DIAL, secure(address, &node, key, &self.tls));
        dialed.await.map_err(|_| io::ErrorKind::TimedOut)?
    }
}

/// `key` is the member's. Nothing is sent to a host that has another one.
async fn secure(
    address: SocketAddr,
    node: &NodeId,
    key: &str,
    tls: &PeerTls,
) -> io::Result<Stream> {
    let stream = TcpStream::connect(address).await?;
    // Commands and their output are small, and latency matters.
    stream.set_nodelay(true)?;
    crate::tcp::probe(&stream)?;
    let name = ServerName::try_from(host_name(node)).map_err(io::Error::other)?;
    let connector = TlsConnector::from(tls.client());
    let stream = connector.connect(name, stream).await?;
    let chain = stream.get_ref().1.peer_certificates();
    let shown = chain.and_then(<[_]>::first).and_then(key_of);
    if shown.as_deref() != Some(key) {
        let why = format!("the host at {address} does not have the key of the member {node}");
        return Err(io::Error::other(why));
    }
    Ok(Stream::new(stream))
}

impl tower_service::Service<Uri> for Dialer {
    type Response = Stream;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Stream>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        Box::pin(self.clone().dial(to))
    }
}

/// A connection to a node.
#[derive(Debug)]
pub(super) struct Stream(TokioIo<TlsStream<TcpStream>>);

impl Stream {
    pub(super) fn new(stream: TlsStream<TcpStream>) -> Self {
        Self(TokioIo::new(stream))
    }
}

impl Connection for Stream {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl hyper::rt::Read for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: hyper::rt::ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl hyper::rt::Write for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
