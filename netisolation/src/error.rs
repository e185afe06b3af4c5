//! Why the network of a sandbox is not as it has to be.

use std::{error::Error, io};

use model::chain;

use crate::TapIndex;

/// See the variants.
#[derive(Debug, thiserror::Error)]
pub enum IsolationError {
    /// The host cannot do it.
    #[error("network isolation is not possible here: {what}; {cure}")]
    Unsuitable {
        /// What is missing.
        what: String,
        /// What to do.
        cure: String,
    },
    /// Read back, and it is not what was written.
    #[error("{index:?} is not as its policy wants it: {what}")]
    Mismatch {
        /// Which.
        index: TapIndex,
        /// The difference.
        what: String,
    },
    /// No such TAP.
    #[error("there is no TAP {0:?}")]
    Unknown(TapIndex),
    /// All are taken.
    #[error("all {0} TAPs are taken")]
    Exhausted(u32),
    /// More than one policy or sandbox may have.
    #[error("too many {what}: {limit} at most")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many there may be.
        limit: usize,
    },
    /// A system call.
    #[error("cannot {what}")]
    System {
        /// What was tried.
        what: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

pub(crate) fn unsuitable(what: impl Into<String>, cure: impl Into<String>) -> IsolationError {
    IsolationError::Unsuitable {
        what: what.into(),
        cure: cure.into(),
    }
}

pub(crate) fn system(
    what: impl Into<String>,
    source: impl Into<Box<dyn Error + Send + Sync>>,
) -> IsolationError {
    let source: Box<dyn Error + Send + Sync> = source.into();
    let source = match source.downcast::<io::Error>() {
        Ok(io) => *io,
        Err(other) => io::Error::other(chain(other.as_ref())),
    };
    IsolationError::System {
        what: what.into(),
        source,
    }
}
