//! Options that `run`, `exec` and `create` share.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use clap::{ArgAction, Args};
use envd::ProcessConfig;
use rest::{NetworkConfig, NewSandbox};

use crate::{
    attach::{Input, Order, Streams, is_terminal, size},
    failure::Failure,
};

/// A login shell: bash if the image has it.
const SHELL: &str = "if command -v bash >/dev/null; then exec bash -l; else exec sh -l; fi";
/// Denies everything that `allowOut` does not allow, IPv6 included.
const ALL: &str = "0.0.0.0/0";

/// Options for running a command.
#[derive(Args, Clone, Debug)]
pub(crate) struct CommandArgs {
    /// Forward standard input to the command
    #[arg(short, long)]
    pub(crate) interactive: bool,
    /// Give the command a terminal
    #[arg(short, long)]
    pub(crate) tty: bool,
    /// Environment variable of the command, or NAME alone to pass on the local value; may be repeated
    #[arg(short, long = "env", value_name = "NAME=VALUE")]
    pub(crate) envs: Vec<String>,
    /// User of the command [default: the template's]
    #[arg(short, long, value_name = "NAME")]
    pub(crate) user: Option<String>,
    /// Working directory of the command [default: the template's]
    #[arg(short, long, value_name = "DIR")]
    pub(crate) workdir: Option<String>,
    /// Kill the command after this time and exit with 124, for example 90s [default: no limit]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) timeout: Option<Duration>,
}

impl CommandArgs {
    /// The command to run, with the streams of this program. Without a command: a shell, if there is a terminal for
    /// it.
    pub(crate) fn order(&self, command: &[String]) -> Result<Order, Failure> {
        if self.tty && self.interactive && !is_terminal(std::io::stdin()) {
            return Err(
                Failure::usage("-t with -i needs a terminal as standard input")
                    .with_cure("leave out -t to forward a file or a pipe"),
            );
        }
        let (cmd, args) = match command {
            [cmd, args @ ..] => (cmd.clone(), args.to_vec()),
            [] if self.tty => (
                "/bin/sh".to_owned(),
                vec!["-c".to_owned(), SHELL.to_owned()],
            ),
            [] => {
                return Err(Failure::usage("no command is given")
                    .with_cure("write it after --, or use -it for a shell"));
            }
        };
        let mut envs = variables(&self.envs)?;
        if self.tty {
            let term = std::env::var("TERM").unwrap_or_else(|_| "xterm".to_owned());
            envs.entry("TERM".to_owned()).or_insert(term);
        }
        Ok(Order {
            process: ProcessConfig {
                cmd,
                args,
                envs,
                cwd: self.workdir.clone(),
            },
            user: self.user.clone(),
            input: if self.interactive {
                Input::Stream
            } else {
                Input::Nothing
            },
            streams: if self.tty {
                Streams::Terminal(size())
            } else {
                Streams::Pipes
            },
            limit: self.timeout,
        })
    }
}

/// Parses a time such as `90s` or `1h30m`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let parsed = humantime::parse_duration(text);
    parsed.map_err(|_| "write a number with a unit, for example 90s, 5m or 1h30m".to_owned())
}

/// `NAME=VALUE` pairs of an option. Texts without `=` are an error.
pub(crate) fn pairs(option: &str, given: &[String]) -> Result<BTreeMap<String, String>, Failure> {
    if let Some(text) = given.iter().find(|text| !text.contains('=')) {
        return Err(
            Failure::usage(format!("{option} {text}: the value is missing"))
                .with_cure(format!("write {option} NAME=VALUE")),
        );
    }
    variables(given)
}

/// `NAME=VALUE`, or `NAME` for this program's own value.
pub(crate) fn variables(given: &[String]) -> Result<BTreeMap<String, String>, Failure> {
    let mut found = BTreeMap::new();
    for text in given {
        let (name, value) = match text.split_once('=') {
            Some((name, value)) => (name, value.to_owned()),
            None => match std::env::var(text) {
                Ok(value) => (text.as_str(), value),
                Err(_) => {
                    return Err(Failure::usage(format!(
                        "--env {text}: this program has no such variable"
                    ))
                    .with_cure("write NAME=VALUE, or export the variable"));
                }
            },
        };
        if name.is_empty() {
            return Err(Failure::usage(format!("--env {text}: the name is empty")));
        }
        found.insert(name.to_owned(), value);
    }
    Ok(found)
}

/// Destinations that a new sandbox may reach.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct EgressArgs {
    /// Destination that the sandbox may reach: none, internet, or a host name, address or CIDR block; may be
    /// repeated [default: as configured on the server]
    #[arg(long = "egress", value_name = "WHAT", action = ArgAction::Append)]
    pub(crate) egress: Vec<String>,
}

impl EgressArgs {
    /// Sets the network options of a request.
    pub(crate) fn apply(&self, request: &mut NewSandbox) -> Result<(), Failure> {
        allow("--egress", &self.egress, request)
    }
}

/// Sets the network options of a request to the values of an option.
pub(crate) fn allow(
    option: &str,
    values: &[String],
    request: &mut NewSandbox,
) -> Result<(), Failure> {
    let words: Vec<&str> = values.iter().map(String::as_str).collect();
    match words.as_slice() {
        [] => {}
        ["none"] => request.allow_internet_access = Some(false),
        ["internet"] => request.allow_internet_access = Some(true),
        hosts if hosts.contains(&"none") || hosts.contains(&"internet") => {
            return Err(
                Failure::usage(format!("{option} none and {option} internet stand alone"))
                    .with_cure("use one of them, or only hosts and blocks"),
            );
        }
        hosts => {
            hosts
                .iter()
                .try_for_each(|host| check_destination(option, host))?;
            request.network = Some(NetworkConfig {
                allow_out: Some(values.to_vec()),
                deny_out: Some(vec![ALL.to_owned()]),
                ..NetworkConfig::default()
            });
        }
    }
    Ok(())
}

/// Finds the mistakes that a server's message could not name by their option.
fn check_destination(option: &str, text: &str) -> Result<(), Failure> {
    if let Some((_, rest)) = text.split_once("://") {
        let host = rest.split(['/', ':']).next().unwrap_or_default();
        return Err(Failure::usage(format!("{option} {text} is a URL"))
            .with_cure(format!("write the host alone: {option} {host}")));
    }
    let Some((address, length)) = text.split_once('/') else {
        return Ok(());
    };
    let longest = match address.parse() {
        Ok(IpAddr::V4(_)) => 32,
        Ok(IpAddr::V6(_)) => 128,
        Err(_) => {
            return Err(
                Failure::usage(format!("{option} {text} is not a CIDR block"))
                    .with_cure("write a host name without a path, or a block such as 10.0.0.0/8"),
            );
        }
    };
    match length.parse::<u8>() {
        Ok(length) if length <= longest => Ok(()),
        _ => Err(Failure::usage(format!(
            "{option} {text}: {length:?} is not a prefix length"
        ))
        .with_cure(format!("use 0 to {longest}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn egress(words: &[&str]) -> Result<NewSandbox, Failure> {
        let args = EgressArgs {
            egress: words.iter().map(ToString::to_string).collect(),
        };
        let mut request = NewSandbox::default();
        args.apply(&mut request).map(|()| request)
    }

    #[test]
    fn egress_becomes_the_options_of_the_interface() {
        assert_eq!(egress(&[]).unwrap(), NewSandbox::default());
        assert_eq!(
            egress(&["none"]).unwrap().allow_internet_access,
            Some(false)
        );
        assert_eq!(
            egress(&["internet"]).unwrap().allow_internet_access,
            Some(true)
        );
        let network = egress(&["pypi.org", "10.0.0.0/8"])
            .unwrap()
            .network
            .unwrap();
        assert_eq!(network.allow_out.unwrap(), ["pypi.org", "10.0.0.0/8"]);
        assert_eq!(network.deny_out.unwrap(), [ALL]);
        for (word, part) in [
            ("http://foo:80/x", "--egress foo"),
            ("10.0.0.0/33", "use 0 to 32"),
            ("foo/bar", "not a CIDR block"),
        ] {
            let why = egress(&[word]).unwrap_err().to_string();
            assert!(why.contains(part), "{why}");
        }
        assert!(egress(&["none", "pypi.org"]).is_err() && egress(&["fd00::/8"]).is_ok());
    }

    #[test]
    fn variables_have_a_value_or_take_that_of_this_program() {
        let given = |text: &str| variables(&[text.to_owned()]);
        assert_eq!(given("A=b=c").unwrap()["A"], "b=c");
        assert_eq!(given("A=").unwrap()["A"], "");
        assert_eq!(
            given("PATH").unwrap()["PATH"],
            std::env::var("PATH").unwrap()
        );
        let why = pairs("--metadata", &["bad".to_owned()]).unwrap_err();
        assert!(why.to_string().starts_with("--metadata bad:"), "{why}");
        assert!(duration("abc").unwrap_err().contains("90s"));
        assert!(given("=x").is_err() && given("CUBE_NO_SUCH_VARIABLE").is_err());
    }
}
