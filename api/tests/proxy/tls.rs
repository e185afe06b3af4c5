//! TLS with the certificate authority of `ca init`, and HTTP/2 with and without TLS.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use api::listen::Limits;
use axum::body::{Body, Bytes};
use axum::http::{Request, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Frame;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::guest::Program;
use crate::wire::Wire;
use crate::world::{Setup, World};

const ENVD: u16 = 49_983;

async fn secured() -> World {
    let setup = Setup {
        tls: true,
        ..Setup::default()
    };
    World::with(setup).await
}

/// Performs a handshake in which the client trusts only the authority of `world`.
async fn shake(
    world: &World,
    name: &str,
    protocols: &[&str],
) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    let ca = CertificateDer::from_pem_file(world.dir.path().join("ca/ca.crt")).unwrap();
    roots.add(ca).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = protocols
        .iter()
        .map(|name| name.as_bytes().to_vec())
        .collect();
    let stream = TcpStream::connect(world.address).await?;
    let name = ServerName::try_from(name.to_owned()).unwrap();
    TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_without_a_request_after_its_handshake_is_closed() {
    let limits = Limits {
        head_read: Duration::from_millis(200),
        ..Limits::default()
    };
    let setup = Setup {
        limits,
        tls: true,
        ..Setup::default()
    };
    let world = World::with_guest(setup, async |_| {}).await;
    for protocols in [&["http/1.1"], &["h2"]] {
        let stream = shake(&world, "localhost", protocols).await.unwrap();
        assert!(Wire::over(stream).is_closed().await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_certificate_is_valid_for_its_names_only() {
    let world = secured().await;
    let sandbox = format!("{ENVD}-{}.e2b.test", world.id);
    for name in [
        "e2b.test",
        "api.e2b.test",
        &sandbox,
        "localhost",
        "127.0.0.1",
        "::1",
    ] {
        let stream = shake(&world, name, &["http/1.1"]).await.unwrap();
        let mut wire = Wire::over(stream);
        let host = if name.contains("::") { "[::1]" } else { name };
        let fields = format!("Host: {host}\r\n");
        let reply = if name == sandbox {
            wire.ask("GET /health", &fields).await.status
        } else {
            wire.ask("GET /control", &fields).await.status
        };
        assert!(matches!(reply, 200 | 204), "{name}: {reply}");
    }
    for name in ["elsewhere.example", "a.b.e2b.test", "127.0.0.2"] {
        assert!(shake(&world, name, &[]).await.is_err(), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_http_to_a_tls_port_gets_no_answer() {
    let world = secured().await;
    let mut wire = Wire::connect(world.address).await;
    wire.send("GET /control HTTP/1.1\r\nHost: x\r\n\r\n").await;
    let reply = wire.rest().await;
    assert!(!reply.starts_with(b"HTTP/"), "{reply:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn http_2_is_negotiated_if_the_client_offers_it() {
    let world = secured().await;
    let stream = shake(&world, "e2b.test", &["h2", "http/1.1"])
        .await
        .unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    speak_http_2(&world, "https", stream).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn http_2_works_without_tls() {
    let world = World::new().await;
    let stream = TcpStream::connect(world.address).await.unwrap();
    speak_http_2(&world, "http", stream).await;
}

async fn speak_http_2<S>(world: &World, scheme: &str, stream: S)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut client, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
        .await
        .unwrap();
    let running = tokio::spawn(connection);
    let control = Request::get(format!("{scheme}://api.e2b.test/control"));
    let reply = client
        .send_request(control.body(Body::empty()).unwrap())
        .await;
    assert_eq!(reply.unwrap().status(), StatusCode::OK);
    let mirror = Program::mirror().await;
    let port = mirror.port;
    let host = format!("{port}-{}.e2b.test", world.id);
    let request = Request::get(format!("{scheme}://{host}/x?y"))
        .header("cookie", "a=1")
        .header("cookie", "b=2")
        .body(Body::empty());
    let reply = client.send_request(request.unwrap()).await.unwrap();
    assert_eq!(reply.status(), StatusCode::OK);
    let seen = reply.into_body().collect().await.unwrap().to_bytes();
    let seen = String::from_utf8_lossy(&seen).to_ascii_lowercase();
    assert!(seen.starts_with("get /x?y http/1.1\r\n"), "{seen}");
    assert!(seen.contains(&format!("host: {host}\r\n")), "{seen}");
    assert!(seen.contains("cookie: a=1; b=2\r\n"), "{seen}");
    // An upload of unknown length on the same connection.
    let path = world.dir.path().join("h2");
    let content = vec![b'x'; 300_000];
    let pieces: Vec<_> = content.chunks(10_000).map(Bytes::copy_from_slice).collect();
    let url = format!(
        "{scheme}://{ENVD}-{}.e2b.test/files?path={}",
        world.id,
        path.display()
    );
    let request = Request::post(url)
        .header("content-type", "application/octet-stream")
        .body(Body::new(Pieces(pieces.into_iter())));
    let reply = client.send_request(request.unwrap()).await.unwrap();
    assert_eq!(reply.status(), StatusCode::OK);
    assert!(std::fs::read(path).unwrap() == content);
    drop(client);
    running.await.unwrap().unwrap();
}

/// A body of unknown length.
struct Pieces(std::vec::IntoIter<Bytes>);

impl hyper::body::Body for Pieces {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Poll::Ready(self.0.next().map(|piece| Ok(Frame::data(piece))))
    }
}
