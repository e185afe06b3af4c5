//! Traces for a collector: spans of requests, and of the work of the pool, the VMM and the agent for them.
//!
//! ```text
//! traceparent of the client ─► POST /v2/sandboxes   cube-api
//!                                ├─ start           cube-pool    accepted … the agent is ready
//!                                ├─ restore         cube-vmm     process started … resumed, with the phases as events
//!                                └─ identity        cube-agent   resumed … ready
//! traceparent of the client ─► GET (data plane)     cube-api ─── traceparent ─► the program in the sandbox
//! ```
//! The spans of a start are derived from its timeline ([`StartPhase`]), which exists in any case. Nothing is measured
//! twice, and no other process is involved. The wire format is OTLP over HTTP with protobuf, which every collector
//! accepts. [`otlp`] encodes the few messages needed, which saves a dependency. Tracing is off unless the operator
//! configures a collector. When off, a request costs one flag check, without allocations.

mod context;
mod otlp;

use std::{
    future::Future,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::Duration,
};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use model::{StartPhase, Timeline, clock};
use pool::Sandbox;

pub use context::Context;
use otlp::Span;
pub(crate) use otlp::Value;

use crate::webhook::Webhook;

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// Maximum number of spans that wait for the exporter. Excess ones are dropped.
const QUEUE: usize = 4096;
const BATCH: usize = 512;
const EVERY: Duration = Duration::from_secs(1);
/// How long a stopping server waits for the last batch.
const LAST: Duration = Duration::from_secs(3);

/// Destination and sampling of spans.
#[derive(Clone, Debug)]
pub struct TraceSpec {
    /// URL of a collector. `/v1/traces` is appended.
    pub collector: String,
    /// Share of requests without a `traceparent` that are traced. If there is one, its flag decides.
    pub share: f64,
}

/// The program to which a span belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Program {
    Api,
    Pool,
    Vmm,
    Agent,
}

impl Program {
    fn name(self) -> &'static str {
        match self {
            Self::Api => "cube-api",
            Self::Pool => "cube-pool",
            Self::Vmm => "cube-vmm",
            Self::Agent => "cube-agent",
        }
    }
}

struct Exporter {
    queue: SyncSender<Message>,
    share: f64,
    dropped: AtomicU64,
}

enum Message {
    Span(Box<Span>),
    Flush(SyncSender<()>),
}

/// One per process: requests are traced wherever they are served.
static EXPORTER: OnceLock<Exporter> = OnceLock::new();

tokio::task_local! {
    /// The span of the request that this task serves.
    static CURRENT: Context;
}

/// Starts exporting. A second call has no effect.
///
/// # Errors
/// Returns a message if the URL is invalid or a thread cannot be started.
pub fn install(spec: &TraceSpec) -> Result<(), String> {
    let url = format!("{}/v1/traces", spec.collector.trim_end_matches('/'));
    let collector: Webhook = url.parse()?;
    let (queue, messages) = sync_channel(QUEUE);
    let exporter = Exporter {
        queue,
        share: spec.share,
        dropped: AtomicU64::new(0),
    };
    if EXPORTER.set(exporter).is_ok() {
        let exporting = thread::Builder::new().name("traces".into());
        let spawned = exporting.spawn(move || export(&collector, &messages));
        spawned.map_err(|why| why.to_string())?;
    }
    Ok(())
}

/// Sends the waiting spans. Blocks for at most a few seconds.
pub fn flush() {
    let Some(exporter) = EXPORTER.get() else {
        return;
    };
    let (done, sent) = sync_channel(1);
    if exporter.queue.try_send(Message::Flush(done)).is_ok() {
        let _late = sent.recv_timeout(LAST);
    }
}

/// A traced request.
#[derive(Debug)]
pub(crate) struct Request {
    context: Context,
    parent: Option<[u8; 8]>,
    began_ns: u64,
}

/// Begins the span of a request, or returns `None` if it is not traced.
pub(crate) fn begin(headers: &HeaderMap) -> Option<Request> {
    let exporter = EXPORTER.get()?;
    let given = headers.get(TRACEPARENT).and_then(|v| v.to_str().ok());
    let given = given.and_then(Context::parse);
    let (context, parent) = match given {
        Some(given) if given.is_sampled => (given.child()?, Some(given.span)),
        Some(_) => return None,
        None => (Context::root(exporter.share)?, None),
    };
    Some(Request {
        context,
        parent,
        began_ns: clock::unix_ns(),
    })
}

impl Request {
    /// Serves the request. Spans of [`started`] become children of its span.
    pub(crate) async fn within<T>(&self, serve: impl Future<Output = T>) -> T {
        CURRENT.scope(self.context, serve).await
    }

    /// Forwards the context, replacing the client's.
    pub(crate) fn pass_on(&self, headers: &mut HeaderMap) {
        if let Ok(value) = HeaderValue::from_str(&self.context.to_string()) {
            headers.insert(TRACEPARENT, value);
        }
    }

    /// Ends the span.
    pub(crate) fn end(self, name: String, status: u16, attributes: Vec<(&'static str, Value)>) {
        let mut all = vec![(
            "http.response.status_code",
            Value::Number(i64::from(status)),
        )];
        all.extend(attributes);
        send(Span {
            program: Program::Api,
            context: self.context,
            parent: self.parent,
            name,
            is_server: true,
            began_ns: self.began_ns,
            ended_ns: clock::unix_ns(),
            attributes: all,
            events: Vec::new(),
            is_error: status >= 500,
        });
    }
}

/// Makes this request's span available in a separate task.
pub(crate) fn carry<T>(serve: impl Future<Output = T>) -> impl Future<Output = T> {
    let context = CURRENT.try_with(|context| *context).ok();
    async move {
        match context {
            Some(context) => CURRENT.scope(context, serve).await,
            None => serve.await,
        }
    }
}

/// Adds the spans of a sandbox's start to the request that this task serves.
pub(crate) fn started(sandbox: &Sandbox) {
    if EXPORTER.get().is_none() {
        return;
    }
    let Ok(request) = CURRENT.try_with(|context| *context) else {
        return;
    };
    let offset = clock::unix_ns().saturating_sub(clock::monotonic_ns());
    let attributes = vec![
        ("cube.sandbox", Value::Text(sandbox.id.to_string())),
        ("cube.template", Value::Text(sandbox.template.id.clone())),
        ("cube.warm", Value::Flag(sandbox.warm)),
    ];
    for span in spans_of(&sandbox.timeline, request, offset, &attributes) {
        send(span);
    }
}

/// The spans of a start. `offset` is added to a stamp to get the wall-clock time.
fn spans_of(
    timeline: &Timeline,
    request: Context,
    offset: u64,
    attributes: &[(&'static str, Value)],
) -> Vec<Span> {
    use StartPhase::{Accepted, AgentReady, ProcessStarted, Resumed};
    let mut parent = request;
    let mut spans = Vec::new();
    for (program, name, from, to) in [
        (Program::Pool, "start", Accepted, AgentReady),
        (Program::Vmm, "restore", ProcessStarted, Resumed),
        (Program::Agent, "identity", Resumed, AgentReady),
    ] {
        let (Some(began), Some(ended)) = (timeline.at(from), timeline.at(to)) else {
            continue;
        };
        let Some(context) = parent.child() else {
            continue;
        };
        let inside = timeline
            .iter()
            .filter(|(_, at)| (began..=ended).contains(at));
        spans.push(Span {
            program,
            context,
            parent: Some(parent.span),
            name: name.to_owned(),
            is_server: false,
            began_ns: began + offset,
            ended_ns: ended.max(began) + offset,
            attributes: attributes.to_vec(),
            events: inside
                .map(|(phase, at)| (at + offset, phase.name()))
                .collect(),
            is_error: false,
        });
        if program == Program::Pool {
            parent = context;
        }
    }
    spans
}

fn send(span: Span) {
    let Some(exporter) = EXPORTER.get() else {
        return;
    };
    match exporter.queue.try_send(Message::Span(Box::new(span))) {
        Ok(()) => {}
        Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
            exporter.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The exporter thread.
fn export(collector: &Webhook, messages: &Receiver<Message>) {
    let mut batch = Vec::new();
    let mut is_failing = false;
    loop {
        let mut flushed = None;
        match messages.recv_timeout(EVERY) {
            Ok(Message::Span(span)) => {
                batch.push(*span);
                if batch.len() < BATCH {
                    continue;
                }
            }
            Ok(Message::Flush(done)) => flushed = Some(done),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if !batch.is_empty() {
            let body = otlp::encode(&batch);
            // The operator's own URL: any address is allowed.
            let posted = collector.post("application/x-protobuf", "", &body, |_| Ok(()));
            match posted {
                Ok(_) => is_failing = false,
                Err(why) if !is_failing => {
                    is_failing = true;
                    tracing::warn!(%why, spans = batch.len(), "cannot send traces to the collector: dropping them until it responds");
                }
                Err(_) => {}
            }
            batch.clear();
        }
        if let Some(done) = flushed {
            let _gone = done.send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_has_a_span_of_each_program_with_its_phases() {
        let mut timeline = Timeline::default();
        for (phase, at) in [
            (StartPhase::Accepted, 100),
            (StartPhase::ProcessStarted, 200),
            (StartPhase::Jailed, 250),
            (StartPhase::Resumed, 300),
            (StartPhase::AgentReady, 450),
        ] {
            timeline.stamp(phase, at);
        }
        let request = Context::root(1.0).unwrap();
        let attributes = [("cube.warm", Value::Flag(false))];
        let spans = spans_of(&timeline, request, 1000, &attributes);
        let shown: Vec<_> = spans
            .iter()
            .map(|s| {
                (
                    s.program.name(),
                    s.name.as_str(),
                    s.began_ns,
                    s.ended_ns,
                    s.events.len(),
                )
            })
            .collect();
        assert_eq!(
            shown,
            [
                ("cube-pool", "start", 1100, 1450, 5),
                ("cube-vmm", "restore", 1200, 1300, 3),
                ("cube-agent", "identity", 1300, 1450, 2),
            ]
        );
        assert_eq!(spans[0].parent, Some(request.span));
        assert!(
            spans[1..]
                .iter()
                .all(|s| s.parent == Some(spans[0].context.span))
        );
        assert!(spans.iter().all(|s| s.context.trace == request.trace));
        assert!(spans_of(&Timeline::default(), request, 0, &[]).is_empty());
    }

    #[test]
    fn without_a_collector_nothing_is_traced() {
        let mut headers = HeaderMap::new();
        let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        headers.insert(TRACEPARENT, parent.parse().unwrap());
        assert!(begin(&headers).is_none());
    }
}
