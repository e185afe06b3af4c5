//! The options file of `cube-api serve --config FILE`, whose lines [`model::options`] reads.
//!
//! The options are inserted into the command line in place of `--config FILE`. A reload repeats the command line, so it
//! reads the file again. Commands that need only the state directory take it from the same file ([`StateDir`]).

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

use clap::Args;
use model::{BadOption, OPTIONS_FILE, STATE_DIR, options};

use super::Failure;

const OPTION: &str = "--config";
/// Commands that accept all options.
const COMMANDS: [&str; 3] = ["serve", "prepare", "end"];
const MAX_FILE: u64 = 1 << 20;

/// Replaces `--config FILE` with the options in the file, for the commands that accept all of them.
///
/// # Errors
/// Returns an error if the file cannot be read or a line is not an option.
pub(super) fn expand(
    arguments: impl IntoIterator<Item = OsString>,
) -> Result<Vec<OsString>, Failure> {
    let mut arguments = arguments.into_iter();
    let mut expanded: Vec<_> = arguments.by_ref().take(2).collect();
    if !COMMANDS
        .iter()
        .any(|name| expanded.get(1).is_some_and(|word| word == name))
    {
        expanded.extend(arguments);
        return Ok(expanded);
    }
    while let Some(argument) = arguments.next() {
        let text = argument.to_str().unwrap_or_default();
        let file = if text == OPTION {
            let file = arguments.next();
            file.ok_or_else(|| Failure::Usage(format!("{OPTION} needs the path of a file")))?
        } else if let Some(file) = text.strip_prefix("--config=") {
            file.into()
        } else {
            expanded.push(argument);
            continue;
        };
        let path = PathBuf::from(file);
        let text = read(&path).map_err(|why| unreadable(&path, &why))?;
        let options = options(&text).map_err(|why| malformed(&path, &why))?;
        expanded.extend(options.iter().map(|(name, value)| match value {
            Some(value) => format!("--{name}={value}").into(),
            None => format!("--{name}").into(),
        }));
    }
    Ok(expanded)
}

/// The state directory, for commands that need no other option.
#[derive(Args)]
pub(super) struct StateDir {
    /// State directory of the server [default: from the options file]
    #[arg(long, value_name = "DIR", conflicts_with = "config")]
    state: Option<PathBuf>,
    /// Options file of the server, from which `state = DIR` is used [default: /etc/cube/server.conf if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl StateDir {
    /// # Errors
    /// Returns an error if the options file cannot be read or a line is not an option.
    pub(super) fn find(self) -> Result<PathBuf, Failure> {
        self.find_with(Path::new(OPTIONS_FILE))
    }

    fn find_with(self, usual: &Path) -> Result<PathBuf, Failure> {
        if let Some(state) = self.state {
            return Ok(state);
        }
        let path = self.config.as_deref().unwrap_or(usual);
        let text = match read(path) {
            Err(why) if why.kind() == io::ErrorKind::NotFound && self.config.is_none() => {
                String::new()
            }
            text => text.map_err(|why| unreadable(path, &why))?,
        };
        let options = options(&text).map_err(|why| malformed(path, &why))?;
        let state = options.iter().find(|(name, _)| *name == "state");
        let state = state.and_then(|(_, value)| *value);
        Ok(state.unwrap_or(STATE_DIR).into())
    }
}

fn read(path: &Path) -> io::Result<String> {
    io::read_to_string(File::open(path)?.take(MAX_FILE))
}

fn unreadable(path: &Path, why: &io::Error) -> Failure {
    Failure::Usage(format!("{OPTION} {}: {why}", path.display()))
}

fn malformed(path: &Path, why: &BadOption) -> Failure {
    Failure::Usage(format!("{}, {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::{Arguments, Command, key::KeyCommand};
    use super::*;

    fn expanded(arguments: &[&str]) -> Result<Vec<String>, String> {
        let arguments = arguments.iter().map(OsString::from);
        let all = expand(arguments).map_err(|why| why.to_string())?;
        Ok(all.iter().map(|a| a.to_string_lossy().into()).collect())
    }

    #[test]
    fn the_lines_of_the_file_stand_in_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("server.conf");
        std::fs::write(&path, "max-sandboxes = 64\ninsecure-loopback\n").unwrap();
        let name = path.to_str().unwrap();
        let expected = [
            "x",
            "serve",
            "--max-sandboxes=64",
            "--insecure-loopback",
            "--rate",
        ];
        assert_eq!(
            expanded(&["x", "serve", "--config", name, "--rate"]).unwrap(),
            expected
        );
        let joined = format!("--config={name}");
        assert_eq!(expanded(&["x", "serve", &joined]).unwrap(), expected[..4]);
        std::fs::write(&path, "rate = 1\n--rate 5\n").unwrap();
        let why = expanded(&["x", "serve", "--config", name]).unwrap_err();
        assert!(why.contains("server.conf, line 2: \"--rate 5\""), "{why}");
        let why = expanded(&["x", "end", "--config", "/no/such/file"]).unwrap_err();
        assert!(why.contains("/no/such/file"), "{why}");
        let why = expanded(&["x", "prepare", "--config"]).unwrap_err();
        assert!(why.contains("path of a file"), "{why}");
    }

    fn state_of(line: &str) -> PathBuf {
        let words = line.split_whitespace().map(OsString::from);
        match Arguments::try_parse_from(expand(words).unwrap())
            .unwrap()
            .command
        {
            Command::Serve(config) | Command::Prepare(config) | Command::End(config) => {
                config.state
            }
            Command::Reload(state)
            | Command::Key(KeyCommand::New { state, .. })
            | Command::Key(KeyCommand::List { state })
            | Command::Key(KeyCommand::Revoke { state, .. }) => {
                state.find_with(Path::new("/no/such/file")).unwrap()
            }
            Command::Cluster(_) | Command::Ca(_) => panic!("{line}"),
        }
    }

    #[test]
    fn all_commands_of_the_packaged_unit_use_the_state_directory_of_its_options() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("server.conf");
        std::fs::write(&path, "rate = 5\nstate = /srv/cube\n").unwrap();
        let path = path.to_str().unwrap();
        let unit = include_str!("../../../dev/packaging/cube-api.service");
        let lines = unit
            .lines()
            .filter_map(|line| line.strip_prefix("Exec")?.split_once('='));
        let lines: Vec<_> = lines.map(|(_, command)| command).collect();
        assert!(lines.len() >= 4, "{lines:?}");
        let own = [
            "cube-api key new n --config C",
            "cube-api key list --config C",
            "cube-api key revoke n --config C",
        ];
        for line in lines.into_iter().chain(own) {
            let line = line
                .replace(OPTIONS_FILE, path)
                .replace(" C", &format!(" {path}"));
            assert_eq!(state_of(&line), Path::new("/srv/cube"), "{line}");
        }
    }

    #[test]
    fn the_state_directory_is_that_of_the_options_file_unless_it_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let usual = dir.path().join("server.conf");
        let find = |state: Option<&str>| {
            let state = state.map(PathBuf::from);
            StateDir {
                state,
                config: None,
            }
            .find_with(&usual)
            .unwrap()
        };
        assert_eq!(find(None), Path::new(STATE_DIR));
        std::fs::write(&usual, "state = /srv/cube\n").unwrap();
        assert_eq!(find(None), Path::new("/srv/cube"));
        assert_eq!(find(Some("/x")), Path::new("/x"));
        let config = Some(dir.path().join("absent"));
        let absent = StateDir {
            state: None,
            config,
        }
        .find_with(&usual);
        assert!(absent.unwrap_err().to_string().contains("absent"));
    }
}
