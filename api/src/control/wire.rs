//! Converts sandboxes to response bodies.

use ::builds::catalog::Catalog;
use envd::Timestamp;
use pool::TemplateInfo;
use rest::{
    Lifecycle, ListedSandbox, OnActivity, OnTimeout, PauseMode, Sandbox, SandboxDetail,
    SandboxState,
};

use super::app::Control;
use crate::{
    auth::{Granted, Scope},
    egress::socks,
    registry::View,
    rules,
};

/// Version of the envd protocol in the guests. Clients use it to decide which features they can use.
pub(super) const ENVD_VERSION: &str = "0.6.13";

/// Clients require `clientID`, but do not use its value.
const CLIENT_ID: &str = "cube";
const MIB: u64 = 1 << 20;

/// The default domain if neither the client nor the server has one. No name below it exists (RFC 6761, 6.4), so clients
/// that build host names of sandboxes send nothing to anyone, and their error shows the missing variable.
const NO_DOMAIN: &str = "set-e2b-sandbox-url.invalid";

tokio::task_local! {
    /// The domain of a client that reached this server as `api.<domain>`, which `E2B_DOMAIN` does.
    static REACHED_BELOW: Option<String>;
}

/// Runs a handler for a request in which the client used this host name.
pub(super) async fn reached_at<T>(host: &str, answering: impl Future<Output = T>) -> T {
    let domain = host.strip_prefix("api.").map(str::to_owned);
    REACHED_BELOW.scope(domain, answering).await
}

/// Clients without `E2B_SANDBOX_URL` build host names of sandboxes below this domain. Without it, they would use E2B's.
fn domain(configured: Option<&String>) -> String {
    let reached = || REACHED_BELOW.try_with(Clone::clone).ok().flatten();
    let domain = configured.cloned().or_else(reached);
    domain.unwrap_or_else(|| NO_DOMAIN.to_owned())
}

/// The response to create, connect, resume and fork.
pub(super) fn sandbox(app: &Control, view: &View) -> Sandbox {
    Sandbox {
        template_id: template_id(&app.builds.catalog(), view),
        sandbox_id: view.sandbox.id.to_string(),
        client_id: CLIENT_ID.to_owned(),
        envd_version: ENVD_VERSION.to_owned(),
        alias: alias(&view.sandbox.template),
        envd_access_token: view.note.envd_token.clone(),
        traffic_access_token: view.note.traffic_token.clone(),
        domain: Some(domain(app.domain.as_ref())),
    }
}

/// An element of a list.
pub(super) fn listed(catalog: &Catalog, view: &View) -> ListedSandbox {
    let (cpu_count, memory_mb, disk_size_mb) = size(&view.sandbox.template);
    ListedSandbox {
        template_id: template_id(catalog, view),
        sandbox_id: view.sandbox.id.to_string(),
        client_id: CLIENT_ID.to_owned(),
        started_at: Timestamp::from_unix_ms(view.note.started_at),
        end_at: Timestamp::from_unix_ms(view.sandbox.lifetime.end_at),
        envd_version: ENVD_VERSION.to_owned(),
        cpu_count,
        memory_mb,
        disk_size_mb,
        state: state(view.sandbox.state),
        alias: alias(&view.sandbox.template),
        metadata: view.note.metadata.clone(),
    }
}

/// The details of a sandbox. Includes the agent's token only for requests that may use it, and header values of rules
/// only for requests that may set them.
pub(super) fn detail(app: &Control, view: &View, granted: Granted) -> SandboxDetail {
    let (cpu_count, memory_mb, disk_size_mb) = size(&view.sandbox.template);
    let (note, lifetime) = (&view.note, &view.sandbox.lifetime);
    SandboxDetail {
        template_id: template_id(&app.builds.catalog(), view),
        sandbox_id: view.sandbox.id.to_string(),
        client_id: CLIENT_ID.to_owned(),
        started_at: Timestamp::from_unix_ms(note.started_at),
        end_at: Timestamp::from_unix_ms(lifetime.end_at),
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
        domain: Some(domain(app.domain.as_ref())),
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

/// The client-visible id of a sandbox's template.
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

/// Space of a template on the host's disk. `None` if the record was written by an older release.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_client_that_reached_the_server_below_a_domain_gets_that_domain() {
        let own = "own.test".to_owned();
        for (host, configured, expected) in [
            ("api.e2b.test:8443", None, "e2b.test:8443"),
            ("api.e2b.test", Some(&own), "own.test"),
            ("127.0.0.1:3000", None, NO_DOMAIN),
            ("apiary.test", None, NO_DOMAIN),
            ("", None, NO_DOMAIN),
        ] {
            let found = reached_at(host, async { domain(configured) }).await;
            assert_eq!(found, expected, "{host}");
        }
        assert_eq!(domain(None), NO_DOMAIN);
    }
}
