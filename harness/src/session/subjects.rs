//! Prepares the subjects of a scenario: its target, the target of the comparison rounds, and the server if the run
//! starts one.

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::{MetadataExt, symlink},
    path::Path,
    process::Command,
    sync::{Arc, Mutex, atomic::AtomicBool},
};

use model::chain;
use testbed::{
    api::Api,
    artifacts::{self, Template},
    cluster::{Cluster, ClusterSpec, Hub, Node},
    endpoint::Endpoint,
    leftovers::{self, RunDir},
    server::{Door, LocalServer, ServerSpec, Site, Tls},
    world::{PlainNetwork, UPLINK},
};
use vmm_control::template::{LoadError, LoadedTemplate};

use super::{SessionError, Settings, at};
use crate::{
    account::Account,
    exchange::{NAME_SERVER, Network, Placement},
    host::facts::{HostFacts, TemplateFacts},
    memory::FileId,
    plan,
    scenario::{
        BesideKind, CreateApi, EventKind, EventSpec, NetworkSpec, Scenario, TargetKind, TargetSpec,
    },
    target::{
        Target,
        adapter::Adapter,
        e2b::{Complaints, Dialect, E2b},
        forks::Forks,
        group::Groups,
        host_process::HostProcess,
        mix::Mix,
        nodes::{Nodes, Stage},
        vmm_direct::{RANDOM, VmmDirect},
    },
};

/// Options of servers whose sandboxes have no network.
const NO_NETWORK: [&str; 2] = ["--network", "none"];

/// The targets of a run and the server behind them. Fields are dropped in this order.
pub(super) struct Subjects {
    pub(super) target: Box<dyn Target>,
    /// Target of the comparison rounds, if the scenario has any.
    pub(super) beside: Option<Box<dyn Target>>,
    /// The template's memory file as `vmm-direct` maps it; `None` for other targets.
    pub(super) memory: Option<FileId>,
    /// The `cube-api` of the run. The target uses it, so it must be dropped after the target.
    pub(super) server: Option<LocalServer>,
    /// Dropped after the server has ended, which removes its cgroup.
    pub(super) account: Option<Arc<Account>>,
}

impl Subjects {
    /// A target without comparison rounds.
    pub(super) fn only(target: Box<dyn Target>) -> Self {
        Self {
            target,
            beside: None,
            memory: None,
            server: None,
            account: None,
        }
    }
}

/// Directory and network of the run, created before the subjects.
#[derive(Clone, Copy)]
pub(super) struct Surroundings<'a> {
    pub(super) run_dir: &'a Arc<RunDir>,
    /// `None` if the scenario has no `[network]`.
    pub(super) network: Option<&'a Network>,
    /// `None` unless the target is a cluster that the run starts.
    pub(super) cluster: Option<&'a Cluster>,
    /// Directory for the results of the run.
    pub(super) results: &'a Path,
    /// Name of the system in the run; `target` for the scenario's target.
    pub(super) name: &'a str,
}

/// Moves the calling thread into new network namespaces if the scenario has a `[network]`; otherwise returns `None`.
pub(super) fn enter_network(
    scenario: &Scenario,
    settings: &Settings,
) -> Result<Option<Network>, SessionError> {
    let Some(spec) = scenario.network.clone() else {
        return Ok(None);
    };
    let probe = artifacts::find_probe(settings.probe.as_deref())?;
    let program = fs::read(&probe).map_err(at(&probe))?;
    let placement = match scenario.beside {
        Some(_) => Placement::OneCpu,
        None => Placement::Free,
    };
    Ok(Some(Network::enter(spec, program, placement)?))
}

/// Starts the cluster of the scenario's target.
pub(super) fn cluster(
    hub: &Hub,
    scenario: &Scenario,
    settings: &Settings,
    run_dir: &RunDir,
    host: &HostFacts,
) -> Result<Cluster, SessionError> {
    let spec = &scenario.target;
    refuse_without_kvm(host)?;
    let etcd = artifacts::find_etcd(settings.etcd.as_deref(), &settings.artifacts)?;
    let template = artifacts::find_template(&settings.artifacts, &spec.template, spec.memory)?;
    let templates = run_dir.path().join("cluster-templates");
    install(&template.dir, &templates.join(&spec.template)).map_err(at(&templates))?;
    let program = artifacts::find_api(settings.api.as_deref())?;
    let server = ServerSpec {
        vmm: artifacts::find_vmm(settings.vmm.as_deref())?,
        templates,
        warm: spec.warm,
        domain: None,
        door: Door::Locked,
        tls: Tls::Off,
        site: Site::Loopback,
        options: [
            &server_options(&settings.artifacts, false)[..],
            &NO_NETWORK.map(str::to_owned),
            &fixed_stock(&help_of(&program), spec.warm),
        ]
        .concat(),
        environment: Vec::new(),
        program,
    };
    let (nodes, etcd) = (spec.nodes, etcd.as_path());
    let spec = ClusterSpec {
        nodes,
        etcd,
        server,
    };
    let cluster = Cluster::start(hub, run_dir.path(), &spec)?;
    cluster
        .close(&scenario.target.closed)
        .map_err(at(run_dir.path()))?;
    let device = |path: &Path| fs::metadata(path).map(|meta| meta.dev()).ok();
    let is_apart = device(&template.dir) != device(run_dir.path());
    if is_apart
        && scenario
            .event
            .is_some_and(|event| event.kind == EventKind::DrainNode)
    {
        eprintln!(
            "cube-bench: moves will copy the memory of the template, because nodes cannot link its files across file \
             systems: set --run-root to a directory on the file system of {}",
            template.dir.display()
        );
    }
    Ok(cluster)
}

/// One node of a cluster as a target.
fn node(spec: &TargetSpec, node: &Node) -> E2b {
    let server = node.server();
    let mut target = e2b(spec, server.endpoint().clone(), server.key().to_owned());
    target.sandboxes = Some(server.sandboxes());
    target.warm = spec.warm;
    target.log = Arc::new(Mutex::new(Complaints::of(&server.log())));
    target
}

/// The nodes to which a target sends requests: the nodes it lists, or all but the event's node.
fn asked(scenario: &Scenario, spec: &TargetSpec, cluster: &Cluster) -> Nodes {
    let all = cluster.nodes();
    let unnamed = match scenario.event {
        _ if !spec.by.is_empty() => 0,
        Some(_) => all.len().saturating_sub(1),
        None => all.len(),
    };
    let is_asked = |at: &usize| *at < unnamed || spec.by.iter().any(|by| by == all[*at].name());
    Nodes {
        asked: (0..all.len()).filter(is_asked).collect(),
        all: all.iter().map(|of| node(spec, of)).collect(),
    }
}

/// The event in each round of the target, if any.
pub(super) fn stage<'a>(
    scenario: &'a Scenario,
    cluster: &'a Cluster,
    spec: EventSpec,
    interrupted: &'a AtomicBool,
) -> Stage<'a> {
    Stage {
        cluster,
        spec,
        closed: &scenario.target.closed,
        first: node(&scenario.target, &cluster.nodes()[0]),
        exec: &scenario.exec,
        interrupted,
    }
}

/// Prepares the targets of the scenario, and adds their endpoint, server program and template to the facts of the host.
pub(super) fn start(
    scenario: &Scenario,
    settings: &Settings,
    surroundings: Surroundings<'_>,
    host: &mut HostFacts,
) -> Result<Subjects, SessionError> {
    let spec = &scenario.target;
    match (spec.kind, &spec.api_url) {
        (TargetKind::VmmDirect, _) => {
            let (direct, memory) = vmm_direct(scenario, settings, surroundings.run_dir, host)?;
            let beside: Option<Box<dyn Target>> = match (scenario.beside, scenario.beside_prefault)
            {
                (Some(BesideKind::VmmDirect), Some(prefault)) => {
                    let other = direct.with_prefault(prefault);
                    Some(Box::new(other.map_err(at(Path::new(RANDOM)))?))
                }
                (Some(BesideKind::HostProcess), _) => Some(Box::new(HostProcess)),
                (Some(BesideKind::VmmDirect) | None, _) => None,
            };
            Ok(Subjects {
                target: Box::new(direct),
                beside,
                memory: Some(memory),
                server: None,
                account: None,
            })
        }
        (TargetKind::E2b | TargetKind::Cubesandbox, Some(url)) => {
            let api = Endpoint::parse(url)?;
            host.endpoint = Some(api.to_string());
            let key = key_of(spec)?;
            let beside = beside(scenario, settings, surroundings.run_dir, host)?;
            Ok(Subjects {
                target: creates_or_forks(scenario, e2b(spec, api, key)),
                beside: of_host_or(scenario, beside),
                memory: None,
                server: None,
                account: None,
            })
        }
        (TargetKind::E2b, None) if spec.nodes > 0 || !spec.by.is_empty() => {
            let Some(cluster) = surroundings.cluster else {
                let why = "the target is not a cluster".to_owned();
                let kind = spec.kind.name();
                return Err(SessionError::Target { kind, why });
            };
            if let Some(node) = cluster.nodes().first() {
                host.add_binary("cube-api", node.server().program());
            }
            let template =
                artifacts::find_template(&settings.artifacts, &spec.template, spec.memory)?;
            host.template = Some(facts_of(&template, "mapped by cube-api".to_owned()));
            host.endpoint = Some(format!(
                "{} nodes started by the run, {} warm in each",
                spec.nodes, spec.warm
            ));
            let asked = asked(scenario, spec, cluster);
            Ok(Subjects::only(Box::new(asked)))
        }
        (TargetKind::E2b, None) => own_server(scenario, settings, surroundings, host),
        _ => Ok(Subjects {
            target: of_host(spec, surroundings)?,
            beside: of_host_or(
                scenario,
                beside(scenario, settings, surroundings.run_dir, host)?,
            ),
            memory: None,
            server: None,
            account: None,
        }),
    }
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

/// A target that is a program on this host.
fn of_host(
    spec: &TargetSpec,
    surroundings: Surroundings<'_>,
) -> Result<Box<dyn Target>, SessionError> {
    if spec.kind != TargetKind::Adapter {
        // Validation rejects a CubeSandbox target without URL; the caller prepares the other kinds.
        return Ok(Box::new(HostProcess));
    }
    let log = format!("adapter-{}.stderr", surroundings.name);
    let log = surroundings.results.join(log);
    match Adapter::start(&spec.command, &spec.template, spec.start_timeout, &log) {
        Ok(adapter) => Ok(Box::new(adapter)),
        Err(failure) => Err(SessionError::Target {
            kind: spec.kind.name(),
            why: failure.message,
        }),
    }
}

fn own_server(
    scenario: &Scenario,
    settings: &Settings,
    surroundings: Surroundings<'_>,
    host: &mut HostFacts,
) -> Result<Subjects, SessionError> {
    let spec = &scenario.target;
    let program = artifacts::find_api(settings.api.as_deref())?;
    let template = artifacts::find_template(&settings.artifacts, &spec.template, spec.memory)?;
    refuse_without_kvm(host)?;
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
    host.template = Some(facts_of(&template, "mapped by cube-api".to_owned()));
    host.endpoint = Some(format!("cube-api started by the run, {slots} warm"));
    host.add_binary("cube-api", server.program());
    let mut target = e2b(spec, server.endpoint().clone(), server.key().to_owned());
    target.sandboxes = Some(server.sandboxes());
    target.warm = slots;
    target.log = Arc::new(Mutex::new(Complaints::of(&server.log())));
    target.account = account(server.pid()).map(Arc::new);
    let account = target.account.clone();
    target.network = scenario.network.as_ref().map(NetworkSpec::options);
    let beside = beside(scenario, settings, surroundings.run_dir, host)?;
    let beside = match (beside, surroundings.network) {
        (Some(direct), Some(network)) => Some(with_plain_network(direct, network, &target)?),
        (direct, _) => direct,
    };
    Ok(Subjects {
        target: creates_or_forks(scenario, target),
        beside: of_host_or(scenario, beside),
        memory: None,
        server: Some(server),
        account,
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

/// Prepares the comparison target for an API target; `None` if the scenario has no comparison rounds.
fn beside(
    scenario: &Scenario,
    settings: &Settings,
    run_dir: &Arc<RunDir>,
    host: &mut HostFacts,
) -> Result<Option<VmmDirect>, SessionError> {
    if scenario.beside != Some(BesideKind::VmmDirect) {
        return Ok(None);
    }
    let (direct, _) = vmm_direct(scenario, settings, run_dir, host)?;
    let Some(prefault) = scenario.beside_prefault else {
        return Ok(Some(direct));
    };
    let other = direct.with_prefault(prefault);
    other.map(Some).map_err(at(Path::new(RANDOM)))
}

/// The comparison target: `direct`, or processes on the host if the scenario compares with them.
fn of_host_or(scenario: &Scenario, direct: Option<VmmDirect>) -> Option<Box<dyn Target>> {
    match (scenario.beside?, direct) {
        (BesideKind::HostProcess, _) => Some(Box::new(HostProcess)),
        (BesideKind::VmmDirect, direct) => direct.map(|direct| Box::new(direct) as Box<dyn Target>),
    }
}

/// Connects comparison clones to a network without eBPF programs, and assigns them cgroups like those of the
/// server's sandboxes.
fn with_plain_network(
    direct: VmmDirect,
    network: &Network,
    server: &E2b,
) -> Result<VmmDirect, SessionError> {
    let sandboxes = server.sandboxes.clone().unwrap_or_default();
    let warm = || {
        server.await_ready()?;
        let vmm = leftovers::processes_of(&sandboxes).first().copied();
        Groups::like(vmm.ok_or_else(|| io::Error::other("the pool has no warm sandbox"))?)
    };
    let groups = warm().map_err(at(&sandboxes))?;
    Ok(direct.with_network(PlainNetwork::new(network.outside())?, groups))
}

/// The target itself, one target per template of a mix, or forks of a parent sandbox if the scenario has
/// `[[parent]]` steps.
fn creates_or_forks(scenario: &Scenario, e2b: E2b) -> Box<dyn Target> {
    if let Some((first, others)) = scenario.mix.split_first() {
        let first = E2b {
            template: first.template.clone(),
            ..e2b
        };
        let others: Vec<String> = others.iter().map(|of| of.template.clone()).collect();
        return Box::new(Mix::new(first, &others, &plan::build(scenario)));
    }
    match scenario.parent.as_slice() {
        [] => Box::new(e2b),
        parent => Box::new(Forks::new(e2b, parent.to_vec(), scenario.arrival.starts())),
    }
}

/// Additional options of the server. `--images` is needed because the template is a symbolic link into the artifacts.
/// The network rate limit is off, because exchanges measure the eBPF programs and not the limit.
fn server_options(artifacts: &Path, networked: bool) -> Vec<String> {
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
    let mix = scenario.mix.iter().map(|of| of.template.as_str());
    mix.chain([scenario.target.template.as_str()]).collect()
}

/// Number of warm sandboxes in a server that the run starts: `target.warm` for each template.
fn slots_of(scenario: &Scenario) -> u32 {
    let templates = u32::try_from(templates_of(scenario).len()).unwrap_or(u32::MAX);
    scenario.target.warm.saturating_mul(templates)
}

/// Option that fixes the total number of warm sandboxes to the scenario's, however many are created. Older builds,
/// which `ab` may compare, never exceed it; their help lists neither the option nor `--set`, which later builds have.
fn fixed_stock(help: &str, slots: u32) -> Vec<String> {
    const OPTION: &str = "--warm-slots";
    if help.contains(OPTION) || help.contains("--set ") {
        vec![OPTION.to_owned(), slots.to_string()]
    } else {
        Vec::new()
    }
}

/// Help text of a server program; empty if it has none.
fn help_of(program: &Path) -> String {
    let help = Command::new(program).args(["serve", "--help"]).output();
    help.map_or(String::new(), |help| {
        String::from_utf8_lossy(&help.stdout).into_owned()
    })
}

/// Links a template of the scenario into the server's own templates directory. The directory must contain no
/// others, because the server keeps warm sandboxes of every template that it finds.
fn install(template: &Path, place: &Path) -> io::Result<()> {
    fs::create_dir_all(place.parent().unwrap_or(place))?;
    symlink(template, place)
}

fn e2b(spec: &TargetSpec, api: Endpoint, key: String) -> E2b {
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

fn vmm_direct(
    scenario: &Scenario,
    settings: &Settings,
    run_dir: &Arc<RunDir>,
    host: &mut HostFacts,
) -> Result<(VmmDirect, FileId), SessionError> {
    let vmm = artifacts::find_vmm(settings.vmm.as_deref())?;
    let target = &scenario.target;
    let template = artifacts::find_template(&settings.artifacts, &target.template, target.memory)?;
    let loaded = LoadedTemplate::load(&template.dir);
    host.template = Some(template_facts(&template, scenario, loaded.as_ref().err()));
    refuse_without_kvm(host)?;
    let loaded = loaded.ok();
    let source = loaded
        .as_ref()
        .map_or_else(|| template.dir.clone(), LoadedTemplate::dir);
    let memory_path = source.join(model::template_file::MEMORY);
    let memory = FileId::of(&memory_path).map_err(at(&memory_path))?;
    let direct = VmmDirect::new(
        vmm,
        template.dir,
        loaded,
        &scenario.target,
        Arc::clone(run_dir),
    )
    .map_err(at(Path::new(RANDOM)))?;
    Ok((direct, memory))
}

fn refuse_without_kvm(host: &HostFacts) -> Result<(), SessionError> {
    host.kvm_missing
        .clone()
        .map_or(Ok(()), |why| Err(SessionError::Kvm(why)))
}

fn template_facts(
    template: &Template,
    scenario: &Scenario,
    not_loaded: Option<&LoadError>,
) -> TemplateFacts {
    let mut page_cache = match not_loaded {
        None => {
            "the memory was copied into a tmpfs of huge pages before the first warm-up".to_owned()
        }
        Some(why) => format!(
            "the whole memory file was read before the first warm-up (no huge pages: {})",
            chain(why)
        ),
    };
    if scenario.cold_rounds > 0 {
        page_cache.push_str(
            "; each clone of a cold round maps the file on disk after POSIX_FADV_DONTNEED",
        );
    }
    facts_of(template, page_cache)
}

/// Published records contain no paths of the host on which they were recorded.
fn facts_of(template: &Template, page_cache: String) -> TemplateFacts {
    let mut manifest = template.manifest.clone();
    if let Some(name) = manifest.root.file_name() {
        manifest.root = name.into();
    }
    let name = template.dir.file_name().unwrap_or_default();
    TemplateFacts {
        dir: Path::new("templates").join(name),
        manifest: serde_json::to_value(&manifest).unwrap_or_default(),
        page_cache,
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
        let mixed = "[[mix]]\ntemplate = \"base\"\n[[mix]]\ntemplate = \"code-interpreter-v1\"\n";
        assert_eq!(options(""), of(3), "one template");
        assert_eq!(options(mixed), of(6), "the server keeps 3 of each");
        assert_eq!(fixed_stock("  --warm <LOW:HIGH>", 6), [""; 0]);
    }
}
