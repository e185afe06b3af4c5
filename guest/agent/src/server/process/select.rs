//! Finding the process that a request names.

use envd::{
    ConnectCode::{InvalidArgument, NotFound},
    ConnectError, ProcessSelector,
};
use transport::Key;

use super::{
    super::{core::Core, message::error},
    child::Process,
};

/// Whether a selector may find a process that has ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    Included,
    Excluded,
}

/// Finds a process by PID, or by tag if the selector has no PID. A running process takes precedence, then the one that
/// ended last.
///
/// # Errors
/// Returns `NotFound` if no process matches, `InvalidArgument` if the selector is empty.
pub(crate) fn select(
    core: &Core,
    selector: &ProcessSelector,
    ended: Ended,
) -> Result<Key, ConnectError> {
    let matches = |process: &Process| match (selector.pid, &selector.tag) {
        (Some(pid), _) => process.pid.unsigned_abs() == pid,
        (None, Some(tag)) => process.tag.as_ref() == Some(tag),
        (None, None) => false,
    };
    let found = core
        .processes
        .iter()
        .filter(|(_, process)| matches(process));
    let found = found.filter(|(_, process)| process.is_running() || ended == Ended::Included);
    let best = found.max_by_key(|(_, process)| (process.is_running(), process.ended));
    match (best, selector.pid, &selector.tag) {
        (Some((key, _)), _, _) => Ok(key),
        (None, Some(pid), _) => error(NotFound, format!("process with pid {pid} not found")),
        (None, None, Some(tag)) => error(NotFound, format!("process with tag {tag} not found")),
        (None, None, None) => error(InvalidArgument, "neither pid nor tag of a process"),
    }
}
