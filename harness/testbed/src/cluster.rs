//! Starts a cluster of several nodes on this host, and ends it with all its sandboxes.
//!
//! ```text
//! hub: this process, etcd            10.77.0.254 on br0
//! nodes a, b, …: a namespace each    10.77.0.1, 10.77.0.2, …: a cube-api and its VMs
//! ```
//! The namespaces have no names and disappear with their processes. The standard error of every process is a file
//! below the given directory, so that a sweep finds the processes if this one is killed.

use std::{
    collections::BTreeMap,
    fs::{DirBuilder, File},
    io,
    net::{Ipv4Addr, SocketAddr, TcpStream},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{
    api::Api,
    leftovers,
    server::{Door, LocalServer, STATE, ServerError, ServerSpec, Site, new_key, output_of},
    world::{self, Namespace, WorldError, ip},
};

/// Maximum number of nodes.
pub const MAX_NODES: u8 = 8;
/// Scopes of the cluster's key: all that measurements need.
const SCOPES: [&str; 4] = [
    "sandboxes:read",
    "sandboxes:write",
    "nodes:admin",
    "metrics:read",
];
/// Address of etcd and the clients.
const HUB: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 254);
/// Ports for clients, for other nodes, and of etcd.
const CLIENTS: u16 = 3000;
const NODES: u16 = 3001;
const ETCD: u16 = 2379;
/// File name of etcd's log.
const LOG: &str = "etcd.log";
/// Timeout of every wait: for etcd, for the nodes, and for a status change.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);
/// Timeout of one request about nodes.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A cluster could not be started.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    #[error(transparent)]
    World(#[from] WorldError),
    #[error(transparent)]
    Server(#[from] ServerError),
    #[error("cannot {step}")]
    Step {
        step: String,
        #[source]
        source: io::Error,
    },
}

fn failed(step: impl Into<String>) -> impl FnOnce(io::Error) -> ClusterError {
    let step = step.into();
    move |source| ClusterError::Step { step, source }
}

/// The namespace that connects the nodes; this process is in it.
#[derive(Debug)]
pub struct Hub(());

impl Hub {
    /// Moves this process permanently into a new network namespace with a bridge. The process must have only one
    /// thread, because other threads would stay behind.
    ///
    /// # Errors
    /// Returns an error if the namespace or the bridge cannot be created.
    pub fn enter() -> Result<Self, WorldError> {
        world::alone()?;
        add_bridge().map_err(world::failed("create a bridge"))?;
        Ok(Self(()))
    }
}

/// Creates the bridge of a hub in the namespace of this thread.
///
/// # Errors
/// Returns an error if `ip` fails.
pub fn add_bridge() -> io::Result<()> {
    ip(&format!(
        "link add br0 type bridge\naddress add {HUB}/24 dev br0\nlink set br0 up"
    ))
}

/// A host in its own namespace, connected to the hub's bridge.
#[derive(Debug)]
pub struct Host {
    pub address: Ipv4Addr,
    /// Name of its link's end on the bridge.
    pub link: String,
    pub namespace: Arc<Namespace>,
}

impl Host {
    /// Creates the host at a position, counted from 0. This thread must be in the hub.
    ///
    /// # Errors
    /// Returns an error if the namespace cannot be created, or if `ip` fails.
    pub fn add(at: u8) -> Result<Self, WorldError> {
        let namespace = Namespace::new()?;
        let (link, address) = (format!("v{at}"), Ipv4Addr::new(10, 77, 0, at + 1));
        let connect = || {
            ip(&format!(
                "link add {link} type veth peer name up0\nlink set {link} master br0 up"
            ))?;
            namespace.adopt("up0")?;
            namespace.within(|| {
                ip(&format!(
                    "address add {address}/24 dev up0\nlink set up0 up"
                ))
            })
        };
        connect().map_err(world::failed(format!("connect host {}", name_of(at))))?;
        Ok(Self {
            address,
            link,
            namespace: Arc::new(namespace),
        })
    }
}

/// Name of the node at a position: a, b, c and so on.
#[must_use]
pub fn name_of(at: u8) -> String {
    char::from(b'a' + at).to_string()
}

/// Options of a cluster.
#[derive(Debug)]
pub struct ClusterSpec<'a> {
    /// From 1 to [`MAX_NODES`].
    pub nodes: u8,
    pub etcd: &'a Path,
    /// Options of each node; door and site are replaced.
    pub server: ServerSpec,
}

/// Nodes that have joined the cluster. Dropping this value ends the servers with their sandboxes, and then etcd.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Node>,
    _etcd: Etcd,
}

/// One node.
#[derive(Debug)]
pub struct Node {
    name: String,
    link: String,
    api: Api,
    /// Locked while the server is killed or started.
    server: Mutex<LocalServer>,
}

/// An etcd in the hub. Dropping this value ends it, even if it is stopped.
#[derive(Debug)]
pub struct Etcd {
    process: Child,
    log: PathBuf,
}

impl Drop for Etcd {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A host that is being set up as a node.
struct Place {
    name: String,
    host: Host,
    dir: PathBuf,
}

impl Place {
    fn new(at: u8, dir: &Path) -> Result<Self, ClusterError> {
        let (name, host) = (name_of(at), Host::add(at)?);
        let dir = dir.join(format!("node-{name}"));
        let made = DirBuilder::new().mode(0o700).create(&dir);
        made.map_err(failed(format!("create {}", dir.display())))?;
        Ok(Self { name, host, dir })
    }

    fn state(&self) -> PathBuf {
        self.dir.join(STATE)
    }

    /// Runs `cube-api cluster` with these arguments in the namespace.
    fn cluster(&self, program: &Path, words: &[&str]) -> Result<String, ClusterError> {
        let mut command = Command::new(program);
        command.arg("cluster").args(words);
        command.arg("--state").arg(self.state());
        let done = self.host.namespace.within(|| output_of(&mut command));
        let word = words.first().copied().unwrap_or_default();
        done.map_err(failed(format!("run cluster {word} for node {}", self.name)))
    }

    fn start(self, spec: &ServerSpec, key: &str) -> Result<Node, ClusterError> {
        let spec = ServerSpec {
            door: Door::Key(key.to_owned()),
            site: Site::Within(
                self.host.namespace,
                SocketAddr::from((self.host.address, CLIENTS)),
            ),
            options: [&spec.options[..], &["--cluster".to_owned()]].concat(),
            ..spec.clone()
        };
        let server = LocalServer::start(&self.dir, spec)?;
        let api = Api {
            control: server.endpoint().clone(),
            sandbox_url: None,
            key: key.to_owned(),
            timeout: TIMEOUT,
        };
        Ok(Node {
            name: self.name,
            link: self.host.link,
            api,
            server: Mutex::new(server),
        })
    }
}

impl Cluster {
    /// Starts all nodes, with their files below `dir`, and waits until each node sees all others.
    ///
    /// # Errors
    /// Returns an error that names the failed step. Everything that was started has ended by then.
    pub fn start(_: &Hub, dir: &Path, spec: &ClusterSpec<'_>) -> Result<Self, ClusterError> {
        let program = &spec.server.program;
        let places = (0..spec.nodes).map(|at| Place::new(at, dir));
        let places = places.collect::<Result<Vec<_>, _>>()?;
        let mut places = places.into_iter();
        let Some(founder) = places.next() else {
            let none = io::Error::from(io::ErrorKind::InvalidInput);
            return Err(failed("start a cluster without nodes")(none));
        };
        let key = new_key(program, &founder.state(), &SCOPES).map_err(failed("create a key"))?;
        let url = etcd_url();
        let address = format!("{}:{NODES}", founder.host.address);
        let own = ["--node", &founder.name, "--address", &address];
        founder.cluster(program, &[&["init", "--etcd", &url][..], &own].concat())?;
        let founder_state = founder.state();
        let mut cluster = Self {
            _etcd: Etcd::start(spec.etcd, dir, &founder_state)?,
            nodes: vec![founder.start(&spec.server, &key)?],
        };
        for place in places {
            let mut token = Command::new(program);
            token
                .args(["cluster", "token", "--state"])
                .arg(&founder_state);
            let token = output_of(&mut token).map_err(failed("make a token"))?;
            let address = format!("{}:{NODES}", place.host.address);
            let own = ["--node", &place.name, "--address", &address];
            place.cluster(program, &[&["join", &token][..], &own].concat())?;
            cluster.nodes.push(place.start(&spec.server, &key)?);
        }
        cluster
            .await_open(&[])
            .map_err(failed("see all nodes as ready"))?;
        Ok(cluster)
    }

    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Cordons these nodes, uncordons all others, and waits until each node sees the change.
    ///
    /// # Errors
    /// Returns an error if a node rejects the change, or if it takes longer than a minute.
    pub fn close(&self, closed: &[String]) -> io::Result<()> {
        for node in &self.nodes {
            let is_closed = closed.contains(&node.name);
            let status = if is_closed { "standby" } else { "ready" };
            node.set_status(&format!("{{\"status\":\"{status}\"}}"))?;
        }
        self.await_open(closed)
    }

    /// Waits until each node sees all nodes except the closed ones as ready, with their metrics.
    fn await_open(&self, closed: &[String]) -> io::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let is_open = |name: &String, status: &str| (status == "ready") != closed.contains(name);
        for by in &self.nodes {
            loop {
                let seen = by.statuses();
                if let Ok(seen) = &seen
                    && seen.len() == self.nodes.len()
                    && seen.iter().all(|(name, status)| is_open(name, status))
                {
                    break;
                }
                if Instant::now() > deadline {
                    let why = format!("node {} sees {seen:?} after {PATIENCE:?}", by.name);
                    return Err(io::Error::new(io::ErrorKind::TimedOut, why));
                }
                std::thread::sleep(POLL);
            }
        }
        Ok(())
    }
}

impl Node {
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Address and key, with a timeout of a few seconds.
    #[must_use]
    pub fn api(&self) -> &Api {
        &self.api
    }

    pub fn server(&self) -> MutexGuard<'_, LocalServer> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends this body as a change of the node's own status.
    ///
    /// # Errors
    /// Returns an error if the node does not accept it.
    pub fn set_status(&self, body: &str) -> io::Result<()> {
        let answer = self
            .api
            .send("POST", &format!("/nodes/{}", self.name), body)?;
        match answer.status {
            204 => Ok(()),
            status => Err(io::Error::other(format!(
                "node {} rejected {body}: status {status}, {}",
                self.name,
                String::from_utf8_lossy(&answer.body)
            ))),
        }
    }

    /// Status of each node as seen by this one; `unknown` for a node whose metrics have not arrived yet.
    ///
    /// # Errors
    /// Returns an error if the node does not respond.
    pub fn statuses(&self) -> io::Result<BTreeMap<String, String>> {
        let answer = self.api.send("GET", "/nodes", "")?;
        let nodes: Vec<Value> = serde_json::from_slice(&answer.body)?;
        let text = |node: &Value, field: &str| node[field].as_str().unwrap_or_default().to_owned();
        let status = |node: &Value| match text(node, "version").as_str() {
            "unknown" => "unknown".to_owned(),
            _ => text(node, "status"),
        };
        Ok(nodes
            .iter()
            .map(|node| (text(node, "id"), status(node)))
            .collect())
    }

    /// Simulates a power loss of the node: cuts its link first, so that no connection is closed or refused, and
    /// then kills its server and its VMs.
    ///
    /// # Errors
    /// Returns an error if the link cannot be cut or a process cannot be killed.
    pub fn die(&self) -> io::Result<()> {
        ip(&format!("link set {} down", self.link))?;
        let mut server = self.server();
        server.kill()?;
        let vms = leftovers::processes_of(&server.state());
        vms.into_iter().try_for_each(leftovers::kill_and_wait)
    }

    /// Restarts a dead node with its old disk, and waits until its server responds.
    ///
    /// # Errors
    /// Returns an error if the link or the server cannot be started.
    pub fn revive(&self) -> Result<(), ClusterError> {
        ip(&format!("link set {} up", self.link)).map_err(failed("connect a node again"))?;
        Ok(self.server().restart()?)
    }
}

/// URL at which the nodes reach etcd.
#[must_use]
pub fn etcd_url() -> String {
    format!("https://{HUB}:{ETCD}")
}

impl Etcd {
    /// Starts etcd with its files in `dir` and the certificates in `founder`, the founder's state directory, and
    /// waits until it listens.
    ///
    /// # Errors
    /// Returns an error with the last line of its log if etcd ends or does not listen within a minute.
    pub fn start(program: &Path, dir: &Path, founder: &Path) -> Result<Self, ClusterError> {
        let file = |name: &str| founder.join("cluster").join(name);
        let (url, log) = (etcd_url(), dir.join(LOG));
        let start = || {
            Command::new(program)
                .arg("--data-dir")
                .arg(dir.join("etcd"))
                .args(["--listen-client-urls", &url])
                .args(["--advertise-client-urls", &url])
                .args(["--listen-peer-urls", "http://127.0.0.1:2380"])
                .args(["--auto-compaction-mode", "periodic"])
                .args(["--auto-compaction-retention", "5m"])
                .arg("--cert-file")
                .arg(file("etcd.crt"))
                .arg("--key-file")
                .arg(file("etcd.key"))
                .arg("--trusted-ca-file")
                .arg(file("ca.crt"))
                .arg("--client-cert-auth")
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(File::create(&log)?)
                .spawn()
        };
        let process = start().map_err(failed(format!("start {}", program.display())))?;
        let mut etcd = Self { process, log };
        let deadline = Instant::now() + PATIENCE;
        while TcpStream::connect((HUB, ETCD)).is_err() {
            let exited = etcd.process.try_wait().ok().flatten();
            if exited.is_some() || Instant::now() > deadline {
                let last = etcd.log().lines().last().unwrap_or_default().to_owned();
                return Err(failed(format!("reach {}", program.display()))(
                    io::Error::other(last),
                ));
            }
            std::thread::sleep(POLL);
        }
        Ok(etcd)
    }

    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Its log so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}
