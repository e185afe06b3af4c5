//! The prover as a customer: sandboxes by the public API, the probe in them by the agent.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use api_types::envd::{ENVD_PORT, EnvdClient, ExecRequest, HttpAnswer};
use model::chain;
use netprobe::{Finding, Order, Probe};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use testbed::endpoint::{Endpoint, Wire};

/// Where the probe is put.
const PROBE: &str = "/usr/local/bin/cube-netprobe";
/// Bound of one request.
const PATIENCE: Duration = Duration::from_secs(60);
/// Seconds that a sandbox lives at most: nothing is left for long, whatever happens here.
const LIFETIME_S: u64 = 300;

/// Why there is no sandbox, or it did not do as it was told.
#[derive(Debug, thiserror::Error)]
#[error("{doing}: {what}")]
pub struct SandboxError {
    doing: String,
    what: String,
}

fn failed(doing: &str, what: impl Into<String>) -> SandboxError {
    SandboxError {
        doing: doing.to_owned(),
        what: what.into(),
    }
}

/// An event as `GET /sandboxes/{id}/network/events` tells it; what else it says is not looked at.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct NetworkEvent {
    pub(super) reason: String,
    pub(super) destination: SocketAddr,
    pub(super) name: Option<String>,
    pub(super) count: u64,
}

/// Who asks, and where.
#[derive(Clone, Debug)]
pub(super) struct Customer {
    pub(super) api: Endpoint,
    pub(super) key: String,
    pub(super) template: String,
    /// The probe's bytes.
    pub(super) program: Vec<u8>,
}

/// A sandbox with the probe in it. Dropping it ends it.
#[derive(Debug)]
pub(super) struct Guest {
    customer: Customer,
    pub(super) id: String,
    token: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Created {
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    envd_access_token: Option<String>,
}

#[derive(Deserialize)]
struct Forked {
    sandbox: Option<Created>,
}

impl Customer {
    /// Creates a sandbox with these options and puts the probe in.
    pub(super) fn create(&self, options: &Map<String, Value>) -> Result<Guest, SandboxError> {
        let mut body = options.clone();
        body.insert("templateID".to_owned(), json!(self.template));
        body.insert("timeout".to_owned(), json!(LIFETIME_S));
        let answer = self.ask("POST", "/v2/sandboxes", Some(&Value::Object(body)))?;
        let guest = self.guest(accepted("create a sandbox", &answer, 201)?);
        guest.put_probe()?;
        Ok(guest)
    }

    /// Asks for something that anybody with a key may ask.
    pub(super) fn knock(&self) -> Result<(), SandboxError> {
        done(
            "list the sandboxes",
            &self.ask("GET", "/v2/sandboxes", None)?,
            &[200],
        )
    }

    fn guest(&self, created: Created) -> Guest {
        Guest {
            customer: self.clone(),
            id: created.sandbox_id,
            token: created.envd_access_token,
        }
    }

    fn ask(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<HttpAnswer, SandboxError> {
        let doing = format!("{method} {path}");
        let mut client = self.dial(&doing)?;
        client.set_route(&self.api.authority(), &[("x-api-key", &self.key)]);
        let body = body.map(Value::to_string).unwrap_or_default();
        let json = [("content-type", "application/json")];
        client
            .request(method, path, &json, body.as_bytes())
            .map_err(|error| failed(&doing, chain(&error)))
    }

    fn dial(&self, doing: &str) -> Result<EnvdClient<Wire>, SandboxError> {
        let wire = self
            .api
            .dial(PATIENCE)
            .map_err(|error| failed(doing, chain(&error)))?;
        Ok(EnvdClient::over(wire, PATIENCE))
    }
}

impl Guest {
    fn put_probe(&self) -> Result<(), SandboxError> {
        let doing = "put the probe into the sandbox";
        let mut client = self.agent(doing)?;
        client
            .write_file(PROBE, &self.customer.program, Some("root"))
            .map_err(|error| failed(doing, chain(&error)))?;
        self.exec(doing, "chmod", &["755", PROBE], PATIENCE)
            .map(|_| ())
    }

    fn agent(&self, doing: &str) -> Result<EnvdClient<Wire>, SandboxError> {
        let mut client = self.customer.dial(doing)?;
        let port = ENVD_PORT.to_string();
        let route = [
            ("e2b-sandbox-id", self.id.as_str()),
            ("e2b-sandbox-port", &port),
        ];
        client.set_route(&self.customer.api.authority(), &route);
        client.set_access_token(self.token.clone());
        Ok(client)
    }

    /// Lets the probe carry these out, all at the same time.
    pub(super) fn probe(&self, probes: &[Probe]) -> Result<Vec<Finding>, SandboxError> {
        let longest = probes
            .iter()
            .map(|probe| probe.within_ms * (1 + actions(probe)))
            .max();
        let patience = PATIENCE + Duration::from_millis(longest.unwrap_or(0));
        let said = self.exec("run the probe", PROBE, &[&order(probes)?], patience)?;
        let lines = said
            .split(|byte| *byte == b'\n')
            .filter(|line| !line.is_empty());
        lines
            .map(|line| {
                serde_json::from_slice(line)
                    .map_err(|error| failed("read the probe", error.to_string()))
            })
            .collect()
    }

    /// The same, but nobody waits for it or hears what it finds.
    pub(super) fn probe_unheard(&self, probes: &[Probe]) -> Result<(), SandboxError> {
        let script = "setsid \"$0\" \"$1\" >/dev/null 2>&1 </dev/null &";
        let arguments = ["-c", script, PROBE, &order(probes)?];
        self.exec("start the probe", "sh", &arguments, PATIENCE)
            .map(|_| ())
    }

    /// Begins to keep its CPU busy; what ends it.
    pub(super) fn compute(&self) -> Result<String, SandboxError> {
        let script = "setsid sh -c 'while :; do :; done' >/dev/null 2>&1 </dev/null & echo $!";
        let said = self.exec("keep it busy", "sh", &["-c", script], PATIENCE)?;
        Ok(String::from_utf8_lossy(&said).trim().to_owned())
    }

    /// Ends what [`Guest::compute`] began.
    pub(super) fn stop_computing(&self, computing: &str) -> Result<(), SandboxError> {
        let arguments = ["-c", "kill -9 \"$0\"", computing];
        self.exec("let it rest", "sh", &arguments, PATIENCE)
            .map(|_| ())
    }

    /// Datagrams that its kernel was given for ports at which nobody listens.
    pub(super) fn datagrams_for_nobody(&self) -> Result<u64, SandboxError> {
        let doing = "read what its kernel was given";
        let said = self.exec(doing, "cat", &["/proc/net/snmp"], PATIENCE)?;
        let text = String::from_utf8_lossy(&said).into_owned();
        let mut udp = text.lines().filter_map(|line| line.strip_prefix("Udp:"));
        let (names, values) = (udp.next().unwrap_or(""), udp.next().unwrap_or(""));
        let mut both = names.split_whitespace().zip(values.split_whitespace());
        let found = both.find(|(name, _)| *name == "NoPorts");
        found
            .and_then(|(_, value)| value.parse().ok())
            .ok_or_else(|| failed(doing, text))
    }

    /// Standard output of a command that has to succeed, as root.
    fn exec(
        &self,
        doing: &str,
        program: &str,
        arguments: &[&str],
        patience: Duration,
    ) -> Result<Vec<u8>, SandboxError> {
        let request = ExecRequest {
            user: Some("root".to_owned()),
            ..ExecRequest::new(program, arguments)
        };
        let mut client = self.agent(doing)?;
        let done = client
            .exec(&request, patience)
            .map_err(|error| failed(doing, chain(&error)))?;
        match done.exit_code {
            0 => Ok(done.stdout),
            _ => {
                let said = String::from_utf8_lossy(&done.stderr);
                Err(failed(doing, format!("{}: {}", done.status, said.trim())))
            }
        }
    }

    /// What it was refused, oldest first.
    pub(super) fn events(&self) -> Result<Vec<NetworkEvent>, SandboxError> {
        let path = format!("/sandboxes/{}/network/events", self.id);
        accepted(
            "read the events",
            &self.customer.ask("GET", &path, None)?,
            200,
        )
    }

    /// The events, as soon as they satisfy `enough`, or what there is at the deadline.
    pub(super) fn await_events(
        &self,
        deadline: Instant,
        enough: impl Fn(&[NetworkEvent]) -> bool,
    ) -> Result<Vec<NetworkEvent>, SandboxError> {
        loop {
            let events = self.events()?;
            if enough(&events) || Instant::now() > deadline {
                return Ok(events);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Replaces its policy.
    pub(super) fn update(&self, options: &Value) -> Result<(), SandboxError> {
        let path = format!("/sandboxes/{}/network", self.id);
        done(
            "change the policy",
            &self.customer.ask("PUT", &path, Some(options))?,
            &[204],
        )
    }

    /// Pauses it and wakes it again.
    pub(super) fn pause_and_resume(&self) -> Result<(), SandboxError> {
        let path = format!("/sandboxes/{}/pause", self.id);
        done(
            "pause",
            &self.customer.ask("POST", &path, Some(&json!({})))?,
            &[204],
        )?;
        let path = format!("/v2/sandboxes/{}/connect", self.id);
        let body = json!({ "timeout": LIFETIME_S });
        done(
            "resume",
            &self.customer.ask("POST", &path, Some(&body))?,
            &[200, 201],
        )
    }

    /// A copy of it.
    pub(super) fn fork(&self) -> Result<Self, SandboxError> {
        let path = format!("/sandboxes/{}/fork", self.id);
        let body = json!({ "timeout": LIFETIME_S, "count": 1 });
        let answer = self.customer.ask("POST", &path, Some(&body))?;
        let forks: Vec<Forked> = accepted("fork", &answer, 201)?;
        let first = forks.into_iter().find_map(|fork| fork.sandbox);
        let created = first.ok_or_else(|| failed("fork", "there is none among the answers"))?;
        Ok(self.customer.guest(created))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Its lifetime ends what cannot be ended now.
        let _ = self
            .customer
            .ask("DELETE", &format!("/sandboxes/{}", self.id), None);
    }
}

fn order(probes: &[Probe]) -> Result<String, SandboxError> {
    let order = Order {
        probes: probes.to_vec(),
    };
    serde_json::to_string(&order).map_err(|error| failed("write an order", error.to_string()))
}

fn actions(probe: &Probe) -> u64 {
    u64::try_from(probe.first.len()).unwrap_or(u64::MAX)
}

fn done(doing: &str, answer: &HttpAnswer, wanted: &[u16]) -> Result<(), SandboxError> {
    if wanted.contains(&answer.status) {
        Ok(())
    } else {
        Err(refused(doing, answer))
    }
}

fn accepted<T: for<'a> Deserialize<'a>>(
    doing: &str,
    answer: &HttpAnswer,
    status: u16,
) -> Result<T, SandboxError> {
    done(doing, answer, &[status])?;
    serde_json::from_slice(&answer.body).map_err(|error| failed(doing, error.to_string()))
}

fn refused(doing: &str, answer: &HttpAnswer) -> SandboxError {
    let body: String = String::from_utf8_lossy(&answer.body)
        .chars()
        .take(300)
        .collect();
    failed(doing, format!("status {}: {body}", answer.status))
}
