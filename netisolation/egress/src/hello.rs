//! Reads the ClientHello of a connection without taking part in it: the bytes can still be forwarded unchanged.

use rustls::server::Acceptor;

use crate::name::{HostName, NameError};

/// Limit for the bytes up to the end of a ClientHello, in any number of records.
pub const MAX_HELLO: usize = 64 << 10;

/// The parts of a ClientHello that the proxy uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientHello {
    /// `None` if there is no server name. With Encrypted ClientHello, this is the outer one.
    pub name: Option<HostName>,
    /// Protocols that the client offers by ALPN. Empty if it offers none.
    pub protocols: Vec<Vec<u8>>,
}

/// Reason why the bytes are not an acceptable ClientHello.
#[derive(Debug, thiserror::Error)]
pub enum HelloError {
    #[error("the ClientHello is longer than {MAX_HELLO} bytes")]
    TooLong,
    #[error("the connection does not begin with a TLS ClientHello")]
    NotTls(#[source] rustls::Error),
    #[error("the server name in the ClientHello is not a host name")]
    Name(#[from] NameError),
}

/// Collects copies of a connection's bytes until the ClientHello is complete.
#[derive(Default)]
pub struct HelloReader {
    acceptor: Acceptor,
    length: usize,
}

impl HelloReader {
    /// Continues with the next bytes. Returns `None` while the ClientHello is incomplete.
    ///
    /// # Errors
    /// Returns a [`HelloError`] if the bytes cannot become an acceptable ClientHello. Two server names, or an address
    /// as server name, either cause such an error or count as no name.
    pub fn read(&mut self, mut bytes: &[u8]) -> Result<Option<ClientHello>, HelloError> {
        while !bytes.is_empty() {
            let read = self.acceptor.read_tls(&mut bytes);
            // The acceptor's buffer is full: the message is longer than the protocol allows.
            let read = read.map_err(|_| HelloError::TooLong)?;
            self.length = self.length.saturating_add(read);
            let accepted = self.acceptor.accept();
            match accepted.map_err(|(error, _)| HelloError::NotTls(error))? {
                Some(accepted) => {
                    let hello = accepted.client_hello();
                    let name = hello.server_name().map(HostName::parse).transpose()?;
                    let protocols = hello.alpn().into_iter().flatten();
                    let protocols = protocols.map(<[u8]>::to_vec).collect();
                    return Ok(Some(ClientHello { name, protocols }));
                }
                None if self.length > MAX_HELLO => return Err(HelloError::TooLong),
                None => {}
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::{
        ClientConfig, ClientConnection, RootCertStore, crypto::ring, pki_types::ServerName,
    };

    use super::*;

    fn hello(name: &str, protocols: &[&[u8]]) -> Vec<u8> {
        let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut bytes = Vec::new();
        client.write_tls(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn the_name_is_read_from_any_fragments() {
        let bytes = hello("API.Example.com", &[b"h2", b"http/1.1"]);
        for size in [1, 2, 7, 100, bytes.len()] {
            let mut reader = HelloReader::default();
            let mut found = None;
            for part in bytes.chunks(size) {
                assert_eq!(found, None);
                found = reader.read(part).unwrap();
            }
            let found = found.unwrap();
            assert_eq!(found.name.unwrap().as_str(), "api.example.com");
            assert_eq!(found.protocols, [b"h2".to_vec(), b"http/1.1".to_vec()]);
        }
    }

    #[test]
    fn a_hello_may_be_cut_into_records_and_be_longer_than_one() {
        // A protocol list of 30 KiB makes the message longer than a single record.
        let names: Vec<Vec<u8>> = (0..130)
            .map(|n| vec![b'a' + u8::try_from(n % 26).unwrap(); 250])
            .collect();
        let names: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
        let bytes = hello("api.example.com", &names);
        assert!(bytes.len() > 30_000);
        let message = payload(&bytes);
        for size in [1, 1000, 16 << 10] {
            let mut reader = HelloReader::default();
            let mut found = None;
            for record in message.chunks(size) {
                let length = u16::try_from(record.len()).unwrap().to_be_bytes();
                let record = [&[22, 3, 1][..], &length, record].concat();
                match reader.read(&record) {
                    Ok(hello) => found = hello,
                    Err(error) => {
                        assert!(matches!(error, HelloError::TooLong), "{error}");
                        // rustls has its own limit, one byte lower.
                        assert!(reader.length <= MAX_HELLO, "{} bytes", reader.length);
                        break;
                    }
                }
            }
            let result = found.map(|hello| hello.name.unwrap().to_string());
            // With records of one byte each, the total exceeds the limit of 64 KiB.
            assert_eq!(result.is_some(), size > 1, "{size}");
        }
    }

    /// The handshake message in the records.
    fn payload(mut bytes: &[u8]) -> Vec<u8> {
        let mut message = Vec::new();
        while let [22, _, _, high, low, rest @ ..] = bytes {
            let (record, rest) = rest.split_at(usize::from(*high) << 8 | usize::from(*low));
            message.extend_from_slice(record);
            bytes = rest;
        }
        message
    }

    #[test]
    fn other_bytes_are_refused() {
        for bytes in [
            &b"GET / HTTP/1.1\r\n\r\n"[..],
            b"SSH-2.0-OpenSSH\r\n",
            &[0x80, 0x2e, 1, 0, 2],
            &[22, 3, 1, 0, 0, 1],
        ] {
            assert!(HelloReader::default().read(bytes).is_err(), "{bytes:?}");
        }
        let address = hello("127.0.0.1", &[]);
        assert_eq!(
            HelloReader::default().read(&address).unwrap().unwrap().name,
            None
        );
    }
}
