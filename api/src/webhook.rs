//! Posts to a URL of an operator or a client. Redirects are not followed.

use std::{
    io::{self, Read, Write},
    net::SocketAddr,
    str::FromStr,
    time::{Duration, Instant},
};

use client::endpoint::{Endpoint, Wire};
use envd::Transport;
use netisolation::Refused;

/// Time limit of each step of a delivery.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time and size limits for reading a response after its status.
const REST_PATIENCE: Duration = Duration::from_secs(5);
const MAX_REST: usize = 64 << 10;
pub(crate) const JSON: &str = "application/json";
/// Maximum length of a URL.
const MAX_URL: usize = 2048;

/// An `http` or `https` URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Webhook {
    endpoint: Endpoint,
    /// Path and query.
    path: String,
}

impl FromStr for Webhook {
    type Err = String;

    fn from_str(url: &str) -> Result<Self, String> {
        let wrong = || {
            let shown: String = url.chars().take(200).collect();
            format!("{shown:?} is not an URL like https://example.com/alerts")
        };
        let host = url.find("://").ok_or_else(wrong)? + 3;
        let end = url[host..]
            .find(['/', '?'])
            .map_or(url.len(), |at| host + at);
        let (base, path) = url.split_at(end);
        let is_plain =
            url.len() <= MAX_URL && path.bytes().all(|b| b.is_ascii_graphic() && b != b'#');
        let endpoint = Endpoint::parse(base).ok().filter(|_| is_plain);
        Ok(Self {
            endpoint: endpoint.ok_or_else(wrong)?,
            path: match path.strip_prefix('/') {
                Some(_) => path.to_owned(),
                None => format!("/{path}"),
            },
        })
    }
}

/// Why a post failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PostError {
    /// A retry would not help.
    #[error(transparent)]
    Refused(Refused),
    #[error("the server responded with {0:?}")]
    Answered(String),
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl PostError {
    /// The status of the response.
    pub(crate) fn status(&self) -> Option<u16> {
        match self {
            Self::Answered(text) => text.get(9..)?.parse().ok(),
            Self::Refused(_) | Self::Io(_) => None,
        }
    }
}

impl Webhook {
    /// Posts a body with additional header lines, each terminated by CRLF. Connects only to addresses that `judge`
    /// accepts, and to none if it refuses one of the host's addresses. Only a 2xx status counts as success and is
    /// returned. The rest of the response is discarded.
    pub(crate) fn post(
        &self,
        content_type: &str,
        headers: &str,
        body: &[u8],
        judge: impl Fn(SocketAddr) -> Result<(), Refused>,
    ) -> Result<u16, PostError> {
        let mut refused = None;
        let check = |address| {
            refused = judge(address).err();
            refused.is_none()
        };
        let wire = self.endpoint.dial_where(PATIENCE, check);
        if let Some(why) = refused {
            return Err(PostError::Refused(why));
        }
        let mut wire = wire.map_err(io::Error::other)?;
        wire.bound_reads(Some(PATIENCE))?;
        wire.bound_writes(Some(PATIENCE))?;
        let head = format!(
            "POST {} HTTP/1.1\r\nHost: {}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\n{headers}Connection: close\r\n\r\n",
            self.path,
            self.endpoint.authority(),
            body.len()
        );
        wire.write_all(head.as_bytes())?;
        wire.write_all(body)?;
        wire.flush()?;
        let mut status = [0; 12];
        wire.read_exact(&mut status)?;
        discard(&mut wire);
        let answer = PostError::Answered(String::from_utf8_lossy(&status).into_owned());
        match answer.status() {
            Some(code @ 200..300) if status.starts_with(b"HTTP/1.") && status[8] == b' ' => {
                Ok(code)
            }
            Some(_) | None => Err(answer),
        }
    }
}

/// Reads the rest of a response within limits. Closing a connection with unread bytes resets it, which would make the
/// server's writes fail.
fn discard(wire: &mut Wire) {
    let deadline = Instant::now() + REST_PATIENCE;
    let mut left = MAX_REST;
    let mut buffer = [0; 4096];
    while let Some(wait) = deadline.checked_duration_since(Instant::now())
        && left > 0
        && wire
            .bound_reads(Some(wait.max(Duration::from_millis(1))))
            .is_ok()
        && let Ok(count @ 1..) = wire.read(&mut buffer)
    {
        left = left.saturating_sub(count);
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use netisolation::{Destinations, ForbiddenAddresses};

    use super::*;

    #[test]
    fn urls_have_a_path_and_no_fragment() {
        let path = |url: &str| url.parse::<Webhook>().map(|hook| hook.path);
        assert_eq!(path("http://a.test:1/x?y=z").as_deref(), Ok("/x?y=z"));
        assert_eq!(path("https://a.test").as_deref(), Ok("/"));
        assert_eq!(path("https://a.test?q").as_deref(), Ok("/?q"));
        let long = format!("http://a.test/{}", "x".repeat(MAX_URL));
        for wrong in [
            "a.test/x",
            "ftp://a/x",
            "http://a/x y",
            "http://a/x\r\nb: c",
            "http://a/#x",
            "http:///x",
            "http://user@a/",
            &long,
        ] {
            assert!(path(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_connection_stays_until_the_answer_is_complete() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"{}") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                request.push(byte[0]);
            }
            stream.write_all(b"HTTP/1.1 200").unwrap();
            stream
                .set_read_timeout(Some(Duration::from_millis(100)))
                .unwrap();
            let early = stream.read(&mut [0]);
            stream
                .write_all(b" OK\r\nContent-Length: 0\r\n\r\n")
                .unwrap();
            early.map_err(|why| why.kind())
        });
        let hook: Webhook = url.parse().unwrap();
        hook.post(JSON, "", b"{}", |_| Ok(())).unwrap();
        let early = server.join().unwrap();
        assert_eq!(early, Err(io::ErrorKind::WouldBlock), "not closed before");
    }

    #[test]
    fn nothing_is_sent_to_an_address_that_is_not_allowed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        for host in ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]"] {
            let hook: Webhook = format!("http://{host}:{port}/").parse().unwrap();
            let judge = |to: SocketAddr| Err(Refused::Forbidden(to.ip()));
            let refused = hook.post(JSON, "", b"{}", judge);
            assert!(matches!(refused, Err(PostError::Refused(_))), "{host}");
        }
        assert!(listener.accept().is_err(), "no connection was made");
    }

    #[test]
    fn net_nothing_is_sent_to_an_address_of_this_host_that_is_not_named() {
        use crate::namespace::{IN_LOCAL_PREFIX, SECONDARY, in_namespace};
        in_namespace(|| {
            let listener = TcpListener::bind("0.0.0.0:0").unwrap();
            listener.set_nonblocking(true).unwrap();
            let port = listener.local_addr().unwrap().port();
            let post = move |host: &str, forbidden: &ForbiddenAddresses| {
                let hook: Webhook = format!("http://{host}:{port}/").parse().unwrap();
                hook.post(JSON, "", b"{}", |to| forbidden.check_connection(to))
            };
            for host in [SECONDARY, IN_LOCAL_PREFIX] {
                let refused = post(host, &ForbiddenAddresses::default());
                let is_own = matches!(refused, Err(PostError::Refused(Refused::Host(_))));
                assert!(is_own, "{host}: {refused:?}");
            }
            assert!(listener.accept().is_err(), "no connection was made");
            let named = Destinations {
                block: format!("{SECONDARY}/32").parse().unwrap(),
                access: Vec::new(),
            };
            let named = ForbiddenAddresses::new(vec![named], Vec::new());
            drop(listener);
            let connected = post(SECONDARY, &named);
            assert!(matches!(connected, Err(PostError::Io(_))), "{connected:?}");
        });
    }
}
