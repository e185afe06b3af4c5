//! `POST /fsfreeze` and `/fsthaw`: the layer while the host copies it without the guest's memory.
//!
//! The layer has no journal, and freed blocks are discarded at once. While files change, the disk may therefore name a
//! block whose content is gone; only a frozen file system is consistent. A child freezes and thaws it, because both can
//! block, and so can this process if it writes to the layer meanwhile: the child thaws after [`LIMIT`] in any case.

use std::{os::fd::OwnedFd, time::Duration};

use super::core::{Conn, Core};
use crate::sys;

/// How long a layer stays frozen if nobody thaws it. The host pauses the VM long before that.
const LIMIT: Duration = Duration::from_secs(20);
/// How long a request waits for the child.
const WAIT: Duration = Duration::from_millis(50);

/// The child that freezes the layer.
pub(crate) struct Freezer {
    pid: i32,
    /// Open until the layer is to be thawed.
    socket: Option<OwnedFd>,
    is_frozen: bool,
}

/// Answers 204 if the layer is frozen, 202 if it is not yet: the request must be repeated.
#[cold]
pub(crate) fn freeze(core: &mut Core, conn: &mut Conn) {
    if core.freezer.is_none() {
        let Some(layer) = core.duties.layer() else {
            return conn.error(501, "there is no layer");
        };
        match sys::start_freezer(layer, LIMIT) {
            Ok((pid, socket)) => {
                core.freezer = Some(Freezer {
                    pid,
                    socket: Some(socket),
                    is_frozen: false,
                });
            }
            Err(errno) => return conn.error(500, &format!("cannot freeze the layer: {errno}")),
        }
    }
    let Some(freezer) = &mut core.freezer else {
        return;
    };
    let Some(socket) = &freezer.socket else {
        // The former child still thaws.
        return conn.answer(202, "", b"");
    };
    if !freezer.is_frozen {
        match sys::freezer_result(socket, WAIT) {
            None => return conn.answer(202, "", b""),
            Some(Ok(())) => freezer.is_frozen = true,
            Some(Err(errno)) => {
                freezer.socket = None;
                return conn.error(500, &format!("cannot freeze the layer: {errno}"));
            }
        }
    }
    conn.answer(204, "", b"");
}

#[cold]
pub(crate) fn thaw(core: &mut Core, conn: &mut Conn) {
    if let Some(freezer) = &mut core.freezer {
        freezer.socket = None;
        // The child may be waiting for a write of a program that it has stopped.
        sys::continue_all();
    }
    conn.answer(204, "", b"");
}

/// Notes that a child has ended. If it was the one that freezes, it may have been killed before it thawed.
pub(crate) fn ended(core: &mut Core, pid: i32) {
    if core.freezer.take_if(|freezer| freezer.pid == pid).is_none() {
        return;
    }
    if let Some(layer) = core.duties.layer() {
        // Fails if it is not frozen.
        let _ = sys::thaw(layer);
        sys::continue_all();
    }
}
