//! Prolongs a sandbox's life as long as a command or a copy uses it. So a sandbox has no fixed end while it is used,
//! and ends soon after a program that was killed. When it begins, the sandbox has [`LEASE`] already.

use std::{
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread,
    time::Duration,
};

use rest::RefreshRequest;

use crate::server::{Server, segment};

/// The remaining life of a sandbox after each prolongation.
pub(crate) const LEASE: Duration = Duration::from_secs(120);
/// Between two prolongations: two may fail.
const PERIOD: Duration = Duration::from_secs(40);

/// Prolongs until it is dropped.
pub(crate) struct Lease(Option<Sender<()>>);

impl Lease {
    pub(crate) fn keep(mut server: Server, id: String) -> Self {
        let (kept, dropped) = mpsc::channel::<()>();
        thread::spawn(move || {
            let path = format!("/sandboxes/{}/refreshes", segment(&id));
            let body = RefreshRequest {
                duration: i64::try_from(LEASE.as_secs()).ok(),
            };
            while dropped.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                // If all attempts fail, the sandbox ends, and the main thread reports that.
                let _unreachable = server.send("POST", &path, &body);
            }
        });
        Self(Some(kept))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        drop(self.0.take());
    }
}
