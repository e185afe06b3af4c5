//! Blocking work, such as disk I/O, on separate threads.

use std::io;

/// Runs work on a blocking thread, so that other tasks on this thread continue.
///
/// # Errors
/// Returns the error of the work, or an error if it panicked.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await?
}
