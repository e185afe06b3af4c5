//! The DNS resolver, the only one that sandboxes can reach.
//!
//! The eBPF programs redirect port 53 of the gateway to the resolver's sockets, with a source address that identifies
//! the TAP. The policy of the TAP's sandbox decides whether a name is resolved upstream. Every address of the answer is
//! checked, and pinned for the sandbox if a pattern allowed the name, before the answer is sent.
//!
//! ```text
//! datagram, or message on a connection
//!    query::parse ─► guard::admit ─► decide ─► turn ─► upstream::ask ─► forbidden? ─► policy unchanged? ─► pin ─► reply
//!        │ FORMERR       │ REFUSED      │ REFUSED  │ REFUSED  │ SERVFAIL      │ REFUSED         │ REFUSED     │ SERVFAIL
//! ```
//!
//! What must never happen: a name that the policy does not allow is sent upstream; an answer contains a forbidden
//! address, or the name matches a pattern and an address is not pinned yet; one sandbox's queries delay another's.

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
use ranges::{ForbiddenAddresses, Protocol};

use self::{
    guard::{Guard, Permit, Refusal},
    query::{Kind, Parsed, Question},
    upstream::{Outcome, Upstreams},
};
use crate::{
    error::IsolationError,
    events::event::{Direction, NetEvent, Reason},
    isolation::Isolation,
    policy::{Naming, Policy},
    taps::tap::TapIndex,
};

/// Shortest lifetime of a pin: clients connect some time after they resolve a name.
const MIN_PIN_TTL: Duration = Duration::from_secs(60);
/// Longest lifetime of answers and pins.
const MAX_TTL: Duration = Duration::from_secs(3600);

/// The sender of a query.
#[derive(Clone, Debug)]
pub struct Client {
    pub tap: TapIndex,
    /// The sandbox that currently uses the TAP.
    pub sandbox: SandboxId,
    /// The sandbox's current policy.
    pub policy: Arc<Policy>,
}

/// Finds the client with a source address. `None`: the address belongs to no sandbox, and its queries are not answered.
pub type FindClient = dyn Fn(SocketAddr) -> Option<Client> + Send + Sync;
/// Allows a client to reach an address that a name resolved to, for the given time. Returns an error if the TAP now
/// belongs to another sandbox, no pattern of the policy matches the name any longer, the client has too many pins, or a
/// system call fails.
pub type Pin = dyn Fn(&Client, IpAddr, &str, Duration) -> Result<(), IsolationError> + Send + Sync;

/// The resolver's interface to the TAPs and to the log of refusals.
pub struct Hooks {
    pub client: Box<FindClient>,
    /// Whether a source address that `client` does not find belongs to a sandbox of the previous server that is being
    /// adopted. Its queries wait until `client` finds it.
    pub is_awaited: Box<dyn Fn(SocketAddr) -> bool + Send + Sync>,
    pub pin: Box<Pin>,
    /// Counts and reports refused queries of a TAP's sandbox. Must not block.
    pub refused: Box<dyn Fn(TapIndex, NetEvent) + Send + Sync>,
}

impl Hooks {
    /// Hooks that call an [`Isolation`].
    #[must_use]
    pub fn of(isolation: &Isolation) -> Self {
        let (clients, pins, refused) = (isolation.clone(), isolation.clone(), isolation.clone());
        let awaited = isolation.clone();
        Self {
            client: Box::new(move |source| {
                let (tap, sandbox, policy) = clients.tap_of(source)?;
                Some(Client {
                    tap,
                    sandbox,
                    policy,
                })
            }),
            is_awaited: Box::new(move |source| awaited.awaits_adoption(source)),
            pin: Box::new(move |client, address, name, ttl| {
                pins.pin(client.tap, &client.sandbox, address, name, ttl)
            }),
            refused: Box::new(move |tap, event| refused.record(tap, event)),
        }
    }
}

#[derive(Clone, Debug, Default)]
pub struct ResolverConfig {
    /// Upstream servers for sandboxes whose policy names none. Empty: the servers in /etc/resolv.conf at startup, which
    /// may be loopback addresses.
    pub dns_servers: Vec<SocketAddr>,
    /// Addresses that no answer contains and that no policy's DNS server has.
    pub forbidden: ForbiddenAddresses,
}

pub struct Resolver {
    hooks: Hooks,
    forbidden: ForbiddenAddresses,
    upstreams: Upstreams,
    guard: Mutex<Guard>,
}

/// The decision on a query.
enum Decision {
    /// No reply: the sender is not a sandbox, or the message is a response or too short.
    Ignore,
    /// The sender's sandbox is being adopted. Decide again afterwards.
    Wait,
    /// An immediate reply.
    Reply(Message),
    /// A query for an upstream server.
    Resolve(Box<PendingQuery>),
}

/// An allowed query. Counts as pending until it is dropped with its permit.
struct PendingQuery {
    source: SocketAddr,
    transport: Protocol,
    client: Client,
    question: Question,
    name: String,
    permit: Permit,
}

impl Resolver {
    /// Opens no sockets: the caller passes them to [`Self::serve`].
    #[must_use]
    pub fn new(config: ResolverConfig, hooks: Hooks) -> Self {
        Self {
            hooks,
            forbidden: config.forbidden,
            upstreams: Upstreams::new(config.dns_servers),
            guard: Mutex::default(),
        }
    }

    fn decide(&self, source: SocketAddr, transport: Protocol, bytes: &[u8]) -> Decision {
        let client = match (self.hooks.client)(source) {
            Some(client) => client,
            None if (self.hooks.is_awaited)(source) => return Decision::Wait,
            // The sandbox may have been adopted between the two lookups.
            None => match (self.hooks.client)(source) {
                Some(client) => client,
                None => return Decision::Ignore,
            },
        };
        let admitted = self.guard().admit(&client.sandbox, Instant::now());
        let question = match query::parse(bytes) {
            Parsed::Question(question) => question,
            Parsed::Invalid(reply) => {
                self.refuse(&client, source, transport, None, Reason::Malformed);
                return Decision::Reply(reply);
            }
            Parsed::Ignored => return Decision::Ignore,
        };
        let refused = |name: Option<String>, reason| {
            self.refuse(&client, source, transport, name, reason);
            Decision::Reply(question.reply(ResponseCode::Refused))
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
                Decision::Reply(question.reply(ResponseCode::NoError))
            }
            (Kind::Address(_), Naming::Answered | Naming::Pinned) => {
                Decision::Resolve(Box::new(PendingQuery {
                    source,
                    transport,
                    client,
                    question,
                    name,
                    permit,
                }))
            }
        }
    }

    async fn resolve(&self, query: &PendingQuery) -> Message {
        let Kind::Address(kind) = query.question.kind else {
            return query.question.reply(ResponseCode::Refused);
        };
        let _turn = query.permit.turn().await;
        let Some(client) = self.still_allowed(query) else {
            return query.question.reply(ResponseCode::Refused);
        };
        let Some(servers) = self.servers_of(&client.policy) else {
            return query.question.reply(ResponseCode::ServFail);
        };
        match self.upstreams.ask(&servers, &query.name, kind).await {
            Outcome::Addresses { addresses, ttl } => self.check_and_pin(query, &addresses, ttl),
            Outcome::None(code) => query.question.reply(code),
            Outcome::Failed => query.question.reply(ResponseCode::ServFail),
        }
    }

    /// The client of a query that has waited, unless its TAP has another sandbox or the policy no longer allows the name.
    fn still_allowed(&self, query: &PendingQuery) -> Option<Client> {
        let client = (self.hooks.client)(query.source)?;
        let is_same = client.sandbox == query.client.sandbox;
        let is_named = client.policy.naming(&query.name) != Naming::Refused;
        (is_same && is_named).then_some(client)
    }

    /// The policy's allowed DNS servers. Empty if it names none. `None` if it names only forbidden ones. They are
    /// checked for each query, because the host may have received an address since the client chose them.
    fn servers_of(&self, policy: &Policy) -> Option<Vec<SocketAddr>> {
        let servers = policy.dns_servers.iter().copied();
        let allowed = servers.filter(|server| self.forbidden.check_connection(*server).is_ok());
        let allowed: Vec<_> = allowed.collect();
        (!allowed.is_empty() || policy.dns_servers.is_empty()).then_some(allowed)
    }

    /// Checks the addresses of an upstream answer, pins them if a pattern allowed the name, and returns the reply.
    fn check_and_pin(&self, query: &PendingQuery, addresses: &[IpAddr], ttl: Duration) -> Message {
        let refused = |reason| {
            let name = Some(query.name.clone());
            self.refuse(&query.client, query.source, query.transport, name, reason);
            query.question.reply(ResponseCode::Refused)
        };
        if addresses
            .iter()
            .any(|address| self.forbidden.forbids(*address))
        {
            return refused(Reason::Rebinding);
        }
        // The policy or the TAP's sandbox may have changed during the upstream query.
        let client = (self.hooks.client)(query.source);
        let Some(client) = client.filter(|client| client.sandbox == query.client.sandbox) else {
            return query.question.reply(ResponseCode::Refused);
        };
        let ttl = ttl.min(MAX_TTL);
        match client.policy.naming(&query.name) {
            Naming::Refused => return refused(Reason::Name),
            Naming::Answered => {}
            Naming::Pinned => {
                let pin = |address: &IpAddr| {
                    (self.hooks.pin)(&client, *address, &query.name, ttl.max(MIN_PIN_TTL))
                };
                if addresses.iter().try_for_each(pin).is_err() {
                    let name = Some(query.name.clone());
                    self.refuse(
                        &client,
                        query.source,
                        query.transport,
                        name,
                        Reason::Internal,
                    );
                    return query.question.reply(ResponseCode::ServFail);
                }
            }
        }
        query.question.answer(addresses, ttl)
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

/// A refusal event with the addresses that the sandbox sees: its own and the gateway's.
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
