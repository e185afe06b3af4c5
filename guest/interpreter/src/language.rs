//! The languages that cells may be written in, and how their hosts are started.

use std::{path::Path, time::Duration};

use crate::kernel::{self, Kernel};

/// Compiled where a JDK is, below the directory of hosts.
const JAVA_PROGRAM: &str = "java/host.jar";

/// A language of cells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Language {
    Python,
    JavaScript,
    TypeScript,
    Bash,
    /// Where its host is installed.
    Java,
    /// Whatever a Jupyter kernel speaks.
    Kernel(Kernel),
}

/// In what form a host takes requests; all answer alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// One line of JSON.
    Json,
    /// Fields that each end with a zero byte, for hosts that read no JSON.
    Fields,
}

/// Whom an interrupt is sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// The host with all that it started.
    Group,
    /// The host, which passes it on when it can be heard.
    Host,
    /// The host's event loop, by a message, and the group when that does not hear: a signal while Node changes who
    /// handles it, as it does where a script begins and ends, ends the process.
    Loop,
}

/// What is done about an interrupted cell that still runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Escalation {
    /// How long until it is interrupted again.
    pub(crate) again: Duration,
    /// How long until its host is replaced; `None` for hosts that hear in the end.
    pub(crate) replace: Option<Duration>,
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

    /// The one whose context is made ahead, for the snapshot alone: its compiler takes seconds to load.
    pub(crate) const AHEAD: Self = Self::TypeScript;

    /// The language of a name that a client gave, if this machine has it.
    pub(crate) fn parse(name: &str, hosts: &Path) -> Option<Self> {
        match name.trim().to_ascii_lowercase().as_str() {
            "" | "python" => Some(Self::Python),
            "javascript" | "js" => Some(Self::JavaScript),
            "typescript" | "ts" => Some(Self::TypeScript),
            "bash" => Some(Self::Bash),
            "java" if hosts.join(JAVA_PROGRAM).is_file() => Some(Self::Java),
            other => kernel::find(other).map(Self::Kernel),
        }
    }

    /// Its name in answers.
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Python => "python",
            Self::JavaScript => "javascript",
            Self::TypeScript => "typescript",
            Self::Bash => "bash",
            Self::Java => "java",
            Self::Kernel(kernel) => &kernel.name,
        }
    }

    /// What becomes of an interrupted cell that goes on.
    pub(crate) fn escalation(&self) -> Escalation {
        let seconds = Duration::from_secs;
        let (again, replace) = match self {
            // Python sleeps on if a signal arrives just before it sleeps.
            Self::Python => (Duration::from_millis(500), None),
            // A loop that never waits hears no message.
            Self::JavaScript | Self::TypeScript => (Duration::from_millis(250), None),
            // A shell's loop outlives the command that an interrupt ends, and one between two commands misses
            // both.
            Self::Bash => (Duration::from_millis(500), Some(seconds(5))),
            // The second interrupt stops a thread wherever it is, unless it catches even that, or waits in native
            // code, or the JDK no longer stops threads.
            Self::Java => (Duration::from_millis(500), Some(seconds(10))),
            // A kernel that is interrupted while it tells of an interrupt may never finish telling.
            Self::Kernel(_) => (seconds(10), Some(seconds(60))),
        };
        Escalation { again, replace }
    }

    pub(crate) fn reach(&self) -> Reach {
        match self {
            Self::Kernel(_) => Reach::Host,
            Self::JavaScript | Self::TypeScript => Reach::Loop,
            Self::Python | Self::Bash | Self::Java => Reach::Group,
        }
    }

    pub(crate) fn dialect(&self) -> Dialect {
        match self {
            Self::Bash | Self::Java => Dialect::Fields,
            Self::Python | Self::JavaScript | Self::TypeScript | Self::Kernel(_) => Dialect::Json,
        }
    }

    /// The command line of its host below the directory of hosts.
    pub(crate) fn command(&self, hosts: &Path, start: Start) -> Vec<String> {
        let file = |name: &str| hosts.join(name).display().to_string();
        let mut words = match self {
            Self::Python => vec!["python3".to_owned(), file("python/host.py")],
            Self::JavaScript => node(file("node/host.js"), "javascript"),
            Self::TypeScript => node(file("node/host.js"), "typescript"),
            Self::Bash => vec!["bash".to_owned(), file("bash/host.bash")],
            Self::Java => vec!["sh".to_owned(), file("java/host.sh")],
            Self::Kernel(kernel) => {
                let dir = kernel.dir.display().to_string();
                vec!["/proc/self/exe".to_owned(), "--kernel".to_owned(), dir]
            }
        };
        // Bash, Java and kernels start on first use, never before a snapshot.
        if start == Start::Warm {
            words.push("--warm".to_owned());
        }
        words
    }
}

/// Node cannot move a descriptor: the shell takes the socket away from standard input. The memory reducer is V8's
/// collection of garbage some seconds after the last one: in each clone of a snapshot anew, over 6 MB of its heap.
fn node(host: String, language: &str) -> Vec<String> {
    let script = "exec node --no-memory-reducer \"$@\" 3<&0 0</dev/null";
    ["sh", "-c", script, "sh", &host, language]
        .map(str::to_owned)
        .to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_clients_are_understood() {
        let hosts = tempfile::tempdir().unwrap();
        let parse = |name: &str| Language::parse(name, hosts.path());
        assert_eq!(parse(" JS "), Some(Language::JavaScript));
        assert_eq!(parse("Ts"), Some(Language::TypeScript));
        assert_eq!(parse("cobol"), None);
        let everywhere = [
            Language::Python,
            Language::JavaScript,
            Language::TypeScript,
            Language::Bash,
        ];
        for language in everywhere {
            assert_eq!(parse(language.name()), Some(language));
        }
    }

    #[test]
    fn java_is_there_where_it_was_compiled() {
        let hosts = tempfile::tempdir().unwrap();
        assert_ne!(Language::parse("java", hosts.path()), Some(Language::Java));
        let program = hosts.path().join(JAVA_PROGRAM);
        std::fs::create_dir(program.parent().unwrap()).unwrap();
        std::fs::write(program, "").unwrap();
        assert_eq!(Language::parse("Java", hosts.path()), Some(Language::Java));
    }
}
