//! Receivers of what happens to sandboxes.

use tokio::sync::mpsc;

use crate::change::{Change, Ended};

#[derive(Debug)]
pub(super) struct Followers {
    pub(super) ended: mpsc::UnboundedSender<Ended>,
    /// From the configuration. `None` if nothing follows the pool's changes.
    pub(super) changes: Option<mpsc::UnboundedSender<Change>>,
}

impl Followers {
    /// Reports the end of a sandbox, if it was one.
    pub(super) fn ended(&self, ended: Option<Ended>) {
        if let Some(ended) = ended {
            // The receiver may have been dropped.
            let _ = self.ended.send(ended);
        }
    }

    pub(super) fn changed(&mut self, change: Change) {
        self.changes
            .take_if(|changes| changes.send(change).is_err());
    }
}
