//! Clients like those in guests.

use std::{net::Ipv4Addr, sync::Arc, time::Duration};

use http_body_util::{BodyExt, Full, combinators::BoxBody};
use hyper::{
    HeaderMap, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    client::conn::{http1, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    time::timeout,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::world::World;

pub(crate) const LIMIT: Duration = Duration::from_secs(20);

pub(crate) type Body = BoxBody<Bytes, hyper::Error>;

/// Connects from a guest's address.
pub(crate) async fn connect(world: &World, source: Ipv4Addr) -> TcpStream {
    try_connect(world, source).await.unwrap()
}

/// A refusal may arrive before the kernel reports the connection.
async fn try_connect(world: &World, source: Ipv4Addr) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((source, 0).into()).unwrap();
    let stream = socket.connect(world.address).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// A client configuration that trusts the authorities of the proxy and of the servers.
pub(crate) fn config(world: &World, protocols: &[&str]) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    for certificate in [&world.ca.certificate, &world.servers.certificate] {
        roots
            .add(CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap())
            .unwrap();
    }
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = protocols
        .iter()
        .map(|name| name.as_bytes().to_vec())
        .collect();
    config
}

pub(crate) async fn tls(
    world: &World,
    source: Ipv4Addr,
    name: &str,
    protocols: &[&str],
) -> std::io::Result<TlsStream<TcpStream>> {
    let connector = TlsConnector::from(Arc::new(config(world, protocols)));
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let stream = try_connect(world, source).await?;
    timeout(LIMIT, connector.connect(name, stream))
        .await
        .unwrap()
}

/// Whether the peer's certificate is the proxy's.
pub(crate) fn is_terminated(world: &World, stream: &TlsStream<TcpStream>) -> bool {
    let chain = stream.get_ref().1.peer_certificates().unwrap();
    let authority = CertificateDer::from_pem_slice(world.ca.certificate.as_bytes()).unwrap();
    chain.contains(&authority)
}

pub(crate) async fn http1(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> http1::SendRequest<Body> {
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection.with_upgrades());
    sender
}

pub(crate) async fn http2(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> http2::SendRequest<Body> {
    let handshake = http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
    let (sender, connection) = handshake.await.unwrap();
    tokio::spawn(connection);
    sender
}

pub(crate) fn empty() -> Body {
    full("")
}

pub(crate) fn full(text: impl Into<Bytes>) -> Body {
    Full::new(text.into())
        .map_err(|never| match never {})
        .boxed()
}

/// A request with a host, in HTTP/1.
pub(crate) fn get(host: &str, path: &str) -> Request<Body> {
    Request::get(path)
        .header("host", host)
        .body(empty())
        .unwrap()
}

/// A response with its whole body.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) text: String,
    pub(crate) trailers: Option<HeaderMap>,
}

pub(crate) async fn answer(response: Response<Incoming>) -> Answer {
    let (parts, body) = response.into_parts();
    let body = timeout(LIMIT, body.collect()).await.unwrap().unwrap();
    let trailers = body.trailers().cloned();
    Answer {
        status: parts.status,
        headers: parts.headers,
        text: String::from_utf8_lossy(&body.to_bytes()).into_owned(),
        trailers,
    }
}

pub(crate) async fn send1(sender: &mut http1::SendRequest<Body>, request: Request<Body>) -> Answer {
    timeout(LIMIT, sender.ready()).await.unwrap().unwrap();
    let response = timeout(LIMIT, sender.send_request(request)).await.unwrap();
    answer(response.unwrap()).await
}

pub(crate) async fn send2(sender: &mut http2::SendRequest<Body>, request: Request<Body>) -> Answer {
    let response = timeout(LIMIT, sender.send_request(request)).await.unwrap();
    answer(response.unwrap()).await
}

/// Sends bytes and returns everything until the other end closes.
pub(crate) async fn exchange(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    bytes: &[u8],
) -> String {
    stream.write_all(bytes).await.unwrap();
    stream.flush().await.unwrap();
    until_end(stream).await
}

pub(crate) async fn until_end(mut stream: impl AsyncRead + Unpin) -> String {
    let mut all = Vec::new();
    // A reset after the last bytes counts as an end.
    let _ = timeout(LIMIT, stream.read_to_end(&mut all))
        .await
        .expect("the connection stays open");
    String::from_utf8_lossy(&all).into_owned()
}

/// Statuses of the responses in a text.
pub(crate) fn statuses(text: &str) -> Vec<u16> {
    let lines = text
        .match_indices("HTTP/1.1 ")
        .filter_map(|(at, _)| text.get(at + 9..at + 12));
    lines.filter_map(|status| status.parse().ok()).collect()
}
