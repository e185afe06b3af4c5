//! The client's side of SOCKS5: CONNECT to an address (RFC 1928), with user name and password (RFC 1929), in TLS if the proxy
//! wants it. Every message of the proxy has a fixed or bounded length; the caller limits the time.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use egress::control::{Credentials, WayTls};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::client_config;

const VERSION: u8 = 5;
const NO_AUTHENTICATION: u8 = 0;
const USER_AND_PASSWORD: u8 = 2;
/// Version of the exchange of user name and password.
const LOGIN_VERSION: u8 = 1;
const CONNECT: u8 = 1;
const IPV4: u8 = 1;
const DOMAIN: u8 = 3;
const IPV6: u8 = 4;

#[derive(Debug, thiserror::Error)]
pub(crate) enum SocksError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("its settings for TLS cannot be used")]
    Settings,
    #[error("cannot set up TLS: {0}")]
    Tls(#[source] io::Error),
    #[error("it does not speak SOCKS5")]
    Protocol,
    #[error("it accepts neither a user name with password nor a client without one")]
    Method,
    #[error("it refuses the user name or the password")]
    Login,
    #[error("the user name or the password is empty or longer than 255 bytes")]
    Credentials,
    #[error("it does not connect to {0}: {1}")]
    Refused(SocketAddr, &'static str),
}

/// TLS with the proxy, whose certificate is verified. `host`: a configuration with the host's authorities.
pub(crate) async fn secured(
    stream: TcpStream,
    tls: &WayTls,
    host: &ClientConfig,
) -> Result<TlsStream<TcpStream>, SocksError> {
    let config = match &tls.authorities {
        Some(authorities) => only(authorities).ok_or(SocksError::Settings)?,
        None => host.clone(),
    };
    let name = ServerName::try_from(tls.server_name.clone()).map_err(|_| SocksError::Settings)?;
    let connected = TlsConnector::from(Arc::new(config)).connect(name, stream);
    connected.await.map_err(SocksError::Tls)
}

/// A configuration with these authorities, in PEM, in place of the host's.
fn only(authorities: &str) -> Option<ClientConfig> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(authorities.as_bytes()) {
        roots.add(certificate.ok()?).ok()?;
    }
    client_config(roots).ok()
}

/// Asks the proxy at the other end of `stream` for a connection. Afterwards the stream is that connection.
pub(crate) async fn connect(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    remote: SocketAddr,
    credentials: Option<&Credentials>,
) -> Result<(), SocksError> {
    let method = match credentials {
        Some(_) => USER_AND_PASSWORD,
        None => NO_AUTHENTICATION,
    };
    stream.write_all(&[VERSION, 1, method]).await?;
    stream.flush().await?;
    let mut chosen = [0; 2];
    stream.read_exact(&mut chosen).await?;
    match (chosen, credentials) {
        ([VERSION, chosen], _) if chosen != method => return Err(SocksError::Method),
        ([VERSION, _], Some(credentials)) => log_in(stream, credentials).await?,
        ([VERSION, _], None) => {}
        _ => return Err(SocksError::Protocol),
    }
    stream.write_all(&request(remote)).await?;
    stream.flush().await?;
    let mut head = [0; 4];
    stream.read_exact(&mut head).await?;
    let [VERSION, reply, _, kind] = head else {
        return Err(SocksError::Protocol);
    };
    if reply != 0 {
        return Err(SocksError::Refused(remote, reason(reply)));
    }
    // The address that the proxy uses is not needed, but must be read.
    let length = match kind {
        IPV4 => 4,
        IPV6 => 16,
        DOMAIN => usize::from(stream.read_u8().await?),
        _ => return Err(SocksError::Protocol),
    };
    let mut rest = vec![0; length + 2];
    stream.read_exact(&mut rest).await?;
    Ok(())
}

async fn log_in(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    credentials: &Credentials,
) -> Result<(), SocksError> {
    let mut message = vec![LOGIN_VERSION];
    for text in [&credentials.user, &credentials.password] {
        let length = u8::try_from(text.len()).ok().filter(|length| *length > 0);
        message.push(length.ok_or(SocksError::Credentials)?);
        message.extend_from_slice(text.as_bytes());
    }
    stream.write_all(&message).await?;
    stream.flush().await?;
    let mut answer = [0; 2];
    stream.read_exact(&mut answer).await?;
    match answer {
        [LOGIN_VERSION, 0] => Ok(()),
        [LOGIN_VERSION, _] => Err(SocksError::Login),
        _ => Err(SocksError::Protocol),
    }
}

fn request(remote: SocketAddr) -> Vec<u8> {
    let mut message = vec![VERSION, CONNECT, 0];
    match remote.ip() {
        IpAddr::V4(address) => {
            message.push(IPV4);
            message.extend_from_slice(&address.octets());
        }
        IpAddr::V6(address) => {
            message.push(IPV6);
            message.extend_from_slice(&address.octets());
        }
    }
    message.extend_from_slice(&remote.port().to_be_bytes());
    message
}

/// RFC 1928, section 6.
fn reason(reply: u8) -> &'static str {
    match reply {
        1 => "general failure",
        2 => "its rules do not allow it",
        3 => "network unreachable",
        4 => "host unreachable",
        5 => "connection refused",
        6 => "TTL expired",
        7 => "CONNECT is not supported",
        8 => "addresses of this kind are not supported",
        _ => "for a reason that SOCKS5 does not define",
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::*;

    /// Plays the proxy: reads this much, answers, and so on. Returns what it read, and how the client ended.
    async fn play(
        credentials: Option<&Credentials>,
        remote: &str,
        turns: &[(usize, &[u8])],
    ) -> (Vec<u8>, Result<(), SocksError>) {
        let (mut ours, mut theirs) = duplex(1024);
        let proxy = async move {
            let mut read = Vec::new();
            for (length, answer) in turns {
                let mut part = vec![0; *length];
                theirs.read_exact(&mut part).await.unwrap();
                read.extend(part);
                theirs.write_all(answer).await.unwrap();
            }
            read
        };
        let client = connect(&mut ours, remote.parse().unwrap(), credentials);
        tokio::join!(proxy, client)
    }

    #[tokio::test]
    async fn a_connection_is_asked_for_with_and_without_credentials() {
        let done: &[u8] = &[5, 0, 0, 1, 1, 2, 3, 4, 0, 80];
        let (read, ended) = play(None, "192.0.2.7:443", &[(3, &[5, 0]), (10, done)]).await;
        assert!(ended.is_ok());
        assert_eq!(read, [5, 1, 0, 5, 1, 0, 1, 192, 0, 2, 7, 1, 187]);
        let credentials = Credentials {
            user: "me".to_owned(),
            password: "hunter2".to_owned(),
        };
        // The proxy names itself, and its address is IPv6.
        let named: &[u8] = &[5, 0, 0, 3, 2, b'a', b'b', 0, 80];
        let turns: [(usize, &[u8]); 3] = [(3, &[5, 2]), (12, &[1, 0]), (22, named)];
        let (read, ended) = play(Some(&credentials), "[2001:db8::1]:22", &turns).await;
        assert!(ended.is_ok());
        assert_eq!(&read[..15], b"\x05\x01\x02\x01\x02me\x07hunter2");
        assert_eq!(&read[15..19], [5, 1, 0, 4]);
    }

    #[tokio::test]
    async fn other_answers_are_errors() {
        let credentials = Credentials {
            user: "me".to_owned(),
            password: "x".to_owned(),
        };
        let ended = |credentials, turns: &'static [(usize, &'static [u8])]| async move {
            play(credentials, "192.0.2.7:443", turns)
                .await
                .1
                .unwrap_err()
                .to_string()
        };
        assert!(
            ended(None, &[(3, &[5, 255])])
                .await
                .contains("accepts neither")
        );
        assert!(ended(None, &[(3, b"HT")]).await.contains("does not speak"));
        assert!(
            ended(None, &[(3, &[5, 0]), (10, &[5, 5, 0, 1])])
                .await
                .contains("refused")
        );
        assert!(
            ended(None, &[(3, &[5, 0]), (10, &[5, 0, 0, 9])])
                .await
                .contains("does not speak")
        );
        let login = ended(Some(&credentials), &[(3, &[5, 2]), (6, &[1, 1])]).await;
        assert!(login.contains("refuses the user name"), "{login}");
        // A proxy must not choose to be used without the credentials.
        let skipped = ended(Some(&credentials), &[(3, &[5, 0])]).await;
        assert!(skipped.contains("accepts neither"), "{skipped}");
    }
}
