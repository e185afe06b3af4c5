//! A registry on this host with one image, `r:latest`, that serves a page as an unprivileged user.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::Path,
    process::Command,
    sync::Arc,
};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// Port of the image's server.
pub(crate) const PORT: u16 = 49_999;
pub(crate) const PAGE: &str = "served by the image";

struct Content {
    config: Vec<u8>,
    layer: Vec<u8>,
    manifest: Vec<u8>,
}

/// Serves the image until the process ends. `busybox` is the only program in it.
pub(crate) fn serve(dir: &Path, busybox: &Path) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let content = Arc::new(Content::make(dir, busybox));
    std::thread::spawn(move || {
        for peer in listener.incoming() {
            let content = Arc::clone(&content);
            std::thread::spawn(move || content.answer(&peer.unwrap()));
        }
    });
    address
}

fn digest(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    format!("sha256:{hex}")
}

impl Content {
    fn make(dir: &Path, busybox: &Path) -> Self {
        let root = dir.join("root");
        for inner in ["bin", "etc", "srv/www", "tmp"] {
            fs::create_dir_all(root.join(inner)).unwrap();
        }
        fs::copy(busybox, root.join("bin/busybox")).unwrap();
        let accounts = "root:x:0:0::/root:/bin/sh\nweb:x:4321:4321::/srv/www:/bin/sh\n";
        fs::write(root.join("etc/passwd"), accounts).unwrap();
        fs::write(root.join("etc/group"), "root:x:0:\nweb:x:4321:\n").unwrap();
        fs::write(root.join("srv/www/page"), PAGE).unwrap();
        let packed = Command::new("tar")
            .arg("-C")
            .arg(&root)
            .args(["-c", "."])
            .output()
            .unwrap();
        assert!(packed.status.success());
        let layer = packed.stdout;
        let config = json!({
            "architecture": "amd64", "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": [digest(&layer)]},
            "config": {
                "Env": ["PATH=/opt/own:/bin", "GREETING=it's $HOME"], "User": "4321", "WorkingDir": "/srv/www",
                "Entrypoint": ["/bin/busybox", "httpd", "-f"], "Cmd": ["-p", PORT.to_string()],
            },
        });
        let config = serde_json::to_vec(&config).unwrap();
        let part = |kind: &str, bytes: &[u8]| -> Value {
            let kind = format!("application/vnd.oci.image.{kind}");
            json!({"mediaType": kind, "digest": digest(bytes), "size": bytes.len()})
        };
        let manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST, "config": part("config.v1+json", &config),
            "layers": [part("layer.v1.tar", &layer)],
        });
        Self {
            config,
            manifest: serde_json::to_vec(&manifest).unwrap(),
            layer,
        }
    }

    fn answer(&self, mut peer: &TcpStream) {
        let mut lines = BufReader::new(peer).lines().map_while(Result::ok);
        let first = lines.next().unwrap_or_default();
        for _header in lines.take_while(|line| !line.is_empty()) {}
        let path = first.split(' ').nth(1).unwrap_or_default();
        let body: &[u8] = match path {
            "/v2/" => b"{}",
            path if path.starts_with("/v2/r/manifests/") => &self.manifest,
            path if path.ends_with(&digest(&self.config)) => &self.config,
            path if path.ends_with(&digest(&self.layer)) => &self.layer,
            _ => b"",
        };
        let status = if body.is_empty() {
            "404 Not Found"
        } else {
            "200 OK"
        };
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-type: {MANIFEST}\r\ncontent-length: {}\r\nconnection: close\r\n\
             docker-content-digest: {}\r\n\r\n",
            body.len(),
            digest(body)
        );
        // A client that has read enough closes the connection.
        let body = if first.starts_with("HEAD") { b"" } else { body };
        let _gone = peer
            .write_all(head.as_bytes())
            .and_then(|()| peer.write_all(body));
    }
}

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
