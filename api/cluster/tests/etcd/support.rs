//! etcd as a child process, nodes, and a connection that can be cut.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use cluster::{
    Applicant, Cluster, ClusterError, CpuKind, EtcdConfig, HomeKey, JoinConfig, Load, Member,
    MemberSigner, Node, NodeId, Registrar, TemplateId, TlsFiles, found,
};
use model::Platform;

pub(crate) const LEASE: Duration = Duration::from_secs(3);
/// Long enough for a lease to expire and a leader election, on a loaded host.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn block_on<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(test)
}

/// Waits for a condition.
pub(crate) async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(
            start.elapsed() < PATIENCE,
            "not within {PATIENCE:?}: {what}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub(crate) struct Etcd {
    child: Child,
    program: PathBuf,
    pub(crate) dir: PathBuf,
    pub(crate) port: u16,
    peer_port: u16,
    arguments: Vec<String>,
}

impl Etcd {
    /// Starts one member, with its data in `dir`.
    pub(crate) fn start(program: &str, dir: &Path, tls: Option<&TlsFiles>) -> Self {
        let mut arguments = tls.map_or_else(Vec::new, certified);
        if let Some(tls) = tls {
            let authority = tls.authority.display().to_string();
            arguments.extend(["--trusted-ca-file".to_owned(), authority]);
            arguments.push("--client-cert-auth".to_owned());
        }
        Self::start_with(program, dir, arguments)
    }

    /// Like [`Self::start`], but clients need no certificate.
    pub(crate) fn start_open(program: &str, dir: &Path, tls: &TlsFiles) -> Self {
        Self::start_with(program, dir, certified(tls))
    }

    fn start_with(program: &str, dir: &Path, arguments: Vec<String>) -> Self {
        let artifacts = PathBuf::from(std::env::var_os("CUBE_ARTIFACTS").unwrap());
        let program = artifacts.join("stages/etcd").join(program);
        let (port, peer_port) = (free_port(), free_port());
        let dir = dir.to_owned();
        let child = spawn(&program, &dir, port, peer_port, &arguments);
        Self {
            child,
            program,
            dir,
            port,
            peer_port,
            arguments,
        }
    }

    pub(crate) fn config(&self) -> EtcdConfig {
        self.config_at(self.port)
    }

    pub(crate) fn config_at(&self, port: u16) -> EtcdConfig {
        EtcdConfig {
            endpoints: vec![format!("http://127.0.0.1:{port}")],
            tls: None,
        }
    }

    /// SIGKILL.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn restart(&mut self) {
        self.child = spawn(
            &self.program,
            &self.dir,
            self.port,
            self.peer_port,
            &self.arguments,
        );
    }

    pub(crate) fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = i32::try_from(self.child.id()).unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).unwrap();
    }

    /// Compacts everything before `revision`, through etcd's JSON gateway.
    pub(crate) fn compact(&self, revision: u64) {
        let body = format!(r#"{{"revision":"{revision}","physical":true}}"#);
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).unwrap();
        let length = body.len();
        let head = "POST /v3/kv/compaction HTTP/1.1\r\nHost: etcd\r\nConnection: close\r\n";
        write!(stream, "{head}Content-Length: {length}\r\n\r\n{body}").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        // The test may already have killed it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The options that make etcd serve TLS.
fn certified(tls: &TlsFiles) -> Vec<String> {
    let identity = tls.identity.as_ref().unwrap();
    let path = |path: &Path| path.display().to_string();
    [
        "--cert-file",
        &path(&identity.certificate),
        "--key-file",
        &path(&identity.key),
    ]
    .map(str::to_owned)
    .into()
}

fn spawn(program: &Path, dir: &Path, port: u16, peer_port: u16, more: &[String]) -> Child {
    let scheme = if more.is_empty() { "http" } else { "https" };
    let client = format!("{scheme}://127.0.0.1:{port}");
    let peer = format!("http://127.0.0.1:{peer_port}");
    Command::new(program)
        .arg("--data-dir")
        .arg(dir)
        .args(["--listen-client-urls", &client])
        .args(["--advertise-client-urls", &client])
        .args(["--listen-peer-urls", &peer])
        .args(["--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", &format!("default={peer}")])
        .args(["--log-level", "error"])
        .args(more)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.local_addr().unwrap().port()
}

pub(crate) fn id(name: &str) -> NodeId {
    name.parse().unwrap()
}

pub(crate) fn template() -> TemplateId {
    "base".parse().unwrap()
}

pub(crate) fn node(name: &str) -> Node {
    Node {
        id: id(name),
        identity: identity(name),
        address: format!("{name}:3000"),
        incarnation: "0".parse().unwrap(),
        platform: Platform::Ring3,
        cpu: CpuKind::default(),
        version: "1".to_owned(),
    }
}

pub(crate) fn identity(name: &str) -> String {
    format!("identity of {name}")
}

pub(crate) fn load(running: u32) -> Load {
    Load {
        memory_free_mib: 4096,
        warm: BTreeMap::from([(template(), 1)]),
        running,
        ..Load::default()
    }
}

/// The authority of all clusters here.
pub(crate) fn registrar(etcd: &EtcdConfig) -> Registrar {
    static KEY: OnceLock<Vec<u8>> = OnceLock::new();
    let key = KEY.get_or_init(|| rcgen::KeyPair::generate().unwrap().serialize_der());
    Registrar {
        signer: MemberSigner::new("c", key).unwrap(),
        etcd: etcd.clone(),
    }
}

pub(crate) fn applicant(name: &str) -> Applicant {
    Applicant {
        id: id(name),
        identity: identity(name),
        key: String::new(),
    }
}

/// Founds a cluster as soon as etcd responds.
pub(crate) async fn founded(config: &EtcdConfig, name: &str) -> Member {
    let start = Instant::now();
    loop {
        match found(&registrar(config), &applicant(name)).await {
            Ok(member) => return member,
            Err(ClusterError::Unreachable { .. }) if start.elapsed() < PATIENCE => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Err(error) => panic!("{}", model::chain(&error)),
        }
    }
}

pub(crate) fn joining(etcd: EtcdConfig, member: Member) -> JoinConfig {
    let verifier = registrar(&etcd).signer.verifier();
    JoinConfig {
        etcd,
        verifier,
        lease: LEASE,
        home_key: HomeKey::new(&[1; 32]),
        member,
    }
}

pub(crate) async fn join(etcd: EtcdConfig, member: Member) -> Cluster {
    let node = node(member.id.as_str());
    Cluster::join(joining(etcd, member), node).await.unwrap()
}

pub(crate) async fn join_as(etcd: EtcdConfig, name: &str) -> Cluster {
    let member = registrar(&etcd).admit(&applicant(name)).await.unwrap();
    join(etcd, member).await
}

/// Whether a node is alive in the view of another.
pub(crate) fn sees(cluster: &Cluster, name: &str) -> bool {
    cluster.view().nodes.contains_key(&id(name))
}

/// A port forwarder that can be cut: connections are closed, and new ones are closed at once.
pub(crate) struct Cable {
    pub(crate) port: u16,
    is_cut: Arc<AtomicBool>,
}

impl Cable {
    pub(crate) async fn lay(to: u16) -> Self {
        let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let listener = listener.await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let is_cut = Arc::new(AtomicBool::new(false));
        let cut = Arc::clone(&is_cut);
        tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                let cut = Arc::clone(&cut);
                tokio::spawn(async move {
                    if cut.load(Ordering::SeqCst) {
                        return;
                    }
                    let far = tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, to));
                    let Ok(mut far) = far.await else {
                        return;
                    };
                    let copy = tokio::io::copy_bidirectional(&mut near, &mut far);
                    tokio::pin!(copy);
                    while !cut.load(Ordering::SeqCst) {
                        let pause = tokio::time::sleep(Duration::from_millis(20));
                        tokio::select! {
                            _ = &mut copy => return,
                            () = pause => {}
                        }
                    }
                });
            }
        });
        Self { port, is_cut }
    }

    pub(crate) fn cut(&self, is_cut: bool) {
        self.is_cut.store(is_cut, Ordering::SeqCst);
    }
}
