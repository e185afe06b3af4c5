//! `cube secret`: values that the server adds to outbound requests of sandboxes. A value comes from a file, an
//! environment variable or standard input, never from the command line, which other users of the host can read.

use std::{
    fs::File,
    io::{self, IsTerminal, Read},
    path::PathBuf,
};

use clap::{Args, Subcommand};
use rest::{NewSecret, Secret, SecretUpdate};
use serde_json::json;

use crate::{context::Context, failure::Failure, output::time, server::segment};

#[derive(Subcommand, Debug)]
pub(crate) enum SecretCommand {
    /// Store a value from standard input, and print the placeholder for rules
    Create {
        /// Name: letters, digits, - and _; stored in lower case
        name: String,
        #[command(flatten)]
        value: ValueArgs,
        /// Label; may be repeated
        #[arg(long, value_name = "NAME=VALUE")]
        metadata: Vec<String>,
        /// Host that the value may go to, or *.example.com for all names below it; may be repeated [default: any]
        #[arg(long = "host", value_name = "HOST")]
        hosts: Vec<String>,
    },
    /// List secrets, newest first; values are never shown
    #[command(visible_alias = "ls")]
    List,
    /// Show the properties of a secret, without its value
    Info {
        /// Id or name
        secret: String,
    },
    /// Store a new value from standard input; it applies to the next request of each sandbox
    Update {
        /// Id or name
        secret: String,
        #[command(flatten)]
        value: ValueArgs,
        /// Label, replacing all current ones; may be repeated
        #[arg(long, value_name = "NAME=VALUE")]
        metadata: Vec<String>,
        /// Host that the value may go to, replacing all current ones; may be repeated
        #[arg(long = "host", value_name = "HOST")]
        hosts: Vec<String>,
    },
    /// Delete secrets; sandbox requests that need them fail from now on
    #[command(visible_alias = "rm")]
    Delete {
        /// Ids or names
        #[arg(value_name = "SECRET", required = true)]
        secrets: Vec<String>,
    },
}

/// Source of the value.
#[derive(Args, Debug)]
#[group(multiple = false)]
pub(crate) struct ValueArgs {
    /// Read the value from this file instead of standard input; a trailing line end is removed
    #[arg(long, value_name = "FILE")]
    from_file: Option<PathBuf>,
    /// Take the value from this environment variable instead of standard input
    #[arg(long, value_name = "VARIABLE")]
    from_env: Option<String>,
}

const COLUMNS: [&str; 7] = [
    "NAME", "ID", "VERSION", "CREATED", "UPDATED", "HOSTS", "METADATA",
];
/// Maximum length of a value on the server, in bytes, plus a line end.
const MAX_VALUE: u64 = (64 << 10) + 2;

pub(crate) fn run(context: &Context, command: &SecretCommand) -> Result<(), Failure> {
    match command {
        SecretCommand::Create {
            name,
            value,
            metadata,
            hosts,
        } => {
            let body = NewSecret {
                name: name.clone(),
                value: value.read()?,
                metadata: labels(metadata)?,
                hosts: Some(hosts.clone()).filter(|hosts| !hosts.is_empty()),
            };
            let made: Secret = context.server()?.post("/secrets", &body)?;
            let item = serde_json::to_value(&made).unwrap_or_default();
            let placeholder = format!("${{e2b.secrets.{}}}", made.name);
            context.format.done("secret", &item, &placeholder)
        }
        SecretCommand::List => {
            let found: Vec<Secret> = context.server()?.pages("/secrets?limit=100")?;
            context.format.list("secret", &found, &COLUMNS, row)
        }
        SecretCommand::Info { secret } => {
            let found: Secret = context.server()?.get(&path(secret)).map_err(unknown)?;
            let cells = row(&found);
            let lines: Vec<_> = COLUMNS.into_iter().zip(cells).collect();
            context.format.properties("secret", &found, &lines)
        }
        SecretCommand::Update {
            secret,
            value,
            metadata,
            hosts,
        } => {
            let body = SecretUpdate {
                value: value.read()?,
                metadata: labels(metadata)?,
                hosts: Some(hosts.clone()).filter(|hosts| !hosts.is_empty()),
            };
            let made: Secret = context
                .server()?
                .post(&path(secret), &body)
                .map_err(unknown)?;
            let item = serde_json::to_value(&made).unwrap_or_default();
            let line = format!("{} version {}", made.name, made.current_version);
            context.format.done("secret", &item, &line)
        }
        SecretCommand::Delete { secrets } => {
            let mut server = context.server()?;
            for secret in secrets {
                server.delete(&path(secret)).map_err(unknown)?;
                let item = json!({"secret": secret, "deleted": true});
                context.format.done("secret", &item, secret)?;
            }
            Ok(())
        }
    }
}

fn path(reference: &str) -> String {
    format!("/secrets/{}", segment(reference))
}

fn unknown(why: Failure) -> Failure {
    why.if_not_found("`cube secret list` shows the secrets")
}

fn row(secret: &Secret) -> Vec<String> {
    let labels = secret.metadata.iter();
    let labels: Vec<_> = labels
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    vec![
        secret.name.clone(),
        secret.secret_id.clone(),
        secret.current_version.to_string(),
        time(Some(secret.created_at)),
        time(Some(secret.updated_at)),
        secret.hosts.join(","),
        labels.join(","),
    ]
}

/// `None`: no label was given.
fn labels(pairs: &[String]) -> Result<Option<std::collections::BTreeMap<String, String>>, Failure> {
    if pairs.is_empty() {
        return Ok(None);
    }
    let labels = pairs.iter().map(|pair| match pair.split_once('=') {
        Some((name, value)) => Ok((name.to_owned(), value.to_owned())),
        None => Err(Failure::usage(format!(
            "--metadata {pair}: write NAME=VALUE"
        ))),
    });
    labels.collect::<Result<_, _>>().map(Some)
}

impl ValueArgs {
    fn read(&self) -> Result<String, Failure> {
        if let Some(name) = &self.from_env {
            return std::env::var(name).map_err(|why| {
                Failure::usage(format!(
                    "cannot take the value from the variable {name}: {why}"
                ))
            });
        }
        let text = match &self.from_file {
            Some(path) => File::open(path).and_then(read_text).map_err(|why| {
                Failure::usage(format!(
                    "cannot read the value from {}: {why}",
                    path.display()
                ))
            }),
            None if io::stdin().is_terminal() => Err(Failure::usage(
                "standard input is a terminal, which would show the value",
            )
            .with_cure("pipe it, or use --from-file or --from-env")),
            None => read_text(io::stdin().lock()).map_err(|why| {
                Failure::usage(format!("cannot read the value from standard input: {why}"))
            }),
        };
        text.map(without_line_end)
    }
}

/// Reads only slightly more than a server accepts, so that the server reports the limit.
fn read_text(from: impl Read) -> io::Result<String> {
    let mut bytes = Vec::new();
    from.take(MAX_VALUE + 1).read_to_end(&mut bytes)?;
    String::from_utf8(bytes).map_err(|_| io::Error::other("it is not UTF-8"))
}

/// `echo` and editors add a line end.
fn without_line_end(mut text: String) -> String {
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_end_is_removed() {
        for (text, value) in [
            ("a\n", "a"),
            ("a\r\n", "a"),
            ("a\n\n", "a\n"),
            ("a", "a"),
            ("\n", ""),
        ] {
            assert_eq!(without_line_end(text.to_owned()), value);
        }
    }

    #[test]
    fn a_value_that_is_not_text_is_an_error() {
        assert!(read_text(&[0xff][..]).is_err());
        let long = vec![b'a'; 100_000];
        assert!(read_text(long.as_slice()).unwrap().len() > 64 << 10);
    }

    #[test]
    fn labels_are_pairs() {
        assert_eq!(labels(&[]).unwrap(), None);
        let found = labels(&["a=b=c".to_owned()]).unwrap().unwrap();
        assert_eq!(found["a"], "b=c");
        assert!(labels(&["a".to_owned()]).is_err());
    }
}
