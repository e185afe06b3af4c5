//! Servers with E2B's API: one of the user, or one that the run starts.

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::symlink,
    path::Path,
    process::Command,
    sync::{Arc, Mutex},
};

use model::Timeline;
use testbed::{
    api::Api,
    artifacts,
    endpoint::Endpoint,
    server::{Door, LocalServer, ServerSpec, Site, Tls},
    world::UPLINK,
};

use super::{SessionError, Settings, Subjects, Surroundings, at, direct};
use crate::{
    account::Account,
    exchange::NAME_SERVER,
    host::facts::HostFacts,
    plan,
    scenario::{CreateApi, Mode, NetworkSpec, Scenario, TargetKind, TargetSpec},
    target::{
        Target,
        e2b::{self, Complaints, Dialect, E2b},
        forks::Forks,
        mix::Mix,
    },
};

/// Options of servers whose sandboxes have no network.
pub(super) const NO_NETWORK: [&str; 2] = ["--network", "none"];

/// A server that runs already as the target.
pub(super) fn at_url(
    url: &str,
    scenario: &Scenario,
    settings: &Settings,
    surroundings: Surroundings<'_>,
    host: &mut HostFacts,
) -> Result<Subjects, SessionError> {
    let spec = &scenario.target;
    let api = Endpoint::parse(url)?;
    host.endpoint = Some(api.to_string());
    let target = e2b(spec, api, key_of(spec)?);
    refuse_unknown_templates(scenario, &target)?;
    // The run itself reports a server that does not respond.
    let health = target.api.send("GET", "/health", "").ok();
    host.software = health.and_then(|answer| answer.header("server").map(str::to_owned));
    let beside = direct::beside(scenario, settings, surroundings.run_dir, host, None)?;
    Ok(Subjects {
        beside,
        ..Subjects::only(creates_or_forks(scenario, target))
    })
}

/// Creates and removes a sandbox of each template, so that a template that the server does not have is an error before
/// the first round. The rounds count every other failure.
fn refuse_unknown_templates(scenario: &Scenario, target: &E2b) -> Result<(), SessionError> {
    let mix = scenario.templates().iter().map(|of| of.template.as_str());
    let mut names: BTreeSet<&str> = mix.collect();
    if names.is_empty() {
        names.insert(&target.template);
    }
    for template in names {
        let of = E2b {
            template: template.to_owned(),
            ..target.clone()
        };
        let Err(failure) = of.start(&mut Timeline::default()) else {
            continue;
        };
        if e2b::is_unknown_template(&failure) {
            return Err(SessionError::NoTemplate {
                template: template.to_owned(),
                answer: failure.message,
            });
        }
    }
    Ok(())
}

/// The API key of a server, from the environment. CubeSandbox accepts any key unless an authentication callback is
/// configured.
fn key_of(spec: &TargetSpec) -> Result<String, SessionError> {
    match (std::env::var(&spec.api_key_env), spec.kind) {
        (Ok(key), _) => Ok(key),
        (Err(_), TargetKind::Cubesandbox) => Ok("none".to_owned()),
        (Err(_), _) => Err(SessionError::NoKey(spec.api_key_env.clone())),
    }
}

/// A `cube-api` of the run as the target.
pub(super) fn start(
    scenario: &Scenario,
    settings: &Settings,
    surroundings: Surroundings<'_>,
    host: &mut HostFacts,
) -> Result<Subjects, SessionError> {
    let spec = &scenario.target;
    let program = artifacts::find_api(settings.api.as_deref())?;
    let template = artifacts::find_template(&settings.artifacts, &spec.template, spec.memory)?;
    direct::refuse_without_kvm(host)?;
    // Only one server of a run keeps its files directly in the run directory.
    let dir = match surroundings.name {
        "target" => surroundings.run_dir.path().to_owned(),
        peer => {
            let dir = surroundings.run_dir.clone_dir(peer);
            dir.map_err(at(surroundings.run_dir.path()))?
        }
    };
    let templates = dir.join("templates");
    for name in templates_of(scenario) {
        let installed = artifacts::find_template(&settings.artifacts, name, spec.memory)?;
        install(&installed.dir, &templates.join(name)).map_err(at(&templates))?;
    }
    let slots = slots_of(scenario);
    let server = LocalServer::start(
        &dir,
        ServerSpec {
            vmm: artifacts::find_vmm(settings.vmm.as_deref())?,
            templates,
            warm: spec.warm,
            domain: None,
            door: Door::Open,
            tls: Tls::Off,
            site: Site::Loopback,
            options: [
                server_options(&settings.artifacts, surroundings.network.is_some()),
                // A peer of a cluster is in the cluster's namespace, which has no uplink.
                (surroundings.cluster.iter())
                    .flat_map(|_| NO_NETWORK.map(str::to_owned))
                    .collect(),
                fixed_stock(&help_of(&program), slots),
            ]
            .concat(),
            environment: Vec::new(),
            program,
        },
    )?;
    host.template = Some(direct::facts_of(&template, "mapped by cube-api".to_owned()));
    host.endpoint = Some(format!("cube-api started by the run, {slots} warm"));
    host.add_binary("cube-api", server.program());
    let mut target = e2b(spec, server.endpoint().clone(), server.key().to_owned());
    target.sandboxes = Some(server.sandboxes());
    target.warm = slots;
    target.log = Arc::new(Mutex::new(Complaints::of(&server.log())));
    target.account = account(server.pid()).map(Arc::new);
    let account = target.account.clone();
    target.network = scenario.network.as_ref().map(NetworkSpec::options);
    let network = surroundings.network.map(|network| (network, &target));
    let beside = direct::beside(scenario, settings, surroundings.run_dir, host, network)?;
    Ok(Subjects {
        beside,
        server: Some(server),
        account,
        ..Subjects::only(creates_or_forks(scenario, target))
    })
}

/// CPU and memory accounts of the server. `None`, with a message, if this host cannot keep them.
fn account(server: u32) -> Option<Account> {
    Account::open(server)
        .inspect_err(|error| {
            eprintln!(
                "cube-bench: the report will not contain CPU time and memory of the server: {error}"
            );
        })
        .ok()
}

/// The target itself, one target per template, or forks of a parent sandbox, as the mode demands.
fn creates_or_forks(scenario: &Scenario, e2b: E2b) -> Box<dyn Target> {
    if let Some((first, others)) = scenario.templates().split_first() {
        let first = E2b {
            template: first.template.clone(),
            ..e2b
        };
        let others: Vec<String> = others.iter().map(|of| of.template.clone()).collect();
        return Box::new(Mix::new(first, &others, &plan::build(scenario)));
    }
    match &scenario.mode {
        Mode::Forks(parent) => Box::new(Forks::new(e2b, parent.clone(), scenario.arrival.starts())),
        _ => Box::new(e2b),
    }
}

/// Additional options of the server. `--images` is needed because the template is a symbolic link into the artifacts.
/// The network rate limit is off, because exchanges measure the eBPF programs and not the limit.
pub(super) fn server_options(artifacts: &Path, networked: bool) -> Vec<String> {
    let images = artifacts.display().to_string();
    let mut options = vec!["--images".to_owned(), images];
    if networked {
        let network = ["--uplink", UPLINK, "--dns-server", NAME_SERVER];
        let limit = ["--network-rate", "none"];
        options.extend(network.into_iter().chain(limit).map(str::to_owned));
    }
    options
}

/// The templates of a server that the run starts.
fn templates_of(scenario: &Scenario) -> BTreeSet<&str> {
    let mix = scenario.templates().iter().map(|of| of.template.as_str());
    mix.chain([scenario.target.template.as_str()]).collect()
}

/// Number of warm sandboxes in a server that the run starts: `target.warm` for each template.
fn slots_of(scenario: &Scenario) -> u32 {
    let templates = u32::try_from(templates_of(scenario).len()).unwrap_or(u32::MAX);
    scenario.target.warm.saturating_mul(templates)
}

/// Option that fixes the total number of warm sandboxes to the scenario's, however many are created. Older builds,
/// which `ab` may compare, never exceed it; their help lists neither the option nor `--set`, which later builds have.
pub(super) fn fixed_stock(help: &str, slots: u32) -> Vec<String> {
    const OPTION: &str = "--warm-slots";
    if help.contains(OPTION) || help.contains("--set ") {
        vec![OPTION.to_owned(), slots.to_string()]
    } else {
        Vec::new()
    }
}

/// Help text of a server program; empty if it has none.
pub(super) fn help_of(program: &Path) -> String {
    let help = Command::new(program).args(["serve", "--help"]).output();
    help.map_or(String::new(), |help| {
        String::from_utf8_lossy(&help.stdout).into_owned()
    })
}

/// Links a template of the scenario into the server's own templates directory. The directory must contain no
/// others, because the server keeps warm sandboxes of every template that it finds.
pub(super) fn install(template: &Path, place: &Path) -> io::Result<()> {
    fs::create_dir_all(place.parent().unwrap_or(place))?;
    symlink(template, place)
}

pub(super) fn e2b(spec: &TargetSpec, api: Endpoint, key: String) -> E2b {
    E2b {
        api: Api {
            control: api,
            sandbox_url: spec.sandbox_url.clone(),
            key,
            timeout: spec.start_timeout,
        },
        dialect: match (spec.kind, spec.api) {
            (TargetKind::Cubesandbox, _) => Dialect::Cubesandbox,
            (_, CreateApi::V1) => Dialect::V1,
            (_, CreateApi::V2) => Dialect::V2,
        },
        template: spec.template.clone(),
        sandboxes: None,
        log: Arc::default(),
        warm: 0,
        account: None,
        network: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario;

    #[test]
    fn the_stock_of_a_server_is_fixed_at_that_of_all_its_templates() {
        let options = |mix: &str| {
            let text = format!("[target]\nkind = \"e2b\"\nwarm = 3\n{mix}");
            let slots = slots_of(&scenario::parse("t", &text).unwrap());
            (slots, fixed_stock("  --warm-slots <NUMBER>", slots))
        };
        let of = |slots: u32| (slots, vec!["--warm-slots".to_owned(), slots.to_string()]);
        let mixed = "[mode]\nkind = \"mix\"\n[[mode.templates]]\ntemplate = \"base\"\n[[mode.templates]]\ntemplate = \"code-interpreter-v1\"\n";
        assert_eq!(options(""), of(3), "one template");
        assert_eq!(options(mixed), of(6), "the server keeps 3 of each");
        assert_eq!(fixed_stock("  --warm <LOW:HIGH>", 6), [""; 0]);
        let current = fixed_stock("  --set <SECTION.KEY=VALUE>", 3);
        assert_eq!(current, of(3).1);
    }
}
