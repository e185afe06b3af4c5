//! Debian's `docker-registry`. The tests of `api` include this file too.

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use oci_image::digest::Digest;

use crate::archive::{Image, MANIFEST};

/// A running registry, which ends when this value is dropped.
pub(crate) struct Registry {
    child: Child,
    pub(crate) address: SocketAddr,
}

impl Registry {
    /// Starts a registry on the storage below `dir`, with a section `auth` in its configuration.
    pub(crate) fn start(dir: &Path, auth: &str) -> Self {
        let free = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        let config = dir.join("config.yml");
        let storage = dir.join("storage");
        let text = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\n\
             http: {{addr: '{address}'}}\n{auth}",
            storage.display()
        );
        fs::write(&config, text).unwrap();
        let log = fs::File::create(dir.join("log")).unwrap();
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(&config)
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("docker-registry: install Debian's package");
        let registry = Self { child, address };
        let deadline = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect(address).is_err() {
            let log = fs::read_to_string(dir.join("log")).unwrap();
            assert!(
                Instant::now() < deadline,
                "the registry does not start: {log}"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        registry
    }

    /// Stores an image as `r:latest`. Only for registries without authentication.
    pub(crate) fn push(&self, image: &Image) {
        for blob in image.blobs() {
            let head = self.request("POST", "/v2/r/blobs/uploads/", "", &[]);
            let location = head
                .lines()
                .find_map(|line| line.strip_prefix("Location: "));
            let location = location.unwrap().trim();
            let path = location.split_once(&self.address.to_string()).unwrap().1;
            let path = format!("{path}&digest={}", Digest::of(blob));
            let kind = "Content-Type: application/octet-stream\r\n";
            assert!(self.request("PUT", &path, kind, blob).contains(" 201 "));
        }
        let kind = format!("Content-Type: {MANIFEST}\r\n");
        let head = self.request("PUT", "/v2/r/manifests/latest", &kind, &image.manifest);
        assert!(head.contains(" 201 "), "{head}");
    }

    fn request(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> String {
        let mut stream = TcpStream::connect(self.address).unwrap();
        let (host, len) = (self.address, body.len());
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {len}\r\n{headers}\r\n"
        )
        .unwrap();
        stream.write_all(body).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        String::from_utf8_lossy(&answer).into_owned()
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Stores an image in a registry that then requires the name `user` and the password `secret`.
pub(crate) fn with_password(dir: &Path, image: &Image) -> Registry {
    let passwords = dir.join("htpasswd");
    let line = "user:$2y$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a\n";
    fs::write(&passwords, line).unwrap();
    let path = passwords.display();
    let auth = format!("auth: {{htpasswd: {{realm: r, path: {path}}}}}\n");
    with_auth(dir, image, &auth)
}

/// Stores an image in a registry, which is then restarted with authentication.
pub(crate) fn with_auth(dir: &Path, image: &Image, auth: &str) -> Registry {
    Registry::start(dir, "").push(image);
    Registry::start(dir, auth)
}
