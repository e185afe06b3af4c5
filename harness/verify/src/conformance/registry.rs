//! Registries for cases that build templates from a registry's image: Debian's `docker-registry` on the loopback
//! interface, one without and one with a password. Both offer one small image, from the same storage.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    net::TcpStream,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use testbed::server::free_port;

use crate::setup::{VerifyError, at};

const PROGRAM: &str = "/usr/bin/docker-registry";
/// Why cases of registries are skipped on this host.
pub(super) const MISSING: &str =
    "skipped: this host has no docker-registry (apt-get install docker-registry)";
/// Name of the image. Its file `/greeting` and its variable `WORD` contain the text that the cases expect.
const NAME: &str = "greeting";
const TEXT: &str = "hello from a registry";
/// User name `user` and password `secret`, as in the cases.
const PASSWORD: &str = "user:$2y$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a\n";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// Time limit of a start and of each exchange.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum size of a registry's response, in bytes.
const MAX_ANSWER: u64 = 64 << 10;

/// Two running registries. Dropping this value ends them.
#[derive(Debug)]
pub(super) struct Registries {
    open: Registry,
    locked: Registry,
}

/// References of the image, for the cases.
#[derive(Clone, Debug)]
pub(super) struct ImageNames {
    pub(super) open: String,
    pub(super) locked: String,
}

impl Registries {
    /// Starts both, with their files in `dir`. `None`: this host has no `docker-registry`.
    pub(super) fn start(dir: &Path) -> Result<Option<Self>, VerifyError> {
        if !Path::new(PROGRAM).exists() {
            return Ok(None);
        }
        let start = || {
            fs::create_dir_all(dir)?;
            let passwords = dir.join("htpasswd");
            fs::write(&passwords, PASSWORD)?;
            let open = Registry::start(dir, "open", &json!({}))?;
            let auth = json!({"auth": {"htpasswd": {"realm": "conformance", "path": passwords}}});
            let locked = Registry::start(dir, "locked", &auth)?;
            open.push(&layer(dir)?)?;
            Ok(Self { open, locked })
        };
        start().map(Some).map_err(at(Path::new(PROGRAM)))
    }

    pub(super) fn image_names(&self) -> ImageNames {
        ImageNames {
            open: format!("{}/{NAME}", self.open.domain()),
            locked: format!("{}/{NAME}", self.locked.domain()),
        }
    }

    /// Options with which a server pulls from them. Each registry is configured as its own mirror, because it only
    /// speaks HTTP.
    pub(super) fn server_options(&self) -> Vec<String> {
        let domains = [self.open.domain(), self.locked.domain()];
        let options = domains.map(|domain| {
            [
                "--image-mirror".to_owned(),
                format!("{domain}=http://{domain}"),
            ]
        });
        options.into_iter().flatten().collect()
    }
}

#[derive(Debug)]
struct Registry {
    child: Child,
    port: u16,
}

impl Registry {
    fn start(dir: &Path, name: &str, auth: &Value) -> io::Result<Self> {
        let port = free_port()?;
        let mut config = json!({
            "version": 0.1,
            "log": {"level": "error"},
            "storage": {"filesystem": {"rootdirectory": dir.join("storage")}},
            "http": {"addr": format!("127.0.0.1:{port}")},
        });
        for (key, value) in auth.as_object().into_iter().flatten() {
            config[key] = value.clone();
        }
        // JSON is YAML.
        let path = dir.join(format!("{name}.yml"));
        fs::write(&path, config.to_string())?;
        let log = dir.join(format!("{name}.log"));
        let child = Command::new(PROGRAM)
            .arg("serve")
            .arg(&path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            // The sweep of dead runs finds the process by this file.
            .stderr(File::create(&log)?)
            .spawn()?;
        let mut registry = Self { child, port };
        registry.await_start(&log)?;
        Ok(registry)
    }

    fn await_start(&mut self, log: &Path) -> io::Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            if self.child.try_wait()?.is_some() || Instant::now() > deadline {
                let log = fs::read_to_string(log).unwrap_or_default();
                return Err(io::Error::other(format!(
                    "the registry does not start: {log}"
                )));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    fn domain(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Stores the image with this layer.
    fn push(&self, layer: &[u8]) -> io::Result<()> {
        let config = json!({
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": [format!("WORD={TEXT}")]},
            "rootfs": {"type": "layers", "diff_ids": [digest(layer)]},
        });
        let config = config.to_string().into_bytes();
        let described = |kind: &str, blob: &[u8]| {
            let media_type = format!("application/vnd.oci.image.{kind}");
            json!({"mediaType": media_type, "size": blob.len(), "digest": digest(blob)})
        };
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": described("config.v1+json", &config),
            "layers": [described("layer.v1.tar", layer)],
        });
        for blob in [&config, layer] {
            let answer = self.request("POST", &format!("/v2/{NAME}/blobs/uploads/"), "", &[])?;
            let location = answer
                .lines()
                .find_map(|line| line.strip_prefix("Location: "));
            let path = location.and_then(|url| url.trim().split_once(&self.domain()));
            let (_, path) = path.ok_or_else(|| io::Error::other(answer.clone()))?;
            let path = format!("{path}&digest={}", digest(blob));
            self.request("PUT", &path, "application/octet-stream", blob)?;
        }
        let path = format!("/v2/{NAME}/manifests/latest");
        self.request("PUT", &path, MANIFEST, manifest.to_string().as_bytes())?;
        Ok(())
    }

    /// Sends a request, which must succeed, and returns the response.
    fn request(&self, method: &str, path: &str, kind: &str, body: &[u8]) -> io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        let (host, len) = (self.domain(), body.len());
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {len}\r\nContent-Type: {kind}\r\n\r\n"
        )?;
        stream.write_all(body)?;
        let mut answer = Vec::new();
        stream.take(MAX_ANSWER).read_to_end(&mut answer)?;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        if answer.starts_with("HTTP/1.1 2") {
            Ok(answer)
        } else {
            Err(io::Error::other(format!("{method} {path}: {answer}")))
        }
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        // Fails only if the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An archive of the image's file.
fn layer(dir: &Path) -> io::Result<Vec<u8>> {
    fs::write(dir.join(NAME), format!("{TEXT}\n"))?;
    let mut tar = Command::new("tar");
    tar.args([
        "--create",
        "--owner=0",
        "--group=0",
        "--mode=644",
        "--directory",
    ]);
    let done = tar.arg(dir).arg(NAME).output()?;
    if done.status.success() {
        Ok(done.stdout)
    } else {
        let why = String::from_utf8_lossy(&done.stderr).into_owned();
        Err(io::Error::other(why))
    }
}

fn digest(blob: &[u8]) -> String {
    let sum = Sha256::digest(blob);
    let hex: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}
