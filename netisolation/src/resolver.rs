//! Names for sandboxes: the only DNS that they have.
//!
//! The datapath brings port 53 of the gateway to our sockets, with a source address that names the TAP. A query is
//! judged by the policy of the TAP's sandbox; what is allowed is asked upstream, and every address of the answer is
//! checked, pinned for that sandbox if a pattern allowed the name, and only then told.
//!
//! ```text
//! datagram, or message on a connection
//!    query::parse ─► guard::admit ─► judge ─► upstream::ask ─► forbidden? ─► policy still so? ─► pin ─► reply
//!        │ FORMERR       │ REFUSED      │ REFUSED    │ SERVFAIL     │ REFUSED        │ REFUSED    │ SERVFAIL
//! ```
//!
//! What must never happen: a name that the policy has not is asked upstream; an address is told that is forbidden or
//! not yet pinned; a sandbox's queries keep another's waiting.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod guard;
mod query;
mod serve;
mod upstream;

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use hickory_proto::op::{Message, ResponseCode};
use model::{SandboxId, guest};

use self::{
    guard::{Guard, Permit, Refusal},
    query::{Kind, Parsed, Question},
    upstream::{Outcome, Upstreams},
};
use crate::{
    error::IsolationError,
    event::{Direction, NetEvent, Protocol, Reason},
    isolation::Isolation,
    policy::{Exception, Naming, Policy, is_forbidden},
    tap::TapIndex,
};

/// An address may be reached for at least this long after it was told: clients connect a while after they ask.
const PIN_FLOOR: Duration = Duration::from_secs(60);
/// Lifetimes of answers above this are cut to it, and so are pins.
const TTL_CEILING: Duration = Duration::from_secs(3600);

/// Who asks.
#[derive(Clone, Debug)]
pub struct Client {
    /// Its TAP.
    pub tap: TapIndex,
    /// The sandbox that has the TAP now.
    pub sandbox: SandboxId,
    /// The sandbox's policy of now.
    pub policy: Arc<Policy>,
}

/// Whose TAP a source address names; `None`: nobody's, and nothing is answered.
pub type FindClient = dyn Fn(SocketAddr) -> Option<Client> + Send + Sync;
/// Lets a client reach an address by a name for a time. Fails if the TAP has another sandbox or the policy has not the
/// name any more, or if the client has too many.
pub type Pin = dyn Fn(&Client, IpAddr, &str, Duration) -> Result<(), IsolationError> + Send + Sync;

/// What the resolver needs of the datapath and of the log.
pub struct Hooks {
    /// See [`FindClient`].
    pub client: Box<FindClient>,
    /// See [`Pin`].
    pub pin: Box<Pin>,
    /// Counts and records what was refused to the sandbox of a TAP; does not block.
    pub refused: Box<dyn Fn(TapIndex, NetEvent) + Send + Sync>,
}

impl Hooks {
    /// On the datapath.
    #[must_use]
    pub fn of(isolation: &Isolation) -> Self {
        let (clients, pins, refused) = (isolation.clone(), isolation.clone(), isolation.clone());
        Self {
            client: Box::new(move |source| {
                let (tap, sandbox, policy) = clients.tap_of(source)?;
                Some(Client {
                    tap,
                    sandbox,
                    policy,
                })
            }),
            pin: Box::new(move |client, address, name, ttl| {
                pins.pin(client.tap, &client.sandbox, address, name, ttl)
            }),
            refused: Box::new(move |tap, event| refused.record(tap, event)),
        }
    }
}

/// What the operator says about names.
#[derive(Clone, Debug, Default)]
pub struct ResolverConfig {
    /// Who is asked for sandboxes whose policy says nothing; empty: what /etc/resolv.conf says at the start, loopback
    /// included.
    pub dns_servers: Vec<SocketAddr>,
    /// Of the forbidden addresses, those that may be answered.
    pub exceptions: Vec<Exception>,
}

/// The resolver of an installation.
pub struct Resolver {
    hooks: Hooks,
    exceptions: Vec<Exception>,
    upstreams: Upstreams,
    guard: Mutex<Guard>,
}

/// What becomes of a query.
enum Judgement {
    /// No answer: nobody asked, or it is an answer itself.
    Silence,
    /// This, at once.
    Reply(Message),
    /// Upstream has to be asked.
    Ask(Box<Ask>),
}

/// An allowed question and its place in line.
struct Ask {
    source: SocketAddr,
    transport: Protocol,
    client: Client,
    question: Question,
    name: String,
    _permit: Permit,
}

impl Resolver {
    /// A resolver that nobody can reach yet.
    #[must_use]
    pub fn new(config: ResolverConfig, hooks: Hooks) -> Self {
        Self {
            hooks,
            exceptions: config.exceptions,
            upstreams: Upstreams::new(config.dns_servers),
            guard: Mutex::default(),
        }
    }

    fn judge(&self, source: SocketAddr, transport: Protocol, bytes: &[u8]) -> Judgement {
        let Some(client) = (self.hooks.client)(source) else {
            return Judgement::Silence;
        };
        let admitted = self.guard().admit(&client.sandbox, Instant::now());
        let question = match query::parse(bytes) {
            Parsed::Question(question) => question,
            Parsed::Wrong(reply) => {
                self.refuse(&client, source, transport, None, Reason::Malformed);
                return Judgement::Reply(reply);
            }
            Parsed::Nothing => return Judgement::Silence,
        };
        let refused = |name: Option<String>, reason| {
            self.refuse(&client, source, transport, name, reason);
            Judgement::Reply(question.reply(ResponseCode::Refused))
        };
        let Some(permit) = admitted else {
            return refused(None, Reason::Flows);
        };
        let Some(name) = question.name.clone() else {
            return refused(None, Reason::Name);
        };
        match (question.kind, client.policy.naming(&name)) {
            (Kind::Other, _) | (_, Naming::Refused) => refused(Some(name), Reason::Name),
            (Kind::Service, Naming::Answered | Naming::Pinned) => {
                Judgement::Reply(question.reply(ResponseCode::NoError))
            }
            (Kind::Address(_), Naming::Answered | Naming::Pinned) => {
                Judgement::Ask(Box::new(Ask {
                    source,
                    transport,
                    client,
                    question,
                    name,
                    _permit: permit,
                }))
            }
        }
    }

    async fn resolve(&self, ask: &Ask) -> Message {
        let Kind::Address(kind) = ask.question.kind else {
            return ask.question.reply(ResponseCode::Refused);
        };
        let servers = &ask.client.policy.dns_servers;
        match self.upstreams.ask(servers, &ask.name, kind).await {
            Outcome::Addresses { addresses, ttl } => self.tell(ask, &addresses, ttl),
            Outcome::None(code) => ask.question.reply(code),
            Outcome::Failed => ask.question.reply(ResponseCode::ServFail),
        }
    }

    /// The answer, after everything that has to be done before anybody hears it.
    fn tell(&self, ask: &Ask, addresses: &[IpAddr], ttl: Duration) -> Message {
        let refused = |reason| {
            let name = Some(ask.name.clone());
            self.refuse(&ask.client, ask.source, ask.transport, name, reason);
            ask.question.reply(ResponseCode::Refused)
        };
        if addresses
            .iter()
            .any(|address| is_forbidden(*address, &self.exceptions))
        {
            return refused(Reason::Rebinding);
        }
        // The policy may have changed, and so may the TAP's sandbox, while upstream was asked.
        let client = (self.hooks.client)(ask.source);
        let Some(client) = client.filter(|client| client.sandbox == ask.client.sandbox) else {
            return ask.question.reply(ResponseCode::Refused);
        };
        let ttl = ttl.min(TTL_CEILING);
        match client.policy.naming(&ask.name) {
            Naming::Refused => return refused(Reason::Name),
            Naming::Answered => {}
            Naming::Pinned => {
                let pin = |address: &IpAddr| {
                    (self.hooks.pin)(&client, *address, &ask.name, ttl.max(PIN_FLOOR))
                };
                if addresses.iter().try_for_each(pin).is_err() {
                    let name = Some(ask.name.clone());
                    self.refuse(&client, ask.source, ask.transport, name, Reason::Internal);
                    return ask.question.reply(ResponseCode::ServFail);
                }
            }
        }
        ask.question.answer(addresses, ttl)
    }

    fn refuse(
        &self,
        client: &Client,
        source: SocketAddr,
        transport: Protocol,
        name: Option<String>,
        reason: Reason,
    ) {
        let refusal = Refusal {
            tap: client.tap,
            event: event(client, source, transport, name, reason),
            at: Instant::now(),
        };
        let first = self.guard().refuse(refusal);
        if let Some(event) = first {
            (self.hooks.refused)(client.tap, event);
        }
    }

    fn guard(&self) -> MutexGuard<'_, Guard> {
        self.guard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// As the sandbox sees it: between its own address and the gateway.
fn event(
    client: &Client,
    source: SocketAddr,
    protocol: Protocol,
    name: Option<String>,
    reason: Reason,
) -> NetEvent {
    let (own, gateway): (IpAddr, IpAddr) = match source.ip().to_canonical() {
        IpAddr::V4(_) => (guest::IPV4.into(), guest::GATEWAY4.into()),
        IpAddr::V6(_) => (guest::IPV6.into(), guest::GATEWAY6.into()),
    };
    NetEvent {
        sandbox: client.sandbox.clone(),
        time: SystemTime::now(),
        direction: Direction::Out,
        protocol,
        source: SocketAddr::new(own, source.port()),
        destination: SocketAddr::new(gateway, 53),
        reason,
        name,
        count: 1,
    }
}
