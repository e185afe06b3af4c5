//! Errors of network isolation.

use std::{error::Error, io};

use model::chain;

use crate::taps::tap::TapIndex;

#[derive(Debug, thiserror::Error)]
pub enum IsolationError {
    /// The host or the configuration does not allow network isolation.
    #[error("network isolation is not possible on this host: {what}; {cure}")]
    Unsuitable {
        /// The missing or wrong property.
        what: String,
        /// The remedy for the operator.
        cure: String,
    },
    /// The state read back from the kernel differs from the state that was written.
    #[error("the kernel state of {index:?} does not match its policy: {what}")]
    Mismatch {
        index: TapIndex,
        /// The first difference found.
        what: String,
    },
    /// The TAP does not exist, or it does not have the sandbox or policy that the call needs.
    #[error("unknown TAP {0:?}")]
    Unknown(TapIndex),
    /// Every TAP number is in use. Contains the maximum.
    #[error("all {0} TAPs are in use")]
    Exhausted(u32),
    /// A policy or sandbox exceeds a limit.
    #[error("too many {what}: the limit is {limit}")]
    TooMany {
        /// The limited quantity.
        what: &'static str,
        limit: usize,
    },
    /// A system call failed.
    #[error("cannot {what}")]
    System {
        /// The failed action.
        what: String,
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

/// Makes [`IsolationError::System`]. A source of another type is turned into an `io::Error` whose text includes its
/// causes.
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
