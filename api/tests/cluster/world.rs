//! The nodes: namespaces on one bridge, and the processes in them.

use std::{
    fs::{self, File, Permissions},
    net::{SocketAddr, TcpStream},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use envd::{EnvdClient, ExecRequest};
use serde_json::{Value, json};
use tempfile::TempDir;
use template::{Builder, Limits, Recipe};
use testbed::{
    cluster::{Etcd, Host, add_bridge, etcd_url},
    world::Namespace,
};

use crate::{
    etcd,
    http::{self, Answer},
};

/// Limit of every wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
const NAMES: [&str; 3] = ["a", "b", "c"];

pub(crate) fn until(what: &str, mut is_done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_done() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn artifacts() -> PathBuf {
    std::env::var_os("CUBE_ARTIFACTS")
        .map(PathBuf::from)
        .unwrap()
}

fn binary(name: &str) -> PathBuf {
    let dir = std::env::var_os("CUBE_BIN").map(PathBuf::from);
    dir.unwrap().join(name)
}

/// A node. When dropped, its server and its sandboxes are killed.
pub(crate) struct Node {
    client: Client,
    namespace: Arc<Namespace>,
    pub(crate) state: TempDir,
    server: Option<Child>,
    /// The process that a reload has started in its place.
    successor: Option<u32>,
    /// Additional options of the server.
    options: &'static [&'static str],
    /// Directory of the installed templates.
    templates: PathBuf,
}

/// Access to a node for a client.
#[derive(Clone)]
pub(crate) struct Client {
    pub(crate) name: &'static str,
    pub(crate) address: SocketAddr,
    key: String,
}

impl std::ops::Deref for Node {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

/// All nodes. The thread that creates it must be in the hub's namespace.
pub(crate) struct World {
    pub(crate) nodes: Vec<Node>,
    etcd: Etcd,
    /// Of etcd.
    _dir: TempDir,
}

fn cube(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cube-api"));
    command.args(words);
    command
}

/// Runs a command, which must succeed, and returns its output.
fn output(command: &mut Command) -> String {
    let done = command.output().unwrap();
    let error = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{command:?}: {error}");
    String::from_utf8(done.stdout).unwrap().trim().to_owned()
}

impl World {
    /// Runs `test` in its own namespace with three nodes that have joined.
    pub(crate) fn run(test: impl FnOnce(&mut World) + Send) {
        Self::run_with(&[], test);
    }

    /// With these options for each server.
    pub(crate) fn run_with(options: &'static [&'static str], test: impl FnOnce(&mut World) + Send) {
        Self::run_prepared(options, |_| {}, test);
    }

    /// The template `base` of node b was made on b, so its memory differs from that of a and c.
    pub(crate) fn run_with_two_bases(test: impl FnOnce(&mut World) + Send) {
        Self::run_prepared(&[], |nodes| nodes[1].make_base(), test);
    }

    fn run_prepared(
        options: &'static [&'static str],
        prepare: impl FnOnce(&mut Vec<Node>) + Send,
        test: impl FnOnce(&mut World) + Send,
    ) {
        let hub = Namespace::new().unwrap();
        let ran = hub.within(|| {
            add_bridge()?;
            let mut world = World::start(options, prepare);
            test(&mut world);
            Ok(())
        });
        ran.unwrap();
    }

    fn start(options: &'static [&'static str], prepare: impl FnOnce(&mut Vec<Node>)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut nodes: Vec<_> = NAMES
            .iter()
            .zip(0..)
            .map(|(name, at)| Node::new(name, at, options))
            .collect();
        prepare(&mut nodes);
        let state = nodes[0].state.path().to_str().unwrap().to_owned();
        let own = nodes[0].own();
        let own: Vec<_> = own.iter().map(String::as_str).collect();
        output(cube(&["cluster", "init", "--etcd", &etcd_url()]).args(own));
        let program = artifacts().join("stages/etcd/etcd");
        let mut world = Self {
            etcd: Etcd::start(&program, dir.path(), Path::new(&state)).unwrap(),
            nodes,
            _dir: dir,
        };
        world.nodes[0].start();
        for at in 1..NAMES.len() {
            world.join(at);
        }
        for node in &world.nodes {
            node.until_all(NAMES.len(), "ready");
        }
        world
    }

    /// Joins the cluster of the first node and starts.
    fn join(&mut self, at: usize) {
        let state = self.nodes[0].state.path().to_str().unwrap();
        let token = output(&mut cube(&["cluster", "token", "--state", state]));
        let node = &self.nodes[at];
        let mut join = cube(&["cluster", "join", &token]);
        join.args(node.own());
        let joined = node.namespace.within(|| Ok(output(&mut join)));
        joined.unwrap();
        self.nodes[at].start();
    }

    /// Replaces a removed node with a new host, which joins under the same name.
    pub(crate) fn replace_host(&mut self, at: usize) {
        self.nodes[at].renew();
        self.join(at);
        for node in &self.nodes {
            node.until_all(NAMES.len(), "ready");
        }
    }

    pub(crate) fn stop_etcd(&self) {
        kill("-STOP", self.etcd.pid());
    }

    pub(crate) fn continue_etcd(&self) {
        kill("-CONT", self.etcd.pid());
    }

    /// The number of owner records.
    pub(crate) fn owners(&self) -> usize {
        let keys = self.keys().into_iter();
        keys.filter(|(key, _)| key.starts_with(b"/cube/v1/owner/"))
            .count()
    }

    /// The revision of the last change in etcd, ignoring loads.
    pub(crate) fn revision(&self) -> u64 {
        // Nodes write their loads all the time.
        let keys = self.keys().into_iter();
        let keys = keys.filter(|(key, _)| !key.starts_with(b"/cube/v1/load/"));
        keys.map(|(_, revision)| revision).max().unwrap()
    }

    /// All keys, with the revision of their last change.
    fn keys(&self) -> Vec<(Vec<u8>, u64)> {
        let found = etcd::list(&self.nodes[0].state.path().join("cluster"));
        let keys = found.unwrap().into_iter();
        keys.map(|kv| (kv.key, kv.revision)).collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for node in &self.nodes {
                let log = fs::read_to_string(node.state.path().join("log")).unwrap_or_default();
                let lines: Vec<_> = log.lines().rev().take(40).collect();
                for line in lines.iter().rev() {
                    eprintln!("{}: {line}", node.name);
                }
            }
            for line in self.etcd.log().lines().rev().take(10) {
                eprintln!("etcd: {line}");
            }
        }
    }
}

fn kill(signal: &str, pid: u32) {
    let sent = Command::new("kill")
        .args([signal, &pid.to_string()])
        .status();
    assert!(sent.is_ok_and(|status| status.success()));
}

/// The state directory of a host, and a key of its server.
fn new_state(name: &str) -> (TempDir, String) {
    let mut private = tempfile::Builder::new();
    let private = private.permissions(Permissions::from_mode(0o700));
    let state = private.prefix("node").tempdir_in("/tmp").unwrap();
    let path = state.path().to_str().unwrap();
    let scopes = [
        "sandboxes:read",
        "sandboxes:write",
        "secrets:read",
        "secrets:write",
        "templates:read",
        "templates:write",
        "nodes:admin",
        "metrics:read",
    ];
    let scopes = scopes.iter().flat_map(|scope| ["--scope", scope]);
    let key = output(cube(&["key", "new", name, "--state", path]).args(scopes));
    (state, key)
}

impl Node {
    fn new(name: &'static str, at: u8, options: &'static [&'static str]) -> Self {
        let host = Host::add(at).unwrap();
        let (state, key) = new_state(name);
        Self {
            client: Client {
                name,
                address: (host.address, 3000).into(),
                key,
            },
            namespace: host.namespace,
            state,
            server: None,
            successor: None,
            options,
            templates: artifacts().join("templates"),
        }
    }

    /// Replaces the host with another one, without any of its state.
    fn renew(&mut self) {
        self.die();
        (self.state, self.client.key) = new_state(self.client.name);
    }

    /// Makes this node's template `base` from the same files as the others'.
    fn make_base(&mut self) {
        let recipe = Recipe::read(&self.templates.join("base"));
        let recipe = recipe.unwrap().unwrap();
        let templates = self.state.path().join("installed/templates");
        fs::create_dir_all(&templates).unwrap();
        let (run, out) = (self.state.path().join("made"), templates.join("base"));
        fs::create_dir(&run).unwrap();
        let vmm = std::env::var_os("CUBE_BIN").map(PathBuf::from).unwrap();
        let vmm = vmm.join("cube-vmm");
        let builder = Builder {
            vmm: &vmm,
            run: &run,
            log: &run.join("log"),
            limits: Limits::default(),
        };
        builder.build(&recipe, None, &out, &|_| Ok(())).unwrap();
        template::add_maker(&out, &vmm).unwrap();
        self.templates = templates;
    }

    /// The number of templates whose files this node stores by content.
    pub(crate) fn images(&self) -> usize {
        fs::read_dir(self.state.path().join("images"))
            .unwrap()
            .count()
    }

    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    /// The options of `init` and `join`.
    fn own(&self) -> Vec<String> {
        let state = self.state.path().to_str().unwrap();
        let address = format!("{}:3001", self.address.ip());
        ["--node", self.name, "--address", &address, "--state", state]
            .map(str::to_owned)
            .into()
    }

    pub(crate) fn start(&mut self) {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.state.path().join("log"))
            .unwrap();
        let bin = std::env::var_os("CUBE_BIN").map(PathBuf::from).unwrap();
        let mut serve = cube(&["serve", "--cluster", "--network", "none", "--warm", "0:0"]);
        serve
            .args(["--allow-missing-limits", "--server-memory", "none"])
            .args(["--max-sandboxes", "8", "--memory-reserve", "64MiB"])
            .args(["--listen", &self.address.to_string(), "--state"])
            .arg(self.state.path())
            .arg("--templates")
            .arg(&self.templates)
            .arg("--images")
            .arg(artifacts().join("guest"))
            .arg("--vmm")
            .arg(bin.join("cube-vmm"))
            .args(self.options)
            .stdin(Stdio::null())
            .stderr(log);
        if !self.options.contains(&"--transfer-rate") {
            // Slow enough that a test can break a transfer.
            serve.args(["--transfer-rate", "16MiB"]);
        }
        let started = self.namespace.within(|| serve.spawn());
        self.server = Some(started.unwrap());
        until("the server answers", || {
            let health = http::try_send(self.address, "GET", "/health", &[], b"");
            let exited = self.server.as_mut().and_then(|s| s.try_wait().unwrap());
            assert!(
                exited.is_none(),
                "the server of {} exited: {exited:?}",
                self.name
            );
            health.is_ok_and(|answer| answer.starts_with(b"HTTP/1.1 200"))
        });
    }

    /// Kills the server with SIGKILL. Its VMs keep running.
    pub(crate) fn kill(&mut self) {
        if let Some(mut server) = self.server.take() {
            server.kill().ok();
            server.wait().ok();
        }
        if let Some(pid) = self.successor.take() {
            kill("-KILL", pid);
            until("the server is gone", || {
                let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
                stat.map_or(true, |stat| stat.contains(") Z "))
            });
        }
    }

    /// The process of the server.
    pub(crate) fn signal(&self, signal: &str) {
        let pid = self.server.as_ref().map(Child::id);
        kill(signal, self.successor.or(pid).unwrap());
    }

    /// Lets a new process take over.
    pub(crate) fn reload(&mut self) {
        let state = self.state.path().to_str().unwrap().to_owned();
        let pid = output(&mut cube(&["reload", "--state", &state]));
        self.successor = Some(pid.parse().unwrap());
        if let Some(mut server) = self.server.take() {
            // It exits when its connections have ended.
            until("the former process ends", || {
                server.try_wait().unwrap().is_some()
            });
        }
    }

    /// Runs a program in the node's namespace.
    pub(crate) fn run(&self, program: &str, line: &str) {
        let ran = self.namespace.within(|| testbed::world::run(program, line));
        ran.unwrap();
    }

    /// Whether this node has the sandbox on its disk.
    pub(crate) fn has(&self, id: &str) -> bool {
        let dir = self.state.path().join("sandboxes").join(id);
        dir.join("record.json").exists()
    }

    /// Whether this node is receiving files of the sandbox.
    pub(crate) fn is_incoming(&self, id: &str) -> bool {
        self.state
            .path()
            .join("incoming")
            .join(id)
            .join("pause")
            .exists()
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.state.path().join("log")).unwrap()
    }

    /// Kills the server and its VMs with SIGKILL, as if the host had crashed.
    pub(crate) fn die(&mut self) {
        self.kill();
        let state = self.state.path().to_str().unwrap();
        let mut end = cube(&["end", "--allow-missing-limits", "--server-memory", "none"]);
        end.args(["--network", "none", "--state", state, "--vmm"])
            .arg(binary("cube-vmm"))
            .arg("--templates")
            .arg(&self.templates)
            .arg("--images")
            .arg(artifacts().join("guest"));
        end.stderr(Stdio::null()).status().ok();
    }
}

impl Client {
    pub(crate) fn send(&self, method: &str, path: &str, body: &Value) -> Answer {
        self.send_with(&self.key, method, path, body)
    }

    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    /// Uses the key of another node.
    pub(crate) fn send_as(&self, other: &Client, method: &str, path: &str) -> Answer {
        self.send_with(&other.key, method, path, &Value::Null)
    }

    fn send_with(&self, key: &str, method: &str, path: &str, body: &Value) -> Answer {
        let text = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        let headers = [("X-API-KEY", key), ("Content-Type", "application/json")];
        http::send(self.address, method, path, &headers, text.as_bytes())
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.send("GET", path, &Value::Null)
    }

    pub(crate) fn ask(&self) -> Answer {
        let body = json!({"templateID": "base", "timeout": 300, "metadata": {"by": self.name}});
        self.send("POST", "/v2/sandboxes", &body)
    }

    /// Runs the prover of the life cycle against this node.
    pub(crate) fn verify_lifecycle(&self) {
        let mut bench = Command::new(binary("cube-bench"));
        bench.args(["verify", "lifecycle", "--minutes", "1", "--target"]);
        bench.arg(format!("http://{}", self.address));
        output(bench.env("E2B_API_KEY", &self.key));
    }

    /// The status with which the cluster listener responds to a client without a certificate.
    pub(crate) fn status_without_certificate(&self, path: &str, body: &str) -> String {
        let mut curl = Command::new("curl");
        curl.args(["-s", "-k", "-o", "/dev/null", "-w", "%{http_code}"]);
        if !body.is_empty() {
            curl.args(["-H", "Content-Type: application/json", "-d", body]);
        }
        output(curl.arg(format!("https://{}:3001{path}", self.address.ip())))
    }

    /// Waits until this node sees this number of nodes with this status.
    pub(crate) fn until_all(&self, count: usize, status: &str) {
        until("all nodes are seen", || {
            let nodes = self.get("/nodes").expect(200).json();
            let mut nodes = nodes.as_array().unwrap().iter();
            nodes.clone().filter(|n| n["status"] == status).count() == count
                && nodes.all(|n| n["status"] != "ready" || n["version"] != "unknown")
        });
    }

    pub(crate) fn exec(&self, sandbox: &Value, script: &str) -> Result<String, String> {
        let stream = TcpStream::connect(self.address).map_err(|why| why.to_string())?;
        let mut client = EnvdClient::over(stream, PATIENCE);
        let id = sandbox["sandboxID"].as_str().unwrap();
        let headers = [("E2b-Sandbox-Id", id), ("E2b-Sandbox-Port", "49983")];
        client.set_route(&self.address.to_string(), &headers);
        client.set_access_token(sandbox["envdAccessToken"].as_str().map(str::to_owned));
        let request = ExecRequest::new("/bin/sh", &["-c", script]);
        let output = client
            .exec(&request, PATIENCE)
            .map_err(|why| why.to_string())?;
        assert_eq!(output.exit_code, 0, "{script}: {output:?}");
        Ok(String::from_utf8(output.stdout).unwrap())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.die();
    }
}
