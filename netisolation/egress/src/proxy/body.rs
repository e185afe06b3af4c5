//! Bodies that pass through the proxy. They are never buffered: a frame is read when the other side accepts it.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use http_body_util::Full;
use hyper::{
    HeaderMap,
    body::{Body, Bytes, Frame, Incoming, SizeHint},
    header::HeaderName,
};
use tokio::{
    sync::oneshot,
    time::{Sleep, sleep},
};

use super::record::{Record, Traffic};

/// A client that waits for 100 Continue sends its body anyway after this time, as curl does.
const CONTINUE_TIME: Duration = Duration::from_secs(1);

/// The body of a request.
pub(crate) struct ToServer {
    inner: Incoming,
    traffic: Arc<Traffic>,
    /// Fields that must not occur in the trailers: names of the rule's headers.
    ruled: Vec<HeaderName>,
    wait: Option<ContinueWait>,
    ended: Arc<AtomicBool>,
}

/// Holds a body back until the server has sent 100 Continue.
pub(crate) struct ContinueWait {
    /// `None`: the server responded without 100 Continue, so the client must not be told to continue.
    continued: Option<oneshot::Receiver<()>>,
    limit: Pin<Box<Sleep>>,
}

impl ContinueWait {
    pub(crate) fn new() -> (oneshot::Sender<()>, Self) {
        let (continue_, continued) = oneshot::channel();
        let limit = Box::pin(sleep(CONTINUE_TIME));
        let wait = Self {
            continued: Some(continued),
            limit,
        };
        (continue_, wait)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(continued) = &mut self.continued {
            match Pin::new(continued).poll(cx) {
                Poll::Ready(Ok(())) => return Poll::Ready(()),
                Poll::Ready(Err(_)) => self.continued = None,
                Poll::Pending => {}
            }
        }
        self.limit.as_mut().poll(cx)
    }
}

impl ToServer {
    pub(crate) fn new(
        inner: Incoming,
        traffic: Arc<Traffic>,
        ruled: Vec<HeaderName>,
        wait: Option<ContinueWait>,
    ) -> Self {
        Self {
            inner,
            traffic,
            ruled,
            wait,
            ended: Arc::default(),
        }
    }

    /// Set when the guest has sent the last byte.
    pub(crate) fn ended(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.ended)
    }
}

impl Body for ToServer {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if let Some(wait) = &mut self.wait {
            if wait.poll(cx).is_pending() {
                return Poll::Pending;
            }
            self.wait = None;
        }
        let frame = Pin::new(&mut self.inner).poll_frame(cx);
        if matches!(frame, Poll::Ready(None)) || self.inner.is_end_stream() {
            self.ended.store(true, Ordering::Release);
        }
        frame.map_ok(|mut frame| {
            if let Some(data) = frame.data_ref() {
                self.traffic.count_out(data.len());
            }
            if let Some(trailers) = frame.trailers_mut() {
                without(trailers, &self.ruled);
            }
            frame
        })
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

fn without(trailers: &mut HeaderMap, names: &[HeaderName]) {
    for name in names {
        trailers.remove(name);
    }
}

/// The body of a response. The record of the request is sent when the body is dropped.
pub(crate) struct ToGuest {
    source: Source,
    _record: Option<Record>,
}

enum Source {
    Text(Full<Bytes>),
    Server(Incoming, Arc<Traffic>),
}

impl ToGuest {
    pub(crate) fn text(text: Bytes) -> Self {
        let source = Source::Text(Full::new(text));
        Self {
            source,
            _record: None,
        }
    }

    pub(crate) fn server(body: Incoming, record: Record) -> Self {
        let source = Source::Server(body, record.traffic());
        Self {
            source,
            _record: Some(record),
        }
    }
}

impl Body for ToGuest {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match &mut self.source {
            Source::Text(text) => {
                let frame = Pin::new(text).poll_frame(cx);
                frame.map_err(|never| match never {})
            }
            Source::Server(body, traffic) => {
                let frame = Pin::new(body).poll_frame(cx);
                frame.map_ok(|frame| {
                    if let Some(data) = frame.data_ref() {
                        traffic.count_in(data.len());
                    }
                    frame
                })
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            Source::Text(text) => text.is_end_stream(),
            Source::Server(body, _) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Text(text) => text.size_hint(),
            Source::Server(body, _) => body.size_hint(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    #[tokio::test]
    async fn a_final_answer_does_not_let_the_body_through() {
        let mut cx = Context::from_waker(Waker::noop());
        let (continue_, mut wait) = ContinueWait::new();
        drop(continue_);
        assert!(wait.poll(&mut cx).is_pending());
        assert!(wait.poll(&mut cx).is_pending());
        sleep(CONTINUE_TIME).await;
        assert!(wait.poll(&mut cx).is_ready());
        let (continue_, mut wait) = ContinueWait::new();
        continue_.send(()).unwrap();
        assert!(wait.poll(&mut cx).is_ready());
    }
}
