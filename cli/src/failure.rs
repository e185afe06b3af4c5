//! Failures of commands: what failed, what cures it, and the exit code.

use std::fmt;

use api_client::endpoint::{BadUrl, DialError, TrustError};
use api_types::{
    envd::{ClientError, CutAnswer},
    one_line,
};
use serde_json::json;

use crate::output::FORMAT;

/// The kind of a failure, which decides the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The server refused the request, or an action failed.
    Refused,
    /// The server does not have what the request names.
    NotFound,
    /// The server needs a key, and none was given.
    NoKey,
    /// The command line is wrong.
    Usage,
    /// This host lacks something that the command needs, for example a file or a terminal.
    UnsuitableHost,
    /// No server answers, or not in the way that one should.
    Unreachable,
}

impl Kind {
    /// The exit code of commands. `cube run` and the like exit with [`ATTACHED`] instead.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Refused | Self::NotFound | Self::NoKey => 1,
            Self::Usage => 2,
            Self::UnsuitableHost => 6,
            Self::Unreachable => 7,
        }
    }
}

/// Exit code of `run`, `exec` and `shell` if they fail themselves, so that no code of the command can be meant.
pub(crate) const ATTACHED: u8 = 125;

/// A failure for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) kind: Kind,
    /// What failed, with which values, and why. In lower case.
    pub(crate) message: String,
    /// What to do about it. Absent if the message says it, or if nothing is known.
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

    /// Adds a cure if the server does not have what was named.
    #[must_use]
    pub(crate) fn if_not_found(self, cure: &str) -> Self {
        match (self.kind, &self.cure) {
            (Kind::NotFound, None) => self.with_cure(cure),
            _ => self,
        }
    }

    /// One line of JSON in the shape of all answers.
    pub(crate) fn to_json(&self, code: u8) -> String {
        let item = json!({"message": self.message, "cure": self.cure, "exitCode": code});
        json!({"format": FORMAT, "kind": "error", "items": [item]}).to_string()
    }

    /// A failed call to `to`.
    pub(crate) fn of_call(why: &ClientError, to: &dyn fmt::Display) -> Self {
        match why {
            ClientError::NotReachable { source, .. } => {
                let inner = source.get_ref().and_then(|inner| inner.downcast_ref());
                if let Some(CutAnswer { received, expected }) = inner {
                    let of = expected.map_or(String::new(), |all| format!(" of {all}"));
                    let text = format!("the answer of {to} ended after {received}{of} bytes");
                    return Self::refused(text).with_cure(
                        "it was cut there: what is read may be unreadable or have changed, or the server or sandbox ended",
                    );
                }
                let text = model::chain(why);
                let failure = Self::new(Kind::Unreachable, format!("{to} does not answer: {text}"));
                if is_untrusted(&source.to_string()) {
                    return failure.with_cure(
                        "the server's certificate is not trusted: name its authority with --ca FILE or SSL_CERT_FILE",
                    );
                }
                failure
            }
            ClientError::Timeout(_) | ClientError::Protocol(_) => Self::new(
                Kind::Unreachable,
                format!("{to} is not answering as it should: {why}"),
            ),
            ClientError::Refused { message, .. } => Self::refused(message.clone()),
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
            "is the server running? Start it with `cube-api serve`, or name another one with --url or E2B_API_URL",
        )
    }
}
