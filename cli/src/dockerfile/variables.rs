//! Variables of a Dockerfile. As with Docker, ARG holds for the build only, and ENV and the image's variables precede it.

use std::collections::BTreeMap;

use super::words::{self, Word};

/// What BuildKit sets for `ARG NAME` without a value, and in FROM.
const PLATFORM: [(&str, &str); 6] = [
    ("BUILDPLATFORM", "linux/amd64"),
    ("BUILDOS", "linux"),
    ("BUILDARCH", "amd64"),
    ("TARGETPLATFORM", "linux/amd64"),
    ("TARGETOS", "linux"),
    ("TARGETARCH", "amd64"),
];

#[derive(Clone, Debug, Default)]
pub(super) struct Variables {
    /// ARG before FROM: for FROM, and for an ARG without a value.
    global: BTreeMap<String, String>,
    arguments: BTreeMap<String, Value>,
    /// Those of ENV, if their values are known here.
    envs: BTreeMap<String, Option<String>>,
}

#[derive(Clone, Debug)]
struct Value {
    for_server: String,
    /// Known if it depends on the file only.
    plain: Option<String>,
}

impl Variables {
    /// The value of an ARG for the server. `None`: there is no such ARG, or an ENV precedes it.
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
        if let Some(value) = value {
            let value = value.plain(&self.of_from())?;
            self.global.insert(name.to_owned(), value);
        }
        Ok(())
    }

    pub(super) fn add_argument(&mut self, name: &str, value: Option<&Word>) {
        let value = match value {
            Some(word) => Value {
                for_server: word.for_server(self),
                plain: word.plain(self).ok(),
            },
            None => match self.of_from().arguments.remove(name) {
                Some(value) => value,
                None => return,
            },
        };
        self.arguments.insert(name.to_owned(), value);
    }

    /// An ENV, whose value is `None` if it depends on the image.
    pub(super) fn add_env(&mut self, name: &str, value: Option<String>) {
        self.envs.insert(name.to_owned(), value);
    }

    /// The variables of FROM.
    pub(super) fn of_from(&self) -> Self {
        let platform = PLATFORM.iter().map(|(name, value)| (*name, *value));
        let global = self
            .global
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()));
        let arguments = platform.chain(global).map(|(name, value)| {
            let for_server = Word::literal(value).for_server(&Self::default());
            let plain = Some(value.to_owned());
            (name.to_owned(), Value { for_server, plain })
        });
        Self {
            arguments: arguments.collect(),
            ..Self::default()
        }
    }

    /// A command with the arguments as its variables.
    pub(super) fn command(&self, command: String) -> String {
        let names = self.arguments.keys();
        let exports = names
            .filter(|name| !self.envs.contains_key(*name))
            .map(|name| {
                let value = Word::variable(name).for_server(self);
                format!(" {name}={}", words::in_quotes(&value))
            });
        match exports.collect::<String>() {
            none if none.is_empty() => command,
            exports => format!("export{exports}\n{command}"),
        }
    }
}
