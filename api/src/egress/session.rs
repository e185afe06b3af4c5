//! The protocol with one proxy process over its control socket. Everything that the proxy sends is bounded and checked:
//! it parses bytes from guests and servers, so it may be compromised.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use ::egress::control::{
    Ask, Authority, Call, Flow, MAX_MESSAGE, RuleOutcome, ToProxy, ToServer, Way,
};
use model::SandboxId;
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader},
    sync::{Semaphore, mpsc},
    time::{sleep, timeout},
};
use zeroize::{Zeroize, Zeroizing};

/// Maximum number of rule requests served concurrently. Further messages wait in the socket.
const CONCURRENT: usize = 256;
/// Maximum number of responses waiting for the socket.
const WAITING: usize = 256;
/// Maximum number of connections that wait for the adoption of their sandbox. Further ones are closed.
const AWAITED: usize = 1024;
/// How long a connection waits for the adoption of its sandbox. The proxy's own limit is longer.
const ADOPTION: Duration = Duration::from_secs(8);
const ADOPTION_POLL: Duration = Duration::from_millis(10);
/// Time limit for resolving the name of a sandbox's own proxy. The proxy's own limit is longer.
pub(super) const LOOKUP: Duration = Duration::from_secs(8);
/// How long the proxy may leave a response unread.
const PATIENCE: Duration = Duration::from_millis(if cfg!(test) { 500 } else { 10_000 });

/// The response for a peer address without an open flow. A compromised proxy could send any address.
const NO_FLOW: &str = "no flow of a sandbox is open there";

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum SessionError {
    #[error("the control socket failed")]
    Io(#[from] std::io::Error),
    #[error("it sent a message that is not of this protocol")]
    Malformed,
    #[error("it sent a message of more than {MAX_MESSAGE} bytes")]
    TooLong,
    #[error("it does not read its responses")]
    Stuck,
    #[error("it closed its control socket")]
    Closed,
}

/// Handles the proxy's requests.
pub(super) trait Answers: Send + Sync + 'static {
    /// The flow that was accepted from `peer`.
    fn flow(&self, peer: SocketAddr) -> Option<Flow>;
    /// The sandbox of the flow that was accepted from `peer`, if that flow is still open.
    fn sandbox(&self, peer: SocketAddr) -> Option<SandboxId>;
    /// Whether `peer` belongs to a sandbox of the previous server that is being adopted. [`Answers::flow`] finds its
    /// flow afterwards.
    fn awaits_adoption(&self, peer: SocketAddr) -> bool;
    /// The rule of a sandbox for a host.
    fn rule(
        &self,
        sandbox: SandboxId,
        host: String,
        ask: Ask,
    ) -> impl Future<Output = RuleOutcome> + Send;
    /// How connections of a sandbox are routed out.
    fn way(&self, sandbox: SandboxId) -> impl Future<Output = Way> + Send;
    fn call(&self, sandbox: SandboxId, call: Call);
    fn lost(&self, calls: u64);
}

/// A message to write.
enum Reply {
    /// The flow is looked up when the message is written, so that a result from before a cut is never written after it.
    Flow {
        id: u64,
        peer: SocketAddr,
    },
    Rule {
        id: u64,
        outcome: RuleOutcome,
    },
    Way {
        id: u64,
        way: Way,
    },
}

impl Reply {
    fn message<A: Answers>(self, answers: &A) -> ToProxy {
        match self {
            Self::Flow { id, peer } => ToProxy::Flow {
                id,
                flow: answers.flow(peer),
            },
            Self::Rule { id, outcome } => ToProxy::Rule { id, outcome },
            Self::Way { id, way } => ToProxy::Way { id, way },
        }
    }
}

/// Serves a proxy until it or its socket fails. `cuts` are sandboxes whose connections must be closed.
pub(super) async fn run<A: Answers>(
    control: impl AsyncRead + AsyncWrite + Send + Unpin,
    authority: &Authority,
    answers: Arc<A>,
    cuts: &mut mpsc::Receiver<SandboxId>,
) -> SessionError {
    let (reading, mut writing) = tokio::io::split(control);
    let start = ToProxy::Start {
        authority: authority.clone(),
    };
    if let Err(why) = write(&mut writing, start).await {
        return why;
    }
    let (send, mut queue) = mpsc::channel::<Reply>(WAITING);
    let asked = Arc::clone(&answers);
    let write_all = async {
        loop {
            let message = tokio::select! {
                Some(sandbox) = cuts.recv() => {
                    // The waiting responses were made before the cut, which must also end the connections that result
                    // from them.
                    for _ in 0..WAITING {
                        let Ok(waiting) = queue.try_recv() else {
                            break;
                        };
                        if let Err(why) = write(&mut writing, waiting.message(&*asked)).await {
                            return why;
                        }
                    }
                    ToProxy::Cut {
                        sandbox: sandbox.to_string(),
                    }
                }
                Some(reply) = queue.recv() => reply.message(&*asked),
                else => return SessionError::Closed,
            };
            if let Err(why) = write(&mut writing, message).await {
                return why;
            }
        }
    };
    tokio::select! {
        why = write_all => why,
        why = read_all(BufReader::new(reading), answers, send) => why,
    }
}

async fn write(
    writing: &mut (impl AsyncWrite + Unpin),
    mut message: ToProxy,
) -> Result<(), SessionError> {
    let mut line = Zeroizing::new(serde_json::to_vec(&message).map_err(std::io::Error::from)?);
    if let ToProxy::Rule {
        outcome: RuleOutcome::Headers { headers, .. },
        ..
    } = &mut message
    {
        headers.iter_mut().for_each(|(_, value)| value.zeroize());
    }
    line.push(b'\n');
    let written = timeout(PATIENCE, writing.write_all(&line)).await;
    Ok(written.map_err(|_| SessionError::Stuck)??)
}

async fn read_all<A: Answers>(
    mut reading: impl tokio::io::AsyncBufRead + Unpin,
    answers: Arc<A>,
    send: mpsc::Sender<Reply>,
) -> SessionError {
    let permits = Arc::new(Semaphore::new(CONCURRENT));
    let awaited = Arc::new(Semaphore::new(AWAITED));
    let mut line = Vec::new();
    loop {
        line.clear();
        let most = u64::try_from(MAX_MESSAGE).unwrap_or(u64::MAX);
        match (&mut reading).take(most).read_until(b'\n', &mut line).await {
            Ok(0) => return SessionError::Closed,
            Ok(_) if line.last() == Some(&b'\n') => {}
            Ok(length) if length == MAX_MESSAGE => return SessionError::TooLong,
            Ok(_) => return SessionError::Closed,
            Err(why) => return why.into(),
        }
        let Ok(message) = serde_json::from_slice(&line) else {
            return SessionError::Malformed;
        };
        match message {
            ToServer::Flow { id, peer } => {
                let place = if answers.awaits_adoption(peer) {
                    Arc::clone(&awaited).try_acquire_owned().ok()
                } else {
                    None
                };
                let Some(place) = place else {
                    if send.send(Reply::Flow { id, peer }).await.is_err() {
                        return SessionError::Closed;
                    }
                    continue;
                };
                let (answers, send) = (Arc::clone(&answers), send.clone());
                tasks::spawn(async move {
                    adopted(&*answers, peer).await;
                    let _ = send.send(Reply::Flow { id, peer }).await;
                    drop(place);
                });
            }
            ToServer::Rule {
                id,
                peer,
                host,
                ask,
            } => {
                let Ok(permit) = Arc::clone(&permits).acquire_owned().await else {
                    return SessionError::Closed;
                };
                let (answers, send) = (Arc::clone(&answers), send.clone());
                tasks::spawn(async move {
                    let outcome = match answers.sandbox(peer) {
                        Some(sandbox) => answers.rule(sandbox, host, ask).await,
                        None => RuleOutcome::Failed {
                            rule: String::new(),
                            reason: NO_FLOW.to_owned(),
                        },
                    };
                    // If the session has ended, nothing waits for the response.
                    let _ = send.send(Reply::Rule { id, outcome }).await;
                    drop(permit);
                });
            }
            ToServer::Way { id, peer } => {
                let Ok(permit) = Arc::clone(&permits).acquire_owned().await else {
                    return SessionError::Closed;
                };
                let (answers, send) = (Arc::clone(&answers), send.clone());
                tasks::spawn(async move {
                    let way = match answers.sandbox(peer) {
                        Some(sandbox) => answers.way(sandbox).await,
                        None => Way::Failed {
                            reason: NO_FLOW.to_owned(),
                        },
                    };
                    let _ = send.send(Reply::Way { id, way }).await;
                    drop(permit);
                });
            }
            ToServer::Call(call) => match call.sandbox.parse() {
                Ok(sandbox) => answers.call(sandbox, call),
                Err(_) => return SessionError::Malformed,
            },
            ToServer::Lost { calls } => answers.lost(calls),
        }
    }
}

/// Waits until the sandbox behind `peer` is adopted, up to a limit.
async fn adopted(answers: &impl Answers, peer: SocketAddr) {
    let adopted = async {
        while answers.awaits_adoption(peer) {
            sleep(ADOPTION_POLL).await;
        }
    };
    // Without an adoption there is no flow, and the connection is closed.
    let _ = timeout(ADOPTION, adopted).await;
}

#[cfg(test)]
pub(super) mod tests;
