//! The base URL of an API, and connections to it, with or without TLS.
//!
//! Each call of [`Endpoint::dial`] opens a new connection, which the caller owns. Connections are not pooled, so the
//! latency of a start includes their handshakes.

use std::{
    fmt,
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs},
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use envd::Transport;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned, pki_types::ServerName};

/// A validated base URL: scheme, host and port, without a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    secure: bool,
    /// Without the brackets of an IPv6 address.
    host: String,
    port: u16,
}

/// A malformed base URL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{url:?} is not a base URL such as \"http://127.0.0.1:3000\" or \"https://api.example.com\""
)]
pub struct BadUrl {
    url: String,
}

/// A connection could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// No TCP connection: for example, the host has no address, refuses the connection, or does not respond in
    /// time.
    #[error("cannot connect to {to}")]
    Connect {
        to: String,
        #[source]
        source: io::Error,
    },
    /// The host name cannot be in a certificate, or TLS could not be configured.
    #[error("cannot set up TLS to {to}")]
    Tls {
        to: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.secure { "https" } else { "http" };
        write!(f, "{scheme}://{}", self.authority())
    }
}

impl Endpoint {
    /// Parses a base URL. One trailing slash is accepted.
    ///
    /// # Errors
    /// Returns [`BadUrl`] unless the text consists of `http` or `https`, a host, and an optional port.
    pub fn parse(url: &str) -> Result<Self, BadUrl> {
        Self::read(url).ok_or_else(|| BadUrl {
            url: url.to_owned(),
        })
    }

    fn read(url: &str) -> Option<Self> {
        let (secure, rest) = match url.split_once("://")? {
            ("http", rest) => (false, rest),
            ("https", rest) => (true, rest),
            _ => return None,
        };
        let authority = rest.strip_suffix('/').unwrap_or(rest);
        let default = if secure { 443 } else { 80 };
        let (host, port) = match authority.strip_prefix('[') {
            Some(v6) => {
                let (host, after) = v6.split_once(']')?;
                (host, after.strip_prefix(':'))
            }
            None => match authority.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (authority, None),
            },
        };
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._:%".contains(&b);
        if host.is_empty() || !host.bytes().all(plain) {
            return None;
        }
        Some(Self {
            secure,
            host: host.to_owned(),
            port: port.map_or(Some(default), |p| p.parse().ok())?,
        })
    }

    /// Value of the `Host` header: host and port, without the port if it is the scheme's default.
    #[must_use]
    pub fn authority(&self) -> String {
        let host = if self.host.contains(':') {
            format!("[{}]", self.host)
        } else {
            self.host.clone()
        };
        match (self.secure, self.port) {
            (true, 443) | (false, 80) => host,
            (_, port) => format!("{host}:{port}"),
        }
    }

    /// Whether the host is a loopback address, or `localhost`.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        let address = self.host.parse::<IpAddr>();
        self.host == "localhost" || address.is_ok_and(|address| address.is_loopback())
    }

    /// Opens a connection. With `https`, the TLS handshake follows with the first read or write.
    ///
    /// # Errors
    /// Returns [`DialError::Connect`] if no address of the host accepts a TCP connection within `timeout`, and
    /// [`DialError::Tls`] if TLS cannot be set up.
    pub fn dial(&self, timeout: Duration) -> Result<Wire, DialError> {
        self.dial_where(timeout, |_| true)
    }

    /// Like [`Endpoint::dial`], but only if all addresses of the host are allowed. The name is resolved once, so
    /// its owner cannot replace a checked address.
    ///
    /// # Errors
    /// Returns [`DialError::Connect`] with [`io::ErrorKind::PermissionDenied`] if an address is not allowed, and
    /// the errors of [`Endpoint::dial`].
    pub fn dial_where(
        &self,
        timeout: Duration,
        allowed: impl FnMut(SocketAddr) -> bool,
    ) -> Result<Wire, DialError> {
        let failed = |source| DialError::Connect {
            to: self.to_string(),
            source,
        };
        let stream = self.connect(timeout, allowed).map_err(failed)?;
        // Disables Nagle's algorithm, so that small requests do not wait for the acknowledgement of earlier requests.
        stream.set_nodelay(true).map_err(failed)?;
        if !self.secure {
            return Ok(Wire::Plain(stream));
        }
        let session = self.session().map_err(|source| DialError::Tls {
            to: self.to_string(),
            source,
        })?;
        Ok(Wire::Tls(Box::new(StreamOwned::new(session, stream))))
    }

    fn connect(
        &self,
        timeout: Duration,
        mut allowed: impl FnMut(SocketAddr) -> bool,
    ) -> io::Result<TcpStream> {
        let deadline = Instant::now() + timeout;
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        let addresses: Vec<_> = (self.host.as_str(), self.port).to_socket_addrs()?.collect();
        if addresses.iter().any(|address| !allowed(*address)) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        for address in addresses {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match TcpStream::connect_timeout(&address, left) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn session(&self) -> Result<ClientConnection, Box<dyn std::error::Error + Send + Sync>> {
        let name = ServerName::try_from(self.host.clone())?;
        Ok(ClientConnection::new(tls_config()?, name)?)
    }
}

/// A file of certificate authorities cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    #[error("{path} contains no certificate in PEM format")]
    Empty { path: PathBuf },
    #[error("cannot read the certificate authority {path}")]
    Unreadable {
        path: PathBuf,
        #[source]
        source: rustls_native_certs::Error,
    },
    /// TLS could not be configured, or a connection has already been opened.
    #[error("cannot configure TLS: {0}")]
    Config(String),
}

/// The TLS configuration of the process.
static CONFIG: OnceLock<Arc<ClientConfig>> = OnceLock::new();

/// Trusts only the authorities in a PEM file, in all connections of this process. Must be called before the first
/// connection.
///
/// # Errors
/// Returns [`TrustError`] if the file has no authority, or if a connection has already been opened.
pub fn trust_only(path: &Path) -> Result<(), TrustError> {
    let path = path.to_owned();
    let mut found = rustls_native_certs::load_certs_from_paths(Some(&path), None);
    if let Some(source) = found.errors.pop() {
        return Err(TrustError::Unreadable { path, source });
    }
    if found.certs.is_empty() {
        return Err(TrustError::Empty { path });
    }
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    let config = config_of(roots).map_err(|why| TrustError::Config(why.to_string()))?;
    let late = |_| TrustError::Config("a connection was opened before".to_owned());
    CONFIG.set(config).map_err(late)
}

/// TLS configuration of the process. It trusts the authorities of [`trust_only`], or else those in
/// `$SSL_CERT_FILE`, or else the system's.
fn tls_config() -> Result<Arc<ClientConfig>, rustls::Error> {
    if let Some(config) = CONFIG.get() {
        return Ok(Arc::clone(config));
    }
    let mut roots = RootCertStore::empty();
    // Certificates that cannot be read or parsed are skipped, so their authorities are not trusted.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let config = config_of(roots)?;
    Ok(Arc::clone(CONFIG.get_or_init(|| config)))
}

fn config_of(roots: RootCertStore) -> Result<Arc<ClientConfig>, rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// A connection.
#[derive(Debug)]
pub enum Wire {
    /// TCP.
    Plain(TcpStream),
    /// TLS over TCP. The handshake takes place with the first read or write.
    Tls(Box<StreamOwned<ClientConnection, TcpStream>>),
}

impl Wire {
    fn tcp(&self) -> &TcpStream {
        match self {
            Self::Plain(stream) => stream,
            Self::Tls(tls) => &tls.sock,
        }
    }
}

impl Read for Wire {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.read(buf),
            Self::Tls(tls) => tls.read(buf),
        }
    }
}

impl Write for Wire {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.write(buf),
            Self::Tls(tls) => tls.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(stream) => stream.flush(),
            Self::Tls(tls) => tls.flush(),
        }
    }
}

impl Transport for Wire {
    fn bound_reads(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.tcp().set_read_timeout(timeout)
    }

    fn bound_writes(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.tcp().set_write_timeout(timeout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_urls_parse_and_other_texts_do_not() {
        let shown = |url: &str| Endpoint::parse(url).map(|e| e.to_string());
        for same in [
            "http://127.0.0.1:3000",
            "https://api.example.com",
            "http://[::1]:3000",
        ] {
            assert_eq!(shown(same).as_deref(), Ok(same));
        }
        assert_eq!(
            shown("https://api.example.com:443/").as_deref(),
            Ok("https://api.example.com")
        );
        for bad in [
            "",
            "127.0.0.1",
            "ftp://a",
            "http://",
            "http://a:b",
            "http://a/v1",
            "http://a b",
            "http://a\r\nx",
            "http://[::1",
            "http://u@h",
        ] {
            assert!(Endpoint::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn loopback_addresses_are_of_this_host() {
        let is_loopback = |url: &str| Endpoint::parse(url).unwrap().is_loopback();
        for url in ["http://127.0.0.2:1", "https://[::1]", "http://localhost"] {
            assert!(is_loopback(url), "{url}");
        }
        assert!(!is_loopback("http://10.0.0.1") && !is_loopback("http://127.0.0.1.example"));
    }

    #[test]
    fn a_closed_port_is_a_connect_error() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        let endpoint = Endpoint::parse(&format!("http://{address}")).unwrap();
        let error = endpoint.dial(Duration::from_secs(5)).unwrap_err();
        assert!(matches!(error, DialError::Connect { .. }), "{error}");
    }
}
