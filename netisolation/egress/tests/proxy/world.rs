//! The proxy's process, and the stand-in for `cube-api`.

use std::{
    collections::HashMap,
    io::{BufRead, BufReader, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use egress::control::{
    Ask, Authority, Call, Flow, RuleOutcome, ToProxy, ToServer, Way, authority_name,
};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

/// A value that may occur only in requests to servers.
pub(crate) const SECRET: &str = "hunter2-hunter2-hunter2";

/// A certificate authority.
pub(crate) struct Ca {
    pub(crate) certificate: String,
    pub(crate) key: String,
    pub(crate) issuer: Issuer<'static, KeyPair>,
}

impl Ca {
    pub(crate) fn new(name: &str) -> Self {
        Self::of(KeyPair::generate().unwrap(), name)
    }

    fn of(key: KeyPair, name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        let certificate = params.self_signed(&key).unwrap().pem();
        Self {
            certificate,
            key: key.serialize_pem(),
            issuer: Issuer::new(params, key),
        }
    }
}

#[derive(Default)]
struct Answers {
    flows: HashMap<IpAddr, Flow>,
    rules: HashMap<String, RuleOutcome>,
    calls: Vec<Call>,
    lost: u64,
    rule_questions: Vec<(String, Ask)>,
    silent: bool,
    way: Option<Way>,
}

pub(crate) struct World {
    pub(crate) dir: TempDir,
    pub(crate) address: SocketAddr,
    pub(crate) process: Child,
    pub(crate) ca: Ca,
    pub(crate) servers: Arc<Ca>,
    control: UnixStream,
    answers: Arc<Mutex<Answers>>,
}

impl World {
    /// Starts a proxy that expects TLS on connections to this port.
    pub(crate) fn new(servers: &Arc<Ca>, https_port: u16, options: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let roots = dir.path().join("roots.pem");
        std::fs::write(&roots, &servers.certificate).unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let (control, theirs) = UnixStream::pair().unwrap();
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        let mut command = Command::new("sh");
        // The listener is passed as standard output, and moved to descriptor 3.
        command
            .args(["-c", r#"exec "$0" "$@" 3<&1 1>/dev/null"#])
            .arg(env!("CARGO_BIN_EXE_cube-egress"))
            .args(["--https-port", &https_port.to_string(), "--log", "debug"])
            .args(options)
            .env("SSL_CERT_FILE", &roots)
            .env_remove("SSL_CERT_DIR")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::from(OwnedFd::from(listener)))
            .stderr(log);
        if nix::unistd::geteuid().is_root() {
            command.args(["--user", "65534", "--group", "65534"]);
        }
        let process = command.spawn().unwrap();
        let key = KeyPair::generate().unwrap();
        let name = authority_name(key.public_key_raw());
        let ca = Ca::of(key, &name);
        let answers = Arc::new(Mutex::new(Answers::default()));
        let world = Self {
            dir,
            address,
            process,
            servers: Arc::clone(servers),
            control: control.try_clone().unwrap(),
            answers: Arc::clone(&answers),
            ca,
        };
        world.send(&ToProxy::Start {
            authority: Authority {
                certificate: world.ca.certificate.clone(),
                key: world.ca.key.clone(),
            },
        });
        std::thread::spawn(move || answer(&control, &answers));
        world
    }

    pub(crate) fn send(&self, message: &ToProxy) {
        send(&self.control, message);
    }

    /// Assigns connections from a new address to a sandbox. They lead to `remote`, to which `names` were resolved.
    /// Returns the address.
    pub(crate) fn guest(&self, remote: SocketAddr, names: &[&str]) -> Ipv4Addr {
        self.guest_of(remote, names, false)
    }

    pub(crate) fn guest_by_address(&self, remote: SocketAddr, names: &[&str]) -> Ipv4Addr {
        self.guest_of(remote, names, true)
    }

    fn guest_of(&self, remote: SocketAddr, names: &[&str], admitted_by_address: bool) -> Ipv4Addr {
        let mut answers = self.answers.lock().unwrap();
        let number = u8::try_from(answers.flows.len() + 2).unwrap();
        let source = Ipv4Addr::new(127, 0, 9, number);
        let flow = Flow {
            sandbox: format!("sandbox-{number}"),
            remote,
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            admitted_by_address,
            is_unread: false,
            has_own_way: answers.way.is_some(),
        };
        answers.flows.insert(source.into(), flow);
        source
    }

    /// Sets the header `x-api-key` for requests to a name.
    pub(crate) fn rule(&self, host: &str, value: &str) {
        let headers = vec![("X-Api-Key".to_owned(), value.to_owned())];
        self.outcome(host, Self::headers(host, headers));
    }

    pub(crate) fn headers(host: &str, headers: Vec<(String, String)>) -> RuleOutcome {
        RuleOutcome::Headers {
            rule: host.to_owned(),
            headers,
            secrets: vec!["key".to_owned()],
        }
    }

    pub(crate) fn outcome(&self, host: &str, outcome: RuleOutcome) {
        self.answers
            .lock()
            .unwrap()
            .rules
            .insert(host.to_owned(), outcome);
    }

    /// Sets how new connections of guests leave.
    pub(crate) fn way(&self, way: Way) {
        self.answers.lock().unwrap().way = Some(way);
    }

    /// Stops the stand-in from reading while the result lives.
    pub(crate) fn hold(&self) -> Held {
        let answers = Arc::clone(&self.answers);
        let (release, released) = std::sync::mpsc::channel::<()>();
        let (begin, begun) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let _answers = answers.lock().unwrap();
            begin.send(()).unwrap();
            let _ = released.recv();
        });
        begun.recv().unwrap();
        Held { _release: release }
    }

    /// Makes the stand-in read requests without responding.
    pub(crate) fn silence(&self) {
        self.answers.lock().unwrap().silent = true;
    }

    pub(crate) fn sandbox(source: Ipv4Addr) -> String {
        format!("sandbox-{}", source.octets()[3])
    }

    /// Waits until a record of the sandbox matches.
    pub(crate) fn call(&self, source: Ipv4Addr, matches: impl Fn(&Call) -> bool) -> Call {
        let sandbox = Self::sandbox(source);
        let found = self.wait(|answers| {
            let mut calls = answers.calls.iter();
            calls
                .find(|call| call.sandbox == sandbox && matches(call))
                .cloned()
        });
        found.unwrap_or_else(|| panic!("no such record: {:#?}", self.answers.lock().unwrap().calls))
    }

    /// Total of calls and lost records.
    pub(crate) fn counted(&self) -> u64 {
        let answers = self.answers.lock().unwrap();
        answers.calls.len() as u64 + answers.lost
    }

    pub(crate) fn lost(&self) -> u64 {
        self.answers.lock().unwrap().lost
    }

    pub(crate) fn rule_questions(&self) -> Vec<(String, Ask)> {
        self.answers.lock().unwrap().rule_questions.clone()
    }

    fn wait<T>(&self, find: impl Fn(&Answers) -> Option<T>) -> Option<T> {
        let limit = Instant::now() + Duration::from_secs(20);
        loop {
            let found = find(&self.answers.lock().unwrap());
            if found.is_some() || Instant::now() > limit {
                return found;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Closes the control socket.
    pub(crate) fn close_control(&self) {
        self.control.shutdown(std::net::Shutdown::Both).unwrap();
    }

    /// Peak resident memory of the proxy so far, in bytes.
    pub(crate) fn peak_memory(&self) -> u64 {
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmHWM:"))
            .unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let log = self.log();
        if std::thread::panicking() {
            eprintln!("log of the proxy:\n{log}");
            return;
        }
        let calls = format!("{:?}", self.answers.lock().unwrap().calls);
        assert!(
            !log.contains(SECRET) && !calls.contains(SECRET),
            "a secret was written"
        );
        assert!(!log.contains("panicked"), "{log}");
    }
}

fn answer(control: &UnixStream, answers: &Mutex<Answers>) {
    let reader = BufReader::new(control.try_clone().unwrap());
    for line in reader.lines() {
        let Ok(line) = line else { return };
        let mut answers = answers.lock().unwrap();
        let message = match serde_json::from_str(&line).unwrap() {
            ToServer::Flow { id, peer } => ToProxy::Flow {
                id,
                flow: answers.flows.get(&peer.ip()).cloned(),
            },
            ToServer::Rule {
                id,
                peer,
                host,
                ask,
            } => {
                assert!(answers.flows.contains_key(&peer.ip()), "{peer}");
                let mut outcome = answers
                    .rules
                    .get(&host)
                    .cloned()
                    .unwrap_or(RuleOutcome::None);
                if let RuleOutcome::Headers { headers, .. } = &mut outcome
                    && ask == Ask::Existence
                {
                    headers.clear();
                }
                answers.rule_questions.push((host, ask));
                ToProxy::Rule { id, outcome }
            }
            ToServer::Way { id, .. } => ToProxy::Way {
                id,
                way: answers.way.clone().unwrap_or(Way::Direct),
            },
            ToServer::Call(call) => {
                answers.calls.push(call);
                continue;
            }
            ToServer::Lost { calls } => {
                answers.lost += calls;
                continue;
            }
        };
        if !answers.silent {
            send(control, &message);
        }
    }
}

fn send(mut control: &UnixStream, message: &ToProxy) {
    let mut line = serde_json::to_vec(message).unwrap();
    line.push(b'\n');
    // The proxy may have ended.
    let _ = control.write_all(&line);
}

pub(crate) struct Held {
    _release: std::sync::mpsc::Sender<()>,
}
