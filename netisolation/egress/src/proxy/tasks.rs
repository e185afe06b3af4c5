//! Tasks of one guest connection. They end with their owner, so that a cut leaves none behind.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hyper::rt::Executor;
use tokio::task::JoinSet;

/// Starts tasks.
#[derive(Clone, Default)]
pub(crate) struct Tasks(Arc<Mutex<JoinSet<()>>>);

/// Ends the tasks when it is dropped. Must not be part of a task itself.
pub(crate) struct Owner(Tasks);

impl Tasks {
    pub(crate) fn new() -> (Self, Owner) {
        let tasks = Self::default();
        (tasks.clone(), Owner(tasks))
    }

    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    /// No code panics while it holds the lock.
    fn lock(&self) -> MutexGuard<'_, JoinSet<()>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.lock().abort_all();
    }
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Tasks {
    fn execute(&self, task: F) {
        self.spawn(task);
    }
}
