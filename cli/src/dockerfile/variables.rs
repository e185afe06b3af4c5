//! Variables of a Dockerfile. As in Docker, ARG applies only to the build, and ENV and the image's variables take
//! precedence over it. An argument on the command line replaces the default of the ARG with its name, before and
//! after FROM.

use std::collections::{BTreeMap, BTreeSet};

use super::words::{self, Word};

/// Values that BuildKit sets for `ARG NAME` without a value, and in FROM.
const PLATFORM: [(&str, &str); 6] = [
    ("BUILDPLATFORM", "linux/amd64"),
    ("BUILDOS", "linux"),
    ("BUILDARCH", "amd64"),
    ("TARGETPLATFORM", "linux/amd64"),
    ("TARGETOS", "linux"),
    ("TARGETARCH", "amd64"),
];

/// Arguments that need no ARG, and whose values only commands receive (Dockerfile reference, "Predefined ARGs").
const PROXIES: [&str; 10] = [
    "HTTP_PROXY",
    "http_proxy",
    "HTTPS_PROXY",
    "https_proxy",
    "FTP_PROXY",
    "ftp_proxy",
    "NO_PROXY",
    "no_proxy",
    "ALL_PROXY",
    "all_proxy",
];

/// The arguments of the command line (`--build-arg`).
pub(crate) type BuildArgs = BTreeMap<String, String>;

#[derive(Clone, Debug, Default)]
pub(super) struct Variables {
    /// Arguments of the command line.
    given: BuildArgs,
    /// Names of the ARGs so far.
    declared: BTreeSet<String>,
    /// ARGs before FROM: for FROM, and for an ARG without a value.
    global: BTreeMap<String, String>,
    arguments: BTreeMap<String, Value>,
    /// ENV variables, with their values if known here.
    envs: BTreeMap<String, Option<String>>,
}

#[derive(Clone, Debug)]
struct Value {
    for_server: String,
    /// Known if it depends only on the file.
    plain: Option<String>,
}

impl Variables {
    pub(super) fn new(given: &BuildArgs) -> Self {
        Self {
            given: given.clone(),
            ..Self::default()
        }
    }

    /// Names of given arguments without an ARG.
    pub(super) fn unused(&self) -> Vec<String> {
        let names = self.given.keys().filter(|name| {
            let is_known = PROXIES.contains(&name.as_str()) || is_platform(name);
            !is_known && !self.declared.contains(*name)
        });
        names.cloned().collect()
    }

    /// The value of an ARG for the server. `None`: there is no such ARG, or an ENV takes precedence.
    pub(super) fn argument(&self, name: &str) -> Option<&str> {
        let argument = self.arguments.get(name)?;
        (!self.envs.contains_key(name)).then_some(argument.for_server.as_str())
    }

    /// The value of a variable, if the file sets it.
    pub(super) fn value(&self, name: &str) -> Option<&str> {
        match self.envs.get(name) {
            Some(value) => value.as_deref(),
            None => self.arguments.get(name)?.plain.as_deref(),
        }
    }

    /// An ARG before FROM.
    pub(super) fn add_global(&mut self, name: &str, value: Option<&Word>) -> Result<(), String> {
        self.declared.insert(name.to_owned());
        let value = match (self.given.get(name), value) {
            (Some(given), _) => Some(given.clone()),
            (None, Some(word)) => Some(word.plain(&self.of_from())?),
            (None, None) => None,
        };
        self.global
            .extend(value.map(|value| (name.to_owned(), value)));
        Ok(())
    }

    pub(super) fn add_argument(&mut self, name: &str, value: Option<&Word>) {
        self.declared.insert(name.to_owned());
        let value = match (self.given.get(name), value) {
            (Some(given), _) => Value::literal(given),
            (None, Some(word)) => Value {
                for_server: word.for_server(self),
                plain: word.plain(self).ok(),
            },
            (None, None) => match self.of_from().arguments.remove(name) {
                Some(value) => value,
                None => return,
            },
        };
        self.arguments.insert(name.to_owned(), value);
    }

    /// Adds an ENV. Its value is `None` if it depends on the image.
    pub(super) fn add_env(&mut self, name: &str, value: Option<String>) {
        self.envs.insert(name.to_owned(), value);
    }

    /// The variables of FROM.
    pub(super) fn of_from(&self) -> Self {
        let platform = PLATFORM.iter().map(|(name, value)| {
            let given = self.given.get(*name).map(String::as_str);
            (*name, given.unwrap_or(value))
        });
        let global = self
            .global
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()));
        let arguments = platform.chain(global);
        let arguments = arguments.map(|(name, value)| (name.to_owned(), Value::literal(value)));
        Self {
            arguments: arguments.collect(),
            ..Self::default()
        }
    }

    /// A command, with the arguments set as its variables.
    pub(super) fn command(&self, command: String) -> String {
        let is_free =
            |name: &&String| !self.envs.contains_key(*name) && !self.arguments.contains_key(*name);
        let proxies = PROXIES
            .iter()
            .filter_map(|name| self.given.get_key_value(*name));
        let proxies = proxies
            .filter(|(name, _)| is_free(name))
            .map(|(name, value)| (name, Word::literal(value).for_server(self)));
        let names = self.arguments.keys();
        let names = names.filter(|name| !self.envs.contains_key(*name));
        let arguments = names.map(|name| (name, Word::variable(name).for_server(self)));
        let exports = proxies
            .chain(arguments)
            .map(|(name, value)| format!(" {name}={}", words::in_quotes(&value)));
        match exports.collect::<String>() {
            none if none.is_empty() => command,
            exports => format!("export{exports}\n{command}"),
        }
    }
}

impl Value {
    fn literal(text: &str) -> Self {
        Self {
            for_server: Word::literal(text).for_server(&Variables::default()),
            plain: Some(text.to_owned()),
        }
    }
}

fn is_platform(name: &str) -> bool {
    PLATFORM.iter().any(|(platform, _)| *platform == name)
}
