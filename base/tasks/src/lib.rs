//! Tokio tasks and blocking work, boxed.
//!
//! The compiler generates tokio's task code, about 1000 lines of LLVM IR, for each type of future or closure that is
//! started. Through this crate, it is generated once for all of them. The price is an allocation per task.

use std::any::Any;
use std::io;
use std::pin::Pin;

use tokio::task::{JoinError, JoinHandle, spawn_blocking};

/// A boxed future, for [`tokio::task::JoinSet::spawn`] too.
pub type Task<T = ()> = Pin<Box<dyn Future<Output = T> + Send>>;

type Work = Box<dyn FnOnce() -> Box<dyn Any + Send> + Send>;

/// Boxes a future.
pub fn boxed<T>(future: impl Future<Output = T> + Send + 'static) -> Task<T> {
    Box::pin(future)
}

/// Starts a task on the current runtime.
///
/// # Panics
/// Panics outside a runtime, as [`tokio::spawn`] does.
pub fn spawn(future: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
    start(Box::pin(future))
}

fn start(task: Task) -> JoinHandle<()> {
    tokio::spawn(task)
}

/// Runs work on a blocking thread, so that other tasks on this thread continue. The work starts when the future is
/// polled first, and completes even if the future is dropped then.
///
/// # Errors
/// Returns an error if the work panicked or the runtime is shutting down.
pub async fn on_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    let done = run(Box::new(move || Box::new(work()))).await?;
    Ok(*done
        .downcast::<T>()
        .unwrap_or_else(|_| unreachable!("`work` returns this type")))
}

async fn run(work: Work) -> Result<Box<dyn Any + Send>, JoinError> {
    spawn_blocking(work).await
}

/// Like [`on_thread`], for disk I/O.
///
/// # Errors
/// Returns the error of the work, or an error if it panicked.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    on_thread(work).await?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_returns_its_value_its_error_or_its_panic() {
        assert_eq!(on_thread(|| 7_u8).await.unwrap(), 7);
        let missing = blocking(|| std::fs::read("/missing/file")).await;
        assert_eq!(missing.unwrap_err().kind(), io::ErrorKind::NotFound);
        let panicked = on_thread(|| panic!("in the work")).await;
        assert!(panicked.is_err_and(|why| why.is_panic()));
    }

    #[tokio::test]
    async fn a_task_runs_to_its_end() {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        spawn(async move { sender.send(7).unwrap() }).await.unwrap();
        assert_eq!(receiver.await, Ok(7));
    }
}
