//! Servers: an HTTP server with a path for each test, and raw ones.

use std::{
    convert::Infallible,
    marker::PhantomData,
    net::{Ipv4Addr, SocketAddr},
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
};

use http_body_util::{BodyExt, Full, combinators::BoxBody};
use hyper::{
    HeaderMap, Request, Response,
    body::{Bytes, Frame, Incoming},
    service::service_fn,
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use rcgen::{CertificateParams, KeyPair};
use rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::TlsAcceptor;

use crate::world::Ca;

type Body = BoxBody<Bytes, hyper::Error>;

/// A request as received by the server.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) uri: String,
    pub(crate) headers: HeaderMap,
}

pub(crate) struct Origin {
    pub(crate) address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
    connections: Arc<Mutex<usize>>,
}

impl Origin {
    /// An HTTP server with TLS for these names, which speaks these protocols.
    pub(crate) async fn tls(ca: &Ca, names: &[&str], protocols: &[&str]) -> Self {
        Self::serve(Some(acceptor(ca, names, protocols))).await
    }

    pub(crate) async fn plain() -> Self {
        Self::serve(None).await
    }

    async fn serve(acceptor: Option<TlsAcceptor>) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let origin = Self {
            address: listener.local_addr().unwrap(),
            seen: Arc::default(),
            connections: Arc::default(),
        };
        let (seen, connections) = (Arc::clone(&origin.seen), Arc::clone(&origin.connections));
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                *connections.lock().unwrap() += 1;
                let (acceptor, seen) = (acceptor.clone(), Arc::clone(&seen));
                tokio::spawn(async move {
                    stream.set_nodelay(true).unwrap();
                    match acceptor {
                        None => http(stream, seen).await,
                        Some(acceptor) => {
                            if let Ok(stream) = acceptor.accept(stream).await {
                                http(stream, seen).await;
                            }
                        }
                    }
                });
            }
        });
        origin
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    pub(crate) fn connections(&self) -> usize {
        *self.connections.lock().unwrap()
    }
}

/// Calls `serve` with each connection to a new address.
pub(crate) async fn raw<F>(serve: impl Fn(TcpStream) -> F + Send + 'static) -> SocketAddr
where
    F: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(serve(stream));
        }
    });
    address
}

pub(crate) fn acceptor(ca: &Ca, names: &[&str], protocols: &[&str]) -> TlsAcceptor {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(names).unwrap();
    let certificate = certificate.signed_by(&key, &ca.issuer).unwrap();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)
        .unwrap();
    config.alpn_protocols = protocols
        .iter()
        .map(|name| name.as_bytes().to_vec())
        .collect();
    TlsAcceptor::from(Arc::new(config))
}

async fn http(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    seen: Arc<Mutex<Vec<Seen>>>,
) {
    let service = service_fn(|request: Request<Incoming>| {
        let seen = Arc::clone(&seen);
        async move {
            seen.lock().unwrap().push(Seen {
                uri: request.uri().to_string(),
                headers: request.headers().clone(),
            });
            Ok::<_, Infallible>(answer(request).await)
        }
    });
    let server = auto::Builder::new(TokioExecutor::new());
    let connection = server.serve_connection_with_upgrades(TokioIo::new(stream), service);
    let _ = connection.await;
}

fn text(text: impl Into<Bytes>) -> Body {
    Full::new(text.into())
        .map_err(|never| match never {})
        .boxed()
}

async fn answer(mut request: Request<Incoming>) -> Response<Body> {
    let path = request.uri().path().to_owned();
    match path.as_str() {
        "/echo" => {
            let mut response = Response::builder();
            if request.headers().contains_key("trailer") {
                response = response.header("trailer", "x-check");
            }
            response.body(request.into_body().boxed()).unwrap()
        }
        "/sink" => {
            let mut length = 0_u64;
            let mut trailers = HeaderMap::new();
            let mut body = request.into_body();
            while let Some(Ok(frame)) = body.frame().await {
                match frame.into_data() {
                    Ok(data) => length += data.len() as u64,
                    Err(frame) => trailers = frame.into_trailers().unwrap(),
                }
            }
            let names: Vec<_> = trailers.keys().map(ToString::to_string).collect();
            Response::new(text(format!("{length} {}", names.join(","))))
        }
        "/redirect" => {
            let response = Response::builder().status(302);
            response
                .header("location", "https://evil.test/")
                .body(text(""))
                .unwrap()
        }
        "/alternative" => {
            let response = Response::builder().header("alt-svc", "h3=\":443\"");
            response
                .header("connection", "x-hop")
                .header("x-hop", "1")
                .body(text(""))
                .unwrap()
        }
        "/early" => Response::builder().status(413).body(text("")).unwrap(),
        "/websocket" if request.headers().contains_key("upgrade") => {
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                let mut stream = TokioIo::new(upgrade.await.unwrap());
                let mut buffer = [0; 1024];
                while let Ok(read @ 1..) = stream.read(&mut buffer).await {
                    stream.write_all(&buffer[..read]).await.unwrap();
                    stream.flush().await.unwrap();
                }
            });
            let response = Response::builder()
                .status(101)
                .header("connection", "upgrade");
            response
                .header("upgrade", "websocket")
                .body(text(""))
                .unwrap()
        }
        _ => match path.strip_prefix("/bytes/") {
            Some(length) => Response::new(bytes(length.parse().unwrap())),
            None => Response::new(text("ok")),
        },
    }
}

/// This many bytes, generated while they are read.
pub(crate) fn bytes<E: Send + Sync + 'static>(length: u64) -> BoxBody<Bytes, E> {
    let part = Bytes::from(vec![7; 64 << 10]);
    BoxBody::new(Counted {
        part,
        left: length,
        error: PhantomData,
    })
}

struct Counted<E> {
    part: Bytes,
    left: u64,
    error: PhantomData<fn() -> E>,
}

impl<E> hyper::body::Body for Counted<E> {
    type Data = Bytes;
    type Error = E;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, E>>> {
        let now = self.left.min(self.part.len() as u64);
        self.left -= now;
        let frame = Frame::data(self.part.slice(..usize::try_from(now).unwrap()));
        Poll::Ready((now > 0).then_some(Ok(frame)))
    }
}
