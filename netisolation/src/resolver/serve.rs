//! Serves queries on UDP and TCP sockets.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use ranges::Protocol;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::{Semaphore, watch},
    task::JoinSet,
    time::{MissedTickBehavior, interval, sleep, timeout},
};

use super::{
    Client, Decision, Resolver,
    guard::Place,
    query::{self, MAX_MESSAGE, MAX_QUERY, PLAIN_DATAGRAM},
};
use crate::ResolverSockets;

/// Timeout for receiving a complete message on a connection, and for sending a reply.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of connections on one listener, across all sandboxes.
const MAX_CONNECTIONS: usize = 2048;
/// Longest wait for the adoption of a sandbox. On a busy host, a reload takes longer than the 5 seconds after which most
/// clients repeat a query.
const ADOPTION: Duration = Duration::from_secs(30);
const ADOPTION_POLL: Duration = Duration::from_millis(10);
/// Pause after a socket error.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// Interval at which totals of refusals are reported.
const SUM_INTERVAL: Duration = Duration::from_secs(1);

impl Resolver {
    /// Serves queries on these sockets until `stop` is set or its sender is dropped. From then on, queries wait in the
    /// sockets for the next server. This one finishes the queries that it has received, and closes its idle
    /// connections. If the future is dropped, queries in progress are lost. Several calls with different sockets may
    /// run concurrently.
    ///
    /// # Errors
    /// Returns an error if a socket cannot be made non-blocking, duplicated or registered with the runtime.
    pub async fn serve(
        self: Arc<Self>,
        sockets: ResolverSockets,
        stop: watch::Receiver<bool>,
    ) -> io::Result<()> {
        let ResolverSockets { udp, tcp, proxy: _ } = sockets;
        udp.set_nonblocking(true)?;
        tcp.set_nonblocking(true)?;
        let replies = Replies(Arc::new(udp.try_clone()?));
        let udp = UdpSocket::from_std(udp)?;
        let tcp = TcpListener::from_std(tcp)?;
        let both = async {
            tokio::join!(
                Arc::clone(&self).serve_datagrams(udp, replies, stop.clone()),
                Arc::clone(&self).serve_connections(tcp, stop)
            )
        };
        tokio::select! {
            _ = both => Ok(()),
            never = self.report_sums() => match never {},
        }
    }

    async fn serve_datagrams(
        self: Arc<Self>,
        udp: UdpSocket,
        replies: Replies,
        mut stop: watch::Receiver<bool>,
    ) {
        let mut tasks = JoinSet::new();
        // One byte more than the limit, to recognize queries that are too long.
        let mut buffer = vec![0; MAX_QUERY + 1];
        loop {
            while tasks.try_join_next().is_some() {}
            let received = tokio::select! {
                biased;
                () = stopped(&mut stop) => break,
                received = udp.recv_from(&mut buffer) => received,
            };
            let (length, source) = match received {
                Ok(received) => received,
                Err(_) => {
                    sleep(RETRY_PAUSE).await;
                    continue;
                }
            };
            let bytes = buffer.get(..length).unwrap_or_default();
            let (resolver, replies) = (Arc::clone(&self), replies.clone());
            match self.decide(source, Protocol::Udp, bytes) {
                Decision::Wait => {
                    let bytes = bytes.to_vec();
                    tasks.spawn(async move {
                        if let Some(_place) = resolver.adopted(source).await {
                            let decision = resolver.decide(source, Protocol::Udp, &bytes);
                            resolver.reply(decision, source, &replies).await;
                        }
                    });
                }
                decision @ Decision::Resolve(_) => {
                    tasks.spawn(async move { resolver.reply(decision, source, &replies).await });
                }
                decision => self.reply(decision, source, &replies).await,
            }
        }
        while tasks.join_next().await.is_some() {}
    }

    async fn reply(&self, decision: Decision, source: SocketAddr, replies: &Replies) {
        match decision {
            Decision::Ignore | Decision::Wait => {}
            Decision::Reply(reply) => replies.send(source, query::encode(&reply, PLAIN_DATAGRAM)),
            Decision::Resolve(pending) => {
                let reply = self.resolve(&pending).await;
                let most = pending.question.max_datagram();
                if self.is_current(source, &pending.client) {
                    replies.send(source, query::encode(&reply, most));
                }
            }
        }
    }

    /// Waits until the sandbox behind `source` is adopted. `None` if that takes too long, or too many of its queries wait.
    async fn adopted(&self, source: SocketAddr) -> Option<Place> {
        let place = self.guard().hold(source.ip())?;
        let adopted = async {
            while (self.hooks.is_awaited)(source) {
                sleep(ADOPTION_POLL).await;
            }
        };
        timeout(ADOPTION, adopted).await.ok()?;
        Some(place)
    }

    async fn serve_connections(self: Arc<Self>, tcp: TcpListener, mut stop: watch::Receiver<bool>) {
        let mut tasks = JoinSet::new();
        let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            while tasks.try_join_next().is_some() {}
            let accepted = tokio::select! {
                biased;
                () = stopped(&mut stop) => break,
                accepted = tcp.accept() => accepted,
            };
            let (stream, source) = match accepted {
                Ok(accepted) => accepted,
                Err(_) => {
                    sleep(RETRY_PAUSE).await;
                    continue;
                }
            };
            // Without a permit the connection is closed.
            let Ok(permit) = Arc::clone(&permits).try_acquire_owned() else {
                continue;
            };
            let (resolver, stop) = (Arc::clone(&self), stop.clone());
            tasks.spawn(async move {
                resolver.serve_connection(stream, source, stop).await;
                drop(permit);
            });
        }
        while tasks.join_next().await.is_some() {}
    }

    /// Serves the messages of a connection in order. Ends the connection after an error, a timeout or an ignored
    /// message, when the TAP has another sandbox, and when the server stops and no message has arrived. Refuses it if
    /// the sandbox has too many connections.
    async fn serve_connection(
        &self,
        mut stream: TcpStream,
        source: SocketAddr,
        mut stop: watch::Receiver<bool>,
    ) {
        if (self.hooks.is_awaited)(source) && self.adopted(source).await.is_none() {
            return;
        }
        let Some(client) = (self.hooks.client)(source) else {
            return;
        };
        let Some(_permit) = self.guard().connect(&client.sandbox, Instant::now()) else {
            return;
        };
        loop {
            let arrived = tokio::select! {
                biased;
                arrived = timeout(IDLE_TIMEOUT, stream.readable()) => arrived,
                () = stopped(&mut stop) => return,
            };
            let Ok(Ok(())) = arrived else {
                return;
            };
            let Ok(Ok(message)) = timeout(IDLE_TIMEOUT, receive(&mut stream)).await else {
                return;
            };
            if !self.is_current(source, &client) {
                return;
            }
            let reply = match self.decide(source, Protocol::Tcp, &message) {
                Decision::Ignore | Decision::Wait => return,
                Decision::Reply(reply) => reply,
                Decision::Resolve(pending) => self.resolve(&pending).await,
            };
            let Some(reply) = query::encode(&reply, MAX_MESSAGE) else {
                return;
            };
            if !self.is_current(source, &client) {
                return;
            }
            let Ok(Ok(())) = timeout(IDLE_TIMEOUT, send(&mut stream, &reply)).await else {
                return;
            };
        }
    }

    /// Whether `source` still belongs to the client's sandbox. During an upstream query, which can take seconds, the
    /// TAP may get another sandbox.
    fn is_current(&self, source: SocketAddr, client: &Client) -> bool {
        (self.hooks.client)(source).is_some_and(|now| now.sandbox == client.sandbox)
    }

    /// Reports totals of refusals forever.
    async fn report_sums(&self) -> Infallible {
        let mut ticks = interval(SUM_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let events = self.guard().take_sums(Instant::now());
            for (tap, event) in events {
                (self.hooks.refused)(tap, event);
            }
        }
    }
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error means that the sender was dropped.
    let _either = stop.wait_for(|is_set| *is_set).await;
}

/// The UDP socket for replies.
#[derive(Clone)]
struct Replies(Arc<std::net::UdpSocket>);

impl Replies {
    /// Does not block, so that a guest that accepts no packets cannot delay others. A reply that cannot be sent is
    /// lost, which UDP clients must expect.
    fn send(&self, to: SocketAddr, reply: Option<Vec<u8>>) {
        if let Some(reply) = reply {
            let _lost = self.0.send_to(&reply, to);
        }
    }
}

/// Receives a message that is prefixed with its length in two bytes (RFC 1035, 4.2.2).
async fn receive(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let length = usize::from(stream.read_u16().await?);
    if length > MAX_QUERY {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut message = vec![0; length];
    stream.read_exact(&mut message).await?;
    Ok(message)
}

/// Sends a reply, prefixed with its length in two bytes.
async fn send(stream: &mut TcpStream, reply: &[u8]) -> io::Result<()> {
    let length = u16::try_from(reply.len()).map_err(io::Error::other)?;
    stream
        .write_all(&[&length.to_be_bytes(), reply].concat())
        .await
}
