//! Extends a sandbox's lifetime while a command or a copy uses it. The sandbox therefore lives as long as it is
//! used, and ends soon if this program is killed. Initially, the sandbox already has [`LEASE`] left.

use std::{
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread,
    time::Duration,
};

use rest::RefreshRequest;

use crate::server::{Server, segment};

/// Remaining lifetime of a sandbox after each extension.
pub(crate) const LEASE: Duration = Duration::from_secs(120);
/// Interval between two extensions; two in a row may fail.
const PERIOD: Duration = Duration::from_secs(40);

/// Extends the lifetime until it is dropped.
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
