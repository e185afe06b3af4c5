//! A resolver on loopback. The address 127.0.1.N represents TAP N.

use std::{
    collections::{HashMap, HashSet},
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex},
    time::Duration,
};

use hickory_proto::{
    op::{Message, Query, ResponseCode},
    rr::{Name, RecordType},
};
use model::SandboxId;
use netisolation::{
    Client, ForbiddenAddresses, Hooks, IsolationError, NetEvent, Policy, Reason, Resolver,
    ResolverConfig, ResolverSockets, TapIndex,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream, UdpSocket},
    sync::watch,
    time::{sleep, timeout},
};

/// Deadline for anything that a test waits for.
const PATIENCE: Duration = Duration::from_secs(60);

/// A call of the hook `pin`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pinned {
    pub(crate) tap: u32,
    pub(crate) address: IpAddr,
    pub(crate) name: String,
    pub(crate) ttl_s: u64,
}

#[derive(Default)]
struct State {
    clients: HashMap<IpAddr, Client>,
    /// TAPs whose sandboxes are being adopted.
    awaited: HashSet<IpAddr>,
    /// Clients whose adoption ends just before the resolver asks whether they are awaited.
    adopted_when_asked: HashMap<IpAddr, Client>,
    pinned: Vec<Pinned>,
    is_full: bool,
    events: Vec<NetEvent>,
}

#[derive(Clone)]
pub(crate) struct World {
    state: Arc<Mutex<State>>,
    address: SocketAddr,
    running: watch::Sender<bool>,
}

impl World {
    pub(crate) fn start(dns_servers: Vec<SocketAddr>) -> Self {
        Self::start_with(dns_servers, ForbiddenAddresses::default())
    }

    pub(crate) fn start_with(dns_servers: Vec<SocketAddr>, forbidden: ForbiddenAddresses) -> Self {
        let (udp, tcp) = sockets();
        let (running, stop) = watch::channel(false);
        let world = Self {
            state: Arc::default(),
            address: udp.local_addr().unwrap(),
            running,
        };
        let config = ResolverConfig {
            dns_servers,
            forbidden,
        };
        let resolver = Arc::new(Resolver::new(config, world.hooks()));
        tokio::spawn(resolver.serve(
            ResolverSockets {
                udp,
                tcp,
                proxy: None,
            },
            stop,
        ));
        world
    }

    fn hooks(&self) -> Hooks {
        let (clients, pins, events) = (self.clone(), self.clone(), self.clone());
        let awaited = self.clone();
        Hooks {
            client: Box::new(move |source| {
                clients
                    .state
                    .lock()
                    .unwrap()
                    .clients
                    .get(&source.ip())
                    .cloned()
            }),
            is_awaited: Box::new(move |source| {
                let mut state = awaited.state.lock().unwrap();
                if let Some(client) = state.adopted_when_asked.remove(&source.ip()) {
                    state.clients.insert(source.ip(), client);
                }
                state.awaited.contains(&source.ip())
            }),
            pin: Box::new(move |client, address, name, ttl| pins.pin(client, address, name, ttl)),
            refused: Box::new(move |_, event| events.state.lock().unwrap().events.push(event)),
        }
    }

    fn pin(
        &self,
        client: &Client,
        address: IpAddr,
        name: &str,
        ttl: Duration,
    ) -> Result<(), IsolationError> {
        let mut state = self.state.lock().unwrap();
        if state.is_full {
            return Err(IsolationError::Exhausted(1));
        }
        state.pinned.push(Pinned {
            tap: client.tap.0,
            address,
            name: name.into(),
            ttl_s: ttl.as_secs(),
        });
        Ok(())
    }

    /// Assigns TAP `n` to sandbox `n` with this policy.
    pub(crate) fn confine(&self, n: u8, policy: Policy) {
        self.hand_over(n, n, policy);
    }

    /// Assigns TAP `n` to sandbox `to`.
    pub(crate) fn hand_over(&self, n: u8, to: u8, policy: Policy) {
        let client = client(n, to, policy);
        let mut state = self.state.lock().unwrap();
        state.awaited.remove(&source(n));
        state.clients.insert(source(n), client);
    }

    /// TAP `n` belongs to a sandbox of the previous server, until [`Self::confine`].
    pub(crate) fn expect(&self, n: u8) {
        self.state.lock().unwrap().awaited.insert(source(n));
    }

    /// TAP `n` belongs to a sandbox of the previous server until the resolver asks about it.
    pub(crate) fn adopt_when_asked(&self, n: u8, policy: Policy) {
        let mut state = self.state.lock().unwrap();
        let client = client(n, n, policy);
        state.adopted_when_asked.insert(source(n), client);
    }

    /// Stops the resolver.
    pub(crate) fn stop(&self) {
        self.running.send_replace(true);
    }

    /// Waits until the resolver has ended.
    pub(crate) async fn ended(&self) {
        timeout(PATIENCE, self.running.closed()).await.unwrap();
    }

    /// Makes further pins fail.
    pub(crate) fn fill(&self) {
        self.state.lock().unwrap().is_full = true;
    }

    pub(crate) fn pinned(&self) -> Vec<Pinned> {
        self.state.lock().unwrap().pinned.clone()
    }

    pub(crate) fn events(&self) -> Vec<NetEvent> {
        self.state.lock().unwrap().events.clone()
    }

    /// Waits for an event with this reason.
    pub(crate) async fn event(&self, reason: Reason) -> NetEvent {
        let found = || {
            self.events()
                .into_iter()
                .find(|event| event.reason == reason)
        };
        until(async || found()).await
    }

    /// A UDP socket with the address of TAP `n`.
    pub(crate) async fn socket(&self, n: u8) -> UdpSocket {
        let socket = UdpSocket::bind((source(n), 0)).await.unwrap();
        socket.connect(self.address).await.unwrap();
        socket
    }

    pub(crate) async fn connect(&self, n: u8) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((source(n), 0).into()).unwrap();
        timeout(PATIENCE, socket.connect(self.address))
            .await
            .unwrap()
            .unwrap()
    }

    /// Queries over UDP.
    pub(crate) async fn ask(&self, n: u8, name: &str, kind: RecordType) -> Message {
        let socket = self.socket(n).await;
        socket.send(&query(name, kind)).await.unwrap();
        let mut buffer = [0; 4096];
        let received = timeout(PATIENCE, socket.recv(&mut buffer)).await;
        let length = received.unwrap().unwrap();
        Message::from_vec(&buffer[..length]).unwrap()
    }

    pub(crate) async fn code(&self, n: u8, name: &str, kind: RecordType) -> ResponseCode {
        self.ask(n, name, kind).await.metadata.response_code
    }

    /// The IPv4 addresses in an answer, which must have no error.
    pub(crate) async fn addresses(&self, n: u8, name: &str) -> Vec<IpAddr> {
        addresses(&self.ask(n, name, RecordType::A).await)
    }
}

/// Queries on a TCP connection. `None` if it was closed.
pub(crate) async fn ask_on(
    stream: &mut TcpStream,
    name: &str,
    kind: RecordType,
) -> Option<Message> {
    let query = query(name, kind);
    let length = u16::try_from(query.len()).unwrap();
    stream
        .write_all(&[&length.to_be_bytes()[..], &query].concat())
        .await
        .ok()?;
    let reading = async {
        let length = stream.read_u16().await.ok()?;
        let mut reply = vec![0; length.into()];
        stream.read_exact(&mut reply).await.ok()?;
        Message::from_vec(&reply).ok()
    };
    timeout(PATIENCE, reading).await.unwrap()
}

pub(crate) fn addresses(reply: &Message) -> Vec<IpAddr> {
    assert_eq!(reply.metadata.response_code, ResponseCode::NoError);
    let address = |record: &hickory_proto::rr::Record| record.data.ip_addr().unwrap();
    reply.answers.iter().map(address).collect()
}

pub(crate) fn query(name: &str, kind: RecordType) -> Vec<u8> {
    let mut message = Message::query();
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
    message.to_vec().unwrap()
}

/// Waits until `found` returns a value.
pub(crate) async fn until<T>(found: impl AsyncFn() -> Option<T>) -> T {
    let waiting = async {
        loop {
            if let Some(found) = found().await {
                return found;
            }
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, waiting).await.unwrap()
}

pub(crate) fn names(patterns: &[&str]) -> Policy {
    Policy {
        names: patterns
            .iter()
            .map(|pattern| pattern.parse().unwrap())
            .collect(),
        ..Policy::default()
    }
}

pub(crate) fn sandbox(n: u8) -> SandboxId {
    SandboxId::from_random([n; 19])
}

fn client(n: u8, of: u8, policy: Policy) -> Client {
    Client {
        tap: TapIndex(n.into()),
        sandbox: sandbox(of),
        policy: Arc::new(policy),
    }
}

fn source(n: u8) -> IpAddr {
    [127, 0, 1, n].into()
}

fn sockets() -> (std::net::UdpSocket, std::net::TcpListener) {
    loop {
        let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        if let Ok(tcp) = std::net::TcpListener::bind(udp.local_addr().unwrap()) {
            return (udp, tcp);
        }
    }
}
