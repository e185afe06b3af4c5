//! The internal socket, `server.sock` in the state directory: only the server's user can connect to it. A successor
//! inherits it together with the public sockets, so its path always leads to the process that serves.
//!
//! A client first sends one line:
//! ```text
//! cube 1 forward ADDRESS:PORT                    then HTTP/1.1, on behalf of another process's peer
//! cube 1 forward-node CERTIFICATE ADDRESS:PORT   the same, for a connection from another node; its certificate,
//!                                                which the other process has verified, in base64; `-` for none
//! cube 1 reload                                  the response is one line: `ok PID` or `failed WHY`
//! ```
//! The address is trusted: limits apply as if that peer had connected itself. Only this socket accepts another peer's
//! address.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use super::Came;
use crate::peers::Peer;

/// Name of the socket in the state directory.
pub const INTERNAL: &str = "server.sock";
/// Version of the first line.
const VERSION: u32 = 1;
/// Placeholder for a missing certificate.
const NONE: &str = "-";
/// Maximum length of the first line, and of the response to a reload, in bytes.
const LINE: u64 = 4096;
/// Time limit for a client to send its first line.
const GREETING: Duration = Duration::from_secs(10);

/// The purpose of a connection.
pub(super) enum Greeting {
    /// A connection on behalf of a peer.
    Forwarded(UnixStream, SocketAddr, Came),
    Reload(Reload),
}

/// A reload request that waits for its outcome.
#[derive(Debug)]
pub struct Reload(UnixStream);

impl Reload {
    /// Sends the outcome: the new server's process id, or an error.
    pub async fn answer(mut self, outcome: &Result<u32, String>) {
        let line = match outcome {
            Ok(pid) => format!("ok {pid}\n"),
            Err(why) => format!("failed {}\n", why.replace('\n', " ")),
        };
        // The command may have been interrupted.
        let _gone = self.0.write_all(line.as_bytes()).await;
    }
}

/// The first line of a forwarded connection.
pub(super) fn forward_line(peer: SocketAddr, came: &Came) -> String {
    match came {
        Came::Client => format!("cube {VERSION} forward {peer}\n"),
        Came::Node(node) => {
            let shown = node.certificate().map(|der| URL_SAFE_NO_PAD.encode(der));
            let shown = shown.unwrap_or_else(|| NONE.to_owned());
            format!("cube {VERSION} forward-node {shown} {peer}\n")
        }
    }
}

/// Reads the first line of a connection. `None`: the client sent no valid line in time.
pub(super) async fn greeting(stream: UnixStream) -> Option<Greeting> {
    let mut stream = stream;
    let line = tokio::time::timeout(GREETING, first_line(&mut stream)).await;
    let line = line.ok()?.ok()?;
    match parse(&line) {
        Some(Purpose::Forward(peer, came)) => Some(Greeting::Forwarded(stream, peer, came)),
        Some(Purpose::Reload) => Some(Greeting::Reload(Reload(stream))),
        None => {
            tracing::warn!(line, "unknown request at the internal socket");
            let answer = "failed this server does not support the request: use the cube-api of the running server\n";
            let _gone = stream.write_all(answer.as_bytes()).await;
            None
        }
    }
}

#[derive(Debug)]
enum Purpose {
    Forward(SocketAddr, Came),
    Reload,
}

fn parse(line: &str) -> Option<Purpose> {
    let rest = line.strip_prefix("cube ")?;
    let (version, rest) = rest.split_once(' ')?;
    if version.parse() != Ok(VERSION) {
        return None;
    }
    match rest.split_once(' ') {
        Some(("forward", peer)) => Some(Purpose::Forward(peer.parse().ok()?, Came::Client)),
        Some(("forward-node", rest)) => {
            let (shown, peer) = rest.split_once(' ')?;
            let certificate = match shown {
                NONE => None,
                shown => Some(URL_SAFE_NO_PAD.decode(shown).ok()?.into()),
            };
            let came = Came::Node(Arc::new(Peer::new(certificate)));
            Some(Purpose::Forward(peer.parse().ok()?, came))
        }
        None if rest == "reload" => Some(Purpose::Reload),
        _ => None,
    }
}

/// Reads byte by byte, because HTTP follows the line.
async fn first_line(stream: &mut UnixStream) -> io::Result<String> {
    let mut line = Vec::new();
    while u64::try_from(line.len()).unwrap_or(u64::MAX) < LINE {
        match stream.read_u8().await? {
            b'\n' => return Ok(String::from_utf8_lossy(&line).into_owned()),
            byte => line.push(byte),
        }
    }
    Err(io::ErrorKind::InvalidData.into())
}

/// Asks the server of a state directory to reload, and waits for the outcome: the new server's process id, or an error.
///
/// # Errors
/// Returns an error if no server listens, or if it closes the connection without a response.
pub async fn ask_reload(state: &Path) -> io::Result<Result<u32, String>> {
    let mut stream = UnixStream::connect(state.join(INTERNAL)).await?;
    let line = format!("cube {VERSION} reload\n");
    stream.write_all(line.as_bytes()).await?;
    let mut answer = String::new();
    let mut stream = BufReader::new(stream.take(LINE));
    stream.read_line(&mut answer).await?;
    match answer.trim_end().split_once(' ') {
        Some(("ok", pid)) => pid.parse().map(Ok).map_err(io::Error::other),
        Some(("failed", why)) => Ok(Err(why.to_owned())),
        _ => Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "the server closed the connection without a response",
        )),
    }
}

#[cfg(test)]
mod tests {
    use rustls::pki_types::CertificateDer;

    use super::*;

    #[test]
    fn only_known_purposes_of_the_same_version_are_accepted() {
        let peer: SocketAddr = "[2001:db8::1]:5".parse().unwrap();
        let line = forward_line(peer, &Came::Client);
        let parsed = parse(line.trim_end());
        assert!(
            matches!(parsed, Some(Purpose::Forward(found, Came::Client)) if found == peer),
            "{parsed:?}"
        );
        for shown in [None, Some(CertificateDer::from(vec![48_u8, 255, 0]))] {
            let node = Came::Node(Arc::new(Peer::new(shown.clone())));
            let line = forward_line(peer, &node);
            let Some(Purpose::Forward(found, Came::Node(node))) = parse(line.trim_end()) else {
                panic!("{line}");
            };
            assert_eq!((found, node.certificate()), (peer, shown.as_ref()));
        }
        assert!(matches!(parse("cube 1 reload"), Some(Purpose::Reload)));
        for wrong in [
            "",
            "cube",
            "cube 2 reload",
            "cube 1 reload now",
            "cube 1 forward nobody",
            "cube 1 forward",
            "cube 1 forward-node 1.2.3.4:5",
            "cube 1 forward-node ! 1.2.3.4:5",
            "GET / HTTP/1.1",
        ] {
            assert!(parse(wrong).is_none(), "{wrong}");
        }
    }

    #[tokio::test]
    async fn bytes_after_the_first_line_stay_in_the_stream() {
        let (mut client, server) = UnixStream::pair().unwrap();
        client
            .write_all(b"cube 1 forward 10.0.0.1:7\nGET /")
            .await
            .unwrap();
        let Some(Greeting::Forwarded(mut stream, peer, _)) = greeting(server).await else {
            panic!("not forwarded");
        };
        assert_eq!(peer, "10.0.0.1:7".parse().unwrap());
        let mut rest = [0; 5];
        stream.read_exact(&mut rest).await.unwrap();
        assert_eq!(&rest, b"GET /");
    }

    #[tokio::test]
    async fn a_line_without_an_end_is_refused() {
        let (mut client, server) = UnixStream::pair().unwrap();
        client.write_all(&[b'x'; 5000]).await.unwrap();
        assert!(greeting(server).await.is_none());
    }
}
