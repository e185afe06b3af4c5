//! Clones that the harness starts itself, as the target or for comparison.

use std::{io, path::Path, sync::Arc};

use model::{WorkingSetPrefault, chain};
use testbed::{
    artifacts::{self, Template},
    leftovers::{self, RunDir},
    world::PlainNetwork,
};
use vmm_control::template::{LoadError, LoadedTemplate};

use super::{SessionError, Settings, Subjects, at};
use crate::{
    exchange::Network,
    host::facts::{HostFacts, TemplateFacts},
    memory::FileId,
    scenario::{BesideSpec, Scenario},
    target::{
        Target,
        e2b::E2b,
        group::Groups,
        host_process::HostProcess,
        vmm_direct::{RANDOM, VmmDirect},
    },
};

/// Clones as the target. Comparison clones with another prefault map the same template.
pub(super) fn start(
    scenario: &Scenario,
    settings: &Settings,
    run_dir: &Arc<RunDir>,
    host: &mut HostFacts,
) -> Result<Subjects, SessionError> {
    let (direct, memory) = vmm_direct(scenario, settings, run_dir, host)?;
    let beside: Option<Box<dyn Target>> = match scenario.beside() {
        None => None,
        Some(BesideSpec::HostProcess) => Some(Box::new(HostProcess)),
        Some(BesideSpec::VmmDirect { prefault }) => {
            let prefault = prefault.unwrap_or(scenario.target.prefault);
            Some(Box::new(with_prefault(&direct, prefault)?))
        }
    };
    Ok(Subjects {
        beside,
        memory: Some(memory),
        ..Subjects::only(Box::new(direct))
    })
}

/// The comparison target of a server: clones of its template, or processes of the host. With a network, `server` is
/// the target whose sandboxes the clones resemble. `None` if the scenario has no comparison rounds.
pub(super) fn beside(
    scenario: &Scenario,
    settings: &Settings,
    run_dir: &Arc<RunDir>,
    host: &mut HostFacts,
    server: Option<(&Network, &E2b)>,
) -> Result<Option<Box<dyn Target>>, SessionError> {
    let prefault = match scenario.beside() {
        None => return Ok(None),
        Some(BesideSpec::HostProcess) => return Ok(Some(Box::new(HostProcess))),
        Some(BesideSpec::VmmDirect { prefault }) => prefault,
    };
    let (mut direct, _) = vmm_direct(scenario, settings, run_dir, host)?;
    if let Some(prefault) = prefault {
        direct = with_prefault(&direct, prefault)?;
    }
    if let Some((network, server)) = server {
        direct = with_plain_network(direct, network, server)?;
    }
    Ok(Some(Box::new(direct)))
}

fn with_prefault(
    direct: &VmmDirect,
    prefault: WorkingSetPrefault,
) -> Result<VmmDirect, SessionError> {
    direct
        .with_prefault(prefault)
        .map_err(at(Path::new(RANDOM)))
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

pub(super) fn refuse_without_kvm(host: &HostFacts) -> Result<(), SessionError> {
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
pub(super) fn facts_of(template: &Template, page_cache: String) -> TemplateFacts {
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
