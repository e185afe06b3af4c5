//! The target of a scenario, and the kinds of systems.

use std::time::Duration;

use model::{Bytes, WorkingSetPrefault};
use serde::{Deserialize, Serialize};
use testbed::endpoint::Endpoint;

use super::config::{duration, positive};

/// Maximum number of warm sandboxes. A larger number is treated as a typing mistake.
const MAX_WARM: u32 = 10_000;

/// The target of a scenario.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TargetSpec {
    pub kind: TargetKind,
    /// URL of the API; `None` starts a `cube-api` on this host.
    #[serde(default)]
    pub api_url: Option<String>,
    /// URL for requests to sandboxes, with the placeholders `{id}` and `{port}`; `None` uses the URL of the API.
    #[serde(default)]
    pub sandbox_url: Option<String>,
    /// Path of a create on a server with E2B's API.
    #[serde(default)]
    pub api: CreateApi,
    /// Environment variable with the key of the API.
    #[serde(default = "default_key_env")]
    pub api_key_env: String,
    /// Program and options of an adapter or of a runtime; empty for the runtime's defaults.
    #[serde(default)]
    pub command: Vec<String>,
    /// Size of the warm pool of the server that the run starts; 0 for no pool.
    #[serde(default)]
    pub warm: u32,
    /// Interval at which the number of warm sandboxes is read during rounds of the target; `None` does not read it.
    #[serde(default)]
    pub watch: Option<Duration>,
    /// Name of a directory below `templates/` of the artifacts.
    pub template: String,
    /// Guest RAM that the template must have; `None` accepts any size.
    pub memory: Option<Bytes>,
    pub prefault: WorkingSetPrefault,
    /// Timeout of each step of a create.
    pub start_timeout: Duration,
}

/// Place where sandboxes run. It decides which properties of this host matter for a measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// Behind an endpoint or an adapter. As far as the harness can tell, this host is only the client.
    Elsewhere,
    /// On this host, without KVM.
    HostKernel,
    /// In VMs of this project on this host.
    #[default]
    OwnVms,
}

/// Interfaces through which sandboxes are started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TargetKind {
    /// One `cube-vmm` process for each clone, driven through its control socket.
    VmmDirect,
    /// A server with E2B's API.
    E2b,
    /// A CubeSandbox server: E2B's API with different status codes.
    Cubesandbox,
    /// A program that speaks the protocol of docs/measure/adapters.md. Older recorded runs have kinds of their own for the
    /// systems whose adapters are now in scenarios/adapters.
    #[serde(alias = "bubblewrap", alias = "runc", alias = "crun", alias = "runsc")]
    Adapter,
    /// Processes of the host.
    Process,
}

impl TargetKind {
    /// Name in scenarios and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::VmmDirect => "vmm-direct",
            Self::E2b => "e2b",
            Self::Cubesandbox => "cubesandbox",
            Self::Adapter => "adapter",
            Self::Process => "process",
        }
    }

    /// Whether the harness itself runs VMs of this project, so that it can drop their template from the page cache.
    #[must_use]
    pub fn maps_template(self) -> bool {
        self == Self::VmmDirect
    }
}

/// Endpoint for creates on a server with E2B's API.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CreateApi {
    /// `POST /v2/sandboxes`.
    #[default]
    V2,
    /// `POST /sandboxes`.
    V1,
}

fn default_key_env() -> String {
    "E2B_API_KEY".to_owned()
}

impl TargetSpec {
    /// Where the sandboxes of this target run.
    #[must_use]
    pub fn place(&self) -> Place {
        match (self.kind, &self.api_url) {
            (TargetKind::VmmDirect, _) | (TargetKind::E2b, None) => Place::OwnVms,
            (TargetKind::E2b, Some(_)) | (TargetKind::Cubesandbox | TargetKind::Adapter, _) => {
                Place::Elsewhere
            }
            (TargetKind::Process, _) => Place::HostKernel,
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TargetConfig {
    kind: TargetKind,
    api_url: String,
    sandbox_url: String,
    api: CreateApi,
    api_key_env: String,
    command: Vec<String>,
    warm: u32,
    watch: String,
    template: String,
    memory: String,
    prefault: WorkingSetPrefault,
    start_timeout: String,
}

impl TargetConfig {
    pub(super) fn check(self) -> Result<TargetSpec, String> {
        let plain = !self.template.is_empty()
            && self
                .template
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
            && !self.template.starts_with('.');
        if !plain {
            return Err(format!(
                "target.template: {:?} is not the name of a directory below templates/",
                self.template
            ));
        }
        let memory = match self.memory.as_str() {
            "" => None,
            text => Some(
                text.parse::<Bytes>()
                    .map_err(|e| format!("target.memory: {e}"))?,
            ),
        };
        let [api_url, sandbox_url] =
            [self.api_url, self.sandbox_url].map(|url| match url.as_str() {
                "" => None,
                _ => Some(url),
            });
        let is_api = matches!(self.kind, TargetKind::E2b | TargetKind::Cubesandbox);
        let given = [
            ("api_url", api_url.is_some() && !is_api),
            ("sandbox_url", sandbox_url.is_some() && !is_api),
            (
                "api",
                self.api != CreateApi::V2 && self.kind != TargetKind::E2b,
            ),
            ("warm", self.warm > 0 && self.kind != TargetKind::E2b),
            (
                "command",
                !self.command.is_empty() && self.kind != TargetKind::Adapter,
            ),
        ];
        if let Some((key, _)) = given.iter().find(|(_, given)| *given) {
            return Err(format!(
                "target.{key} has no meaning for kind {:?}",
                self.kind.name()
            ));
        }
        if self.kind == TargetKind::Adapter && self.command.is_empty() {
            return Err(
                "target.command is empty, it must name the adapter's program, for example one of scenarios/adapters"
                    .to_owned(),
            );
        }
        if self.kind == TargetKind::Cubesandbox && (api_url.is_none() || sandbox_url.is_none()) {
            return Err(
                "kind \"cubesandbox\" needs target.api_url, such as \"http://HOST:3000\", and target.sandbox_url, such as \"https://{port}-{id}.cube.app\""
                    .to_owned(),
            );
        }
        if self.warm > 0 && api_url.is_some() {
            return Err(
                "target.warm applies only to a server that the run starts: remove target.api_url"
                    .to_owned(),
            );
        }
        if self.warm > MAX_WARM {
            return Err(format!(
                "target.warm is {}, it must be at most {MAX_WARM}",
                self.warm
            ));
        }
        let watch = duration("target.watch", &self.watch)?;
        let watch = Some(watch).filter(|interval| !interval.is_zero());
        if watch.is_some() && self.warm == 0 {
            return Err(
                "target.watch reads the number of warm sandboxes: set target.warm".to_owned(),
            );
        }
        if let Some(url) = &api_url {
            Endpoint::parse(url).map_err(|e| format!("target.api_url: {e}"))?;
        }
        if let Some(pattern) = &sandbox_url {
            let url = pattern.replace("{id}", "i0").replace("{port}", "1");
            Endpoint::parse(&url).map_err(|e| format!("target.sandbox_url: {e}"))?;
        }
        Ok(TargetSpec {
            kind: self.kind,
            api_url,
            sandbox_url,
            api: self.api,
            api_key_env: self.api_key_env,
            command: self.command,
            warm: self.warm,
            watch,
            template: self.template,
            memory,
            prefault: self.prefault,
            start_timeout: positive("target.start_timeout", &self.start_timeout)?,
        })
    }
}
