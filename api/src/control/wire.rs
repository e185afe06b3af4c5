//! Converts sandboxes to response bodies.

use api_types::rest::{
    Lifecycle, ListedSandbox, OnActivity, OnTimeout, PauseMode, Sandbox, SandboxDetail,
    SandboxState,
};
use pool::TemplateInfo;

use super::{Control, ENVD_VERSION};
use crate::{
    auth::{Granted, Scope},
    builds::catalog::Catalog,
    egress::{rules, socks},
    registry::{View, timestamp},
};

/// Clients require `clientID`, but do not use its value.
const CLIENT_ID: &str = "cube";
const MIB: u64 = 1 << 20;

/// The answer of create, connect, resume and fork.
pub(super) fn sandbox(app: &Control, view: &View) -> Sandbox {
    Sandbox {
        template_id: template_id(&app.builds.catalog(), view),
        sandbox_id: view.sandbox.id.to_string(),
        client_id: CLIENT_ID.to_owned(),
        envd_version: ENVD_VERSION.to_owned(),
        alias: alias(&view.sandbox.template),
        envd_access_token: view.note.envd_token.clone(),
        traffic_access_token: view.note.traffic_token.clone(),
        domain: app.domain.clone(),
    }
}

/// An element of a list.
pub(super) fn listed(catalog: &Catalog, view: &View) -> ListedSandbox {
    let (cpu_count, memory_mb, disk_size_mb) = size(&view.sandbox.template);
    ListedSandbox {
        template_id: template_id(catalog, view),
        sandbox_id: view.sandbox.id.to_string(),
        client_id: CLIENT_ID.to_owned(),
        started_at: timestamp(view.note.started_at),
        end_at: timestamp(view.sandbox.lifetime.end_at),
        envd_version: ENVD_VERSION.to_owned(),
        cpu_count,
        memory_mb,
        disk_size_mb,
        state: state(view.sandbox.state),
        alias: alias(&view.sandbox.template),
        metadata: view.note.metadata.clone(),
    }
}

/// The details of a sandbox: the agent's token only for requests that may use it, and header values of rules only for those
/// that may set them.
pub(super) fn detail(app: &Control, view: &View, granted: Granted) -> SandboxDetail {
    let (cpu_count, memory_mb, disk_size_mb) = size(&view.sandbox.template);
    let (note, lifetime) = (&view.note, &view.sandbox.lifetime);
    SandboxDetail {
        template_id: template_id(&app.builds.catalog(), view),
        sandbox_id: view.sandbox.id.to_string(),
        client_id: CLIENT_ID.to_owned(),
        started_at: timestamp(note.started_at),
        end_at: timestamp(lifetime.end_at),
        envd_version: ENVD_VERSION.to_owned(),
        cpu_count,
        memory_mb,
        disk_size_mb,
        state: state(view.sandbox.state),
        alias: alias(&view.sandbox.template),
        metadata: note.metadata.clone(),
        envd_access_token: note
            .envd_token
            .clone()
            .filter(|_| granted.has(Scope::SandboxesExec)),
        allow_internet_access: note.allow_internet_access,
        domain: app.domain.clone(),
        network: note.network.clone().map(|network| {
            let mut network = socks::shown(network);
            if !granted.has(Scope::SandboxesWrite) {
                rules::mask(&mut network);
            }
            network
        }),
        lifecycle: Lifecycle {
            auto_resume: lifetime.auto_resume,
            on_timeout: match lifetime.on_timeout {
                pool::OnTimeout::Pause(_) => OnTimeout::Pause,
                pool::OnTimeout::End => OnTimeout::Kill,
            },
            on_activity: note.on_activity_s.map(|max_s| OnActivity {
                max_timeout: max_s.into(),
            }),
        },
        pause_mode: match view.sandbox.state {
            pool::SandboxState::Running => None,
            pool::SandboxState::Paused(pool::PauseMode::Memory) => Some(PauseMode::Full),
            pool::SandboxState::Paused(pool::PauseMode::FilesystemOnly) => {
                Some(PauseMode::Filesystem)
            }
        },
    }
}

/// The id by which clients know the template of a sandbox.
fn template_id(catalog: &Catalog, view: &View) -> String {
    catalog.id_for_clients(&view.sandbox.template.id).to_owned()
}

/// The state in E2B's terms.
pub(crate) fn state(state: pool::SandboxState) -> SandboxState {
    match state {
        pool::SandboxState::Running => SandboxState::Running,
        pool::SandboxState::Paused(_) => SandboxState::Paused,
    }
}

/// The first name of a template, without its tag.
pub(super) fn alias(template: &TemplateInfo) -> Option<String> {
    let name = template.names.first()?;
    Some(split_tag(name).0.to_owned())
}

/// Splits a template name into the name proper and its tag, if it has one.
pub(super) fn split_tag(name: &str) -> (&str, Option<&str>) {
    match name.rsplit_once(':') {
        Some((name, tag)) => (name, Some(tag)),
        None => (name, None),
    }
}

/// Space of a template on the host's disk. `None`: a record of a former release has none.
pub(super) fn stored_bytes(template: &TemplateInfo) -> Option<u64> {
    Some(template.bytes.0).filter(|bytes| *bytes > 0)
}

/// Number of vCPUs, memory in MiB, and disk size in MiB.
pub(super) fn size(template: &TemplateInfo) -> (u8, u64, u64) {
    (
        template.vcpus,
        template.memory.0 / MIB,
        template.disk.0 / MIB,
    )
}
