//! The deserialized form of `[mode]`, and its validation.

use std::path::{Path, PathBuf};

use model::WorkingSetPrefault;
use serde::Deserialize;
use toml::Table;

use super::{
    super::{
        ExecSpec,
        event::EventConfig,
        lives::{self, MixConfig},
        peers,
        steps::ParentConfig,
    },
    BesideSpec, ClusterSpec, Mode, TraceSpec,
};
use crate::trace::Trace;

#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub(in crate::scenario) enum ModeConfig {
    Single {},
    Beside {
        with: BesideName,
        #[serde(default)]
        prefault: String,
    },
    Systems {
        systems: Vec<Table>,
    },
    Forks {
        parent: Vec<ParentConfig>,
    },
    Mix {
        templates: Vec<MixConfig>,
    },
    Trace {
        file: PathBuf,
        #[serde(default)]
        templates: Vec<MixConfig>,
    },
    Cluster {
        nodes: u8,
        #[serde(default)]
        by: Vec<String>,
        #[serde(default)]
        closed: Vec<String>,
        event: Option<EventConfig>,
        #[serde(default)]
        systems: Vec<Table>,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(in crate::scenario) enum BesideName {
    VmmDirect,
    HostProcess,
}

impl ModeConfig {
    /// The file of a trace, not yet read.
    pub(in crate::scenario) fn trace_file(&self) -> Option<&Path> {
        match self {
            Self::Trace { file, .. } => Some(file),
            _ => None,
        }
    }

    /// `trace` is the content of [`Self::trace_file`].
    pub(in crate::scenario) fn check(
        self,
        exec: &ExecSpec,
        trace: Option<Trace>,
    ) -> Result<Mode, String> {
        Ok(match self {
            Self::Single {} => Mode::Single,
            Self::Beside { with, prefault } => Mode::Beside(beside(&with, &prefault)?),
            Self::Systems { systems } => {
                let peers = not_empty("systems", peers::check(systems, exec)?)?;
                if let Some(peer) = peers.iter().find(|peer| !peer.by.is_empty()) {
                    return Err(format!(
                        "system {}: by names nodes of a cluster: set mode.kind to \"cluster\"",
                        peer.name
                    ));
                }
                Mode::Systems(peers)
            }
            Self::Forks { parent } => {
                let steps = parent.into_iter().map(|step| step.check(exec));
                Mode::Forks(not_empty("parent", steps.collect::<Result<_, _>>()?)?)
            }
            Self::Mix { templates } => {
                Mode::Mix(not_empty("templates", lives::mix(templates, None)?)?)
            }
            Self::Trace { templates, .. } => {
                let trace = trace.ok_or("mode.file is empty, it must name a trace file")?;
                let templates = lives::mix(templates, Some(&trace))?;
                Mode::Trace(TraceSpec { trace, templates })
            }
            Self::Cluster {
                nodes,
                by,
                closed,
                event,
                systems,
            } => Mode::Cluster(ClusterSpec {
                nodes,
                by,
                closed,
                event: event.map(|event| event.check()).transpose()?,
                peers: peers::check(systems, exec)?,
            }),
        })
    }
}

fn beside(with: &BesideName, prefault: &str) -> Result<BesideSpec, String> {
    let prefault = match prefault {
        "" => None,
        "on" => Some(WorkingSetPrefault::On),
        "off" => Some(WorkingSetPrefault::Off),
        other => {
            return Err(format!(
                "mode.prefault is {other:?}, it must be \"on\", \"off\" or empty"
            ));
        }
    };
    match with {
        BesideName::VmmDirect => Ok(BesideSpec::VmmDirect { prefault }),
        BesideName::HostProcess if prefault.is_none() => Ok(BesideSpec::HostProcess),
        BesideName::HostProcess => {
            Err("mode.prefault has no meaning with \"host-process\"".to_owned())
        }
    }
}

fn not_empty<T>(key: &str, list: Vec<T>) -> Result<Vec<T>, String> {
    if list.is_empty() {
        return Err(format!(
            "mode.{key} is empty, it must have at least one entry"
        ));
    }
    Ok(list)
}
