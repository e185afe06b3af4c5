//! The languages of cells, and the command lines of their hosts.

use std::{path::Path, time::Duration};

use crate::{
    kernel::{self, Kernel},
    message::Dialect,
};

/// The program of the Java host, relative to the directory of hosts. It is compiled only on machines with a JDK.
const JAVA_PROGRAM: &str = "java/host.jar";
/// The script that compiles it.
const JAVA_BUILD: &str = "java/build.sh";

/// The template that has R and Java.
const COMPLETE: &str = "a sandbox of the template code-interpreter-v1, as `cargo xtask template code-interpreter` builds it now";

/// A language of cells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Language {
    Python,
    JavaScript,
    TypeScript,
    Bash,
    /// Available if [`JAVA_PROGRAM`] is installed.
    Java,
    /// The language of a Jupyter kernel.
    Kernel(Kernel),
}

/// The recipient of an interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// The host's process group, by SIGINT.
    Group,
    /// The host process, by SIGINT. It passes the interrupt on once the kernel can handle it.
    Host,
    /// The host's event loop, by a message; if it does not react, the process group, by SIGINT. The signal comes second
    /// because it ends Node if it arrives while Node changes its handler, at the beginning and end of a script.
    Loop,
}

/// The escalation for an interrupted cell that still runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Escalation {
    /// Time until the cell is interrupted again.
    pub(crate) again: Duration,
    /// Time until the host is replaced; `None` for hosts on which an interrupt eventually takes effect.
    pub(crate) replace: Option<Duration>,
}

/// Whether a host runs warm-up code before it is ready, so that a snapshot contains its effects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    Plain,
    Warm,
}

impl Language {
    /// Languages whose default contexts are created when the server starts, in the order of listing.
    pub(crate) const AT_START: [Self; 2] = [Self::Python, Self::JavaScript];

    /// The language whose context is created ahead for a snapshot, because its compiler takes seconds to load.
    pub(crate) const AHEAD: Self = Self::TypeScript;

    /// Finds a language by a name that a client gave; the empty name means Python. `None` if this machine does not have
    /// the language.
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

    /// How a client can use a language whose host is missing or does not start.
    pub(crate) fn cure(name: &str, hosts: &Path) -> String {
        let build = hosts.join(JAVA_BUILD);
        let install = match name.trim().to_ascii_lowercase().as_str() {
            "r" | "ir" => "apt-get install -y r-cran-irkernel".to_owned(),
            "java" if build.is_file() => {
                let build = build.display();
                format!("apt-get install -y default-jdk-headless && sh {build}")
            }
            "java" => return format!("use {COMPLETE}"),
            _ => {
                return "use python, javascript, typescript, bash, r or java, or install a Jupyter kernel \
                    for it, see docs/use/interpreter.md"
                    .to_owned();
            }
        };
        format!("use {COMPLETE}; or run as root: {install}")
    }

    /// The name in responses.
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

    /// The escalation for an interrupted cell that still runs.
    pub(crate) fn escalation(&self) -> Escalation {
        let seconds = Duration::from_secs;
        let (again, replace) = match self {
            // Python misses a signal that arrives just before it begins to sleep.
            Self::Python => (Duration::from_millis(500), None),
            // A loop that never returns to the event loop does not read the message.
            Self::JavaScript | Self::TypeScript => (Duration::from_millis(250), None),
            // A shell's loop continues after an interrupt has ended one of its commands, and an interrupt between two
            // commands has no effect.
            Self::Bash => (Duration::from_millis(500), Some(seconds(5))),
            // The second interrupt stops the thread anywhere, unless the code catches that as well, waits in native
            // code, or runs on a JDK that no longer stops threads.
            Self::Java => (Duration::from_millis(500), Some(seconds(10))),
            // A kernel that is interrupted while it reports an interrupt may never complete the report.
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

    /// The command line that starts the host. `hosts` is the directory of hosts.
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
        // Only hosts that start before a snapshot get this flag. Bash, Java and kernels start on first use.
        if start == Start::Warm {
            words.push("--warm".to_owned());
        }
        words
    }
}

/// Node cannot duplicate descriptors, so a shell moves the socket from standard input to descriptor 3. V8's memory
/// reducer is disabled: it collects garbage some seconds after the last collection, which would write over 6 MB of the
/// heap in each clone of a snapshot.
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
    fn language_names_and_aliases_are_accepted() {
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
    fn a_missing_language_has_a_cure() {
        let hosts = tempfile::tempdir().unwrap();
        let cure = |name: &str| Language::cure(name, hosts.path());
        for name in [" R ", "ir"] {
            assert!(cure(name).ends_with("run as root: apt-get install -y r-cran-irkernel"));
        }
        assert_eq!(cure("java"), format!("use {COMPLETE}"));
        assert!(cure("cobol").contains("install a Jupyter kernel"));
        // The JDK alone is not enough, and the build script must not be suggested where it is missing.
        let build = hosts.path().join(JAVA_BUILD);
        std::fs::create_dir(build.parent().unwrap()).unwrap();
        std::fs::write(&build, "").unwrap();
        let run = format!("default-jdk-headless && sh {}", build.display());
        assert!(cure("java").ends_with(&run), "{}", cure("java"));
    }

    #[test]
    fn java_is_available_if_its_host_is_installed() {
        let hosts = tempfile::tempdir().unwrap();
        assert_ne!(Language::parse("java", hosts.path()), Some(Language::Java));
        let program = hosts.path().join(JAVA_PROGRAM);
        std::fs::create_dir(program.parent().unwrap()).unwrap();
        std::fs::write(program, "").unwrap();
        assert_eq!(Language::parse("Java", hosts.path()), Some(Language::Java));
    }
}
