//! `e2b`: any endpoint that speaks E2B's API. A create is `POST /v2/sandboxes`, a command is
//! `process.Process/Start` and a cell `POST /execute` through the endpoint's proxy, a kill is `DELETE`.
//!
//! Each start opens a connection of its own, so its handshakes are inside the latency. If control and data
//! plane have one address, the connection serves both.

use std::{
    io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use api_types::envd::{ENVD_PORT, EnvdClient, HttpAnswer};
use model::{StartPhase, Timeline, chain};
use serde_json::{Value, json};

use super::{CloneId, Output, PageCache, Sandbox, Target};
use testbed::{
    api::{Api, Created, INTERPRETER_PORT},
    endpoint::{DialError, Endpoint, Wire},
    leftovers,
};

use crate::{
    clock,
    event::{Failure, FailureCause, StartKind},
    guest,
    scenario::ExecSpec,
};

/// Lifetime that is asked for, in seconds: longer than any round, and a bound on what a killed run leaves.
pub(super) const LIFETIME_S: u32 = 3600;
/// A server that keeps sandboxes ready has refilled its pool by then.
const READY_PATIENCE: Duration = Duration::from_secs(60);
const READY_LOOK: Duration = Duration::from_millis(50);
const WARM_GAUGE: &str = "cube_pool_warm ";
/// In the answer to a create: whether it was served from the warm pool.
const START_KIND: &str = "x-cube-start";
/// In the same: what its phases took, in milliseconds since the request was accepted.
const PHASES: &str = "server-timing";
/// Among them: until the answer was made.
const TOTAL: &str = "total";

/// Where sandboxes are asked for, and how.
#[derive(Clone, Debug)]
pub struct E2b {
    /// The endpoint, its key, and the limit of each exchange.
    pub api: Api,
    /// Template id or name.
    pub template: String,
    /// Where a server on this host keeps a directory per sandbox, for the ledger.
    pub sandboxes: Option<PathBuf>,
    /// Sandboxes that the server keeps ready; zero: it is not asked.
    pub warm: u32,
    /// Option `network` of each create; absent: none.
    pub network: Option<Value>,
}

impl E2b {
    pub(super) fn connect(&self, to: &Endpoint) -> Result<EnvdClient<Wire>, Failure> {
        self.api.connect(to).map_err(|e| dial_failure(&e))
    }

    /// What the server says of its pool among its figures for Prometheus.
    fn warm_now(&self) -> io::Result<u32> {
        let mut client = self
            .connect(&self.api.control)
            .map_err(|f| io::Error::other(f.message))?;
        let answer = self
            .api
            .request(&mut client, "GET", "/metrics", b"")
            .map_err(io::Error::other)?;
        let text = String::from_utf8_lossy(&answer.body);
        let gauge = text.lines().find_map(|line| line.strip_prefix(WARM_GAUGE));
        gauge
            .and_then(|value| value.trim().parse().ok())
            .ok_or_else(|| io::Error::other("the server does not say how many are warm"))
    }

    /// A create of the template.
    pub(super) fn start(&self, timeline: &mut Timeline) -> Result<Remote, Failure> {
        let mut client = self.connect(&self.api.control)?;
        let mut body = json!({ "templateID": self.template, "timeout": LIFETIME_S });
        if let Some(network) = &self.network {
            body["network"] = network.clone();
        }
        let body = body.to_string();
        let asked_ns = clock::monotonic_ns();
        let answer = self
            .api
            .request(&mut client, "POST", "/v2/sandboxes", body.as_bytes())
            .map_err(|e| guest::failure(FailureCause::Create, &e))?;
        let replied_ns = clock::monotonic_ns();
        if let Some(told) = answer.header(PHASES) {
            stamp_phases(timeline, told, asked_ns, replied_ns);
        }
        timeline.stamp(StartPhase::Replied, replied_ns);
        let mut remote = self.remote(created(&answer)?);
        remote.start = answer.header(START_KIND).and_then(StartKind::parse);
        remote.client = Some((self.api.control.clone(), client));
        Ok(remote)
    }

    /// The handle of a sandbox that is there.
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

/// Phases as the server tells them, put onto this host's clock: the server's time lies in the middle between question
/// and answer. One that tells no total, or more than there was, tells nothing.
fn stamp_phases(timeline: &mut Timeline, told: &str, asked_ns: u64, replied_ns: u64) {
    let entries: Vec<(&str, u64)> = told.split(',').filter_map(timing).collect();
    let total = entries.iter().find(|(name, _)| *name == TOTAL);
    let on_the_way =
        total.and_then(|(_, total)| replied_ns.checked_sub(asked_ns)?.checked_sub(*total));
    let Some(on_the_way) = on_the_way else {
        return;
    };
    let accepted_ns = asked_ns + on_the_way / 2;
    timeline.stamp(StartPhase::Accepted, accepted_ns);
    for phase in StartPhase::ALL.iter().filter(|p| **p < StartPhase::Replied) {
        let entry = entries.iter().find(|(name, _)| *name == phase.name());
        if let Some((_, ns)) = entry.filter(|(_, ns)| *ns <= replied_ns - asked_ns) {
            timeline.stamp(*phase, accepted_ns + ns);
        }
    }
}

/// Name and nanoseconds of an entry such as `resumed;dur=1.25`.
fn timing(entry: &str) -> Option<(&str, u64)> {
    let (name, ms) = entry.trim().split_once(";dur=")?;
    let ms: f64 = ms.parse().ok()?;
    let time = Duration::try_from_secs_f64(ms / 1e3).ok()?;
    Some((name, clock::nanoseconds(time)))
}

impl Target for E2b {
    fn create(&self, _: CloneId, timeline: &mut Timeline) -> Result<Box<dyn Sandbox>, Failure> {
        Ok(Box::new(self.start(timeline)?))
    }

    fn prepare_cache(&self, _: PageCache) -> io::Result<()> {
        // The server's page cache is the server's business.
        Ok(())
    }

    fn await_ready(&self) -> io::Result<()> {
        if self.warm == 0 {
            return Ok(());
        }
        let deadline = Instant::now() + READY_PATIENCE;
        loop {
            let warm = self.warm_now()?;
            if warm >= self.warm {
                return Ok(());
            }
            if Instant::now() > deadline {
                let why = format!("{warm} of {} are warm", self.warm);
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            std::thread::sleep(READY_LOOK);
        }
    }
}

fn created(answer: &HttpAnswer) -> Result<Created, Failure> {
    let refused = |why: String| {
        let body: String = String::from_utf8_lossy(&answer.body)
            .chars()
            .take(300)
            .collect();
        let message = format!("create: status {}{why}: {body}", answer.status);
        failed(FailureCause::Create, message)
    };
    if answer.status != 201 {
        return Err(refused(String::new()));
    }
    let created: Created =
        serde_json::from_slice(&answer.body).map_err(|e| refused(format!(", {e}")))?;
    match created.check() {
        Ok(()) => Ok(created),
        Err(why) => Err(refused(format!(", {why}"))),
    }
}

/// A sandbox behind the endpoint.
#[derive(Debug)]
pub(super) struct Remote {
    target: E2b,
    /// The last connection and where it leads; absent before the first use, and after an error.
    client: Option<(Endpoint, EnvdClient<Wire>)>,
    pub(super) created: Created,
    start: Option<StartKind>,
    alive: bool,
}

impl Remote {
    /// The connection at hand if it leads there, else a new one.
    fn client_to(&mut self, to: &Endpoint) -> Result<EnvdClient<Wire>, Failure> {
        match self.client.take() {
            Some((at, client)) if at == *to => Ok(client),
            _ => self.target.connect(to),
        }
    }

    /// A client for a port of the sandbox, and where it leads.
    fn client_of(&mut self, port: u16) -> Result<(Endpoint, EnvdClient<Wire>), Failure> {
        let id = &self.created.sandbox_id;
        let data = self.target.api.data_endpoint(id, port);
        let data = data.map_err(|e| failed(FailureCause::Connect, chain(&e)))?;
        let mut client = self.client_to(&data)?;
        self.created.route(&mut client, &data, port);
        Ok((data, client))
    }

    /// Makes a file of this host one of the sandbox.
    pub(super) fn upload(&mut self, file: &Path, to: &str) -> Result<(), Failure> {
        let bytes = std::fs::read(file)
            .map_err(|e| failed(FailureCause::Exec, format!("{}: {e}", file.display())))?;
        self.write_file(to, &bytes)
    }

    fn end(&mut self) -> Result<(), Failure> {
        self.alive = false;
        let control = self.target.api.control.clone();
        let mut client = self.client_to(&control)?;
        let path = format!("/sandboxes/{}", self.created.sandbox_id);
        let answer = self.target.api.request(&mut client, "DELETE", &path, b"");
        match answer
            .map_err(|e| guest::failure(FailureCause::Kill, &e))?
            .status
        {
            204 => Ok(()),
            status => Err(failed(
                FailureCause::Kill,
                format!("kill: status {status} for {}", self.created.sandbox_id),
            )),
        }
    }
}

impl Sandbox for Remote {
    fn exec(&mut self, command: &ExecSpec) -> Result<Output, Failure> {
        let port = match command.cell {
            Some(_) => INTERPRETER_PORT,
            None => ENVD_PORT,
        };
        let (data, mut client) = self.client_of(port)?;
        let output = match &command.cell {
            Some(code) => guest::cell_over(&mut client, code, command.timeout)?,
            None => guest::exec_over(&mut client, command)?,
        };
        self.client = Some((data, client));
        Ok(output)
    }

    fn write_file(&mut self, path: &str, bytes: &[u8]) -> Result<(), Failure> {
        let (data, mut client) = self.client_of(ENVD_PORT)?;
        client.set_timeout(self.target.api.timeout);
        client
            .write_file(path, bytes, Some("root"))
            .map_err(|e| guest::failure(FailureCause::Exec, &e))?;
        self.client = Some((data, client));
        Ok(())
    }

    fn set_network(&mut self, options: &Value) -> Result<(), Failure> {
        let control = self.target.api.control.clone();
        let mut client = self.client_to(&control)?;
        let path = format!("/sandboxes/{}/network", self.created.sandbox_id);
        let body = options.to_string();
        let answer = self
            .target
            .api
            .request(&mut client, "PUT", &path, body.as_bytes())
            .map_err(|e| guest::failure(FailureCause::Network, &e))?;
        match answer.status {
            204 => {
                self.client = Some((control, client));
                Ok(())
            }
            status => Err(failed(
                FailureCause::Network,
                format!("network: status {status} for {}", self.created.sandbox_id),
            )),
        }
    }

    fn pid(&self) -> Option<u32> {
        let dir = self
            .target
            .sandboxes
            .as_ref()?
            .join(&self.created.sandbox_id);
        leftovers::processes_of(&dir).first().copied()
    }

    fn start_kind(&self) -> Option<StartKind> {
        self.start
    }

    fn kill(mut self: Box<Self>) -> Result<(), Failure> {
        self.end()
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        if self.alive {
            // Its lifetime ends what cannot be killed now.
            let _ = self.end();
        }
    }
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
    use std::{
        io::{BufRead, BufReader, Read, Write},
        net::TcpListener,
        thread,
    };

    const KEY: &str = "e2b_0000";

    /// A server for one connection: gives each answer in turn, and returns the requests' heads.
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
            api_types::envd::frame::encode(*flags, text.as_bytes(), &mut out).unwrap();
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
            template: "base".to_owned(),
            sandboxes: None,
            warm: 0,
            network: None,
        }
    }

    const ID: CloneId = CloneId {
        round: 0,
        arrival: 0,
    };

    #[test]
    fn a_sandbox_lives_on_one_connection() {
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
            "the key is the control plane's alone"
        );
        assert!(heads[2].starts_with("DELETE /sandboxes/i1 HTTP/1.1\r\n"));
        assert!(!heads[2].contains("x-access-token"));
    }

    #[test]
    fn phases_of_the_server_lie_between_question_and_answer() {
        let stamped = |told: &str| {
            let mut timeline = Timeline::default();
            stamp_phases(&mut timeline, told, 1_000_000, 6_000_000);
            timeline.iter().collect::<Vec<_>>()
        };
        let told = "confined;dur=0.250, first_exec;dur=1, agent_ready;dur=3.000, total;dur=4.000";
        assert_eq!(
            stamped(told),
            [
                (StartPhase::Accepted, 1_500_000),
                (StartPhase::Confined, 1_750_000),
                (StartPhase::AgentReady, 4_500_000),
            ]
        );
        for nonsense in [
            "confined;dur=0.250",
            "total;dur=5.001",
            "total;dur=-1",
            "total;dur=nan",
            "",
        ] {
            assert_eq!(stamped(nonsense), [], "{nonsense}");
        }
    }

    #[test]
    fn refusals_and_nonsense_are_failures_of_the_create() {
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
    fn the_data_plane_may_have_a_host_of_its_own() {
        let mut target = target(Endpoint::parse("https://api.example.com").unwrap());
        target.api.sandbox_url = Some("https://{port}-{id}.example.com".to_owned());
        let data = |port| target.api.data_endpoint("i1", port).unwrap().to_string();
        assert_eq!(data(ENVD_PORT), "https://49983-i1.example.com");
        assert_eq!(data(INTERPRETER_PORT), "https://49999-i1.example.com");
    }
}
