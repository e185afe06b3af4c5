//! The body of a sandbox's response on its way to the client.
//!
//! If the body ends normally, its connection to the agent becomes idle and can be reused. If the body is dropped
//! earlier because the client disconnected, the connection to the guest is closed, so that the guest notices.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};

use super::connections::RequestPermit;
use super::upload::Progress;
use super::upstream::Sender;

/// Resources of a response in progress.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) permit: RequestPermit,
    pub(super) sender: Sender,
    /// Progress of the request body, which may still be in transit when the response ends.
    pub(super) progress: Progress,
    pub(super) reuse: Reuse,
}

/// Whether a connection to the guest is reused after a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reuse {
    /// The connection leads to the agent.
    Keep,
    /// The connection leads to a program that may exit at any time.
    Close,
}

/// A response body; see the module documentation.
#[derive(Debug)]
pub(super) struct Reply {
    inner: Incoming,
    held: Option<Held>,
}

impl Reply {
    pub(super) fn new(inner: Incoming, held: Held) -> Self {
        let held = Some(held);
        let mut reply = Self { inner, held };
        if reply.inner.is_end_stream() {
            reply.finish();
        }
        reply
    }

    fn finish(&mut self) {
        if let Some(held) = self.held.take()
            && held.reuse == Reuse::Keep
            && held.progress.is_complete()
        {
            held.permit.keep(held.sender);
        }
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.inner).poll_frame(cx);
        match &polled {
            Poll::Ready(None) => self.finish(),
            // A caller that knows the body's length may never poll again after the last frame.
            Poll::Ready(Some(Ok(_))) if self.inner.is_end_stream() => self.finish(),
            Poll::Ready(Some(Err(_))) => self.held = None,
            _ => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
