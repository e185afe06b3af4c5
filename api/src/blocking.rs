//! Work that waits for the disk, on threads of its own.

use std::io;

/// Runs work on a thread, so that the tasks of this one go on.
///
/// # Errors
/// Returns the error of the work, or one if it has panicked.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await?
}
