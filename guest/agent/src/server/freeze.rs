//! `POST /fsfreeze` and `/fsthaw`: the layer while the host copies it without the guest's memory.
//!
//! The layer has no journal, and freed blocks are discarded at once. While files change, the disk may therefore name a
//! block whose content is gone; only a frozen file system is consistent. This process also writes to the layer, and
//! would wait for ever if it did so while it alone could thaw it: a child thaws after [`LIMIT`].
//!
//! A freeze waits for writes that have begun, and new writes wait for the freeze. A program that holds a write open, such
//! as splice(2) from a pipe that stays empty, therefore stops this process and all writers until that write ends.

use std::time::Duration;

use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::core::{Conn, Core};
use crate::sys;

/// How long a layer stays frozen if nobody thaws it. The host pauses the VM within half of this time.
const LIMIT: Duration = Duration::from_secs(60);

#[cold]
pub(crate) fn freeze(core: &mut Core, conn: &mut Conn) {
    end_timer(core);
    let Some(layer) = core.duties.layer() else {
        return conn.error(501, "there is no layer");
    };
    let frozen = sys::thaw_after(layer, LIMIT).and_then(|timer| {
        core.thaw_timer = Some(timer);
        match sys::freeze(layer) {
            // A program of the guest has frozen it.
            Ok(()) | Err(Errno::EBUSY) => Ok(()),
            Err(errno) => Err(errno),
        }
    });
    match frozen {
        Ok(()) => conn.answer(204, "", b""),
        Err(errno) => {
            end_timer(core);
            conn.error(500, &format!("cannot freeze the layer: {errno}"));
        }
    }
}

#[cold]
pub(crate) fn thaw(core: &mut Core, conn: &mut Conn) {
    end_timer(core);
    match core.duties.layer().map_or(Ok(()), sys::thaw) {
        // It is not frozen.
        Ok(()) | Err(Errno::EINVAL) => conn.answer(204, "", b""),
        Err(errno) => conn.error(500, &format!("cannot thaw the layer: {errno}")),
    }
}

/// Ends the child, which is reaped like every other. Its pid is not another process's, because only this process reaps,
/// and forgets the pid first.
fn end_timer(core: &mut Core) {
    if let Some(timer) = core.thaw_timer.take() {
        let _ = kill(Pid::from_raw(timer), Signal::SIGKILL);
    }
}
