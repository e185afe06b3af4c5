//! The tested site: E2B's API of a server, and the server's processes if the suite started it.

use std::{
    collections::BTreeMap,
    sync::Mutex,
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use envd::{ClientError, ENVD_PORT, EnvdClient, ExecRequest, HttpAnswer, Timestamp};
use model::{chain, clock::nanoseconds};
use rest::{ForkResult, ListedSandbox, SandboxState, SnapshotInfo};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use testbed::{
    api::{Api, Created},
    endpoint::{DialError, Wire},
};

use super::{
    local::Local,
    plan::{Action, AtDeadline, Keep, Place},
    play::SOON_S,
    site::{Guest, Miss, Reply, Seen, Site},
};

/// Lifetime of sandboxes in seconds: longer than any episode. Ends sandboxes that a killed suite left behind.
const LIFETIME_S: u32 = 3600;
/// Key of the label by which this run's sandboxes are listed.
const LABEL: &str = "cube-bench-lifecycle";
const MAX_QUOTE: usize = 300;

/// Files for the values. The first is on the disk. The second is in memory and names a process whose environment
/// has the value; it is replaced once the process runs, so it never names an older one.
const WRITE_DISK: &str = "f=/var/tmp/lifecycle; echo $1 >$f.$$ && sync $f.$$ && mv $f.$$ $f";
const READ_DISK: &str = "cat /var/tmp/lifecycle 2>/dev/null || echo 0";
const WRITE_MEMORY: &str = "f=/dev/shm/lifecycle
HELD=$1 setsid sleep 1000000 </dev/null >/dev/null 2>&1 &
until grep -qz ^HELD=$1$ /proc/$!/environ && read -r name </proc/$!/comm && [ $name = sleep ]; do sleep 0.01; done
echo $! >$f.$$ && mv $f.$$ $f";
const READ_MEMORY: &str = "p=$(cat /dev/shm/lifecycle 2>/dev/null) || { echo 0; exit; }
tr '\\0' '\\n' </proc/$p/environ | sed -n s/^HELD=//p";

/// A server, by its API.
#[derive(Debug)]
pub(super) struct E2b {
    pub(super) api: Api,
    pub(super) template: String,
    /// Value of the label.
    pub(super) label: String,
    /// The processes and directories of the server. `None`: the suite did not start the server.
    pub(super) local: Option<Mutex<Local>>,
}

impl From<DialError> for Miss {
    fn from(error: DialError) -> Self {
        Self::NotSent(chain(&error))
    }
}

/// A failure of a request to the agent.
fn of_agent(error: ClientError) -> Miss {
    match &error {
        ClientError::Refused {
            status: 502,
            message,
            ..
        } if message.contains("was not found") => Miss::NotFound,
        ClientError::Refused { status: 429, .. } => Miss::Busy(chain(&error)),
        _ => Miss::Failed(chain(&error)),
    }
}

fn quote(answer: &HttpAnswer) -> String {
    let body = String::from_utf8_lossy(&answer.body);
    let body = body.chars().take(MAX_QUOTE);
    let body: String = body.map(|c| if c.is_control() { ' ' } else { c }).collect();
    format!("status {}: {body}", answer.status)
}

fn decode<T: DeserializeOwned>(answer: &HttpAnswer) -> Result<T, Miss> {
    serde_json::from_slice(&answer.body)
        .map_err(|error| Miss::Wrong(format!("{error}: {}", quote(answer))))
}

fn guest(created: Created) -> Result<Guest, Miss> {
    created
        .check()
        .map_err(|fault| Miss::Wrong(fault.to_owned()))?;
    Ok(Guest {
        id: created.sandbox_id,
        token: created.envd_access_token,
    })
}

impl E2b {
    /// Sends a request to the control plane.
    fn send(&self, method: &str, path: &str, body: Option<Value>) -> Result<HttpAnswer, Miss> {
        let mut client = self.api.connect(&self.api.control)?;
        let body = body.map(|body| body.to_string()).unwrap_or_default();
        let answer = self.api.request(&mut client, method, path, body.as_bytes());
        answer.map_err(|error| Miss::Failed(chain(&error)))
    }

    /// Sends a request to the control plane. Statuses from 200 to 299 are successes.
    fn request(&self, method: &str, path: &str, body: Option<Value>) -> Result<HttpAnswer, Miss> {
        let answer = self.send(method, path, body)?;
        match answer.status {
            200..=299 => Ok(answer),
            404 => Err(Miss::NotFound),
            409 => Err(Miss::Conflict),
            429 | 507 => Err(Miss::Busy(quote(&answer))),
            _ => Err(Miss::Failed(quote(&answer))),
        }
    }

    fn on(&self, method: &str, of: &Guest, path: &str, body: Value) -> Result<HttpAnswer, Miss> {
        let path = format!("/sandboxes/{}{path}", of.id);
        self.request(method, &path, Some(body))
    }

    /// Runs a script with one argument in the sandbox. Returns the first line of its output.
    fn script(&self, on: &Guest, script: &str, argument: u32) -> Result<String, Miss> {
        let data = self.api.data_endpoint(&on.id, ENVD_PORT);
        let data = data.map_err(|error| Miss::Wrong(error.to_string()))?;
        let mut agent: EnvdClient<Wire> = self.api.connect(&data)?;
        let created = Created {
            sandbox_id: on.id.clone(),
            envd_access_token: on.token.clone(),
            traffic_access_token: None,
        };
        created.route(&mut agent, &data, ENVD_PORT);
        let args = ["-c", script, "sh", &argument.to_string()];
        let done = agent.exec(&ExecRequest::new("/bin/sh", &args), self.api.timeout);
        let done = done.map_err(of_agent)?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if done.exit_code != 0 {
            let what = format!(
                "the command ended with {}: {}",
                done.status,
                text(&done.stderr)
            );
            return Err(Miss::Wrong(what));
        }
        Ok(text(&done.stdout))
    }

    fn write(&self, on: &Guest, place: Place, value: u32) -> Result<Reply, Miss> {
        let script = match place {
            Place::Disk => WRITE_DISK,
            Place::Memory => WRITE_MEMORY,
        };
        self.script(on, script, value).map(|_| Reply::Done)
    }

    fn read(&self, on: &Guest, place: Place) -> Result<Reply, Miss> {
        let script = match place {
            Place::Disk => READ_DISK,
            Place::Memory => READ_MEMORY,
        };
        let text = self.script(on, script, 0)?;
        let value = text.parse();
        value
            .map(Reply::Value)
            .map_err(|_| Miss::Wrong(format!("the value in the {place} is {text:?}")))
    }

    fn detail(&self, of: &Guest) -> Result<Detail, Miss> {
        decode(&self.request("GET", &format!("/sandboxes/{}", of.id), None)?)
    }

    fn look(&self, on: &Guest) -> Result<Reply, Miss> {
        match self.detail(on) {
            Ok(detail) => Ok(Reply::State(seen(detail.state))),
            Err(Miss::NotFound) => Ok(Reply::State(Seen::Absent)),
            Err(miss) => Err(miss),
        }
    }
}

/// The fields of `GET /sandboxes/{id}` that are used here.
#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct Detail {
    state: SandboxState,
    end_at: Timestamp,
}

fn seen(state: SandboxState) -> Seen {
    match state {
        SandboxState::Running => Seen::Running,
        SandboxState::Paused => Seen::Paused,
    }
}

impl Site for E2b {
    fn create(&self, from: Option<&str>, at_deadline: AtDeadline) -> Result<Guest, Miss> {
        let body = json!({
            "templateID": from.unwrap_or(&self.template),
            "timeout": LIFETIME_S,
            "autoPause": at_deadline == AtDeadline::Pause,
            "metadata": { LABEL: self.label },
        });
        let answer = self.request("POST", "/v2/sandboxes", Some(body))?;
        guest(decode(&answer)?)
    }

    fn fork(&self, of: &Guest) -> Result<Guest, Miss> {
        let answer = self.on("POST", of, "/fork", json!({ "timeout": LIFETIME_S }))?;
        let mut forks: Vec<ForkResult> = decode(&answer)?;
        let fork = forks.pop().filter(|_| forks.is_empty());
        let fork = fork.ok_or_else(|| Miss::Wrong(quote(&answer)))?;
        match (fork.sandbox, fork.error) {
            (Some(sandbox), None) => guest(Created {
                sandbox_id: sandbox.sandbox_id,
                envd_access_token: sandbox.envd_access_token,
                traffic_access_token: sandbox.traffic_access_token,
            }),
            (None, Some(error)) if matches!(error.code, 429 | 507) => {
                Err(Miss::Busy(error.message))
            }
            (_, error) => Err(Miss::Failed(format!("{error:?}"))),
        }
    }

    fn snapshot(&self, of: &Guest) -> Result<String, Miss> {
        let answer = self.on("POST", of, "/snapshots", json!({}))?;
        let made: SnapshotInfo = decode(&answer)?;
        Ok(made.snapshot_id)
    }

    fn remove_snapshot(&self, id: &str) -> Result<(), Miss> {
        self.request("DELETE", &format!("/templates/{id}"), None)
            .map(drop)
    }

    fn keeps_template(&self) -> Result<(), String> {
        if self.local.is_none() {
            return Ok(());
        }
        let path = format!("/templates/{}", self.template);
        match self.send("DELETE", &path, None) {
            Ok(answer) if answer.status == 403 => Ok(()),
            Ok(answer) => Err(format!(
                "deletion of the installed template: {} instead of status 403",
                quote(&answer)
            )),
            Err(miss) => Err(format!("deletion of the installed template: {miss:?}")),
        }
    }

    fn act(&self, on: &Guest, action: Action) -> Result<Reply, Miss> {
        let timeout = json!({ "timeout": LIFETIME_S });
        let reply = |answer: HttpAnswer| match (action, answer.status) {
            (Action::Connect, 200) => Reply::WasRunning,
            (Action::Connect | Action::Resume, _) => Reply::Resumed,
            _ => Reply::Done,
        };
        let answer = match action {
            Action::Exec => {
                let said = self.script(on, "echo $1", 42)?;
                return match said.as_str() {
                    "42" => Ok(Reply::Done),
                    _ => Err(Miss::Wrong(format!(
                        "the command printed {said:?} instead of 42"
                    ))),
                };
            }
            Action::Write(place, value) => return self.write(on, place, value),
            Action::Read(place) => return self.read(on, place),
            Action::Look => return self.look(on),
            Action::Pause(keep) => {
                let body = json!({ "memory": keep == Keep::All });
                self.on("POST", on, "/pause", body)
            }
            Action::Connect => self.on("POST", on, "/connect", timeout),
            Action::Resume => self.on("POST", on, "/resume", timeout),
            Action::Extend => self.on("POST", on, "/timeout", timeout),
            Action::Expire => self.on("POST", on, "/timeout", json!({ "timeout": SOON_S })),
            Action::Kill => self.request("DELETE", &format!("/sandboxes/{}", on.id), None),
            Action::Snapshot(_) | Action::Fork(_) | Action::Deadline | Action::KillVmm => {
                return Err(Miss::Wrong(format!("{action} is not a plain request")));
            }
        };
        answer.map(reply)
    }

    fn ends_soon(&self, of: &Guest) -> bool {
        let half = Duration::from_secs(u64::from(LIFETIME_S) / 2);
        let far = SystemTime::now() + half;
        let far = far.duration_since(UNIX_EPOCH).map_or(0, nanoseconds);
        let far = Timestamp::from_unix_ns(far);
        self.detail(of).map_or(true, |detail| detail.end_at < far)
    }

    fn list(&self) -> Result<BTreeMap<String, Seen>, Miss> {
        // Both are plain words, so the three encodings of the official clients are equivalent.
        let path = format!(
            "/v2/sandboxes?state=running&state=paused&limit=100&metadata={LABEL}%3D{}",
            self.label
        );
        let answer = self.request("GET", &path, None)?;
        let listed: Vec<ListedSandbox> = decode(&answer)?;
        Ok(listed
            .into_iter()
            .map(|s| (s.sandbox_id, seen(s.state)))
            .collect())
    }

    fn kill_server(&self, twice: bool) -> Result<(), String> {
        match self.local.as_ref().map(Mutex::lock) {
            Some(Ok(mut local)) => local.kill_server(twice),
            _ => Err("the server cannot be killed: the suite did not start it".to_owned()),
        }
    }

    fn kill_vmm(&self, of: &Guest) -> Option<Result<(), String>> {
        let dir = self.local.as_ref()?.lock().ok()?.dir_of(&of.id);
        let killed = super::local::kill_vmm(&dir)?;
        if let Err(error) = killed {
            return Some(Err(format!("cannot kill the VMM of {}: {error}", of.id)));
        }
        let mut polls = super::local::polls();
        loop {
            match self.look(of) {
                Ok(Reply::State(Seen::Absent | Seen::Paused)) => return Some(Ok(())),
                // The sandbox was paused when its VMM was killed, and has been resumed since.
                _ if super::local::has_vmm(&dir) => return Some(Ok(())),
                last => {
                    if polls.next().is_none() {
                        let what = format!("{}: its VMM was killed, and it is {last:?}", of.id);
                        return Some(Err(what));
                    }
                    thread::sleep(Duration::from_millis(5));
                }
            }
        }
    }

    fn leaks(&self, sandboxes: &[&str], snapshots: &[&str]) -> Vec<String> {
        match self.local.as_ref().map(Mutex::lock) {
            Some(Ok(local)) => local.leaks(sandboxes, snapshots),
            _ => Vec::new(),
        }
    }
}
