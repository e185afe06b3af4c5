//! Starts a `cube-api` with its own state directory, on a free port of the loopback interface or in another network
//! namespace, and ends it with all its sandboxes.
//!
//! Clients use only the public API, with one exception: they find the VMM of a sandbox by its standard error, which is
//! a file in the sandbox's directory below the server's state directory.

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use envd::EnvdClient;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    endpoint::{Endpoint, Wire},
    leftovers,
    world::Namespace,
};

/// File name of the server's log.
const LOG: &str = "cube-api.log";
pub(crate) const STATE: &str = "state";
const CERTIFICATES: &str = "tls";
/// Timeout of the start, which usually takes a second or two.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout of the shutdown, during which the server ends its sandboxes. After this time, the server is killed.
const END_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval between two polls while waiting for the server.
const POLL: Duration = Duration::from_millis(10);
/// Key for a server that accepts any key.
const ANY_KEY: &str = "e2b_0000000000000000000000000000000000000000";
/// Value of `--max-sandboxes`: at most the number of sandboxes that can have a network at the same time.
const MAX_SANDBOXES: &str = "3000";
/// Limit on requests per second, too high for a run to reach.
const RATE: &str = "1000000";

/// Whether the server requires a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Door {
    /// No key is required: any process that can reach the loopback interface can use the server.
    Open,
    /// A key is required. It is created for this server.
    Locked,
    /// A key is required, and already exists.
    Key(String),
}

/// Where a server listens.
#[derive(Clone, Debug)]
pub enum Site {
    /// On a free port of the loopback interface.
    Loopback,
    /// At this address, in another network namespace.
    Within(Arc<Namespace>, SocketAddr),
}

/// Options of a server.
#[derive(Clone, Debug)]
pub struct ServerSpec {
    /// Path of `cube-api`.
    pub program: PathBuf,
    /// Path of `cube-vmm`.
    pub vmm: PathBuf,
    /// Directory of installed templates.
    pub templates: PathBuf,
    /// Number of sandboxes that the server keeps ready for each template.
    pub warm: u32,
    /// Domain of the sandboxes' host names; `None` uses the default of the server.
    pub domain: Option<String>,
    pub door: Door,
    pub tls: Tls,
    pub site: Site,
    /// Additional options of `cube-api serve`.
    pub options: Vec<String>,
    /// Additional variables of its environment.
    pub environment: Vec<(String, OsString)>,
}

/// Protocol of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tls {
    /// Plain HTTP.
    Off,
    /// HTTPS with a certificate for localhost, the loopback addresses and the domain, signed by a new private
    /// certificate authority.
    PrivateAuthority,
}

/// A server did not start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// A file, a key, a certificate, a port or the process could not be created.
    #[error("cannot start {program}")]
    Start {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The server exited, or did not respond in time.
    #[error("{program} {what}; last lines of its log {log}: {end}")]
    NotReady {
        program: PathBuf,
        /// How the server failed.
        what: String,
        log: PathBuf,
        /// Last lines of the log, joined.
        end: String,
    },
}

/// A running server. Dropping it ends the server and every VM that it started.
#[derive(Debug)]
pub struct LocalServer {
    child: Child,
    endpoint: Endpoint,
    address: SocketAddr,
    key: String,
    dir: PathBuf,
    spec: ServerSpec,
}

impl LocalServer {
    /// Starts a server whose files are below `dir`, and waits until it responds.
    ///
    /// # Errors
    /// Returns [`ServerError::Start`] if it cannot be started, and [`ServerError::NotReady`] if it exits
    /// or does not respond.
    pub fn start(dir: &Path, spec: ServerSpec) -> Result<Self, ServerError> {
        let failed = |source| ServerError::Start {
            program: spec.program.clone(),
            source,
        };
        let key = match &spec.door {
            Door::Open => ANY_KEY.to_owned(),
            Door::Locked => new_key(&spec.program, &dir.join(STATE), &[]).map_err(failed)?,
            Door::Key(key) => key.clone(),
        };
        let address = match spec.site {
            Site::Loopback => (Ipv4Addr::LOCALHOST, free_port().map_err(failed)?).into(),
            Site::Within(_, address) => address,
        };
        let (child, endpoint) = spawn(dir, &spec, address).map_err(failed)?;
        let mut server = Self {
            child,
            endpoint,
            address,
            key,
            dir: dir.to_owned(),
            spec,
        };
        server.await_answer()?;
        Ok(server)
    }

    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Path of the certificate of the private authority, which clients must trust. Without TLS, there is no such file.
    #[must_use]
    pub fn authority(&self) -> PathBuf {
        self.dir.join(CERTIFICATES).join("ca.crt")
    }

    /// Directory that contains a directory for each sandbox, named by its id.
    #[must_use]
    pub fn sandboxes(&self) -> PathBuf {
        self.dir.join(STATE).join("sandboxes")
    }

    /// Path of the program.
    #[must_use]
    pub fn program(&self) -> &Path {
        &self.spec.program
    }

    /// Path of the server's log.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.dir.join(LOG)
    }

    /// State directory of the server.
    #[must_use]
    pub fn state(&self) -> PathBuf {
        self.dir.join(STATE)
    }

    /// Id of the latest process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The processes of the server. After reloads, these include old ones that are only finishing their
    /// connections.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        leftovers::processes_of(&self.log())
    }

    /// Kills all processes of the server with SIGKILL. Its VMs continue to run.
    ///
    /// # Errors
    /// Returns an error if a process cannot be killed or waited for.
    pub fn kill(&mut self) -> io::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        let successors = self.processes();
        successors
            .into_iter()
            .try_for_each(leftovers::kill_and_wait)
    }

    /// Restarts a killed server at the same address and with the same state.
    ///
    /// # Errors
    /// Returns the errors of [`LocalServer::start`].
    pub fn restart(&mut self) -> Result<(), ServerError> {
        self.begin()?;
        self.await_answer()
    }

    /// Like [`LocalServer::restart`], but does not wait until the server responds.
    ///
    /// # Errors
    /// Returns [`ServerError::Start`] if the process cannot be started.
    pub fn begin(&mut self) -> Result<(), ServerError> {
        let (child, _) =
            spawn(&self.dir, &self.spec, self.address).map_err(|source| ServerError::Start {
                program: self.spec.program.clone(),
                source,
            })?;
        self.child = child;
        Ok(())
    }

    /// Exit status and last lines of the log, if the latest process has ended.
    #[must_use]
    pub fn exited(&mut self) -> Option<ServerError> {
        match self.child.try_wait() {
            Ok(None) => None,
            Ok(Some(status)) => Some(self.not_ready(format!("exited with {status}"))),
            Err(error) => Some(self.not_ready(error.to_string())),
        }
    }

    /// Error for a server that did not respond, with the last lines of its log.
    #[must_use]
    pub fn silent(&self) -> ServerError {
        self.not_ready(format!("did not answer within {START_TIMEOUT:?}"))
    }

    /// Resident memory of the server, in KiB. `None` if it cannot be read.
    #[must_use]
    pub fn resident_kib(&self) -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).ok()?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))?;
        line.trim().strip_suffix("kB")?.trim().parse().ok()
    }

    fn await_answer(&mut self) -> Result<(), ServerError> {
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            if answers(&self.endpoint) {
                return Ok(());
            }
            if let Some(error) = self.exited() {
                return Err(error);
            }
            if Instant::now() > deadline {
                return Err(self.silent());
            }
            std::thread::sleep(POLL);
        }
    }

    fn not_ready(&self, what: String) -> ServerError {
        let log = self.log();
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
        for pid in self.processes() {
            let pid = i32::try_from(pid).map_err(io::Error::other)?;
            // The process may have exited already.
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
        let deadline = Instant::now() + END_TIMEOUT;
        while self.child.try_wait()?.is_none() || !self.processes().is_empty() {
            if Instant::now() > deadline {
                self.kill()?;
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }
}

impl Drop for LocalServer {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!(
                "cube-bench: cannot end cube-api (process {}): {error}",
                self.child.id()
            );
        }
        // The VMs of a killed server are still running.
        for pid in leftovers::processes_of(&self.dir.join(STATE)) {
            if let Err(error) = leftovers::kill_and_wait(pid) {
                eprintln!("cube-bench: cannot end the VMM with process id {pid}: {error}");
            }
        }
    }
}

fn spawn(dir: &Path, spec: &ServerSpec, address: SocketAddr) -> io::Result<(Child, Endpoint)> {
    // A restarted server appends to the same log.
    let log = File::options()
        .create(true)
        .append(true)
        .custom_flags(nix::libc::O_NOFOLLOW)
        .open(dir.join(LOG))?;
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
    let mut serve = Command::new(&spec.program);
    serve
        // The configuration of an installed server does not apply. The options are those that earlier builds have too.
        .args(["serve", "--config", "/dev/null", "--on-exit", "kill"])
        .args(["--max-sandboxes", MAX_SANDBOXES, "--rate", RATE])
        .args(["--listen", &address.to_string()])
        .arg("--state")
        .arg(dir.join(STATE))
        .arg("--templates")
        .arg(&spec.templates)
        .arg("--vmm")
        .arg(&spec.vmm)
        .args(["--warm", &format!("{0}:{0}", spec.warm)])
        .args(match spec.door {
            Door::Open => &["--insecure-loopback"][..],
            Door::Locked | Door::Key(_) => &[],
        })
        .args(spec.domain.iter().flat_map(|domain| ["--domain", domain]))
        .args(tls)
        .args(&spec.options)
        .envs(spec.environment.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    let child = match &spec.site {
        Site::Loopback => serve.spawn()?,
        Site::Within(namespace, _) => namespace.within(|| serve.spawn())?,
    };
    let endpoint = Endpoint::parse(&format!("{scheme}://{address}")).map_err(io::Error::other)?;
    Ok((child, endpoint))
}

/// Creates a key in the state directory of a server that has not been started yet, and returns it. Without `scopes`, it
/// has the usual ones.
pub(crate) fn new_key(program: &Path, state: &Path, scopes: &[&str]) -> io::Result<String> {
    let mut make = Command::new(program);
    make.args(["key", "new", "cube-bench", "--state"])
        .arg(state)
        .args(scopes.iter().flat_map(|scope| ["--scope", scope]));
    output_of(&mut make)
}

fn make_certificates(dir: &Path, spec: &ServerSpec) -> io::Result<()> {
    let mut make = Command::new(&spec.program);
    make.args(["ca", "init"]).arg(dir);
    make.args(["--domain", spec.domain.as_deref().unwrap_or("localhost")]);
    output_of(&mut make).map(|_| ())
}

/// Runs a command that must succeed, and returns its standard output without surrounding whitespace.
pub(crate) fn output_of(command: &mut Command) -> io::Result<String> {
    let done = command.stdin(Stdio::null()).output()?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if done.status.success() {
        Ok(text(&done.stdout))
    } else {
        Err(io::Error::other(text(&done.stderr)))
    }
}

/// A port that is currently free. Another process can take it before the server does.
///
/// The port is outside the range that the kernel assigns to clients. If a client connects to a port in that range
/// while the server is down, the kernel may assign it this very port. The client is then connected to itself, and
/// the server cannot be restarted ("Address already in use").
///
/// # Errors
/// Returns an error if the kernel's port range cannot be read, or if no port is free.
pub fn free_port() -> io::Result<u16> {
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")?;
    let first = range
        .split_whitespace()
        .next()
        .and_then(|low| low.parse().ok());
    let mut below = 10_000..first.unwrap_or(32_768_u16);
    // Processes start their search at different ports, so that they rarely pick the same one.
    let skipped = usize::try_from(std::process::id()).unwrap_or(0) % below.len().max(1);
    let mut ports = below.clone().skip(skipped).chain(&mut below);
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    ports.find(is_free).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::AddrInUse,
            "no port below those of clients is free",
        )
    })
}

fn answers(endpoint: &Endpoint) -> bool {
    let wire = match endpoint.dial(Duration::from_secs(1)) {
        Err(_) => return false,
        // This process does not trust the private authority, so it sends no request: an accepted TCP connection is
        // sufficient.
        Ok(Wire::Tls(_)) => return true,
        Ok(wire) => wire,
    };
    let mut client = EnvdClient::over(wire, Duration::from_secs(5));
    client.set_route(&endpoint.authority(), &[]);
    let answer = client.request("GET", "/health", &[], b"");
    answer.is_ok_and(|answer| answer.status < 300)
}
