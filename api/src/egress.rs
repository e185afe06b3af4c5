//! Outbound requests of sandboxes through `cube-egress`, the proxy that checks names and adds the headers of rules.
//!
//! ```text
//! Isolation::handed ─┐
//! Registry: rules ───┼─► session ◄── control socket ──► cube-egress (a process, its own user)
//! Secrets ───────────┘      │
//!                           └─► calls (memory, file) ─► alert
//! ```
//! One task starts the proxy, serves its requests, and restarts it if it exits. Without a proxy, nothing accepts
//! redirected flows: they wait and then fail. The values of secrets are sent to the proxy only in the response to its
//! request for the headers of one request.

mod alert;
mod authority;
mod calls;
mod process;
mod session;
pub mod socks;
mod sys;

use std::{
    collections::BTreeSet,
    fmt, io,
    net::{SocketAddr, TcpListener},
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use ::egress::control::{Ask, Authority, Call, Flow, LISTENER, RuleOutcome, Way};
use journal::EventLogError;
use model::SandboxId;
use netisolation::ForbiddenAddresses;
use tasks::boxed;
use tokio::{
    net::UnixStream,
    sync::mpsc,
    task::{AbortHandle, JoinSet},
    time::{Instant, MissedTickBehavior, interval, sleep, timeout},
};
use tracing::{error, info, warn};

pub use crate::webhook::Webhook;
pub(crate) use alert::Alerts;
pub use alert::{AlertAction, AlertSpec};
pub use authority::AuthorityError;
pub use calls::{CallCounts, CallFile, CallLog, time_of};

use crate::{events::Refusal, registry::Registry, secrets::Secrets};
use process::Processes;
use session::Answers;

/// Pauses before the proxy is restarted. Doubled each time, and reset after a proxy that ran for [`STABLE`].
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
const STABLE: Duration = Duration::from_secs(60);
/// Maximum number of cuts that wait for the proxy. If there are more, the proxy is restarted, which cuts all
/// connections.
const CUTS: usize = 4096;
/// How long a proxy whose control socket has closed may take to exit when nothing needs it any more.
const GRACE: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(10);
/// How often connections of sandboxes that were paused by their deadline are looked for.
const PAUSED: Duration = Duration::from_secs(5);
/// First user id of proxies. Outside the ids of VMs and of distributions. Each state directory uses one of [`USERS`].
const FIRST_USER: u32 = 0x7020_0000;
const USERS: u32 = 0x1000;

/// The operator's settings.
#[derive(Clone, Debug)]
pub struct EgressSpec {
    /// The program `cube-egress`.
    pub program: PathBuf,
    pub calls: CallFile,
    /// Maximum number of concurrent connections of all sandboxes. `None`: the program's default.
    pub connections: Option<u32>,
}

/// The proxy could not be prepared.
#[derive(Debug, thiserror::Error)]
pub enum EgressError {
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    #[error(transparent)]
    Calls(#[from] EventLogError),
    #[error("cannot start the threads of alerts")]
    Alerts(#[source] io::Error),
}

/// Interface to the network isolation: looks up an accepted connection by its peer address.
pub(crate) struct Handed {
    pub(crate) flow: Box<dyn Fn(SocketAddr) -> Option<Flow> + Send + Sync>,
    /// Whether the sandbox is being adopted, so that there is no flow yet.
    pub(crate) awaits_adoption: Box<dyn Fn(SocketAddr) -> bool + Send + Sync>,
    /// Addresses that no proxy of a sandbox may have.
    pub(crate) forbidden: ForbiddenAddresses,
}

/// The parts of the network isolation that a proxy process needs.
pub(crate) struct Seat {
    /// Creates its listening socket.
    pub(crate) listen: Box<dyn Fn() -> io::Result<TcpListener> + Send + Sync>,
    /// Limits the addresses to which the process with this id can connect.
    pub(crate) limit: Box<dyn Fn(u32) -> io::Result<()> + Send + Sync>,
}

/// The parts that are ready before the registry: the authority and the log.
pub(crate) struct Prepared {
    spec: EgressSpec,
    authority: Authority,
    calls: CallLog,
    user: u32,
}

/// A handle to the proxy's supervisor.
#[derive(Clone)]
pub struct Egress {
    cuts: mpsc::Sender<SandboxId>,
    /// Sandboxes that may have connections through the current proxy.
    served: Arc<Mutex<BTreeSet<SandboxId>>>,
    pub calls: CallLog,
    /// PEM of the certificate that sandboxes with rules must trust.
    pub ca_bundle: Arc<str>,
    starts: Arc<AtomicU64>,
    processes: Processes,
    supervisor: AbortHandle,
}

impl fmt::Debug for Egress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Egress")
    }
}

impl Prepared {
    /// Loads or creates the authority, and opens the call log.
    ///
    /// # Errors
    /// Returns [`EgressError`].
    pub(crate) fn new(
        spec: &EgressSpec,
        state: &Path,
        alerts: Option<Alerts>,
    ) -> Result<Self, EgressError> {
        let subscriber = Box::new(move |sandbox: &SandboxId, call: &Call| {
            if let (Some(alerts), Some(reason)) = (&alerts, &call.refused) {
                alerts.refused(Refusal {
                    sandbox: sandbox.clone(),
                    count: 1,
                    destination: call.remote.to_string(),
                    name: call.name.clone(),
                    reason: reason.clone(),
                });
            }
        });
        Ok(Self {
            authority: authority::load(state)?,
            calls: CallLog::open(state, spec.calls, subscriber)?,
            user: user_of(state),
            spec: spec.clone(),
        })
    }

    /// The certificate for sandboxes with rules.
    pub(crate) fn ca_bundle(&self) -> &str {
        &self.authority.certificate
    }

    /// Starts the proxy, and keeps one running until `tasks` is dropped. A proxy that loses its control socket exits by
    /// itself once its connections have ended.
    pub(crate) fn start(
        self,
        registry: Registry,
        secrets: Secrets,
        seat: Seat,
        handed: Handed,
        tasks: &mut JoinSet<()>,
    ) -> Egress {
        let (cuts, queue) = mpsc::channel(CUTS);
        let served = Arc::default();
        let (starts, processes) = (Arc::default(), Processes::default());
        let ca_bundle = self.ca_bundle().into();
        let answers = Arc::new(Desk {
            registry: registry.clone(),
            secrets,
            handed,
            calls: self.calls.clone(),
            served: Arc::clone(&served),
        });
        let supervisor = Supervisor {
            spec: self.spec,
            user: self.user,
            authority: self.authority,
            seat,
            starts: Arc::clone(&starts),
            processes: processes.clone(),
            served: Arc::clone(&served),
        };
        let egress = Egress {
            cuts,
            served,
            calls: self.calls,
            ca_bundle,
            starts,
            processes,
            supervisor: tasks.spawn(boxed(supervisor.run(answers, queue))),
        };
        tasks.spawn(boxed(egress.clone().cut_paused(registry)));
        egress
    }
}

impl Egress {
    /// Closes the connections of a sandbox that has ended, is paused, or has a new policy.
    pub fn cut(&self, sandbox: &SandboxId) {
        let was_served = self.served().remove(sandbox);
        // The queue fills up only if the proxy does not read. The session then kills the proxy.
        if was_served && self.cuts.try_send(sandbox.clone()).is_err() {
            warn!(%sandbox, "cannot end the connections of a sandbox now: the proxy does not respond");
        }
    }

    /// Ends the proxy and its connections when the server exits. Not called in a handover: the proxy then accepts
    /// nothing more and exits once its connections have ended.
    pub(crate) async fn stop(&self) {
        self.supervisor.abort();
        let ended = async {
            while !self.processes.is_empty() {
                sleep(POLL).await;
            }
        };
        if timeout(GRACE, ended).await.is_err() {
            self.processes.kill_all();
        }
    }

    /// Number of proxy starts.
    #[must_use]
    pub fn starts(&self) -> u64 {
        self.starts.load(Ordering::Relaxed)
    }

    /// Closes connections of paused sandboxes. Needed because the pool pauses sandboxes at their deadline on its own.
    async fn cut_paused(self, registry: Registry) {
        let mut ticks = interval(PAUSED);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let served: Vec<_> = self.served().iter().cloned().collect();
            for sandbox in served {
                let running = registry.get(&sandbox).await;
                if !running.is_ok_and(|view| view.sandbox.state == pool::SandboxState::Running) {
                    self.cut(&sandbox);
                }
            }
        }
    }

    /// A panic while the lock is held cannot leave the set half changed.
    fn served(&self) -> std::sync::MutexGuard<'_, BTreeSet<SandboxId>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn user_of(state: &Path) -> u32 {
    use std::os::unix::ffi::OsStrExt;

    use sha2::{Digest, Sha256};
    let path = state.canonicalize().unwrap_or_else(|_| state.to_owned());
    let sum = Sha256::digest(path.as_os_str().as_bytes());
    FIRST_USER + u32::from_le_bytes([sum[0], sum[1], sum[2], sum[3]]) % USERS
}

/// Serves the proxy's requests from the current registry and secrets.
struct Desk {
    registry: Registry,
    secrets: Secrets,
    handed: Handed,
    calls: CallLog,
    served: Arc<Mutex<BTreeSet<SandboxId>>>,
}

impl Answers for Desk {
    fn flow(&self, peer: SocketAddr) -> Option<Flow> {
        // Added first, so that a cut after this response finds the sandbox.
        let mut served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
        let flow = (self.handed.flow)(peer)?;
        served.insert(flow.sandbox.parse().ok()?);
        Some(flow)
    }

    fn sandbox(&self, peer: SocketAddr) -> Option<SandboxId> {
        (self.handed.flow)(peer)?.sandbox.parse().ok()
    }

    fn awaits_adoption(&self, peer: SocketAddr) -> bool {
        (self.handed.awaits_adoption)(peer)
    }

    async fn rule(&self, sandbox: SandboxId, host: String, ask: Ask) -> RuleOutcome {
        let failed = |rule: &str, reason: &str| RuleOutcome::Failed {
            rule: rule.to_owned(),
            reason: reason.to_owned(),
        };
        let rules = match self.registry.rules(&sandbox).await {
            Ok(rules) => rules,
            // A sandbox that has ended has no flow either. If its rules cannot be read, its requests must not be sent
            // without them.
            Err(why) => return failed("", &model::chain(&why)),
        };
        let rules = match &*rules {
            Ok(rules) => rules,
            Err(why) => return failed("", &why.to_string()),
        };
        let Some(rule) = rules.find(&host) else {
            return RuleOutcome::None;
        };
        rule.answer(ask, |name| {
            self.secrets
                .value(name, &host)
                .map_err(|why| why.to_string())
        })
    }

    async fn way(&self, sandbox: SandboxId) -> Way {
        let view = match self.registry.get(&sandbox).await {
            Ok(view) => view,
            Err(why) => {
                return Way::Failed {
                    reason: model::chain(&why),
                };
            }
        };
        let network = view.note.network.as_ref();
        let option = network.and_then(|network| network.egress_proxy.as_ref());
        socks::way(option, &self.secrets, &self.handed.forbidden).await
    }

    fn call(&self, sandbox: SandboxId, call: Call) {
        self.calls.record(sandbox, call);
    }

    fn lost(&self, calls: u64) {
        self.calls.log.count_lost(calls);
    }
}

/// Starts and restarts proxies.
struct Supervisor {
    spec: EgressSpec,
    user: u32,
    authority: Authority,
    seat: Seat,
    starts: Arc<AtomicU64>,
    processes: Processes,
    served: Arc<Mutex<BTreeSet<SandboxId>>>,
}

impl Supervisor {
    async fn run<A: Answers>(self, answers: Arc<A>, mut cuts: mpsc::Receiver<SandboxId>) {
        let mut pause = FIRST_PAUSE;
        loop {
            let began = Instant::now();
            // A new proxy has no connections.
            while cuts.try_recv().is_ok() {}
            if let Err(why) = self.once(&answers, &mut cuts).await {
                error!(program = %self.spec.program.display(), why = %why, "cannot start the egress proxy");
            }
            self.served
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clear();
            pause = if began.elapsed() >= STABLE {
                FIRST_PAUSE
            } else {
                pause
            };
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Starts a proxy and serves it until it exits or breaks the protocol. It is then killed.
    async fn once<A: Answers>(
        &self,
        answers: &Arc<A>,
        cuts: &mut mpsc::Receiver<SandboxId>,
    ) -> io::Result<()> {
        let listener = (self.seat.listen)()?;
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        let mut command = Command::new(&self.spec.program);
        command
            .env_clear()
            .stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs)))
            .stdout(Stdio::null());
        for name in [
            "SSL_CERT_FILE",
            "SSL_CERT_DIR",
            "CUBE_LOG",
            "RUST_BACKTRACE",
        ] {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        if nix::unistd::geteuid().is_root() {
            let user = self.user.to_string();
            command.args(["--user", &user, "--group", &user]);
        }
        if let Some(connections) = self.spec.connections {
            command.args(["--connections", &connections.to_string()]);
        }
        let child = sys::spawn_with(command, listener.as_fd(), LISTENER)?;
        drop(listener);
        let (pid, mut status) = self.processes.watch(child)?;
        // Before the start message: until then, the process makes no socket and has no secret.
        if let Err(why) = (self.seat.limit)(pid.cast_unsigned()) {
            self.processes.kill(pid);
            return Err(why);
        }
        self.starts.fetch_add(1, Ordering::Relaxed);
        info!(pid, "egress proxy started");
        ours.set_nonblocking(true)?;
        let control = UnixStream::from_std(ours)?;
        let why = session::run(control, &self.authority, Arc::clone(answers), cuts).await;
        // A proxy that has closed its socket is exiting, but may be slow.
        if !matches!(why, session::SessionError::Closed)
            || timeout(GRACE, &mut status).await.is_err()
        {
            self.processes.kill(pid);
        }
        let ended = match status.try_recv() {
            Ok(status) => status,
            Err(_) => Err(io::Error::other("killed")),
        };
        let status = ended.map_or_else(|why| why.to_string(), |status| status.to_string());
        warn!(pid, why = %model::chain(&why), %status, "the egress proxy exited: restarting it");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{session::tests::Fake, *};

    /// A supervisor of a program that writes the first line of its standard input to `said` if a file has its id.
    fn supervisor(dir: &Path, limit: fn(&Path) -> io::Result<()>) -> Supervisor {
        let (at, program) = (dir.display(), dir.join("proxy"));
        let script =
            format!("#!/bin/sh\nread -r line && test -e {at}/$$ && echo \"$line\" > {at}/said");
        // By another process: a program that this one has open for writing in any thread could not be started.
        let write = r#"printf '%s' "$0" > "$1" && chmod 755 "$1""#;
        let mut shell = Command::new("sh");
        let written = shell.args(["-c", write, &script]).arg(&program).status();
        assert!(written.unwrap().success());
        let dir = dir.to_owned();
        Supervisor {
            spec: EgressSpec {
                program,
                calls: CallFile::Off,
                connections: None,
            },
            user: FIRST_USER,
            authority: Authority {
                certificate: String::new(),
                key: String::new(),
            },
            seat: Seat {
                listen: Box::new(|| TcpListener::bind("127.0.0.1:0")),
                limit: Box::new(move |pid| limit(&dir.join(pid.to_string()))),
            },
            starts: Arc::default(),
            processes: Processes::default(),
            served: Arc::default(),
        }
    }

    #[tokio::test]
    async fn a_proxy_is_limited_before_it_gets_the_start_message() {
        let dir = tempfile::tempdir().unwrap();
        let (_cuts, mut queue) = mpsc::channel(1);
        let answers = Arc::new(Fake::default());
        let limited = supervisor(dir.path(), |file| fs::write(file, ""));
        limited.once(&answers, &mut queue).await.unwrap();
        let said = fs::read_to_string(dir.path().join("said")).unwrap();
        assert!(said.contains(r#""start""#), "{said}");

        fs::remove_file(dir.path().join("said")).unwrap();
        let unlimited = supervisor(dir.path(), |file| {
            fs::write(file, "")?;
            Err(io::Error::other("no such cgroup"))
        });
        unlimited.once(&answers, &mut queue).await.unwrap_err();
        while !unlimited.processes.is_empty() {
            sleep(POLL).await;
        }
        assert!(!dir.path().join("said").exists());
        assert_eq!(unlimited.starts.load(Ordering::Relaxed), 0);
    }
}
