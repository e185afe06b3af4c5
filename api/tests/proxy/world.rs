//! A server with sandboxes that are not VMs.

use std::collections::HashMap;
use std::fs;
use std::future::Future;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use api::auth::Authenticator;
use api::listen::{Backend, Dispatch, Limits, Server, bind};
use api::proxy::{Hosts, Proxy, Routes};
use api::registry::{Route, RouteError};
use axum::Router;
use axum::body::{Body, Bytes};
use envd::{EnvdClient, InitRequest};
use http_body_util::{BodyExt, Full};
use model::SandboxId;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, copy_bidirectional};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Timeout of every wait for something that should happen at once.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Waits for `waiting`; panics after [`PATIENCE`].
pub(crate) async fn soon<T>(what: &str, waiting: impl Future<Output = T>) -> T {
    let done = tokio::time::timeout(PATIENCE, waiting).await;
    done.unwrap_or_else(|_| panic!("{what} did not happen"))
}

/// Waits until `holds` returns `true`; panics after [`PATIENCE`].
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// A table of routes that replaces the registry.
#[derive(Clone, Default)]
pub(crate) struct Table {
    routes: Arc<Mutex<HashMap<SandboxId, Result<Route, RouteError>>>>,
    asked: Arc<AtomicUsize>,
    pub(crate) reached: Arc<Mutex<Vec<SandboxId>>>,
    on_next_route: Arc<Mutex<Option<Action>>>,
}

type Action = Box<dyn FnOnce() + Send>;

impl Table {
    pub(crate) fn set(&self, route: Route) {
        let id = route.id.clone();
        self.routes.lock().unwrap().insert(id, Ok(route));
    }

    pub(crate) fn set_error(&self, id: &SandboxId, error: RouteError) {
        self.routes.lock().unwrap().insert(id.clone(), Err(error));
    }

    pub(crate) fn remove(&self, id: &SandboxId) {
        self.routes.lock().unwrap().remove(id);
    }

    /// Runs `action` when a route is next requested.
    pub(crate) fn on_next_route(&self, action: impl FnOnce() + Send + 'static) {
        *self.on_next_route.lock().unwrap() = Some(Box::new(action));
    }

    /// How often a route was requested.
    pub(crate) fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

impl Routes for Table {
    async fn route(&self, id: &SandboxId) -> Result<Route, RouteError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        if let Some(action) = self.on_next_route.lock().unwrap().take() {
            action();
        }
        let known = self.routes.lock().unwrap().get(id).cloned();
        known.unwrap_or(Err(RouteError::NotFound))
    }

    fn reached(&self, route: &Route) {
        let mut reached = self.reached.lock().unwrap();
        reached.push(route.id.clone());
    }

    async fn has(&self, id: &SandboxId) -> bool {
        self.routes.lock().unwrap().contains_key(id)
    }

    async fn find_by_signature(&self, query: &str, operation: &'static str) -> Option<SandboxId> {
        let signed = format!("signature=v1_{operation}");
        let routes = self.routes.lock().unwrap();
        let is_signed = query.split('&').any(|pair| pair == signed);
        is_signed.then(|| routes.keys().next().cloned()).flatten()
    }
}

/// An agent process, which is killed when dropped.
pub(crate) struct Agent {
    child: Child,
    pub(crate) socket: PathBuf,
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// The path of the agent's program, which is built on first use.
fn agent_program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let built = Command::new(cargo)
            .args([
                "build",
                "--quiet",
                "--package",
                "agent",
                "--bin",
                "guest-agent",
            ])
            .args(["--message-format", "json"])
            .args((!cfg!(debug_assertions)).then_some("--release"))
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .unwrap();
        assert!(built.status.success(), "cannot build the agent");
        let text = String::from_utf8(built.stdout).unwrap();
        let program = text.lines().find_map(|line| {
            let message: serde_json::Value = serde_json::from_str(line).unwrap();
            message["executable"].as_str().map(PathBuf::from)
        });
        program.unwrap()
    })
}

impl Agent {
    pub(crate) fn start(dir: &Path) -> Self {
        let socket = dir.join("agent.sock");
        fs::remove_file(&socket).ok();
        let child = Command::new(agent_program())
            .arg("--listen")
            .arg(format!("unix:{}", socket.display()))
            .spawn()
            .unwrap();
        let agent = Self { child, socket };
        let deadline = Instant::now() + PATIENCE;
        let mut client = loop {
            match EnvdClient::connect_unix(&agent.socket, PATIENCE) {
                Ok(client) => break client,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let settings = InitRequest {
            default_workdir: Some("/".into()),
            default_user: Some("root".into()),
            ..InitRequest::default()
        };
        client.init(&settings).unwrap();
        agent
    }
}

/// Implements the protocol of the vsock device, for a guest whose ports are unix sockets or closures.
pub(crate) struct Vsock {
    pub(crate) path: PathBuf,
    task: JoinHandle<()>,
}

impl Drop for Vsock {
    fn drop(&mut self) {
        self.task.abort();
        fs::remove_file(&self.path).ok();
    }
}

impl Vsock {
    /// Connects ports to the agent.
    pub(crate) fn to_agent(path: PathBuf, agent: PathBuf) -> Self {
        Self::new(path, move |mut client| {
            let agent = agent.clone();
            async move {
                // If the agent refuses the connection, the client sees the end of the stream.
                let Ok(mut agent) = UnixStream::connect(agent).await else {
                    return;
                };
                client.write_all(b"OK 1073741824\n").await.ok();
                copy_bidirectional(&mut client, &mut agent).await.ok();
            }
        })
    }

    /// Passes each connection to `guest` after its greeting.
    pub(crate) fn new<F>(
        path: PathBuf,
        guest: impl Fn(BufReader<UnixStream>) -> F + Send + 'static,
    ) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let listener = UnixListener::bind(&path).unwrap();
        let task = tokio::spawn(async move {
            // Dropping the device closes its open streams.
            let mut streams = tokio::task::JoinSet::new();
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let mut client = BufReader::new(client);
                let mut line = String::new();
                let read = client.read_line(&mut line).await;
                if read.is_err() || line.is_empty() {
                    continue;
                }
                assert!(
                    matches!(line.as_str(), "CONNECT 49983\n" | "CONNECT 49999\n"),
                    "{line}"
                );
                streams.spawn(guest(client));
            }
        });
        Self { path, task }
    }
}

/// A server and its first sandbox.
pub(crate) struct World {
    pub(crate) address: SocketAddr,
    pub(crate) table: Table,
    pub(crate) id: SandboxId,
    pub(crate) dir: tempfile::TempDir,
    pub(crate) agent: Option<Agent>,
    pub(crate) vsock: Option<Vsock>,
    stop: Option<oneshot::Sender<()>>,
    pub(crate) serving: JoinHandle<()>,
}

#[derive(Default)]
pub(crate) struct Setup {
    pub(crate) limits: Limits,
    pub(crate) tls: bool,
    /// Whether host names are checked as by a server without keys.
    pub(crate) strict: bool,
    pub(crate) keys: Option<Arc<Authenticator>>,
}

/// An answer of unknown length.
fn stream() -> Body {
    let bytes = Full::new(Bytes::from("stream"));
    Body::new(bytes.map_frame(|frame| frame))
}

/// Replaces the routes of the control plane.
fn control() -> Router {
    use axum::routing::{get, post};
    Router::new()
        .route("/control", get(async || "control"))
        .route("/health", get(async || "up"))
        .route("/stream", get(async || stream()))
        .route(
            "/length",
            post(async |body: axum::body::Bytes| body.len().to_string()),
        )
        .fallback(async || (axum::http::StatusCode::NOT_FOUND, "no such route"))
}

impl World {
    /// Starts a server whose first sandbox has a real agent.
    pub(crate) async fn new() -> Self {
        Self::with(Setup::default()).await
    }

    pub(crate) async fn with(setup: Setup) -> Self {
        let mut world = Self::without_agent(setup).await;
        let dir = world.dir.path().to_owned();
        let agent = tokio::task::spawn_blocking(move || Agent::start(&dir));
        let agent = agent.await.unwrap();
        let path = world.dir.path().join("vsock.sock");
        world.vsock = Some(Vsock::to_agent(path, agent.socket.clone()));
        world.agent = Some(agent);
        world
    }

    /// Starts a server whose first sandbox is a guest that the test implements.
    pub(crate) async fn with_guest<F>(
        setup: Setup,
        guest: impl Fn(BufReader<UnixStream>) -> F + Send + 'static,
    ) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let mut world = Self::without_agent(setup).await;
        let path = world.dir.path().join("vsock.sock");
        world.vsock = Some(Vsock::new(path, guest));
        world
    }

    /// Starts a server whose guest only counts connections.
    pub(crate) async fn counting() -> (Self, Arc<AtomicUsize>) {
        let asked = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&asked);
        let world = Self::with_guest(Setup::default(), move |_| {
            counter.fetch_add(1, Ordering::Relaxed);
            async {}
        });
        (world.await, asked)
    }

    async fn without_agent(setup: Setup) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let table = Table::default();
        let id = SandboxId::from_random([1; 19]);
        let hosts = Hosts::new(Some("e2b.test"));
        let hosts = if setup.strict { hosts.strict() } else { hosts };
        let mut backend = Backend::new(Proxy::new(table.clone()), control());
        if let Some(keys) = setup.keys {
            backend = backend.with_keys(keys);
        }
        let dispatch = Dispatch::new(hosts, backend);
        let tls = setup.tls.then(|| {
            let files = api::tls::ca::init(&dir.path().join("ca"), "e2b.test").unwrap();
            api::tls::load(&files.certificate, &files.key).unwrap().0
        });
        let listeners = bind(&["127.0.0.1:0".parse().unwrap()]).await.unwrap();
        let address = listeners[0].local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let server = Server::new(dispatch, tls, None, setup.limits);
        let serving = tokio::spawn(server.serve(listeners, async {
            stopped.await.ok();
        }));
        let world = Self {
            address,
            table,
            id,
            dir,
            agent: None,
            vsock: None,
            stop: Some(stop),
            serving,
        };
        world.table.set(world.route());
        world
    }

    pub(crate) fn route(&self) -> Route {
        Route {
            id: self.id.clone(),
            vsock: self.dir.path().join("vsock.sock"),
            traffic_token: None,
            envd_token: None,
            mask_request_host: None,
            https_ports: Vec::new(),
            generation: 1,
            renewal: None,
        }
    }

    /// Stops the server.
    pub(crate) fn stop(&mut self) {
        self.stop.take().unwrap().send(()).ok();
    }

    /// Ends the VM and removes it from the registry.
    pub(crate) fn kill(&mut self) {
        self.table.remove(&self.id);
        self.vsock = None;
        self.agent = None;
    }

    /// Headers that select a port of the sandbox.
    pub(crate) fn to(&self, port: u16) -> String {
        let id = &self.id;
        format!("Host: localhost\r\nE2b-Sandbox-Id: {id}\r\nE2b-Sandbox-Port: {port}\r\n")
    }
}
