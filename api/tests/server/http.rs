//! An HTTP client that sends exact bytes and reads one response.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use serde_json::Value;

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self
            .headers
            .iter()
            .find(|(n, _)| n.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON; panics with the answer if it is not JSON.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|why| panic!("{why}: {} {}", self.status, self.text()))
    }

    /// Returns the answer if it has this status; panics with the answer otherwise.
    #[track_caller]
    pub(crate) fn expect(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{}", self.text());
        if status >= 400 {
            let body = self.json();
            assert_eq!(body["code"], status, "{body}");
            assert!(body["message"].is_string(), "{body}");
        }
        self
    }
}

/// Sends one request on a new connection.
pub(crate) fn send(
    server: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Answer {
    let mut stream = open(server, method, path, headers, body);
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    parse(&bytes)
}

/// Like [`send`], for a server that may be down or be killed during the request. Returns the received bytes unparsed.
pub(crate) fn try_send(
    server: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> std::io::Result<Vec<u8>> {
    let mut stream = try_open(server, method, path, headers, body)?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Sends one request and returns the connection without reading the answer.
pub(crate) fn open(
    server: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> TcpStream {
    try_open(server, method, path, headers, body).unwrap()
}

fn try_open(
    server: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect(server)?;
    stream.set_read_timeout(Some(Duration::from_secs(120)))?;
    let mut head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\nContent-Length: {}\r\n",
        body.len()
    );
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)?;
    Ok(stream)
}

fn parse(bytes: &[u8]) -> Answer {
    let mut fields = [httparse::EMPTY_HEADER; 64];
    let mut response = httparse::Response::new(&mut fields);
    let parsed = response.parse(bytes).unwrap();
    let httparse::Status::Complete(head) = parsed else {
        panic!("incomplete answer: {:?}", String::from_utf8_lossy(bytes));
    };
    let field = |h: &httparse::Header<'_>| {
        let value = String::from_utf8_lossy(h.value).into_owned();
        (h.name.to_owned(), value)
    };
    let mut answer = Answer {
        status: response.code.unwrap(),
        headers: response.headers.iter().map(field).collect(),
        body: bytes[head..].to_vec(),
    };
    if answer.header("transfer-encoding") == Some("chunked") {
        answer.body = unchunk(&answer.body);
    }
    answer
}

fn unchunk(mut bytes: &[u8]) -> Vec<u8> {
    let mut whole = Vec::new();
    while let Ok(httparse::Status::Complete((start, len))) = httparse::parse_chunk_size(bytes) {
        let len = usize::try_from(len).unwrap();
        if len == 0 {
            break;
        }
        whole.extend_from_slice(&bytes[start..start + len]);
        bytes = &bytes[start + len + 2..];
    }
    whole
}
