//! A `cube-api` of a run's own: started on a free port of the loopback interface with a fresh state
//! directory, and ended with its sandboxes when the run is over.
//!
//! The harness asks it what any customer could ask. What it knows besides is where the server keeps the
//! directories of its sandboxes: a VMM is found there by its standard error, for the ledger and the sweep.

use std::{
    fs::{self, File},
    io,
    net::TcpListener,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use api_types::envd::EnvdClient;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    endpoint::{Endpoint, Wire},
    leftovers,
};

/// Name of the server's log in its directory.
const LOG: &str = "cube-api.log";
/// Name of its state directory.
const STATE: &str = "state";
/// Name of the directory of its certificates.
const CERTIFICATES: &str = "tls";
/// Loading a template and answering takes a second or two.
const PATIENCE: Duration = Duration::from_secs(60);
/// Ending it ends its sandboxes as well.
const END_PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks at something that is awaited.
const LOOK: Duration = Duration::from_millis(10);
/// Taken by a server that asks for none.
const ANY_KEY: &str = "e2b_0000000000000000000000000000000000000000";
/// More sandboxes than any scenario starts, and no more than have a network of their own at a time.
const MAX_SANDBOXES: &str = "3000";
/// Requests a second; a run is one customer that asks as fast as it can.
const RATE: &str = "1000000";

/// Whether the server asks for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Door {
    /// It does not; whoever reaches the loopback interface may ask.
    Open,
    /// It does, for one that is made for it.
    Locked,
}

/// What a server is started with.
#[derive(Clone, Debug)]
pub struct ServerSpec {
    /// `cube-api`.
    pub program: PathBuf,
    /// `cube-vmm`.
    pub vmm: PathBuf,
    /// Directory of installed templates.
    pub templates: PathBuf,
    /// Sandboxes of each template that it keeps ready.
    pub warm: u32,
    /// Domain of the sandboxes' host names.
    pub domain: Option<String>,
    /// See [`Door`].
    pub door: Door,
    /// Whether it speaks HTTPS, with a certificate from an authority that is made for it.
    pub tls: Tls,
    /// Further options of `cube-api serve`.
    pub options: Vec<String>,
}

/// What the server speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tls {
    /// Plain HTTP.
    Off,
    /// HTTPS for localhost, the loopback addresses and the domain.
    PrivateAuthority,
}

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// A file, a port or the process.
    #[error("cannot start {program}")]
    Start {
        /// `cube-api`.
        program: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// It ended, or nothing answers.
    #[error("{program} {what}; the end of its log {log}: {end}")]
    NotReady {
        /// `cube-api`.
        program: PathBuf,
        /// What became of it.
        what: String,
        /// Its log.
        log: PathBuf,
        /// The log's last lines in one.
        end: String,
    },
}

/// A running server. Dropping it ends it and every VM that it has started.
#[derive(Debug)]
pub struct LocalServer {
    child: Child,
    endpoint: Endpoint,
    port: u16,
    key: String,
    dir: PathBuf,
    spec: ServerSpec,
}

impl LocalServer {
    /// Starts one whose files are below `dir`, and waits until it answers.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn start(dir: &Path, spec: ServerSpec) -> Result<Self, ServerError> {
        let failed = |source| ServerError::Start {
            program: spec.program.clone(),
            source,
        };
        let key = match spec.door {
            Door::Open => ANY_KEY.to_owned(),
            Door::Locked => new_key(dir, &spec).map_err(failed)?,
        };
        let port = free_port().map_err(failed)?;
        let (child, endpoint) = spawn(dir, &spec, port).map_err(failed)?;
        let mut server = Self {
            child,
            endpoint,
            port,
            key,
            dir: dir.to_owned(),
            spec,
        };
        server.await_answer()?;
        Ok(server)
    }

    /// Where it answers.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// What it takes as `X-API-KEY`.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Certificate of the authority that clients have to trust; absent without TLS.
    #[must_use]
    pub fn authority(&self) -> PathBuf {
        self.dir.join(CERTIFICATES).join("ca.crt")
    }

    /// Directories of its sandboxes, by id.
    #[must_use]
    pub fn sandboxes(&self) -> PathBuf {
        self.dir.join(STATE).join("sandboxes")
    }

    /// The file that was started.
    #[must_use]
    pub fn program(&self) -> &Path {
        &self.spec.program
    }

    /// SIGKILL; its VMs live on.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn kill(&mut self) -> io::Result<()> {
        self.child.kill()?;
        self.child.wait().map(|_| ())
    }

    /// Starts a successor of one that is dead, at the same address and on the same state.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn restart(&mut self) -> Result<(), ServerError> {
        let (child, _) =
            spawn(&self.dir, &self.spec, self.port).map_err(|source| ServerError::Start {
                program: self.spec.program.clone(),
                source,
            })?;
        self.child = child;
        self.await_answer()
    }

    /// Memory that it occupies, in KiB; `None` if it cannot be read.
    #[must_use]
    pub fn resident_kib(&self) -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).ok()?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))?;
        line.trim().strip_suffix("kB")?.trim().parse().ok()
    }

    fn await_answer(&mut self) -> Result<(), ServerError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if answers(&self.endpoint) {
                return Ok(());
            }
            match self.child.try_wait() {
                Ok(Some(status)) => return Err(self.not_ready(format!("ended with {status}"))),
                Ok(None) if Instant::now() < deadline => std::thread::sleep(LOOK),
                Ok(None) => return Err(self.not_ready(format!("did not answer in {PATIENCE:?}"))),
                Err(error) => return Err(self.not_ready(error.to_string())),
            }
        }
    }

    fn not_ready(&self, what: String) -> ServerError {
        let log = self.dir.join(LOG);
        let text = fs::read_to_string(&log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        ServerError::NotReady {
            program: self.spec.program.clone(),
            what,
            end: lines[lines.len().saturating_sub(5)..].join(" | "),
            log,
        }
    }

    fn end(&mut self) -> io::Result<()> {
        let pid = i32::try_from(self.child.id()).map_err(io::Error::other)?;
        if self.child.try_wait()?.is_none() {
            kill(Pid::from_raw(pid), Signal::SIGTERM)?;
        }
        let deadline = Instant::now() + END_PATIENCE;
        while self.child.try_wait()?.is_none() {
            if Instant::now() > deadline {
                self.child.kill()?;
                self.child.wait()?;
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }
}

impl Drop for LocalServer {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("cube-bench: cube-api {} is left: {error}", self.child.id());
        }
        // VMs outlive a server that was killed.
        for pid in leftovers::processes_of(&self.dir.join(STATE)) {
            if let Err(error) = leftovers::kill_and_wait(pid) {
                eprintln!("cube-bench: VMM {pid} is left: {error}");
            }
        }
    }
}

fn spawn(dir: &Path, spec: &ServerSpec, port: u16) -> io::Result<(Child, Endpoint)> {
    // A successor goes on where its predecessor stopped.
    let log = File::options()
        .create(true)
        .append(true)
        .custom_flags(nix::libc::O_NOFOLLOW)
        .open(dir.join(LOG))?;
    let address = format!("127.0.0.1:{port}");
    let certificates = dir.join(CERTIFICATES);
    let (scheme, tls) = match spec.tls {
        Tls::Off => ("http", Vec::new()),
        Tls::PrivateAuthority => {
            make_certificates(&certificates, spec)?;
            let [certificate, key] = ["server.crt", "server.key"].map(|f| certificates.join(f));
            let options = [
                Path::new("--tls-cert"),
                &certificate,
                Path::new("--tls-key"),
                &key,
            ];
            ("https", options.map(Path::to_owned).to_vec())
        }
    };
    let child = Command::new(&spec.program)
        .args(["serve", "--on-exit", "kill"])
        .args(["--max-sandboxes", MAX_SANDBOXES, "--rate", RATE])
        .args(["--listen", &address])
        .arg("--state")
        .arg(dir.join(STATE))
        .arg("--templates")
        .arg(&spec.templates)
        .arg("--vmm")
        .arg(&spec.vmm)
        .args(["--warm", &format!("{0}:{0}", spec.warm)])
        .args(match spec.door {
            Door::Open => &["--insecure-loopback"][..],
            Door::Locked => &[],
        })
        .args(spec.domain.iter().flat_map(|domain| ["--domain", domain]))
        .args(tls)
        .args(&spec.options)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()?;
    let endpoint = Endpoint::parse(&format!("{scheme}://{address}")).map_err(io::Error::other)?;
    Ok((child, endpoint))
}

/// Makes the one key of a server that is not started yet.
fn new_key(dir: &Path, spec: &ServerSpec) -> io::Result<String> {
    let mut make = Command::new(&spec.program);
    make.args(["key", "new", "cube-bench", "--state"])
        .arg(dir.join(STATE));
    said(&mut make)
}

fn make_certificates(dir: &Path, spec: &ServerSpec) -> io::Result<()> {
    let mut make = Command::new(&spec.program);
    make.args(["ca", "init"]).arg(dir);
    make.args(["--domain", spec.domain.as_deref().unwrap_or("localhost")]);
    said(&mut make).map(|_| ())
}

/// What a command prints, if it succeeds.
fn said(command: &mut Command) -> io::Result<String> {
    let done = command.stdin(Stdio::null()).output()?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if done.status.success() {
        Ok(text(&done.stdout))
    } else {
        Err(io::Error::other(text(&done.stderr)))
    }
}

/// A port that was free a moment ago.
fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

fn answers(endpoint: &Endpoint) -> bool {
    let wire = match endpoint.dial(Duration::from_secs(1)) {
        Err(_) => return false,
        // Its authority is none that this process trusts; that it accepts connections has to do.
        Ok(Wire::Tls(_)) => return true,
        Ok(wire) => wire,
    };
    let mut client = EnvdClient::over(wire, Duration::from_secs(5));
    client.set_route(&endpoint.authority(), &[]);
    let answer = client.request("GET", "/health", &[], b"");
    answer.is_ok_and(|answer| answer.status < 300)
}
