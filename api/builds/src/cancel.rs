//! Cancels running builds.

use tokio::sync::watch;

/// Cancels a build on request, and on drop.
#[derive(Debug)]
pub struct Canceller(watch::Sender<bool>);

/// The build's side. All clones refer to the same build.
#[derive(Clone, Debug)]
pub struct Cancel(watch::Receiver<bool>);

/// The two sides of one build.
#[must_use]
pub fn cancellation() -> (Canceller, Cancel) {
    let (sender, receiver) = watch::channel(false);
    (Canceller(sender), Cancel(receiver))
}

impl Canceller {
    /// Cancels the build. The executor is expected to stop the current step, remove its intermediate results, and
    /// return a failure.
    pub fn cancel(&self) {
        self.0.send_replace(true);
    }
}

impl Cancel {
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        *self.0.borrow() || self.0.has_changed().is_err()
    }

    /// Returns once the build is cancelled. Can be dropped and called again at any time.
    pub async fn cancelled(&mut self) {
        // An error means that the canceller is gone, which also cancels the build.
        let _ = self.0.wait_for(|cancelled| *cancelled).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_build_sees_a_cancel_and_the_loss_of_its_owner() {
        let (canceller, mut cancel) = cancellation();
        assert!(!cancel.is_cancelled());
        let early = tokio::time::timeout(std::time::Duration::ZERO, cancel.cancelled());
        assert!(early.await.is_err(), "returned before the cancel");
        canceller.cancel();
        cancel.cancelled().await;
        assert!(cancel.is_cancelled());
        let (canceller, mut cancel) = cancellation();
        drop(canceller);
        cancel.cancelled().await;
        assert!(cancel.is_cancelled());
    }
}
