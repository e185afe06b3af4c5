//! The classes `l7` and `secrets`: test whether a sandbox can send a request past the egress proxy or get a rule's
//! header sent to another host, and whether a secret can be found anywhere after its use.
//!
//! ```text
//! l7.toml ─► l7.py in a sandbox ─► cube-egress ─► origins, outside ─┐
//!              │ findings                          what arrived ────┼─► judge ─► report
//!              └───────────────► cube-api: events ──────────────────┘
//! secrets: memory, disk, records, logs, … ─► scan: the secret, and a text that was planted there
//! ```
//! One server and one sandbox serve all cases. Each case sends its name, by which the outside servers recognize it.

mod attempts;
mod judge;
mod oracle;
mod origin;
mod scan;
mod secrets;

use std::{
    ffi::OsString,
    fs,
    io::Read,
    path::Path,
    time::{Duration, Instant},
};

use envd::ExecRequest;
use serde::Deserialize;
use serde_json::{Value, json};
use testbed::{
    artifacts,
    server::{Door, LocalServer, ServerSpec},
};

use super::{
    IsolationSpec,
    cases::Class,
    world::{NAME_SERVER, UPLINK, World},
};
use crate::{
    process,
    report::Case,
    sandbox::{Account, Sandbox, SandboxError, decode, failed},
    setup::{VerifyError, api_of, at},
};
use attempts::{Attempts, PROGRAM, load};
use judge::{Finding, Refusal, Seen, is_recorded, judge};
pub(super) use origin::Origins;
use scan::Needles;

/// Timeout of one request. The attempts take some seconds, and longer if many of them get no response.
const TIMEOUT: Duration = Duration::from_secs(120);
const LIFETIME_S: u32 = 300;
/// Time within which the server must list a refusal.
const EVENT_TIMEOUT: Duration = Duration::from_secs(5);
const EVENT_POLL: Duration = Duration::from_millis(50);

/// Prefix of the names of the cases that use the secret.
const USE: &str = "l7-rule-applies";

/// Names of the cases of both classes.
pub(super) fn names() -> Result<Vec<(Class, String)>, VerifyError> {
    let attempts = load()?.cases.into_iter().map(|case| (Class::L7, case.name));
    let places = secrets::PLACES
        .iter()
        .map(|(name, _)| (Class::Secrets, (*name).to_owned()));
    Ok(attempts.chain(places).collect())
}

/// The selected cases.
pub(super) struct Selection {
    attempts: Attempts,
    places: Vec<&'static str>,
}

pub(super) fn select(spec: &IsolationSpec) -> Result<Selection, VerifyError> {
    let mut attempts = load()?;
    let is_named = |name: &str, class: Class| {
        spec.only.is_empty()
            || spec
                .only
                .iter()
                .any(|only| only == name || only == class.name())
    };
    attempts
        .cases
        .retain(|case| is_named(&case.name, Class::L7));
    let places = secrets::PLACES.map(|(name, _)| name);
    let places = places
        .into_iter()
        .filter(|name| is_named(name, Class::Secrets));
    Ok(Selection {
        attempts,
        places: places.collect(),
    })
}

impl Selection {
    pub(super) fn is_empty(&self) -> bool {
        self.attempts.cases.is_empty() && self.places.is_empty()
    }
}

/// A server with the proxy, and a sandbox with rules.
struct Scene {
    // Dropped in this order.
    sandbox: Sandbox,
    server: LocalServer,
    account: Account,
    needles: Needles,
}

/// A process of the server, or one started by the server.
struct Process {
    pid: u32,
    /// File name of its program.
    program: String,
}

/// Tries the selected cases.
pub(super) fn run(
    world: &World,
    spec: &IsolationSpec,
    selection: &Selection,
) -> Result<Vec<Case>, VerifyError> {
    let run_dir = spec.setup.run_dir()?;
    let scene = Scene::open(world, spec, &selection.attempts, run_dir.path())?;
    let mut attempts = selection.attempts.clone();
    // Run these last, because they put the secret into the guest's memory.
    let echoed = attempts.split_off_echoed();
    let mut reports = Vec::new();
    if attempts.cases.is_empty() {
        // The search is meaningful only after the secret was used.
        attempts = load()?;
        attempts.cases.retain(|case| case.name.starts_with(USE));
        scene.attempt(world, &attempts)?;
    } else {
        reports.extend(scene.judged(world, &attempts, run_dir.path(), spec.oracle.as_deref())?);
    }
    if !selection.places.is_empty() {
        eprintln!(
            "cube-bench: searching {} places for secrets",
            selection.places.len()
        );
        secrets::plant(&scene)?;
        let found = secrets::search(&scene)?;
        let wanted = |case: &Case| selection.places.contains(&&*case.name);
        reports.extend(found.into_iter().filter(wanted));
    }
    if !echoed.cases.is_empty() {
        reports.extend(scene.judged(world, &echoed, run_dir.path(), None)?);
    }
    Ok(reports)
}

impl Scene {
    fn open(
        world: &World,
        spec: &IsolationSpec,
        attempts: &Attempts,
        dir: &Path,
    ) -> Result<Self, VerifyError> {
        let needles = Needles::new(&random()?);
        let authority = dir.join(secrets::authority_file(&needles));
        fs::write(&authority, &world.origins.authority).map_err(at(&authority))?;
        let server = LocalServer::start(dir, server(spec, &authority)?)?;
        let account = Account {
            api: api_of(&server, TIMEOUT),
            template: spec.setup.template.clone(),
            lifetime_s: LIFETIME_S,
        };
        let secret = json!({ "name": "l7", "value": needles.secret });
        let made = account.request("POST", "/secrets", Some(&secret))?;
        crate::sandbox::expect("create the secret", &made, &[201])?;
        let mut create = attempts.create.clone();
        create.insert("metadata".to_owned(), secrets::metadata(&needles));
        let sandbox = account.create(&create)?;
        Ok(Self {
            sandbox,
            server,
            account,
            needles,
        })
    }

    /// Makes the attempts and judges them.
    fn judged(
        &self,
        world: &World,
        attempts: &Attempts,
        dir: &Path,
        oracle: Option<&Path>,
    ) -> Result<Vec<Case>, VerifyError> {
        let count = attempts.cases.len();
        eprintln!("cube-bench: {count} attempts against the egress proxy");
        let seen = self.attempt(world, attempts)?;
        let secret = &self.needles.secret;
        if let Some(program) = oracle {
            oracle::compare(world, dir, program, attempts, &seen, secret)?;
        }
        Ok(attempts
            .cases
            .iter()
            .map(|case| judge(case, &seen, secret))
            .collect())
    }

    /// Makes the attempts in the sandbox, and collects the observations of all sides.
    fn attempt(&self, world: &World, attempts: &Attempts) -> Result<Seen, SandboxError> {
        const ACTION: &str = "make the attempts";
        // A refused name, which therefore appears in records and logs.
        let name = secrets::refused_name(&self.needles);
        self.sh(&format!("getent hosts {name} || true"))?;
        let order = attempts.order().to_string();
        for (path, text) in [("/tmp/l7.py", PROGRAM), ("/tmp/l7.json", order.as_str())] {
            let written = self
                .sandbox
                .agent()?
                .write_file(path, text.as_bytes(), None);
            written.map_err(|error| failed(ACTION, model::chain(&error)))?;
        }
        world.origins.take();
        let said = self.sh("python3 /tmp/l7.py /tmp/l7.json")?;
        let mut seen = Seen {
            findings: findings(&said)?,
            ..Seen::default()
        };
        let deadline = Instant::now() + EVENT_TIMEOUT;
        loop {
            seen.refusals = self.refusals()?;
            let is_complete = attempts
                .cases
                .iter()
                .all(|case| is_recorded(case, &seen.refusals));
            if is_complete || Instant::now() > deadline {
                break;
            }
            std::thread::sleep(EVENT_POLL);
        }
        seen.arrivals = world.origins.take();
        Ok(seen)
    }

    fn refusals(&self) -> Result<Vec<Refusal>, SandboxError> {
        #[derive(Deserialize)]
        struct Event {
            reason: String,
            name: Option<String>,
            call: Option<Value>,
        }
        let answer = self
            .sandbox
            .request("GET", "/network/events", None, &[200])?;
        let events: Vec<Event> = decode("read the events", &answer, 200)?;
        let refused = events.into_iter().filter(|event| event.reason == "proxy");
        let about = |event: Event| {
            let path = event.call.as_ref().and_then(|call| call["path"].as_str());
            Refusal {
                about: format!(
                    "{} {}",
                    event.name.as_deref().unwrap_or(""),
                    path.unwrap_or("")
                ),
            }
        };
        Ok(refused.map(about).collect())
    }

    fn sh(&self, script: &str) -> Result<Vec<u8>, SandboxError> {
        let request = ExecRequest {
            user: Some("root".to_owned()),
            ..ExecRequest::new("/bin/sh", &["-c", script])
        };
        self.sandbox
            .exec("run a script in the sandbox", &request, TIMEOUT)
    }

    /// The body of a response from the control plane.
    fn request(&self, method: &str, path: &str) -> Result<Vec<u8>, SandboxError> {
        let answer = self.account.request(method, path, None)?;
        crate::sandbox::expect(&format!("{method} {path}"), &answer, &[200])?;
        Ok(answer.body)
    }

    /// The server's processes, and processes started by them.
    fn processes(&self) -> Vec<Process> {
        let server = self.server.pid();
        let parent = |pid: u32| process::status(pid, "PPid")?.parse::<u32>().ok();
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let ours = pids.filter(|pid| *pid == server || parent(*pid) == Some(server));
        let process = |pid| {
            let program = process::link(pid, "exe").unwrap_or_default();
            let program = program.file_name().unwrap_or_default();
            Process {
                pid,
                program: program.to_string_lossy().into_owned(),
            }
        };
        ours.map(process).collect()
    }
}

fn findings(output: &[u8]) -> Result<Vec<Finding>, SandboxError> {
    let lines = output
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty());
    let finding = |line: &[u8]| {
        serde_json::from_slice(line)
            .map_err(|error| failed("read what the guest saw", error.to_string()))
    };
    lines.map(finding).collect()
}

fn random() -> Result<String, VerifyError> {
    let source = Path::new("/dev/urandom");
    let mut bytes = [0; 8];
    let read = fs::File::open(source).and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(at(source))?;
    Ok(format!("{:016x}", u64::from_ne_bytes(bytes)))
}

fn server(spec: &IsolationSpec, authority: &Path) -> Result<ServerSpec, VerifyError> {
    let mut server = spec.setup.server(0)?;
    let proxy = artifacts::find_egress(spec.egress.as_deref())?;
    let proxy = proxy.to_string_lossy().into_owned();
    let options = [
        "--uplink",
        UPLINK,
        "--dns-server",
        NAME_SERVER,
        "--egress-calls",
        "--egress-proxy",
    ];
    // A key would not have the right to read metrics.
    server.door = Door::Open;
    server.options = options.map(str::to_owned).to_vec();
    server.options.push(proxy);
    server.environment = vec![
        ("SSL_CERT_FILE".to_owned(), authority.into()),
        ("CUBE_LOG".to_owned(), OsString::from("trace")),
    ];
    Ok(server)
}
