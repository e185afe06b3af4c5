//! An HTTP/1.1 client for exact bytes: tests control every byte that is sent and see every byte that is received.

use std::net::SocketAddr;

use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::world::soon;

pub(crate) struct Wire<S = TcpStream> {
    pub(crate) stream: S,
    unread: Vec<u8>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    /// Names in lower case.
    pub(crate) fields: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// Trailer fields: the lines after the last chunk.
    pub(crate) trailers: Vec<String>,
}

impl Reply {
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        let found = self.fields.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no JSON: {self:?}"))
    }

    fn is_chunked(&self) -> bool {
        self.field("transfer-encoding") == Some("chunked")
    }
}

impl Wire {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        let stream = soon("connecting", TcpStream::connect(address))
            .await
            .unwrap();
        stream.set_nodelay(true).unwrap();
        Self::over(stream)
    }
}

impl Wire {
    /// Connects from another address of this host.
    pub(crate) async fn connect_from(own: &str, address: SocketAddr) -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(own.parse().unwrap()).unwrap();
        let stream = soon("connecting", socket.connect(address)).await.unwrap();
        Self::over(stream)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Wire<S> {
    pub(crate) fn over(stream: S) -> Self {
        let unread = Vec::new();
        Self { stream, unread }
    }

    /// The stream, of which nothing was read yet.
    pub(crate) fn into_stream(self) -> S {
        assert!(self.unread.is_empty());
        self.stream
    }

    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        let sent = soon("sending", self.stream.write_all(bytes.as_ref()));
        sent.await.unwrap();
    }

    /// Sends a request without a body and reads the complete response.
    pub(crate) async fn ask(&mut self, line: &str, fields: &str) -> Reply {
        self.send(format!("{line} HTTP/1.1\r\n{fields}\r\n")).await;
        let is_head = line.starts_with("HEAD ");
        self.answer(is_head).await
    }

    /// Sends a request with a body and reads the complete response.
    pub(crate) async fn post(&mut self, path: &str, fields: &str, body: &[u8]) -> Reply {
        let length = body.len();
        self.send(format!(
            "POST {path} HTTP/1.1\r\n{fields}Content-Length: {length}\r\n\r\n"
        ))
        .await;
        self.send(body).await;
        self.answer(false).await
    }

    /// Reads more bytes into `unread`. Returns `false` at the end of the stream or after a reset.
    async fn more(&mut self) -> bool {
        let read = soon("reading", self.stream.read_buf(&mut self.unread)).await;
        read.is_ok_and(|n| n > 0)
    }

    /// Reads a head, unparsed.
    pub(crate) async fn until_blank_line(&mut self) -> Vec<u8> {
        self.up_to(b"\r\n\r\n").await.unwrap_or_default()
    }

    /// Reads up to and including `end`. `None`: the stream ended earlier.
    async fn up_to(&mut self, end: &[u8]) -> Option<Vec<u8>> {
        loop {
            let found = self.unread.windows(end.len()).position(|part| part == end);
            if let Some(at) = found {
                return Some(self.unread.drain(..at + end.len()).collect());
            }
            if !self.more().await {
                return None;
            }
        }
    }

    pub(crate) async fn exactly(&mut self, length: usize) -> Option<Vec<u8>> {
        while self.unread.len() < length {
            if !self.more().await {
                return None;
            }
        }
        Some(self.unread.drain(..length).collect())
    }

    /// Discards the bytes that were read ahead; returns their number.
    pub(crate) fn take_unread(&mut self) -> usize {
        std::mem::take(&mut self.unread).len()
    }

    /// Reads to the end of the stream.
    pub(crate) async fn rest(&mut self) -> Vec<u8> {
        while self.more().await {}
        std::mem::take(&mut self.unread)
    }

    pub(crate) async fn head(&mut self) -> Reply {
        let head = self.up_to(b"\r\n\r\n").await.expect("a response");
        let head = String::from_utf8(head).unwrap();
        let mut lines = head.trim_end().split("\r\n");
        let first = lines.next().unwrap();
        let mut reply = Reply {
            status: first.split(' ').nth(1).unwrap().parse().unwrap(),
            ..Reply::default()
        };
        for line in lines {
            let (name, value) = line.split_once(':').unwrap();
            let value = value.trim().to_owned();
            reply.fields.push((name.to_ascii_lowercase(), value));
        }
        reply
    }

    /// The next chunk, empty for the last one. `None`: the stream was truncated.
    pub(crate) async fn chunk(&mut self) -> Option<Vec<u8>> {
        let line = self.up_to(b"\r\n").await?;
        let text = std::str::from_utf8(&line).unwrap().trim_end();
        let length = usize::from_str_radix(text, 16).unwrap();
        if length == 0 {
            return Some(Vec::new());
        }
        let mut chunk = self.exactly(length + 2).await?;
        chunk.truncate(length);
        Some(chunk)
    }

    /// Reads a line, without its line end.
    pub(crate) async fn line(&mut self) -> String {
        let line = self.up_to(b"\r\n").await.expect("a line");
        String::from_utf8(line).unwrap().trim_end().to_owned()
    }

    pub(crate) async fn answer(&mut self, is_head: bool) -> Reply {
        let mut reply = self.head().await;
        if is_head || matches!(reply.status, 100..200 | 204 | 304) {
            return reply;
        }
        if reply.is_chunked() {
            loop {
                let chunk = self.chunk().await.expect("a complete body");
                if chunk.is_empty() {
                    break;
                }
                reply.body.extend(chunk);
            }
            loop {
                let line = self.up_to(b"\r\n").await.expect("the end of a body");
                if line == b"\r\n" {
                    return reply;
                }
                let line = String::from_utf8(line).unwrap();
                reply.trailers.push(line.trim_end().to_ascii_lowercase());
            }
        }
        reply.body = match reply.field("content-length") {
            Some(length) => {
                let length = length.parse().unwrap();
                self.exactly(length).await.expect("a complete body")
            }
            None => self.rest().await,
        };
        reply
    }

    /// Waits until the server has closed the connection, possibly after sending data. Panics if it does not; never
    /// returns `false`.
    pub(crate) async fn is_closed(&mut self) -> bool {
        self.rest().await;
        true
    }
}
