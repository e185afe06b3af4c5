//! Programs in the sandbox: servers on loopback ports, which the agent's tunnel reaches.

use std::future::Future;
use std::sync::Arc;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

use crate::wire::Wire;

/// Reads the head of a request from a vsock stream.
pub(crate) async fn read_head(client: &mut BufReader<UnixStream>) {
    let mut line = String::new();
    while client.read_line(&mut line).await.is_ok_and(|n| n > 2) {
        line.clear();
    }
}

/// A server on a loopback port. Dropping it stops the server.
pub(crate) struct Program {
    pub(crate) port: u16,
    task: JoinHandle<()>,
}

impl Drop for Program {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Program {
    /// Passes each connection to `serve`.
    pub(crate) async fn start<F>(serve: impl Fn(Wire<TcpStream>) -> F + Send + 'static) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let task = tokio::spawn(async move {
            let mut running = tokio::task::JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                stream.set_nodelay(true).unwrap();
                running.spawn(serve(Wire::over(stream)));
            }
        });
        Self { port, task }
    }

    /// Like [`Program::mirror`], with TLS and a certificate that no authority has signed.
    pub(crate) async fn mirror_with_tls() -> Self {
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = rcgen::CertificateParams::new(vec!["elsewhere.test".to_owned()]);
        let certificate = certificate.unwrap().self_signed(&key).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![certificate.der().clone()],
                rustls::pki_types::PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
            );
        let acceptor = TlsAcceptor::from(Arc::new(config.unwrap()));
        Self::start(move |wire: Wire<TcpStream>| {
            let acceptor = acceptor.clone();
            async move {
                let Ok(mut stream) = acceptor.accept(wire.into_stream()).await else {
                    return;
                };
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n")
                    && matches!(stream.read_buf(&mut head).await, Ok(1..))
                {}
                let length = head.len();
                let start = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n");
                let answer = [start.as_bytes(), &head].concat();
                stream.write_all(&answer).await.unwrap();
                // The client may close first.
                let _ = stream.shutdown().await;
            }
        })
        .await
    }

    /// Starts a server that answers every request with the head of that request.
    pub(crate) async fn mirror() -> Self {
        Self::start(async |mut wire: Wire| {
            let head = wire.request_head().await;
            let length = head.len();
            wire.send(format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{head}"
            ))
            .await;
            wire.is_closed().await;
        })
        .await
    }
}

impl Wire<TcpStream> {
    /// Reads the head of a request, unparsed.
    pub(crate) async fn request_head(&mut self) -> String {
        String::from_utf8(self.until_blank_line().await).unwrap()
    }
}
