//! `cube-bench init`: writes a commented scenario to start from.

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
};

use clap::Args;
use testbed::exit::End;

use super::CommandError;

/// The scenario without its target.
const TEXT: &str = include_str!("init.toml");
/// Placeholder for the target in [`TEXT`].
const PLACE: &str = "@TARGET@";

#[derive(Args)]
pub(super) struct Init {
    /// File to write; it must not exist
    #[arg(default_value = "my-platform.toml")]
    file: PathBuf,
    /// Measure the E2B-compatible server at this URL
    #[arg(long, value_name = "URL")]
    target: Option<String>,
    /// Measure through this adapter (docs/measure/adapters.md): its program and all its arguments, so this is the
    /// last option
    #[arg(
        long,
        value_name = "COMMAND",
        num_args = 1..,
        allow_hyphen_values = true,
        conflicts_with = "target"
    )]
    adapter: Vec<String>,
}

impl Init {
    pub(super) fn carry_out(self) -> Result<End, CommandError> {
        let failed = |why: std::io::Error| CommandError::Init {
            path: self.file.clone(),
            why: match why.kind() {
                std::io::ErrorKind::AlreadyExists => {
                    "it exists; name another file, or delete it".to_owned()
                }
                _ => why.to_string(),
            },
        };
        let text = text(self.target.as_deref(), &self.adapter);
        let mut file = File::create_new(&self.file).map_err(failed)?;
        file.write_all(text.as_bytes()).map_err(failed)?;
        print!("{}", self.next(&self.file));
        Ok(End::Pass)
    }

    fn next(&self, file: &Path) -> String {
        let file = file.display();
        let first = if self.target.is_some() {
            "  export E2B_API_KEY=…        # the key of the server\n"
        } else if self.adapter.is_empty() {
            "  cargo xtask prepare         # builds cube-vmm and the template, if not done yet\n"
        } else {
            ""
        };
        format!(
            "{file} written. Next:\n{first}  \
             cube-bench plan {file}                    # what would be started\n  \
             cube-bench run {file} --set rounds=2      # does it work at all?\n  \
             cube-bench run {file}                     # measure; the last line names the directory of the reports\n"
        )
    }
}

/// The scenario for an endpoint, for an adapter, or, without either, for VMs on this host.
fn text(url: Option<&str>, adapter: &[String]) -> String {
    let quoted = |text: &str| toml::Value::from(text).to_string();
    let target = match (url, adapter) {
        (Some(url), _) => format!(
            "# A server with E2B's API. Its key is read from the environment variable E2B_API_KEY.\nkind = \"e2b\"\napi_url = {}\n\
             # If sandboxes have host names of their own:\n# sandbox_url = \"https://{{port}}-{{id}}.example.com\"",
            quoted(url)
        ),
        (None, []) => "# Clones that the harness starts itself on this host. \"e2b\": a server with E2B's API; \"adapter\": a program\n\
             # that starts sandboxes of any platform."
            .to_owned()
            + "\nkind = \"vmm-direct\"",
        (None, command) => format!(
            "# A program that starts sandboxes of any platform (docs/measure/adapters.md).\nkind = \"adapter\"\ncommand = {}",
            toml::Value::from(command.to_vec())
        ),
    };
    TEXT.replace(PLACE, &target)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use harness::scenario::{self, TargetKind};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        init: Init,
    }

    #[test]
    fn the_command_of_an_adapter_may_have_options() {
        let line = "init my.toml --adapter python3 -u adapter.py --region eu --target x";
        let init = Line::try_parse_from(line.split(' ')).unwrap().init;
        let command = "python3 -u adapter.py --region eu --target x";
        assert_eq!(init.adapter.join(" "), command);
        assert_eq!(
            (init.file.as_path(), init.target),
            (Path::new("my.toml"), None)
        );
    }

    #[test]
    fn every_written_scenario_is_valid() {
        let none: &[String] = &[];
        let url = "https://api.example.com";
        let command = ["python3".to_owned(), "my \"adapter\".py".to_owned()];
        for (url, adapter, kind) in [
            (None, none, TargetKind::VmmDirect),
            (Some(url), none, TargetKind::E2b),
            (None, &command, TargetKind::Adapter),
        ] {
            let text = text(url, adapter);
            let scenario = scenario::parse("t", &text).unwrap_or_else(|e| panic!("{e:?}: {text}"));
            assert_eq!(scenario.target.kind, kind);
            assert_eq!(scenario.target.api_url.as_deref(), url);
            assert_eq!(scenario.target.command, adapter);
            assert_eq!(scenario.rounds * scenario.arrival.starts(), 100, "a P95");
        }
    }
}
