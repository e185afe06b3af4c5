//! The languages that cells may be written in, and how their hosts are started.

use std::{path::Path, time::Duration};

/// A language of cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Language {
    Python,
    JavaScript,
    TypeScript,
    Bash,
}

/// In what form a host takes requests; all answer alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// One line of JSON.
    Json,
    /// Fields that each end with a zero byte, for a shell, which reads no JSON.
    Fields,
}

/// What is done about a host that does not hear an interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Deafness {
    /// It is interrupted again: Node loses a signal that arrives while it changes who handles it, and Python
    /// sleeps on if one arrives just before it sleeps.
    Again,
    /// It is replaced: a shell's loop outlives the command that an interrupt ends.
    Replace,
}

impl Deafness {
    /// How long it has.
    pub(crate) fn patience(self) -> Duration {
        match self {
            Self::Again => Duration::from_millis(500),
            Self::Replace => Duration::from_secs(5),
        }
    }
}

/// Whether a host does before it is ready what users do first, so that a snapshot holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    Plain,
    Warm,
}

impl Language {
    /// Those that have a context from the start, in the order in which they are listed.
    pub(crate) const AT_START: [Self; 2] = [Self::Python, Self::JavaScript];

    /// The language of a name that a client gave.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        match name.trim().to_ascii_lowercase().as_str() {
            "" | "python" => Some(Self::Python),
            "javascript" | "js" => Some(Self::JavaScript),
            "typescript" | "ts" => Some(Self::TypeScript),
            "bash" => Some(Self::Bash),
            _ => None,
        }
    }

    /// Its name in answers.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::JavaScript => "javascript",
            Self::TypeScript => "typescript",
            Self::Bash => "bash",
        }
    }

    /// What becomes of an interrupted cell that goes on.
    pub(crate) fn deafness(self) -> Deafness {
        match self {
            Self::Python | Self::JavaScript | Self::TypeScript => Deafness::Again,
            Self::Bash => Deafness::Replace,
        }
    }

    pub(crate) fn dialect(self) -> Dialect {
        match self {
            Self::Bash => Dialect::Fields,
            Self::Python | Self::JavaScript | Self::TypeScript => Dialect::Json,
        }
    }

    /// The command line of its host below the directory of hosts.
    pub(crate) fn command(self, hosts: &Path, start: Start) -> Vec<String> {
        let file = |name: &str| hosts.join(name).display().to_string();
        let mut words = match self {
            Self::Python => vec!["python3".to_owned(), file("python/host.py")],
            Self::JavaScript => node(file("node/host.js"), "javascript"),
            Self::TypeScript => node(file("node/host.js"), "typescript"),
            Self::Bash => vec!["bash".to_owned(), file("bash/host.bash")],
        };
        if start == Start::Warm {
            words.push("--warm".to_owned());
        }
        words
    }
}

/// Node cannot move a descriptor: the shell takes the socket away from standard input.
fn node(host: String, language: &str) -> Vec<String> {
    let script = "exec node \"$@\" 3<&0 0</dev/null";
    ["sh", "-c", script, "sh", &host, language]
        .map(str::to_owned)
        .to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_clients_are_understood() {
        assert_eq!(Language::parse(" JS "), Some(Language::JavaScript));
        assert_eq!(Language::parse("Ts"), Some(Language::TypeScript));
        assert_eq!(Language::parse("cobol"), None);
        for language in [
            Language::Python,
            Language::JavaScript,
            Language::TypeScript,
            Language::Bash,
        ] {
            assert_eq!(Language::parse(language.name()), Some(language));
        }
    }
}
