//! The outside servers of the class `l7`, at every address: HTTP/1 and, at the addresses in [`HTTP2`], also HTTP/2.
//!
//! HTTP/1 is parsed leniently, like a server that a smuggled request would reach: anything that begins like a
//! message is treated as one. A server keeps all data that it receives. It presents its one certificate for any
//! server name, because checking the name is the proxy's task.

use std::{
    convert::Infallible,
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener as StdListener},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use http_body_util::Full;
use hyper::{
    Request, Response, body::Bytes, body::Incoming, server::conn::http2, service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use pki::{Authority, KeyPair, Purpose};
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

use super::judge::Arrival;

/// Last octets of the addresses whose servers also speak HTTP/2.
const HTTP2: u8 = 62;
/// Names in the servers' certificate.
const NAMES: [&str; 6] = [
    "ruled.l7.test",
    "other.l7.test",
    "far.l7.test",
    "h2.l7.test",
    "h2other.l7.test",
    "xn--bcher-kva.l7.test",
];
const TLS_PORT: u16 = 443;
const PLAIN_PORT: u16 = 80;
/// Maximum number of bytes kept of a connection, and read of a ClientHello.
const KEPT: usize = 1 << 20;
const HELLO: usize = 80 << 10;

/// The servers. They run until the process exits.
#[derive(Clone, Debug)]
pub(in crate::isolation) struct Origins {
    /// PEM certificate of the authority that signed the servers' certificate.
    pub(super) authority: String,
    arrivals: Arrivals,
}

type Arrivals = Arc<Mutex<Vec<Arc<Mutex<Arrival>>>>>;

/// No code panics while it holds one of these locks, so a poisoned lock protects intact data.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Origins {
    /// Listens in the network namespace of this thread.
    pub(in crate::isolation) fn listen() -> io::Result<Self> {
        let (authority, acceptors) = certificates().map_err(io::Error::other)?;
        let arrivals = Arrivals::default();
        let listen = |port| {
            let listener = StdListener::bind((Ipv6Addr::UNSPECIFIED, port))?;
            listener.set_nonblocking(true)?;
            io::Result::Ok(listener)
        };
        let (tls, plain) = (listen(TLS_PORT)?, listen(PLAIN_PORT)?);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let kept = Arc::clone(&arrivals);
        thread::Builder::new()
            .name("origins".into())
            .spawn(move || {
                runtime.block_on(async move {
                    let plain = serve(plain, None, Arc::clone(&kept));
                    let tls = serve(tls, Some(Arc::new(acceptors)), kept);
                    // Both end only if a listener cannot be registered; the controls then fail.
                    let _ = tokio::join!(plain, tls);
                });
            })?;
        Ok(Self {
            authority,
            arrivals,
        })
    }

    /// Connections that have arrived since the last call.
    pub(super) fn take(&self) -> Vec<Arrival> {
        let taken = std::mem::take(&mut *lock(&self.arrivals));
        taken.iter().map(|arrival| lock(arrival).clone()).collect()
    }
}

/// One acceptor for HTTP/1 only, and one for both versions.
struct Acceptors([TlsAcceptor; 2]);

fn certificates() -> Result<(String, Acceptors), Box<dyn std::error::Error + Send + Sync>> {
    let authority = Authority::create(pki::authority("l7", 1), KeyPair::generate()?)?;
    let key = KeyPair::generate()?;
    let leaf = pki::leaf(
        NAMES[0],
        NAMES.map(str::to_owned),
        1,
        &[Purpose::ServerAuth],
    )?;
    let leaf = authority.sign(&leaf, &key)?;
    let acceptor = |protocols: &[&str]| {
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![leaf.der().clone()], key)?;
        config.alpn_protocols = protocols.iter().map(|p| p.as_bytes().to_vec()).collect();
        Ok::<_, rustls::Error>(TlsAcceptor::from(Arc::new(config)))
    };
    let acceptors = [acceptor(&["http/1.1"])?, acceptor(&["h2", "http/1.1"])?];
    Ok((authority.certificate().to_owned(), Acceptors(acceptors)))
}

async fn serve(
    listener: StdListener,
    acceptors: Option<Arc<Acceptors>>,
    arrivals: Arrivals,
) -> io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            continue;
        };
        let Ok(local) = stream.local_addr() else {
            continue;
        };
        let kept = Arc::new(Mutex::new(Arrival::default()));
        lock(&arrivals).push(Arc::clone(&kept));
        match &acceptors {
            None => drop(tokio::spawn(http1(stream, kept))),
            Some(acceptors) => {
                let Acceptors([one, both]) = &**acceptors;
                let acceptor = if has_http2(local) { both } else { one };
                tokio::spawn(tls(stream, acceptor.clone(), kept));
            }
        }
    }
}

fn has_http2(local: SocketAddr) -> bool {
    match local.ip().to_canonical() {
        IpAddr::V4(address) => address.octets()[3] == HTTP2,
        IpAddr::V6(_) => false,
    }
}

async fn tls(stream: TcpStream, acceptor: TlsAcceptor, kept: Arc<Mutex<Arrival>>) {
    let mut hello = vec![0; HELLO];
    if let Ok(length) = stream.peek(&mut hello).await {
        lock(&kept).bytes.extend_from_slice(&hello[..length]);
    }
    let Ok(stream) = acceptor.accept(stream).await else {
        return;
    };
    if stream.get_ref().1.alpn_protocol() != Some(b"h2") {
        return http1(stream, kept).await;
    }
    let service = service_fn(move |request: Request<Incoming>| {
        keep(&kept, &request);
        let answer = answer(request.uri().path(), &format!("{:?}", request.headers()));
        async move {
            let mut response = Response::new(Full::new(Bytes::from(answer.body)));
            if let Ok(status) = hyper::StatusCode::from_u16(answer.status) {
                *response.status_mut() = status;
            }
            Ok::<_, Infallible>(response)
        }
    });
    // The guest reports a failure at its end.
    let _ = http2::Builder::new(TokioExecutor::new())
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

fn keep(kept: &Mutex<Arrival>, request: &Request<Incoming>) {
    let mut kept = lock(kept);
    let line = format!("{} {}\n", request.method(), request.uri());
    kept.bytes.extend_from_slice(line.as_bytes());
    for (name, value) in request.headers() {
        kept.bytes.extend_from_slice(name.as_str().as_bytes());
        kept.bytes.extend_from_slice(b": ");
        kept.bytes.extend_from_slice(value.as_bytes());
        kept.bytes.push(b'\n');
    }
    kept.requests += 1;
}

async fn http1(mut stream: impl AsyncRead + AsyncWrite + Unpin, kept: Arc<Mutex<Arrival>>) {
    let mut buffer = Vec::new();
    loop {
        let Some(length) = message(&buffer) else {
            let before = buffer.len();
            if buffer.len() >= KEPT || !matches!(stream.read_buf(&mut buffer).await, Ok(1..)) {
                return;
            }
            lock(&kept).bytes.extend_from_slice(&buffer[before..]);
            continue;
        };
        lock(&kept).requests += 1;
        let head: Vec<u8> = buffer.drain(..length).collect();
        let head = String::from_utf8_lossy(&head);
        let path = head.split(' ').nth(1).unwrap_or_default();
        let answer = answer(path, &head).render();
        if stream.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
    }
}

/// Length of the message at the start of the buffer, with its body.
fn message(buffer: &[u8]) -> Option<usize> {
    let end = memchr::memmem::find(buffer, b"\r\n\r\n")? + 4;
    let head = String::from_utf8_lossy(&buffer[..end]).to_ascii_lowercase();
    let field = |name: &str| {
        let mut lines = head.split("\r\n");
        lines.find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'))
    };
    if field("transfer-encoding").is_some_and(|value| value.contains("chunked")) {
        let last = memchr::memmem::find(&buffer[end..], b"\r\n0\r\n")?;
        let trailers = &buffer[end + last..];
        return Some(end + last + memchr::memmem::find(trailers, b"\r\n\r\n")? + 4);
    }
    let length = field("content-length").and_then(|value| value.trim().parse().ok());
    let whole = end.checked_add(length.unwrap_or(0))?;
    (buffer.len() >= whole).then_some(whole)
}

struct Answer {
    status: u16,
    headers: &'static str,
    body: String,
    /// Bytes after the response.
    more: &'static str,
}

impl Answer {
    fn render(&self) -> String {
        let (status, headers, length) = (self.status, self.headers, self.body.len());
        let (body, more) = (&self.body, self.more);
        format!("HTTP/1.1 {status} -\r\n{headers}Content-Length: {length}\r\n\r\n{body}{more}")
    }
}

fn answer(path: &str, head: &str) -> Answer {
    let answer = |status, headers, body: &str, more| Answer {
        status,
        headers,
        body: body.to_owned(),
        more,
    };
    match path.split('/').nth(1).unwrap_or_default() {
        "redirect" => answer(302, "Location: https://other.l7.test/\r\n", "", ""),
        "two-answers" => {
            let more = "HTTP/1.1 200 -\r\nContent-Length: 6\r\n\r\nforged";
            answer(200, "", "first", more)
        }
        "split" => answer(200, "X-A: b\rSet-Cookie: forged=1\r\n", "ok", ""),
        "echo" => answer(200, "", head, ""),
        _ => answer(200, "Alt-Svc: h3=\":443\"\r\n", "ok", ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_a_careless_server_does() {
        let plain = b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET";
        assert_eq!(message(plain), Some(plain.len() - 3));
        let body = b"POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\nabcGET";
        assert_eq!(message(body), Some(body.len() - 3));
        assert_eq!(message(&body[..body.len() - 4]), None);
        let chunked =
            b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nA: b\r\n\r\nGET";
        assert_eq!(message(chunked), Some(chunked.len() - 3));
        assert_eq!(message(&chunked[..chunked.len() - 5]), None);
    }

    #[test]
    fn the_certificates_are_made() {
        let (authority, _) = certificates().unwrap();
        assert!(authority.contains("BEGIN CERTIFICATE"));
    }
}
