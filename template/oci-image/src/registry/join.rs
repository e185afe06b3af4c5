//! Runs several futures on one task.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

/// Runs futures concurrently on this task. Returns their results in order, or the first error.
pub(super) async fn join_all<T, E>(
    futures: impl Iterator<Item = impl Future<Output = Result<T, E>>>,
) -> Result<Vec<T>, E> {
    let mut running: Vec<_> = futures.map(|future| Some(Box::pin(future))).collect();
    let mut results: Vec<Option<T>> = running.iter().map(|_| None).collect();
    std::future::poll_fn(move |context: &mut Context<'_>| {
        for (slot, result) in running.iter_mut().zip(&mut results) {
            let Some(future) = slot else {
                continue;
            };
            match Pin::new(future).poll(context) {
                Poll::Pending => {}
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Ready(Ok(value)) => {
                    *result = Some(value);
                    *slot = None;
                }
            }
        }
        if running.iter().any(Option::is_some) {
            return Poll::Pending;
        }
        Poll::Ready(Ok(results.drain(..).flatten().collect()))
    })
    .await
}
