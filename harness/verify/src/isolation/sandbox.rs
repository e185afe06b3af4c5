//! Sandboxes of the isolation suite: runs the probe in them, and reads their refusals from the API.

use std::{
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use envd::ExecRequest;
use model::chain;
use netprobe::{Finding, Order, Probe};
use serde::Deserialize;
use serde_json::{Map, Value};
use testbed::api::Api;

use crate::sandbox::{Account, Sandbox, SandboxError, decode, failed};

/// Path of the probe in a sandbox.
const PROBE: &str = "/usr/local/bin/cube-netprobe";
/// Time limit of one request.
pub(super) const TIMEOUT: Duration = Duration::from_secs(60);
const LIFETIME_S: u32 = 300;
/// Time between two reads of a sandbox's events.
const EVENT_POLL: Duration = Duration::from_millis(50);

/// An event of `GET /sandboxes/{id}/network/events`, without the fields that are not used here.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct NetworkEvent {
    pub(super) reason: String,
    pub(super) destination: SocketAddr,
    pub(super) name: Option<String>,
    pub(super) count: u64,
}

/// Creates sandboxes that contain the probe.
#[derive(Clone, Debug)]
pub(super) struct Customer {
    pub(super) account: Account,
    /// The probe's bytes.
    program: Vec<u8>,
}

impl Customer {
    pub(super) fn new(api: Api, template: &str, program: Vec<u8>) -> Self {
        let account = Account {
            api,
            template: template.to_owned(),
            lifetime_s: LIFETIME_S,
        };
        Self { account, program }
    }

    /// Creates a sandbox with these options and installs the probe.
    pub(super) fn create(&self, options: &Map<String, Value>) -> Result<Sandbox, SandboxError> {
        const ACTION: &str = "install the probe";
        let sandbox = self.account.create(options)?;
        let written = sandbox
            .agent()?
            .write_file(PROBE, &self.program, Some("root"));
        written.map_err(|error| failed(ACTION, chain(&error)))?;
        sandbox.exec_as_root(ACTION, "chmod", &["755", PROBE], TIMEOUT)?;
        Ok(sandbox)
    }
}

impl Sandbox {
    /// Runs probes, all at the same time, and returns their findings.
    pub(super) fn probe(&self, probes: &[Probe]) -> Result<Vec<Finding>, SandboxError> {
        let longest = probes
            .iter()
            .map(|probe| probe.within_ms * (1 + actions(probe)))
            .max();
        let timeout = TIMEOUT + Duration::from_millis(longest.unwrap_or(0));
        let output = self.exec_as_root("run the probe", PROBE, &[&order(probes)?], timeout)?;
        let lines = output.split(|byte| *byte == b'\n');
        lines
            .filter(|line| !line.is_empty())
            .map(|line| {
                serde_json::from_slice(line)
                    .map_err(|error| failed("read the probe's findings", error.to_string()))
            })
            .collect()
    }

    /// Starts probes in the background; their findings are lost.
    pub(super) fn start_probes(&self, probes: &[Probe]) -> Result<(), SandboxError> {
        let script = "setsid \"$0\" \"$1\" >/dev/null 2>&1 </dev/null &";
        let arguments = ["-c", script, PROBE, &order(probes)?];
        self.exec_as_root("start the probe", "sh", &arguments, TIMEOUT)
            .map(drop)
    }

    /// Starts an endless loop. Returns its process id, for [`Sandbox::stop_computing`].
    pub(super) fn compute(&self) -> Result<String, SandboxError> {
        let script = "setsid sh -c 'while :; do :; done' >/dev/null 2>&1 </dev/null & echo $!";
        let output = self.exec_as_root("start a busy loop", "sh", &["-c", script], TIMEOUT)?;
        Ok(String::from_utf8_lossy(&output).trim().to_owned())
    }

    pub(super) fn stop_computing(&self, pid: &str) -> Result<(), SandboxError> {
        let arguments = ["-c", "kill -9 \"$0\"", pid];
        self.exec_as_root("stop the busy loop", "sh", &arguments, TIMEOUT)
            .map(drop)
    }

    /// Datagrams that the guest's kernel received for UDP ports without a socket.
    pub(super) fn datagrams_without_socket(&self) -> Result<u64, SandboxError> {
        const ACTION: &str = "read /proc/net/snmp";
        let output = self.exec_as_root(ACTION, "cat", &["/proc/net/snmp"], TIMEOUT)?;
        let text = String::from_utf8_lossy(&output).into_owned();
        let mut udp = text.lines().filter_map(|line| line.strip_prefix("Udp:"));
        let (names, values) = (udp.next().unwrap_or(""), udp.next().unwrap_or(""));
        let mut both = names.split_whitespace().zip(values.split_whitespace());
        let found = both.find(|(name, _)| *name == "NoPorts");
        found
            .and_then(|(_, value)| value.parse().ok())
            .ok_or_else(|| failed(ACTION, text))
    }

    fn exec_as_root(
        &self,
        action: &str,
        program: &str,
        arguments: &[&str],
        timeout: Duration,
    ) -> Result<Vec<u8>, SandboxError> {
        let request = ExecRequest {
            user: Some("root".to_owned()),
            ..ExecRequest::new(program, arguments)
        };
        self.exec(action, &request, timeout)
    }

    /// Refused packets and names, oldest first.
    pub(super) fn events(&self) -> Result<Vec<NetworkEvent>, SandboxError> {
        let answer = self.request("GET", "/network/events", None, &[200])?;
        decode("read the events", &answer, 200)
    }

    /// Reads the events until `enough` accepts them, or until the deadline. Returns the last events read.
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
            thread::sleep(EVENT_POLL);
        }
    }

    /// Replaces the sandbox's policy.
    pub(super) fn update(&self, options: &Value) -> Result<(), SandboxError> {
        self.request("PUT", "/network", Some(options), &[204])
            .map(drop)
    }

    pub(super) fn pause_and_resume(&self) -> Result<(), SandboxError> {
        self.pause()?;
        self.connect().map(drop)
    }

    pub(super) fn fork_once(&self) -> Result<Self, SandboxError> {
        let fork = self.fork(1)?.pop();
        fork.ok_or_else(|| failed("fork", "the answer is empty"))
    }
}

fn order(probes: &[Probe]) -> Result<String, SandboxError> {
    let order = Order {
        probes: probes.to_vec(),
    };
    serde_json::to_string(&order)
        .map_err(|error| failed("encode the probe's order", error.to_string()))
}

fn actions(probe: &Probe) -> u64 {
    u64::try_from(probe.first.len()).unwrap_or(u64::MAX)
}
