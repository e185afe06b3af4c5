//! `cube key`: keys are files on the server's host, so this runs `cube-api key` there.

use std::{
    ffi::OsString,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Command, Stdio},
};

use clap::Subcommand;
use serde_json::{Value, json};

use crate::{context::Context, failure::Failure, output::Format};

pub(crate) const PROGRAM: &str = "cube-api";

#[derive(Subcommand, Debug)]
pub(crate) enum KeyCommand {
    /// Create a key and print it; it is not shown again
    New {
        /// Name of the key in lists
        name: String,
        /// Scope of the key; may be repeated [default: all except metrics:read and nodes:admin]
        #[arg(long = "scope", value_name = "SCOPE")]
        scopes: Vec<String>,
        /// State directory of the server [default: the default of cube-api]
        #[arg(long, value_name = "DIR")]
        state: Option<PathBuf>,
    },
    /// List keys: id, creation, state, scopes and name
    #[command(visible_alias = "ls")]
    List {
        /// State directory of the server [default: the default of cube-api]
        #[arg(long, value_name = "DIR")]
        state: Option<PathBuf>,
    },
    /// Revoke a key by its id, or by its name if that is unique
    Revoke {
        /// Id or name
        key: String,
        /// State directory of the server [default: the default of cube-api]
        #[arg(long, value_name = "DIR")]
        state: Option<PathBuf>,
    },
}

pub(crate) fn run(context: &Context, command: &KeyCommand) -> Result<(), Failure> {
    let mut program = Command::new(program());
    program.arg("key").args(command.words());
    match context.format {
        Format::Human => Err(missing(&program.exec())),
        Format::Json => {
            let output = program.stderr(Stdio::inherit()).output();
            let output = output.map_err(|why| missing(&why))?;
            if !output.status.success() {
                return Err(Failure::refused(format!(
                    "{PROGRAM} key failed: {}",
                    output.status
                )));
            }
            let text = String::from_utf8_lossy(&output.stdout);
            let items: Vec<Value> = text.lines().map(|line| command.item(line)).collect();
            context.format.list("key", &items, &[], |_| Vec::new())
        }
    }
}

fn missing(why: &std::io::Error) -> Failure {
    Failure::host(format!("cannot run {PROGRAM}: {why}"))
        .with_cure("keys are made on the server's host: run `cube-api key` there")
}

/// The program next to this one, or else the one in PATH.
pub(crate) fn program() -> PathBuf {
    let own = std::env::current_exe().unwrap_or_default();
    let beside = own.with_file_name(PROGRAM);
    if beside.is_file() {
        beside
    } else {
        PROGRAM.into()
    }
}

impl KeyCommand {
    fn words(&self) -> Vec<OsString> {
        let mut words: Vec<OsString> = Vec::new();
        let state = match self {
            Self::New {
                name,
                scopes,
                state,
            } => {
                words.extend(["new".into(), name.into()]);
                words.extend(scopes.iter().flat_map(|s| ["--scope".into(), s.into()]));
                state
            }
            Self::List { state } => {
                words.push("list".into());
                state
            }
            Self::Revoke { key, state } => {
                words.extend(["revoke".into(), key.into()]);
                state
            }
        };
        words.extend(state.iter().flat_map(|dir| ["--state".into(), dir.into()]));
        words
    }

    /// A line printed by the program.
    fn item(&self, line: &str) -> Value {
        match self {
            Self::New { name, .. } => json!({"name": name, "key": line}),
            Self::List { .. } | Self::Revoke { .. } => {
                let mut words = line.splitn(5, "  ");
                let mut next = || words.next().unwrap_or_default();
                let (id, created, state, scopes, name) = (next(), next(), next(), next(), next());
                let scopes: Vec<_> = scopes.split(',').collect();
                json!({
                    "id": id, "createdAt": created, "state": state, "scopes": scopes, "name": name,
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_server_become_items() {
        let list = KeyCommand::List { state: None };
        let line = "k1  2026-11-26T10:00:00Z  live  sandboxes:read,templates:read  my  laptop";
        let item = list.item(line);
        assert_eq!(
            (&item["id"], &item["state"]),
            (&json!("k1"), &json!("live"))
        );
        assert_eq!(item["scopes"], json!(["sandboxes:read", "templates:read"]));
        assert_eq!(item["name"], "my  laptop");
    }

    #[test]
    fn words_are_those_of_the_server_s_program() {
        let new = KeyCommand::New {
            name: "n".to_owned(),
            scopes: vec!["a".to_owned()],
            state: Some("/s".into()),
        };
        assert_eq!(new.words(), ["new", "n", "--scope", "a", "--state", "/s"]);
    }
}
