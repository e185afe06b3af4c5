//! HTTP requests whose target addresses are checked.

use std::{collections::HashSet, io, net::SocketAddr, sync::Arc, time::Duration};

use http_body_util::{BodyExt, Empty};
use hyper::{
    Request, Response, Uri,
    body::{Bytes, Incoming},
    header::{ACCEPT, AUTHORIZATION, HOST, LOCATION, USER_AGENT},
};
use hyper_util::rt::TokioIo;
use ranges::{ForbiddenAddresses, Refused};
use rustls::{ClientConfig, RootCertStore, pki_types::ServerName};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, lookup_host},
    time::timeout,
};
use tokio_rustls::TlsConnector;

use super::{Endpoint, Registries, Scheme, Timeouts};

const AGENT: &str = concat!("cube-oci-image/", env!("CARGO_PKG_VERSION"));
const MAX_REDIRECTS: usize = 5;

/// An error of one exchange. It names only hosts, because paths and queries of redirects may contain signatures.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    #[error("cannot connect to {host}: {why}: the operator can open it for registries")]
    Refused { host: String, why: Refused },
    #[error("cannot resolve {host}")]
    Resolve { host: String, source: io::Error },
    #[error("{host} has no address")]
    NoAddress { host: String },
    #[error("cannot connect to {host}")]
    Connect { host: String, source: io::Error },
    #[error("{host} did not {action} within {} s", .limit.as_secs_f32())]
    Stalled {
        host: String,
        action: &'static str,
        limit: Duration,
    },
    #[error("{host} closed the connection early")]
    Exchange {
        host: String,
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("{host} redirects more than {MAX_REDIRECTS} times")]
    Redirects { host: String },
    #[error("{host} redirects to an invalid address, or from https to http")]
    Redirect { host: String },
    #[error("response of {host} has more than {limit} bytes")]
    TooLarge { host: String, limit: u64 },
    #[error("a header for {host} has an invalid value")]
    Header { host: String },
}

/// A TLS configuration that trusts the host's certificate authorities, or the ones in SSL_CERT_FILE.
#[must_use]
pub fn tls() -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let config = ClientConfig::builder()
        .with_root_certificates(roots)
        .with_no_client_auth();
    Arc::new(config)
}

/// Opens connections, each for one exchange.
pub(crate) struct Connector {
    tls: TlsConnector,
    forbidden: ForbiddenAddresses,
    /// Endpoints that the operator named.
    trusted: HashSet<Endpoint>,
    pub(crate) timeouts: Timeouts,
}

/// A response that is not a redirect, and the server that sent it.
pub(crate) struct Answer {
    pub(crate) response: Response<Incoming>,
    pub(crate) server: Endpoint,
}

impl Connector {
    pub(crate) fn new(registries: &Registries, tls: Arc<ClientConfig>) -> Self {
        Self {
            tls: tls.into(),
            forbidden: registries.forbidden.clone(),
            trusted: registries.endpoints.values().flatten().cloned().collect(),
            timeouts: registries.timeouts.clone(),
        }
    }

    /// Sends a GET request and follows redirects. `authorization` is only sent to the origin of `endpoint`.
    pub(crate) async fn get(
        &self,
        endpoint: &Endpoint,
        path: &str,
        accept: &str,
        authorization: Option<&str>,
    ) -> Result<Answer, HttpError> {
        let (mut at, mut path) = (endpoint.clone(), path.to_owned());
        for _ in 0..=MAX_REDIRECTS {
            let authorization = authorization.filter(|_| at == *endpoint);
            let response = self.exchange(&at, &path, accept, authorization).await?;
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                let server = at;
                return Ok(Answer { response, server });
            }
            let next = redirect(&at, &response);
            (at, path) = next.ok_or(HttpError::Redirect { host: at.host })?;
        }
        Err(HttpError::Redirects { host: at.host })
    }

    async fn exchange(
        &self,
        at: &Endpoint,
        path: &str,
        accept: &str,
        authorization: Option<&str>,
    ) -> Result<Response<Incoming>, HttpError> {
        let host = || at.host.clone();
        let default_port = match at.scheme {
            Scheme::Http => 80,
            Scheme::Https => 443,
        };
        let authority = if at.port == default_port {
            host()
        } else {
            format!("{}:{}", at.host, at.port)
        };
        let mut request = Request::get(path)
            .header(HOST, authority)
            .header(USER_AGENT, AGENT)
            .header(ACCEPT, accept);
        if let Some(value) = authorization {
            request = request.header(AUTHORIZATION, value);
        }
        let request = request.body(Empty::<Bytes>::new());
        let request = request.map_err(|_| HttpError::Header { host: host() })?;
        let stream = self.connect(at).await?;
        let failed = |source: hyper::Error| HttpError::Exchange {
            host: host(),
            source: source.into(),
        };
        let exchange = async {
            let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream));
            let (mut sender, connection) = handshake.await?;
            // The task ends when the body ends or is dropped.
            tokio::spawn(connection);
            sender.send_request(request).await
        };
        let limit = self.timeouts.stall;
        let response = timeout(limit, exchange).await;
        let stalled = |_| stalled(&at.host, "answer", limit);
        response.map_err(stalled)?.map_err(failed)
    }

    /// Connects to an allowed address of the host.
    async fn connect(&self, at: &Endpoint) -> Result<Box<dyn Stream>, HttpError> {
        let host = || at.host.clone();
        let limit = self.timeouts.connect;
        let failed = |source| HttpError::Connect {
            host: host(),
            source,
        };
        let connect = async {
            let addresses = self.addresses(at).await?;
            let mut result = Err(HttpError::NoAddress { host: host() });
            for address in addresses {
                match TcpStream::connect(address).await {
                    Ok(stream) => return self.secure(at, stream).await.map_err(failed),
                    Err(error) => result = Err(failed(error)),
                }
            }
            result
        };
        let result = timeout(limit, connect).await;
        result.unwrap_or_else(|_| Err(stalled(&at.host, "accept a connection", limit)))
    }

    /// The allowed addresses of a host.
    async fn addresses(&self, at: &Endpoint) -> Result<Vec<SocketAddr>, HttpError> {
        let host = || at.host.clone();
        let bare = at.host.trim_start_matches('[').trim_end_matches(']');
        let found: Vec<SocketAddr> = lookup_host((bare, at.port))
            .await
            .map_err(|source| HttpError::Resolve {
                host: host(),
                source,
            })?
            .collect();
        if self.trusted.contains(at) {
            return Ok(found);
        }
        let mut refused = None;
        let mut allowed = Vec::new();
        for address in found {
            match self.forbidden.check_connection(address) {
                Ok(()) => allowed.push(address),
                Err(why) => refused = Some(why),
            }
        }
        match refused {
            Some(why) if allowed.is_empty() => Err(HttpError::Refused { host: host(), why }),
            _ => Ok(allowed),
        }
    }

    async fn secure(&self, at: &Endpoint, stream: TcpStream) -> io::Result<Box<dyn Stream>> {
        stream.set_nodelay(true)?;
        if at.scheme == Scheme::Http {
            return Ok(Box::new(stream));
        }
        let bare = at.host.trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(bare.to_owned()).map_err(io::Error::other)?;
        Ok(Box::new(self.tls.connect(name, stream).await?))
    }

    /// The next piece of a body. `None` at its end.
    pub(crate) async fn piece(&self, answer: &mut Answer) -> Result<Option<Bytes>, HttpError> {
        let limit = self.timeouts.stall;
        loop {
            let frame = timeout(limit, answer.response.body_mut().frame()).await;
            let frame = frame.map_err(|_| stalled(&answer.server.host, "send more", limit))?;
            let frame = frame.transpose().map_err(|source| HttpError::Exchange {
                host: answer.server.host.clone(),
                source: source.into(),
            })?;
            match frame.map(hyper::body::Frame::into_data) {
                None => return Ok(None),
                Some(Ok(bytes)) => return Ok(Some(bytes)),
                // Trailers.
                Some(Err(_)) => {}
            }
        }
    }

    /// Reads a whole body of at most `limit` bytes.
    pub(crate) async fn body(&self, answer: &mut Answer, limit: u64) -> Result<Vec<u8>, HttpError> {
        let mut bytes = Vec::new();
        while let Some(piece) = self.piece(answer).await? {
            bytes.extend_from_slice(&piece);
            if bytes.len() as u64 > limit {
                let host = answer.server.host.clone();
                return Err(HttpError::TooLarge { host, limit });
            }
        }
        Ok(bytes)
    }
}

fn stalled(host: &str, action: &'static str, limit: Duration) -> HttpError {
    HttpError::Stalled {
        host: host.to_owned(),
        action,
        limit,
    }
}

/// The target of a redirect. `None` if it is invalid.
fn redirect(at: &Endpoint, response: &Response<Incoming>) -> Option<(Endpoint, String)> {
    let location = response.headers().get(LOCATION)?.to_str().ok()?;
    let url: Uri = location.parse().ok()?;
    let path = url.path_and_query().map_or("/", |path| path.as_str());
    let path = path.to_owned();
    if url.scheme().is_none() {
        // A path on the same server. `//host/path` has an authority but no scheme, and is rejected.
        let is_path = location.starts_with('/') && !location.starts_with("//");
        return is_path.then(|| (at.clone(), path));
    }
    let next = Endpoint::of(&url)?;
    let is_downgrade = at.scheme == Scheme::Https && next.scheme == Scheme::Http;
    (!is_downgrade).then_some((next, path))
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}
