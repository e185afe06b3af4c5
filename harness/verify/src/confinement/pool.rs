//! The same of VMMs that a server's pool starts: they have to be confined as the harness's own are.

use std::fs;

use super::{
    ConfinementError, ConfinementSpec, Judged, at,
    attempts::{self, Attempt},
    clone::Cloner,
    intruder::{Intruder, Kin},
    is_chosen, not_tried,
    scene::Scene,
    state, try_in,
};
use testbed::{
    artifacts,
    leftovers::{self, RunDir},
    server::{Door, LocalServer, ServerSpec, Tls},
};

use crate::hazards::subject::{Account, Subject};

/// What tells these cases from those of the harness's VMMs.
const PREFIX: &str = "pool-";
/// Sandboxes whose state is looked at.
const SANDBOXES: u32 = 3;
/// Sandboxes that the server keeps ready: some of those are warm, the rest are started for the request.
const WARM: u32 = 2;
/// One of each kind of layer.
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
    let Some(name) = name.strip_prefix(PREFIX) else {
        return false;
    };
    ATTEMPTS.contains(&name) || state::NAMES.contains(&name)
}

/// Looks at sandboxes of a server of its own, and tries a part of the attempts in them.
pub(super) fn prove(
    spec: &ConfinementSpec,
    scene: &mut Scene,
    cloner: &Cloner,
) -> Result<Vec<Judged>, ConfinementError> {
    let tried: Vec<&Attempt> = attempts::all()
        .into_iter()
        .filter(|a| ATTEMPTS.contains(&a.name))
        .filter(|a| is_chosen(spec, &format!("{PREFIX}{}", a.name), a.class))
        .collect();
    leftovers::sweep(&spec.run_root).map_err(at(&spec.run_root))?;
    let dir = RunDir::create(&spec.run_root).map_err(at(&spec.run_root))?;
    let server = own_server(spec, cloner, &dir)?;
    let account = Account {
        api: server.endpoint().clone(),
        sandbox_url: None,
        key: server.key().to_owned(),
        template: spec.template.clone(),
    };
    let mut cases = Vec::new();
    for attempt in tried {
        scene.reset(cloner)?;
        let sandbox = create(&account)?;
        let mut case = match vmm_of(&server, &sandbox) {
            None => not_tried(attempt, "the sandbox has no process"),
            Some(pid) => try_in(attempt, scene, Intruder::enter(pid, Kin::Stranger)),
        };
        case.case.insert_str(0, PREFIX);
        cases.push(case);
        // It may be gone already.
        drop(sandbox);
    }
    cases.extend(
        states(&server, &account)?
            .into_iter()
            .filter(|case| is_chosen(spec, &case.case, case.class)),
    );
    Ok(cases)
}

fn states(server: &LocalServer, account: &Account) -> Result<Vec<Judged>, ConfinementError> {
    let sandboxes: Result<Vec<_>, _> = (0..SANDBOXES).map(|_| create(account)).collect();
    let sandboxes = sandboxes?;
    let pids: Vec<u32> = sandboxes
        .iter()
        .filter_map(|sandbox| vmm_of(server, sandbox))
        .collect();
    Ok(state::of_processes(PREFIX, &pids))
}

fn create(account: &Account) -> Result<Subject<'_>, ConfinementError> {
    account.create().map_err(ConfinementError::Sandbox)
}

/// The process that runs the sandbox's guest.
fn vmm_of(server: &LocalServer, sandbox: &Subject<'_>) -> Option<u32> {
    let dir = server.sandboxes().join(sandbox.id());
    leftovers::processes_of(&dir).first().copied()
}

fn own_server(
    spec: &ConfinementSpec,
    cloner: &Cloner,
    dir: &RunDir,
) -> Result<LocalServer, ConfinementError> {
    let templates = spec.artifacts.join("templates");
    let server = ServerSpec {
        program: artifacts::find_api(spec.api.as_deref())?,
        vmm: cloner.vmm.clone(),
        templates: fs::canonicalize(&templates).map_err(at(&templates))?,
        warm: WARM,
        domain: None,
        door: Door::Locked,
        tls: Tls::Off,
        options: Vec::new(),
    };
    Ok(LocalServer::start(dir.path(), server)?)
}
