//! The control socket: requests and their responses, records, and the end of the server.
//!
//! One task reads and one writes. Records have a separate bounded queue with lower priority than requests. Records that
//! do not fit are counted, and the count is sent.

use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    os::unix::net::UnixStream as StdStream,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use egress::{
    control::{Ask, Authority, Call, Flow, MAX_MESSAGE, RuleOutcome, ToProxy, ToServer, Way},
    name::HostName,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, oneshot, watch},
    time::timeout,
};

use super::{
    HEAD_TIME,
    sandboxes::{Full, Membership, Sandboxes},
};

const QUESTIONS: usize = 256;
const RECORDS: usize = 1024;

#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("the control socket is closed")]
    Closed,
    #[error("no response within {} s", HEAD_TIME.as_secs())]
    Timeout,
    #[error("the first message is not the start message")]
    NoStart,
    #[error("cannot use the control socket")]
    Io(#[source] io::Error),
    #[error("a message is longer than {MAX_MESSAGE} bytes")]
    TooLong,
    /// Omits the parser's reason, which could quote a secret.
    #[error("a message cannot be read")]
    Message,
}

/// A flow, and its place among the connections of its sandbox.
pub(crate) struct Admission {
    pub(crate) flow: Flow,
    pub(crate) membership: Result<Membership, Full>,
}

pub(crate) struct Link {
    next: AtomicU64,
    pending: Mutex<Pending>,
    questions: mpsc::Sender<ToServer>,
    records: mpsc::Sender<Call>,
    lost: AtomicU64,
    closed: watch::Receiver<bool>,
}

#[derive(Default)]
struct Pending {
    flows: HashMap<u64, oneshot::Sender<Option<Admission>>>,
    rules: HashMap<u64, oneshot::Sender<RuleOutcome>>,
    ways: HashMap<u64, oneshot::Sender<Way>>,
}

/// Waits for the end of the control socket.
pub(crate) struct Closed(watch::Receiver<bool>);

impl Closed {
    pub(crate) async fn wait(&mut self) {
        // An error means that the reader has ended, and the socket is closed.
        let _ = self.0.wait_for(|closed| *closed).await;
    }
}

/// Reads the start message, then starts the tasks of the socket.
pub(crate) async fn begin(
    control: StdStream,
    sandboxes: Sandboxes,
) -> Result<(Arc<Link>, Authority), LinkError> {
    let stream = UnixStream::from_std(control).map_err(LinkError::Io)?;
    let (reader, writer) = stream.into_split();
    let mut messages = Messages::new(reader);
    let ToProxy::Start { authority } = messages.next().await?.ok_or(LinkError::Closed)? else {
        return Err(LinkError::NoStart);
    };
    let (questions, asked) = mpsc::channel(QUESTIONS);
    let (records, recorded) = mpsc::channel(RECORDS);
    let (close, closed) = watch::channel(false);
    let link = Arc::new(Link {
        next: AtomicU64::new(1),
        pending: Mutex::default(),
        questions,
        records,
        lost: AtomicU64::new(0),
        closed,
    });
    let reading = Arc::clone(&link);
    tokio::spawn(async move {
        if let Err(error) = reading.read(messages, &sandboxes).await {
            tracing::error!("closing the control socket: {error}");
        }
        *reading.pending() = Pending::default();
        close.send_replace(true);
    });
    tokio::spawn(write(Arc::clone(&link), writer, asked, recorded));
    Ok((link, authority))
}

impl Link {
    /// The flow of an accepted connection. `None` if there is none.
    pub(crate) async fn flow(&self, peer: SocketAddr) -> Result<Option<Admission>, LinkError> {
        let (answer, answered) = oneshot::channel();
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.pending().flows.insert(id, answer);
        let _pending = Asked { link: self, id };
        self.ask(ToServer::Flow { id, peer }, answered).await
    }

    /// The rule for a name of the sandbox whose connection was accepted from `peer`.
    pub(crate) async fn rule(
        &self,
        peer: SocketAddr,
        host: &HostName,
        ask: Ask,
    ) -> Result<RuleOutcome, LinkError> {
        let (answer, answered) = oneshot::channel();
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.pending().rules.insert(id, answer);
        let _pending = Asked { link: self, id };
        let question = ToServer::Rule {
            id,
            peer,
            host: host.to_string(),
            ask,
        };
        self.ask(question, answered).await
    }

    /// How connections of that sandbox leave the host.
    pub(crate) async fn way(&self, peer: SocketAddr) -> Result<Way, LinkError> {
        let (answer, answered) = oneshot::channel();
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.pending().ways.insert(id, answer);
        let _pending = Asked { link: self, id };
        self.ask(ToServer::Way { id, peer }, answered).await
    }

    async fn ask<T>(
        &self,
        question: ToServer,
        answered: oneshot::Receiver<T>,
    ) -> Result<T, LinkError> {
        let exchange = async {
            self.questions
                .send(question)
                .await
                .map_err(|_| LinkError::Closed)?;
            answered.await.map_err(|_| LinkError::Closed)
        };
        if *self.closed.borrow() {
            return Err(LinkError::Closed);
        }
        timeout(HEAD_TIME, exchange)
            .await
            .unwrap_or(Err(LinkError::Timeout))
    }

    /// Sends a record, unless the queue is full.
    pub(crate) fn record(&self, call: Call) {
        if self.records.try_send(call).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn closed(&self) -> Closed {
        Closed(self.closed.clone())
    }

    async fn read(&self, mut messages: Messages, sandboxes: &Sandboxes) -> Result<(), LinkError> {
        while let Some(message) = messages.next().await? {
            match message {
                ToProxy::Start { .. } => return Err(LinkError::Message),
                ToProxy::Flow { id, flow } => {
                    let waiting = self.pending().flows.remove(&id);
                    // The connection is counted here, in the order of the messages, so that no cut can miss it.
                    let admission = flow.map(|flow| Admission {
                        membership: sandboxes.join(&flow.sandbox),
                        flow,
                    });
                    if let Some(waiting) = waiting {
                        let _ = waiting.send(admission);
                    }
                }
                ToProxy::Rule { id, outcome } => {
                    let waiting = self.pending().rules.remove(&id);
                    if let Some(waiting) = waiting {
                        let _ = waiting.send(outcome);
                    }
                }
                ToProxy::Way { id, way } => {
                    let waiting = self.pending().ways.remove(&id);
                    if let Some(waiting) = waiting {
                        let _ = waiting.send(way);
                    }
                }
                ToProxy::Cut { sandbox } => sandboxes.cut(&sandbox),
            }
        }
        Ok(())
    }

    /// No code panics while it holds the lock.
    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A pending request. When it is dropped, its response is ignored.
struct Asked<'a> {
    link: &'a Link,
    id: u64,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        let mut pending = self.link.pending();
        pending.flows.remove(&self.id);
        pending.rules.remove(&self.id);
        pending.ways.remove(&self.id);
    }
}

async fn write(
    link: Arc<Link>,
    mut writer: OwnedWriteHalf,
    mut questions: mpsc::Receiver<ToServer>,
    mut records: mpsc::Receiver<Call>,
) {
    loop {
        let message = tokio::select! {
            biased;
            Some(question) = questions.recv() => question,
            Some(call) = records.recv() => ToServer::Call(call),
            else => return,
        };
        if send(&mut writer, &message).await.is_err() {
            return;
        }
        let calls = link.lost.swap(0, Ordering::Relaxed);
        if calls > 0 && send(&mut writer, &ToServer::Lost { calls }).await.is_err() {
            return;
        }
    }
}

async fn send(writer: &mut OwnedWriteHalf, message: &ToServer) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    writer.write_all(&line).await
}

/// Reads lines. The buffer is overwritten after each message, because it may have contained secrets.
struct Messages {
    reader: OwnedReadHalf,
    buffer: Vec<u8>,
    /// Bytes in the buffer that have not been processed.
    filled: usize,
}

impl Messages {
    fn new(reader: OwnedReadHalf) -> Self {
        Self {
            reader,
            buffer: vec![0; 64 << 10],
            filled: 0,
        }
    }

    /// `None` if the socket is closed.
    async fn next(&mut self) -> Result<Option<ToProxy>, LinkError> {
        let mut searched = 0;
        loop {
            let unsearched = &self.buffer[searched..self.filled];
            if let Some(end) = unsearched.iter().position(|byte| *byte == b'\n') {
                let end = searched + end;
                let message = serde_json::from_slice(&self.buffer[..end]);
                self.buffer.copy_within(end + 1..self.filled, 0);
                let filled = self.filled - end - 1;
                self.buffer[filled..self.filled].fill(0);
                self.filled = filled;
                return message.map(Some).map_err(|_| LinkError::Message);
            }
            searched = self.filled;
            if self.filled == self.buffer.len() {
                self.grow()?;
            }
            let read = self.reader.read(&mut self.buffer[self.filled..]).await;
            match read.map_err(LinkError::Io)? {
                0 => return Ok(None),
                read => self.filled += read,
            }
        }
    }

    fn grow(&mut self) -> Result<(), LinkError> {
        let length = self.buffer.len() * 2;
        if length > MAX_MESSAGE {
            return Err(LinkError::TooLong);
        }
        let mut grown = vec![0; length];
        grown[..self.filled].copy_from_slice(&self.buffer[..self.filled]);
        self.buffer.fill(0);
        self.buffer = grown;
        Ok(())
    }
}
