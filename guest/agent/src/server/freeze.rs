//! `POST /fsfreeze` and `/fsthaw`: keep the layer consistent while the host copies it without the guest's memory.
//!
//! The layer has no journal, and freed blocks are discarded at once. While files change, the disk may therefore
//! refer to a block whose content is gone; only a frozen file system is consistent. A child freezes and thaws it,
//! because both can block, and so could this process if it wrote to the layer in between. The child thaws after
//! [`LIMIT`] in any case.

use std::{os::fd::OwnedFd, time::Duration};

use super::core::{Conn, Core};
use crate::sys;

/// How long a layer stays frozen without a thaw request. The host pauses the VM long before that.
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

/// Responds with 204 if the layer is frozen, or with 202 if it is not frozen yet and the request must be repeated.
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
        // The previous child is still thawing.
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
        // The child may be waiting for a write by a program that it has stopped.
        sys::continue_all();
    }
    conn.answer(204, "", b"");
}

/// Handles the end of a child. If it was the freezing child, it may have been killed before it thawed.
pub(crate) fn ended(core: &mut Core, pid: i32) {
    if core.freezer.take_if(|freezer| freezer.pid == pid).is_none() {
        return;
    }
    if let Some(layer) = core.duties.layer() {
        // Fails if the layer is not frozen.
        let _ = sys::thaw(layer);
        sys::continue_all();
    }
}
