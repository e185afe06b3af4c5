//! The body of a sandbox's response on its way to the client.
//!
//! When it ends as it should, the connection it came on waits for the next request. When it is dropped
//! before, because the client has gone, so is the connection: the guest sees its reader go.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};

use super::lanes::Pass;
use super::upload::Progress;
use super::upstream::Sender;

/// What is held while a response is under way.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) pass: Pass,
    pub(super) sender: Sender,
    /// Of the request, which may still be under way when the response ends.
    pub(super) progress: Progress,
    /// Whether the connection may be used again.
    pub(super) again: Again,
}

/// What becomes of a connection after a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Again {
    /// It is to the agent.
    Keep,
    /// It is a tunnel to a program that may end at any time.
    Drop,
}

/// See the module.
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
            && held.again == Again::Keep
            && held.progress.is_complete()
        {
            held.pass.put(held.sender);
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
            // Whoever reads may stop here, knowing the length.
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
