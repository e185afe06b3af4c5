//! A registry that can misbehave, on a loopback address.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
};

use oci_image::digest::Digest;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use crate::archive::{Image, MANIFEST};

/// A server's reaction to a request for a path.
#[derive(Clone, Debug)]
pub(crate) enum Reply {
    /// Status, headers and body. `Content-Length` is added.
    Answer(u16, Vec<(String, String)>, Vec<u8>),
    /// Sends the head and a part of the body, then nothing.
    Stall(Vec<u8>),
    /// Sends these bytes and closes the connection.
    Raw(Vec<u8>),
}

pub(crate) fn answer(status: u16, headers: &[(&str, &str)], body: &[u8]) -> Reply {
    let pair = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    Reply::Answer(status, headers.iter().map(pair).collect(), body.to_vec())
}

/// Path, and the value of `Authorization` if it was sent.
pub(crate) type Seen = (String, Option<String>);

#[derive(Clone, Debug, Default)]
pub(crate) struct Server {
    replies: Arc<Mutex<BTreeMap<String, Vec<Reply>>>>,
    pub(crate) requests: Arc<Mutex<Vec<Seen>>>,
}

impl Server {
    /// A server with the blobs of an image at `v2/r/`, tag `latest`.
    pub(crate) fn of(image: &Image) -> Self {
        let server = Self::default();
        server.add("r", image);
        server
    }

    /// Adds the blobs of an image at `v2/NAME/`, tag `latest`.
    pub(crate) fn add(&self, name: &str, image: &Image) {
        for blob in image.blobs() {
            let path = format!("/v2/{name}/blobs/{}", Digest::of(blob));
            self.set(&path, answer(200, &[], blob));
        }
        let kind = [("Content-Type", MANIFEST)];
        let path = format!("/v2/{name}/manifests/latest");
        self.set(&path, answer(200, &kind, &image.manifest));
    }

    pub(crate) fn set(&self, path: &str, reply: Reply) {
        self.set_all(path, vec![reply]);
    }

    /// The replies to consecutive requests. The last one is repeated.
    pub(crate) fn set_all(&self, path: &str, mut replies: Vec<Reply>) {
        replies.reverse();
        self.replies
            .lock()
            .unwrap()
            .insert(path.to_owned(), replies);
    }

    pub(crate) fn paths(&self) -> Vec<String> {
        let requests = self.requests.lock().unwrap();
        requests.iter().map(|(path, _)| path.clone()).collect()
    }

    /// Serves until the runtime ends.
    pub(crate) async fn start(&self) -> SocketAddr {
        let listener = TcpListener::bind((IpAddr::V4(Ipv4Addr::LOCALHOST), 0))
            .await
            .unwrap();
        let address = listener.local_addr().unwrap();
        let server = self.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let server = server.clone();
                // A client that disconnects is not an error.
                tokio::spawn(async move { drop(server.serve(stream).await) });
            }
        });
        address
    }

    async fn serve(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await?);
        }
        let head = String::from_utf8_lossy(&head).into_owned();
        let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
        let find = |line: &str| {
            let (name, value) = line.split_once(": ")?;
            name.eq_ignore_ascii_case("authorization")
                .then(|| value.to_owned())
        };
        let authorization = head.lines().find_map(find);
        self.requests
            .lock()
            .unwrap()
            .push((path.clone(), authorization));
        let reply = {
            let mut replies = self.replies.lock().unwrap();
            match replies.get_mut(&path) {
                Some(list) if list.len() > 1 => list.pop(),
                Some(list) => list.last().cloned(),
                None => None,
            }
        };
        match reply.unwrap_or_else(|| answer(404, &[], b"")) {
            Reply::Answer(status, headers, body) => {
                let mut head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n", body.len());
                for (name, value) in headers {
                    head += &format!("{name}: {value}\r\n");
                }
                stream.write_all(format!("{head}\r\n").as_bytes()).await?;
                stream.write_all(&body).await
            }
            Reply::Stall(bytes) => {
                stream.write_all(&bytes).await?;
                std::future::pending().await
            }
            Reply::Raw(bytes) => stream.write_all(&bytes).await,
        }
    }
}
