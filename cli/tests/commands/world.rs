//! A server under test, and runs of `cube` against it.

use std::{
    io::Write,
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use envd::EnvdClient;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use tempfile::TempDir;
use testbed::server::{Door, LocalServer, ServerSpec, Site, Tls};

/// Timeout of every wait, generous for busy hosts.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The first requirement of these tests that this host does not meet, if any.
pub(crate) fn lack() -> Option<String> {
    test_cases::lack_for_vms(&[
        ("CUBE_ARTIFACTS", "templates/base"),
        ("CUBE_BIN", "cube-vmm"),
        ("CUBE_BIN", "cube-api"),
    ])
}

pub(crate) fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).map(PathBuf::from)
}

/// A server and its directory. Dropping it ends the server with its sandboxes.
pub(crate) struct World {
    pub(crate) server: LocalServer,
    pub(crate) dir: TempDir,
}

impl World {
    /// A server that needs no key.
    pub(crate) fn open() -> Self {
        Self::with(Door::Open, Tls::Off)
    }

    pub(crate) fn with(door: Door, tls: Tls) -> Self {
        Self::with_options(door, tls, &[])
    }

    pub(crate) fn with_options(door: Door, tls: Tls, more: &[String]) -> Self {
        let (artifacts, bin) = (
            variable("CUBE_ARTIFACTS").unwrap(),
            variable("CUBE_BIN").unwrap(),
        );
        // The path is short because unix socket addresses are limited to 108 bytes.
        let dir = tempfile::Builder::new()
            .prefix("cli")
            .tempdir_in("/tmp")
            .unwrap();
        let mut options: Vec<String> = ["--network", "none", "--allow-missing-limits"]
            .map(str::to_owned)
            .into();
        options.extend_from_slice(more);
        let directories = [
            ("--image-converter", bin.join("cube-image")),
            ("--image-userland", artifacts.join("guest")),
            ("--images", artifacts.join("guest")),
            ("--images", artifacts.join("stages")),
        ];
        for (option, path) in directories {
            options.extend([option.to_owned(), path.display().to_string()]);
        }
        let spec = ServerSpec {
            program: bin.join("cube-api"),
            vmm: bin.join("cube-vmm"),
            templates: artifacts.join("templates"),
            warm: 1,
            // Certificates are made for a domain and for this host.
            domain: (tls == Tls::PrivateAuthority).then(|| "cube.test".to_owned()),
            door,
            tls,
            site: Site::Loopback,
            options,
            environment: Vec::new(),
        };
        let server = LocalServer::start(dir.path(), spec).unwrap();
        Self { server, dir }
    }

    /// `cube` with these arguments, for this server, without this host's variables.
    pub(crate) fn cube(&self, words: &[&str]) -> Command {
        self.program(env!("CARGO_BIN_EXE_cube"), words)
    }

    /// A program that may start `cube`.
    pub(crate) fn program(&self, name: &str, words: &[&str]) -> Command {
        let mut cube = cleared(name, words);
        cube.env("E2B_API_URL", self.server.endpoint().to_string())
            .env("E2B_API_KEY", self.server.key());
        cube
    }

    /// Runs to completion without input.
    pub(crate) fn run(&self, words: &[&str]) -> Ran {
        Ran::of(
            words,
            self.cube(words).stdin(Stdio::null()).output().unwrap(),
        )
    }

    /// Runs to completion with this input.
    pub(crate) fn run_with(&self, words: &[&str], input: &[u8]) -> Ran {
        let mut child = self.spawn(words);
        let mut stdin = child.stdin.take().unwrap();
        let input = input.to_vec();
        let writer = std::thread::spawn(move || stdin.write_all(&input));
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap().unwrap();
        Ran::of(words, output)
    }

    pub(crate) fn spawn(&self, words: &[&str]) -> Child {
        piped(&mut self.cube(words))
    }

    /// A sandbox that lives for five minutes.
    pub(crate) fn sandbox(&self) -> String {
        self.run(&["sandbox", "create"]).line()
    }

    /// The ids of all sandboxes.
    pub(crate) fn ids(&self) -> Vec<String> {
        let listed = self.run(&["sandbox", "list", "-q"]).expect(0);
        listed.stdout.lines().map(str::to_owned).collect()
    }

    /// Waits until each template has its warm slot.
    pub(crate) fn has_warm_slot_soon(&self) {
        let endpoint = self.server.endpoint();
        let mut client = EnvdClient::over(endpoint.dial(PATIENCE).unwrap(), PATIENCE);
        client.set_route(&endpoint.authority(), &[("x-api-key", self.server.key())]);
        let templates = variable("CUBE_ARTIFACTS").unwrap().join("templates");
        let warm = format!("cube_pool_warm {}", templates.read_dir().unwrap().count());
        until("there are warm slots", || {
            let answer = client.request("GET", "/metrics", &[], b"").unwrap();
            let text = String::from_utf8(answer.body).unwrap();
            text.lines().any(|line| line == warm)
        });
        // The previous sandbox may still be ending.
        std::thread::sleep(Duration::from_millis(200));
    }

    /// Waits until there is no sandbox, because a killed one may still be ending.
    pub(crate) fn is_empty_soon(&self) {
        until("no sandbox is left", || self.ids().is_empty());
    }
}

/// `cube` with these arguments, without this host's variables.
pub(crate) fn bare(words: &[&str]) -> Command {
    cleared(env!("CARGO_BIN_EXE_cube"), words)
}

/// Starts a command with pipes.
pub(crate) fn piped(command: &mut Command) -> Child {
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command.stderr(Stdio::piped()).spawn().unwrap()
}

fn cleared(program: &str, words: &[&str]) -> Command {
    let mut cube = Command::new(program);
    cube.args(words);
    for variable in [
        "E2B_API_URL",
        "E2B_API_KEY",
        "E2B_SANDBOX_URL",
        "E2B_DOMAIN",
        "SSL_CERT_FILE",
    ] {
        cube.env_remove(variable);
    }
    cube
}

/// A completed run.
pub(crate) struct Ran {
    words: String,
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ran {
    pub(crate) fn of(words: &[&str], output: Output) -> Self {
        Self {
            words: words.join(" "),
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    #[track_caller]
    pub(crate) fn expect(self, code: i32) -> Self {
        let Self {
            words,
            stdout,
            stderr,
            ..
        } = &self;
        assert_eq!(self.code, code, "cube {words}\n{stdout}\n{stderr}");
        self
    }

    /// The only line of a command that succeeds.
    #[track_caller]
    pub(crate) fn line(self) -> String {
        let ran = self.expect(0);
        assert_eq!(ran.stdout.lines().count(), 1, "{}", ran.stdout);
        ran.stdout.trim().to_owned()
    }

    /// The items of a command with `--json` that succeeds.
    #[track_caller]
    pub(crate) fn items(self, kind: &str) -> Vec<Value> {
        let ran = self.expect(0);
        let answer: Value = serde_json::from_str(&ran.stdout).unwrap();
        assert_eq!(
            (answer["format"].as_u64(), &answer["kind"]),
            (Some(1), &kind.into())
        );
        answer["items"].as_array().unwrap().clone()
    }
}

/// A time of an item, in seconds since 1970.
pub(crate) fn seconds(at: &Value) -> i64 {
    let at = humantime::parse_rfc3339(at.as_str().unwrap()).unwrap();
    let since = at.duration_since(std::time::UNIX_EPOCH).unwrap();
    i64::try_from(since.as_secs()).unwrap()
}

pub(crate) fn signal(child: &Child, signal: Signal) {
    let pid = i32::try_from(child.id()).unwrap();
    kill(Pid::from_raw(pid), signal).unwrap();
}

/// Waits until a condition holds.
#[track_caller]
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "timed out: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
