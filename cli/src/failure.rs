//! Failures of commands: cause, remedy and exit code.

use std::fmt;

use client::endpoint::{BadUrl, DialError, Endpoint, TrustError};
use envd::{ClientError, CutAnswer, one_line};
use serde_json::json;

use crate::output::FORMAT;

/// The kind of a failure, which decides the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The server refused the request, or an action failed.
    Refused,
    /// The server does not have what the request names.
    NotFound,
    /// The server requires a key, but none was given.
    NoKey,
    /// The command line is wrong.
    Usage,
    /// This host lacks something that the command needs, for example a file or a terminal.
    UnsuitableHost,
    /// No server responds, or not in the expected way.
    Unreachable,
    /// The server's certificate is not trusted.
    Untrusted,
}

impl Kind {
    /// Exit code of commands. `cube run` and similar commands exit with [`ATTACHED`] instead.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Refused | Self::NotFound | Self::NoKey => 1,
            Self::Usage => 2,
            Self::UnsuitableHost => 6,
            Self::Unreachable | Self::Untrusted => 7,
        }
    }
}

/// Exit code of `run`, `exec` and `shell` for their own failures, distinct from the usual codes of commands.
pub(crate) const ATTACHED: u8 = 125;

/// A failure for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) kind: Kind,
    /// The failed action, with its values and the cause, in lower case.
    pub(crate) message: String,
    /// Remedy. Absent if the message contains it, or if none is known.
    pub(crate) cure: Option<String>,
}

impl std::error::Error for Failure {}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&one_line(&self.message))?;
        match &self.cure {
            Some(cure) => write!(f, "\n  {}", one_line(cure)),
            None => Ok(()),
        }
    }
}

impl Failure {
    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            cure: None,
        }
    }

    pub(crate) fn refused(message: impl Into<String>) -> Self {
        Self::new(Kind::Refused, message)
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(Kind::Usage, message)
    }

    pub(crate) fn host(message: impl Into<String>) -> Self {
        Self::new(Kind::UnsuitableHost, message)
    }

    #[must_use]
    pub(crate) fn with_cure(mut self, cure: impl Into<String>) -> Self {
        self.cure = Some(cure.into());
        self
    }

    /// Adds a remedy if the server does not have the named object.
    #[must_use]
    pub(crate) fn if_not_found(self, cure: &str) -> Self {
        match (self.kind, &self.cure) {
            (Kind::NotFound, None) => self.with_cure(cure),
            _ => self,
        }
    }

    /// One line of JSON in the shape of all output.
    pub(crate) fn to_json(&self, code: u8) -> String {
        let item = json!({"message": self.message, "cure": self.cure, "exitCode": code});
        json!({"format": FORMAT, "kind": "error", "items": [item]}).to_string()
    }

    /// A failed call.
    pub(crate) fn of_call(why: &ClientError, peer: &Peer<'_>) -> Self {
        match why {
            ClientError::NotReachable { source, .. } => {
                let inner = source.get_ref().and_then(|inner| inner.downcast_ref());
                if let Some(CutAnswer { received, expected }) = inner {
                    let of = expected.map_or(String::new(), |all| format!(" of {all}"));
                    let text = format!("the response of {peer} ended after {received}{of} bytes");
                    return Self::refused(text).with_cure(
                        "it was cut off: the source may have changed or be unreadable, or the server or sandbox ended",
                    );
                }
                let text = format!("{peer} does not respond: {}", cause(why));
                if is_untrusted(&source.to_string()) {
                    return Self::new(Kind::Untrusted, text).with_cure(
                        "the server's certificate is not trusted: set its authority with --ca FILE or SSL_CERT_FILE",
                    );
                }
                Self::new(Kind::Unreachable, text).with_cure(peer.cure())
            }
            ClientError::Timeout(_) => {
                Self::new(Kind::Unreachable, format!("{peer} {}", cause(why)))
                    .with_cure(peer.cure())
            }
            ClientError::Protocol(_) => {
                let text = format!("{peer} sent an invalid response: {}", cause(why));
                Self::new(Kind::Unreachable, text).with_cure(peer.cure())
            }
            ClientError::Local { .. } => Self::host(cause(why)),
            ClientError::Refused { message, .. } => Self::refused(message.clone()),
        }
    }
}

/// The other side of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Peer<'a> {
    Server(&'a Endpoint),
    /// The agent of the sandbox with this id, through the server.
    Sandbox(&'a str),
}

impl fmt::Display for Peer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server(endpoint) => write!(f, "the server at {endpoint}"),
            Self::Sandbox(id) => write!(f, "sandbox {id}"),
        }
    }
}

impl Peer<'_> {
    /// Remedy if it does not respond.
    fn cure(&self) -> String {
        match self {
            Self::Server(_) => "check the URL and its scheme (http or https); \
                 `cube doctor` on the server's host and the server's log show whether it works"
                .to_owned(),
            Self::Sandbox(id) => {
                format!(
                    "`cube sandbox info {id}` shows whether it is running, `cube sandbox logs {id}` shows its log"
                )
            }
        }
    }
}

/// Why a call failed, in words that fit any peer; the texts of [`ClientError`] are for an agent.
pub(crate) fn cause(why: &ClientError) -> String {
    match why {
        ClientError::NotReachable { doing, source } => {
            format!("{doing} failed: {}", model::chain(source))
        }
        ClientError::Timeout(limit) => {
            format!(
                "did not respond within {}",
                humantime::format_duration(*limit)
            )
        }
        ClientError::Protocol(_) | ClientError::Local { .. } | ClientError::Refused { .. } => {
            model::chain(why)
        }
    }
}

fn is_untrusted(text: &str) -> bool {
    text.contains("invalid peer certificate")
}

impl From<BadUrl> for Failure {
    fn from(why: BadUrl) -> Self {
        Self::usage(why.to_string())
            .with_cure("set it with --url or E2B_API_URL, for example http://127.0.0.1:3000")
    }
}

impl From<TrustError> for Failure {
    fn from(why: TrustError) -> Self {
        Self::host(model::chain(&why))
    }
}

impl From<DialError> for Failure {
    fn from(why: DialError) -> Self {
        Self::new(Kind::Unreachable, model::chain(&why)).with_cure(
            "is the server running? Start it with `cube-api serve`, or set another URL with --url or E2B_API_URL",
        )
    }
}

#[cfg(test)]
mod tests {
    use std::{io, time::Duration};

    use super::*;

    #[test]
    fn a_failed_call_names_the_peer_and_its_cure() {
        let endpoint = Endpoint::parse("http://127.0.0.1:3000").unwrap();
        let server = Peer::Server(&endpoint);
        let lost = || ClientError::NotReachable {
            doing: "waiting for an answer",
            source: io::Error::other("the peer closed the connection"),
        };
        let late = ClientError::Timeout(Duration::from_secs(120));
        let other = ClientError::Protocol("unexpected text".to_owned());
        for (why, found) in [
            (&lost(), "waiting for an answer failed: the peer closed"),
            (
                &late,
                "the server at http://127.0.0.1:3000 did not respond within 2m",
            ),
            (&other, "unexpected text"),
        ] {
            let failure = Failure::of_call(why, &server);
            assert_eq!(failure.kind, Kind::Unreachable);
            assert!(failure.message.contains(found), "{failure}");
            assert!(!failure.message.contains("agent"), "{failure}");
            assert!(failure.cure.unwrap().contains("cube doctor"));
        }
        let failure = Failure::of_call(&lost(), &Peer::Sandbox("s1"));
        assert!(
            failure.message.starts_with("sandbox s1 does not respond"),
            "{failure}"
        );
        assert!(failure.cure.unwrap().contains("cube sandbox info s1"));
    }

    #[test]
    fn a_file_of_this_host_is_no_matter_of_the_peer() {
        let why = ClientError::Local {
            doing: "write the file of this host",
            source: io::Error::from_raw_os_error(28),
        };
        let failure = Failure::of_call(&why, &Peer::Sandbox("s1"));
        assert_eq!(failure.kind, Kind::UnsuitableHost);
        assert!(failure.message.contains("No space left") && !failure.message.contains("s1"));
    }
}
