//! The target `e2b`: a server with E2B's API. A create is `POST /v2/sandboxes`, a command `process.Process/Start` and a
//! cell `POST /execute` through the proxy of the server, and a kill is `DELETE`.
//!
//! Each start opens a new connection, so handshakes are part of the latency. If the control plane and the sandboxes
//! have the same address, one connection serves both.

mod complaints;
mod remote;
mod server_timing;

use std::{
    fs, io,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use envd::{EnvdClient, HttpAnswer};
use model::{StartPhase, Timeline, chain};
use serde_json::{Value, json};

use testbed::{
    api::{Api, Created},
    endpoint::{DialError, Endpoint, Wire},
};

pub use complaints::Complaints;
pub(crate) use remote::Remote;

use super::{CloneId, PageCache, Pool, Sandbox, Target};
use crate::{
    account::Account,
    clock,
    event::{Failure, FailureCause, StartKind},
    guest,
};

/// Requested lifetime of a sandbox in seconds. It must be longer than a scenario holds its clones. If a run is killed,
/// the server removes its sandboxes after this time.
pub(super) const LIFETIME_S: u32 = 3600;
/// Timeout for refilling the warm pool of the server.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval between two reads of the gauges.
const READY_INTERVAL: Duration = Duration::from_millis(50);
/// Response header of a create with the [`StartKind`].
const START_KIND: &str = "x-cube-start";
/// Response header of a create with the durations of its phases, in milliseconds since the request was accepted.
const PHASES: &str = "server-timing";

/// Address and options of a server.
#[derive(Clone, Debug)]
pub struct E2b {
    /// Address, key and timeout.
    pub api: Api,
    pub dialect: Dialect,
    /// Template id or name.
    pub template: String,
    /// Directory in which a server on this host keeps a directory for each sandbox, used to find VMM processes.
    pub sandboxes: Option<PathBuf>,
    /// Log of a server that the run started, read for the reason why its pool does not fill. Copies of the target
    /// share it, so that each line is read once.
    pub log: Arc<Mutex<Complaints>>,
    /// Number of warm sandboxes to wait for before each round and each memory sample; 0 does not wait.
    pub warm: u32,
    /// Accounts of a server that the run started.
    pub account: Option<Arc<Account>>,
    /// Value of `network` in each create; `None` omits it.
    pub network: Option<Value>,
}

/// Numbers of sandboxes of a server, by state.
struct Gauges {
    warm: u32,
    filling: u32,
    running: u32,
    paused: u32,
}

impl Gauges {
    /// Sandboxes that are not being filled or removed.
    fn kept(&self) -> u32 {
        self.warm + self.running + self.paused
    }
}

/// Paths and status codes of creates and kills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// E2B with `POST /v2/sandboxes`.
    V2,
    /// E2B with `POST /sandboxes`.
    V1,
    /// CubeSandbox: `POST /sandboxes`. Accepts 200 in addition to 201 and 204, as CubeSandbox's own benchmark does.
    Cubesandbox,
}

impl Dialect {
    fn creates_at(self) -> &'static str {
        match self {
            Self::V2 => "/v2/sandboxes",
            Self::V1 | Self::Cubesandbox => "/sandboxes",
        }
    }

    fn is_created(self, status: u16) -> bool {
        status == 201 || (self == Self::Cubesandbox && status == 200)
    }

    fn is_killed(self, status: u16) -> bool {
        status == 204 || (self == Self::Cubesandbox && status == 200)
    }
}

impl E2b {
    pub(super) fn connect(&self, to: &Endpoint) -> Result<EnvdClient<Wire>, Failure> {
        self.api.connect(to).map_err(|e| dial_failure(&e))
    }

    /// Number of sandboxes that have a directory, including those being removed; 0 if the server is not on this
    /// host.
    fn directories(&self) -> io::Result<u32> {
        let Some(sandboxes) = &self.sandboxes else {
            return Ok(0);
        };
        match fs::read_dir(sandboxes) {
            Ok(entries) => Ok(u32::try_from(entries.count()).unwrap_or(u32::MAX)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// Reads the metrics of the server.
    fn gauges(&self) -> io::Result<Gauges> {
        let mut client = self
            .connect(&self.api.control)
            .map_err(|f| io::Error::other(f.message))?;
        let answer = self
            .api
            .request(&mut client, "GET", "/metrics", b"")
            .map_err(io::Error::other)?;
        let text = String::from_utf8_lossy(&answer.body);
        let gauge = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|value| value.trim().parse().ok())
                .ok_or_else(|| io::Error::other(format!("/metrics of the server has no {name}")))
        };
        Ok(Gauges {
            warm: gauge("cube_pool_warm ")?,
            filling: gauge("cube_pool_filling ")?,
            running: gauge("cube_pool_running ")?,
            paused: gauge("cube_pool_paused ")?,
        })
    }

    /// Creates a sandbox from the template.
    pub(crate) fn start(&self, timeline: &mut Timeline) -> Result<Remote, Failure> {
        let deadline = Instant::now() + self.api.timeout;
        let mut client = self.connect(&self.api.control)?;
        let mut body = json!({ "templateID": self.template, "timeout": LIFETIME_S });
        if let Some(network) = &self.network {
            body["network"] = network.clone();
        }
        let body = body.to_string();
        let asked_ns = clock::monotonic_ns();
        let answer = self
            .time_left(deadline)?
            .request(
                &mut client,
                "POST",
                self.dialect.creates_at(),
                body.as_bytes(),
            )
            .map_err(|e| guest::failure(FailureCause::Create, &e))?;
        let replied_ns = clock::monotonic_ns();
        if let Some(timing) = answer.header(PHASES) {
            server_timing::stamp(timeline, timing, asked_ns, replied_ns);
        }
        timeline.stamp(StartPhase::Replied, replied_ns);
        let mut remote = self.remote(created(&answer, self.dialect)?);
        remote.start = answer.header(START_KIND).and_then(StartKind::parse);
        remote.client = Some((self.api.control.clone(), client));
        Ok(remote)
    }

    /// The API with the time left of a create's timeout, which covers the connection and the request.
    fn time_left(&self, deadline: Instant) -> Result<Api, Failure> {
        let timeout = deadline.saturating_duration_since(Instant::now());
        if timeout.is_zero() {
            let why = format!("create: no connection within {:?}", self.api.timeout);
            return Err(failed(FailureCause::Timeout, why));
        }
        Ok(Api {
            timeout,
            ..self.api.clone()
        })
    }

    /// A handle to an existing sandbox.
    pub(super) fn remote(&self, created: Created) -> Remote {
        Remote {
            target: self.clone(),
            client: None,
            created,
            start: None,
            alive: true,
        }
    }
}

impl Target for E2b {
    fn create(&self, _: CloneId, timeline: &mut Timeline) -> Result<Box<dyn Sandbox>, Failure> {
        Ok(Box::new(self.start(timeline)?))
    }

    fn prepare_cache(&self, _: PageCache) -> io::Result<()> {
        // The server decides how it maps its templates.
        Ok(())
    }

    fn cpu_ns(&self) -> Option<u64> {
        self.account.as_ref()?.cpu_ns().ok()
    }

    fn pool(&self) -> Option<Pool> {
        let account = self.account.as_ref().filter(|_| self.warm > 0)?;
        let gauges = self.gauges().ok()?;
        Some(Pool {
            warm: gauges.warm,
            filling: gauges.filling,
            memory: account.memory(),
        })
    }

    fn await_ready(&self) -> io::Result<()> {
        if self.warm == 0 && self.sandboxes.is_none() {
            return Ok(());
        }
        let deadline = Instant::now() + READY_TIMEOUT;
        let mut complaints = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        complaints.begin_wait();
        loop {
            let gauges = self.gauges()?;
            let ending = self.directories()?.saturating_sub(gauges.kept());
            if gauges.warm >= self.warm && gauges.filling == 0 && ending == 0 {
                return Ok(());
            }
            complaints.read();
            if let Some(why) = complaints.refusal(gauges.warm) {
                return Err(io::Error::other(why));
            }
            if Instant::now() > deadline {
                let why = format!(
                    "{} of {} sandboxes are warm, {} are being filled and {ending} are being removed after {READY_TIMEOUT:?}{}",
                    gauges.warm,
                    self.warm,
                    gauges.filling,
                    complaints.last()
                );
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            std::thread::sleep(READY_INTERVAL);
        }
    }
}

fn created(answer: &HttpAnswer, dialect: Dialect) -> Result<Created, Failure> {
    let refused = |why: String| {
        let body: String = String::from_utf8_lossy(&answer.body)
            .chars()
            .take(300)
            .collect();
        let message = format!("create: status {}{why}: {body}", answer.status);
        failed(FailureCause::Create, message)
    };
    if !dialect.is_created(answer.status) {
        return Err(refused(String::new()));
    }
    let created: Created =
        serde_json::from_slice(&answer.body).map_err(|e| refused(format!(", {e}")))?;
    match created.check() {
        Ok(()) => Ok(created),
        Err(why) => Err(refused(format!(", {why}"))),
    }
}

/// Whether a create was refused because the server has no such template: E2B answers 404, others 400.
pub(crate) fn is_unknown_template(failure: &Failure) -> bool {
    let refused = ["create: status 404", "create: status 400"];
    let mut refused = refused.iter();
    refused.any(|status| failure.message.starts_with(status))
        && failure.message.to_lowercase().contains("template")
}

fn failed(cause: FailureCause, message: String) -> Failure {
    Failure { cause, message }
}

fn dial_failure(error: &DialError) -> Failure {
    let cause = match error {
        DialError::Connect { source, .. } if source.kind() == io::ErrorKind::TimedOut => {
            FailureCause::Timeout
        }
        DialError::Connect { .. } | DialError::Tls { .. } => FailureCause::Connect,
    };
    failed(cause, chain(error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::ExecSpec;
    use envd::ENVD_PORT;
    use std::{
        io::{BufRead, BufReader, Read, Write},
        net::TcpListener,
        thread,
    };
    use testbed::api::INTERPRETER_PORT;

    const KEY: &str = "e2b_0000";

    /// A server for one connection: sends the responses in order, and returns the heads of the requests.
    fn peer(answers: Vec<Vec<u8>>) -> (Endpoint, thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let served = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream);
            let mut heads = Vec::new();
            for answer in answers {
                let mut head = String::new();
                while !head.ends_with("\r\n\r\n") {
                    assert!(reader.read_line(&mut head).unwrap() > 0, "closed: {head}");
                }
                let length = head
                    .lines()
                    .find_map(|l| l.strip_prefix("content-length: "));
                let mut body = vec![0; length.map_or(0, |l| l.parse().unwrap())];
                reader.read_exact(&mut body).unwrap();
                heads.push(head);
                reader.get_mut().write_all(&answer).unwrap();
            }
            heads
        });
        (Endpoint::parse(&url).unwrap(), served)
    }

    fn http(status: &str, headers: &str, body: &[u8]) -> Vec<u8> {
        let length = body.len();
        let mut answer =
            format!("HTTP/1.1 {status}\r\n{headers}content-length: {length}\r\n\r\n").into_bytes();
        answer.extend_from_slice(body);
        answer
    }

    fn frames(messages: &[(u8, &str)]) -> Vec<u8> {
        let mut out = Vec::new();
        for (flags, text) in messages {
            envd::frame::encode(*flags, text.as_bytes(), &mut out).unwrap();
        }
        out
    }

    fn target(api: Endpoint) -> E2b {
        E2b {
            api: Api {
                control: api,
                sandbox_url: None,
                key: KEY.to_owned(),
                timeout: Duration::from_secs(10),
            },
            dialect: Dialect::V2,
            template: "base".to_owned(),
            sandboxes: None,
            log: Arc::default(),
            warm: 0,
            account: None,
            network: None,
        }
    }

    const ID: CloneId = CloneId {
        round: 0,
        arrival: 0,
    };

    #[test]
    fn create_exec_and_kill_share_one_connection() {
        let body = br#"{"sandboxID":"i1","templateID":"base","clientID":"c","envdVersion":"0.6.13","envdAccessToken":"tok"}"#;
        let events = frames(&[
            (0, r#"{"event":{"start":{"pid":7}}}"#),
            (0, r#"{"event":{"data":{"stdout":"b2sK"}}}"#),
            (
                0,
                r#"{"event":{"end":{"exitCode":0,"exited":true,"status":"exit status 0"}}}"#,
            ),
            (2, "{}"),
        ]);
        let (api, served) = peer(vec![
            http("201 Created", "x-cube-start: warm\r\n", body),
            http(
                "200 OK",
                "content-type: application/connect+json\r\n",
                &events,
            ),
            http("204 No Content", "", b""),
        ]);
        let mut timeline = Timeline::default();
        let mut sandbox = target(api.clone()).create(ID, &mut timeline).unwrap();
        assert!(timeline.at(StartPhase::Replied).is_some());
        assert_eq!(sandbox.start_kind(), Some(StartKind::Warm));
        let command = ExecSpec {
            argv: vec!["/usr/local/bin/probe".into()],
            cell: None,
            language: None,
            user: "root".into(),
            expect_stdout: "ok\n".into(),
            timeout: Duration::from_secs(10),
        };
        assert_eq!(sandbox.exec(&command).unwrap().stdout, b"ok\n");
        sandbox.kill().unwrap();
        let heads = served.join().unwrap();
        assert!(heads[0].starts_with("POST /v2/sandboxes HTTP/1.1\r\n"));
        assert!(heads[0].contains(&format!("host: {}\r\n", api.authority())));
        assert!(heads[0].contains("x-api-key: e2b_0000\r\n"));
        assert!(heads[1].starts_with("POST /process.Process/Start HTTP/1.1\r\n"));
        for header in [
            "e2b-sandbox-id: i1",
            "e2b-sandbox-port: 49983",
            "x-access-token: tok",
        ] {
            assert!(heads[1].contains(header), "{header}");
        }
        assert!(
            !heads[1].contains(KEY),
            "the API key is not sent to sandboxes"
        );
        assert!(heads[2].starts_with("DELETE /sandboxes/i1 HTTP/1.1\r\n"));
        assert!(!heads[2].contains("x-access-token"));
    }

    #[test]
    fn refusals_and_invalid_answers_are_failures_of_the_create() {
        let bad_id = br#"{"sandboxID":"../x"}"#;
        for (status, body) in [
            (
                "503 Service Unavailable",
                &b"{\"code\":503,\"message\":\"full\"}"[..],
            ),
            ("200 OK", b"{\"sandboxID\":\"i1\"}"),
            ("201 Created", b"hello"),
            ("201 Created", bad_id),
        ] {
            let (api, served) = peer(vec![http(status, "", body)]);
            let outcome = target(api).create(ID, &mut Timeline::default());
            let failure = outcome.err().unwrap();
            assert_eq!(failure.cause, FailureCause::Create, "{}", failure.message);
            served.join().unwrap();
        }
    }

    #[test]
    fn the_timeout_of_a_create_includes_its_connection() {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", silent.local_addr().unwrap());
        let mut target = target(Endpoint::parse(&url).unwrap());
        target.api.timeout = Duration::from_millis(50);
        let outcome = target.create(ID, &mut Timeline::default());
        assert_eq!(outcome.err().unwrap().cause, FailureCause::Timeout);
        // The connection took almost all of the time, so only the rest is left for the request.
        target.api.timeout = Duration::from_secs(3600);
        let left = target.time_left(Instant::now() + Duration::from_secs(60));
        assert!(left.unwrap().timeout <= Duration::from_secs(60));
        let late = target.time_left(Instant::now()).unwrap_err();
        assert_eq!(late.cause, FailureCause::Timeout);
    }

    #[test]
    fn dialects_differ_in_paths_and_accepted_statuses() {
        let body = br#"{"sandboxID":"i1","templateID":"base","clientID":"c","envdVersion":"0"}"#;
        let heads = |dialect, created: &str, killed: &str| {
            let answers = vec![http(created, "", body), http(killed, "", b"")];
            let (api, served) = peer(answers);
            let target = E2b {
                dialect,
                ..target(api)
            };
            let sandbox = target.create(ID, &mut Timeline::default())?;
            sandbox.kill()?;
            Ok::<_, Failure>(served.join().unwrap())
        };
        let v1 = heads(Dialect::V1, "201 Created", "204 No Content").unwrap();
        assert!(v1[0].starts_with("POST /sandboxes HTTP/1.1\r\n"));
        let other = heads(Dialect::Cubesandbox, "200 OK", "200 OK").unwrap();
        assert!(other[0].starts_with("POST /sandboxes HTTP/1.1\r\n"));
        let killed = heads(Dialect::V1, "201 Created", "200 OK").unwrap_err();
        assert_eq!(killed.cause, FailureCause::Kill);
    }

    #[test]
    fn requests_to_sandboxes_can_have_another_host() {
        let mut target = target(Endpoint::parse("https://api.example.com").unwrap());
        target.api.sandbox_url = Some("https://{port}-{id}.example.com".to_owned());
        let data = |port| target.api.data_endpoint("i1", port).unwrap().to_string();
        assert_eq!(data(ENVD_PORT), "https://49983-i1.example.com");
        assert_eq!(data(INTERPRETER_PORT), "https://49999-i1.example.com");
    }
}
