//! `cube-bench peers`: compares systems in one run.

use std::path::PathBuf;

use clap::Args;
use harness::scenario;
use testbed::exit::End;

use super::{
    CommandError, load,
    run::{RunOptions, run},
};

#[derive(Args)]
pub(super) struct Peers {
    /// Scenario file with mode.kind = "systems" [default: the built-in scenarios/peers.toml]
    scenario: Option<PathBuf>,
    /// Compare the target only with this system; may be repeated
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    #[command(flatten)]
    options: RunOptions,
}

impl Peers {
    pub(super) fn carry_out(self) -> Result<End, CommandError> {
        let Self {
            scenario: path,
            only,
            options,
        } = self;
        let mut command = "cube-bench peers".to_owned();
        let mut scenario = match &path {
            Some(path) => {
                command.push_str(&format!(" {}", path.display()));
                load(path, None, &options.changes)?
            }
            None => scenario::parse_changed("peers", scenario::PEERS, &options.changes)?,
        };
        let known: Vec<&str> = scenario
            .peers()
            .iter()
            .map(|peer| peer.name.as_str())
            .collect();
        if let Some(unknown) = only.iter().find(|name| !known.contains(&name.as_str())) {
            return Err(CommandError::NoPeer {
                name: unknown.clone(),
                known: known.join(", "),
            });
        }
        if let Some(peers) = scenario.mode.peers_mut().filter(|_| !only.is_empty()) {
            peers.retain(|peer| only.contains(&peer.name));
        }
        for name in &only {
            command.push_str(&format!(" --only {name}"));
        }
        run(&scenario, command, options)
    }
}
