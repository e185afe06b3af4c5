//! The cases for VMMs that the pool of a server starts, which must be confined like those that this suite starts, and for
//! the connections of the server's egress proxy.

use std::{
    fs,
    time::{Duration, Instant},
};

use serde_json::Map;
use testbed::{leftovers, server::LocalServer};

use super::{
    ConfinementSpec,
    attempts::{self, Attempt, Class},
    clone::Cloner,
    intruder::{Intruder, Relation},
    process,
    scene::Scene,
    services::CONNECTIONS,
    state,
    trial::{not_tried, try_in},
};
use crate::{
    report::Case,
    sandbox::{Account, Sandbox},
    setup::{VerifyError, api_of},
};

/// Prefix of the names of the cases in this module.
const PREFIX: &str = "pool-";
/// Prefix of the names of those in the egress proxy.
const EGRESS: &str = "egress-";
/// Number of sandboxes whose state is checked.
const SANDBOXES: u32 = 3;
/// Sandboxes that the server keeps ready: fewer than `SANDBOXES`, so that some are started on request.
const WARM: u32 = 2;
/// Time limit of a request to the server.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Lifetime of each sandbox, in seconds.
const LIFETIME_S: u32 = 3600;
/// Attempts that are repeated here, from different classes.
const ATTEMPTS: [&str; 10] = [
    "file-read-secret",
    "file-create-in-public",
    "memory-read-by-proc",
    "socket-path",
    "signal-neighbour",
    "process-program",
    "code-page-made-executable",
    "device-kvm",
    "descriptor-give-away",
    "namespace-user",
];

pub(super) fn is_case(name: &str) -> bool {
    if let Some(name) = name.strip_prefix(EGRESS) {
        return CONNECTIONS.contains(&name);
    }
    let Some(name) = name.strip_prefix(PREFIX) else {
        return false;
    };
    ATTEMPTS.contains(&name) || state::NAMES.contains(&name)
}

/// Starts a server, makes some of the attempts in its sandboxes, and checks the state of their VMMs.
pub(super) fn prove(
    spec: &ConfinementSpec,
    scene: &mut Scene,
    cloner: &Cloner,
) -> Result<Vec<Case>, VerifyError> {
    let tried: Vec<&Attempt> = attempts::all()
        .into_iter()
        .filter(|a| ATTEMPTS.contains(&a.name))
        .filter(|a| spec.selects(&format!("{PREFIX}{}", a.name), a.class.name()))
        .collect();
    let dir = spec.setup.run_dir()?;
    let server = LocalServer::start(dir.path(), spec.setup.server(WARM)?)?;
    let account = Account {
        api: api_of(&server, TIMEOUT),
        template: spec.setup.template.clone(),
        lifetime_s: LIFETIME_S,
    };
    let mut cases = Vec::new();
    for attempt in tried {
        scene.reset(cloner)?;
        let sandbox = account.create(&Map::new())?;
        let mut case = match vmm_of(&server, &sandbox) {
            None => not_tried(attempt, "the sandbox has no process"),
            Some(pid) => try_in(attempt, scene, Intruder::enter(pid, Relation::Other)),
        };
        case.name.insert_str(0, PREFIX);
        cases.push(case);
    }
    for attempt in attempts::all() {
        let name = format!("{EGRESS}{}", attempt.name);
        if CONNECTIONS.contains(&attempt.name) && spec.selects(&name, Class::Egress.name()) {
            scene.reset(cloner)?;
            let case = match proxy_of(&server) {
                None => not_tried(attempt, "the server has not started an egress proxy"),
                Some(pid) => try_in(attempt, scene, Intruder::enter(pid, Relation::Other)),
            };
            cases.push(Case {
                name,
                class: Class::Egress.name().to_owned(),
                ..case
            });
        }
    }
    cases.extend(
        states(&server, &account)?
            .into_iter()
            .filter(|case| spec.selects(&case.name, &case.class)),
    );
    Ok(cases)
}

fn states(server: &LocalServer, account: &Account) -> Result<Vec<Case>, VerifyError> {
    let sandboxes = (0..SANDBOXES).map(|_| account.create(&Map::new()));
    let sandboxes = sandboxes.collect::<Result<Vec<_>, _>>()?;
    let pids: Vec<u32> = sandboxes
        .iter()
        .filter_map(|sandbox| vmm_of(server, sandbox))
        .collect();
    Ok(state::of_processes(PREFIX, &pids))
}

/// Process id of the server's egress proxy, once it is limited, which the server logs, and confined. Each attempt ends the
/// previous one.
fn proxy_of(server: &LocalServer) -> Option<u32> {
    let deadline = Instant::now() + TIMEOUT;
    let is_ready = |pid: &u32| {
        let log = fs::read_to_string(server.log()).unwrap_or_default();
        let mut starts = log
            .lines()
            .filter(|line| line.contains("egress proxy started"));
        process::link(*pid, "exe").is_some_and(|program| program.ends_with("cube-egress"))
            && starts.any(|line| line.contains(&pid.to_string()))
            && process::status(*pid, "Seccomp").as_deref() == Some("2")
            && process::state(*pid) == Some('S')
    };
    while Instant::now() < deadline {
        if let Some(pid) = server.processes().into_iter().find(is_ready) {
            return Some(pid);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}

/// Process id of the sandbox's VMM.
fn vmm_of(server: &LocalServer, sandbox: &Sandbox) -> Option<u32> {
    let dir = server.sandboxes().join(sandbox.id());
    leftovers::processes_of(&dir).first().copied()
}
