//! The configuration of a server: every key with its value, and where the value is set.
//!
//! ```text
//! option of this release, --set KEY=VALUE, option of an earlier release    (one flag layer)
//!   over  /etc/cube/cube.toml, or --config FILE
//!   over  an options file of an earlier release                            ([`earlier`])
//!   over  the defaults of [`sections`]
//! ```
//! [`Layers`] collects the settings with their places, [`Layers::config`] decodes each of them, and [`spec`] checks them
//! together. Each step reports all mistakes that it finds. A reload repeats the command line, so it reads the files again.

pub(super) mod earlier;
pub(super) mod layers;
mod schema;
mod sections;
mod values;

mod images;
mod network;
pub(super) mod spec;

pub(super) mod show;

use std::path::{Path, PathBuf};

use clap::Args;
use model::CONFIG_FILE;

use super::Failure;
use earlier::FlagText;
use layers::Layers;
pub(super) use sections::{Log, ServerConfig};

/// The options of `serve`, `prepare` and `end`: those that people type. All other keys are set in the file or by `--set`.
#[derive(Args)]
pub(super) struct ServeArgs {
    /// Configuration file [default: /etc/cube/cube.toml if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Address to listen on; repeat for more [default: the sockets that systemd passes, or 127.0.0.1:3000]
    #[arg(long, value_name = "ADDRESS")]
    listen: Vec<String>,
    /// Directory for everything that outlives the server: keys, sandboxes, snapshots [default: /var/lib/cube]
    #[arg(long, value_name = "DIR")]
    state: Option<String>,
    /// Directory of templates [default: ../templates next to this program, or installed/templates in the state
    /// directory]
    #[arg(long, value_name = "DIR")]
    templates: Option<String>,
    /// Domain of the sandboxes' host names, with the port unless it is 443; returned to clients
    #[arg(long)]
    domain: Option<String>,
    /// Turn authentication off; allowed only if all listening addresses are loopback addresses
    #[arg(long)]
    insecure_loopback: bool,
    /// Serve as a node of the cluster that `cube-api cluster init` or `join` has set up in the state directory
    #[arg(long)]
    cluster: bool,
    /// Any key of the configuration file, such as pool.max_sandboxes=64; repeat for more
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    set: Vec<String>,
    /// Options of earlier releases on the same command line.
    #[arg(skip)]
    pub(super) earlier: Vec<FlagText>,
}

impl ServeArgs {
    /// # Errors
    /// Returns an error that lists all unreadable files, unknown keys and invalid values.
    pub(super) fn load(self) -> Result<(ServerConfig, Layers), Failure> {
        let mut flags = Vec::new();
        let mut add = |flag: &str, text: String| flags.push(FlagText::of(flag, text));
        self.listen.into_iter().for_each(|text| add("listen", text));
        let single = [
            ("state", self.state),
            ("templates", self.templates),
            ("domain", self.domain),
            (
                "insecure-loopback",
                self.insecure_loopback.then(|| "true".into()),
            ),
            ("cluster", self.cluster.then(|| "true".into())),
        ];
        for (flag, text) in single {
            text.into_iter().for_each(|text| add(flag, text));
        }
        flags.extend(self.set.into_iter().map(FlagText::of_set));
        flags.extend(self.earlier);
        let layers = Layers::load(self.config.as_deref(), Path::new(CONFIG_FILE), flags);
        let config = layers.config()?;
        Ok((config, layers))
    }
}

/// The state directory, for commands that need no other key.
#[derive(Args)]
pub(super) struct StateDir {
    /// State directory of the server [default: from the configuration file]
    #[arg(long, value_name = "DIR", conflicts_with = "config")]
    state: Option<PathBuf>,
    /// Configuration file from which the state directory is read [default: /etc/cube/cube.toml if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl StateDir {
    /// # Errors
    /// Returns an error if the configuration file cannot be read or contains mistakes.
    pub(super) fn find(self) -> Result<PathBuf, Failure> {
        self.find_with(Path::new(CONFIG_FILE))
    }

    fn find_with(self, usual: &Path) -> Result<PathBuf, Failure> {
        match self.state {
            Some(state) => Ok(state),
            None => {
                let layers = Layers::load(self.config.as_deref(), usual, Vec::new());
                layers.config().map(|config| config.server.state)
            }
        }
    }
}

#[cfg(test)]
mod tests;
