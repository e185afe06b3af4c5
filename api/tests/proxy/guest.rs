//! Programs in the sandbox: servers on loopback ports, which the agent's tunnel reaches.

use std::future::Future;

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::task::JoinHandle;

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
