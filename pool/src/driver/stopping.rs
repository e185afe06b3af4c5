//! The end of a server: a drain, then a close.

use crate::{answer::Reply, error::PoolError, sandbox::OnClose, work::Stop};

#[derive(Debug, Default)]
pub(super) struct Stopping {
    /// New creates are refused.
    is_draining: bool,
    /// Callers of drain and settle. They get their response when no start is queued and no sandbox is being changed.
    /// Adoptions of running sandboxes are not waited for, because an unresponsive VMM can delay them for a long time.
    settled: Vec<Reply<()>>,
    /// Set by close: no start, save or fill begins, and warm slots end.
    closing: Option<OnClose>,
    /// Set by close. Tells jobs that read large files to stop.
    jobs: Stop,
    /// Callers of close. They get their response when the driver ends.
    closed: Vec<Reply<()>>,
}

impl Stopping {
    pub(super) fn drain(&mut self, drained: Reply<()>) {
        self.is_draining = true;
        self.settle(drained);
    }

    pub(super) fn settle(&mut self, settled: Reply<()>) {
        self.settled.push(settled);
    }

    /// Whether a caller of drain or settle waits.
    pub(super) fn is_awaited(&self) -> bool {
        !self.settled.is_empty()
    }

    /// Responds to the callers of drain and settle.
    pub(super) fn has_settled(&mut self) {
        for settled in self.settled.drain(..) {
            settled.send(());
        }
    }

    /// Begins to close. A close that ends all sandboxes is not taken back.
    pub(super) fn close(&mut self, on_close: OnClose, closed: Reply<()>) {
        self.is_draining = true;
        self.jobs.set();
        self.closed.push(closed);
        if self.closing != Some(OnClose::Kill) {
            self.closing = Some(on_close);
        }
    }

    /// Responds to the callers of close.
    pub(super) fn has_closed(self) {
        for closed in self.closed {
            closed.send(());
        }
    }

    pub(super) fn is_draining(&self) -> bool {
        self.is_draining
    }

    pub(super) fn closing(&self) -> Option<OnClose> {
        self.closing
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.is_some()
    }

    /// # Errors
    /// Returns [`PoolError::Draining`] once the pool closes: nothing begins then.
    pub(super) fn check(&self) -> Result<(), PoolError> {
        if self.is_closing() {
            Err(PoolError::Draining)
        } else {
            Ok(())
        }
    }

    /// Stops jobs that read large files.
    pub(super) fn jobs(&self) -> Stop {
        self.jobs.clone()
    }
}
